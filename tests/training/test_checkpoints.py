"""Checkpoints: completeness, resuming, kills and signals at any instant, full disks."""

import errno
import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from tiny_models import tiny_encoder
from tiny_runs import (
    RUN_SETTINGS,
    SAVE_EVERY_UPDATE,
    assert_resumes,
    call_at_micro_step,
    get_state,
    list_differences,
    make_pairs,
    make_trainer,
    read_log,
)

from contaccum import DualEncoder, work
from contaccum.errors import ConfigError, UserError
from contaccum.settings import LossSettings
from contaccum.training import trainer as trainer_module
from contaccum.training.checkpoint import (
    BANK_FILE,
    find_checkpoints,
    read_checkpoint,
    remove_oldest,
    require_free_folder,
)

OTHER_PAIRS = make_pairs(44, negatives=1).select(range(1, 44))
"""As many rows as those of `RUN_SETTINGS`."""


@pytest.fixture
def finished(run, tmp_path) -> Path:
    """A copy of a finished run of eight updates, with its last three checkpoints."""
    ignored = shutil.ignore_patterns("checkpoint-[1-5]")
    shutil.copytree(run.folder, tmp_path / "run", ignore=ignored)
    return tmp_path / "run"


def list_checkpoint_names(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a folder."""
    return sorted(path.name for path in find_checkpoints(folder))


def list_updates(folder: Path) -> list[int]:
    """Return the update numbers in a run's log."""
    return [line["update"] for line in read_log(folder)]


def have_same_weights(first: Any, second: Any) -> bool:
    """Return whether the models of two trainers have the same weights."""
    return all(map(torch.equal, first.model.parameters(), second.model.parameters()))


def kill(*_: Any) -> None:
    """Stop a run as SIGKILL would: no code of contaccum runs after KeyboardInterrupt."""
    raise KeyboardInterrupt


def raise_sigterm(_: Any) -> None:
    signal.raise_signal(signal.SIGTERM)


def train_until_sigterm(trainer: Any, micro_step: int) -> None:
    """Train until a SIGTERM in a micro-step, after which the run saves a checkpoint and stops."""
    call_at_micro_step(trainer, micro_step, raise_sigterm)
    with pytest.raises(SystemExit):
        trainer.train()


def test_a_checkpoint_holds_all_states_and_a_record_of_the_run(run):
    folder = run.folder / "checkpoint-2"
    saved = read_checkpoint(folder)
    assert saved is not None
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files >= {
        "model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "trainer_state.json",
        BANK_FILE,
        "identity.json",
    }
    assert "training_args.bin" not in files
    assert saved["update"] == 2
    assert saved["files"].keys() == files - {"result.json"}
    settings = work.read_identity(folder)
    assert settings["pairs per update"] == 12
    assert len(settings["data fingerprint"]) == 64
    # A checkpoint from another person must be loadable without running code.
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.load(folder / name, weights_only=True)


def test_the_newest_complete_checkpoint_is_resumed(run, finished, caplog, capsys):
    """Newer checkpoints that are incomplete are named in warnings."""
    (finished / "checkpoint-8" / "result.json").unlink()
    os.truncate(finished / "checkpoint-7" / "optimizer.pt", 100)
    resumed = make_trainer(finished, **RUN_SETTINGS, **SAVE_EVERY_UPDATE)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint="last")
    for name in ("checkpoint-8", "checkpoint-7"):
        assert f"skipped {finished / name}: it is incomplete" in caplog.text
    output = capsys.readouterr().out
    assert f"resuming from         {finished / 'checkpoint-6'} (after 6 updates)" in output
    # Two updates were trained twice, but each has one line in the log. The damaged checkpoints were
    # written again.
    assert list_updates(finished) == list(range(1, 9))
    assert all(map(read_checkpoint, find_checkpoints(finished)))
    assert list_differences(run.state, get_state(resumed)) == []

    (finished / "checkpoint-8" / "scheduler.pt").unlink()
    again = make_trainer(finished, **RUN_SETTINGS, **SAVE_EVERY_UPDATE)
    with pytest.raises(UserError, match="no complete checkpoint to resume from"):
        again.train(resume_from_checkpoint=str(finished / "checkpoint-8"))


def test_a_checkpoint_of_another_run_does_not_replace_a_finished_run(tmp_path):
    for name in ("a", "b"):
        trainer = make_trainer(tmp_path / name, max_steps=1, **SAVE_EVERY_UPDATE)
        trainer.train()
        trainer.save_model(str(tmp_path / name))
    settings = {"resume_from_checkpoint": str(tmp_path / "a" / "checkpoint-1")}
    for name in ("a", "new"):
        require_free_folder(make_trainer(tmp_path / name, max_steps=1, **settings).args)
    other = make_trainer(tmp_path / "b", max_steps=1, **settings)
    with pytest.raises(ConfigError, match="contains a finished run"):
        require_free_folder(other.args)


def test_auto_starts_a_run_resumes_it_and_stops_at_its_end(tmp_path, caplog):
    make_trainer(tmp_path, max_steps=1, **SAVE_EVERY_UPDATE).train(resume_from_checkpoint="auto")
    second = make_trainer(tmp_path, max_steps=2, **SAVE_EVERY_UPDATE)
    second.train(resume_from_checkpoint="auto")
    assert second.state.global_step == 2
    assert list_updates(tmp_path) == [1, 2]
    # transformers alone would train a third update.
    third = make_trainer(tmp_path, max_steps=2, **SAVE_EVERY_UPDATE)
    with caplog.at_level(logging.WARNING):
        third.train(resume_from_checkpoint="auto")
    assert "nothing is left to train after update 2" in caplog.text
    assert third.state.global_step == 2
    assert have_same_weights(third, second)


def test_a_longer_run_killed_before_its_first_checkpoint_is_not_finished(tmp_path):
    """The killed start has written its own length to identity.json."""
    make_trainer(tmp_path, 12, **SAVE_EVERY_UPDATE, num_train_epochs=1).train()
    killed = make_trainer(tmp_path, 12, **SAVE_EVERY_UPDATE, num_train_epochs=3)
    call_at_micro_step(killed, 1, kill)
    with pytest.raises(KeyboardInterrupt):
        killed.train(resume_from_checkpoint="auto")
    last = make_trainer(tmp_path, 12, **SAVE_EVERY_UPDATE, num_train_epochs=3)
    last.train(resume_from_checkpoint="auto")
    assert last.state.global_step == 3
    assert list_updates(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize(
    ("limit", "best", "remaining"),
    [
        (None, "checkpoint-2", [1, 2, 3]),
        (1, None, [3]),
        (1, "checkpoint-1", [1, 3]),
        (1, "checkpoint-3", [3]),
        (2, "elsewhere/checkpoint-1", [2, 3]),
        (4, "checkpoint-1", [1, 2, 3]),
    ],
)
def test_the_limit_keeps_the_newest_and_the_best_checkpoint(
    limit, best, remaining, tmp_path, monkeypatch
):
    """Checkpoints of another run (8 and 9) are not counted and not removed.

    The folder and its best checkpoint are given by paths of different spelling.
    """
    for update in (1, 2, 3, 8, 9):
        path = tmp_path / f"checkpoint-{update}"
        path.mkdir()
        run_id = "this run" if update <= 3 else "other run"
        work.finish(path, {"run_id": run_id, "update": update})
    monkeypatch.chdir(tmp_path.parent)
    best_folder = None if best is None else f"{tmp_path.name}/{best}"
    remove_oldest(str(tmp_path), "this run", limit, best_folder)
    expected = [f"checkpoint-{update}" for update in [*remaining, 8, 9]]
    assert list_checkpoint_names(tmp_path) == expected


def test_auto_resumes_only_the_run_of_the_folder(tmp_path, caplog):
    other = make_trainer(tmp_path, **SAVE_EVERY_UPDATE)
    other.train()  # three updates, with a checkpoint each
    stopped = make_trainer(tmp_path, learning_rate=1e-4, save_total_limit=1)
    train_until_sigterm(stopped, 1)
    assert list_checkpoint_names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    resumed = make_trainer(tmp_path, learning_rate=1e-4, max_steps=1)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint="auto")
    skipped = tmp_path / "checkpoint-3"
    assert f"skipped {skipped}: it is incomplete, or belongs to another run" in caplog.text
    assert resumed.run_id == stopped.run_id
    assert resumed.state.global_step == 1
    assert have_same_weights(resumed, stopped)
    # A folder that the user names is resumed, whatever run it belongs to.
    named = make_trainer(tmp_path, max_steps=3)
    named.train(resume_from_checkpoint=str(skipped))
    assert named.state.global_step == 3
    assert named.run_id == other.run_id != stopped.run_id


def test_overwriting_removes_old_checkpoints_when_training_starts(tmp_path):
    make_trainer(tmp_path, **SAVE_EVERY_UPDATE).train()
    (tmp_path / "checkpoint-2-copy").mkdir()
    overwriting = make_trainer(tmp_path, overwrite_output_dir=True)
    assert list_checkpoint_names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    names_at_start: list[list[str]] = []
    call_at_micro_step(
        overwriting, 1, lambda _: names_at_start.append(list_checkpoint_names(tmp_path))
    )
    train_until_sigterm(overwriting, 4)
    assert names_at_start == [[]]
    # The stopped run continues with "last", although it overwrites.
    resumed = make_trainer(tmp_path, overwrite_output_dir=True, **SAVE_EVERY_UPDATE)
    resumed.train(resume_from_checkpoint="last")
    assert list_checkpoint_names(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    assert (tmp_path / "checkpoint-2-copy").is_dir()


@pytest.mark.parametrize("moment", ["before old checkpoints are removed", "in the first save"])
def test_a_run_killed_before_its_first_checkpoint_starts_again_by_auto(
    moment, tmp_path, monkeypatch
):
    straight = make_trainer(tmp_path / "straight", **SAVE_EVERY_UPDATE)
    straight.train()
    make_trainer(tmp_path / "run", **SAVE_EVERY_UPDATE, learning_rate=0.1).train()
    overwriting = make_trainer(tmp_path / "run", overwrite_output_dir=True, **SAVE_EVERY_UPDATE)
    remove = shutil.rmtree

    def leave_checkpoints(path: Any, **options: Any) -> None:
        """Remove no checkpoint: after SIGKILL, the old and the partly written ones remain."""
        if not Path(path).name.startswith("checkpoint-"):
            remove(path, **options)
        elif moment == "before old checkpoints are removed":
            kill()

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", leave_checkpoints)
        patch.setattr(trainer_module, "save_file", kill)
        with pytest.raises(KeyboardInterrupt):
            overwriting.train()
    assert list_checkpoint_names(tmp_path / "run")
    again = make_trainer(tmp_path / "run", **SAVE_EVERY_UPDATE)
    again.train(resume_from_checkpoint="auto")
    assert list_differences(get_state(straight), get_state(again)) == []
    assert list_updates(tmp_path / "run") == [1, 2, 3]


def test_a_run_resumed_from_an_earlier_checkpoint_removes_its_later_ones(tmp_path, caplog):
    first = make_trainer(tmp_path, **SAVE_EVERY_UPDATE)
    first.train()
    branch = make_trainer(tmp_path, max_grad_norm=1e-3)
    call_at_micro_step(branch, 1, raise_sigterm)
    with caplog.at_level(logging.WARNING), pytest.raises(SystemExit):
        branch.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert f"removed {tmp_path / 'checkpoint-3'}: the run continues after update 1" in caplog.text
    assert list_checkpoint_names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    assert branch.run_id == first.run_id
    resumed = make_trainer(tmp_path, max_steps=2)
    resumed.train(resume_from_checkpoint="last")
    assert have_same_weights(resumed, branch)


@pytest.mark.parametrize("word", ["last", "auto"])
def test_checkpoints_without_a_run_record_are_resumed_only_by_name(run, word, tmp_path):
    shutil.copytree(run.folder / "checkpoint-8", tmp_path / "checkpoint-8")
    with pytest.raises(UserError, match="no complete checkpoint"):
        make_trainer(tmp_path, **RUN_SETTINGS).train(resume_from_checkpoint=word)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"bank_size": 30}, r"bank_size \(20, now 30\)"),
        ({"data": OTHER_PAIRS}, "data fingerprint"),
        ({"gradient_accumulation_steps": 2}, r"pairs per update \(12, now 8\)"),
        ({"model": tiny_encoder(query_prompt="query: ")}, "tokenizer, prompts, lengths or pooling"),
    ],
)
def test_a_changed_setting_that_prevents_resuming_is_named(run, tmp_path, changed, named):
    trainer = make_trainer(tmp_path, **{**RUN_SETTINGS, **changed})
    with pytest.raises(UserError, match=named):
        trainer.train(resume_from_checkpoint=str(run.folder / "checkpoint-2"))


def test_another_value_of_any_of_these_settings_prevents_resuming(run):
    """`gather_across_devices` may change, because a run may resume on another number of ranks."""
    folder = run.folder / "checkpoint-2"
    settings = work.read_identity(folder)
    work.require_same_work(folder, settings)
    expected = {
        "method",
        "optim",
        "seed",
        "data_seed",
        "batch_sampler",
        "multi_dataset_batch_sampler",
        *LossSettings.__dataclass_fields__,
        "similarity",
        "temperature",
        "matryoshka_dims",
        "missing",
        "metric_for_best_model",
        "pairs per update",
        "rows",
        "data fingerprint",
        "adapters",
        "engine",
    }
    assert settings.keys() >= expected
    for name in settings:
        with pytest.raises(UserError, match=name):
            work.require_same_work(folder, {**settings, name: "another value"})


def test_a_run_resumes_with_another_micro_batch_and_clipping(run, tmp_path):
    """The pairs per update are the same, so the run continues at the same pair."""
    trainer = make_trainer(
        tmp_path,
        **RUN_SETTINGS,
        max_grad_norm=0.5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=6,
    )
    trainer.train(resume_from_checkpoint=str(run.folder / "checkpoint-6"))
    assert list_updates(tmp_path) == [7, 8]


def test_a_resumed_run_uses_its_own_intervals_of_saving_and_logging(run, tmp_path):
    """The run of the checkpoint saved after every update and logged every 1000 updates."""
    half_of_the_updates = {"save_strategy": "steps", "save_steps": 0.5, "logging_steps": 2}
    trainer = make_trainer(tmp_path, **RUN_SETTINGS, **half_of_the_updates)
    trainer.train(resume_from_checkpoint=str(run.folder / "checkpoint-6"))
    assert list_checkpoint_names(tmp_path) == ["checkpoint-8"]
    assert trainer.state.save_steps == 4
    assert [line["step"] for line in trainer.state.log_history if "loss" in line] == [8]


def test_a_checkpoint_that_is_missing_without_optimizer_or_of_another_model_is_refused(tmp_path):
    with pytest.raises(UserError, match="no complete checkpoint to resume from"):
        make_trainer(tmp_path).train(resume_from_checkpoint="last")
    make_trainer(tmp_path, max_steps=1, **SAVE_EVERY_UPDATE, save_only_model=True).train()
    with pytest.raises(UserError, match="written with save_only_model"):
        make_trainer(tmp_path).train(resume_from_checkpoint="last")
    make_trainer(tmp_path, max_steps=1, **SAVE_EVERY_UPDATE).train()
    with pytest.raises(UserError, match="trained parameters "):
        make_trainer(tmp_path, tied=False).train(resume_from_checkpoint="last")


def test_older_checkpoints_are_removed_only_when_the_newer_one_is_complete(tmp_path, monkeypatch):
    names_before_the_bank: list[list[str]] = []
    save_file = trainer_module.save_file

    def watch(banks: Any, path: Path) -> None:
        names = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
        names_before_the_bank.append(names)
        save_file(banks, path)

    monkeypatch.setattr(trainer_module, "save_file", watch)
    make_trainer(tmp_path, **SAVE_EVERY_UPDATE, save_total_limit=1).train()
    assert names_before_the_bank == [
        ["checkpoint-1"],
        ["checkpoint-1", "checkpoint-2"],
        ["checkpoint-2", "checkpoint-3"],
    ]
    assert list_checkpoint_names(tmp_path) == ["checkpoint-3"]


def test_a_second_training_in_the_folder_and_the_folder_of_a_store_are_refused(tmp_path):
    with (
        work.lock(tmp_path, "training"),
        pytest.raises(ConfigError, match="another training works in this folder"),
    ):
        make_trainer(tmp_path).train()
    work.write_identity(tmp_path, {"work": "a store"})
    with pytest.raises(ConfigError, match="holds a store"):
        make_trainer(tmp_path, overwrite_output_dir=True).train()
    assert work.read_identity(tmp_path) == {"work": "a store"}


TORCH_ERROR = "[enforce fail at inline_container.cc:603] PytorchStreamWriter failed writing file"


@pytest.mark.parametrize(
    ("module", "function", "error"),
    [
        (trainer_module, "save_file", OSError(errno.ENOSPC, "No space left on device")),
        (torch, "save", RuntimeError(TORCH_ERROR)),
    ],
    ids=["bank", "optimizer"],
)
def test_a_full_disk_leaves_the_last_complete_checkpoint(
    module, function, error, tmp_path, monkeypatch
):
    trainer = make_trainer(tmp_path, **SAVE_EVERY_UPDATE)
    original = getattr(module, function)

    def fail_at_update_2(*args: Any, **kwargs: Any) -> None:
        if trainer.state.global_step == 2:
            raise error
        original(*args, **kwargs)

    monkeypatch.setattr(module, function, fail_at_update_2)
    with pytest.raises(type(error)):  # the command line makes one line of it
        trainer.train()
    assert list_checkpoint_names(tmp_path) == ["checkpoint-1"]
    assert read_checkpoint(tmp_path / "checkpoint-1")


@pytest.mark.parametrize("kind", [DualEncoder, SentenceTransformer])
def test_a_model_with_its_own_code_resumes(kind, own_code_path, tmp_path):
    def make(output: Path, **settings: Any) -> Any:
        model = kind(str(own_code_path), device="cpu", trust_remote_code=True)
        return make_trainer(output, model=model, **settings)

    assert_resumes(make, tmp_path, 1)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_after_a_signal_the_run_saves_stops_and_resumes_exactly(run, name, tmp_path, capsys):
    number = getattr(signal, name)
    handler = signal.getsignal(number)
    # Without the signal, this run would save nothing.
    stopped = make_trainer(tmp_path, **RUN_SETTINGS)
    # Micro-step 8 is the second one of the third update.
    call_at_micro_step(stopped, 8, lambda _: signal.raise_signal(number))
    with pytest.raises(SystemExit) as stop:
        stopped.train()
    assert stop.value.code == 128 + number
    output = capsys.readouterr()
    assert f"{name}: saving a checkpoint after this update" in output.err
    assert "saved " in output.out
    assert signal.getsignal(number) == handler
    assert read_checkpoint(tmp_path / "checkpoint-3")
    resumed = make_trainer(tmp_path, **RUN_SETTINGS)
    resumed.train(resume_from_checkpoint="last")
    assert list_differences(run.state, get_state(resumed)) == []
    losses = [line["loss"] for line in read_log(tmp_path)]
    assert losses == [line["loss"] for line in run.log]
