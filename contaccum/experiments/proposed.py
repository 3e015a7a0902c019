"""The settings with which `contaccum fit` trains by a method, for the user's data and machine."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contaccum.distributed import world_size
from contaccum.encoders.loading import is_sentence_transformer
from contaccum.errors import ConfigError
from contaccum.experiments.run import start_ranks
from contaccum.settings import (
    WITH_BANK,
    Settings,
    find,
    for_method,
    get_engine,
    replace,
)
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.micro_batch import find_largest_divisor
from contaccum.training.proposal import MAX_PAIRS_PER_UPDATE, MICRO_BATCH, propose
from contaccum.training.setup import MAX_QUERY_SIDE_MICRO_BATCH

_QUERY_SIDE_BATCH_UNIT = 8  # the batch of a process is a multiple, so micro-batches are not tiny


def check_given(model: str, given: Mapping[str, Any]) -> ContAccumTrainingArguments:
    """Check the user's settings with each method that may be used, before anything is read.

    Returns:
        The arguments of a training. `fit` reads the device and the batch sizes from them.

    Raises:
        ConfigError: for an unknown setting, or values that cannot work.
    """
    settings = _make_common_settings({"model": model, **given})
    args = start_ranks(make_base_settings(settings))
    method = given.get("method", "contaccum")
    ContAccumTrainingArguments.from_settings(make_settings(settings, method, given, store="store"))
    return args


def explain_no_query_side(settings: Settings, given: Mapping[str, Any]) -> str:
    """Return why the query tower cannot be trained alone with the user's settings; "" if it can."""
    method = given.get("method", "query_side")
    if method != "query_side":
        return f"method={method} is given"
    try:
        query_side = make_settings(settings, "query_side", given, store="store")
        ContAccumTrainingArguments.from_settings(query_side)
    except ConfigError as error:
        return str(error)
    return ""


def propose_settings(train_file: Path, model: str, given: Mapping[str, Any]) -> Settings:
    """Return settings for training both towers on the data, overridden by those of the user.

    A SentenceTransformer keeps its maximum lengths; a transformers backbone gets lengths for the
    data.
    """
    # With positives="all", an epoch has a row for each positive, so updates may be larger.
    proposal = propose(train_file, model, given.get("positives"))
    micro_batch = given.get("per_device_train_batch_size", proposal.micro_batch)
    if "gradient_accumulation_steps" in given or get_engine(_make_common_settings(given)):
        # "auto" needs a fixed number of pairs per update, and cannot be used with an engine.
        micro_batch = given.get("per_device_train_batch_size", MICRO_BATCH)
    pairs_per_update = given.get("total_train_batch_size", proposal.pairs_per_update)
    if micro_batch == MICRO_BATCH and "gradient_accumulation_steps" not in given:
        pairs_of_rank = math.ceil(pairs_per_update / world_size())
        micro_batch = find_largest_divisor(pairs_of_rank, MICRO_BATCH)
    unit = 1 if micro_batch == "auto" else micro_batch
    proposed = {
        "model": make_absolute(model),
        "train_data": [str(train_file)],
        "bank_size": proposal.bank_size,
        "temperature": proposal.temperature,
        "per_device_train_batch_size": micro_batch,
        "total_train_batch_size": _round_up(pairs_per_update, unit * world_size()),
        "dataloader_num_workers": proposal.num_workers,
        "num_hard_negatives": int(proposal.has_negatives),
        "query_prompt": proposal.query_prompt or None,
        "passage_prompt": proposal.passage_prompt or None,
    }
    if not is_sentence_transformer(model):
        proposed["query_max_length"] = proposal.query_max_length
        proposed["passage_max_length"] = proposal.passage_max_length
    if "gradient_accumulation_steps" in given:
        # The proposed batch size could contradict the number of steps that the user gave.
        del proposed["total_train_batch_size"]
    return _make_common_settings({**proposed, **given})


def make_base_settings(settings: Settings) -> Settings:
    """Return the settings that load the base model: the simplest method, and no adapter.

    The base model encodes the store for query-side training. A query-side training has no adapter
    in its document tower, and it refuses a store that another document tower has encoded.
    """
    without_adapter = {"lora_r": None, "load_in_4bit": False}
    return for_method(settings, "grad_accum", **find("needs", "lora_r"), **without_adapter)


def make_settings(
    proposed: Settings, method: str, given: Mapping[str, Any], store: str, **changes: Any
) -> Settings:
    """Return the settings of a training by a method.

    Settings of the bank are dropped without a bank. Other settings that the method does not have
    are refused, because the user has given them.

    Args:
        proposed: settings of method contaccum, which has all but the documents.
        given: the user's settings.
        store: the documents' vectors by the base model, for query_side.

    Raises:
        ConfigError: if the method cannot have the settings.
    """
    values: dict[str, Any] = {}
    if method not in WITH_BANK:
        values = find("methods", WITH_BANK)
    settings = replace(proposed, **changes)
    if method == "in_batch":
        values |= _make_in_batch_sizes(settings, given)
    if method == "query_side":
        if settings.load_in_4bit:
            raise ConfigError(
                "method=query_side with load_in_4bit: the store would not fit, because the base "
                "model encodes it without rounding to 4 bits. Drop load_in_4bit"
            )
        # All documents of the store are negatives; passages that it lacks are added.
        values |= {"passage_store": store, "missing": "add", "num_hard_negatives": 0}
        values |= _make_query_side_sizes(settings, given)
    return replace(settings, **{**values, "method": method})


def make_absolute(model: str) -> str:
    """Return the absolute path of a model's folder; a hub name as it is."""
    return os.path.abspath(model) if os.path.isdir(model) else model


def _make_common_settings(values: Mapping[str, Any]) -> Settings:
    """Return settings of method contaccum, which has all settings but those of the documents."""
    values = {**values, "method": "contaccum"}
    is_auto = values.get("per_device_train_batch_size") == "auto"
    if is_auto and not {"total_train_batch_size", "gradient_accumulation_steps"} & values.keys():
        values["total_train_batch_size"] = (
            MAX_PAIRS_PER_UPDATE  # until one is proposed for the data
        )
    return replace(Settings(), **values)


def _make_in_batch_sizes(settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """Make the micro-batch of each process its share of the update.

    If the user has fixed the size of the micro-batch alone, it decides the size of the update.
    """
    if "per_device_train_batch_size" not in given:
        total = settings.total_train_batch_size
        return {} if total is None else {"per_device_train_batch_size": total // world_size()}
    return {} if "total_train_batch_size" in given else {"total_train_batch_size": None}


def _make_query_side_sizes(settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes of micro-batch and update, which are larger if the user has not fixed them.

    Raises:
        ConfigError: if the pairs of an update cannot be divided among the processes.
    """
    if "gradient_accumulation_steps" in given:
        return {}
    num_ranks = world_size()
    micro_batch = given.get("per_device_train_batch_size")
    total = settings.total_train_batch_size
    if total is None:
        unit = micro_batch if isinstance(micro_batch, int) else _QUERY_SIDE_BATCH_UNIT
        total = _round_up(MAX_PAIRS_PER_UPDATE, unit * num_ranks)
    if total % num_ranks:
        raise ConfigError(
            f"total_train_batch_size={total}: give a multiple of {num_ranks}, the number of "
            "processes"
        )
    if micro_batch is None:
        micro_batch = find_largest_divisor(total // num_ranks, MAX_QUERY_SIDE_MICRO_BATCH)
    return {
        "total_train_batch_size": total,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": 1,
    }


def _round_up(number: int, divisor: int) -> int:
    """Return the smallest multiple of the divisor that is not below the number."""
    return math.ceil(number / divisor) * divisor
