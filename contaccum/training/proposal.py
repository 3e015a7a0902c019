"""Settings for some training data, from what the data and the model's tokenizer say.

`contaccum new` writes them into a config, and `contaccum fit` starts its search from them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import yaml

from contaccum.errors import UserError
from contaccum.files import read_json

if TYPE_CHECKING:
    from contaccum.data.dataset import TrainingData

PROMPTS_FILE = Path(__file__).with_name("prompts.yaml")
MICRO_BATCH = 8
MOST_PAIRS_PER_UPDATE = 128
PAIRS_FOR_TWO_ENCODERS = 50_000
"""The paper's smallest set, which two encoders are trained on, has 58,880 pairs."""

_SAMPLE = 1000  # rows whose texts are measured
_QUANTILE = 0.95  # of the lengths of texts
_LONGEST = 512  # tokens
_LARGEST_BANK = 1024
_SHARE_OF_BOTH = 0.01  # of queries that are passages, too: then they are the same kind of text


@dataclass(frozen=True)
class Proposal:
    """What is known of some training data, and the settings that follow.

    Attributes:
        data: the training data, as `load_training_data` returns them.
        model: its folder or name.
        num_pairs, num_queries, num_passages: of the data; queries and passages are distinct.
        query_max_length, passage_max_length: tokens that 95 of 100 texts do not exceed, a multiple
            of 8 unless the model takes fewer.
        lengths_measured_by: a phrase that says how they are known.
        query_prompt, passage_prompt: that the model's family is used with; empty if there is none.
        are_alike: whether queries and passages are the same kind of text.
        tied: whether one encoder is better than two.
        has_negatives: whether the data have hard negatives.
        micro_batch: pairs that are encoded at once.
        accumulation_steps: micro-batches of an update.
        bank_size: rows of each bank.
        learning_rate, temperature: to start from.
    """

    data: TrainingData
    model: str
    num_pairs: int
    num_queries: int
    num_passages: int
    query_max_length: int
    passage_max_length: int
    lengths_measured_by: str
    query_prompt: str
    passage_prompt: str
    are_alike: bool
    tied: bool
    has_negatives: bool
    micro_batch: int
    accumulation_steps: int
    bank_size: int
    learning_rate: str
    temperature: float


def propose(
    data: str | Path,
    model: str,
    *,
    columns: Mapping[str, str] | None = None,
    split: str = "train",
    on_bad_record: Any = "stop",
) -> Proposal:
    """Look at training data, and propose settings to train a model on them.

    Of the model only the tokenizer is loaded.

    Args:
        data: in any format of docs/data.md.
        model: a folder or hub name.
        columns: {role: the data's name of the column}.
        split: of a BEIR or MS MARCO folder, or of a Hugging Face data set.
        on_bad_record: "stop" or "skip".

    Raises:
        UserError: for data that cannot be used.
    """
    from contaccum.data import load_training_data

    loaded = load_training_data(
        data,
        num_hard_negatives=1,
        negatives_to_come=True,
        split=split,
        columns=columns,
        on_bad_record=on_bad_record,
    )
    query_ids, passage_ids = map(np.unique, loaded.pairs.T)
    rows = np.random.default_rng(0).permutation(len(loaded.dataset))[:_SAMPLE]
    texts = loaded.transform.first_texts(sorted(rows.tolist()))
    prompts = find_prompts(model)
    tokenizer = _tokenizer_of(model)
    query_length = _length_of_most(texts["query"], prompts[0], tokenizer)
    passage_length = _length_of_most(texts["positive"], prompts[1], tokenizer)
    share_of_both = np.isin(query_ids, passage_ids).mean()
    are_alike = bool(share_of_both > _SHARE_OF_BOTH or passage_length <= 2 * query_length)
    num_pairs = len(loaded.pairs)
    most_steps = MOST_PAIRS_PER_UPDATE // MICRO_BATCH
    return Proposal(
        data=loaded,
        model=model,
        num_pairs=num_pairs,
        num_queries=len(query_ids),
        num_passages=len(passage_ids),
        query_max_length=query_length,
        passage_max_length=passage_length,
        lengths_measured_by=tokenizer.name,
        query_prompt=prompts[0],
        passage_prompt=prompts[1],
        are_alike=are_alike,
        tied=are_alike or any(prompts) or num_pairs < PAIRS_FOR_TWO_ENCODERS,
        has_negatives=any(texts["negative_1"]),
        micro_batch=MICRO_BATCH,
        accumulation_steps=max(1, min(most_steps, num_pairs // 64)),
        bank_size=_bank_size(len(passage_ids)),
        learning_rate="5.0e-5" if "minilm" in model.lower() else "2.0e-5",
        temperature=0.05,
    )


def find_prompts(model: str) -> tuple[str, str]:
    """Return what a model's family puts before queries and passages; ("", "") if unknown."""
    families = yaml.safe_load(PROMPTS_FILE.read_text(encoding="utf-8"))
    for pattern, (query_prompt, passage_prompt) in families.items():
        if re.search(pattern, model, re.IGNORECASE):
            return query_prompt, passage_prompt
    return "", ""


def _bank_size(num_passages: int) -> int:
    """Return a power of two: at most half of the passages, from 8 to the largest."""
    rows = min(_LARGEST_BANK, max(8, num_passages // 2))
    return 2 ** int(np.log2(rows))


class _Tokenizer(NamedTuple):
    """Measures texts.

    Attributes:
        length: returns the tokens of a text.
        most: tokens that the model takes.
        name: a phrase that says how lengths are known.
    """

    length: Callable[[str], float]
    most: int
    name: str


def _tokenizer_of(model: str) -> _Tokenizer:
    """Return the model's tokenizer, or a guess where it cannot be had."""
    from sentence_transformers.util import load_file_path
    from transformers import AutoTokenizer

    from contaccum.encoders.loading import require_model

    try:
        require_model(model)
        tokenizer = AutoTokenizer.from_pretrained(model)
        settings_file = load_file_path(model, "sentence_bert_config.json")
    except (UserError, OSError, ValueError):
        guess = "guessed from their letters, without the tokenizer"
        return _Tokenizer(lambda text: len(text.encode()) / 4, _LONGEST, guess)
    own_length = read_json(settings_file).get("max_seq_length") if settings_file else None
    most = min(_LONGEST, tokenizer.model_max_length, own_length or _LONGEST)
    return _Tokenizer(
        lambda text: len(tokenizer(text, verbose=False)["input_ids"]), most, "by the tokenizer"
    )


def _length_of_most(texts: Sequence[str | None], prompt: str, tokenizer: _Tokenizer) -> int:
    """Return the tokens that most texts do not exceed.

    They are a multiple of 8, which accelerators like.
    """
    lengths = [tokenizer.length(f"{prompt}{text}") for text in texts]
    enough = np.quantile(lengths, _QUANTILE)
    return int(min(tokenizer.most, enough // 8 * 8 + 8))
