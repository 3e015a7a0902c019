"""Engines that shard a model over ranks (FSDP, DeepSpeed's ZeRO): their setup, and full weights.

With FSDP or ZeRO-3, each rank keeps only a part (a shard) of each weight, while saved models hold
full weights. With ZeRO-1 and ZeRO-2, only gradients and optimizer states are sharded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import compare_versions, is_deepspeed_available
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from contaccum.errors import ConfigError, UserError

MIN_DEEPSPEED = "0.19.8"
"""The tested version. Earlier versions apply infinite or NaN updates in bfloat16."""


def require_deepspeed() -> None:
    """Raise `ConfigError` if DeepSpeed is not installed, or is older than `MIN_DEEPSPEED`."""
    if not (is_deepspeed_available() and compare_versions("deepspeed", ">=", MIN_DEEPSPEED)):
        raise ConfigError(
            f"deepspeed needs DeepSpeed {MIN_DEEPSPEED} or later: pip install "
            f"'deepspeed>={MIN_DEEPSPEED}', or set fsdp=true instead"
        )


def configure_deepspeed(args: SentenceTransformerTrainingArguments) -> None:
    """Set the batch sizes, and the options for saving full models, in DeepSpeed's config.

    Raises:
        ConfigError: for a config without a ZeRO stage of 1, 2 or 3.
    """
    plugin: Any = args.deepspeed_plugin
    stage = plugin.hf_ds_config.get_value("zero_optimization.stage")
    if stage not in (1, 2, 3):
        raise ConfigError(f"deepspeed with zero_optimization.stage={stage}: set 1, 2 or 3")
    config = plugin.deepspeed_config
    config.setdefault("gradient_clipping", args.max_grad_norm)
    # transformers has set other sizes, from the training arguments as the user wrote them.
    pairs_per_step = args.per_device_train_batch_size
    num_steps = args.gradient_accumulation_steps
    config["train_micro_batch_size_per_gpu"] = pairs_per_step
    config["gradient_accumulation_steps"] = num_steps
    config["train_batch_size"] = pairs_per_step * num_steps * args.world_size
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    # While this global config is set, transformers loads models in shards. Such a model cannot run
    # before DeepSpeed's engine exists, but the trainer runs the model before that.
    unset_hf_deepspeed_config()


def refuse_unsafe_files(folder: Path) -> None:
    """Raise `UserError` if a DeepSpeed file in a checkpoint could run code when it is loaded.

    DeepSpeed unpickles these files without a check. They may hold only tensors and its settings.
    """
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
        for path in sorted(folder.rglob("*.pt")):
            try:
                torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            except Exception as error:  # torch.load raises errors of many types
                raise UserError(
                    f"{path}: it holds more than tensors, so that loading it could run code, or it "
                    f"is damaged. Start a new run from the saved weights with --model {folder}"
                ) from error


def save_full_model(
    model: SentenceTransformer, weights: dict[str, Tensor] | None, folder: Path, is_writer: bool
) -> None:
    """Save a model that an engine shards, without a model card, for which it would have to run.

    ``weights`` are the full weights by name; None if the model itself has them, or on a rank that
    writes nothing.
    """
    weights = weights or {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shards = {name: parameter for name, parameter in parameters.items() if name in weights}
    full_parameters = {name: nn.Parameter(weights[name], requires_grad=False) for name in shards}
    _set_parameters(model, full_parameters)
    try:
        if is_writer:
            model.save_pretrained(str(folder), create_model_card=False)
    finally:
        _set_parameters(model, shards)


def _set_parameters(model: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        module_name, _, parameter_name = name.rpartition(".")
        model.get_submodule(module_name)._parameters[parameter_name] = parameter


def load_full_weights(
    model: SentenceTransformer, weights: dict[str, Any], is_sharded: bool
) -> None:
    """Load full weights, by name, into a model, which FSDP may have sharded."""
    if is_sharded:
        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
        return
    # Weights in 4 bits are packed as integers, and are never trained.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = [name for name, parameter in parameters.items() if parameter.is_floating_point()]
    model.load_state_dict({name: weights[name] for name in names}, strict=False)
