"""From a YAML file and the command line to arguments, and from these to model, data and evaluator.

Keys are flat, the command line overrides, an unknown key names the closest. Combinations that
cannot work are refused before anything is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import yaml
from sentence_transformers.util import is_sentence_transformer_model
from transformers import HfArgumentParser

from contaccum.data import TrainingSets, load_training_sets
from contaccum.encoders import adapters
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.loading import require_model
from contaccum.encoders.query_tower import add_query_adapter, untie
from contaccum.encoders.settings import configure, set_max_lengths
from contaccum.encoders.towers import is_tied
from contaccum.errors import (
    ConfigError,
    suggest_options,
    translate_arguments,
    translate_option_name,
)
from contaccum.evaluation.beir_sets import load_data as load_beir
from contaccum.evaluation.evaluator import NanoBEIR, RetrievalEvaluator, sample
from contaccum.evaluation.metrics import DEFAULT_METRICS, check_metric
from contaccum.mining import MiningData, load_mining_data
from contaccum.training.arguments import (
    ContAccumTrainingArguments,
    name_of,
    refuse,
    refuse_alone,
)
from contaccum.training.checkpoint import find_checkpoints
from contaccum.training.options import DataArguments, ModelArguments

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


class _Parser(HfArgumentParser):
    """An argument parser that raises `ConfigError` in place of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. `contaccum train --help` lists the options")


def _int_or_auto(text: str) -> int | str:
    """Return a number of pairs, or "auto"; argparse names a value that is neither."""
    return "auto" if text.lower() == "auto" else int(text)


def parse(
    argv: Sequence[str],
) -> tuple[ModelArguments, DataArguments, ContAccumTrainingArguments]:
    """Return the arguments that ``[CONFIG.yaml ...] [--key value ...]`` gives.

    Later files and the command line override earlier files.

    Raises:
        ConfigError: for a file that cannot be read, an unknown key, or values that cannot work.
    """
    parser = _Parser(
        [ModelArguments, DataArguments, ContAccumTrainingArguments],  # type: ignore[list-item]  # its own type variable
        prog="contaccum train",
        usage="contaccum train [CONFIG.yaml ...] [--key value ...]",
        allow_abbrev=False,
    )
    keys = set()
    for action in parser._actions:  # argparse shows them nowhere else
        keys.add(action.dest)
        if action.dest == "per_device_train_batch_size":
            action.type = _int_or_auto
    command_line = list(argv)
    options: list[str] = []
    while command_line and not command_line[0].startswith("-"):
        options += as_options(command_line.pop(0), keys)
    options += translate_arguments(command_line, keys)
    try:
        parsed = parser.parse_args_into_dataclasses(options, return_remaining_strings=True)
    except ConfigError:
        raise
    except (ValueError, ImportError) as error:  # transformers' refusals, in its words
        raise ConfigError(str(error)) from error
    model, data, args, unknown = parsed
    if unknown:
        key = unknown[0].lstrip("-").split("=")[0]
        raise ConfigError(f"unknown key {key!r} on the command line{suggest_options(key, keys)}")
    _require_paths(model, data, args)
    _refuse_combinations(model, data, args)
    _refuse_to_remove_models(model, args)
    _check_adapter(model, args)
    return model, data, args


def _require_paths(
    model: ModelArguments, data: DataArguments, args: ContAccumTrainingArguments
) -> None:
    """Raise `ConfigError` where the model, the data or the output folder is not set."""
    output_dir = args.output_dir
    if output_dir == "trainer_output":  # transformers' own choice for a run without a folder
        output_dir = None
    required = {"model": model.model, "train_data": data.train_data, "output_dir": output_dir}
    for key, value in required.items():
        if not value:
            raise ConfigError(
                f"{key} is not set: add `{key}: ...` to the config, or --{key} on the command line"
            )


def _refuse_combinations(
    model: ModelArguments, data: DataArguments, args: ContAccumTrainingArguments
) -> None:
    """Refuse settings of model, data and training that cannot work together."""
    _ = data.sets  # checks each set, and their common options
    refreshes = args.refresh_negatives_every is not None
    has_no_negatives = not data.num_hard_negatives
    strategy = name_of(args.eval_strategy)
    is_nano = str(data.eval_data).split("/")[0] == "nanobeir"
    refuse(
        {
            "refresh_negatives_every with num_hard_negatives=0: set it": (
                refreshes and has_no_negatives
            ),
            f"distill={args.distill} with num_hard_negatives=0: set it": (
                args.distill and has_no_negatives
            ),
            "refresh_negatives_every with several sets in train_data: it mines in one": (
                refreshes and len(data.train_data) > 1
            ),
            f"eval_data={data.eval_data} with eval_strategy={strategy}: set both, or none": (
                (data.eval_data is None) != (strategy == "no")
            ),
            "eval_queries and eval_corpus_size with eval_data=nanobeir, which is small already: "
            "drop them": is_nano and (data.eval_queries or data.eval_corpus_size),
        }
    )
    refuse_alone(args, dict.fromkeys(("guide_margin", "guide_margin_strategy"), "guide"), model)
    of_evaluation = ("eval_split", "eval_queries", "eval_corpus_size")
    refuse_alone(data, dict.fromkeys(of_evaluation, "eval_data"))
    # transformers sets "loss" where the user set nothing.
    if args.metric_for_best_model not in (None, "loss"):
        args.metric_for_best_model = f"eval_{check_metric(str(args.metric_for_best_model))}"


def _refuse_to_remove_models(model: ModelArguments, args: ContAccumTrainingArguments) -> None:
    """Refuse to overwrite a folder with a checkpoint that the run starts from."""
    if not args.overwrite_output_dir:
        return
    checkpoints = {path.resolve() for path in find_checkpoints(str(args.output_dir))}
    for key, name in (("model", model.model), ("guide", model.guide)):
        path = Path(name or "").resolve()
        if not checkpoints.isdisjoint((path, *path.parents)):
            raise ConfigError(
                f"overwrite_output_dir=true with {key}={name}: it would remove that checkpoint. "
                "Copy it elsewhere, or name another output_dir"
            )


def _check_adapter(model: ModelArguments, args: ContAccumTrainingArguments) -> None:
    """Refuse settings of an adapter that cannot work, or that need packages that are missing."""
    of_adapter = ("lora_alpha", "lora_dropout", "lora_target_modules")
    refuse_alone(model, dict.fromkeys(of_adapter, "lora_r"))
    is_in_place = Path(model.model).resolve() == Path(str(args.output_dir)).resolve()
    if model.merge_adapter and is_in_place:
        raise ConfigError(
            "merge_adapter with model as output_dir: checkpoints would lose their base. Name "
            "another"
        )
    if not 0 <= model.lora_dropout < 1:
        raise ConfigError(
            f"lora_dropout must be at least 0 and less than 1, got {model.lora_dropout}"
        )
    if model.lora_r is not None:
        refuse({f"lora_r must be at least 1, got {model.lora_r}": model.lora_r < 1})
        adapters.require_peft(f"lora_r={model.lora_r}")
    if model.load_in_4bit:
        adapters.make_4bit_kwargs()


def as_options(name: str, keys: Collection[str]) -> list[str]:
    """Return the content of a YAML file as ``--key=value``.

    Args:
        name: of the file.
        keys: that there are.

    Raises:
        ConfigError: with the line of a fault, or with the closest key to an unknown one.
    """
    content = _read_yaml(name)
    options: list[str] = []
    for name_in_file, value in content.items():
        key = translate_option_name(str(name_in_file), keys)
        if key not in keys:
            raise ConfigError(f"unknown key {key!r} in {name}{suggest_options(key, keys)}")
        if isinstance(value, list):
            options += [f"--{key}", *map(_as_text, value)]
        elif value is not None:
            # One token, so that a value may start with a dash.
            options.append(f"--{key}={_as_text(value)}")
    return options


def _read_yaml(name: str) -> dict[object, Any]:
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{name}: no such config file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        location = name
        if mark:
            location = f"{name}:{mark.line + 1}"
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{location}: not valid YAML ({problem})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{name}: a config is `key: value` lines, got a {type(content).__name__}")
    return content


def _as_text(value: object) -> str:
    return json.dumps(value) if isinstance(value, (dict, bool)) else str(value)


def load_data(data: DataArguments, args: ContAccumTrainingArguments) -> TrainingSets:
    """Return the training data that the arguments name."""
    return load_training_sets(
        data.sets,
        negatives_to_come=args.refresh_negatives_every is not None,
        on_bad_record=data.on_bad_record,
        teacher_scores=args.distill is not None,
    )


def load_mining_data_of(data: DataArguments, args: ContAccumTrainingArguments) -> MiningData | None:
    """Return the data that hard negatives are mined in during training; None if none are.

    They are the training data, with its corpus or with ``refresh_corpus``.
    """
    if args.refresh_negatives_every is None:
        return None
    return load_mining_set(data, args.refresh_corpus)


def load_mining_set(data: DataArguments, corpus: str | None) -> MiningData:
    """Return the only training set as data to mine hard negatives in.

    Args:
        corpus: to find them in; None: that of a BEIR folder, else the positives.

    Raises:
        DataError: for data that cannot be read.
    """
    [training_set] = data.sets.values()
    options = {}
    for name in ("data_format", "split", "columns", "min_score"):
        if name in training_set:
            options[name] = training_set[name]
    return load_mining_data(
        training_set["path"],
        corpus,
        texts=training_set.get("corpus"),
        on_bad_record=data.on_bad_record,  # type: ignore[arg-type]  # one of the choices
        **options,
    )


def load_evaluator(
    data: DataArguments, args: ContAccumTrainingArguments
) -> RetrievalEvaluator | NanoBEIR | None:
    """Return the evaluator that the arguments ask for; raise `DataError` for unusable data."""
    if data.eval_data is None:
        return None
    batch_size = args.per_device_eval_batch_size
    similarity: Any = args.similarity  # one of the choices
    name, *sets = data.eval_data.split("/")
    if name == "nanobeir":
        names = sets[0].split(",") if sets else []
        return NanoBEIR(names, batch_size=batch_size, similarity=similarity)
    on_bad_record: Any = data.on_bad_record  # one of the choices
    whole_set = load_beir(data.eval_data, data.eval_split, on_bad_record)
    dataset = sample(whole_set, data.eval_queries, data.eval_corpus_size)
    metrics = list(DEFAULT_METRICS)
    primary_metric = None
    if args.metric_for_best_model not in (None, "loss"):
        primary_metric = check_metric(str(args.metric_for_best_model))
        metrics.append(primary_metric)
    return RetrievalEvaluator(
        dataset,
        tuple(dict.fromkeys(metrics)),
        primary_metric=primary_metric,
        batch_size=batch_size,
        similarity=similarity,
        notes={"of_queries": len(whole_set.queries), "of_documents": len(whole_set.corpus)},
    )


def load_model(
    arguments: ModelArguments, device: str | None = None, method: str = "contaccum"
) -> DualEncoder:
    """Return the encoder to train: a SentenceTransformer as it is, or a backbone with pooling.

    With ``method="query_side"``, an adapter is the query tower's alone.

    Raises:
        UserError: for a model that cannot be loaded.
    """
    options: dict[str, Any] = {"device": device}
    if arguments.load_in_4bit:
        options["model_kwargs"] = adapters.make_4bit_kwargs()
    # Two towers come with weights each, and share them once they have adapters. They are loaded on
    # the CPU, so that the device gets one base.
    has_two_adapters = arguments.lora_r and not arguments.tied
    moves_late = bool(has_two_adapters and device and not arguments.load_in_4bit)
    if moves_late:
        options["device"] = "cpu"
    require_model(arguments.model)
    is_sentence_transformer = False
    # Any of the hub's errors: loading it fails next, with a message of its own.
    with suppress(Exception):
        is_sentence_transformer = is_sentence_transformer_model(arguments.model)
    if is_sentence_transformer:
        model = _load_sentence_transformer(arguments, options)
    else:
        for name in _BACKBONE_OPTIONS:
            options[name] = getattr(arguments, name)
        model = DualEncoder.from_backbone(arguments.model, **options)
    configure(
        model, arguments.dropout, arguments.freeze_word_embeddings, arguments.attn_implementation
    )
    if arguments.lora_r is not None:
        add_adapter: Any = adapters.add_adapter
        if method == "query_side":
            add_adapter = add_query_adapter
        add_adapter(
            model,
            arguments.lora_r,
            arguments.lora_alpha,
            arguments.lora_dropout,
            arguments.lora_target_modules,
        )
    elif adapters.has_adapter(model):
        adapters.make_adapter_trainable(model)
    else:
        refuse_alone(arguments, dict.fromkeys(("load_in_4bit", "merge_adapter"), "lora_r"))
    return model.to(device) if moves_late else model


def _load_sentence_transformer(arguments: ModelArguments, options: dict[str, Any]) -> DualEncoder:
    """Load a SentenceTransformer, as two towers if the arguments ask for them."""
    trusted = arguments.trust_remote_code
    model = DualEncoder.from_pretrained(arguments.model, trust_remote_code=trusted, **options)
    if not arguments.tied and is_tied(model):
        untie(model)
    set_max_lengths(model, arguments.query_max_length, arguments.passage_max_length)
    if arguments.query_prompt is not None:
        model.prompts["query"] = arguments.query_prompt
    if arguments.passage_prompt is not None:
        model.prompts["document"] = arguments.passage_prompt
    return model


def load_guide(arguments: ModelArguments, device: str | None = None) -> DualEncoder | None:
    """Return the guide, if there is one; raise `UserError` where it cannot be loaded."""
    if not arguments.guide:
        return None
    trusted = arguments.trust_remote_code
    return DualEncoder.from_pretrained(arguments.guide, device=device, trust_remote_code=trusted)


def merge_saved(folder: str, arguments: ModelArguments) -> None:
    """Replace a saved adapter by the full model, in the precision that the base was loaded in."""
    trusted = arguments.trust_remote_code
    model = DualEncoder.from_pretrained(folder, device="cpu", trust_remote_code=trusted)
    adapters.merge_adapter(model)
    model.save_pretrained(folder, create_model_card=False)  # there is a card already
