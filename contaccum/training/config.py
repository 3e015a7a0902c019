"""From a YAML file and the command line to arguments, and from arguments to model, data and evaluator.

Keys are flat, the command line overrides, an unknown key names the closest. What cannot work together is refused
before anything is loaded. Nothing here trains.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import yaml
from sentence_transformers.sentence_transformer.modules import Router
from sentence_transformers.util import is_sentence_transformer_model
from transformers import HfArgumentParser

from contaccum.data import TrainingSets, load_training_sets
from contaccum.encoders import adapters
from contaccum.encoders.dual_encoder import DualEncoder, configure, is_tied, require_model, set_max_lengths
from contaccum.errors import ConfigError, hint, in_our_names, our_name
from contaccum.evaluation.beir_sets import load_data as load_beir
from contaccum.evaluation.evaluator import NanoBEIR, RetrievalEvaluator, sample
from contaccum.evaluation.metrics import DEFAULT_METRICS, check_metric
from contaccum.mining import MiningData, load_mining_data
from contaccum.training.arguments import ContAccumTrainingArguments, name_of, refuse, refuse_alone
from contaccum.training.checkpoint import find_checkpoints
from contaccum.training.options import DataArguments, ModelArguments


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. `contaccum train --help` lists the options")


def _int_or_auto(text: str) -> int | str:
    """Return a number of pairs, or "auto"; argparse names a value that is neither."""
    return "auto" if text.lower() == "auto" else int(text)


def parse(argv: Sequence[str]) -> tuple[ModelArguments, DataArguments, ContAccumTrainingArguments]:
    """``[CONFIG.yaml ...] [--key value ...]`` to arguments; later files and the command line override.

    Raises `ConfigError` for a file that cannot be read, an unknown key, or values that cannot work.
    """
    parser = _Parser(
        [ModelArguments, DataArguments, ContAccumTrainingArguments],  # type: ignore[list-item]  # its own type variable
        prog="contaccum train",
        usage="contaccum train [CONFIG.yaml ...] [--key value ...]",
        allow_abbrev=False,
    )
    for action in parser._actions:  # argparse shows them nowhere else
        if action.dest == "per_device_train_batch_size":
            action.type = _int_or_auto
    known = {action.dest for action in parser._actions}
    rest, given = list(argv), []
    while rest and not rest[0].startswith("-"):
        given += as_options(rest.pop(0), known)
    given += in_our_names(rest, known)
    try:
        *parsed, unknown = parser.parse_args_into_dataclasses(given, return_remaining_strings=True)
    except ConfigError:
        raise
    except (ValueError, ImportError) as error:  # what transformers refuses, in its words
        raise ConfigError(str(error)) from error
    if unknown:
        key = unknown[0].lstrip("-").split("=")[0]
        raise ConfigError(f"unknown key {key!r} on the command line{hint(key, known)}")
    model, data, args = parsed
    # transformers would put a run without a folder into one of its own choice.
    output_dir = "" if args.output_dir == "trainer_output" else args.output_dir
    for key, value in (("model", model.model), ("train_data", data.train_data), ("output_dir", output_dir)):
        if not value:
            raise ConfigError(f"{key} is not set: add `{key}: ...` to the config, or --{key} on the command line")
    _check(model, data, args)
    return model, data, args


def _check(model: ModelArguments, data: DataArguments, args: ContAccumTrainingArguments) -> None:
    """Refuse whatever can be known to be wrong before anything is loaded, and settle what depends on data."""
    _ = data.sets  # checks them, and what all have in common
    refreshes, strategy = args.refresh_negatives_every is not None, name_of(args.eval_strategy)
    lone = (data.eval_data is None) != (strategy == "no")
    several, none = len(data.train_data) > 1, not data.num_hard_negatives
    nano = str(data.eval_data).split("/")[0] == "nanobeir" and (data.eval_queries or data.eval_corpus_size)
    refuse({"refresh_negatives_every with num_hard_negatives=0: set it": refreshes and none})
    refuse({f"distill={args.distill} with num_hard_negatives=0: set it": args.distill and none})
    refuse({"refresh_negatives_every with several sets in train_data: it mines in one": refreshes and several})
    refuse({f"eval_data={data.eval_data} with eval_strategy={strategy}: set both, or none": lone})
    refuse({"eval_queries and eval_corpus_size with eval_data=nanobeir, which is small already: drop them": nano})
    refuse_alone(args, dict.fromkeys(("guide_margin", "guide_margin_strategy"), "guide"), model)
    refuse_alone(data, dict.fromkeys(("eval_split", "eval_queries", "eval_corpus_size"), "eval_data"))
    if args.metric_for_best_model not in (None, "loss"):  # which transformers puts where nothing was said
        args.metric_for_best_model = f"eval_{check_metric(str(args.metric_for_best_model))}"
    checkpoints = {path.resolve() for path in find_checkpoints(str(args.output_dir))}
    for key, name in (("model", model.model), ("guide", model.guide)):
        path = Path(name or "").resolve()
        is_removed = args.overwrite_output_dir and not checkpoints.isdisjoint((path, *path.parents))
        mend = "Copy it elsewhere, or name another output_dir"
        refuse({f"overwrite_output_dir=true with {key}={name}: it would remove that checkpoint. {mend}": is_removed})
    r, dropout = model.lora_r, model.lora_dropout
    refuse_alone(model, dict.fromkeys(("lora_alpha", "lora_dropout", "lora_target_modules"), "lora_r"))
    in_place = model.merge_adapter and Path(model.model).resolve() == Path(str(args.output_dir)).resolve()
    refuse({"merge_adapter with model as output_dir: checkpoints would lose their base. Name another": in_place})
    refuse({f"lora_dropout must be at least 0 and less than 1, got {dropout}": not 0 <= dropout < 1})
    if r is not None:
        refuse({f"lora_r must be at least 1, got {r}": r < 1})
        adapters.require_peft(f"lora_r={r}")
    if model.load_in_4bit:
        adapters.in_4bit()


def as_options(name: str, known: Collection[str]) -> list[str]:
    """The keys of a YAML file as ``--key=value``; raises `ConfigError` naming the line, or the closest known key."""
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{name}: no such config file")
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        raise ConfigError(f"{where}: not valid YAML ({getattr(error, 'problem', None) or error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{name}: a config is `key: value` lines, got a {type(content).__name__}")
    options: list[str] = []
    for given, value in content.items():
        key = our_name(str(given), known)
        if key not in known:
            raise ConfigError(f"unknown key {key!r} in {name}{hint(key, known)}")
        if isinstance(value, list):
            options += [f"--{key}", *map(_as_text, value)]
        elif value is not None:
            options.append(f"--{key}={_as_text(value)}")  # one token, so that a value may start with a dash
    return options


def _as_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, bool)) else str(value)


def load_data(data: DataArguments, args: ContAccumTrainingArguments) -> TrainingSets:
    """The training data that the arguments name."""
    to_come = args.refresh_negatives_every is not None
    how = {"on_bad_record": data.on_bad_record, "teacher_scores": args.distill is not None}
    return load_training_sets(data.sets, negatives_to_come=to_come, **how)


def load_mining_data_of(data: DataArguments, args: ContAccumTrainingArguments) -> MiningData | None:
    """What hard negatives are mined in while training: the same data, and its corpus or another; None if none are."""
    if args.refresh_negatives_every is None:
        return None
    [one] = data.sets.values()
    how: dict[str, Any] = {"texts": one.get("corpus"), "on_bad_record": data.on_bad_record}
    how |= {name: one[name] for name in ("data_format", "split", "columns", "min_score") if name in one}
    return load_mining_data(one["path"], args.refresh_corpus, **how)


def load_evaluator(data: DataArguments, args: ContAccumTrainingArguments) -> RetrievalEvaluator | NanoBEIR | None:
    """The evaluator that the arguments ask for; raises `DataError` for data that cannot be used."""
    if data.eval_data is None:
        return None
    how: Any = {"batch_size": args.per_device_eval_batch_size, "similarity": args.similarity}
    name, *sets = data.eval_data.split("/")
    if name == "nanobeir":
        return NanoBEIR(sets[0].split(",") if sets else [], **how)
    bad: Any = data.on_bad_record  # one of the choices, as is the similarity
    whole = load_beir(data.eval_data, data.eval_split, bad)
    dataset = sample(whole, data.eval_queries, data.eval_corpus_size)
    metric = args.metric_for_best_model
    chosen = [] if metric in (None, "loss") else [check_metric(str(metric))]
    metrics = tuple(dict.fromkeys((*DEFAULT_METRICS, *chosen)))
    how |= {"about": {"of_queries": len(whole.queries), "of_documents": len(whole.corpus)}}
    return RetrievalEvaluator(dataset, metrics, primary_metric=next(iter(chosen), None), **how)


def load_model(arguments: ModelArguments, device: str | None = None) -> DualEncoder:
    """The encoder to train: a SentenceTransformer as it is, or a backbone with pooling; raises `UserError`."""
    quantized: Any = {"model_kwargs": adapters.in_4bit()} if arguments.load_in_4bit else {}
    # Towers come with weights each, and share them once they have adapters: the device then gets one base.
    late = bool(arguments.lora_r and not arguments.tied and device and not quantized)
    place: Any = {"device": "cpu" if late else device, **quantized}
    require_model(arguments.model)
    is_whole = False
    with suppress(Exception):  # any of the hub's errors: loading it will fail next, with a message of its own
        is_whole = is_sentence_transformer_model(arguments.model)
    if is_whole:
        model = _load_sentence_transformer(arguments, place)
    else:
        names = ["tied", "pooling", "normalize", "query_prompt", "passage_prompt", "query_max_length"]
        names += ["passage_max_length", "trust_remote_code"]
        given: Any = {name: getattr(arguments, name) for name in names}
        model = DualEncoder.from_backbone(arguments.model, **given, **place)
    configure(model, arguments.dropout, arguments.freeze_word_embeddings, arguments.attn_implementation)
    if arguments.lora_r is not None:
        alpha, dropout, layers = arguments.lora_alpha, arguments.lora_dropout, arguments.lora_target_modules
        adapters.add_adapter(model, arguments.lora_r, alpha, dropout, layers)
    elif adapters.has_adapter(model):
        adapters.take_up_adapter(model)
    else:
        refuse_alone(arguments, dict.fromkeys(("load_in_4bit", "merge_adapter"), "lora_r"))
    return model.to(device) if late else model


def _load_sentence_transformer(arguments: ModelArguments, place: dict[str, Any]) -> DualEncoder:
    model = DualEncoder.from_pretrained(arguments.model, trust_remote_code=arguments.trust_remote_code, **place)
    if not arguments.tied and is_tied(model):
        modules = list(model.children())
        model = DualEncoder(
            modules=[Router.for_query_document(modules, copy.deepcopy(modules))],  # type: ignore[arg-type]  # Modules
            prompts={name: prompt for name, prompt in model.prompts.items() if prompt is not None},
            similarity_fn_name=model.similarity_fn_name,
            device=place["device"],
        )
    set_max_lengths(model, arguments.query_max_length, arguments.passage_max_length)
    for role, prompt in (("query", arguments.query_prompt), ("document", arguments.passage_prompt)):
        if prompt is not None:
            model.prompts[role] = prompt
    return model


def load_guide(arguments: ModelArguments, device: str | None = None) -> DualEncoder | None:
    """The guide, where there is one; raises `UserError`."""
    name, trusted = arguments.guide, arguments.trust_remote_code
    return DualEncoder.from_pretrained(name, device=device, trust_remote_code=trusted) if name else None


def merge_saved(folder: str, arguments: ModelArguments) -> None:
    """Turn what was trained and saved into a full model in its place, in the precision that the base was loaded in."""
    model = DualEncoder.from_pretrained(folder, device="cpu", trust_remote_code=arguments.trust_remote_code)
    adapters.merge_adapter(model)
    model.save_pretrained(folder, create_model_card=False)  # there is one
