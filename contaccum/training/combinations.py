"""Refusal of combinations of settings of model, data and training that cannot work.

`contaccum.training.arguments` checks the training settings by themselves. Nothing is loaded here.
"""

from __future__ import annotations

import os
from pathlib import Path

from contaccum.encoders import adapters, four_bits
from contaccum.errors import ConfigError
from contaccum.training.arguments import ContAccumTrainingArguments, get_name
from contaccum.training.checkpoint import find_checkpoints
from contaccum.training.options import DataArguments, ModelArguments, refuse_without_effect


def check_combinations(
    model_args: ModelArguments, data_args: DataArguments, args: ContAccumTrainingArguments
) -> None:
    """Raise `ConfigError` for settings of model, data and training that cannot work together."""
    _check_data(model_args, data_args, args)
    _refuse_to_remove_models(model_args, args)
    _check_adapter(model_args, args)


def _check_data(
    model_args: ModelArguments, data_args: DataArguments, args: ContAccumTrainingArguments
) -> None:
    """Refuse settings of the data that cannot work together with others."""
    numbers_of_negatives = [options["num_hard_negatives"] for options in data_args.sets.values()]
    if args.distill and 0 in numbers_of_negatives:
        raise ConfigError(
            f"distill={args.distill} with num_hard_negatives=0: set num_hard_negatives to the "
            "number of scored negatives per query"
        )
    strategy = get_name(args.eval_strategy)
    eval_data = data_args.eval_data
    has_eval_data = eval_data is not None
    is_evaluated = strategy != "no"
    if has_eval_data != is_evaluated:
        raise ConfigError(
            f"eval_data={eval_data} with eval_strategy={strategy}: set both, or none of them"
        )
    is_nanobeir = str(eval_data).split("/")[0] == "nanobeir"
    if is_nanobeir and (data_args.eval_queries or data_args.eval_corpus_size):
        raise ConfigError(
            "eval_queries or eval_corpus_size with eval_data=nanobeir: its sets are already small. "
            "Drop them"
        )
    guide_settings = ("guide_margin", "guide_margin_strategy")
    refuse_without_effect(args, guide_settings, "guide", needed_in=model_args)
    eval_settings = ("eval_split", "eval_queries", "eval_corpus_size")
    refuse_without_effect(data_args, eval_settings, "eval_data")
    if args.method == "query_side":
        _check_query_side(model_args, max(numbers_of_negatives, default=0))


def _check_query_side(model_args: ModelArguments, num_hard_negatives: int) -> None:
    """Refuse settings of model and data that query-side training does not use."""
    if model_args.guide:
        raise ConfigError(
            f"method=query_side with guide={model_args.guide}: the method has no such setting. "
            "Drop guide"
        )
    if num_hard_negatives:
        raise ConfigError(
            f"method=query_side with num_hard_negatives={num_hard_negatives}: all other "
            "documents of the store are negatives already. Set num_hard_negatives=0"
        )


def _refuse_to_remove_models(model_args: ModelArguments, args: ContAccumTrainingArguments) -> None:
    """Refuse to overwrite a folder if the model or the guide is a checkpoint in it."""
    if not args.overwrite_output_dir:
        return
    checkpoints = {path.resolve() for path in find_checkpoints(str(args.output_dir))}
    for key, name in (("model", model_args.model), ("guide", model_args.guide)):
        path = Path(name or "").resolve()
        is_in_checkpoint = not checkpoints.isdisjoint((path, *path.parents))
        if is_in_checkpoint:
            raise ConfigError(
                f"overwrite_output_dir=true with {key}={name}: the run would remove that "
                "checkpoint. Copy it to another folder, or set another output_dir"
            )


def _check_upload_of_adapter(model_args: ModelArguments) -> None:
    """Refuse to upload an adapter before it is merged, or over a base that others do not have."""
    if model_args.merge_adapter:
        raise ConfigError(
            "merge_adapter with push_to_hub: the adapter would be uploaded before it is merged. "
            "Drop push_to_hub, and upload the merged folder afterwards"
        )
    bases = adapters.find_adapter_bases(Path(model_args.model))
    if model_args.lora_r is not None:
        bases = [model_args.model]
    for base in bases:
        if os.path.isdir(base):
            raise ConfigError(
                f"push_to_hub: the base of the adapter is the local folder {base}, which other "
                "people do not have. Train from a base on the hub, or drop push_to_hub, and upload "
                "what contaccum export or merge_adapter writes"
            )


def _check_adapter(model_args: ModelArguments, args: ContAccumTrainingArguments) -> None:
    """Refuse settings of an adapter that are invalid, or need a package that is not installed."""
    adapter_settings = ("lora_alpha", "lora_dropout", "lora_target_modules")
    refuse_without_effect(model_args, adapter_settings, "lora_r")
    is_same_folder = Path(model_args.model).resolve() == Path(str(args.output_dir)).resolve()
    if model_args.merge_adapter and is_same_folder:
        raise ConfigError(
            "merge_adapter with model as output_dir: the merged model would overwrite the base "
            "model that the checkpoints need. Set another output_dir"
        )
    if args.push_to_hub:
        _check_upload_of_adapter(model_args)
    if not 0 <= model_args.lora_dropout < 1:
        raise ConfigError(
            f"lora_dropout must be at least 0 and less than 1, got {model_args.lora_dropout}"
        )
    if model_args.lora_r is not None:
        if model_args.lora_r < 1:
            raise ConfigError(f"lora_r must be at least 1, got {model_args.lora_r}")
        adapters.require_peft(f"lora_r={model_args.lora_r}")
    if model_args.load_in_4bit:
        four_bits.make_4bit_kwargs()  # raises ConfigError if this machine cannot use 4 bits
