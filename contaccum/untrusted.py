"""Files from others: what would run code when it is read is refused, in one line that says what and where.

The libraries beneath load weights as safetensors, or as pickles limited to tensors, and import a model's own code only
when told to. Here is what they leave open, and their refusals turned into mistakes that the user can mend. What is
refused is in docs/security.md.
"""

from __future__ import annotations

import json
import os
import pickle
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from contaccum.errors import DataError, UserError

_MODULES = "modules.json"
_ROUTERS = ("router_config.json", "config.json")  # the latter is what older versions wrote
_OURS = "sentence_transformers."


@contextmanager
def refusing_code(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn the refusal of a pickle that is more than tensors, or of damaged weights, into one line about ``path``.

    Raises:
        UserError: for either.
    """
    from safetensors import SafetensorError

    try:
        yield
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: holds a pickle with more than weights in it, which could run code; it was not read. Get the "
            "weights as safetensors from somebody you trust"
        ) from error
    except SafetensorError as error:  # a download or copy that broke off, or another format under this name
        raise UserError(f"{path}: its weights are damaged ({error}); save or fetch it again") from error


def check_model_folder(path: str | os.PathLike[str], trust_remote_code: bool) -> None:
    """Refuse a saved SentenceTransformer that names classes of its own, before anything of it is imported.

    sentence-transformers imports what ``modules.json`` and Routers name: anything that can be reached from its own
    package, and with ``trust_remote_code`` anything at all. Without it, only its own modules pass here.

    Raises:
        UserError: naming the file and the class, or for a file that cannot be read.
    """
    folder = Path(path)
    if trust_remote_code or not (folder / _MODULES).is_file():
        return
    for entry in _read_json(folder / _MODULES, list):
        kind, where = (str(entry.get(key, "")) if isinstance(entry, dict) else "" for key in ("type", "path"))
        _check_class(kind, folder / _MODULES)
        _check_settings(folder, where, kind)


def _check_settings(folder: Path, where: str, kind: str) -> None:
    """The classes that a module's own settings name: those of routes and of activations."""
    inside(folder, where)
    for name in _ROUTERS:
        file = folder / where / name
        if not file.is_file():
            continue
        settings = _read_json(file, dict)
        routes = settings.get("types")
        if kind.endswith((".Router", ".Asym")) and isinstance(routes, dict):
            for route, route_kind in routes.items():
                _check_class(str(route_kind), file)
                _check_settings(folder, str(PurePosixPath(where, str(route))), str(route_kind))
        activation = settings.get("activation_function")
        if kind.endswith(".Dense") and isinstance(activation, str) and not activation.startswith("torch."):
            raise _own_code(file, activation)


def _check_class(name: str, file: Path) -> None:
    if not name.startswith(_OURS):
        raise _own_code(file, name)
    from sentence_transformers.util import import_from_string
    from torch import nn

    try:
        found: Any = import_from_string(name)
    except (ImportError, ValueError) as error:
        raise UserError(f"{file}: names {name!r}, which this version of sentence-transformers does not have") from error
    # Whatever its modules have imported can be reached by a dotted name too.
    if not (isinstance(found, type) and found.__module__.startswith(_OURS) and issubclass(found, nn.Module)):
        raise _own_code(file, name)


def _own_code(file: Path, name: str) -> UserError:
    return UserError(
        f"{file}: names {name!r}, which is no module of sentence-transformers: loading it runs code that the folder "
        "chose. If you have read that code and trust it, pass --trust_remote_code"
    )


def _read_json(file: Path, kind: type) -> Any:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not JSON that can be read ({error})") from error
    if not isinstance(content, kind):
        raise UserError(f"{file}: not what sentence-transformers writes there")
    return content


def load_tensors(path: str | os.PathLike[str], device: str = "cpu") -> dict[str, Any]:
    """The tensors of a safetensors file; raises `UserError` for anything else, a pickle too."""
    from safetensors.torch import load_file

    with refusing_code(path):
        return load_file(os.fspath(path), device=device)


def inside(folder: str | os.PathLike[str], name: str) -> Path:
    """``folder / name``, for a name that somebody else chose.

    Raises:
        DataError: for a name that leads out of the folder, on any system.
    """
    for path in (PurePosixPath(name), PureWindowsPath(name)):
        if path.is_absolute() or path.drive or ".." in path.parts:
            raise DataError(f"{name!r}: leads out of {folder}; a name from a file must stay inside")
    if "\0" in name:
        raise DataError(f"{name!r}: not the name of a file")
    return Path(folder) / name


def unpack(archive: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Unpack a zip into ``folder``; what would land outside of it, and links, are refused before anything is written.

    Raises:
        DataError: naming the member.
        zipfile.BadZipFile, OSError: for a file that is no zip or cannot be unpacked.
    """
    with zipfile.ZipFile(archive) as content:
        for member in content.infolist():
            inside(folder, member.filename)
            if stat.S_ISLNK(member.external_attr >> 16):
                raise DataError(f"{archive}: {member.filename!r} is a link; unpack it yourself if you trust it")
        content.extractall(folder)


def check_no_links_out(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder to be written into whose files are links to somewhere else: writing would change those.

    Raises:
        UserError: naming the link and where it leads.
    """
    root = Path(folder)
    if not root.is_dir():
        return
    for entry in root.iterdir():
        if entry.is_symlink() and not entry.is_dir() and root.resolve() not in entry.resolve().parents:
            raise UserError(f"{entry}: a link to {os.readlink(entry)}, which would be written to; remove the link")
