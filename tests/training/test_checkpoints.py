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
from tiny_runs import RUN, SAVES, at_micro_step, differing, log_of, state_of, trainer_in

from contaccum.errors import UserError
from contaccum.training import trainer as trainer_module
from contaccum.training.checkpoint import BANK_FILE, MARKER, fault_of, find_checkpoints, seal


@pytest.fixture
def ended(run, tmp_path) -> Path:
    """The folder of a run of eight updates, with its last three checkpoints."""
    folder, _, _ = run
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-[1-5]"))
    return tmp_path / "run"


def test_a_checkpoint_holds_transformers_files_the_bank_and_what_identifies_the_run(run):
    folder = run[0] / "checkpoint-2"
    assert fault_of(folder) is None
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files >= {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    assert files >= {BANK_FILE, MARKER} and "training_args.bin" not in files
    marker = json.loads((folder / MARKER).read_text())
    assert marker["contaccum"] and marker["update"] == 2 and marker["files"].keys() == files - {MARKER}
    assert marker["settings"]["pairs per update"] == 12 and len(marker["settings"]["data fingerprint"]) == 64
    for name in ("optimizer.pt", "scheduler.pt"):  # as a checkpoint from somebody else is loaded
        torch.load(folder / name, weights_only=True)


def test_the_newest_whole_checkpoint_is_resumed_and_those_passed_over_are_named(run, ended, caplog, capsys):
    (ended / "checkpoint-8" / MARKER).unlink()
    os.truncate(ended / "checkpoint-7" / "optimizer.pt", 100)
    resumed = trainer_in(ended, **RUN, **SAVES)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint="last")
    assert f"passed over {ended / 'checkpoint-8'}: it has no whole {MARKER}" in caplog.text
    assert f"passed over {ended / 'checkpoint-7'}: optimizer.pt is not what was written" in caplog.text
    assert f"resuming from         {ended / 'checkpoint-6'} (after 6 updates)" in capsys.readouterr().out
    # Each update has one line in the log, though two were done twice; what was damaged is whole again.
    assert [line["update"] for line in log_of(ended)] == list(range(1, 9))
    assert [fault_of(path) for path in find_checkpoints(ended)] == [None] * 3
    assert differing(run[1], state_of(resumed)) == []
    (ended / "checkpoint-8" / "scheduler.pt").unlink()
    with pytest.raises(UserError, match=r"no checkpoint to resume from .* scheduler\.pt is not what was written"):
        trainer_in(ended, **RUN, **SAVES).train(resume_from_checkpoint=str(ended / "checkpoint-8"))


def test_auto_starts_where_there_is_nothing_and_an_ended_run_does_no_more(tmp_path, caplog):
    trainer_in(tmp_path, max_steps=1, **SAVES).train(resume_from_checkpoint="auto")
    two = trainer_in(tmp_path, max_steps=2, **SAVES)
    two.train(resume_from_checkpoint="auto")
    assert two.state.global_step == 2 and [line["update"] for line in log_of(tmp_path)] == [1, 2]
    again = trainer_in(tmp_path, max_steps=2, **SAVES)
    with caplog.at_level(logging.WARNING):
        again.train(resume_from_checkpoint="auto")  # transformers by itself would do a third update
    assert "this run ended after update 2" in caplog.text and again.state.global_step == 2
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), two.model.parameters(), strict=True))
    by_epochs = [trainer_in(tmp_path / "epochs", 12, **SAVES) for _ in range(2)]
    for one in by_epochs:
        one.train(resume_from_checkpoint="auto")
    assert differing(*map(state_of, by_epochs)) == [] and len(log_of(tmp_path / "epochs")) == 1
    with pytest.raises(UserError, match="no checkpoint to resume from"):
        trainer_in(tmp_path / "empty").train(resume_from_checkpoint="last")


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
        trainer_in(tmp_path, **{**RUN, **changed}).train(resume_from_checkpoint=str(run[0] / "checkpoint-2"))


def test_other_changes_are_taken(run, tmp_path):
    # Another micro-batch with the same pairs per update goes on at the same pair.
    changed = {**RUN, "max_grad_norm": 0.5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 6}
    trainer_in(tmp_path, **changed).train(resume_from_checkpoint=str(run[0] / "checkpoint-6"))
    assert [line["update"] for line in log_of(tmp_path)] == [7, 8]


def test_weights_of_another_model_and_checkpoints_without_an_optimizer_are_refused(tmp_path):
    trainer_in(tmp_path, max_steps=1, **SAVES, save_only_model=True).train()
    with pytest.raises(UserError, match="written with save_only_model"):
        trainer_in(tmp_path).train(resume_from_checkpoint="last")
    trainer_in(tmp_path, max_steps=1, **SAVES).train()
    with pytest.raises(UserError, match="trained parameters: "):
        trainer_in(tmp_path, tied=False).train(resume_from_checkpoint="last")


def test_older_checkpoints_go_only_once_the_newer_one_is_whole(tmp_path, monkeypatch):
    there: list[list[str]] = []

    def watched(folder: Path, facts: Any) -> None:
        there.append(sorted(path.name for path in folder.parent.glob("checkpoint-*")))
        seal(folder, facts)

    monkeypatch.setattr(trainer_module.checkpoint, "seal", watched)
    trainer_in(tmp_path, **SAVES, save_total_limit=1).train()
    assert there == [["checkpoint-1"], ["checkpoint-1", "checkpoint-2"], ["checkpoint-2", "checkpoint-3"]]
    assert [path.name for path in find_checkpoints(tmp_path)] == ["checkpoint-3"]


@pytest.mark.parametrize("what", ["bank", "optimizer"])
def test_a_full_disk_is_one_line_and_leaves_the_last_good_checkpoint(what, tmp_path, monkeypatch):
    trainer = trainer_in(tmp_path, **SAVES)

    def full(*args: Any, **kwargs: Any) -> None:
        if trainer.state.global_step == 2:
            if what == "bank":
                raise OSError(errno.ENOSPC, "No space left on device")
            raise RuntimeError("[enforce fail at inline_container.cc:603] PytorchStreamWriter failed writing file")
        real(*args, **kwargs)

    place = (trainer_module, "save_file") if what == "bank" else (torch, "save")
    real = getattr(*place)
    monkeypatch.setattr(*place, full)
    with pytest.raises(UserError, match=r"no room on the disk: .* resume from `last`"):
        trainer.train()
    assert [(path.name, fault_of(path)) for path in find_checkpoints(tmp_path)] == [("checkpoint-1", None)]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_update_saves_and_the_run_goes_on_bit_identical(run, name, tmp_path, capsys):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    # Nothing is saved otherwise.
    stopped = trainer_in(tmp_path, **RUN)
    # The second micro-step of the third update.
    at_micro_step(stopped, 8, lambda _: signal.raise_signal(number))
    with pytest.raises(SystemExit) as stop:
        stopped.train()
    assert stop.value.code == 128 + number
    said = capsys.readouterr()
    assert f"{name}: saving a checkpoint after this update" in said.err and "saved " in said.out
    assert signal.getsignal(number) == before and fault_of(tmp_path / "checkpoint-3") is None
    resumed = trainer_in(tmp_path, **RUN)
    resumed.train(resume_from_checkpoint="last")
    assert differing(run[1], state_of(resumed)) == []
    assert [line["loss"] for line in log_of(tmp_path)] == [line["loss"] for line in run[2]]
