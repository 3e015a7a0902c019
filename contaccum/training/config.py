"""From a YAML file and the command line to arguments, and from arguments to model, data and evaluator.

Keys are flat, the command line overrides, an unknown key names the closest. What cannot work together is refused
before anything is loaded. Nothing here trains.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml
from transformers import HfArgumentParser

from contaccum.data import (
    DATA_FORMATS,
    TrainingSets,
    load_training_sets,
    parse_columns,
    parse_training_sets,
)
from contaccum.data.sampling import MISSING_NEGATIVES, POSITIVES_USED
from contaccum.errors import ConfigError, check_choice, closest
from contaccum.evaluation.metrics import DEFAULT_METRICS, check_metric
from contaccum.training.arguments import ContAccumTrainingArguments, option
from contaccum.training.rules import DATA_RULES, refuse

if TYPE_CHECKING:
    from contaccum.encoders import DualEncoder
    from contaccum.evaluation.evaluator import RetrievalEvaluator
    from contaccum.mining import MiningData


@dataclass
class ModelArguments:
    """Which encoder to train."""

    model: str = option("", "A folder or hub name: a SentenceTransformer, or a transformers backbone.")
    tied: bool = option(True, "One encoder for queries and passages, or two.")
    pooling: str = option("cls", "For a backbone: cls, mean or lasttoken.", ("cls", "mean", "lasttoken"))
    normalize: bool = option(False, "For a backbone: scale embeddings to length 1.")
    query_prompt: str | None = option(None, "Put before every query.")
    passage_prompt: str | None = option(None, "Put before every passage.")
    query_max_length: int | None = option(None, "Tokens of a query. Default: 32 for a backbone, else the model's own.")
    passage_max_length: int | None = option(
        None, "Tokens of a passage. Default: 256 for a backbone, else the model's own."
    )
    dropout: float | None = option(
        None,
        "Dropout probability of every layer while training. Default: the model's own. 0 saves a third of a CPU's time, "
        "where attention with dropout has no fast kernel.",
    )
    freeze_word_embeddings: bool = option(
        False,
        "Do not train the word embeddings: half of a small encoder's weights, and of the memory that their gradients "
        "and optimizer states take.",
    )
    attn_implementation: str | None = option(
        None, "eager, sdpa or another that transformers knows. On a CPU, short texts train faster with eager."
    )
    trust_remote_code: bool = option(False, "Run code that comes with the model.")


@dataclass
class DataArguments:
    """What to train it on, and what to evaluate on meanwhile."""

    train_data: list[str] = field(
        default_factory=list,
        metadata={
            "help": "A folder (BEIR, MS MARCO, or saved by datasets), a file (DPR json, Tevatron or pair/triplet "
            "jsonl, csv, tsv, MS MARCO triples, parquet; text may be .gz), or a Hugging Face dataset, NAME or "
            "NAME:CONFIG. Or several of them, each a path or {path: ..., weight: ..., query_prompt: ..., ...}."
        },
    )
    data_format: str | None = option(
        None, f"{', '.join(DATA_FORMATS)}. Default: detected from the content.", tuple(DATA_FORMATS)
    )
    data_columns: list[str] | None = option(  # noqa: RUF009  # a field, as those above
        None,
        "What the data calls its fields, where not by the usual names: query=question positive=answer "
        "negatives=hard_neg title=heading, or some of them; in YAML also {query: question, positive: answer}. For "
        "jsonl, csv, parquet and hub.",
    )
    split: str = option("train", "Of a BEIR or MS MARCO folder, or of a Hugging Face dataset.")
    num_hard_negatives: int = option(0, "Hard negatives per query to use.")
    positives: str | None = option(
        None,
        "Of records with several positives: draw one in each epoch, take the first, or make a row of each (all). "
        "Default: all for BEIR and MS MARCO, whose judgements are pairs, draw for others.",
        tuple(POSITIVES_USED),
    )
    negatives_from: int | None = option(
        None,
        "Sample hard negatives, anew in each epoch, from the first so many of a record; of num_hard_negatives they are "
        "always the first. Default: all; 30 of an MS MARCO folder.",
    )
    missing_negatives: str = option(
        "fill",
        "Records with fewer than num_hard_negatives: fill up with passages of other records, or drop them (as the "
        "paper does).",
        tuple(MISSING_NEGATIVES),
    )
    streaming: bool = option(
        False,
        "Read the files anew in each pass, and store nothing on disk: for data that is too large for the cache. Needs "
        "max_steps.",
    )
    shuffle_buffer_size: int | None = option(
        None, "With streaming: rows held, of which a random one comes next. Default 10,000."
    )
    on_bad_record: str = option("stop", "stop at a record that cannot be used, or skip and count it.", ("stop", "skip"))
    eval_data: str | None = option(
        None, "A BEIR folder, or the name of a public set, to evaluate on while training, as eval_strategy says."
    )
    eval_split: str = option("dev", "Of eval_data: which judgements.")
    eval_queries: int | None = option(None, "Evaluate on so many of its queries, the same each time. Default: all.")
    eval_corpus_size: int | None = option(
        None,
        "Search among so many of its documents, the same each time, every relevant one among them: faster, and figures "
        "are higher than on all. Default: all.",
    )

    @property
    def sets(self) -> list[Any]:
        """What is said of each training set; raises `ConfigError` for what cannot be used."""
        names = ("split", "num_hard_negatives", "positives", "negatives_from", "missing_negatives", "data_format")
        common = {name: getattr(self, name) for name in names}
        return parse_training_sets(self.train_data, common | {"columns": parse_columns(self.data_columns)})

    @property
    def is_one_path(self) -> bool:
        """Whether there is one training set, of which nothing is said but where it is."""
        return len(self.train_data) == 1 and not self.train_data[0].lstrip().startswith("{")


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. `contaccum train --help` lists the options")


def parse(argv: Sequence[str]) -> tuple[ModelArguments, DataArguments, ContAccumTrainingArguments]:
    """``[CONFIG.yaml ...] [--key value ...]`` to arguments; later files and the command line override.

    Raises:
        ConfigError: for a file that cannot be read, an unknown key, or values that cannot work.
    """
    parser = _Parser(
        [ModelArguments, DataArguments, ContAccumTrainingArguments],  # type: ignore[list-item]  # its own type variable
        prog="contaccum train",
        usage="contaccum train [CONFIG.yaml ...] [--key value ...]",
        allow_abbrev=False,
    )
    for action in parser._actions:  # argparse shows them nowhere else
        if action.dest == "per_device_train_batch_size":
            action.type = _size_or_auto
    known = {action.dest for action in parser._actions}
    rest, options = list(argv), []
    while rest and not rest[0].startswith("-"):
        options += as_options(rest.pop(0), known)
    try:
        *parsed, unknown = parser.parse_args_into_dataclasses([*options, *rest], return_remaining_strings=True)
    except ConfigError:
        raise
    except (ValueError, ImportError) as error:  # what transformers refuses, in its words
        raise ConfigError(str(error)) from error
    if unknown:
        raise unknown_key(unknown[0].lstrip("-").split("=")[0], known, "on the command line")
    model, data, args = parsed
    # transformers would put a run without a folder into one of its own choice.
    output_dir = "" if args.output_dir == "trainer_output" else args.output_dir
    for key, value in (("model", model.model), ("train_data", data.train_data), ("output_dir", output_dir)):
        if not value:
            raise ConfigError(f"{key} is not set: add `{key}: ...` to the config, or --{key} on the command line")
    _check(data, args)
    return model, data, args


def _check(data: DataArguments, args: ContAccumTrainingArguments) -> None:
    """Refuse whatever can be known to be wrong before anything is loaded."""
    sets = data.sets  # checks them, and what all have in common
    weights = {one.name: one.weight for one in sets if one.weight is not None}
    if weights and (args.sampling_weights or args.set_sampler not in ("proportional", "weights")):
        raise ConfigError(
            f"a weight in train_data ({', '.join(weights)}) with sampling_weights={args.sampling_weights} and "
            f"multi_dataset_batch_sampler={args.set_sampler}: say once how sets are sampled"
        )
    if weights:
        args.sampling_weights, args.set_sampler, args.multi_dataset_batch_sampler = weights, "weights", "weights"
    refuse(DATA_RULES, d=data, a=args)
    for name in args.sampling_weights or ():
        check_choice("sampling_weights: a training set", name, [one.name for one in sets])
    if args.metric_for_best_model not in (None, "loss"):  # which transformers puts where nothing was said
        args.metric_for_best_model = f"eval_{check_metric(str(args.metric_for_best_model))}"


def _size_or_auto(value: str) -> int | str:
    return "auto" if value.lower() == "auto" else int(value)


def as_options(name: str, known: Collection[str]) -> list[str]:
    """The keys of a YAML file as ``--key=value``; raises `ConfigError` naming the line, or the closest known key."""
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{name}: no such config file")
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        raise ConfigError(f"{where}: not valid YAML ({getattr(error, 'problem', None) or error})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text") from error
    if not isinstance(content or {}, dict):
        raise ConfigError(f"{name}: a config is `key: value` lines, got a {type(content).__name__}")
    options: list[str] = []
    for key, value in (content or {}).items():
        if key not in known:
            raise unknown_key(str(key), known, f"in {name}")
        if value is None:
            continue
        if isinstance(value, list):
            options += [f"--{key}", *(json.dumps(item) if isinstance(item, dict) else str(item) for item in value)]
        elif isinstance(value, dict):
            options += [f"--{key}", json.dumps(value)]
        else:
            # One token with "=", so that a value may start with a dash.
            options.append(f"--{key}={str(value).lower() if isinstance(value, bool) else value}")
    return options


def unknown_key(key: str, known: Collection[str], where: str) -> ConfigError:
    """The error for a key that there is not, naming the closest."""
    return ConfigError(f"unknown key {key!r} {where}{closest(key, known)}")


# Loading -------------------------------------------------------------------------------------------------------------


def load_data(data: DataArguments, args: ContAccumTrainingArguments) -> TrainingSets:
    """The training data that the arguments name."""
    return load_training_sets(
        data.sets,
        on_bad_record=data.on_bad_record,
        negatives_to_come=args.refresh_negatives_every is not None,
        streaming=data.streaming,
        shuffle_buffer_size=data.shuffle_buffer_size or 10_000,
        seed=args.order_seed,
    )


def load_mining_data_of(data: DataArguments, args: ContAccumTrainingArguments) -> MiningData | None:
    """What hard negatives are mined in while training: the same data, and its corpus or another; None if none are."""
    if args.refresh_negatives_every is None:
        return None
    from contaccum.mining import load_mining_data

    return load_mining_data(
        data.train_data[0],
        args.refresh_corpus,
        data_format=data.data_format,
        split=data.split,
        on_bad_record=data.on_bad_record,  # type: ignore[arg-type]  # one of the choices
        columns=parse_columns(data.data_columns),
    )


def take_prompts(args: ContAccumTrainingArguments, data: Any, model: DualEncoder) -> None:
    """Prompts that training sets have of their own, for the trainer; others are the model's."""
    prompts = data.prompts(model.prompts)
    if prompts is not None and args.prompts is not None:
        raise ConfigError("prompts with a query_prompt or passage_prompt in train_data: say it once")
    args.prompts = args.prompts if prompts is None else prompts


def load_evaluator(data: DataArguments, args: ContAccumTrainingArguments) -> RetrievalEvaluator | None:
    """The evaluator that the arguments ask for; raises `DataError` for data that cannot be used."""
    if data.eval_data is None:
        return None
    from contaccum.evaluation.beir import load_data as load_beir
    from contaccum.evaluation.evaluator import RetrievalEvaluator, sample

    bad: Any = data.on_bad_record  # one of the choices
    whole = load_beir(data.eval_data, data.eval_split, bad)
    dataset = sample(whole, data.eval_queries, data.eval_corpus_size)
    about: dict[str, Any] = {"of_queries": len(whole.queries), "of_documents": len(whole.corpus)}
    metric = args.metric_for_best_model
    chosen = () if metric in (None, "loss") else (check_metric(str(metric)),)
    return RetrievalEvaluator(
        dataset,
        tuple(dict.fromkeys((*DEFAULT_METRICS, *chosen))),
        batch_size=args.per_device_eval_batch_size,
        similarity=args.similarity,  # type: ignore[arg-type]  # checked by the arguments
        primary_metric=chosen[0] if chosen else None,
        about=about,
    )


def load_model(arguments: ModelArguments, device: str | None = None) -> DualEncoder:
    """The encoder to train: a saved SentenceTransformer as it is, or a transformers backbone with pooling.

    Raises:
        UserError: when it cannot be loaded.
        ConfigError: for settings that do not apply to it.
    """
    from contaccum.encoders import DualEncoder, freeze_word_embeddings, set_attention, set_dropout

    if _is_sentence_transformer(arguments.model):
        model = _load_sentence_transformer(arguments, device)
    else:
        given = asdict(arguments)
        for name in ("model", "dropout", "freeze_word_embeddings", "attn_implementation"):
            del given[name]
        model = DualEncoder.from_backbone(arguments.model, device=device, **given)
    if arguments.dropout is not None:
        set_dropout(model, arguments.dropout)
    if arguments.freeze_word_embeddings:
        freeze_word_embeddings(model)
    if arguments.attn_implementation is not None:
        set_attention(model, arguments.attn_implementation)
    return model


def _load_sentence_transformer(arguments: ModelArguments, device: str | None) -> DualEncoder:
    from sentence_transformers.sentence_transformer.modules import Router

    from contaccum.encoders import DualEncoder, is_tied, set_max_lengths

    for name in ("pooling", "normalize"):
        if getattr(arguments, name) != getattr(ModelArguments(), name):
            raise ConfigError(
                f"{name}={getattr(arguments, name)} with model={arguments.model}: that folder is a SentenceTransformer "
                f"with {name} of its own. Drop {name}, or pass a bare backbone"
            )
    model = DualEncoder.from_pretrained(arguments.model, device=device, trust_remote_code=arguments.trust_remote_code)
    if not arguments.tied and is_tied(model):
        modules = list(model.children())
        model = DualEncoder(
            modules=[Router.for_query_document(modules, copy.deepcopy(modules))],  # type: ignore[arg-type]  # Modules
            prompts={name: prompt for name, prompt in model.prompts.items() if prompt is not None},
            similarity_fn_name=model.similarity_fn_name,
            device=device,
        )
    set_max_lengths(model, arguments.query_max_length, arguments.passage_max_length)
    for role, prompt in (("query", arguments.query_prompt), ("document", arguments.passage_prompt)):
        if prompt is not None:
            model.prompts[role] = prompt
    return model


def _is_sentence_transformer(name: str) -> bool:
    """Whether a folder, or a hub repository that can be reached, is a SentenceTransformer rather than a backbone."""
    from sentence_transformers.util import is_sentence_transformer_model

    from contaccum.encoders import require_model

    if os.path.isdir(name):
        return (Path(name) / "modules.json").is_file()
    require_model(name)
    try:
        return is_sentence_transformer_model(name)
    except Exception:  # any of the hub's errors: loading it will fail next, with a message of its own
        return False
