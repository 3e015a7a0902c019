"""Which checkpoints are whole, which is resumed, what a resumed run may change; kills and signals at any instant."""

import errno
import json
import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import RUN, SAVES, call_at_micro_step, list_differences, read_log, get_state, make_trainer

from contaccum.errors import UserError
from contaccum.training import checkpoint
from contaccum.training.checkpoint import (
    BANK_FILE,
    MARKER,
    find_defect,
    find_checkpoints,
    remove_oldest,
    write_marker,
)


@pytest.fixture
def ended(run, tmp_path) -> Path:
    """The folder of a run of eight updates, with its last three checkpoints."""
    folder, _, _ = run
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-[1-5]"))
    return tmp_path / "run"


def test_a_checkpoint_holds_transformers_files_the_bank_and_what_identifies_the_run(run):
    folder = run[0] / "checkpoint-2"
    assert find_defect(folder) is None
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files >= {
        "model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "trainer_state.json",
    }
    assert files >= {BANK_FILE, MARKER} and "training_args.bin" not in files
    marker = json.loads((folder / MARKER).read_text())
    assert (
        marker["contaccum"] and marker["update"] == 2 and marker["files"].keys() == files - {MARKER}
    )
    assert (
        marker["settings"]["pairs per update"] == 12
        and len(marker["settings"]["data fingerprint"]) == 64
    )
    for name in ("optimizer.pt", "scheduler.pt"):  # as a checkpoint from somebody else is loaded
        torch.load(folder / name, weights_only=True)


def test_the_newest_whole_checkpoint_is_resumed_and_those_passed_over_are_named(
    run, ended, caplog, capsys
):
    (ended / "checkpoint-8" / MARKER).unlink()
    os.truncate(ended / "checkpoint-7" / "optimizer.pt", 100)
    resumed = make_trainer(ended, **RUN, **SAVES)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint="last")
    assert f"passed over {ended / 'checkpoint-8'}: it has no whole {MARKER}" in caplog.text
    assert (
        f"passed over {ended / 'checkpoint-7'}: optimizer.pt is not what was written" in caplog.text
    )
    assert (
        f"resuming from         {ended / 'checkpoint-6'} (after 6 updates)"
        in capsys.readouterr().out
    )
    # Each update has one line in the log, though two were done twice; what was damaged is whole again.
    assert [line["update"] for line in read_log(ended)] == list(range(1, 9))
    assert [find_defect(path) for path in find_checkpoints(ended)] == [None] * 3
    assert list_differences(run[1], get_state(resumed)) == []
    (ended / "checkpoint-8" / "scheduler.pt").unlink()
    with pytest.raises(
        UserError, match=r"no checkpoint to resume from .* scheduler\.pt is not what was written"
    ):
        make_trainer(ended, **RUN, **SAVES).train(resume_from_checkpoint=str(ended / "checkpoint-8"))


def test_auto_starts_where_there_is_nothing_and_an_ended_run_does_no_more(tmp_path, caplog):
    make_trainer(tmp_path, max_steps=1, **SAVES).train(resume_from_checkpoint="auto")
    two = make_trainer(tmp_path, max_steps=2, **SAVES)
    two.train(resume_from_checkpoint="auto")
    assert two.state.global_step == 2 and [line["update"] for line in read_log(tmp_path)] == [1, 2]
    again = make_trainer(tmp_path, max_steps=2, **SAVES)
    with caplog.at_level(logging.WARNING):
        again.train(resume_from_checkpoint="auto")  # transformers by itself would do a third update
    assert "this run ended after update 2" in caplog.text and again.state.global_step == 2
    assert all(
        torch.equal(a, b)
        for a, b in zip(again.model.parameters(), two.model.parameters(), strict=True)
    )
    by_epochs = [make_trainer(tmp_path / "epochs", 12, **SAVES) for _ in range(2)]
    for one in by_epochs:
        one.train(resume_from_checkpoint="auto")
    assert list_differences(*map(get_state, by_epochs)) == [] and len(read_log(tmp_path / "epochs")) == 1
    with pytest.raises(UserError, match="no checkpoint to resume from"):
        make_trainer(tmp_path / "empty").train(resume_from_checkpoint="last")


def checkpoint_names(folder: Path) -> list[str]:
    return sorted(path.name for path in find_checkpoints(folder))


def killed(*_: Any) -> None:
    raise KeyboardInterrupt  # nothing of ours runs after it, as after SIGKILL


def stop_in(trainer: Any, micro_step: int) -> None:
    """Train until a SIGTERM in that micro-step has stopped the run, with a checkpoint."""
    call_at_micro_step(trainer, micro_step, lambda _: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit):
        trainer.train()


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (None, "checkpoint-2", [1, 2, 3, 8, 9]),
        (1, None, [3]),
        (1, "checkpoint-3", [3]),
        (1, "checkpoint-1", [1, 3]),
        (2, "elsewhere/checkpoint-1", [2, 3]),
        (4, "checkpoint-1", [1, 2, 3, 9]),
    ],
)
def test_the_limit_removes_other_runs_checkpoints_first_and_never_the_newest_or_the_best(
    limit, best, left, tmp_path
):
    for update in (1, 2, 3, 8, 9):
        folder = tmp_path / f"checkpoint-{update}"
        folder.mkdir()
        write_marker(folder, {"run_id": "ours" if update <= 3 else "other", "update": update})
    remove_oldest(str(tmp_path), "ours", limit, None if best is None else str(tmp_path / best))
    assert checkpoint_names(tmp_path) == [f"checkpoint-{update}" for update in left]


@pytest.mark.parametrize("word", ["last", "auto"])
def test_last_and_auto_resume_the_run_of_the_folder_and_no_other(word, tmp_path, caplog):
    make_trainer(tmp_path, **SAVES).train()  # three updates, with a checkpoint each
    stopped = make_trainer(tmp_path, learning_rate=1e-4, save_total_limit=1)
    stop_in(stopped, 1)
    # The limit removes checkpoints of the other run first, although their numbers are greater.
    assert checkpoint_names(tmp_path) == ["checkpoint-1"]
    other = make_trainer(tmp_path / "other", **SAVES)
    other.train()
    shutil.copytree(tmp_path / "other" / "checkpoint-3", tmp_path / "checkpoint-3")
    resumed = make_trainer(tmp_path, learning_rate=1e-4, max_steps=1)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=word)
    assert f"passed over {tmp_path / 'checkpoint-3'}: it is of another run" in caplog.text
    assert resumed.run_id == stopped.run_id and resumed.state.global_step == 1
    assert all(map(torch.equal, resumed.model.parameters(), stopped.model.parameters()))
    named = make_trainer(tmp_path, max_steps=3)  # a folder that the user names is taken
    named.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert named.state.global_step == 3 and named.run_id == other.run_id != stopped.run_id


def test_overwriting_removes_old_checkpoints_when_training_starts(tmp_path):
    make_trainer(tmp_path, **SAVES).train()
    (tmp_path / "checkpoint-2-copy").mkdir()
    overwriting = make_trainer(tmp_path, overwrite_output_dir=True)
    there: list[list[str]] = [checkpoint_names(tmp_path)]
    call_at_micro_step(overwriting, 1, lambda _: there.append(checkpoint_names(tmp_path)))
    stop_in(overwriting, 4)
    assert there == [["checkpoint-1", "checkpoint-2", "checkpoint-3"], []]
    # What was stopped goes on by `last`, though it overwrites.
    make_trainer(tmp_path, overwrite_output_dir=True, **SAVES).train(resume_from_checkpoint="last")
    assert (
        checkpoint_names(tmp_path) == ["checkpoint-2", "checkpoint-3"]
        and (tmp_path / "checkpoint-2-copy").is_dir()
    )
    with pytest.raises(
        UserError, match="overwrite_output_dir=true with resume_from_checkpoint=auto"
    ):
        make_trainer(tmp_path, overwrite_output_dir=True).train(resume_from_checkpoint="auto")
    with pytest.raises(
        UserError, match="overwrite_output_dir=true with resume_from_checkpoint=auto"
    ):
        make_trainer(tmp_path, overwrite_output_dir=True, resume_from_checkpoint="auto")


@pytest.mark.parametrize(
    "moment", ["before old checkpoints go", "in the first update", "in the first save"]
)
def test_a_run_killed_before_its_first_checkpoint_starts_again_by_auto(
    moment, tmp_path, monkeypatch
):
    straight = make_trainer(tmp_path / "straight", **SAVES)
    straight.train()
    make_trainer(tmp_path / "run", **SAVES, learning_rate=0.1).train()
    overwriting = make_trainer(tmp_path / "run", overwrite_output_dir=True, **SAVES)
    with monkeypatch.context() as patch:
        if moment == "before old checkpoints go":
            patch.setattr("contaccum.training.checkpoint.remove_replaced", killed)
        elif moment == "in the first update":
            call_at_micro_step(overwriting, 2, killed)
        else:
            patch.setattr("contaccum.training.checkpoint.write_marker", killed)
            patch.setattr(
                checkpoint.shutil, "rmtree", lambda *_, **__: None
            )  # a half-written folder stays
        with pytest.raises(KeyboardInterrupt):
            overwriting.train()
    assert bool(checkpoint_names(tmp_path / "run")) == (moment != "in the first update")
    again = make_trainer(tmp_path / "run", **SAVES)
    again.train(resume_from_checkpoint="auto")
    assert list_differences(get_state(straight), get_state(again)) == []
    assert [line["update"] for line in read_log(tmp_path / "run")] == [1, 2, 3]


def test_a_run_resumed_from_an_earlier_checkpoint_drops_its_later_ones(tmp_path, caplog):
    first = make_trainer(tmp_path, **SAVES)
    first.train()
    branch = make_trainer(tmp_path, max_grad_norm=1e-3)
    call_at_micro_step(branch, 1, lambda _: signal.raise_signal(signal.SIGTERM))
    with caplog.at_level(logging.WARNING), pytest.raises(SystemExit):
        branch.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert f"removed {tmp_path / 'checkpoint-3'}: the run goes on from update 1" in caplog.text
    assert (
        checkpoint_names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
        and branch.run_id == first.run_id
    )
    resumed = make_trainer(tmp_path, max_steps=2)
    resumed.train(resume_from_checkpoint="last")
    assert all(map(torch.equal, resumed.model.parameters(), branch.model.parameters()))


def test_checkpoints_without_a_run_record_are_resumed_by_name_alone(run, tmp_path):
    shutil.copytree(run[0] / "checkpoint-8", tmp_path / "checkpoint-8")
    for word in ("last", "auto"):
        with pytest.raises(
            UserError, match=r"no checkpoint to resume from .*checkpoint-8: it is of another run"
        ):
            make_trainer(tmp_path, **RUN).train(resume_from_checkpoint=word)


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        ({"bank_size": 30}, "bank_size: 20 -> 30"),
        ({"method": "pre_batch"}, "method: contaccum -> pre_batch"),
        ({"optim": "sgd"}, "optim: "),
        ({"data": 40}, "rows: 43 -> 40"),
        ({"data_seed": 9}, "data_seed: None -> 9"),
        ({"gradient_accumulation_steps": 2}, "pairs per update: 12 -> 8"),
    ],
)
def test_a_change_that_cannot_work_is_refused_by_name(run, tmp_path, changed, shown):
    with pytest.raises(UserError, match=f"would mean nothing with .*{shown}"):
        make_trainer(tmp_path, **{**RUN, **changed}).train(
            resume_from_checkpoint=str(run[0] / "checkpoint-2")
        )


def test_other_changes_are_taken(run, tmp_path):
    # Another micro-batch with the same pairs per update goes on at the same pair.
    changed = {
        **RUN,
        "max_grad_norm": 0.5,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 6,
    }
    make_trainer(tmp_path, **changed).train(resume_from_checkpoint=str(run[0] / "checkpoint-6"))
    assert [line["update"] for line in read_log(tmp_path)] == [7, 8]


def test_weights_of_another_model_and_checkpoints_without_an_optimizer_are_refused(tmp_path):
    make_trainer(tmp_path, max_steps=1, **SAVES, save_only_model=True).train()
    with pytest.raises(UserError, match="written with save_only_model"):
        make_trainer(tmp_path).train(resume_from_checkpoint="last")
    make_trainer(tmp_path, max_steps=1, **SAVES).train()
    with pytest.raises(UserError, match="trained parameters: "):
        make_trainer(tmp_path, tied=False).train(resume_from_checkpoint="last")


def test_older_checkpoints_go_only_once_the_newer_one_is_whole(tmp_path, monkeypatch):
    there: list[list[str]] = []

    def watched(folder: Path, facts: Any) -> None:
        there.append(sorted(path.name for path in folder.parent.glob("checkpoint-*")))
        write_marker(folder, facts)

    monkeypatch.setattr(checkpoint, "write_marker", watched)
    make_trainer(tmp_path, **SAVES, save_total_limit=1).train()
    assert there == [
        ["checkpoint-1"],
        ["checkpoint-1", "checkpoint-2"],
        ["checkpoint-2", "checkpoint-3"],
    ]
    assert [path.name for path in find_checkpoints(tmp_path)] == ["checkpoint-3"]


@pytest.mark.parametrize("what", ["bank", "optimizer"])
def test_a_full_disk_is_one_line_and_leaves_the_last_good_checkpoint(what, tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, **SAVES)

    def full(*args: Any, **kwargs: Any) -> None:
        if trainer.state.global_step == 2:
            if what == "bank":
                raise OSError(errno.ENOSPC, "No space left on device")
            raise RuntimeError(
                "[enforce fail at inline_container.cc:603] PytorchStreamWriter failed writing file"
            )
        real(*args, **kwargs)

    place = (checkpoint, "save_file") if what == "bank" else (torch, "save")
    real = getattr(*place)
    monkeypatch.setattr(*place, full)
    with pytest.raises(UserError, match=r"no room on the disk: .* resume from `last`"):
        trainer.train()
    assert [(path.name, find_defect(path)) for path in find_checkpoints(tmp_path)] == [
        ("checkpoint-1", None)
    ]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_update_saves_and_the_run_goes_on_bit_identical(
    run, name, tmp_path, capsys
):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    # Nothing is saved otherwise.
    stopped = make_trainer(tmp_path, **RUN)
    # The second micro-step of the third update.
    call_at_micro_step(stopped, 8, lambda _: signal.raise_signal(number))
    with pytest.raises(SystemExit) as stop:
        stopped.train()
    assert stop.value.code == 128 + number
    said = capsys.readouterr()
    assert f"{name}: saving a checkpoint after this update" in said.err and "saved " in said.out
    assert signal.getsignal(number) == before and find_defect(tmp_path / "checkpoint-3") is None
    resumed = make_trainer(tmp_path, **RUN)
    resumed.train(resume_from_checkpoint="last")
    assert list_differences(run[1], get_state(resumed)) == []
    assert [line["loss"] for line in read_log(tmp_path)] == [line["loss"] for line in run[2]]
