"""A lock on an output folder, so that two processes do not work in it at the same time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from contaccum.errors import ConfigError, UserError


@contextmanager
def lock_folder(path: Path, command: str) -> Iterator[None]:
    """Hold a lock on a folder in a ``with`` block; make the folder if it does not exist.

    The lock ends with the process, also after a kill. File systems without locks are not locked. A
    folder that was made for the block is removed if it is empty at the end.

    Args:
        path: the folder.
        command: the name of the command in the error message.

    Raises:
        ConfigError: if another process has the lock.
        UserError: if the folder cannot be made.
    """
    is_new = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(f"{path}: cannot be used as a folder ({error.strerror})") from error
    try:
        # File systems without locks raise another OSError, and are not locked.
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"{path}: another {command} works in this folder; wait for it, or name another "
                    "--output"
                ) from error
        yield
    finally:
        os.close(descriptor)
        if is_new:
            with suppress(OSError):  # it is not empty
                path.rmdir()
