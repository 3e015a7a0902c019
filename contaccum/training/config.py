"""Parsing of YAML files and the command line, and loading of model, data and evaluator.

A config file has one flat list of ``key: value`` lines: the keys are the field names of
`ModelArguments`, `DataArguments` and `ContAccumTrainingArguments`. The command line has the same
keys as ``--key value``, and overrides the files. An error for an unknown key suggests the most
similar one. Combinations of model, data and training that cannot work are refused before anything
is loaded; `contaccum.training.arguments` checks the training settings by themselves.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

from contaccum.data import TrainingSets, load_training_sets
from contaccum.encoders import adapters
from contaccum.encoders.dual_encoder import DualEncoder, add_query_adapter, untie
from contaccum.encoders.loading import is_sentence_transformer, require_model
from contaccum.encoders.settings import configure, is_tied, set_max_lengths
from contaccum.errors import ConfigError, closest
from contaccum.evaluation.beir import load_data as load_beir
from contaccum.evaluation.evaluator import NanoBEIR, RetrievalEvaluator, sample
from contaccum.evaluation.metrics import DEFAULT_METRICS, check_metric
from contaccum.training.arguments import ContAccumTrainingArguments, get_name
from contaccum.training.checkpoint import find_checkpoints
from contaccum.training.options import DataArguments, ModelArguments, refuse_without_effect

logger = logging.getLogger(__name__)

_BACKBONE_OPTIONS = (
    "tied",
    "pooling",
    "normalize",
    "query_prompt",
    "passage_prompt",
    "query_max_length",
    "passage_max_length",
    "trust_remote_code",
)
"""Fields of `ModelArguments` that are passed to `DualEncoder.from_backbone` by the same name."""


class _Parser(HfArgumentParser):
    """An argument parser that raises `ConfigError` instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. `contaccum train --help` lists the options")


def _int_or_auto(text: str) -> int | str:
    """Return "auto" or a number, as a type for argparse, which turns a ValueError into an error."""
    if text.lower() == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number or auto, got {text!r}") from None


def parse(
    argv: Sequence[str],
) -> tuple[ModelArguments, DataArguments, ContAccumTrainingArguments]:
    """Parse ``[CONFIG.yaml ...] [--key value ...]`` into arguments.

    Later files override earlier ones, and the command line overrides all files.

    Raises:
        ConfigError: for a file that cannot be read, an unknown key, or an invalid value or
            combination.
    """
    parser = _Parser(
        [ModelArguments, DataArguments, ContAccumTrainingArguments],  # type: ignore[list-item]  # its own type variable
        prog="contaccum train",
        usage="contaccum train [CONFIG.yaml ...] [--key value ...]",
        allow_abbrev=False,
    )
    keys = set()
    for action in parser._actions:  # private: argparse has no other list of its options
        keys.add(action.dest)
        if action.dest == "per_device_train_batch_size":
            action.type = _int_or_auto
    command_line = list(argv)
    options: list[str] = []
    while command_line and not command_line[0].startswith("-"):
        options += read_config_options(command_line.pop(0), keys)
    options += command_line
    try:
        parsed = parser.parse_args_into_dataclasses(options, return_remaining_strings=True)
    except ConfigError:
        raise
    except (ValueError, ImportError) as error:  # raised by transformers for invalid combinations
        raise ConfigError(str(error)) from error
    model_args, data_args, args, unknown = parsed
    if unknown:
        key = unknown[0].lstrip("-").split("=")[0]
        raise ConfigError(f"unknown key {key!r} on the command line{closest(key, keys)}")
    _require_paths(model_args, data_args, args)
    model_args.model = os.path.expanduser(model_args.model)
    if model_args.guide:
        model_args.guide = os.path.expanduser(model_args.guide)
    _check_combinations(model_args, data_args, args)
    # transformers has set "loss" if it needs a metric and the user has set none. The trainer's
    # evaluation results have the prefix.
    if args.metric_for_best_model not in (None, "loss"):
        args.metric_for_best_model = f"eval_{check_metric(str(args.metric_for_best_model))}"
    return model_args, data_args, args


def _require_paths(
    model_args: ModelArguments, data_args: DataArguments, args: ContAccumTrainingArguments
) -> None:
    """Raise `ConfigError` if the model, the data or the output folder is not set."""
    output_dir = args.output_dir
    if output_dir == "trainer_output":  # transformers' default
        output_dir = None
    required = {
        "model": model_args.model,
        "train_data": data_args.train_data,
        "output_dir": output_dir,
    }
    for key, value in required.items():
        if not value:
            raise ConfigError(
                f"{key} is not set: add `{key}: ...` to the config, or --{key} on the command line"
            )


def _check_combinations(
    model_args: ModelArguments, data_args: DataArguments, args: ContAccumTrainingArguments
) -> None:
    """Raise `ConfigError` for settings of model, data and training that cannot work together."""
    strategy = get_name(args.eval_strategy)
    if (data_args.eval_data is None) != (strategy == "no"):
        raise ConfigError(
            f"eval_data={data_args.eval_data} with eval_strategy={strategy}: set both, or none of "
            "them"
        )
    refuse_without_effect(
        args, ("guide_margin", "guide_margin_strategy"), "guide", needed_in=model_args
    )
    adapter_settings = ("lora_alpha", "lora_dropout", "lora_target_modules")
    refuse_without_effect(model_args, adapter_settings, "lora_r")
    # The property ``sets`` also checks the options of the training sets.
    numbers = [options["num_hard_negatives"] for options in data_args.sets.values()]
    if args.method == "query_side":
        unused = {"guide": model_args.guide, "num_hard_negatives": max(numbers, default=0)}
        for name, value in unused.items():
            if value:
                raise ConfigError(
                    f"method=query_side with {name}={value}: the method has no such setting, "
                    f"because all other documents of the store are negatives. Drop {name}"
                )
    if args.overwrite_output_dir:
        checkpoints = {path.resolve() for path in find_checkpoints(str(args.output_dir))}
        for name, value in (("model", model_args.model), ("guide", model_args.guide)):
            path = Path(value or "").resolve()
            if not checkpoints.isdisjoint((path, *path.parents)):
                raise ConfigError(
                    f"overwrite_output_dir=true with {name}={value}: the run would remove that "
                    "checkpoint. Copy it to another folder, or set another output_dir"
                )
    is_same_folder = Path(model_args.model).resolve() == Path(str(args.output_dir)).resolve()
    if model_args.merge_adapter and is_same_folder:
        raise ConfigError(
            "merge_adapter with model as output_dir: the merged model would overwrite the base "
            "model that the checkpoints need. Set another output_dir"
        )
    if model_args.merge_adapter and args.push_to_hub:
        raise ConfigError(
            "merge_adapter with push_to_hub: the adapter would be uploaded before it is merged. "
            "Drop push_to_hub, and upload the merged folder afterwards"
        )


def read_config_options(name: str, keys: Collection[str]) -> list[str]:
    """Read a YAML config file as command-line options, ``--key=value``.

    Args:
        name: path of the file.
        keys: the valid keys.

    Raises:
        ConfigError: for invalid YAML, with the line; for an unknown key, with the most similar key.
    """
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{name}: no such config file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        location = f"{name}:{mark.line + 1}" if mark else name
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{location}: not valid YAML ({problem})") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{name}: a config consists of `key: value` lines, got a {type(content).__name__}"
        )
    options: list[str] = []
    for name_in_file, value in content.items():
        key = str(name_in_file)
        if key not in keys:
            raise ConfigError(f"unknown key {key!r} in {name}{closest(key, keys)}")
        if value is False and key.endswith("_strategy"):
            value = "no"  # YAML reads the unquoted word no as false
        if isinstance(value, list):
            options += [f"--{key}", *map(_format_value, value)]
        elif value is not None:
            # One token "--key=value", because argparse would read a separate value with a leading
            # dash, such as -1, as an option.
            options.append(f"--{key}={_format_value(value)}")
    return options


def _format_value(value: object) -> str:
    """Return a value of a config file as the command line expects it."""
    if isinstance(value, (dict, bool)):
        return json.dumps(value)
    return str(value)


def load_data(data_args: DataArguments, args: ContAccumTrainingArguments) -> TrainingSets:
    """Load the training data; raise `DataError` for data that cannot be used."""
    return load_training_sets(
        data_args.sets,
        on_bad_record=data_args.on_bad_record,
        teacher_scores=args.distill is not None,
    )


def load_evaluator(
    data_args: DataArguments, args: ContAccumTrainingArguments
) -> RetrievalEvaluator | NanoBEIR | None:
    """Load the evaluator for ``eval_data``; return None if it is not set.

    ``eval_data`` is a BEIR folder, the name of a public set, or ``nanobeir`` or
    ``nanobeir/SET,SET``.

    Raises:
        DataError: for data that cannot be used.
    """
    if data_args.eval_data is None:
        return None
    batch_size = args.per_device_eval_batch_size
    similarity: Any = args.similarity  # a str that the parser has checked
    name, *parts = data_args.eval_data.split("/")
    if name == "nanobeir":
        set_names = parts[0].split(",") if parts else []
        return NanoBEIR(set_names, batch_size=batch_size, similarity=similarity)
    on_bad_record: Any = data_args.on_bad_record  # a str that the parser has checked
    full_set = load_beir(data_args.eval_data, data_args.eval_split, on_bad_record)
    dataset = sample(full_set, data_args.eval_queries, data_args.eval_corpus_size)
    full_size = {"of_queries": len(full_set.queries), "of_documents": len(full_set.corpus)}
    metrics = list(DEFAULT_METRICS)
    primary_metric = None
    if args.metric_for_best_model not in (None, "loss"):
        primary_metric = check_metric(str(args.metric_for_best_model))
        metrics.append(primary_metric)
    return RetrievalEvaluator(
        dataset,
        metrics,
        primary_metric=primary_metric,
        batch_size=batch_size,
        similarity=similarity,
        notes=full_size,
    )


def load_model(
    model_args: ModelArguments, device: str | None = None, method: str = "contaccum"
) -> DualEncoder:
    """Load the encoder to train: a SentenceTransformer, or a backbone with pooling added to it.

    Args:
        model_args: the model and its settings.
        device: the device to load the model on. Default: chosen by sentence-transformers.
        method: ``args.method``. With "query_side", only the query tower gets the adapter.

    Raises:
        UserError: for a model that cannot be loaded.
    """
    options: dict[str, Any] = {"device": device}
    if model_args.load_in_4bit:
        options["model_kwargs"] = adapters.make_4bit_kwargs()
    # Two towers are loaded with separate weights. Once they have adapters, they share one base
    # model. Loading on the CPU first avoids two base models in the device's memory.
    has_two_adapters = bool(model_args.lora_r) and not model_args.tied
    is_moved_later = has_two_adapters and bool(device) and not model_args.load_in_4bit
    if is_moved_later:
        options["device"] = "cpu"
    require_model(model_args.model)
    if is_sentence_transformer(model_args.model):
        model = _load_sentence_transformer(model_args, options)
    else:
        for name in _BACKBONE_OPTIONS:
            options[name] = getattr(model_args, name)
        model = DualEncoder.from_backbone(model_args.model, **options)
    configure(
        model, model_args.dropout, model_args.freeze_word_embeddings, model_args.attn_implementation
    )
    if model_args.lora_r is not None:
        add_adapter: Any = adapters.add_adapter
        if method == "query_side":
            add_adapter = add_query_adapter
        add_adapter(
            model,
            model_args.lora_r,
            model_args.lora_alpha,
            model_args.lora_dropout,
            model_args.lora_target_modules,
        )
    elif adapters.has_adapter(model):
        adapters.make_adapter_trainable(model)
    else:
        # Only now is it certain that the saved model has no adapter either.
        refuse_without_effect(model_args, ("load_in_4bit", "merge_adapter"), "lora_r")
    if is_moved_later:
        model = model.to(device)
    return model


def _load_sentence_transformer(model_args: ModelArguments, options: dict[str, Any]) -> DualEncoder:
    """Load a SentenceTransformer, with two towers if ``tied`` is False."""
    for name in ("pooling", "normalize"):
        value = getattr(model_args, name)
        if value:
            logger.warning(
                f"{name}={value} has no effect: {model_args.model} is a SentenceTransformer, which "
                f"keeps its own modules. Drop {name}"
            )
    trusted = model_args.trust_remote_code
    model = DualEncoder.from_pretrained(model_args.model, trust_remote_code=trusted, **options)
    if not model_args.tied and is_tied(model):
        untie(model)
    elif model_args.tied and not is_tied(model):
        logger.info(f"{model_args.model} has two encoders, and keeps both: tied has no effect")
    set_max_lengths(model, model_args.query_max_length, model_args.passage_max_length)
    if model_args.query_prompt is not None:
        model.prompts["query"] = model_args.query_prompt
    if model_args.passage_prompt is not None:
        model.prompts["document"] = model_args.passage_prompt
    return model
