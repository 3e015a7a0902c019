"""Atomic files and folders, fingerprints and the cache folder."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from contaccum.errors import DataError, UserError
from contaccum.files import (
    Fingerprint,
    atomic_file,
    atomic_folder,
    cache_folder,
    describe_failed_write,
    fingerprint,
    hash_path,
    read_json,
    require_writable,
    write_json,
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("half way"), RuntimeError),
        (OSError(errno.ENOSPC, "No space left on device"), UserError),
        (FileNotFoundError(errno.ENOENT, "of what was read"), FileNotFoundError),
    ],
)
def test_failed_write_leaves_the_earlier_file(error, expected, tmp_path):
    path = tmp_path / "out.json"
    path.write_text("before")
    with pytest.raises(expected), atomic_file(path) as part:
        part.write_text("after, the first ha")
        raise error
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["out.json"]


def test_a_failed_write_in_a_new_folder_names_the_folder_that_was_asked_for(tmp_path):
    with (
        pytest.raises(UserError, match=rf"^{tmp_path}/out/in/a\.json: cannot be written"),
        atomic_folder(tmp_path / "out") as folder,
        atomic_file(folder / "in" / "a.json"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert os.listdir(tmp_path) == []


FULL_DISK = "No space left on device"
WRAPPED = RuntimeError("the data set cannot be made")
WRAPPED.__cause__ = OSError(errno.ENOSPC, FULL_DISK)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system"),
        (SafetensorError(f"I/O error: {FULL_DISK} (os error 28)"), FULL_DISK),
        (Exception(f"Error writing bytes to file. Detail: [errno 28] {FULL_DISK}"), FULL_DISK),
        (RuntimeError("[inline_container.cc:603] PytorchStreamWriter failed writing"), FULL_DISK),
        (RuntimeError("[inline_container.cc:672] . unexpected pos 8448 vs 8342"), FULL_DISK),
        (RuntimeError("basic_ios::clear: iostream error"), FULL_DISK),
        (OSError("1048576 requested and 16384 written"), FULL_DISK),
        (WRAPPED, FULL_DISK),
        (RuntimeError("[inline_container.cc:145] PytorchStreamReader failed reading"), None),
        (SafetensorError("No such file or directory (os error 2)"), None),
        (KeyError("a defect"), None),
        (ValueError("no vector for 'errno 13' or 'Errno 28' or os error 28"), None),
        (PermissionError(errno.EACCES, "Permission denied", "a.json"), "Permission denied"),
        (PermissionError(errno.EPERM, "Operation not permitted"), None),  # of a socket
    ],
)
def test_failed_writes_of_all_libraries_are_recognised(error, reason):
    assert describe_failed_write(error) == reason


def test_folder_is_replaced_completely_or_not_at_all(tmp_path):
    path = tmp_path / "store"
    for content in ("first", "second"):
        with atomic_folder(path) as part:
            (part / "inner").mkdir()
            (part / "inner" / content).write_text(content)
            assert not (path / "inner" / content).exists()
        assert [x.name for x in path.rglob("*") if x.is_file()] == [content]
    with pytest.raises(RuntimeError), atomic_folder(path) as part:
        (part / "third").write_text("half")
        raise RuntimeError
    assert [x.name for x in path.rglob("*") if x.is_file()] == ["second"]


WRITES = """
import os, signal, sys
from contaccum.files import atomic_folder
with atomic_folder(sys.argv[1]) as part:
    (part / sys.argv[2]).touch()
    if sys.argv[3] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def write_in_another_process(path: Path, name: str, end: str = "whole") -> int:
    return subprocess.run(
        [sys.executable, "-c", WRITES, str(path), name, end], timeout=60
    ).returncode


@pytest.mark.parametrize("is_there", [False, True])
def test_folder_that_another_process_wrote_meanwhile_is_kept(is_there, tmp_path):
    path = tmp_path / "store"
    if is_there:
        assert write_in_another_process(path, "before") == 0
    with atomic_folder(path) as part:
        (part / "ours").touch()
        assert write_in_another_process(path, "theirs") == 0
        assert os.listdir(path) == ["theirs"] and os.listdir(part) == ["ours"]
        (part / "more of ours").touch()
    assert os.listdir(path) == ["theirs"] and os.listdir(tmp_path) == ["store"]


def test_leftovers_of_killed_processes_are_removed(tmp_path):
    """The temporary folder of a running process is not removed."""
    path = tmp_path / "store"
    assert write_in_another_process(path, "torn", "killed") == -signal.SIGKILL
    (leftover,) = tmp_path.iterdir()
    assert os.listdir(leftover) == ["torn"]
    (tmp_path / ".replaced-store.0").mkdir()
    with atomic_folder(path) as part:
        assert list(tmp_path.iterdir()) == [part]
        assert write_in_another_process(path, "torn", "killed") == -signal.SIGKILL
        assert part.is_dir()
        (part / "ours").touch()
    assert os.listdir(path) == ["ours"]
    with atomic_file(path / "ours") as part, atomic_file(path / "ours") as second_part:
        part.write_text("first")
        second_part.write_text("second")
    assert os.listdir(path) == ["ours"] and (path / "ours").read_text() == "first"


def test_invalid_json_is_refused_with_the_file_name(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": ')
    with pytest.raises(DataError, match=r"a\.json: not a JSON file"):
        read_json(path)
    write_json(path, [1])
    with pytest.raises(DataError, match=r"a\.json: contains a list, expected a dict"):
        read_json(path)
    with pytest.raises(ValueError):
        write_json(path, {"loss": float("nan")})
    assert read_json(path, list) == [1]


def test_require_writable_refuses_unusable_paths(tmp_path):
    require_writable(tmp_path / "new" / "folder" / "out.json")
    assert os.listdir(tmp_path / "new" / "folder") == []
    (tmp_path / "file").touch()
    for path, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "out.json", "cannot be written"),
    ):
        with pytest.raises(UserError, match=message):
            require_writable(path)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CONTACCUM_CACHE": "~/cache", "XDG_CACHE_HOME": "/xdg"}, "/home/me/cache/sets/a"),
        ({"CONTACCUM_CACHE": "", "XDG_CACHE_HOME": "~/xdg"}, "/home/me/xdg/contaccum/sets/a"),
        ({}, "/home/me/.cache/contaccum/sets/a"),
    ],
)
def test_cache_folder_follows_its_environment_variables(variables, expected, monkeypatch):
    for name in ("CONTACCUM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    assert cache_folder("sets", "a") == Path(expected)


def test_fingerprint_depends_on_values_and_boundaries():
    """It does not depend on the order of keys in a dict."""
    assert fingerprint("ab", "c") != fingerprint("a", "bc") != fingerprint("abc")
    assert (
        fingerprint({"a": 1, "b": [2]})
        == fingerprint({"b": [2], "a": 1})
        != fingerprint({"a": 1, "b": [3]})
    )
    assert fingerprint("a", 1) != fingerprint(1, "a")
    parts = Fingerprint("a")
    parts.add(b"b", 3)
    assert parts.hex() == fingerprint("a", b"b", 3) and len(parts.hex()) == 64


def test_hash_depends_on_names_and_contents_and_not_on_the_place(tmp_path):
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "test.tsv"
    file.write_text("q\td\t1\n")
    first = hash_path(str(tmp_path / "data"))
    file_hash = hash_path(str(file))
    (tmp_path / "data").rename(tmp_path / "moved")
    assert hash_path(str(tmp_path / "moved")) == first
    assert hash_path(str(tmp_path / "moved" / "test.tsv")) == file_hash
    (tmp_path / "moved" / "out").mkdir()
    (tmp_path / "moved" / "out" / "result").write_text("")
    assert hash_path(str(tmp_path / "moved"), left_out=tmp_path / "moved" / "out") == first
    (tmp_path / "moved" / "test.tsv").write_text("q\td\t0\n")
    assert hash_path(str(tmp_path / "moved")) != first
    assert hash_path("owner/name-on-the-hub") == "owner/name-on-the-hub"
    item = json.dumps({"path": str(tmp_path / "moved" / "test.tsv"), "min_score": 1})
    assert str(tmp_path) not in hash_path(item)


@pytest.mark.parametrize(
    "moment", ["before the old folder is moved away", "before the new one takes the name"]
)
def test_two_simultaneous_replacements_leave_one_folder(moment, tmp_path, monkeypatch):
    path = tmp_path / "store"
    with atomic_folder(path) as part:
        (part / "before").touch()
    rename = Path.rename
    is_second = False

    def interleaved(self: Path, target: Path) -> Path:
        nonlocal is_second
        moved = path if moment.startswith("before the old") else part
        if self == moved and not is_second:
            is_second = True
            if path.exists():
                rename(path, tmp_path / "elsewhere")
            path.mkdir()
            (path / "theirs").touch()
        return rename(self, target)

    with atomic_folder(path) as part:
        (part / "ours").touch()
        monkeypatch.setattr(Path, "rename", interleaved)
    assert os.listdir(path) in (["ours"], ["theirs"])
    assert {name for name in os.listdir(tmp_path) if name.startswith(".")} == set()
