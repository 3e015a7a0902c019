"""Atomic writing of files and folders, and fingerprints.

Output files are written under a temporary name first, so a killed process leaves no incomplete one.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import uuid4

from contaccum import __version__
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.redaction import redact

AnyPath = str | os.PathLike[str]
"""A path as users may give it."""

# Libraries whose versions affect results.
_LIBRARIES = (
    "torch",
    "transformers",
    "sentence-transformers",
    "accelerate",
    "datasets",
    "faiss-cpu",
    "faiss-gpu",
    "pytrec-eval-terrier",
)


@contextmanager
def atomic_file(path: AnyPath) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to ``path`` when the block ends.

    If the block raises an error, an earlier file at ``path`` stays unchanged.

    Raises:
        UserError: if the folder cannot be written to, or the disk is full.
    """
    path = Path(path)
    with _temporary_folder(path) as folder:
        temporary_path = folder / path.name
        yield temporary_path
        flush(temporary_path)
        os.replace(temporary_path, path)


@contextmanager
def atomic_folder(path: AnyPath) -> Iterator[Path]:
    """Yield a temporary folder to fill, and rename it to ``path`` when the block ends.

    An earlier folder at ``path`` is replaced, or stays if the block raises an error. If another
    process has written ``path`` since the block began, its folder is kept.

    Raises:
        UserError: if the folder cannot be written to, or the disk is full.
    """
    path = Path(path)
    with _temporary_folder(path) as folder:
        inode_before = path.stat().st_ino if path.exists() else None
        yield folder
        for file in [*folder.rglob("*"), folder]:
            flush(file)
        if inode_before != (path.stat().st_ino if path.exists() else None):
            return
        earlier_folder = path.with_name(f".replaced-{path.name}.{uuid4().hex}")
        # There may be no earlier folder, or another process has just moved it away.
        with suppress(FileNotFoundError):
            path.rename(earlier_folder)
        try:
            folder.rename(path)
        except OSError as error:
            # These errors mean that another process has just written ``path``.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                with suppress(OSError):
                    earlier_folder.rename(path)
                raise
        shutil.rmtree(earlier_folder, ignore_errors=True)


@contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside ``path``, whose parents are made; remove it after the block.

    A full or read-only disk becomes a `UserError`, also if the block meets it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        # It is locked before it gets its final name: others remove unlocked folders of this name.
        unlocked_folder = path.with_name(f".new-{uuid4().hex}")
        unlocked_folder.mkdir()
        lock = os.open(unlocked_folder, os.O_RDONLY)
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder = unlocked_folder.rename(path.with_name(f".writing-{path.name}.{uuid4().hex}"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
        flush(path.parent)
    except UserError:
        raise
    except Exception as error:
        reason = describe_failed_write(error)
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            reason = error.strerror
        # Other errors may come from files that the block reads.
        if reason is None:
            raise
        # A temporary folder around ``path`` is shown by the name that it was to get.
        shown = re.sub(r"\.writing-([^/]+)\.[0-9a-f]{32}", r"\1", str(path))
        raise UserError(
            f"{shown}: cannot be written ({reason}); free space, or name another path"
        ) from error


def _remove_leftovers(path: Path) -> None:
    """Remove temporary folders beside ``path`` that killed processes have left."""
    name_pattern = glob.escape(path.name)
    for leftover in path.parent.glob(f".writing-{name_pattern}.*"):
        # An OSError means that the folder is being written, or was just renamed or removed.
        with suppress(OSError):
            lock = os.open(leftover, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(leftover, ignore_errors=True)
            finally:
                os.close(lock)
    for leftover in path.parent.glob(f".replaced-{name_pattern}.*"):
        shutil.rmtree(leftover, ignore_errors=True)


def write_text(path: AnyPath, text: str | Iterable[str]) -> None:
    """Write a text, or its parts in order, as a file in UTF-8, atomically."""
    parts = [text] if isinstance(text, str) else text
    with (
        atomic_file(path) as temporary_path,
        temporary_path.open("w", encoding="utf-8", newline="") as file,
    ):
        file.writelines(parts)


def write_json(path: AnyPath, content: Any) -> None:
    """Write ``content``, without NaN and infinity, as JSON without credentials, atomically."""
    text = json.dumps(redact(content), indent=1, allow_nan=False, ensure_ascii=False)
    write_text(path, text + "\n")


def read_json(path: AnyPath, expected_type: type = dict) -> Any:
    """Return the content of a JSON file; raise `DataError` if it is none, or has another type."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a JSON file that can be read ({error})") from error
    if not isinstance(content, expected_type):
        raise DataError(
            f"{path}: contains a {type(content).__name__}, expected a {expected_type.__name__}"
        )
    return content


def require_writable(path: AnyPath) -> None:
    """Make the folder of an output file; raise `UserError` if the file cannot be written."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file")
    with _temporary_folder(path):
        pass


def require_exists(path: Path) -> None:
    """Raise `ConfigError` for a file or folder that does not exist."""
    if not path.exists():
        raise ConfigError(f"{path}: cannot be read (no such file or folder)")


def require_new_folder(folder: Path) -> None:
    """Raise `ConfigError` for a folder that exists."""
    if folder.exists():
        raise ConfigError(f"{folder}: exists already; name a new folder")


# Error numbers of a full disk, quota or file size, of a read-only disk, and of no permission.
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
# Messages of torch.save and numpy.save if a file cannot be written; they give no error number.
_WRITE_MESSAGES = (
    r"PytorchStreamWriter|inline_container.*unexpected pos|basic_ios::clear: iostream error|"
    r"requested and \d+ written"
)


def describe_failed_write(error: BaseException | None) -> str | None:
    """Return why a file cannot be written, such as "No space left on device"; None if it can.

    A full or read-only disk and a missing permission are reasons, of the error or of its cause.
    """
    while error is not None:
        text = str(error)
        if isinstance(error, OSError) and error.errno in _WRITE_ERRORS:
            # A socket or a process may lack permission too. Such an error names no file.
            if error.filename is not None or error.errno not in (errno.EACCES, errno.EPERM):
                return os.strerror(error.errno)
        # Libraries in Rust and C++, such as safetensors and Arrow, have the system's error in their
        # messages. A number alone may be part of the user's data.
        for number in _WRITE_ERRORS:
            reason = os.strerror(number)
            if f"{reason} (os error {number})" in text or f"[errno {number}] {reason}" in text:
                return reason
        if re.search(_WRITE_MESSAGES, text):
            return os.strerror(errno.ENOSPC)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def flush(path: Path) -> None:
    """Force the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Fingerprint:
    """A SHA-256 hash over values and their lengths, in order."""

    def __init__(self, *values: Any) -> None:
        self._hash = hashlib.sha256()
        self.add(*values)

    def add(self, *values: Any) -> None:
        """Hash texts and bytes as they are, and other values as JSON."""
        for value in values:
            content = value
            if not isinstance(value, (str, bytes, bytearray, memoryview)):
                content = json.dumps(value, sort_keys=True, default=str)
            if isinstance(content, str):
                content = content.encode()
            self._hash.update(len(content).to_bytes(8, "little"))
            self._hash.update(content)

    def hex(self) -> str:
        """Return the hash as 64 hexadecimal digits."""
        return self._hash.hexdigest()


def fingerprint(*values: Any) -> str:
    """Return the `Fingerprint` of values as 64 hexadecimal digits."""
    return Fingerprint(*values).hex()


def hash_file(path: Path) -> str:
    """Return the SHA-256 hash of the bytes of a file as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_path(name: str, left_out: Path | None = None) -> str:
    """Return a hash of a file or folder; the name itself of anything else, as on the hub.

    ``name`` may be a JSON object with a ``path``, as in ``train_data``. The files in ``left_out``
    do not count.
    """
    if name.lstrip().startswith("{"):
        options = json.loads(name)
        return json.dumps({**options, "path": hash_path(str(options.get("path")))})
    path = Path(name).expanduser()
    contents = []
    try:
        for file in sorted([path, *path.rglob("*")] if path.is_dir() else [path]):
            if left_out is not None and file.resolve().is_relative_to(left_out.resolve()):
                continue
            if file.is_file():
                state = file.stat()
                content = _hash_file(file, state.st_size, state.st_mtime_ns)
                contents += ["" if file == path else str(file.relative_to(path)), content]
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read ({error.strerror})") from error
    return fingerprint(*contents) if contents else name


@functools.cache  # several candidates may have the same model, which may be large
def _hash_file(file: Path, size: int, time_changed: int) -> str:
    return hash_file(file)


def cache_folder(*parts: str) -> Path:
    """Return the path of ``parts`` in the cache folder of contaccum.

    It is ``$CONTACCUM_CACHE``, else ``contaccum`` in ``$XDG_CACHE_HOME`` or in ``~/.cache``.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = os.environ.get("CONTACCUM_CACHE") or f"{cache}/contaccum"
    return Path(root).expanduser().joinpath(*parts)


def provenance() -> dict[str, Any]:
    """Return {"versions": {package: version}, "git_commit": hash or None}, for records.

    The commit is that of the checkout that contaccum runs from; an installed contaccum has none.
    """
    versions = {"python": platform.python_version(), "contaccum": __version__}
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    root = Path(__file__).resolve().parents[1]
    commit = None
    # An installed contaccum may lie inside the checkout of another project.
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        with suppress(OSError, subprocess.SubprocessError):
            commit = subprocess.check_output(command, text=True, timeout=10).strip()
    return {"versions": versions, "git_commit": commit}
