"""From a YAML file and the command line to arguments: flat keys, the command line wins, unknown keys are refused."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

from contaccum.data.fields import parse_columns
from contaccum.data.formats import DATA_FORMATS
from contaccum.data.selection import MISSING_NEGATIVES, POSITIVES_USED, Selection
from contaccum.data.streams import SHUFFLE_BUFFER
from contaccum.data.training_sets import TrainingSet, parse_training_sets
from contaccum.errors import ConfigError
from contaccum.evaluation.sampling import SAMPLES
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.set_sampling import named_weights, take_set_sampling
from contaccum.training.streaming import check_streaming


@dataclass
class ModelArguments:
    """Which encoder to train."""

    model: str = field(
        default="", metadata={"help": "A folder or hub name: a SentenceTransformer, or a transformers backbone."}
    )
    tied: bool = field(default=True, metadata={"help": "One encoder for queries and passages, or two."})
    pooling: str = field(
        default="cls",
        metadata={"help": "For a backbone: cls, mean or lasttoken.", "choices": ("cls", "mean", "lasttoken")},
    )
    normalize: bool = field(default=False, metadata={"help": "For a backbone: scale embeddings to length 1."})
    query_prompt: str | None = field(default=None, metadata={"help": "Put before every query."})
    passage_prompt: str | None = field(default=None, metadata={"help": "Put before every passage."})
    query_max_length: int | None = field(
        default=None, metadata={"help": "Tokens of a query. Default: 32 for a backbone, else the model's own."}
    )
    passage_max_length: int | None = field(
        default=None, metadata={"help": "Tokens of a passage. Default: 256 for a backbone, else the model's own."}
    )
    dropout: float | None = field(
        default=None,
        metadata={
            "help": "Dropout probability of every layer while training. Default: the model's own. 0 saves a third of a "
            "CPU's time, where attention with dropout has no fast kernel."
        },
    )
    freeze_word_embeddings: bool = field(
        default=False,
        metadata={
            "help": "Do not train the word embeddings: half of a small encoder's weights, and of the memory that their "
            "gradients and optimizer states take."
        },
    )
    attn_implementation: str | None = field(
        default=None,
        metadata={
            "help": "eager, sdpa or another that transformers knows. On a CPU, short texts train faster with eager."
        },
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})


@dataclass
class DataArguments:
    """What to train it on."""

    train_data: list[str] = field(
        default_factory=list,
        metadata={
            "help": "A folder (BEIR, MS MARCO, or saved by datasets), a file (DPR json, Tevatron or pair/triplet "
            "jsonl, csv, tsv, MS MARCO triples, parquet; text may be .gz), or a Hugging Face dataset, NAME or "
            "NAME:CONFIG. Or several of them, each a path or {path: ..., weight: ..., query_prompt: ..., ...}."
        },
    )
    data_format: str | None = field(
        default=None,
        metadata={
            "help": "beir, dpr, tevatron, msmarco, pairs, triplets, csv, parquet or hub. Default: told from the "
            "content."
        },
    )
    data_columns: list[str] | None = field(
        default=None,
        metadata={
            "help": "What the data calls its fields, where not by the usual names: query=question positive=answer "
            "negatives=hard_neg title=heading, or some of them; in YAML also {query: question, positive: answer}. For "
            "jsonl, csv, parquet and hub."
        },
    )
    split: str = field(
        default="train", metadata={"help": "Of a BEIR or MS MARCO folder, or of a Hugging Face dataset."}
    )
    num_hard_negatives: int = field(default=0, metadata={"help": "Hard negatives per query to use."})
    positives: str | None = field(
        default=None,
        metadata={
            "help": "Of records with several positives: draw one in each epoch, take the first, or make a row of each "
            "(all). Default: all for BEIR and MS MARCO, whose judgements are pairs, draw for others.",
            "choices": POSITIVES_USED,
        },
    )
    negatives_from: int | None = field(
        default=None,
        metadata={
            "help": "Draw hard negatives from the first so many of a record. Default: all; 30 of an MS MARCO folder."
        },
    )
    draw_negatives: bool = field(
        default=True, metadata={"help": "Draw hard negatives anew in each epoch; false: always the first."}
    )
    missing_negatives: str = field(
        default="fill",
        metadata={
            "help": "Records with fewer than num_hard_negatives: fill up with passages of other records, drop them (as "
            "the paper does), or stop.",
            "choices": MISSING_NEGATIVES,
        },
    )
    streaming: bool = field(
        default=False,
        metadata={
            "help": "Read the files anew in each pass, and store nothing on disk: for data that is too large for the "
            "cache. Needs max_steps."
        },
    )
    shuffle_buffer_size: int | None = field(
        default=None,
        metadata={"help": f"With streaming: rows held, of which a random one comes next. Default {SHUFFLE_BUFFER:,}."},
    )
    on_bad_record: str = field(
        default="stop",
        metadata={"help": "stop at a record that cannot be used, or skip and count it.", "choices": ("stop", "skip")},
    )
    eval_data: str | None = field(
        default=None,
        metadata={
            "help": "A BEIR folder, or the name of a public set, to evaluate on while training, as eval_strategy says."
        },
    )
    eval_split: str = field(default="dev", metadata={"help": "Of eval_data: which judgements."})
    eval_queries: int | None = field(
        default=None, metadata={"help": "Evaluate on so many of its queries, the same each time. Default: all."}
    )
    eval_corpus_size: int | None = field(
        default=None,
        metadata={
            "help": "Search among so many of its documents, the same each time, every relevant one among them: faster, "
            "and figures are higher than on all. Default: all."
        },
    )
    eval_corpus_sample: str = field(
        default="random",
        metadata={
            "help": "With eval_corpus_size, which other documents: random ones, or those that BM25 ranks first.",
            "choices": SAMPLES,
        },
    )

    @property
    def selection(self) -> Selection:
        """How rows are made of records; raises `ConfigError` for settings that cannot work together."""
        return Selection(
            self.num_hard_negatives,
            self.positives,  # type: ignore[arg-type]  # checked by it
            self.negatives_from,
            self.draw_negatives,
            self.missing_negatives,  # type: ignore[arg-type]  # checked by it
        )

    @property
    def sets(self) -> list[TrainingSet]:
        """What is said of each training set; raises `ConfigError` for what cannot be used."""
        common = {"split": self.split, **asdict(self.selection)}
        common |= {"data_format": self.data_format} if self.data_format else {}
        common |= {"columns": parse_columns(self.data_columns)} if self.data_columns else {}
        return parse_training_sets(self.train_data, common)

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
    for action in parser._actions:
        if action.dest == "per_device_train_batch_size":
            action.type = _size_or_auto
    files: list[str] = []
    rest = list(argv)
    while rest and not rest[0].startswith("-"):
        files.append(rest.pop(0))
    known = {action.dest for action in parser._actions}
    from_files: list[str] = []
    for name in files:
        from_files += _as_options(name, known)
    try:
        *parsed, unknown = parser.parse_args_into_dataclasses([*from_files, *rest], return_remaining_strings=True)
    except ConfigError:
        raise
    except (ValueError, ImportError) as error:  # what transformers refuses, in its words
        raise ConfigError(str(error)) from error
    if unknown:
        raise ConfigError(_unknown(unknown[0].lstrip("-").split("=")[0], known, "on the command line"))
    model, data, args = parsed
    # Refused here, before anything is loaded.
    _check_refresh(data, args)
    parse_columns(data.data_columns)
    data.selection  # noqa: B018  # checks itself
    if data.data_format is not None and data.data_format not in DATA_FORMATS:
        close = difflib.get_close_matches(data.data_format, DATA_FORMATS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"data_format={data.data_format!r} is unknown (use {', '.join(DATA_FORMATS)}){hint}")
    if data.shuffle_buffer_size is not None and (not data.streaming or data.shuffle_buffer_size < 1):
        mend = "set it to 1 or more" if data.streaming else "set streaming=true, or drop it"
        raise ConfigError(
            f"shuffle_buffer_size={data.shuffle_buffer_size} with streaming={str(data.streaming).lower()}: {mend}"
        )
    if not data.is_one_path:
        _take_weights(data.sets, args)
    elif args.set_sampler not in (None, "proportional"):
        raise ConfigError(
            f"multi_dataset_batch_sampler={args.set_sampler} with one training set: there is nothing to sample from. "
            "Drop it, or give train_data several"
        )
    if data.streaming:
        check_streaming(args, data.sets)
    # transformers would put a run without a folder into one of its own choice.
    output_dir = "" if args.output_dir == "trainer_output" else args.output_dir
    for key, value in (("model", model.model), ("train_data", data.train_data), ("output_dir", output_dir)):
        if not value:
            raise ConfigError(f"{key} is not set: add `{key}: ...` to the config, or --{key} on the command line")
    return model, data, args


def _check_refresh(data: DataArguments, args: ContAccumTrainingArguments) -> None:
    """Mining while training needs one set, and a place for what it finds."""
    if args.refresh_negatives_every is None:
        return
    if not data.num_hard_negatives:
        raise ConfigError(
            f"refresh_negatives_every={args.refresh_negatives_every} with num_hard_negatives=0: no query takes a "
            "negative. Set num_hard_negatives, or drop refresh_negatives_every"
        )
    if data.streaming or not data.is_one_path:
        what = "streaming=true" if data.streaming else "several sets in train_data"
        raise ConfigError(
            f"refresh_negatives_every={args.refresh_negatives_every} with {what}: it mines in one set whose rows can "
            "be looked up. Drop one of them"
        )


def _take_weights(sets: Sequence[TrainingSet], args: ContAccumTrainingArguments) -> None:
    """What sets say of their weights becomes an argument of the trainer."""
    weights = {one.name: one.weight for one in sets if one.weight is not None}
    if weights and args.sampling_weights:
        raise ConfigError(
            f"sampling_weights={args.sampling_weights} with a weight in train_data ({', '.join(weights)}): say it once"
        )
    if weights:
        args.sampling_weights = weights
        args.multi_dataset_batch_sampler = take_set_sampling(args) or args.multi_dataset_batch_sampler
    if args.set_sampler == "weights":
        named_weights(args, [one.name for one in sets])


def _size_or_auto(value: str) -> int | str:
    return "auto" if value.lower() == "auto" else int(value)


def _as_options(name: str, known: set[str]) -> list[str]:
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
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ConfigError(f"{name}: a config is `key: value` lines, got a {type(content).__name__}")
    options: list[str] = []
    for key, value in content.items():
        if key not in known:
            raise ConfigError(_unknown(str(key), known, f"in {name}"))
        if value is None:
            continue
        if isinstance(value, list):
            items = (json.dumps(item) if isinstance(item, dict) else str(item) for item in value)
            options += [f"--{key}", *items]
        elif isinstance(value, dict):
            options += [f"--{key}", json.dumps(value)]
        else:
            # One token with "=", so that a value may start with a dash.
            options.append(f"--{key}={str(value).lower() if isinstance(value, bool) else value}")
    return options


def _unknown(key: str, known: set[str], where: str) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"unknown key {key!r} {where}" + (f"; did you mean {close[0]!r}?" if close else "")
