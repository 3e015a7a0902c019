"""What the trainer's checkpoints hold, which of them is resumed, and what a resumed run may change."""

from __future__ import annotations

import errno
import json
import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer import log_of

from contaccum import ContAccumTrainer
from contaccum.cli import main
from contaccum.errors import UserError
from contaccum.training import checkpoints
from contaccum.training.checkpoint_folder import fault_of
from contaccum.training.trainer import BANK_FILE

SAVES = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def ended_once(trainer_in: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trainer_in(folder, **SAVES).train()
    return folder


@pytest.fixture
def ended(ended_once: Path, tmp_path: Path) -> Path:
    """A run of three updates with a checkpoint each."""
    shutil.copytree(ended_once, tmp_path / "run")
    return tmp_path / "run"


def test_checkpoint_holds_safetensors_and_json_alone(ended: Path) -> None:
    folder = ended / "checkpoint-2"
    assert fault_of(folder) is None
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {path.suffix for path in map(Path, files)} <= {".safetensors", ".json", ".md", ".txt"}
    assert files >= {
        "optimizer.safetensors",
        "scheduler.json",
        "random_states_0.safetensors",
        "trainer_state.json",
        "training_args.json",
        "checkpoint.json",
        "manifest.json",
        BANK_FILE,
    }
    assert json.loads((folder / "training_args.json").read_text())["method"] == "contaccum"


def test_last_valid_checkpoint_is_resumed_and_the_others_are_named(
    trainer_in: Any, ended: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (ended / "checkpoint-3" / BANK_FILE).unlink()
    (ended / "checkpoint-2" / "optimizer.pt").write_bytes(pickle.dumps({}))
    resumed = trainer_in(ended, **SAVES)
    resumed.quiet = False
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint="last")
    assert f"passed over {ended / 'checkpoint-3'}: {BANK_FILE} is missing" in caplog.text
    assert f"passed over {ended / 'checkpoint-2'}: optimizer.pt is of a kind that can hold code" in caplog.text
    assert f"resuming from        {ended / 'checkpoint-1'} (after 1 updates)" in capsys.readouterr().out
    # Each update has one line in the log, though two were done twice; what was damaged is whole again.
    assert [line["update"] for line in log_of(ended)] == [1, 2, 3]
    assert [fault_of(ended / f"checkpoint-{update}") for update in (1, 2, 3)] == [None] * 3
    with pytest.raises(UserError, match=r"cannot be resumed from: scheduler\.json is missing"):
        (ended / "checkpoint-3" / "scheduler.json").unlink()
        trainer_in(ended, **SAVES).train(resume_from_checkpoint=str(ended / "checkpoint-3"))


def test_auto_starts_where_there_is_nothing_to_resume(trainer_in: Any, tmp_path: Path) -> None:
    trainer_in(tmp_path, max_steps=1, **SAVES).train(resume_from_checkpoint="auto")
    again = trainer_in(tmp_path, max_steps=2, **SAVES)
    again.train(resume_from_checkpoint="auto")
    assert again.state.global_step == 2 and [line["update"] for line in log_of(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    ("changed", "shown", "reason"),
    [
        ({"bank_size": 30}, "bank_size: 20 -> 30", "cannot go on with other settings"),
        ({"method": "pre_batch"}, "method: contaccum -> pre_batch", "cannot go on with other settings"),
        ({"temperature": 0.1}, "temperature: null -> 0.1", "cannot go on with other settings"),
        ({"rows": 40}, "rows: 36 -> 40", "place in the data means nothing"),
        ({"seed": 6}, "seed: 5 -> 6", "place in the data means nothing"),
        ({"gradient_accumulation_steps": 2}, "pairs per update: 12 -> 8", "place in the data means nothing"),
    ],
)
def test_change_that_cannot_work_is_refused_by_name(
    trainer_in: Any, ended: Path, changed: dict[str, Any], shown: str, reason: str
) -> None:
    with pytest.raises(UserError, match=reason) as refusal:
        trainer_in(ended, **changed, **SAVES).train(resume_from_checkpoint="last")
    assert shown in str(refusal.value)
    assert ("--resume_with_changes" in str(refusal.value)) == (reason.startswith("place"))


def test_other_changes_are_listed_and_the_run_goes_on(
    trainer_in: Any, ended: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resumed = trainer_in(ended, rows=40, resume_with_changes=True, learning_rate=5e-4, warmup_steps=1, **SAVES)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=str(ended / "checkpoint-1"))
    changes = [line.split(": ", 1)[1] for line in caplog.messages if line.startswith("changed since checkpoint-1: ")]
    assert "rows: 36 -> 40" in changes and "warmup_steps: 2 -> 1" in changes
    assert "learning_rate: 0.001 -> 0.0005 (the checkpoint's stays in force)" in changes
    assert len([line for line in changes if line.startswith("data fingerprint: ")]) == 1 and len(changes) == 4
    assert resumed.lr_scheduler.base_lrs == [1e-3] * len(resumed.lr_scheduler.base_lrs)


def test_micro_batches_of_another_size_go_on_at_the_same_pair(trainer_in: Any, ended: Path) -> None:
    resumed = trainer_in(ended, per_device_train_batch_size=6, gradient_accumulation_steps=2, **SAVES)
    seen: list[int] = []
    resumed.get_batch_samples = lambda *given: _noted(ContAccumTrainer.get_batch_samples(resumed, *given), seen)
    resumed.train(resume_from_checkpoint=str(ended / "checkpoint-1"))
    assert seen == [12, 12] and resumed.state.global_step == 3


def _noted(batches: Any, seen: list[int]) -> Any:
    seen.append(sum(len(batch["query_input_ids"]) for batch in batches[0]))
    return batches


def test_weights_of_another_model_are_refused(trainer_in: Any, ended: Path) -> None:
    other = trainer_in(ended, tied=False, **SAVES)
    with pytest.raises(UserError, match="its weights are of another model"):
        other.train(resume_from_checkpoint="last")


def test_full_disk_leaves_the_last_good_checkpoint_and_one_line(
    trainer_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, save = trainer_in(tmp_path, **SAVES), checkpoints.save_state

    def full(path: Any, state: Any) -> None:
        if trainer.state.global_step == 2 and "optimizer" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(path, state)

    monkeypatch.setattr(checkpoints, "save_state", full)
    with pytest.raises(UserError) as line:
        trainer.train()
    assert str(line.value).startswith(f"checkpoint-2 could not be written: no room on the disk of {tmp_path}")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1", "run.json", "train_log.jsonl"]
    monkeypatch.undo()
    trainer_in(tmp_path, **SAVES).train(resume_from_checkpoint="last")
    assert [line["update"] for line in log_of(tmp_path)] == [1, 2, 3]


def test_log_line_cut_by_a_full_disk_is_dropped_on_resume(trainer_in: Any, ended: Path) -> None:
    lines = (ended / "train_log.jsonl").read_text().splitlines(keepends=True)
    (ended / "train_log.jsonl").write_text("".join(lines[:2]) + lines[2][:20])
    trainer_in(ended, **SAVES).train(resume_from_checkpoint=str(ended / "checkpoint-2"))
    assert [line["update"] for line in log_of(ended)] == [1, 2, 3]


def test_older_checkpoints_go_only_once_a_newer_one_is_whole(
    trainer_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[list[str]] = []
    rotate = checkpoints.rotate_checkpoints

    def watched(*args: Any, **kwargs: Any) -> None:
        there.append(sorted(path.name for path in tmp_path.glob("checkpoint-*") if fault_of(path) is None))
        rotate(*args, **kwargs)

    monkeypatch.setattr(checkpoints, "rotate_checkpoints", watched)
    trainer_in(tmp_path, save_total_limit=1, **SAVES).train()
    assert there == [["checkpoint-1"], ["checkpoint-1", "checkpoint-2"], ["checkpoint-2", "checkpoint-3"]]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


def test_best_checkpoint_is_known_by_its_place(trainer_in: Any, tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 1}
    trainer = trainer_in(tmp_path, **settings, **SAVES)
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert best is not None and Path(best).parent == tmp_path and fault_of(Path(best)) is None
    newest = max(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    assert json.loads((newest / "trainer_state.json").read_text())["best_model_checkpoint"] == best


def test_saving_draws_no_random_number(trainer_in: Any, tmp_path: Path) -> None:
    states = []
    for folder, strategy in (("saves", "steps"), ("does_not", "no")):
        trainer_in(tmp_path / folder, save_strategy=strategy).train()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_command_says_in_one_line_why_a_checkpoint_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"query": "a", "positive": "b"}\n')
    given = ["train", "--model", "none", "--train_data", str(data), "--output_dir", str(tmp_path / "run")]
    assert main([*given, "--resume_from_checkpoint=last"]) == 2
    assert "no checkpoint to resume from" in capsys.readouterr().err
