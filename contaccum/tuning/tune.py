"""`contaccum tune`: from a config to the settings that score best on dev data, within a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from contaccum.comparison.plan import as_tokens
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.errors import ConfigError
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.files import provenance, read_json, write_json, write_text
from contaccum.report.sources import model_name
from contaccum.retrieval.corpus import CorpusEncoder
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.encode import metric_of
from contaccum.retrieval.store import EmbeddingStore
from contaccum.training import config
from contaccum.training.arguments import (
    BANK_SETTINGS,
    DEFAULT_TEMPERATURE,
    NON_QUERY_SIDE_SETTINGS,
    QUERY_SIDE_SETTINGS,
    ContAccumTrainingArguments,
)
from contaccum.training.options import DataArguments
from contaccum.training.query_side import USELESS_SHARE_OF_BM25
from contaccum.training.run import load_encoder
from contaccum.tuning.budget import TimeForTrials
from contaccum.tuning.choice import Choice
from contaccum.tuning.negatives import MINED_FILE, mine_once
from contaccum.tuning.search import Search
from contaccum.tuning.space import METHODS, space_for, start_rate
from contaccum.tuning.trial import Options, QueryScores

TUNED_CONFIG = "tuned.yaml"
TUNED_RECORD = "tuned.json"
STORE_FOLDER = "passage_store"
SEARCH_FOLDER = "search"
BUDGET_FILE = "used_time.json"

_OF_THE_RUN = (
    *(
        "output_dir",
        "overwrite_output_dir",
        "resume_from_checkpoint",
        "eval_strategy",
        "eval_steps",
    ),
    *(
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "load_best_model_at_end",
        "early_stopping_patience",
    ),
    *("eval_on_start", "disable_tqdm", "logging_strategy", "logging_steps", "push_to_hub"),
)
"""Settings of a config that decide what a run writes, and nothing of its result: trials have their own."""

_OF_AN_ADAPTER = (
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"),
    *("load_in_4bit", "merge_adapter"),
)

_QUERIES_AT_ONCE = 32
"""Pairs of a micro-batch of query-side training, where only queries are encoded."""


@dataclass(frozen=True)
class Tuned:
    """What tuning has found.

    Attributes:
        choice: the settings.
        options: of the whole run, for `contaccum train`.
        base, bm25: nDCG@10 on dev, of the model as it is and of BM25.
        trials: number, settings, score and seconds of each.
    """

    choice: Choice
    options: Options
    base: float
    bm25: float
    trials: list[dict[str, Any]]


def tune(
    options: Options,
    given: Sequence[str],
    time: TimeForTrials,
    output: Path,
    say: Callable[[str], None] = print,
    baselines: Baselines | None = None,
) -> Tuned:
    """Search settings by their scores on ``eval_data``, and write the best ones to a config.

    Args:
        options: of `contaccum train`, with ``model``, ``train_data`` and ``eval_data``. The search
            starts from them, and goes on where an earlier call was killed.
        given: keys of the options that stay as they are.
        time: that the search may take, over all calls.
        output: a folder for `TUNED_CONFIG`, `TUNED_RECORD` and the journal.
        baselines: the scores on dev before training; None: they are measured, and said.

    Raises:
        UserError: for options, data or a model that cannot be used, or a budget that is too short.
    """
    dropped = {*_OF_THE_RUN, *QUERY_SIDE_SETTINGS}
    kept = {key: list(values) for key, values in options.items() if key not in dropped}
    model_args, data_args, args = config.parse(as_tokens(_options_of_base(kept, output)))
    evaluator = _load_evaluator(data_args, args)
    encoder = load_encoder(model_args, args)
    store = _store_of(options, args, encoder, output)
    if baselines is None:
        baselines = score_baselines(encoder, evaluator, store)
        say(baselines.as_line(model_args.model))
    methods = _methods(kept, given, store, baselines.is_useless)
    starts = _starts(methods, kept, args, encoder, baselines.is_useless)
    del encoder
    if len(methods) == 1:
        kept["method"] = [methods[0]]
    pairs = len(config.load_data(data_args, args).dataset)
    space = space_for(pairs, args.per_device_train_batch_size, given)
    mined = None
    has_negatives = data_args.num_hard_negatives > 0
    if "num_hard_negatives" in space and not has_negatives:
        mined = _mine_once(options, methods, data_args, args, output)
        if mined is None:
            del space["num_hard_negatives"]
    search = Search(
        {**kept, "eval_strategy": ["epoch"]},
        starts,
        space,
        partial(options_of_method, store=store, mined=mined),
        evaluator,
        baselines.query_scores,
        time,
        output / SEARCH_FOLDER,
        args.seed,
        say,
    )
    choice = search.run()
    chosen = {key: [str(value)] for key, value in choice.settings.items()}
    tuned = Tuned(
        choice,
        options_of_method({**kept, **chosen}, choice.settings["method"], store, mined),
        baselines.base,
        baselines.bm25,
        search.records(),
    )
    if args.process_index == 0:
        _write(tuned, output, len(baselines.query_scores))
    return tuned


def _load_evaluator(
    data_args: DataArguments, args: ContAccumTrainingArguments
) -> RetrievalEvaluator:
    """Return the evaluator of dev data; raise `ConfigError` without data, or for those that it cannot search."""
    evaluator = config.load_evaluator(data_args, args)
    if evaluator is None:
        raise ConfigError(
            "eval_data is not set: settings are chosen by scores on dev data (contaccum split makes some)"
        )
    if not isinstance(evaluator, RetrievalEvaluator):
        raise ConfigError(f"eval_data={data_args.eval_data}: tune on a BEIR folder")
    return evaluator


class Baselines(NamedTuple):
    """Scores on dev, nDCG@10, before anything is trained.

    Attributes:
        base: of the model as it is.
        query_scores: of the same, by query.
        bm25: of BM25.
    """

    base: float
    query_scores: QueryScores
    bm25: float

    def as_line(self, model: str) -> str:
        """Return the line for the user; ``model`` is a folder or name."""
        return f"BM25 {self.bm25:.3f}   {model_name(model)} {self.base:.3f}   (nDCG@10 on dev)"

    @property
    def is_useless(self) -> bool:
        """Whether the model knows too little for its documents to teach a query tower."""
        return self.base < USELESS_SHARE_OF_BM25 * self.bm25


def score_baselines(
    encoder: DualEncoder, evaluator: RetrievalEvaluator, store: Path | None
) -> Baselines:
    """Score the model as it is, with the documents of a store if there is one, and BM25."""
    if store is not None:
        evaluator.documents = StoreDocuments(EmbeddingStore.open(store))
    metric = evaluator.primary_metric
    base = evaluator.score(encoder)[metric]
    query_scores = evaluator.query_scores
    return Baselines(base, query_scores, evaluator.score_bm25()[metric])


def _starts(
    methods: Sequence[str],
    options: Options,
    args: ContAccumTrainingArguments,
    encoder: DualEncoder,
    is_fresh: bool,
) -> dict[str, dict[str, float]]:
    """Return {method: {"learning_rate", "temperature": where its search starts}}."""
    width = _width(encoder)
    temperature = args.temperature or DEFAULT_TEMPERATURE[metric_of(encoder, args.similarity)]
    starts = {}
    for method in methods:
        rate = start_rate(method, width, "lora_r" in options, is_fresh)
        if "learning_rate" in options and [method] == options.get("method"):
            rate = args.learning_rate
        starts[method] = {"learning_rate": rate, "temperature": temperature}
    return starts


def _options_of_base(options: Options, output: Path) -> Options:
    """Return options with which the model is loaded as it is, and dev data are read."""
    kept = {
        key: values for key, values in options.items() if key not in (*_OF_AN_ADAPTER, *BANK_SETTINGS)
    }
    # Any method that needs nothing beside the training data.
    kept |= {"method": ["grad_accum"], "output_dir": [str(output / SEARCH_FOLDER)]}
    return {"eval_strategy": ["epoch"], **kept}


def _store_of(
    options: Options, args: ContAccumTrainingArguments, encoder: DualEncoder, output: Path
) -> Path | None:
    """Return the folder of the documents that queries may be contrasted with; encode a corpus once."""
    if "passage_store" in options:
        return Path(options["passage_store"][0])
    if "corpus" not in options:
        return None
    folder = output / STORE_FOLDER
    with args.main_process_first(desc="encoding the corpus"):
        if args.process_index == 0:
            corpus = Path(options["corpus"][0])
            CorpusEncoder(
                encoder, "base", corpus, folder, batch_size=args.per_device_eval_batch_size
            ).encode()
    return folder


def _methods(
    options: Options, given: Sequence[str], store: Path | None, is_fresh: bool
) -> list[str]:
    """Return the methods to try, that of the config first."""
    if "method" in given:
        return list(options["method"])
    methods = [
        method
        for method in METHODS
        if method != "query_side" or (store is not None and not is_fresh)
    ]
    of_config = options.get("method", [""])[0]
    if of_config in methods:
        methods.remove(of_config)
        methods.insert(0, of_config)
    return methods


def _width(encoder: DualEncoder) -> int:
    """Return the dimensions of the encoder's hidden states, or of its embeddings if nobody knows."""
    with suppress(AttributeError):
        return int(encoder.transformers_model.config.hidden_size)  # type: ignore[union-attr]  # None has no config
    return int(encoder.get_embedding_dimension() or 384)


def _mine_once(
    options: Options,
    methods: Sequence[str],
    data_args: DataArguments,
    args: ContAccumTrainingArguments,
    output: Path,
) -> Path | None:
    """Return the file of the training data with mined negatives; None if they cannot be had."""
    if list(methods) == ["query_side"]:
        return None
    corpus = options["corpus"][0] if "corpus" in options else None
    file = output / MINED_FILE
    with args.main_process_first(local=False, desc="mining hard negatives"):
        return mine_once(
            data_args.train_data,
            corpus,
            file,
            data_format=data_args.data_format,
            data_columns=data_args.data_columns,
            split=data_args.split,
            on_bad_record=data_args.on_bad_record,
        )


def options_of_method(
    options: Options, method: str, store: Path | None, mined: Path | None = None
) -> Options:
    """Return the options of a run by a method: without settings that mean nothing to it.

    Args:
        store: of the documents for query-side training.
        mined: the training data with mined hard negatives, for options that use one.
    """
    dropped = set(QUERY_SIDE_SETTINGS)
    if method == "query_side":
        dropped |= {
            *NON_QUERY_SIDE_SETTINGS,
            *BANK_SETTINGS,
            "gradient_accumulation_steps",
            "num_hard_negatives",
        }
    elif method != "contaccum":
        dropped |= set(BANK_SETTINGS)
    kept = {key: list(values) for key, values in options.items() if key not in dropped}
    kept["method"] = [method]
    if mined is not None and kept.get("num_hard_negatives", ["0"]) != ["0"]:
        kept["train_data"] = [str(mined)]
        kept.pop("data_columns", None)
        kept.pop("data_format", None)
    if "total_train_batch_size" in kept:
        kept.pop("gradient_accumulation_steps", None)
    if method == "query_side":
        kept["passage_store"] = [str(store)]
        kept["missing"] = ["add"]
        pairs = int(kept.get("total_train_batch_size", ["128"])[0])
        kept["total_train_batch_size"] = [str(pairs)]
        micro_batch = min(_QUERIES_AT_ONCE, pairs)
        while pairs % micro_batch:
            micro_batch -= 1
        kept["per_device_train_batch_size"] = [str(micro_batch)]
    return kept


def _write(tuned: Tuned, output: Path, num_queries: int) -> None:
    """Write the config and the record."""
    difference = tuned.choice.against_base
    head = (
        f"# Chosen by contaccum tune: {tuned.choice.score:.4f} on {num_queries} dev queries, the model as it is "
        f"{tuned.base:.4f}\n# ({difference['difference']:+.4f}, 95% {difference['low']:+.4f} to "
        f"{difference['high']:+.4f}; the best of {len(tuned.trials)} trials, so take it as optimistic).\n"
    )
    content = {
        **as_yaml(tuned.options),
        "eval_strategy": "epoch",
        "output_dir": str(output / "model"),
    }
    write_text(
        output / TUNED_CONFIG, head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    )
    record = {field.name: getattr(tuned, field.name) for field in fields(tuned)}
    record["choice"] = tuned.choice._asdict()
    write_json(output / TUNED_RECORD, {**record, **provenance()})


def read_tuned(output: Path) -> Tuned:
    """Read what `tune` has written into a folder; raises `DataError` for a broken file."""
    record = read_json(output / TUNED_RECORD)
    content = {field.name: record[field.name] for field in fields(Tuned)}
    content["choice"] = Choice(**record["choice"])
    return Tuned(**content)


def as_yaml(options: Options) -> dict[str, Any]:
    """Return options as a YAML file should have them: numbers and truth values are no texts."""
    content: dict[str, Any] = {}
    for key, values in options.items():
        plain = [_plain(value) for value in values]
        content[key] = plain[0] if len(plain) == 1 else plain
    return content


def _plain(text: str) -> Any:
    """Return the number or truth value that a text stands for, or the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
