"""Where data that was read lies on disk, and under which name, so that it is read once.

A folder of the cache is there whole or not at all. What is in it is up to whoever writes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from contaccum.data.records import one_line
from contaccum.errors import DataError

ABOUT = "about.json"

_ABANDONED = 7 * 24 * 3600
"""Seconds after which a half-written folder belongs to a process that was killed."""

_TICK, _WHOLE_SECONDS = 0.02, 2.0
"""Within so many seconds, a second change of a file may leave its time as it is; the latter where a file system keeps
whole seconds."""


def cache_folder() -> Path:
    """``$CONTACCUM_CACHE``, or else ``contaccum`` in the user's folder for caches."""
    named = os.environ.get("CONTACCUM_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(named) if named else Path(base) / "contaccum"


def files_of(source: Path) -> list[Path]:
    """The files that a source is made of: itself, or all that are in the folder; none where there is nothing."""
    if source.is_dir():
        return sorted(path for path in source.rglob("*") if path.is_file())
    return [source] if source.is_file() else []


def source_key(files: Iterable[Path], *about: Any) -> str:
    """A name for what is read from files in some way: another one when a file's path, size or time changes.

    Args:
        about: what else decides, in values that JSON can hold.
    """
    facts = []
    for file in files:
        stat = file.stat()
        _let_time_pass(stat.st_mtime_ns)
        stat = file.stat()
        facts.append((str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return hashlib.sha256(json.dumps([facts, about], sort_keys=True).encode()).hexdigest()[:32]


def _let_time_pass(changed_ns: int) -> None:
    # A file written a moment ago may be written again with the same size and time, and would be taken for the old one.
    tick = _WHOLE_SECONDS if changed_ns % 1_000_000_000 == 0 else _TICK
    left = changed_ns / 1e9 + tick - time.time()
    if 0 < left <= tick:
        time.sleep(left)


@contextmanager
def storing() -> Iterator[None]:
    """Turn what goes wrong while writing into one clear line."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        mend = "free some space, or name another folder in the environment variable CONTACCUM_CACHE"
        raise DataError(one_line(f"{cache_folder()}: the data cannot be stored: {reason} ({mend})")) from error


def stored(key: str, write: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """The folder of a key, and what it says about itself; written first where there is none.

    Args:
        write: fills a folder and returns what to say about it, for JSON. Called only when it is needed.

    Raises:
        DataError: the cache cannot be written; and what ``write`` raises. Nothing half-written stays.
    """
    folder = cache_folder() / "rows" / key
    about = _about(folder)
    if about is not None:
        return folder, about
    partial = folder.with_name(f"{key}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with storing():
            partial.mkdir(parents=True)
            _remove_abandoned(folder.parent)
        told = write(partial)
        with storing():
            sizes = {path.name: path.stat().st_size for path in partial.iterdir()}
            (partial / ABOUT).write_text(json.dumps({"sizes": sizes, "about": told}), encoding="utf-8")
            try:
                partial.rename(folder)
            except OSError:
                if _about(folder) is None:  # otherwise another process stored the same in the meantime
                    shutil.rmtree(folder, ignore_errors=True)  # damaged
                    partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    about = _about(folder)
    if about is None:
        raise DataError(f"{folder}: what was stored is gone again (is somebody clearing the cache?)")
    return folder, about


def _about(folder: Path) -> dict[str, Any] | None:
    """What a folder says about itself; None where it is not there, or not whole any more."""
    try:
        content = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        whole = all((folder / name).stat().st_size == size for name, size in content["sizes"].items())
        return content["about"] if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove_abandoned(folder: Path) -> None:
    for partial in folder.glob("*.partial"):
        newest = max((path.stat().st_mtime for path in (partial, *partial.iterdir())), default=0.0)
        if time.time() - newest > _ABANDONED:
            shutil.rmtree(partial, ignore_errors=True)
