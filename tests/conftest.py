"""Tiny models built from a config, so that no test needs a download."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from sample_texts import WORDS
from transformers import BertConfig, BertTokenizerFast


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or fills the cache of whoever runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTACCUM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


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


@pytest.fixture(scope="session")
def tiny_model_path(tiny_config, tiny_tokenizer, tmp_path_factory) -> str:
    """A saved random encoder: mean pooling, cosine, passages of 40 tokens."""
    from contaccum import DualEncoder

    path = str(tmp_path_factory.mktemp("model") / "tiny")
    options = {"tokenizer": tiny_tokenizer, "pooling": "mean", "normalize": True, "passage_max_length": 40}
    torch.manual_seed(0)
    DualEncoder.from_backbone(tiny_config, device="cpu", **options).save_pretrained(path)
    return path
