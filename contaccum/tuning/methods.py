"""The methods of a search: the methods to try, their start values, and the options of a run.

Methods are contaccum (a bank of embeddings of earlier batches), grad_cache (one large batch),
grad_accum (micro-batches without a bank) and query_side (only the query encoder is trained, against
stored document embeddings of the base model).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from contaccum.bank.settings import DEFAULT_TEMPERATURE
from contaccum.comparison.options import Options
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.errors import ConfigError
from contaccum.files import AnyPath
from contaccum.retrieval.encode import get_metric
from contaccum.training.arguments import (
    BANK_METHODS,
    BANK_SETTINGS,
    NON_QUERY_SIDE_SETTINGS,
    QUERY_SIDE_SETTINGS,
    ContAccumTrainingArguments,
)
from contaccum.tuning.space import METHODS, compute_start_rate

_DEFAULT_WIDTH = 384
_DEFAULT_QUERY_SIDE_BATCH_SIZE = "128"
_MAX_QUERY_SIDE_MICRO_BATCH = 32
"""Pairs of a micro-batch of query-side training, in which only queries are encoded."""


def select_methods(
    options: Options, fixed_keys: Collection[str], has_store: bool, is_base_weak: bool
) -> list[str]:
    """Return the methods to try; the method of the config is the first one.

    Args:
        fixed_keys: the options that the search does not vary. If ``method`` is among them, only
            the method of ``options`` is tried.
        has_store: True if there is a store of document embeddings for query-side training.
        is_base_weak: True if the base model scores far below BM25. A query encoder cannot be
            trained against the document embeddings of such a model.

    Raises:
        ConfigError: if only query_side is to be tried, and there is no store.
    """
    if "method" in fixed_keys:
        if options["method"] == ["query_side"] and not has_store:
            raise ConfigError("method=query_side needs documents: set corpus or passage_store")
        return list(options["method"])
    methods = list(METHODS)
    if is_base_weak or not has_store:
        methods.remove("query_side")
    config_method = options.get("method", [""])[0]
    if config_method in methods:
        methods.remove(config_method)
        methods.insert(0, config_method)
    return methods


def compute_starts(
    methods: Sequence[str],
    options: Options,
    args: ContAccumTrainingArguments,
    encoder: DualEncoder,
    is_base_weak: bool,
) -> dict[str, dict[str, float]]:
    """Return the learning rate and temperature at which the search starts, for each method.

    Args:
        options: the options that the search starts from.
        args: the parsed ``options``.
        encoder: the base model.
        is_base_weak: True if the base model scores far below BM25, as a model does that was not
            trained for retrieval yet.

    Returns:
        {method: {"learning_rate": value, "temperature": value}}.
    """
    width = _get_hidden_size(encoder)
    temperature = args.temperature or DEFAULT_TEMPERATURE[get_metric(encoder, args.similarity)]
    starts = {}
    for method in methods:
        learning_rate = compute_start_rate(method, width, "lora_r" in options, is_base_weak)
        if "learning_rate" in options and [method] == options.get("method"):
            learning_rate = args.learning_rate
        starts[method] = {"learning_rate": learning_rate, "temperature": temperature}
    return starts


def _get_hidden_size(encoder: DualEncoder) -> int:
    """Return the size of the hidden states, or the embedding size for a model without config."""
    config = getattr(encoder.transformers_model, "config", None)
    hidden_size = getattr(config, "hidden_size", None)
    if hidden_size is not None:
        return int(hidden_size)
    return int(encoder.get_embedding_dimension() or _DEFAULT_WIDTH)


def adapt_options(
    options: Options, method: str, store: AnyPath | None, mined: Path | None = None
) -> Options:
    """Return the options of a run by a method, without settings that the method does not use.

    Args:
        store: the folder or URL of the document embeddings for query-side training.
        mined: a file of the training data with hard negatives that BM25 mined. It replaces the
            training data of ``options`` if their ``num_hard_negatives`` is not 0.
    """
    adapted = _drop_unused_options(options, method)
    adapted["method"] = [method]
    uses_negatives = adapted.get("num_hard_negatives", ["0"]) != ["0"]
    if mined is not None and uses_negatives:
        adapted["train_data"] = [str(mined)]
        adapted.pop("data_columns", None)
        adapted.pop("data_format", None)
    if "total_train_batch_size" in adapted:
        adapted.pop("gradient_accumulation_steps", None)
    if method == "query_side":
        batch_size = int(adapted.get("total_train_batch_size", [_DEFAULT_QUERY_SIDE_BATCH_SIZE])[0])
        adapted["passage_store"] = [str(store)]
        adapted["missing"] = ["add"]  # passages that the store lacks are encoded and added
        adapted["total_train_batch_size"] = [str(batch_size)]
        adapted["per_device_train_batch_size"] = [str(_find_micro_batch_size(batch_size))]
    return adapted


def _drop_unused_options(options: Mapping[str, Sequence[str]], method: str) -> dict[str, list[str]]:
    """Return the options that a method uses."""
    unused = set(QUERY_SIDE_SETTINGS)
    if method not in BANK_METHODS:
        unused.update(BANK_SETTINGS)
    if method == "query_side":
        unused.update(NON_QUERY_SIDE_SETTINGS)
        unused.update(("gradient_accumulation_steps", "num_hard_negatives"))
    used = {}
    for key, values in options.items():
        if key.removeprefix("no_") not in unused:  # "no_" switches a setting off
            used[key] = list(values)
    return used


def _find_micro_batch_size(batch_size: int) -> int:
    """Return the largest possible micro-batch size of query-side training that divides a batch."""
    micro_batch_size = min(_MAX_QUERY_SIDE_MICRO_BATCH, batch_size)
    while batch_size % micro_batch_size:
        micro_batch_size -= 1
    return micro_batch_size
