"""Checkpoint folders: whole or not there, checked before use, found again."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.trainer_utils import rotate_checkpoints

from contaccum.errors import UserError
from contaccum.training.checkpoint_folder import (
    MANIFEST,
    CheckpointWriter,
    fault_of,
    find_checkpoints,
    last_valid,
    one_line_when_full,
    replace_file,
)


def write(folder: Path, update: int, text: str = "weights") -> Path:
    writer = CheckpointWriter(folder, f"checkpoint-{update}")
    writer.begin()
    (writer.path / "tower").mkdir()
    (writer.path / "tower" / "model.txt").write_text(text * 100)
    (writer.path / "state.json").write_text(json.dumps({"update": update}))
    return writer.commit()


def dies_at(step: int, work: Callable[[], None]) -> bool:
    """Whether a fork that works was killed before its call number ``step`` that changes the disk."""
    child = os.fork()
    if child == 0:
        calls = 0

        def counting(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return call

        try:
            for name in ("fsync", "rename", "mkdir", "rmdir", "unlink"):
                setattr(os, name, counting(getattr(os, name)))
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_kill_at_any_instant_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    def save_next_again_and_rotate(folder: Path) -> None:
        write(folder, 2, "second")
        rotate_checkpoints(str(folder), 1, use_mtime=True)
        write(folder, 2, "third")  # as a checkpoint inside the next update takes its place

    left, step = set(), 0
    while True:
        step += 1
        folder = tmp_path / str(step)
        write(folder, 1, "first")
        died = dies_at(step, lambda folder=folder: save_next_again_and_rotate(folder))
        path, _ = last_valid(folder)
        left.add((path / "tower" / "model.txt").read_text()[:6].strip("f"))
        write(folder, 3)  # and the run goes on
        assert sorted(p.name for p in folder.iterdir() if p.name.startswith(".")) == []
        if not died:
            break
    assert step > 30
    assert len(left) == 3


def test_half_written_checkpoint_is_never_found(tmp_path: Path) -> None:
    good = write(tmp_path, 1)
    writer = CheckpointWriter(tmp_path, "checkpoint-2")
    writer.begin()
    (writer.path / "state.json").write_text("{}")
    assert last_valid(tmp_path) == (good, [])


def damage_size(folder: Path) -> None:
    with open(folder / "tower" / "model.txt", "a") as file:
        file.write("x")


def damage_content(folder: Path) -> None:
    (folder / "tower" / "model.txt").write_text("Weights" * 100)


def plant_pickle(folder: Path, name: str = "optimizer.pt") -> None:
    (folder / name).write_bytes(pickle.dumps({"state": {}}))


def list_planted_pickle(folder: Path) -> None:
    plant_pickle(folder, "scaler.pt")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"]["scaler.pt"] = {"bytes": 1, "sha256": ""}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def lead_outside(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"]["../../outside"] = {"bytes": 1, "sha256": ""}
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (damage_size, "model.txt has 701 bytes, not 700"),
        (damage_content, "model.txt is not what was written"),
        (lambda folder: (folder / "state.json").unlink(), "state.json is missing"),
        (lambda folder: (folder / MANIFEST).unlink(), "no manifest.json"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "cannot be read"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), "cannot be read"),
        (plant_pickle, "optimizer.pt is of a kind that can hold code"),
        (lambda folder: plant_pickle(folder, "pytorch_model.bin"), "pytorch_model.bin is of a kind"),
        (list_planted_pickle, "scaler.pt is of a kind"),
        (lambda folder: (folder / "modeling.py").write_text(""), "modeling.py is not in its manifest"),
        (lead_outside, "lies outside"),
    ],
)
def test_damaged_or_planted_files_are_named_and_the_checkpoint_before_is_taken(
    damage: Callable[[Path], None], fault: str, tmp_path: Path
) -> None:
    good = write(tmp_path, 9)
    bad = write(tmp_path, 10)
    assert fault_of(bad) is None
    damage(bad)
    path, (passed,) = last_valid(tmp_path)
    assert path == good and passed.path == bad and passed.update == 10
    assert fault in str(passed.fault)
    damage_size(good)
    with pytest.raises(UserError, match=r"no checkpoint can be resumed from .checkpoint-10: .*; checkpoint-9: "):
        last_valid(tmp_path)


def test_checkpoints_are_ordered_by_update_not_by_name(tmp_path: Path) -> None:
    for update in (100, 9, 20):
        write(tmp_path, update)
    (tmp_path / "checkpoint-x").mkdir()
    assert [found.update for found in find_checkpoints(tmp_path)] == [100, 20, 9]
    with pytest.raises(UserError, match="no checkpoint to resume from"):
        last_valid(tmp_path / "empty")


def test_pickle_among_what_is_saved_is_refused_at_once(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, "checkpoint-1")
    writer.begin()
    plant_pickle(writer.path)
    with pytest.raises(UserError, match=r"optimizer\.pt may be a pickle"):
        writer.commit()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_one_line(number: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="checkpoint-3 could not be written: no room on the disk"):  # noqa: SIM117
        with one_line_when_full("checkpoint-3", tmp_path):
            try:
                raise OSError(number, "no room")
            except OSError as error:
                raise RuntimeError("a writer's own words") from error
    with pytest.raises(PermissionError), one_line_when_full("checkpoint-3", tmp_path):
        raise PermissionError(errno.EACCES, "not a full disk")


def test_limit_on_file_size_is_seen_through_safetensors(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    tensors = {"weights": torch.zeros(100_000)}
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        with pytest.raises(UserError, match="no room"), one_line_when_full("checkpoint-3", tmp_path):
            save_file(tensors, tmp_path / "model.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_replaced_file_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    replace_file(path, "old")

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        replace_file(path, "new")
    assert path.read_text() == "old"
