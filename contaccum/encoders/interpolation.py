"""Interpolation between the weights of a base model and of a model that was trained from it.

With a weight w in [0, 1], each tensor is (1 - w) * base + w * trained. The interpolated model keeps
much of the trained model's quality on the data that it was trained on, and much of the base model's
quality on other data. Sources: WiSE-FT (Wortsman et al., CVPR 2022, arXiv 2109.01903) and
LM-Cocktail (arXiv 2311.13534). Models are not scored here: `contaccum.merging` chooses w.

`SentenceTransformer.merge` of sentence-transformers 6.2 is not used, because it needs mergekit and
refuses a model with two towers whose base has one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sentence_transformers.sentence_transformer.modules import Transformer
from torch import nn

from contaccum.encoders.adapters import has_adapter, merge_adapter
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.towers import get_tower, is_tied
from contaccum.errors import ConfigError

_BACKBONE_SETTINGS = (
    "model_type",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
)
"""Settings of a backbone's config that change its embeddings, but not the shapes of its weights.

A comparison of the tensors alone would not notice that they differ.
"""


class _TensorTriple(NamedTuple):
    """A weight or buffer of the interpolated model, with its values in the two original models.

    Attributes:
        interpolated: tensor of the interpolated model; it is overwritten for each weight w.
        base, trained: tensors that stay unchanged: the values at w = 0 and at w = 1.
    """

    interpolated: torch.Tensor
    base: torch.Tensor
    trained: torch.Tensor


class WeightInterpolation:
    """The interpolated models between a base model and a model that was trained from it.

    With a weight w, each tensor is (1 - w) * base + w * trained. It is computed in float32 and
    stored in the trained model's dtype. Integer buffers, prompts, maximum lengths and the tokenizer
    are those of the trained model.

    Each tower of a trained model with two towers is interpolated with the base's tower of the same
    task, or with the base's only tower. If training did not change a tower, its weights stay the
    same bit for bit, so an index of its embeddings stays valid.

    Args:
        base: the model before training. Its adapters are merged into its weights, in place.
        trained: the model after training. It is changed in place: its adapters are merged into its
            weights, and `set_weight` sets the weights.

    Attributes:
        base: the base model.
        model: the interpolated model, which is ``trained``.

    Raises:
        ConfigError: if the models have different architectures. The message names the first
            difference.

    Example:
        ```python
        base = DualEncoder.from_pretrained("sentence-transformers/all-MiniLM-L6-v2")
        trained = DualEncoder.from_pretrained("runs/mine/model")
        model = WeightInterpolation(base, trained).set_weight(0.5)
        model.save_pretrained("merged")
        ```
    """

    def __init__(self, base: DualEncoder, trained: DualEncoder) -> None:
        for model in (base, trained):
            if has_adapter(model):
                merge_adapter(model)
        if is_tied(trained) and not is_tied(base):
            raise ConfigError("the base model has two towers, and the trained model has one")
        self.base = base
        self.model = trained.eval()
        # {task: tensors of its tower}. A tied model has one tower, that of the task "query".
        self._tensors: dict[str, list[_TensorTriple]] = {}
        tasks = ("query",) if is_tied(trained) else ("query", "document")
        for task in tasks:
            base_tower = get_tower(base, task)
            trained_tower = get_tower(trained, task)
            _require_same_architecture(base_tower, trained_tower)
            self._tensors[task] = _list_tensors(base_tower, trained_tower)

    def set_weight(self, weight: float) -> DualEncoder:
        """Interpolate all tensors of the model, in place.

        Args:
            weight: w in [0, 1]. With 0, the model gets the base model's weights, and with 1 the
                trained model's, bit for bit.

        Returns:
            The interpolated model.

        Raises:
            ConfigError: if the weight is outside [0, 1].
        """
        check_weight(weight)
        for triples in self._tensors.values():
            for interpolated, base, trained in triples:
                interpolated.copy_(interpolate(base, trained, weight))
        return self.model

    def is_unchanged(self, task: str) -> bool:
        """Return whether the tower of a task has the same weights in both models.

        Args:
            task: "query" or "document".
        """
        triples = self._tensors.get(task, self._tensors["query"])
        return all(_is_equal(base, trained) for _, base, trained in triples)


def check_weight(weight: float) -> None:
    """Raise `ConfigError` if the weight w of an interpolation is outside [0, 1]."""
    if not 0 <= weight <= 1:
        raise ConfigError(
            f"weight {weight:g}: the weight of the trained model must be between 0 and 1"
        )


def interpolate(base: torch.Tensor, trained: torch.Tensor, weight: float) -> torch.Tensor:
    """Return (1 - weight) * base + weight * trained, in the dtype of ``trained``.

    The result is computed in float32, or in float64 if the tensors are float64. It is exact if both
    tensors are equal, and at the weights 0 and 1. Tensors of integers are not interpolated: the
    result is ``trained``.
    """
    if weight == 1 or not trained.is_floating_point() or _is_equal(base, trained):
        return trained
    if weight == 0:
        return base.to(trained.dtype)
    dtype = torch.promote_types(trained.dtype, torch.float32)
    # torch.lerp computes base + weight * (trained - base), so numbers that are equal in both models
    # do not change. The rounded sum (1 - weight) * base + weight * trained could differ from them.
    return torch.lerp(base.to(dtype), trained.to(dtype), weight).to(trained.dtype)


def _is_equal(base: torch.Tensor, trained: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype and the same values."""
    # torch.equal raises an error for tensors of different dtypes.
    return base.dtype == trained.dtype and torch.equal(base, trained)


def _list_tensors(base: nn.Module, trained: nn.Module) -> list[_TensorTriple]:
    """Return the tensors of a trained tower, with their values in the base and trained model."""
    base_state = base.state_dict()
    triples = []
    # The tensors of a state_dict share the memory of the model, so writing to them changes it.
    for name, tensor in trained.state_dict().items():
        base_tensor = base_state[name].to(tensor.device)
        triples.append(_TensorTriple(tensor, base_tensor, tensor.clone()))
    return triples


def _require_same_architecture(base: nn.Module, trained: nn.Module) -> None:
    """Raise `ConfigError` with the first difference between two towers, if there is one."""
    _require_same_modules(base, trained)
    _require_same_tensors(base, trained)
    _require_same_settings(base, trained)
    _require_same_vocabulary(base, trained)


def _require_same_vocabulary(base: nn.Module, trained: nn.Module) -> None:
    """Raise `ConfigError` if a token has different ids in the tokenizers of two towers."""
    base_tokenizer = _get_tokenizer(base)
    trained_tokenizer = _get_tokenizer(trained)
    if base_tokenizer is None or trained_tokenizer is None:
        return
    base_vocabulary = base_tokenizer.get_vocab()
    trained_vocabulary = trained_tokenizer.get_vocab()
    for token in sorted(base_vocabulary.keys() | trained_vocabulary.keys()):
        base_id = base_vocabulary.get(token)
        trained_id = trained_vocabulary.get(token)
        if base_id != trained_id:
            raise ConfigError(
                f"the tokenizers differ: the token {token!r} has the number {base_id} in the base "
                f"model and {trained_id} in the trained model"
            )


def _require_same_modules(base: nn.Module, trained: nn.Module) -> None:
    """Raise `ConfigError` if two towers differ in the types of their modules."""
    base_names = [type(module).__name__ for module in base.children()]
    trained_names = [type(module).__name__ for module in trained.children()]
    if base_names != trained_names:
        raise ConfigError(
            f"the base model has the modules {', '.join(base_names)}, and the trained model has "
            f"{', '.join(trained_names)}"
        )


def _require_same_settings(base: nn.Module, trained: nn.Module) -> None:
    """Raise `ConfigError` if two towers differ in a setting of a module, such as the pooling."""
    for base_module, trained_module in zip(base.children(), trained.children(), strict=True):
        base_settings = _get_settings(base_module)
        trained_settings = _get_settings(trained_module)
        for name in trained_settings:
            base_value = base_settings.get(name)
            if base_value != trained_settings[name]:
                raise ConfigError(
                    f"{type(base_module).__name__} has {name}={base_value} in the base model and "
                    f"{name}={trained_settings[name]} in the trained model"
                )


def _get_settings(module: nn.Module) -> dict[str, Any]:
    """Return the settings of a module that must be the same in both models.

    For the Transformer module, these are settings of its backbone. The module's own settings, such
    as maximum lengths, may differ.
    """
    if isinstance(module, Transformer):
        config = module.config
        return {name: getattr(config, name, None) for name in _BACKBONE_SETTINGS}
    get_config_dict: Any = getattr(module, "get_config_dict", dict)
    settings: dict[str, Any] = get_config_dict()
    return settings


def _require_same_tensors(base: nn.Module, trained: nn.Module) -> None:
    """Raise `ConfigError` if two towers differ in the name or shape of a tensor."""
    base_state = base.state_dict()
    trained_state = trained.state_dict()
    for name, tensor in trained_state.items():
        if name not in base_state:
            raise ConfigError(f"the base model has no weight {name}, which the trained model has")
        base_shape = tuple(base_state[name].shape)
        if base_shape != tuple(tensor.shape):
            raise ConfigError(
                f"the weight {name} has the shape {base_shape} in the base model and "
                f"{tuple(tensor.shape)} in the trained model"
            )
    for name in base_state:
        if name not in trained_state:
            raise ConfigError(f"the trained model has no weight {name}, which the base model has")
    for name, parameter in trained.named_parameters():
        if not parameter.is_floating_point():
            raise ConfigError(
                f"the weight {name} has the type {parameter.dtype}: quantized weights cannot be "
                "interpolated; save the model in float32 or bfloat16"
            )


def _get_tokenizer(tower: nn.Module) -> Any:
    """Return the tokenizer of a tower, or None if it has none."""
    for module in tower.children():
        tokenizer = getattr(module, "tokenizer", None)
        if hasattr(tokenizer, "get_vocab"):
            return tokenizer
    return None
