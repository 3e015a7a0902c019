"""Loading of models from others: what cannot or must not be loaded is refused in one line.

transformers and sentence-transformers read the files. This module checks a folder before they read
it, and turns the errors that they raise into a `UserError`.
"""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors import SafetensorError
from sentence_transformers.sentence_transformer.modules import Transformer
from sentence_transformers.util import import_from_string
from torch import nn
from transformers import AutoModel, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from contaccum.encoders import adapters
from contaccum.errors import ConfigError, UserError
from contaccum.files import AnyPath, read_json

_LIBRARY = "sentence_transformers."
_ROUTER_CONFIGS = ("router_config.json", "config.json")
"""Files in which a Router names the types of its modules; older versions wrote the second."""


@contextmanager
def loading(name: AnyPath, trust_remote_code: bool = False) -> Iterator[str]:
    """Check a model before the block loads it, and turn the block's errors into a `UserError`.

    The block may load an encoder, a cross-encoder or a checkpoint. It receives the name with ``~``
    expanded. Classes that a folder brings or names run only if they are trusted. A pickle that
    holds more than tensors is never read.

    Args:
        name: a folder, or a name on the model hub.
        trust_remote_code: allow code that comes with the model.

    Raises:
        UserError: if there is no such model, it cannot be read, or it needs code that is not
            trusted.
    """
    path = os.path.expanduser(os.fspath(name))
    require_model(path)
    _require_adapter_bases(path)
    try:
        if not trust_remote_code:
            _refuse_foreign_classes(Path(path))
        yield path
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: holds a pickle with more than tensors, which could run code; not read"
        ) from error
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        if "`trust_remote_code=True`" in str(error):  # nothing else tells this error from others
            raise UserError(
                f"{path}: needs code that comes with it. Read that, then set trust_remote_code"
            ) from error
        raise UserError(f"{path}: not a model that can be loaded ({error})") from error


def require_model(name: str) -> None:
    """Refuse a name that is neither a folder nor the name of a model that the hub has.

    sentence-transformers sends the hub many requests, and waits for more than a minute if it cannot
    be reached. This function sends one.

    Raises:
        UserError: if there is no such folder, or the hub cannot be reached.
    """
    if os.path.isdir(name):
        return
    is_path = name.startswith((".", "/")) or name.count("/") > 1
    if is_path or os.path.exists(name):
        raise UserError(f"{name}: no such model folder")
    repositories = [name]
    if "/" not in name:
        repositories.append(f"sentence-transformers/{name}")
    try:
        for repository in repositories:
            if try_to_load_from_cache(repository, "config.json"):
                return
        HfApi().model_info(name, timeout=5)
    except RepositoryNotFoundError:
        # sentence-transformers tries further names, and its own error lists them.
        return
    except Exception as error:  # without a network, the type depends on the hub's HTTP client
        raise UserError(
            f"{name}: no such folder, and the model hub cannot be asked for it ({error})"
        ) from error


def _require_adapter_bases(path: str) -> None:
    """Refuse a folder of adapters whose base is neither a folder nor on the hub."""
    for base in adapters.bases(Path(path)):
        try:
            require_model(base)
        except UserError as error:
            raise UserError(
                f"{path}: an adapter, and its base cannot be had: {error}; "
                "put it back, or say where it is in adapter_config.json"
            ) from error


def _refuse_foreign_classes(folder: Path) -> None:
    """Refuse a folder that names a module type which is not sentence-transformers' own."""
    for file, type_name in _module_types(folder):
        if not _is_library_module(type_name):
            raise UserError(
                f"{file}: names {type_name!r}, code of the folder's choice: "
                "--trust_remote_code would run it"
            )


def _module_types(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield each module type that a model's folder names, after the file that names it."""
    modules_file = folder / "modules.json"
    if not modules_file.is_file():
        return
    for module in read_json(modules_file, list):
        yield modules_file, str(module["type"])
        for config_name in _ROUTER_CONFIGS:
            config_file = folder / module["path"] / config_name
            if not config_file.is_file():
                continue
            types = read_json(config_file).get("types")
            if isinstance(types, dict):
                for type_name in types.values():
                    yield config_file, str(type_name)


def _is_library_module(type_name: str) -> bool:
    """Return whether a dotted name leads to a module class that sentence-transformers defines.

    The class itself is looked at, because a dotted name also reaches all that the library's files
    import from elsewhere.
    """
    if not type_name.startswith(_LIBRARY):
        return False
    try:
        value: Any = import_from_string(type_name)
    except ImportError:
        return False
    is_module_class = isinstance(value, type) and issubclass(value, nn.Module)
    return is_module_class and value.__module__.startswith(_LIBRARY)


def load_transformer(
    name: AnyPath | PretrainedConfig,
    tokenizer: AnyPath | PreTrainedTokenizerBase | None,
    model_kwargs: dict[str, Any],
    trust_remote_code: bool,
) -> Transformer:
    """Load a backbone with its tokenizer, or make one with fresh weights from a config.

    Args:
        name: a folder, a name on the model hub, or a config.
        tokenizer: a name, a folder or an object, of which a copy is used; None: the tokenizer that
            comes with ``name``.
        model_kwargs: arguments of transformers' ``from_pretrained``.
        trust_remote_code: allow code that comes with the backbone or the tokenizer.

    Raises:
        UserError: if the backbone or the tokenizer cannot be loaded.
        ConfigError: if there is a config and no tokenizer.
    """
    remote = {"trust_remote_code": trust_remote_code}
    if isinstance(tokenizer, (str, os.PathLike)):
        with loading(tokenizer, trust_remote_code) as path:
            tokenizer = AutoTokenizer.from_pretrained(path, **remote)
    if isinstance(name, PretrainedConfig):
        if tokenizer is None:
            raise ConfigError(
                "a config alone has no vocabulary: "
                "pass tokenizer= with a name, a folder or a tokenizer"
            )
        return _fresh_transformer(name, tokenizer, model_kwargs, remote)
    with loading(name, trust_remote_code) as path:
        transformer = Transformer(
            path,
            model_kwargs={**model_kwargs, **remote},
            processor_kwargs=remote,
            config_kwargs=remote,
        )
    if tokenizer is not None:
        # A copy, because pooling may add a pad token and EOS to it.
        transformer.processor = copy.deepcopy(tokenizer)
    return transformer


def _fresh_transformer(
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_kwargs: dict[str, Any],
    remote: dict[str, Any],
) -> Transformer:
    """Make a backbone with fresh weights."""
    # sentence-transformers builds its module from files only.
    with tempfile.TemporaryDirectory() as folder:
        AutoModel.from_config(config, **remote).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return Transformer(folder, model_kwargs=model_kwargs)
