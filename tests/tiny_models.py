"""Tiny models built from a config, so that no test needs a download."""

import string
from functools import cache
from typing import Any

from sample_texts import WORDS
from transformers import BertConfig, BertTokenizerFast, Qwen3Config, set_seed

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@cache
def word_tokenizer() -> BertTokenizerFast:
    """Return a word-piece tokenizer over WORDS and single characters."""
    characters = list(string.ascii_lowercase + string.digits + "?.,:")
    word_endings = [f"##{character}" for character in characters]
    vocabulary: dict[str, int] = {}
    for token in (*SPECIAL_TOKENS, *characters, *word_endings, *WORDS):
        # The word "a" is also a character: it keeps its first number.
        vocabulary.setdefault(token, len(vocabulary))
    return BertTokenizerFast(vocab=vocabulary, model_max_length=64)


def bert_config(
    layers: int, hidden_size: int, intermediate_size: int, **settings: Any
) -> BertConfig:
    """Return the config of a BERT over the words of ``word_tokenizer``, by default with dropout."""
    defaults = {
        "num_hidden_layers": layers,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    return BertConfig(vocab_size=len(word_tokenizer()), **{**defaults, **settings})


def qwen3_config(vocab_size: int) -> Qwen3Config:
    """Return the config of a decoder with two layers and 32 dimensions."""
    return Qwen3Config(
        vocab_size=vocab_size,
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        max_position_embeddings=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )


def tiny_encoder(
    tied: bool = True, dropout: float = 0.0, config: Any = None, **settings: Any
) -> Any:
    """Return a fresh DualEncoder of one layer and 16 dimensions, always with the same weights.

    Args:
        tied: whether both towers share one encoder.
        dropout: dropout of the encoder.
        config: config of another encoder.
        **settings: arguments of ``DualEncoder.from_backbone``.
    """
    # The import takes seconds, and the tests that use only a tokenizer or a config do not need it.
    from contaccum import DualEncoder

    set_seed(7)
    config = config or bert_config(
        1, 16, 16, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    defaults = {
        "pooling": "mean",
        "normalize": True,
        "tokenizer": word_tokenizer(),
        "device": "cpu",
    }
    return DualEncoder.from_backbone(config, tied=tied, **{**defaults, **settings})
