"""A piece of work in a folder: is it the same work, is it finished, and whose turn is it.

The folder has ``identity.json`` from the start of the work on, everything that decides the result,
and ``result.json`` from its end on. With several processes (ranks), the first one compares and
writes, and all of them go on with what it has found.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from contaccum.errors import ConfigError, DataError, UserError
from contaccum.files import flush, read_json, write_json
from contaccum.redaction import redact

Identity = Mapping[str, Any]
"""{name: JSON value} of everything that decides the result of some work; "work" is its kind."""

IDENTITY_FILE = "identity.json"
RESULT_FILE = "result.json"

P = ParamSpec("P")
R = TypeVar("R")

_MAX_SHOWN_VALUE = 60  # characters of a changed value; hashes are longer


# Whose turn it is ---------------------------------------------------------------------------------


def on_first_rank(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return on all ranks, which must all call it, what a function returns on the first one."""
    from contaccum.distributed import broadcast, rank  # with torch, which refusals do not wait for

    return broadcast(function(*args, **kwargs) if rank() == 0 else None)


# The same work ------------------------------------------------------------------------------------


def read_identity(folder: Path) -> dict[str, Any]:
    """Return the identity of the work in a folder; {} if there is none."""
    file = folder / IDENTITY_FILE
    return read_json(file) if file.is_file() else {}


def write_identity(folder: Path, identity: Identity) -> None:
    """Write the identity of work that begins in a folder; what was there is not finished now."""
    write_json(folder / IDENTITY_FILE, identity)
    (folder / RESULT_FILE).unlink(missing_ok=True)


def list_changes(earlier: Identity, current: Identity) -> list[str]:
    """Return what differs between an identity in a file and a new one: names and short values."""
    as_in_file = json.loads(json.dumps(redact(dict(current)), default=str))
    changes = []
    for name in {**earlier, **as_in_file}:
        before, now = (str(content.get(name, "default")) for content in (earlier, as_in_file))
        if before != now:
            is_short = max(len(before), len(now)) <= _MAX_SHOWN_VALUE
            changes.append(f"{name} ({before}, now {now})" if is_short else name)
    return changes


def require_same_work(
    folder: Path, identity: Identity, remedy: str = "name another output folder, or remove this one"
) -> None:
    """Write the identity of the work in a folder; raise `ConfigError` if another one is there."""
    earlier = read_identity(folder)
    if not earlier:
        write_identity(folder, identity)
    elif changes := list_changes(earlier, identity):
        raise ConfigError(f"{folder}: has work with another {', '.join(changes)} ({remedy})")


def require_own_folder(folder: Path, kind: str, allows_files: bool = False) -> None:
    """Raise `ConfigError` for a folder with other work than that of a kind, or with other files.

    ``kind`` is the value of "work" in the identity. ``allows_files`` allows files of no work.
    """
    found = read_identity(folder).get("work")
    if found == kind:
        return
    # Hidden files do not count: a process that was killed before it wrote the identity leaves some.
    if found is None and not allows_files and (folder.is_file() or any(folder.glob("[!.]*"))):
        found = "other files"
    if found is not None:
        raise ConfigError(f"{folder}: holds {found}; name another output folder")


# Finished work ------------------------------------------------------------------------------------


def read_result(folder: Path) -> dict[str, Any] | None:
    """Return the result of the work in a folder; None if the work is not finished.

    It is not if ``result.json`` is damaged, or if a file that `finish` has recorded has another
    size or is missing, as in a copy that was cut off.
    """
    try:
        result = read_json(folder / RESULT_FILE)
    except DataError:
        return None
    for name, size in result.get("files", {}).items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return None
    return result


def find_result(folder: Path, identity: Identity) -> dict[str, Any] | None:
    """Return the result of the same work in a folder; None if it is other work, or not finished."""
    return None if list_changes(read_identity(folder), identity) else read_result(folder)


def finish(folder: Path, result: Mapping[str, Any], has_sizes: bool = False) -> dict[str, Any]:
    """Write the result of the work in a folder, which is finished then; return it as read.

    With ``has_sizes``, all files reach the disk first, and the result has their sizes.
    """
    written = dict(result)
    if has_sizes:
        sizes = {}
        for path in sorted(folder.rglob("*")):
            flush(path)
            if path.is_file():
                sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
        written["files"] = sizes
    write_json(folder / RESULT_FILE, written)
    return read_json(folder / RESULT_FILE)


def remove_files(folder: Path) -> None:
    """Remove all that is in a folder but the identity and the result of its work."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (IDENTITY_FILE, RESULT_FILE):
            path.unlink()


# Doing it -----------------------------------------------------------------------------------------


@contextmanager
def lock(folder: Path, command: str) -> Iterator[None]:
    """Hold a lock on a folder, which is made if needed, in a ``with`` block.

    The lock ends with the process, also after a kill. A new folder that stays empty is removed.

    Raises:
        UserError: if another process has the lock, which ``command`` names, or the folder cannot be
            made.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(f"{folder}: cannot be used as a folder ({error.strerror})") from error
    try:
        # File systems without locks raise another OSError, and are not locked.
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"{folder}: another {command} works in this folder; wait for it, or name "
                    "another output folder"
                ) from error
        yield
    finally:
        os.close(descriptor)
        if is_new:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


@contextmanager
def begin(folder: Path, identity: Identity, command: str, may_restart: bool) -> Iterator[None]:
    """Hold the lock of a folder in a ``with`` block of all ranks, and write the identity.

    With ``may_restart``, a folder with other work of the same kind is emptied; without, it is
    refused by `ConfigError`.
    """
    with ExitStack() as held:

        def take_folder() -> None:
            held.enter_context(lock(folder, command))
            earlier = read_identity(folder)
            is_same_kind = earlier.get("work") == identity.get("work")
            if may_restart and earlier and is_same_kind and list_changes(earlier, identity):
                (folder / RESULT_FILE).unlink(missing_ok=True)
                remove_files(folder)
                write_identity(folder, identity)
            require_same_work(folder, identity)

        on_first_rank(take_folder)
        try:
            yield
        except UserError:
            # Nothing was done: the user corrects the mistake, and may use the folder.
            if [path.name for path in folder.iterdir()] == [IDENTITY_FILE]:
                (folder / IDENTITY_FILE).unlink(missing_ok=True)
            raise


def once(
    folder: Path, identity: Identity, work: Callable[[], Mapping[str, Any]], all_ranks: bool = False
) -> dict[str, Any]:
    """Return the result of ``work`` in a folder, a JSON object; it is done only once.

    Work that a kill has interrupted goes on with the files that it left. If the identity has
    changed, the folder is emptied first. The first rank does the work, or ``all_ranks`` together.
    """
    result = on_first_rank(find_result, folder, identity)
    if result is not None:
        return result
    with begin(folder, identity, "run", may_restart=True):
        done = work() if all_ranks else on_first_rank(work)
        return on_first_rank(finish, folder, done)


# Its time -----------------------------------------------------------------------------------------


class Budget:
    """The wall time that some work may take in all its starts together, which a file records."""

    def __init__(self, seconds: float, folder: Path) -> None:
        self.seconds = seconds
        self.stage_seconds: dict[str, float] = {}
        self._file = folder / "used_time.json"
        self._started = time.monotonic()
        self._used_before = 0.0
        if self._file.is_file():
            record = read_json(self._file)
            self._used_before = float(record["used_seconds"])
            self.stage_seconds = record["stages"]

    def used_here(self) -> float:
        """Return the seconds that were used so far, by the clock of this rank."""
        return self._used_before + time.monotonic() - self._started

    def used(self) -> float:
        """Return the seconds that were used so far, on all ranks, by the clock of the first one."""
        return on_first_rank(self.used_here)

    def left(self) -> float:
        """Return the seconds that are left, negative if none are; see `used`."""
        return self.seconds - self.used()

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Add the time of a ``with`` block to that of a stage; the first rank writes both."""
        from contaccum.distributed import rank

        started = time.monotonic()
        try:
            yield
        finally:
            seconds = self.stage_seconds.get(stage, 0.0) + time.monotonic() - started
            self.stage_seconds[stage] = round(seconds, 1)
            if rank() == 0:
                used = round(self.used_here(), 1)
                write_json(self._file, {"used_seconds": used, "stages": self.stage_seconds})
