"""Tiny models built from a config, so that no test needs a download."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertTokenizerFast

WORDS = (  # noqa: SIM905  # sixty quoted words are harder to read
    "the a of in is was cat dog bird fish tree river stone cloud rain sun moon star city road house door window "
    "red blue green small large old new fast slow warm cold what where who when why how does do sits runs flies swims "
    "grows falls shines on under over near far with without and or not one two three four five six seven eight nine"
).split()


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> BertTokenizerFast:
    """A word-piece tokenizer over WORDS and single letters."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)] + list("0123456789?.,:")
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{x}" for x in letters), *WORDS]
    return BertTokenizerFast(vocab={t: i for i, t in enumerate(dict.fromkeys(tokens))}, model_max_length=64)


@pytest.fixture(scope="session")
def tiny_config(tiny_tokenizer: BertTokenizerFast) -> BertConfig:
    """A BERT of two layers and 32 dimensions, dropout on."""
    return BertConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )


def sentences(count: int, seed: int = 0, length: int = 6) -> list[str]:
    """``count`` distinct sentences over WORDS."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(WORDS), (count, length), generator=generator)
    return [" ".join(WORDS[i] for i in row) + f" {number}" for number, row in enumerate(picks.tolist())]
