"""Adapters (LoRA) by peft: small matrices beside the weights of a backbone, which themselves stay as they are.

Untied towers have an adapter each, over one base whose weights they share. What is saved are the adapters; the base is
referenced by its name or folder. How a forward pass uses an adapter is peft's affair.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer
from sentence_transformers.util import fullname, load_dir_path
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from contaccum.errors import ConfigError, UserError, closest
from contaccum.files import AnyPath, read_json, write_json

_CONFIG = "adapter_config.json"
_OF_ADAPTERS = (_CONFIG, "adapter_model.*")
_OF_BACKBONES = ("config.json", "model.safetensors*", "model-*.safetensors", "pytorch_model.bin*", "pytorch_model-*")


def add_adapter(
    model: nn.Module,
    r: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    target_modules: Sequence[str] | None = None,
) -> None:
    """Freeze every backbone of a model, and put on each a LoRA adapter, which trains instead (arXiv 2106.09685).

    A linear layer W (out, in) becomes W + alpha / r * B A, with A (r, in) and B (out, r) in float32. B starts at zero,
    so that the model encodes as before. Weights that the towers have in common are one from now on.

    Args:
        alpha: None: 2 r.
        dropout: of what A reads.
        target_modules: names of layers, or how their names end. None: every linear layer.

    Raises:
        ConfigError: for a layer that is not there or cannot have an adapter, for a model that has one already, or
            where peft is missing.
    """
    require_peft("an adapter")
    from peft import LoraConfig

    found = backbones(model)
    if not found or has_adapter(model):
        raise ConfigError(f"lora_r={r}: this model has {'an adapter already' if found else 'no transformers backbone'}")
    targets = list(target_modules or ())
    for backbone in found:
        names = [name for name, _ in backbone.named_modules()]
        for target in targets:  # peft takes a misspelt one for none as long as another is there
            if not any(f".{name}".endswith(f".{target}") for name in names):
                hint = closest(target, {name.rpartition(".")[2] for name in names})
                raise ConfigError(f"lora_target_modules: the model has no layer {target!r}{hint}")
    layers: Any = targets or "all-linear"
    try:
        put_adapter(model, LoraConfig(r=r, lora_alpha=alpha or 2 * r, lora_dropout=dropout, target_modules=layers))  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError(f"lora_target_modules={layers}: {error}") from error


def put_adapter(model: nn.Module, config: Any, name: str | None = None) -> None:
    """As `add_adapter`, of any of peft's configs; raises what peft raises."""
    from peft.functional import cast_adapter_dtype

    for backbone in backbones(model):
        own = copy.deepcopy(config)
        backbone.add_adapter(own, name)
        base = backbone.name_or_path
        own.base_model_name_or_path = os.path.abspath(base) if os.path.isdir(base) else base  # found from anywhere
        cast_adapter_dtype(backbone, name or "default")  # most of an update would be rounded away in bfloat16
    _share_frozen(backbones(model))


def take_up_adapter(model: nn.Module) -> None:
    """Have the adapters that a model was loaded with train on, if any, and towers of one base share it."""
    if has_adapter(model):
        for backbone in backbones(model):
            backbone.set_adapter(backbone.active_adapters())
        _share_frozen(backbones(model))


def merge_adapter(model: nn.Module) -> None:
    """Add the adapters to the weights beside them: leaves a plain model, each tower with weights of its own."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for transformer in [module for module in model.modules() if isinstance(module, Transformer)]:
        backbone = transformer.model = copy.deepcopy(transformer.model)  # its base may be another tower's as well
        for name, layer in list(backbone.named_modules()):
            if isinstance(layer, BaseTunerLayer):
                layer.merge(safe_merge=True)
                backbone.set_submodule(name, layer.get_base_layer())
        backbone.delete_adapter(list(backbone.peft_config))
        # Private: how the names of an adapter differ from its file's. transformers would rename full weights by it.
        vars(backbone).pop("_weight_conversions", None)
        backbone.requires_grad_(True)


def backbones(model: nn.Module) -> list[Any]:
    """The transformers models in a model: one, or each tower's."""
    return [module.model for module in model.modules() if isinstance(module, Transformer)]


def has_adapter(model: nn.Module) -> bool:
    """Whether a backbone of the model has an adapter."""
    return any(getattr(backbone, "peft_config", None) for backbone in backbones(model))


def describe(model: nn.Module) -> list[dict[str, Any]]:
    """Base, rank, weight, dropout and layers of each tower's adapter, for records; none without any."""
    configs = [config for backbone in backbones(model) for config in getattr(backbone, "peft_config", {}).values()]
    names = ("base_model_name_or_path", "r", "lora_alpha", "lora_dropout")
    about = [{name: getattr(config, name, None) for name in names} for config in configs]
    return [one | {"layers": sorted(config.target_modules)} for one, config in zip(about, configs, strict=True)]


def require_peft(what: str) -> None:
    """Refuse, by a ConfigError, what needs peft where that is not installed."""
    if find_spec("peft") is None:
        raise ConfigError(f"{what} needs peft, which is not installed: pip install 'contaccum[peft]'")


def in_4bit() -> dict[str, Any]:
    """``model_kwargs`` that load weights in 4 bits (NF4, arXiv 2305.14314); ConfigError where that cannot be."""
    if find_spec("bitsandbytes") is None:
        raise ConfigError("load_in_4bit needs bitsandbytes, which is not installed: pip install bitsandbytes")
    if not torch.accelerator.is_available():
        raise ConfigError("load_in_4bit needs an accelerator, and there is none: drop it")
    kind = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16}
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **kind)}


def _share_frozen(found: Sequence[PreTrainedModel]) -> None:
    """Put the first backbone's frozen weights in the place of those of the others that are equal."""
    first = dict(found[0].named_parameters())
    for backbone in found[1:]:
        # Equal codes of quantized weights may stand for different numbers, unless they are of one base.
        one_base = backbone.name_or_path == found[0].name_or_path
        for name, own in list(backbone.named_parameters()):
            given = first.get(name, own)
            frozen = not (given.requires_grad or own.requires_grad)
            if frozen and (one_base or own.is_floating_point()) and torch.equal(given, own):
                place, _, key = name.rpartition(".")
                setattr(backbone.get_submodule(place), key, given)


def bases(folder: Path) -> list[str]:
    """Names or folders of the bases that the adapters in a model's folder need; ConfigError where peft is missing."""
    files = [file for file in (folder / _CONFIG, *folder.glob(f"*_Transformer/{_CONFIG}")) if file.is_file()]
    if files:
        require_peft(str(folder))
    return [str(read_json(file)["base_model_name_or_path"]) for file in files]


@contextmanager
def saving(model: nn.Module, folder: AnyPath) -> Iterator[None]:
    """Around what saves a model, with adapters or without, into a folder.

    Takes out what another model left there: full weights beside an adapter would be taken for its base, and an adapter
    beside full weights would be added to them. Notes what sentence-transformers does not, but needs to load the same.
    """
    folder, adapted = Path(folder), has_adapter(model)
    configs = [config for x in backbones(model) if adapted for config in x.peft_config.values()]
    needed = {Path(config.base_model_name_or_path) for config in configs}
    for base in needed:
        if base.is_absolute() and not (base / "config.json").is_file():
            raise ConfigError(f"an adapter is saved without its base, which is not in {base}: call merge_adapter first")
    own = {base.resolve() for base in needed}
    for place in (folder, *folder.glob("*_Transformer")):
        stale = _OF_ADAPTERS if not adapted or place.resolve() in own else (*_OF_ADAPTERS, *_OF_BACKBONES)
        for file in [file for pattern in stale for file in place.glob(pattern)]:
            file.unlink()
    yield
    router, places = folder / "router_config.json", [folder]
    if not adapted:
        return
    if not (folder / _CONFIG).is_file():
        # Router hands its towers' subfolders down to their bases, which have none. What it takes for a whole model is
        # loaded from a folder of its own.
        content = read_json(router)
        places = [folder / name for name, kind in content["types"].items() if kind == _TRANSFORMER]
        for place in places:
            write_json(place / "modules.json", [{"idx": 0, "name": "0", "path": "", "type": _TRANSFORMER}])
            content["types"][place.name] = _MODEL
        write_json(router, content)
    for place in places:
        settings = read_json(place / "sentence_bert_config.json")
        dtype = str(backbones(model)[0].dtype).removeprefix("torch.")
        write_json(place / "sentence_bert_config.json", {**settings, "model_kwargs": {"dtype": dtype}})


class TransformerLoader(Transformer):
    """Loads a ``Transformer`` in its place: a tower from a folder of its own, an adapter as precise as it was saved."""

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> Transformer:  # type: ignore[override]
        """As `Transformer.load`; raises UserError for an adapter that does not fit its base."""
        if subfolder:  # which Transformer would ask an adapter's base for
            hub: Any = {key: kwargs.get(key) for key in ("token", "cache_folder", "revision", "local_files_only")}
            model_name_or_path = load_dir_path(model_name_or_path, subfolder, **hub) or model_name_or_path
        try:
            module = Transformer.load(model_name_or_path, **kwargs)
        except RuntimeError as error:
            if "mismatched_sizes" not in str(error):  # transformers' own
                raise
            raise UserError(f"{model_name_or_path}: these weights are of another base, or backbone") from error
        weights = Path(model_name_or_path, "adapter_model.safetensors")
        if weights.is_file() and module.model.dtype != torch.float32:
            from peft.functional import cast_adapter_dtype, set_peft_model_state_dict

            cast_adapter_dtype(module.model, "default")
            state = {name.removeprefix("base_model.model."): x for name, x in load_file(weights).items()}
            set_peft_model_state_dict(module.model, state)
        return module


_TRANSFORMER, _MODEL = fullname(Transformer), fullname(SentenceTransformer)
LOADERS = dict.fromkeys((_TRANSFORMER, _MODEL), TransformerLoader)
"""What loads modules, by the types that folders name."""
