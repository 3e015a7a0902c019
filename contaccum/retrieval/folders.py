"""Folders in which stores are written and read: on this machine, or at a URL that fsspec opens.

A store holds the embeddings of a corpus as files; `store_files` describes them. Files of a folder
at a URL, such as ``s3://bucket/stores/wikipedia``, are downloaded into the cache folder of this
machine when they are needed, and mapped into memory from there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contaccum import files
from contaccum.errors import ConfigError, DataError, UserError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# The start of a URL: "s3://", or "simplecache::s3://" for a chain of file systems.
_URL_START = re.compile(r"[a-z][a-z0-9+.-]*(://|::)", re.I)
# The start of a URL after pathlib.Path has changed it: "s3:/" for "s3://".
_SHORTENED_URL_START = re.compile(r"[a-z][a-z0-9+.-]+:/", re.I)


class StoreFolder(ABC):
    """Folder of a store. In all methods, ``name`` is a path relative to this folder.

    An example of a name is "shard-00000/embeddings.npy".

    Attributes:
        location: the path of the folder, or its URL without credentials; ``str(folder)`` gives it
            as a text.
    """

    location: Path | str

    def __str__(self) -> str:
        return str(self.location)

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Return whether there is a file or a folder of this name."""

    @abstractmethod
    def list_names(self) -> list[str]:
        """Return the names of the files and folders directly in this folder, except hidden ones.

        The list is empty if this folder does not exist. If its path is that of a file, the list is
        not empty, so that a caller who needs an empty folder refuses it.
        """

    @abstractmethod
    def get_file_sizes(self, name: str) -> dict[str, int]:
        """Return {file name: size in bytes} of a subfolder; {} if the subfolder does not exist."""

    @abstractmethod
    def read_json(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file.

        Raises:
            DataError: the file is missing, or is not a JSON object.
        """

    @abstractmethod
    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file, from which credentials are removed, completely or not at all.

        Raises:
            UserError: the file cannot be written.
        """

    @abstractmethod
    def get_local_file(self, name: str) -> Path:
        """Return the path of a file on this machine that has the content of the named file.

        A file at a URL is downloaded first, unless the cache has it.
        """

    @abstractmethod
    def new_subfolder(self, name: str, last_file: str) -> AbstractContextManager[Path]:
        """Create a subfolder from the files that the ``with`` block writes.

        Yield an empty folder of this machine, into which the block writes. At its end, these files
        replace an earlier subfolder of this name. If the block raises an error, the earlier
        subfolder stays unchanged.

        Args:
            name: name of the subfolder.
            last_file: name of the file that becomes visible last. If it exists, the subfolder is
                complete.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its content, if it exists."""


class LocalFolder(StoreFolder):
    """Folder of this machine, or of a file system that is mounted on it."""

    def __init__(self, path: Path) -> None:
        self.location = path
        self.path = path

    def exists(self, name: str) -> bool:
        return (self.path / name).exists()

    def list_names(self) -> list[str]:
        if self.path.is_file():
            return [self.path.name]
        return [path.name for path in self.path.glob("[!.]*")]

    def get_file_sizes(self, name: str) -> dict[str, int]:
        try:
            return {path.name: path.stat().st_size for path in (self.path / name).iterdir()}
        except FileNotFoundError:
            return {}

    def read_json(self, name: str) -> dict[str, Any]:
        return files.read_json(self.path / name)

    def write_json(self, name: str, content: Any) -> None:
        files.write_json(self.path / name, content)

    def get_local_file(self, name: str) -> Path:
        return self.path / name

    def new_subfolder(self, name: str, last_file: str) -> AbstractContextManager[Path]:
        # All files of the subfolder appear at once, so none of them has to be the last.
        return files.atomic_folder(self.path / name)

    def remove(self, name: str) -> None:
        path = self.path / name
        # Another process may remove the same folder at the same time.
        with suppress(FileNotFoundError):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


class RemoteFolder(StoreFolder):
    """Folder at a URL.

    An object store has no folders: the folder is then the common start of the names of objects.
    Downloaded files stay in the cache folder, so that later searches need not download them again.

    Args:
        filesystem: fsspec's file system.
        path: path of the folder in this file system.
        url: the URL of the folder, for `location` and for messages.
    """

    def __init__(self, filesystem: AbstractFileSystem, path: str, url: str) -> None:
        self._filesystem = filesystem
        self._path = path.rstrip("/")
        self.location = files.redact(url.rstrip("/"))

    def exists(self, name: str) -> bool:
        with self._translate_errors("read", name):
            # fsspec caches listings, but other processes may have written to the folder since.
            self._filesystem.invalidate_cache()
            try:
                self._filesystem.info(self._join(name))
            except FileNotFoundError:
                return False
            return True

    def list_names(self) -> list[str]:
        names = [_get_last_part(entry["name"]) for entry in self._list_entries("")]
        return [name for name in names if not name.startswith(".")]

    def get_file_sizes(self, name: str) -> dict[str, int]:
        entries = self._list_entries(name)
        files_only = [entry for entry in entries if entry["type"] == "file"]
        return {_get_last_part(entry["name"]): entry["size"] for entry in files_only}

    def read_json(self, name: str) -> dict[str, Any]:
        with self._translate_errors("read", name):
            content = self._filesystem.cat_file(self._join(name))
        try:
            value = json.loads(content)
        except ValueError as error:
            raise DataError(f"{self}/{name}: not a JSON file that can be read ({error})") from error
        if not isinstance(value, dict):
            raise DataError(f"{self}/{name}: contains a {type(value).__name__}, expected a dict")
        return value

    def write_json(self, name: str, content: Any) -> None:
        with self._translate_errors("written", name):
            self._filesystem.pipe_file(self._join(name), files.format_json(content).encode())

    def get_local_file(self, name: str) -> Path:
        path = self._join(name)
        with self._translate_errors("read", name):
            # `ukey` returns another value after the file was replaced, so an outdated copy in the
            # cache folder is not used. It must not be computed from an outdated listing.
            self._filesystem.invalidate_cache()
            key = files.fingerprint(str(self), name, self._filesystem.ukey(path))
            local_path = files.cache_folder("stores", key, _get_last_part(name))
            if not local_path.exists():
                with files.atomic_file(local_path) as temporary_path:
                    self._filesystem.get_file(path, str(temporary_path))
        return local_path

    @contextmanager
    def new_subfolder(self, name: str, last_file: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as temporary_folder:
            local_folder = Path(temporary_folder, name)
            with files.atomic_folder(local_folder) as folder:
                yield folder
            # False sorts before True, so the last file is uploaded last.
            paths = sorted(local_folder.iterdir(), key=lambda path: path.name == last_file)
            self.remove(name)
            for path in paths:
                file_name = f"{name}/{path.name}"
                with self._translate_errors("written", file_name):
                    self._filesystem.put_file(str(path), self._join(file_name))

    def remove(self, name: str) -> None:
        with self._translate_errors("removed", name), suppress(FileNotFoundError):
            self._filesystem.rm(self._join(name), recursive=True)

    def _list_entries(self, name: str) -> list[dict[str, Any]]:
        """Return name, size and type of the files and folders in a subfolder."""
        with self._translate_errors("read", name):
            self._filesystem.invalidate_cache()
            try:
                entries = self._filesystem.ls(self._join(name), detail=True)
            except FileNotFoundError:
                return []
        # An object store may mark a folder by an empty object that has the path of the folder. The
        # listing of the folder then contains the folder itself.
        path = self._join(name).strip("/")
        return [entry for entry in entries if entry["size"] or entry["name"].strip("/") != path]

    def _join(self, name: str) -> str:
        """Return the path of a file or folder in the file system."""
        return f"{self._path}/{name}".rstrip("/")

    @contextmanager
    def _translate_errors(self, action: str, name: str) -> Iterator[None]:
        """Replace any error of the file system in the ``with`` block by a `UserError`.

        Args:
            action: past participle for the message, such as "read".
            name: name of the file or folder; "" for this folder.
        """
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            # All types are caught, because each file system has its own for errors of the network
            # or of credentials.
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f"{self._join_url(name)}: cannot be {action} ({files.redact(reason)}); check the "
                "URL, the network and your credentials"
            ) from error

    def _join_url(self, name: str) -> str:
        """Return the URL of a file or folder, without credentials."""
        return f"{self}/{name}".rstrip("/")


def is_url(path: files.AnyPath) -> bool:
    """Return whether a path is a URL that fsspec opens, and not a path of this machine."""
    return _URL_START.match(os.fspath(path)) is not None


def open_folder(path: files.AnyPath) -> StoreFolder:
    """Return the folder at a path or a URL. It need not exist.

    Args:
        path: a path of this machine, also in the form ``file://PATH``, or a URL as a str.

    Raises:
        ConfigError: the scheme of the URL is unknown, its package is not installed, or the URL is
            a ``pathlib.Path``.
        UserError: the file system cannot be used.
    """
    url = os.fspath(path)
    if isinstance(path, Path) and _SHORTENED_URL_START.match(url):
        raise ConfigError(
            f"{files.redact(url)}: pathlib.Path has changed this URL; pass the URL as a str"
        )
    if not is_url(url):
        return LocalFolder(Path(os.path.expanduser(url)))

    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    try:
        filesystem, remote_path = url_to_fs(url)
    except ImportError as error:
        raise ConfigError(f"{files.redact(url)}: a package is missing: {error}") from error
    except ValueError as error:
        raise ConfigError(
            f"{files.redact(url)}: cannot be used ({error}); name a path, or a URL such as "
            "s3://BUCKET/FOLDER"
        ) from error
    except Exception as error:  # some file systems connect here; each has errors of its own
        reason = files.redact(" ".join(f"{type(error).__name__}: {error}".split()))
        raise UserError(
            f"{files.redact(url)}: cannot be opened ({reason}); check the URL, the network and "
            "your credentials"
        ) from error
    if isinstance(filesystem, LocalFileSystem):
        return LocalFolder(Path(remote_path))
    return RemoteFolder(filesystem, remote_path, url)


def _get_last_part(name: str) -> str:
    """Return the part of a path after its last slash, such as "b" for "a/b" and "a/b/"."""
    return name.rstrip("/").rpartition("/")[2]
