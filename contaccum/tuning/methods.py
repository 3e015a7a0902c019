"""The methods of a search: the methods to try, their start values, and the options of their runs.

The search tries contaccum (a bank of embeddings of earlier batches), grad_cache (one large batch)
and query_side (only the query encoder is trained, against stored document embeddings of the base
model). Another method, such as grad_accum (micro-batches without a bank), is tried only if the user
fixes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.errors import ConfigError
from contaccum.files import AnyPath
from contaccum.retrieval.encode import get_similarity
from contaccum.settings import DEFAULT_TEMPERATURE, find
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.update import find_largest_divisor
from contaccum.tuning.options import Options, is_used_by, parse, to_command_line
from contaccum.tuning.space import METHODS, compute_start_rate

QUERY_SIDE_SETTINGS = tuple(find("methods", ("query_side",)))
_DEFAULT_WIDTH = 384
_DEFAULT_QUERY_SIDE_BATCH_SIZE = 128
_MAX_QUERY_SIDE_MICRO_BATCH = 32
"""Pairs of a micro-batch of query-side training, in which only queries are encoded."""
_QUERY_SIDE_BATCH_UNIT = 8
"""The default batch of each process is a multiple of it, so that micro-batches are not tiny."""

_ADAPTER_SETTINGS = (
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "load_in_4bit",
    "merge_adapter",
)


def make_base_options(options: Options) -> dict[str, list[str]]:
    """Return the options that load the base model: the simplest method, and no adapter.

    The base model encodes the store for query-side training. A query-side training has no adapter
    in its document tower, and it refuses a store that another document tower has encoded.
    """
    base_options = {}
    for key, values in options.items():
        is_dropped = key.removeprefix("no_") in (*_ADAPTER_SETTINGS, *QUERY_SIDE_SETTINGS)
        if not is_dropped and is_used_by("grad_accum", key):
            base_options[key] = list(values)
    base_options["method"] = ["grad_accum"]
    return base_options


def select_methods(
    options: Options,
    fixed_keys: Collection[str],
    num_processes: int,
    print_line: Callable[[str], None],
) -> list[str]:
    """Return the methods that are possible with some options; the method of the config comes first.

    The options are parsed for each method. So a wrong value is refused before anything is trained,
    also if not all methods use it.

    Args:
        options: the options of a run. ``passage_store`` or ``corpus`` names the documents for
            query-side training.
        fixed_keys: the options that the search does not vary. If ``method`` is among them, it is
            the only method. Otherwise query_side is left out if it cannot have one of the options,
            or there are no documents.
        num_processes: the number of processes that train together.
        print_line: is called with the reason if query_side or the method of the config is left
            out.

    Raises:
        ConfigError: for options that `contaccum train` refuses, or if only query_side is to be
            tried, and there are no documents.
    """
    methods = list(METHODS)
    has_documents = not {"passage_store", "corpus"}.isdisjoint(options)
    is_fixed = "method" in fixed_keys
    if is_fixed:
        methods = list(options["method"])
        if methods == ["query_side"] and not has_documents:
            raise ConfigError("method=query_side needs documents: set corpus or passage_store")
    elif not has_documents:
        methods.remove("query_side")
    for method in list(methods):
        try:
            _check_method(options, method, fixed_keys, num_processes)
        except ConfigError as error:
            if method != "query_side" or is_fixed:
                raise
            methods.remove(method)
            print_line(f"query_side is not tried: {error}")
    config_method = options.get("method", [""])[0]
    if config_method in methods:
        methods.remove(config_method)
        methods.insert(0, config_method)
    elif config_method and config_method not in METHODS:
        print_line(
            f"method={config_method} of the config is not tried, only {', '.join(methods)}; "
            f"--method {config_method} searches its settings"
        )
    return methods


def _check_method(
    options: Options, method: str, fixed_keys: Collection[str], num_processes: int
) -> None:
    """Raise `ConfigError` if a method cannot have one of the options."""
    store = Path("unused")
    run_options = adapt_options(
        options, method, store, fixed_keys=fixed_keys, num_processes=num_processes
    )
    parsed, _ = parse(to_command_line(run_options))
    if method == "query_side" and parsed.load_in_4bit:
        raise ConfigError(
            "method=query_side with load_in_4bit: the store would not fit, because the base model "
            "encodes it without rounding to 4 bits. Drop load_in_4bit"
        )


def compute_starts(
    methods: Sequence[str],
    options: Options,
    args: ContAccumTrainingArguments,
    encoder: DualEncoder,
    is_base_weak: bool,
) -> dict[str, dict[str, float]]:
    """Return the learning rate and temperature at which the search starts, for each method.

    If the base model is weak, query_side is left out, unless it is the only method. A query encoder
    cannot be trained against the document embeddings of such a model.

    Args:
        methods: the methods to try.
        options: the options that the search starts from.
        args: the parsed ``options``.
        encoder: the base model.
        is_base_weak: True if the base model scores far below BM25, as a model does that was not
            trained for retrieval yet.

    Returns:
        {method: {"learning_rate": value, "temperature": value}}.
    """
    width = _get_hidden_size(encoder)
    temperature = args.temperature or DEFAULT_TEMPERATURE[get_similarity(encoder, args.similarity)]
    starts = {}
    for method in methods:
        if method == "query_side" and is_base_weak and len(methods) > 1:
            continue
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
    options: Options,
    method: str,
    store: AnyPath | None,
    mined: Path | None = None,
    *,
    fixed_keys: Collection[str] = (),
    num_processes: int = 1,
) -> Options:
    """Return the options of a run by a method, without settings that the method does not use.

    Args:
        store: the folder of the document embeddings for query-side training.
        mined: a file of the training data with hard negatives that BM25 mined. It replaces the
            training data of ``options`` if their ``num_hard_negatives`` is not 0.
        fixed_keys: the options that the user has fixed. If the user has not fixed the sizes of a
            micro-batch, query-side training gets larger ones.
        num_processes: the number of processes that train together.

    Raises:
        ConfigError: if the pairs of an update cannot be divided among the processes.
    """
    adapted = _drop_unused_options(options, method)
    adapted["method"] = [method]
    uses_negatives = adapted.get("num_hard_negatives", ["0"]) != ["0"]
    if mined is not None and uses_negatives:
        adapted["train_data"] = [str(mined)]
        adapted.pop("data_columns", None)
        adapted.pop("data_format", None)
        adapted.pop("split", None)  # the mined file has the records of this split
    if "total_train_batch_size" in adapted:
        adapted.pop("gradient_accumulation_steps", None)
    if method == "in_batch":
        _set_whole_batch(adapted, fixed_keys, num_processes)
    if method == "query_side":
        adapted["passage_store"] = [str(store)]
        adapted["missing"] = ["add"]  # passages that the store lacks are encoded and added
        _set_query_side_sizes(adapted, fixed_keys, num_processes)
    return adapted


def _drop_unused_options(options: Options, method: str) -> dict[str, list[str]]:
    """Return the options that a method uses.

    Settings of the bank are dropped without a bank. Other settings that query-side training does
    not have are kept, so that they are refused.
    """
    unused = set(QUERY_SIDE_SETTINGS)
    if method == "query_side":
        unused.add("num_hard_negatives")  # all documents of the store are negatives already
    used = {}
    for key, values in options.items():
        if key not in unused and is_used_by(method, key):
            used[key] = list(values)
    return used


def _set_whole_batch(
    options: dict[str, list[str]], fixed_keys: Collection[str], num_processes: int
) -> None:
    """Make the micro-batch of each process its share of the update, in place.

    If the user has fixed the size of the micro-batch alone, it decides the size of the update.
    """
    if "per_device_train_batch_size" in fixed_keys:
        if "total_train_batch_size" not in fixed_keys:
            options.pop("total_train_batch_size", None)
    elif "total_train_batch_size" in options:
        pairs_of_process = int(options["total_train_batch_size"][0]) // num_processes
        options["per_device_train_batch_size"] = [str(pairs_of_process)]


def _set_query_side_sizes(
    options: dict[str, list[str]], fixed_keys: Collection[str], num_processes: int
) -> None:
    """Set the sizes of micro-batch and update for query-side training, in place.

    Raises:
        ConfigError: if the pairs of an update cannot be divided among the processes.
    """
    num_steps = options.pop("gradient_accumulation_steps", None)
    if num_steps is not None and "gradient_accumulation_steps" in fixed_keys:
        options["gradient_accumulation_steps"] = num_steps
        return
    micro_batch = None
    if "per_device_train_batch_size" in fixed_keys:
        [micro_batch] = options["per_device_train_batch_size"]
    if "total_train_batch_size" in options:
        batch_size = int(options["total_train_batch_size"][0])
    else:
        unit = _QUERY_SIDE_BATCH_UNIT
        if micro_batch is not None and micro_batch.isdecimal():
            unit = int(micro_batch)
        batch_size = round_up(_DEFAULT_QUERY_SIDE_BATCH_SIZE, unit * num_processes)
        options["total_train_batch_size"] = [str(batch_size)]
    if batch_size < 1 or batch_size % num_processes:
        raise ConfigError(
            f"total_train_batch_size={batch_size}: give a multiple of {num_processes}, the number "
            "of processes"
        )
    if micro_batch is None:
        pairs_of_process = batch_size // num_processes
        micro_batch_size = find_largest_divisor(pairs_of_process, _MAX_QUERY_SIDE_MICRO_BATCH)
        options["per_device_train_batch_size"] = [str(micro_batch_size)]


def round_up(number: int, divisor: int) -> int:
    """Return the smallest multiple of the divisor that is not below the number."""
    return math.ceil(number / divisor) * divisor
