"""Linear merge of a base model and the model that was trained from it, at a chosen weight.

Sources: WiSE-FT (arXiv 2109.01903) and LM-Cocktail (arXiv 2311.13534). `SentenceTransformer.merge`
needs mergekit, and refuses a base with one tower whose trained model has two.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from sentence_transformers.sentence_transformer.modules import Transformer
from torch import nn

from contaccum.encoders.adapters import has_adapter, merge_adapter
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.settings import get_tower, is_tied
from contaccum.errors import ConfigError


def merge_models(base: DualEncoder, trained: DualEncoder, weight: float) -> DualEncoder:
    """Return the model with the tensors (1 - weight) * base + weight * trained.

    They are computed in float32 at least. All else is that of ``trained``. The models are not
    changed: adapters are merged in copies. The weight 0 returns ``base`` itself, 1 returns
    ``trained`` itself (or its copy). Raises `ConfigError` for models of different architectures.
    """
    base = _merge_adapters(base)
    trained = _merge_adapters(trained)
    if is_tied(trained) and not is_tied(base):
        raise ConfigError("the models cannot be merged: only the base model has two towers")
    for task in ("query", "document"):
        base_description = _describe_architecture(get_tower(base, task))
        trained_description = _describe_architecture(get_tower(trained, task))
        for name in [*trained_description, *base_description]:
            if base_description.get(name) != trained_description.get(name):
                raise ConfigError(f"the models cannot be merged: {name} is not the same in both")
    if not all(parameter.is_floating_point() for parameter in trained.parameters()):
        raise ConfigError("quantized models cannot be merged: save them in float32 or bfloat16")
    if weight == 0:
        return base
    if weight == 1:
        return trained
    merged = copy.deepcopy(trained)
    for task in ("query", "document"):
        base_state = get_tower(base, task).state_dict()
        trained_state = get_tower(trained, task).state_dict()
        # The tensors of a state_dict share the memory of the model, so writing to them changes it.
        for name, tensor in get_tower(merged, task).state_dict().items():
            if tensor.is_floating_point():
                dtype = torch.promote_types(tensor.dtype, torch.float32)
                base_tensor = base_state[name].to(tensor.device, dtype)
                # lerp is exact where both are equal, so an index of an untrained tower stays valid.
                tensor.copy_(torch.lerp(base_tensor, trained_state[name].to(dtype), weight))
    return merged


def _merge_adapters(model: DualEncoder) -> DualEncoder:
    if not has_adapter(model):
        return model
    merged = copy.deepcopy(model)
    merge_adapter(merged)
    return merged


def _describe_architecture(tower: nn.Module) -> dict[str, Any]:
    """Return {name: value} of what must be equal in two towers that are merged."""
    description: dict[str, Any] = {"types of modules": list(map(type, tower.children()))}
    for module in tower.children():
        if isinstance(module, Transformer):
            tokenizer: Any = module.tokenizer
            description["vocabulary"] = tokenizer.get_vocab()
    for name, tensor in tower.state_dict().items():
        description[f"shape of {name}"] = tensor.shape
    return description
