"""Writing files whole or not at all, naming their content, and keeping credentials out of them.

Everything that the package writes for somebody to read later goes through here. It knows no format but JSON.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import uuid4

from contaccum import __version__
from contaccum.errors import DataError, UserError

AnyPath = str | os.PathLike[str]


@contextmanager
def atomic_file(path: AnyPath) -> Iterator[Path]:
    """A temporary path beside ``path`` to write to; it takes the name ``path`` when the block ends well.

    Otherwise what was there stays, and a UserError says that the folder cannot be written to, or the disk is full.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    with _writing(path):
        try:
            yield part
            _flush(part)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: AnyPath) -> Iterator[Path]:
    """A hidden folder beside ``path`` to fill; it takes the place of what is there when the block ends well.

    Several processes may write the same ``path`` at once, each into a folder of its own: what another one has put there
    since the block began is taken as it is. Errors are those of `atomic_file`. What a process that was killed left over
    is removed first.
    """
    path = Path(path)
    with _writing(path):
        _remove_leftovers(path)
        before = _identity(path)
        part, lock = _make_locked_folder(path)
        try:
            yield part
            for file in [*part.rglob("*"), part]:
                _flush(file)
            if _identity(path) == before:
                _put_in_place(part, path)
        finally:
            shutil.rmtree(part, ignore_errors=True)
            os.close(lock)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what tells a folder from another one of the same name, None where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _make_locked_folder(path: Path) -> tuple[Path, int]:
    """Make a folder to fill beside ``path``; return it and the handle of its lock, which ends with the process."""
    # It is locked under another name: under this one, another process could take it for a leftover before it is locked.
    unlocked = path.with_name(f".new-{uuid4().hex}")
    unlocked.mkdir()
    lock = os.open(unlocked, os.O_RDONLY)
    with suppress(OSError):  # a file system without locks, where leftovers stay
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    part = path.with_name(f".writing-{path.name}.{uuid4().hex}")
    unlocked.rename(part)
    return part, lock


def _remove_leftovers(path: Path) -> None:
    """Remove folders beside ``path`` that a process has left which no longer runs."""
    for left in path.parent.glob(f".writing-{glob.escape(path.name)}.*"):
        with suppress(OSError):  # its process runs, or has just removed it
            lock = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)
    for left in path.parent.glob(f".replaced-{glob.escape(path.name)}.*"):
        shutil.rmtree(left, ignore_errors=True)


def _put_in_place(part: Path, path: Path) -> None:
    """Give a folder the name ``path``; where another process does so at the same time, one of the two is dropped."""
    old = path.with_name(f".replaced-{path.name}.{uuid4().hex}")
    with suppress(FileNotFoundError):  # nothing is there, or another process has just moved it away
        path.rename(old)
    try:
        part.rename(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    shutil.rmtree(old, ignore_errors=True)


def write_text(path: AnyPath, text: str | Iterable[str]) -> None:
    """Write ``text`` (or its parts, one after the other) to ``path``, whole or not at all."""
    with atomic_file(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        file.writelines([text] if isinstance(text, str) else text)


def write_json(path: AnyPath, content: Any) -> None:
    """Write ``content`` as JSON, credentials taken out, whole or not at all. NaN is refused: it is not JSON."""
    write_text(
        path, json.dumps(redact(content), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    )


def read_json(path: AnyPath, kind: type = dict) -> Any:
    """The content of a JSON file; DataError when it is missing, is not JSON, or its content is not of ``kind``."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a JSON file that can be read ({error})") from error
    if not isinstance(content, kind):
        raise DataError(
            f"{path}: holds a {type(content).__name__}, where a {kind.__name__} is expected"
        )
    return content


def require_writable(path: AnyPath) -> None:
    """Make the folder of an output file and try it, before hours of work are lost to it; UserError when it fails."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file")
    with _writing(path), tempfile.TemporaryFile(dir=path.parent):
        pass


_NO_ROOM = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EEXIST,
)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Make the folder of ``path``, force its names to the disk in the end; what the disk refuses is a `UserError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
        _flush(path.parent)
    except OSError as error:
        if error.errno not in _NO_ROOM:  # what is read while writing may fail too
            raise
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); free space, or name another place"
        ) from error


def _flush(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Fingerprint:
    """sha256 over values in order. Lengths are hashed too, so that ``("ab", "c")`` is not ``("a", "bc")``."""

    def __init__(self, *values: Any) -> None:
        self._hash = hashlib.sha256()
        self.add(*values)

    def add(self, *values: Any) -> None:
        """Texts and bytes as they are, anything else as JSON."""
        for value in values:
            if not isinstance(value, (bytes, bytearray, memoryview)):
                value = (
                    value
                    if isinstance(value, str)
                    else json.dumps(value, sort_keys=True, default=str)
                ).encode()
            self._hash.update(len(value).to_bytes(8, "little"))
            self._hash.update(value)

    def hex(self) -> str:
        """64 hexadecimal digits."""
        return self._hash.hexdigest()


def fingerprint(*values: Any) -> str:
    """The `Fingerprint` of some values."""
    return Fingerprint(*values).hex()


def cache_folder(*parts: str) -> Path:
    """``$CONTACCUM_CACHE``, else ``contaccum`` under ``$XDG_CACHE_HOME`` or ``~/.cache``; ``~`` is expanded in both."""
    root = os.environ.get("CONTACCUM_CACHE")
    if not root:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "contaccum")
    return Path(root).expanduser().joinpath(*parts)


def package_versions() -> dict[str, str]:
    """{package: version} of Python, contaccum and what decides its numbers, of those that are installed."""
    versions = {"python": platform.python_version(), "contaccum": __version__}
    libraries = ["torch", "transformers", "sentence-transformers", "accelerate", "datasets"]
    for name in [*libraries, "faiss-cpu", "faiss-gpu", "pytrec-eval-terrier"]:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def provenance() -> dict[str, Any]:
    """What wrote a record: {"versions": of packages, "git_commit": of the checkout or None}."""
    return {"versions": package_versions(), "git_commit": git_commit()}


def git_commit() -> str | None:
    """The commit of the checkout that contaccum runs from; None when it is installed, or git cannot tell."""
    root = Path(__file__).resolve().parents[1]
    # An installed contaccum may lie inside somebody else's checkout, whose commit would say nothing about it.
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


_SECRET_NAMES = re.compile(
    r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE)(?:_|$)|PASSWORD$|APIKEY$", re.I
)
_IN_URL = re.compile(
    r"\b([a-z][a-z0-9+.-]+:/{1,2})[^\s/@'\"]+@", re.I
)  # one slash is what a path makes of two


def redact(content: Any) -> Any:
    """``<NAME>`` for the value of each credential in the environment, and ``***@`` for those of URLs.

    In a text, or in every text of a structure of dicts, lists and tuples, keys included.
    """
    return _redact(content, _credentials())


def _credentials() -> list[tuple[str, str]]:
    """Return name and value of each credential in the environment, the longest first."""
    credentials = []
    for name, value in os.environ.items():
        # A shorter value would blank half of what is said, and a path says where a key lies.
        if len(value) >= 8 and _SECRET_NAMES.search(name) and not os.path.exists(value):
            credentials.append((name, value))
    return sorted(credentials, key=lambda credential: -len(credential[1]))


def _redact(content: Any, credentials: list[tuple[str, str]]) -> Any:
    if isinstance(content, dict):
        return {
            _redact(key, credentials): _redact(value, credentials) for key, value in content.items()
        }
    if isinstance(content, (list, tuple)):
        return type(content)(_redact(item, credentials) for item in content)
    if not isinstance(content, str):
        return content
    for name, value in credentials:
        content = content.replace(value, f"<{name}>")
    return _IN_URL.sub(r"\1***@", content)
