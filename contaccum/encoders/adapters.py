"""LoRA adapters: small trainable matrices that are added to the frozen weights of a backbone.

A backbone is the transformers model inside a tower; the base of an adapter is the pretrained model
whose weights are frozen. Untied towers have one adapter each, and share the frozen weights of their
base. A saved folder holds the adapters and the name or folder of the base, not its weights.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer
from sentence_transformers.util import fullname, load_dir_path
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from contaccum.errors import ConfigError, closest
from contaccum.files import AnyPath, read_json, write_json

logger = logging.getLogger(__name__)

_TRANSFORMER_TYPE = fullname(Transformer)
_MODEL_TYPE = fullname(SentenceTransformer)
_ADAPTER_CONFIG = "adapter_config.json"
_TOWER_FOLDERS = "*_Transformer"  # subfolders in which a Router saves its towers' transformers
_ADAPTER_FILES = (_ADAPTER_CONFIG, "adapter_model.*")
_BACKBONE_FILES = (
    "config.json",
    "model.safetensors*",
    "model-*.safetensors",
    "pytorch_model.bin*",
    "pytorch_model-*",
)
_HALF_DTYPES = (torch.bfloat16, torch.float16)


def add_adapter(
    model: nn.Module,
    r: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    target_modules: Sequence[str] | None = None,
) -> None:
    """Freeze every backbone of a model, and add a LoRA adapter to each (arXiv:2106.09685).

    A linear layer W (out, in) becomes W + alpha / r * B A, with A (r, in) and B (out, r) in
    float32. Only A and B are trained. B starts at zero, so the embeddings are unchanged at first.
    Towers share the frozen weights that are equal.

    Args:
        r: rank of the adapter.
        alpha: scale of the adapter. None: 2 r.
        dropout: the probability with which an input of A is set to zero.
        target_modules: names of layers, or the ends of their names. None: every linear layer.

    Raises:
        ConfigError: a layer does not exist or cannot have an adapter, the model has an adapter or
            no backbone, or peft is not installed.
    """
    require_peft("an adapter")
    from peft import LoraConfig

    if has_adapter(model):
        raise ConfigError(
            f"lora_r={r}: this model has an adapter already. Drop lora_r to train that adapter "
            "further, or merge it first with contaccum export"
        )
    for backbone in get_backbones(model):
        names = [name for name, _ in backbone.named_modules()]
        for target in target_modules or ():
            # peft raises an error only if none of the targets is a layer.
            if not any(f".{name}".endswith(f".{target}") for name in names):
                suggestion = closest(target, {name.rpartition(".")[2] for name in names})
                raise ConfigError(
                    f"lora_target_modules: the model has no layer {target!r}{suggestion}"
                )
    layers: Any = list(target_modules or ()) or "all-linear"
    scale: Any = 2 * r if alpha is None else alpha  # may be a float, unlike its type in peft
    try:
        config = LoraConfig(r=r, target_modules=layers, lora_alpha=scale, lora_dropout=dropout)
        put_adapter(model, config)
    except ValueError as error:
        raise ConfigError(f"lora_target_modules={layers}: {error}") from error


def put_adapter(model: nn.Module, config: Any, name: str | None = None) -> None:
    """Freeze every backbone of a model, and add an adapter with a config of peft to each."""
    from peft.functional import cast_adapter_dtype

    backbones = get_backbones(model)
    if not backbones:
        raise ConfigError("this model has no transformers backbone that could have an adapter")
    for backbone in backbones:
        backbone_config = copy.deepcopy(config)
        backbone.add_adapter(backbone_config, name)  # freezes all weights but the adapter's
        base = backbone.name_or_path
        if os.path.isdir(base):
            base = os.path.abspath(base)  # it can be loaded from any working directory
        backbone_config.base_model_name_or_path = base
        # In bfloat16 most of an update would be lost to rounding.
        cast_adapter_dtype(backbone, name or "default")
    share_equal_frozen_weights(backbones)


def make_adapter_trainable(model: nn.Module) -> None:
    """Make the adapters of a model trainable, if it has any, and share equal frozen weights."""
    if not has_adapter(model):
        return
    for backbone in get_backbones(model):
        if getattr(backbone, "peft_config", None):
            backbone.set_adapter(backbone.active_adapters())
        else:
            # Only the query tower has an adapter. This is the document tower, and stays frozen.
            backbone.requires_grad_(False)
    share_equal_frozen_weights(get_backbones(model))


def merge_adapter(model: nn.Module) -> None:
    """Add the adapters to the frozen weights; each tower then has its own weights.

    The sums are computed in float32, and rounded to the dtype of the base; call ``model.float()``
    first to keep a small update whole.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    transformers = [module for module in model.modules() if isinstance(module, Transformer)]
    adapted_transformers = [each for each in transformers if has_adapter(each)]
    if any(transformer.model.dtype in _HALF_DTYPES for transformer in adapted_transformers):
        logger.warning(
            "the merged weights are rounded to bfloat16 or float16, the dtype of the base, which "
            "loses a part of a small update. To keep it, save the model with its adapter, and run "
            "`contaccum export`, which merges in float32"
        )
    for transformer in adapted_transformers:
        backbone = copy.deepcopy(transformer.model)  # another tower may share the base
        transformer.model = backbone
        for name, layer in list(backbone.named_modules()):
            if isinstance(layer, BaseTunerLayer):
                base_layer = layer.get_base_layer()
                # peft adds in the dtype of the weights: in half precision it would round the
                # adapter's part and the sum. The parameters of a layer have one dtype.
                dtype = next(base_layer.parameters()).dtype
                if dtype in _HALF_DTYPES:
                    base_layer.float()
                layer.merge(safe_merge=True)
                if dtype in _HALF_DTYPES:
                    base_layer.to(dtype)
                backbone.set_submodule(name, base_layer)
        backbone.delete_adapter(list(backbone.peft_config))
        # Private: by this map, transformers would save the merged weights under wrong names.
        vars(backbone).pop("_weight_conversions", None)
        backbone.requires_grad_(True)


def get_backbones(model: nn.Module) -> list[Any]:
    """Return the transformers models in a model: one, or one per tower."""
    return [module.model for module in model.modules() if isinstance(module, Transformer)]


def _get_adapter_configs(model: nn.Module) -> list[Any]:
    configs_of_backbones = (getattr(each, "peft_config", {}) for each in get_backbones(model))
    return [config for configs in configs_of_backbones for config in configs.values()]


def has_adapter(model: nn.Module) -> bool:
    return bool(_get_adapter_configs(model))


def describe_adapters(model: nn.Module) -> list[dict[str, Any]]:
    """Return base, rank, alpha, dropout and layers of each adapter, to describe a run in JSON."""
    descriptions = []
    for config in _get_adapter_configs(model):
        names = ("base_model_name_or_path", "r", "lora_alpha", "lora_dropout")
        description = {name: getattr(config, name, None) for name in names}
        descriptions.append({**description, "layers": sorted(config.target_modules)})
    return descriptions


def require_peft(feature: str) -> None:
    """Raise `ConfigError` for a feature that needs peft if peft is not installed."""
    if find_spec("peft") is None:
        raise ConfigError(
            f"{feature} needs peft, which is not installed: pip install 'contaccum[peft]'"
        )


def share_equal_frozen_weights(backbones: Sequence[PreTrainedModel]) -> None:
    """Replace frozen weights of backbones by equal ones of the first backbone, to save memory."""

    def get_name_in_base(name: str) -> str:
        # peft renames "layer.weight" to "layer.base_layer.weight" in every layer that it adapts.
        return name.replace(".base_layer.", ".")

    first_weights = {get_name_in_base(x): weight for x, weight in backbones[0].named_parameters()}
    for backbone in backbones[1:]:
        has_same_base = backbone.name_or_path == backbones[0].name_or_path
        for name, weight in list(backbone.named_parameters()):
            first_weight = first_weights.get(get_name_in_base(name))
            if first_weight is None or first_weight.requires_grad or weight.requires_grad:
                continue
            # Quantized weights are integer codes. Equal codes may stand for different numbers,
            # unless the backbones have the same base.
            is_comparable = has_same_base or weight.is_floating_point()
            if is_comparable and torch.equal(first_weight, weight):
                module_name, _, attribute = name.rpartition(".")
                setattr(backbone.get_submodule(module_name), attribute, first_weight)


def find_adapter_bases(folder: Path) -> list[str]:
    """Return the name or folder of each adapter's base in a model's folder; this needs peft."""
    towers = (folder, *folder.glob(_TOWER_FOLDERS))
    config_files = [file for tower in towers for file in tower.glob(_ADAPTER_CONFIG)]
    if config_files:
        require_peft(str(folder))
    return [str(read_json(file)["base_model_name_or_path"]) for file in config_files]


@contextmanager
def saving(model: nn.Module, folder: AnyPath) -> Iterator[None]:
    """Remove files of another model before the ``with`` block saves a model, and complete it.

    To load an adapter, sentence-transformers needs the dtype of the base, and other types of the
    towers in the Router than it saves.
    """
    folder = Path(folder)
    bases = [Path(config.base_model_name_or_path) for config in _get_adapter_configs(model)]
    remove_stale_files(folder, has_adapter(model), bases)
    yield
    if not has_adapter(model):
        return
    adapter_folders = [folder]
    if not (folder / _ADAPTER_CONFIG).is_file():
        adapter_folders = _make_towers_loadable(folder)
    dtype = str(get_backbones(model)[0].dtype).removeprefix("torch.")
    for adapter_folder in adapter_folders:
        config_file = adapter_folder / "sentence_bert_config.json"
        write_json(config_file, {**read_json(config_file), "model_kwargs": {"dtype": dtype}})


def remove_stale_files(folder: Path, is_adapted: bool, bases: Sequence[Path] = ()) -> None:
    """Remove the files of a model that was saved in the folder before.

    An old adapter beside new full weights would be loaded with them. Old full weights beside a new
    adapter would be loaded as its base, so they are kept only if they are its base.
    """
    resolved_bases = {base.resolve() for base in bases}
    for module_folder in (folder, *folder.glob(_TOWER_FOLDERS)):
        patterns: tuple[str, ...] = _ADAPTER_FILES
        if is_adapted and module_folder.resolve() not in resolved_bases:
            patterns += _BACKBONE_FILES
        for file in [file for pattern in patterns for file in module_folder.glob(pattern)]:
            file.unlink()


def _make_towers_loadable(folder: Path) -> list[Path]:
    """Change the router's config, and return the folders of the towers' adapters."""
    # Router would look for the tower's subfolder in the folder of the adapter's base. A tower whose
    # type is SentenceTransformer in the router's config is loaded from its own folder.
    router_file = folder / "router_config.json"
    router = read_json(router_file)
    tower_folders = [
        folder / name
        for name, type_name in router["types"].items()
        if type_name == _TRANSFORMER_TYPE and (folder / name / _ADAPTER_CONFIG).is_file()
    ]
    for tower_folder in tower_folders:
        modules = [{"idx": 0, "name": "0", "path": "", "type": _TRANSFORMER_TYPE}]
        write_json(tower_folder / "modules.json", modules)
        router["types"][tower_folder.name] = _MODEL_TYPE
    write_json(router_file, router)
    return tower_folders


class TransformerLoader(Transformer):
    """Loader that loads a tower from its own folder, and an adapter in its saved precision."""

    @classmethod
    def load(  # type: ignore[override]  # it names only one of Transformer's keyword arguments
        cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any
    ) -> Transformer:
        if subfolder:
            # Transformer would look for the subfolder in the base of an adapter.
            names = {"token", "cache_folder", "revision", "local_files_only"}
            options = {name: kwargs[name] for name in names & kwargs.keys()}
            local_folder = load_dir_path(model_name_or_path, subfolder, **options)
            model_name_or_path = local_folder or model_name_or_path
        module = Transformer.load(model_name_or_path, **kwargs)
        if getattr(module.model, "peft_config", None) and module.model.dtype != torch.float32:
            from peft.functional import cast_adapter_dtype, set_peft_model_state_dict
            from peft.utils.save_and_load import load_peft_weights

            # transformers has rounded the adapter to the backbone's dtype.
            cast_adapter_dtype(module.model, "default")
            weights = load_peft_weights(
                model_name_or_path,
                device="cpu",
                token=kwargs.get("token"),
                cache_dir=kwargs.get("cache_folder"),
                revision=kwargs.get("revision"),
            )
            # Files of peft have this prefix, but `set_peft_model_state_dict` expects no prefix.
            prefix = "base_model.model."
            state = {name.removeprefix(prefix): weight for name, weight in weights.items()}
            set_peft_model_state_dict(module.model, state)
        return module


LOADERS = {_TRANSFORMER_TYPE: TransformerLoader, _MODEL_TYPE: TransformerLoader}
"""Type of a module in saved folders -> its loader; see `_make_towers_loadable` for the second."""


def make_4bit_kwargs() -> dict[str, Any]:
    """Return ``model_kwargs`` that load weights in 4 bits (NF4, arXiv 2305.14314)."""
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            "load_in_4bit needs bitsandbytes, which is not installed: pip install bitsandbytes"
        )
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return {"quantization_config": config}
