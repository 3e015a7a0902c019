"""Safe loading of models, and of backbones with the pooling that suits them."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from sentence_transformers.sentence_transformer.modules import Transformer
from sentence_transformers.util import (
    batch_to_device,
    import_from_string,
    is_sentence_transformer_model,
)
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import AutoModel, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_relative_import_files

from contaccum.encoders import adapters
from contaccum.encoders.names import list_repositories, require_model
from contaccum.errors import ConfigError, UserError
from contaccum.files import AnyPath, read_json, write_json

PoolingMode = Literal["cls", "mean", "lasttoken"]
"""The first token's state as the embedding of a text, the mean of all, or the last token's."""

_LIBRARY_PREFIX = "sentence_transformers."
_DYNAMIC_PREFIX = "transformers_modules."  # of modules that transformers loads from a model's code
_ROUTER_CONFIGS = ("router_config.json", "config.json")  # old versions wrote the second


@contextmanager
def loading(name: AnyPath, trust_remote_code: bool = False) -> Iterator[str]:
    """Check a model before the ``with`` block loads it, and turn its errors into a `UserError`.

        with loading(name) as path:
            model = SentenceTransformer(path)

    ``path`` is the folder or the name on the hub, with ``~`` expanded. Code in a model's folder,
    and classes that are not part of sentence-transformers, run only with ``trust_remote_code``. A
    pickle that holds more than tensors is never read.
    """
    path = os.path.expanduser(os.fspath(name))
    require_model(path)
    for base in adapters.find_adapter_bases(Path(path)):
        try:
            require_model(base)
        except UserError as error:
            raise UserError(
                f"{path}: this is an adapter, and its base cannot be loaded: {error}; "
                "restore the base, or correct base_model_name_or_path in adapter_config.json"
            ) from error
    try:
        for file, type_name in [] if trust_remote_code else _iterate_module_types(Path(path)):
            # sentence-transformers would import the class, which runs the code of its package.
            if not _is_library_module(type_name):
                raise UserError(
                    f"{file}: names the class {type_name!r}, which is not part of "
                    "sentence-transformers and could run any code. "
                    "If you trust the model, set --trust_remote_code"
                )
        yield path
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: holds a pickle with objects other than tensors, which could run code, so it "
            "was not read: use a model in safetensors format"
        ) from error
    except Exception as error:  # damaged files raise most errors of Python and of the libraries
        # transformers raises a RuntimeError with this word for weights of a wrong shape.
        if "mismatched_sizes" in str(error):
            raise UserError(
                f"{path}: the weights do not have the shapes of config.json, or an adapter those "
                "of its base; copy the files from one model, or correct base_model_name_or_path"
            ) from error
        # transformers has no exception class for this error, so its message is checked.
        if "`trust_remote_code=True`" in str(error):
            raise UserError(
                f"{path}: needs code that comes with the model. Read that code, then set "
                "trust_remote_code"
            ) from error
        raise UserError(f"{path}: not a model that can be loaded ({error})") from error


def is_sentence_transformer(name: str) -> bool:
    """Return True if a folder or a hub name holds a SentenceTransformer, and not a backbone.

    It is also False if the hub cannot be reached: loading then names the reason.
    """
    if os.path.isdir(name):
        return is_sentence_transformer_model(name)
    for repository in list_repositories(name):
        with suppress(Exception):
            if is_sentence_transformer_model(repository):
                return True
    return False


def _iterate_module_types(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield (file, module type) for each module type that a model's folder names.

    A tower of a Router may be a whole SentenceTransformer, or another Router.
    """
    modules_file = folder / "modules.json"
    if modules_file.is_file():
        for module in read_json(modules_file, list):
            yield modules_file, str(module["type"])
            if module["path"]:
                yield from _iterate_module_types(folder / module["path"])
    for config_name in _ROUTER_CONFIGS:
        config_file = folder / config_name
        if not config_file.is_file():
            continue
        types = read_json(config_file).get("types")
        if isinstance(types, dict):
            for tower_name, type_name in types.items():
                yield config_file, str(type_name)
                yield from _iterate_module_types(folder / tower_name)


def _is_library_module(type_name: str) -> bool:
    """Return True for a module class that sentence-transformers defines, and does not import."""
    if not type_name.startswith(_LIBRARY_PREFIX):
        return False
    try:
        imported: Any = import_from_string(type_name)
    except ImportError:
        return False
    is_module_class = isinstance(imported, type) and issubclass(imported, nn.Module)
    return is_module_class and imported.__module__.startswith(_LIBRARY_PREFIX)


def copy_module_code(model: nn.Module, folder: Path) -> None:
    """Copy the code that came with a model to ``folder``, where loading looks for it.

    sentence-transformers saves it in the module's subfolder, and a Router names the class by its
    place in transformers' cache.
    """
    module_names = {type(module).__module__ for module in model.modules()}
    module_names = {name for name in module_names if name.startswith(_DYNAMIC_PREFIX)}
    if not module_names:
        return  # a folder of runs may contain other models, whose files are left alone
    for module_name in module_names:
        code_file = str(sys.modules[module_name].__file__)
        for file in (code_file, *get_relative_import_files(code_file)):
            shutil.copy(file, folder)
    for router_file in folder.rglob(_ROUTER_CONFIGS[0]):
        router = read_json(router_file)
        for name, type_name in router["types"].items():
            if type_name.startswith(_DYNAMIC_PREFIX):
                router["types"][name] = ".".join(type_name.split(".")[-2:])
        write_json(router_file, router)


def load_transformer(
    name: AnyPath | PretrainedConfig,
    tokenizer: AnyPath | PreTrainedTokenizerBase | None,
    model_kwargs: dict[str, Any],
    trust_remote_code: bool,
) -> Transformer:
    """Load a backbone and its tokenizer, as `DualEncoder.from_backbone` describes."""
    trust_options = {"trust_remote_code": trust_remote_code}
    if isinstance(tokenizer, (str, os.PathLike)):
        with loading(tokenizer, trust_remote_code) as path:
            tokenizer = AutoTokenizer.from_pretrained(path, **trust_options)
    if isinstance(name, PretrainedConfig):
        assert tokenizer is not None, "a config alone has no vocabulary: pass tokenizer="
        # sentence-transformers can build its Transformer module only from files.
        with tempfile.TemporaryDirectory() as folder:
            AutoModel.from_config(name, **trust_options).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            return Transformer(folder, model_kwargs=model_kwargs)
    with loading(name, trust_remote_code) as path:
        transformer = Transformer(
            path,
            model_kwargs={**model_kwargs, **trust_options},
            processor_kwargs=trust_options,
            config_kwargs=trust_options,
        )
    if tokenizer is not None:
        # A copy, because `fit_pooling` may change it.
        transformer.processor = copy.deepcopy(tokenizer)
    return transformer


def fit_pooling(
    transformer: Transformer, tokenizer: PreTrainedTokenizerBase, pooling: PoolingMode | None
) -> PoolingMode:
    """Return the pooling of a backbone, and change its tokenizer accordingly.

    In a decoder, a token attends only to itself and to the tokens before it: the last one is
    pooled, and the tokenizer appends EOS, so that every text ends in the same token.
    """
    if tokenizer.pad_token is None:
        # Any token will do, because padding is masked.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if pooling == "mean":
        return pooling
    if not _is_causal(transformer):
        return pooling or "cls"
    if pooling == "cls":
        class_name = type(transformer.model).__name__
        raise ConfigError(
            f"pooling=cls does not work with a decoder ({class_name}), whose first token attends "
            "only to itself: set pooling=lasttoken or mean"
        )
    # Padding on the left would shift the positions of tokens, which GPT-2 and others have learnt.
    tokenizer.padding_side = "right"
    _append_eos(tokenizer)
    return "lasttoken"


def _is_causal(transformer: Transformer) -> bool:
    """Return True if the first token of a text attends only to itself, as in a decoder.

    Then its state has no gradient with respect to the embeddings of later tokens. No attribute
    gives the answer: some decoders are bidirectional, and some encoders have a decoder's class.
    """
    features = transformer.preprocess(["how do birds fly"])
    features = batch_to_device(features, transformer.model.device)
    token_ids = features["input_ids"][0]
    weight: Any = transformer.model.get_input_embeddings().weight
    requires_grad = weight.requires_grad  # False if the backbone has an adapter
    weight.requires_grad_(True)
    # One number of the first token's state is enough, because it depends on all tokens attended to.
    first_state = transformer(features)["token_embeddings"][0, 0, 0]
    (gradient,) = torch.autograd.grad(first_state, weight)
    weight.requires_grad_(requires_grad)
    # The first token's id may occur again in the text, so its row is left out.
    later_ids = token_ids[token_ids != token_ids[0]]
    return not gradient[later_ids].any()


def _append_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let the saved post-processor of a tokenizer append EOS, unless it appends a special token."""
    encoding = tokenizer("a", return_special_tokens_mask=True)
    special_tokens_mask = encoding["special_tokens_mask"]
    if special_tokens_mask[-1]:
        return
    eos = tokenizer.eos_token
    if eos is None or not tokenizer.is_fast:
        raise ConfigError(
            "pooling=lasttoken needs a fast tokenizer with an eos_token, and this tokenizer is not "
            "fast or has none: set pooling=mean"
        )
    ids_and_masks = zip(encoding["input_ids"], special_tokens_mask, strict=True)
    prefix_ids = [token_id for token_id, is_special in ids_and_masks if is_special]
    prefix = tokenizer.convert_ids_to_tokens(prefix_ids)
    special_tokens = {**dict(zip(prefix, prefix_ids, strict=True)), eos: tokenizer.eos_token_id}
    # "$A" stands for the tokens of the text. The template replaces the present post-processor: it
    # would have no effect in a chain after one that prepends BOS.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        [*prefix, "$A", eos], special_tokens=list(special_tokens.items())
    )
