"""Settings of a training for a method, the user's data and the machine.

`contaccum fit` trains with them. Settings that the user gives are never changed.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import AutoConfig, AutoTokenizer

from contaccum.data import load_training_data
from contaccum.distributed import RANK_TIMEOUT, world_size
from contaccum.encoders.loading import is_sentence_transformer, loading
from contaccum.errors import ConfigError
from contaccum.settings import WITH_BANK, Settings, find, for_method, get_engine, replace
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.micro_batch import find_largest_divisor

MICRO_BATCH = 16  # pairs at most, on a CPU; it is 10 % faster with them than with 8
MAX_QUERY_SIDE_MICRO_BATCH = 32  # pairs, of which only the queries are encoded
MAX_PAIRS_PER_UPDATE = 128
# The learning rates that are tried first, for full training of a pretrained retriever with 384
# hidden dimensions. `compute_start_rate` adapts them to other encoders.
QUERY_SIDE_START_RATE = 1.6e-4
START_RATE = 1e-4

_PROMPTS_FILE = Path(__file__).with_name("prompts.yaml")  # of families of models
_MIN_UPDATES_PER_EPOCH = 8  # with a small data set, updates are made smaller
_PAIRS_UNIT = 8  # the pairs per update are a multiple
_MAX_SAMPLED_ROWS = 1000  # rows whose texts are measured
_LENGTH_QUANTILE = 0.95
_MAX_TOKENS = 512
_MAX_BANK_SIZE = 1024
_NUM_WORKERS = 2
_START_RATE_WIDTH = 384  # a wider encoder needs a smaller rate, about in proportion
_ADAPTER_FACTOR = 10.0  # LoRA adapters need larger rates
_WEAK_BASE_FACTOR = 5.0  # an encoder that cannot retrieve yet needs larger rates


def check_given(model: str, given: Mapping[str, Any]) -> ContAccumTrainingArguments:
    """Check the user's settings with each method that may be used, before anything is read.

    With several processes, they can communicate from now on. One of them may have much more work
    than the others, which wait for it.

    Returns:
        The arguments of a training, with the device and the batch sizes.

    Raises:
        ConfigError: for an unknown setting, or values that cannot work.
    """
    settings = _make_common_settings({"model": model, **given})
    patient = replace(make_base_settings(settings), ddp_timeout=int(RANK_TIMEOUT.total_seconds()))
    args = ContAccumTrainingArguments.from_settings(patient)
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
    data. Only the tokenizer of the model is loaded.

    Raises:
        UserError: for data that cannot be used.
    """
    # With positives="all", an epoch has a row for each positive, so updates may be larger.
    loaded = load_training_data(train_file, positives=given.get("positives"))
    num_rows = len(loaded.dataset)
    most_pairs = min(MAX_PAIRS_PER_UPDATE, num_rows // _MIN_UPDATES_PER_EPOCH)
    pairs_per_update = _PAIRS_UNIT * max(1, most_pairs // _PAIRS_UNIT)
    pairs_per_update = given.get("total_train_batch_size", pairs_per_update)
    # On a GPU, a larger micro-batch takes hardly longer. But "auto" needs a fixed number of pairs
    # per update, and cannot be used with an engine.
    has_gpu = torch.cuda.is_available()
    has_steps = "gradient_accumulation_steps" in given
    is_auto = has_gpu and not has_steps and not get_engine(_make_common_settings(given))
    micro_batch = given.get("per_device_train_batch_size", "auto" if is_auto else MICRO_BATCH)
    if micro_batch == MICRO_BATCH and not has_steps:
        pairs_of_rank = math.ceil(pairs_per_update / world_size())
        micro_batch = find_largest_divisor(pairs_of_rank, MICRO_BATCH)
    unit = 1 if micro_batch == "auto" else micro_batch
    # Without processes that tokenise, a GPU waits for tokens as long as it computes. They start
    # anew in each epoch, so there are none where a new process does not begin as a copy and takes
    # seconds.
    starts_by_copy = multiprocessing.get_all_start_methods()[0] == "fork"  # the default comes first
    # The largest power of two that is at most half of the passages, from 8 to 1024.
    num_passages = len(np.unique(loaded.pairs[:, 1]))
    bank_rows = min(_MAX_BANK_SIZE, max(8, num_passages // 2))
    query_prompt, passage_prompt = _find_prompts(model)
    proposed = {
        "model": os.path.abspath(model) if os.path.isdir(model) else model,
        "train_data": [str(train_file)],
        "bank_size": 2 ** int(np.log2(bank_rows)),
        "temperature": 0.05,
        "per_device_train_batch_size": micro_batch,
        "total_train_batch_size": _round_up(pairs_per_update, unit * world_size()),
        "dataloader_num_workers": _NUM_WORKERS if has_gpu and starts_by_copy else 0,
        "num_hard_negatives": int(loaded.has_negatives),
        "query_prompt": query_prompt or None,
        "passage_prompt": passage_prompt or None,
    }
    if not is_sentence_transformer(model):
        rows = np.random.default_rng(0).permutation(num_rows)[:_MAX_SAMPLED_ROWS]
        texts = loaded.transform.first_texts(sorted(rows.tolist()))
        trusted = bool(given.get("trust_remote_code"))
        with loading(model, trusted) as path:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trusted)
        for name, column, prompt in (
            ("query_max_length", "query", query_prompt),
            ("passage_max_length", "positive", passage_prompt),
        ):
            prompted = [f"{prompt}{text}" for text in texts[column]]
            lengths = [len(tokens) for tokens in tokenizer(prompted, verbose=False)["input_ids"]]
            # A multiple of 8, because accelerators are fastest with such lengths.
            length = _round_up(np.quantile(lengths, _LENGTH_QUANTILE), 8)
            proposed[name] = min(length, tokenizer.model_max_length, _MAX_TOKENS)
    if has_steps:
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
    values = {} if method in WITH_BANK else find("methods", WITH_BANK)
    settings = replace(proposed, **changes)
    if method == "in_batch":
        # The micro-batch of each process is its share of the update. If the user has fixed the size
        # of the micro-batch alone, it decides the size of the update.
        total = settings.total_train_batch_size
        if "per_device_train_batch_size" not in given and total is not None:
            values["per_device_train_batch_size"] = total // world_size()
        elif "per_device_train_batch_size" in given and "total_train_batch_size" not in given:
            values["total_train_batch_size"] = None
    if method == "query_side":
        if settings.load_in_4bit:
            raise ConfigError(
                "method=query_side with load_in_4bit: the store would not fit, because the base "
                "model encodes it without rounding to 4 bits. Drop load_in_4bit"
            )
        # All documents of the store are negatives; passages that it lacks are added.
        values |= {"passage_store": store, "missing": "add", "num_hard_negatives": 0}
        if "gradient_accumulation_steps" not in given:
            values |= make_query_side_sizes(settings.total_train_batch_size, given)
    return replace(settings, **{**values, "method": method})


def compute_start_rate(method: str, width: int, has_adapter: bool, is_base_weak: bool) -> float:
    """Return the learning rate that is tried first with a method.

    Args:
        width: the number of dimensions of the encoder's hidden states.
        has_adapter: True if a LoRA adapter is trained.
        is_base_weak: True if the encoder scores far below BM25 before training.
    """
    rate = QUERY_SIDE_START_RATE if method == "query_side" else START_RATE
    rate *= _START_RATE_WIDTH / width
    if has_adapter:
        rate *= _ADAPTER_FACTOR
    if is_base_weak:
        rate *= _WEAK_BASE_FACTOR
    return float(f"{rate:.1e}")


def read_width(model: str) -> int:
    """Return the number of dimensions of a model's hidden states; 768 if it cannot be read."""
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError):
        return 768  # of most encoders
    return getattr(config, "hidden_size", None) or 768


def _make_common_settings(values: Mapping[str, Any]) -> Settings:
    """Return settings of method contaccum, which has all settings but those of the documents."""
    values = {**values, "method": "contaccum"}
    is_auto = values.get("per_device_train_batch_size") == "auto"
    if is_auto and not {"total_train_batch_size", "gradient_accumulation_steps"} & values.keys():
        values["total_train_batch_size"] = MAX_PAIRS_PER_UPDATE  # until one is proposed
    return replace(Settings(), **values)


def make_query_side_sizes(total: int | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes of micro-batch and update, which are larger if the user has not fixed them.

    ``total`` are the pairs of an update, or None. Raises `ConfigError` if they cannot be divided
    among the processes.
    """
    num_ranks = world_size()
    micro_batch = given.get("per_device_train_batch_size")
    if total is None:
        unit = micro_batch if isinstance(micro_batch, int) else _PAIRS_UNIT
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


def _round_up(number: float, divisor: int) -> int:
    return math.ceil(number / divisor) * divisor


def _find_prompts(model: str) -> tuple[str, str]:
    """Return the prompts of a model's family for queries and passages; ("", "") if unknown."""
    families = yaml.safe_load(_PROMPTS_FILE.read_text(encoding="utf-8"))
    for pattern, (query_prompt, passage_prompt) in families.items():
        if re.search(pattern, model, re.IGNORECASE):
            return query_prompt, passage_prompt
    return "", ""
