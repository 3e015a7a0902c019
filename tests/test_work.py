"""Work in a folder: done once, goes on after a kill, anew with changes; one process at a time."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contaccum import work as work_module
from contaccum.errors import ConfigError, UserError
from contaccum.work import (
    Budget,
    begin,
    finish,
    lock,
    once,
    read_result,
    require_own_folder,
    write_identity,
)


def test_work_is_done_once_unless_its_identity_changes(tmp_path):
    calls = []

    def work() -> dict[str, Any]:
        calls.append(sorted(path.name for path in tmp_path.iterdir()))
        (tmp_path / "part").write_text("")
        return {"value": (len(calls), 0.5)}

    assert once(tmp_path, {"seed": 1}, work) == {"value": [1, 0.5]}
    assert once(tmp_path, {"seed": 1}, work) == {"value": [1, 0.5]}
    assert once(tmp_path, {"seed": 2}, work) == {"value": [2, 0.5]}
    assert calls == [["identity.json"], ["identity.json"]]  # the folder was emptied


def test_unfinished_work_goes_on_with_its_files(tmp_path):
    class Killed(BaseException):
        pass

    def begin_work() -> dict[str, Any]:
        (tmp_path / "part").write_text("half")
        raise Killed

    with pytest.raises(Killed):
        once(tmp_path, {"seed": 1}, begin_work)
    result = once(tmp_path, {"seed": 1}, lambda: {"read": (tmp_path / "part").read_text()})
    assert result == {"read": "half"}


def test_work_that_may_not_restart_is_refused_with_what_has_changed(tmp_path):
    with begin(tmp_path / "out", {"seed": 1, "data": "a" * 64}, "contaccum fit", False):
        (tmp_path / "out" / "part").write_text("")
    expected = r"another seed \(1, now 2\), data \(name another output folder"
    changed = {"seed": 2, "data": "b" * 64}
    with (
        pytest.raises(ConfigError, match=expected),
        begin(tmp_path / "out", changed, "contaccum fit", False),
    ):
        pytest.fail("refused before the work begins")
    assert (tmp_path / "out" / "part").is_file()


def test_folder_of_work_that_the_user_must_correct_is_free_again(tmp_path):
    with (
        pytest.raises(UserError, match="no such column"),
        begin(tmp_path / "out", {"seed": 1}, "contaccum fit", False),
    ):
        raise UserError("no such column")
    assert not (tmp_path / "out").exists()


def test_second_process_in_a_folder_is_refused(tmp_path):
    with (
        lock(tmp_path, "contaccum fit"),
        pytest.raises(ConfigError, match="another run works in this folder"),
    ):
        once(tmp_path, {"seed": 1}, dict)


def test_credentials_are_neither_written_nor_a_change(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    identity = {"data": "https://host/hf_0123456789/pairs"}
    assert once(tmp_path, identity, lambda: {"value": 1}) == {"value": 1}
    assert once(tmp_path, identity, lambda: {"value": 2}) == {"value": 1}
    assert "hf_0123456789" not in (tmp_path / "identity.json").read_text()


def test_work_of_another_kind_is_neither_emptied_nor_replaced(tmp_path):
    write_identity(tmp_path / "store", {"work": "a store"})
    (tmp_path / "store" / "shard").write_text("hours of work")
    with pytest.raises(ConfigError, match="another work"):
        once(tmp_path / "store", {"work": "a fit"}, dict)
    for allows_files in (False, True):
        with pytest.raises(ConfigError, match="holds a store"):
            require_own_folder(tmp_path / "store", "a fit", allows_files)
    with pytest.raises(ConfigError, match="holds other files"):
        require_own_folder(tmp_path, "a fit")
    require_own_folder(tmp_path, "a fit", allows_files=True)
    assert (tmp_path / "store" / "shard").is_file()


@pytest.mark.parametrize("damage", ["gone", "cut off", "no result", "half a result"])
def test_work_with_sizes_is_not_finished_if_a_file_is_missing_or_cut_off(tmp_path, damage):
    (tmp_path / "sub").mkdir()
    weights = tmp_path / "sub" / "weights"
    weights.write_text("weights")
    assert finish(tmp_path, {"update": 3}, has_sizes=True)["files"] == {"sub/weights": 7}
    assert read_result(tmp_path)["update"] == 3
    result = tmp_path / "result.json"
    if damage == "gone":
        shutil.rmtree(weights.parent)
    elif damage == "cut off":
        os.truncate(weights, 3)
    elif damage == "no result":
        result.unlink()
    else:
        os.truncate(result, 10)
    assert read_result(tmp_path) is None


def test_every_file_reaches_the_disk_before_the_result(tmp_path, monkeypatch):
    flushed: list[Path] = []
    fsync = os.fsync

    def record_fsync(file: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    (tmp_path / "sub").mkdir()
    files = [tmp_path / "sub" / "bank", tmp_path / "weights"]
    for path in files:
        path.write_text("")
    monkeypatch.setattr(os, "fsync", record_fsync)
    finish(tmp_path, {}, has_sizes=True)
    names = [path.name for path in flushed]
    assert max(names.index("bank"), names.index("weights")) < names.index("result.json")


def test_seconds_of_a_stage_are_those_of_all_starts(tmp_path, monkeypatch):
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(work_module.time, "monotonic", lambda: clock.seconds)
    for _ in range(2):
        budget = Budget(1000.0, tmp_path)
        with budget.measure("training"):
            clock.seconds += 3.0
    assert budget.stage_seconds == {"training": 6.0}
    assert Budget(1000.0, tmp_path).used() == 6.0
