"""Checkpoints as folders: written whole or not at all, with a checksum for every file, found again by what they hold.

A checkpoint grows in a hidden folder beside its place, is forced to the disk, and is then renamed: under its name there
is a whole one or none, at whatever instant the process dies. What its files say is the trainer's affair.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from contaccum.errors import UserError
from contaccum.version import __version__

MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_WRITING = ".writing-"  # before the name of one that is not whole yet
_REPLACED = ".replaced-"  # before the name of one whose successor is about to take its place
_PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".joblib", ".distcp")
_READ = (".safetensors", ".py")  # others that a loader may take up if someone adds one
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Checkpoint(NamedTuple):
    """A folder found, and why it cannot be used; None: it can."""

    path: Path
    update: int
    fault: str | None


class CheckpointWriter:
    """A checkpoint in the making.

    Args:
        folder: the run's.
        name: ``checkpoint-`` and the number of updates done.
    """

    def __init__(self, folder: str | os.PathLike[str], name: str) -> None:
        self.folder, self.name = Path(folder), name
        self.parent = self.folder / f"{_WRITING}{name}"
        self.path = self.parent / name
        """Where to write its files."""

    def begin(self) -> None:
        """Make room: what a killed run left half-written goes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        restore_replaced(self.folder)
        for leftover in self.folder.glob(f"{_WRITING}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        self.path.mkdir(parents=True)

    def commit(self) -> Path:
        """Checksums, all of it forced to the disk, and its name at last."""
        write_manifest(self.path)
        for path in sorted(self.path.rglob("*")):
            _force(path)
        _force(self.path)
        final, aside = self.folder / self.name, self.folder / f"{_REPLACED}{self.name}"
        if final.exists():
            # No folder can take the place of another in one step; a kill in between is mended by restore_replaced.
            os.rename(final, aside)
        os.rename(self.path, final)
        _force(self.folder)
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(self.parent, ignore_errors=True)
        return final

    def discard(self) -> None:
        """Give up; the disk has its room back."""
        shutil.rmtree(self.parent, ignore_errors=True)


def restore_replaced(folder: Path) -> None:
    """Give checkpoints their name back whose successor had none yet when the process was killed."""
    for aside in folder.glob(f"{_REPLACED}*"):
        final = folder / aside.name.removeprefix(_REPLACED)
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            os.rename(aside, final)


def write_manifest(folder: Path) -> None:
    """``manifest.json``: size and SHA-256 of every file in the folder, by its path in it.

    Raises:
        UserError: when one of them is a pickle by its name.
    """
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    pickles = [name for name in files if name.endswith(_PICKLES)]
    if pickles:  # now, rather than when someone wants to go on from it
        raise UserError(
            f"{folder.name}: {pickles[0]} may be a pickle, which a checkpoint must not hold; who writes it?"
        )
    manifest = {
        "format": 1,
        "contaccum": __version__,
        "files": {name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for name, path in files.items()},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def fault_of(folder: Path) -> str | None:
    """Why a checkpoint cannot be used, in a phrase; None: every file is as it was written, and none can run code."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST}: not whole, or written by an earlier version"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"its {MANIFEST} cannot be read"
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix in _PICKLES and path.is_file():
            return f"{name} is of a kind that can hold code (a pickle), which is never loaded here"
        if path.suffix in _READ and name not in files:
            return f"{name} is not in its {MANIFEST}: someone added it"
    for name, (size, checksum) in files.items():
        path = folder / name
        if ".." in Path(name).parts or Path(name).is_absolute() or path.is_symlink():
            return f"{name} lies outside of it"
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes, not {size:,}"
        if _sha256(path) != checksum:
            return f"{name} is not what was written (its checksum differs)"
    return None


def find_checkpoints(folder: str | os.PathLike[str]) -> Iterator[Checkpoint]:
    """The checkpoints of a run, newest first, each looked at when it is asked for."""
    restore_replaced(Path(folder))
    found = [(int(match[1]), path) for path in Path(folder).glob("*") if (match := _NAME.fullmatch(path.name))]
    for update, path in sorted(found, reverse=True):
        if path.is_dir():
            yield Checkpoint(path, update, fault_of(path))


def last_valid(folder: str | os.PathLike[str]) -> tuple[Path, list[Checkpoint]]:
    """The newest checkpoint that can be used, and those newer that cannot.

    Raises:
        UserError: when there is none, saying what is wrong with those that are there.
    """
    passed: list[Checkpoint] = []
    for found in find_checkpoints(folder):
        if found.fault is None:
            return found.path, passed
        passed.append(found)
    if not passed:
        raise UserError(f"{folder}: no checkpoint to resume from; drop --resume_from_checkpoint to start anew")
    faults = "; ".join(f"{one.path.name}: {one.fault}" for one in passed)
    raise UserError(
        f"{folder}: no checkpoint can be resumed from ({faults}); drop --resume_from_checkpoint to start anew"
    )


@contextmanager
def one_line_when_full(what: str, folder: str | os.PathLike[str], then: str = "") -> Iterator[None]:
    """Turn a disk without room, or a file beyond its limit, into one line.

    Raises:
        UserError: instead of the system's error.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not is_no_room(error):
            raise
        free = f"{shutil.disk_usage(folder).free / 2**20:,.0f} MB free" if os.path.isdir(folder) else "no folder"
        raise UserError(f"{what} could not be written: no room on the disk of {folder} ({free}). {then}") from error


def is_no_room(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is a full disk or quota; safetensors has its own words for one."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return True
        if type(error).__name__ == "SafetensorError" and any(f"os error {n})" in str(error) for n in _NO_ROOM):
            return True
        error = error.__cause__ or error.__context__
    return False


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """Write JSON so that the file is the old one or the new one, whenever the process dies."""
    replace_file(path, json.dumps(content, indent=2, default=str))


def replace_file(path: str | os.PathLike[str], text: str) -> None:
    """Write a text so that the file is the old one or the new one, whenever the process dies."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.writing")
    beside.write_text(text, encoding="utf-8")
    _force(beside)
    os.replace(beside, path)


def force_to_disk(path: str | os.PathLike[str]) -> None:
    """Force a file to the disk, if there is one."""
    if os.path.exists(path):
        _force(Path(path))


def _force(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # which has no such thing for folders
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
