"""Engines that shard weights over ranks (FSDP, DeepSpeed's ZeRO): whole weights in, and out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from contaccum.encoders.adapters import has_adapter
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.towers import is_tied
from contaccum.errors import ConfigError, UserError


def describe_deepspeed(accelerator: Accelerator) -> str:
    """Return DeepSpeed's stage and the number of ranks, for records."""
    stage = accelerator.state.deepspeed_plugin.zero_stage
    return f"ZeRO-{stage} on {accelerator.num_processes} ranks"


def refuse_adapters_of_two_towers(model: SentenceTransformer) -> None:
    """Raise `ConfigError` for a model that FSDP cannot shard."""
    if has_adapter(model) and not is_tied(model):
        raise ConfigError(
            "fsdp with adapters of two towers: FSDP cannot shard the base that they share. Use DDP"
        )


def refuse_code(folder: Path) -> None:
    """Raise `UserError` for a file of DeepSpeed that holds more than tensors and its records.

    DeepSpeed would unpickle the file, and so run code in it.
    """
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
        for path in sorted(folder.rglob("*.pt")):
            try:
                torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            except Exception as error:  # of many kinds
                raise UserError(
                    f"{path}: there is more in it than tensors, or it is damaged: train from its "
                    f"weights with --model {folder}"
                ) from error


@contextmanager
def whole_parameters(model: nn.Module, state: dict[str, Tensor]) -> Iterator[None]:
    """Replace a model's sharded parameters by those of its whole ``state`` within a block."""
    shards: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in state:
            shards[name] = parameter
    try:
        for name in shards:
            _set_parameter(model, name, nn.Parameter(state[name], requires_grad=False))
        yield
    finally:
        for name, parameter in shards.items():
            _set_parameter(model, name, parameter)


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module_name, _, parameter_name = name.rpartition(".")
    model.get_submodule(module_name)._parameters[parameter_name] = parameter


def save_gathered(
    model: SentenceTransformer, weights: dict[str, Tensor] | None, folder: Path, is_writer: bool
) -> None:
    """Save a model that an engine shards, without a model card.

    A card would need a forward pass of all ranks.

    Args:
        model: the model, with shards of its weights on each rank.
        weights: its whole weights; None where the model has them, or on ranks that write nothing.
        folder: to save it in.
        is_writer: whether this rank writes.
    """
    with whole_parameters(model, weights or {}):
        if is_writer:
            model.save_pretrained(str(folder), create_model_card=False)


def read_whole_weights(folder: str, trust_remote_code: bool) -> dict[str, Any]:
    """Return the weights of a saved model."""
    model = DualEncoder(folder, device="cpu", trust_remote_code=trust_remote_code)
    return dict(model.state_dict())


def load_whole_weights(
    model: SentenceTransformer, weights: dict[str, Any], is_sharded: bool
) -> None:
    """Load whole weights into a model.

    Args:
        model: its weights that are no floating-point numbers (4 bits) stay as they are.
        weights: the whole weights by name.
        is_sharded: whether FSDP shards the model.
    """
    if is_sharded:
        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
        return
    floating = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_floating_point():
            floating[name] = weights[name]
    model.load_state_dict(floating, strict=False)
