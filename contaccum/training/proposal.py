"""Proposal of training settings for a data set, from its size and the lengths of its texts.

`contaccum fit` trains with it; see `contaccum.experiments.proposed`.
"""

from __future__ import annotations

import math
import multiprocessing
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml

from contaccum.errors import UserError
from contaccum.files import read_json

PROMPTS_FILE = Path(__file__).with_name("prompts.yaml")
"""File with the prompts of families of models."""
MICRO_BATCH = 16
"""Most pairs per micro-batch on a CPU, which is 10 % faster with them than with 8."""
MAX_PAIRS_PER_UPDATE = 128
QUERY_SIDE_START_RATE = 1.6e-4
START_RATE = 1e-4
"""The learning rate that is tried first with a method, except query_side.

Both rates are for full training of a pretrained retriever with 384 hidden dimensions.
`compute_start_rate` adapts them to other encoders.
"""

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


@dataclass(frozen=True)
class Proposal:
    """The settings that are proposed for training data."""

    query_max_length: int  # tokens that 95% of the queries do not exceed; see `_compute_max_length`
    passage_max_length: int
    query_prompt: str  # of this family of models, or empty
    passage_prompt: str
    has_negatives: bool  # a row of the sample has a hard negative
    micro_batch: int | Literal["auto"]  # auto on a GPU, where a larger one takes hardly longer
    pairs_per_update: int
    # Processes that tokenise meanwhile. Without them, a GPU waits for tokens as long as it
    # computes. They start anew in each epoch, so there are none where a new process does not begin
    # as a copy and takes seconds.
    num_workers: int
    bank_size: int
    temperature: float


def propose(data: str | Path, model: str, positives: Any = None) -> Proposal:
    """Read training data, and propose settings for training a model on them.

    Only the tokenizer of the model is loaded.

    Args:
        data: a file, folder or data set in any format of docs/data.md.
        model: a folder or hub name.
        positives: which positives of a record make rows; see `load_training_data`.

    Raises:
        UserError: for data that cannot be used.
    """
    from contaccum.data import load_training_data

    loaded = load_training_data(data, positives=positives)
    num_rows = len(loaded.dataset)
    num_passages = len(np.unique(loaded.pairs[:, 1]))
    rows = np.random.default_rng(0).permutation(num_rows)[:_MAX_SAMPLED_ROWS]
    texts = loaded.transform.first_texts(sorted(rows.tolist()))
    query_prompt, passage_prompt = find_prompts(model)
    count_tokens, max_tokens = _load_tokenizer(model)
    query_lengths = [count_tokens(f"{query_prompt}{text}") for text in texts["query"]]
    passage_lengths = [count_tokens(f"{passage_prompt}{text}") for text in texts["positive"]]
    has_gpu = torch.cuda.is_available()
    starts_by_copy = multiprocessing.get_all_start_methods()[0] == "fork"  # the default comes first
    # The largest power of two that is at most half of the passages, from 8 to 1024.
    bank_rows = min(_MAX_BANK_SIZE, max(8, num_passages // 2))
    most_pairs = min(MAX_PAIRS_PER_UPDATE, num_rows // _MIN_UPDATES_PER_EPOCH)
    return Proposal(
        query_max_length=_compute_max_length(query_lengths, max_tokens),
        passage_max_length=_compute_max_length(passage_lengths, max_tokens),
        query_prompt=query_prompt,
        passage_prompt=passage_prompt,
        has_negatives=loaded.has_negatives,
        micro_batch="auto" if has_gpu else MICRO_BATCH,
        pairs_per_update=_PAIRS_UNIT * max(1, most_pairs // _PAIRS_UNIT),
        num_workers=_NUM_WORKERS if has_gpu and starts_by_copy else 0,
        bank_size=2 ** int(np.log2(bank_rows)),
        temperature=0.05,
    )


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


def find_prompts(model: str) -> tuple[str, str]:
    """Return the prompts of a model's family for queries and passages; ("", "") if unknown."""
    families = yaml.safe_load(PROMPTS_FILE.read_text(encoding="utf-8"))
    for pattern, (query_prompt, passage_prompt) in families.items():
        if re.search(pattern, model, re.IGNORECASE):
            return query_prompt, passage_prompt
    return "", ""


def _load_tokenizer(model: str) -> tuple[Callable[[str], float], int]:
    """Load the model's tokenizer; if it cannot be loaded, return an estimate: 4 bytes per token.

    Returns:
        A function that returns the number of tokens in a text; and the maximum number of tokens
        that the model encodes, at most 512.
    """
    from sentence_transformers.util import load_file_path
    from transformers import AutoTokenizer

    from contaccum.encoders.names import require_model

    try:
        require_model(model)
        tokenizer = AutoTokenizer.from_pretrained(model)
        settings_file = load_file_path(model, "sentence_bert_config.json")
    except (UserError, OSError, ValueError):
        return lambda text: len(text.encode()) / 4, _MAX_TOKENS
    max_seq_length = None
    if settings_file:
        max_seq_length = read_json(settings_file).get("max_seq_length")
    max_tokens = min(_MAX_TOKENS, tokenizer.model_max_length, max_seq_length or _MAX_TOKENS)

    def count_tokens(text: str) -> float:
        return len(tokenizer(text, verbose=False)["input_ids"])

    return count_tokens, max_tokens


def read_width(model: str) -> int:
    """Return the number of dimensions of a model's hidden states; 768 if it cannot be read."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError):
        return 768  # of most encoders
    return getattr(config, "hidden_size", None) or 768


def _compute_max_length(lengths: Sequence[float], max_tokens: int) -> int:
    """Return a maximum length in tokens that 95% of the lengths do not exceed.

    It is rounded up to the next multiple of 8, because accelerators are fastest with such lengths.
    It is at most ``max_tokens``.
    """
    length = np.quantile(lengths, _LENGTH_QUANTILE)
    rounded_up = math.ceil(length / 8) * 8
    return min(max_tokens, rounded_up)
