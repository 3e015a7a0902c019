"""Loading a model of others: what cannot or must not be loaded is refused in one line."""

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


@contextmanager
def loading(name: AnyPath, trust_remote_code: bool = False) -> Iterator[str]:
    """Around whatever loads a model (an encoder, a cross-encoder, a checkpoint): gives the name with ``~`` expanded.

    Raises UserError when there is no such model, it cannot be read, or it brings code that is not trusted, which never
    runs then: a class of its own, or a pickle with more than tensors.
    """
    path = os.path.expanduser(os.fspath(name))
    require_model(path)
    for base in adapters.bases(Path(path)):
        try:
            require_model(base)
        except UserError as error:
            mend = "put it back, or say where it is in adapter_config.json"
            raise UserError(f"{path}: an adapter, and its base cannot be had: {error}; {mend}") from error
    try:
        if not trust_remote_code:
            _refuse_own_classes(Path(path))
        yield path
    except pickle.UnpicklingError as error:
        raise UserError(f"{path}: holds a pickle with more than tensors, which could run code; not read") from error
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        if "`trust_remote_code=True`" in str(error):  # all that tells it from other errors
            raise UserError(f"{path}: needs code that comes with it. Read that, then set trust_remote_code") from error
        raise UserError(f"{path}: not a model that can be loaded ({error})") from error


def require_model(name: str) -> None:
    """Refuse, by a UserError, a name that is neither a folder nor a hub name that can be had now.

    sentence-transformers asks the hub many times, for more than a minute where it cannot be reached; this asks once.
    """
    if os.path.isdir(name):
        return
    if os.path.exists(name) or name.startswith((".", "/")) or name.count("/") > 1:
        raise UserError(f"{name}: no such model folder")
    names = [name] if "/" in name else [name, f"sentence-transformers/{name}"]
    try:
        if not any(try_to_load_from_cache(repo, "config.json") for repo in names):
            HfApi().model_info(name, timeout=5)
    except RepositoryNotFoundError:
        return  # the library knows other names for a model, and says what it looked for
    except Exception as error:  # what is raised without a network is the affair of the hub's HTTP client
        raise UserError(f"{name}: no such folder, and the model hub cannot be asked for it ({error})") from error


def _refuse_own_classes(folder: Path) -> None:
    """Refuse what a folder names as modules but sentence-transformers' own: a dotted name reaches all it imports."""
    file, own = folder / "modules.json", "sentence_transformers."
    modules = read_json(file, list) if file.is_file() else []
    named = [(file, str(module["type"])) for module in modules]
    routers = ("router_config.json", "config.json")  # the latter is what older versions wrote
    for file in [folder / module["path"] / name for module in modules for name in routers]:
        types = read_json(file).get("types") if file.is_file() else None
        named += [(file, str(kind)) for kind in types.values()] if isinstance(types, dict) else []
    for file, kind in named:
        try:
            found: Any = import_from_string(kind) if kind.startswith(own) else None
        except ImportError:
            found = None
        if not (isinstance(found, type) and issubclass(found, nn.Module) and found.__module__.startswith(own)):
            raise UserError(f"{file}: names {kind!r}, code of the folder's choice: --trust_remote_code would run it")


def load_transformer(
    name: AnyPath | PretrainedConfig,
    tokenizer: AnyPath | PreTrainedTokenizerBase | None,
    model_kwargs: dict[str, Any],
    trust_remote_code: bool,
) -> Transformer:
    remote = {"trust_remote_code": trust_remote_code}
    if isinstance(tokenizer, (str, os.PathLike)):
        with loading(tokenizer, trust_remote_code) as path:
            tokenizer = AutoTokenizer.from_pretrained(path, **remote)
    if isinstance(name, PretrainedConfig):
        if tokenizer is None:
            raise ConfigError("a config alone has no vocabulary: pass tokenizer= with a name, a folder or a tokenizer")
        # sentence-transformers builds its module from files, so a fresh encoder goes through a folder.
        with tempfile.TemporaryDirectory() as folder:
            AutoModel.from_config(name, **remote).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            return Transformer(folder, model_kwargs=model_kwargs)
    settings = {"model_kwargs": {**model_kwargs, **remote}, "processor_kwargs": remote, "config_kwargs": remote}
    with loading(name, trust_remote_code) as path:
        transformer = Transformer(path, **settings)
    if tokenizer is not None:
        transformer.processor = copy.deepcopy(tokenizer)  # it may get a pad token and EOS
    return transformer
