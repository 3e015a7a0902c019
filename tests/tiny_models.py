"""Tiny models built from a config, so that no test needs a download."""

from functools import cache
from typing import Any

from sample_texts import WORDS
from transformers import BertConfig, BertTokenizerFast, Qwen3Config, set_seed


@cache
def word_tokenizer() -> BertTokenizerFast:
    """A word-piece tokenizer over WORDS and single letters."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)] + list("0123456789?.,:")
    tokens = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *(f"##{x}" for x in letters),
        *WORDS,
    ]
    return BertTokenizerFast(
        vocab={t: i for i, t in enumerate(dict.fromkeys(tokens))}, model_max_length=64
    )


def bert_config(layers: int, hidden_size: int, intermediate_size: int, **given: Any) -> BertConfig:
    """A BERT over the words of ``word_tokenizer``, dropout on."""
    given = {
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        **given,
    }
    given |= {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
    return BertConfig(vocab_size=len(word_tokenizer()), **given)


def qwen3_config(vocab_size: int) -> Qwen3Config:
    """A decoder of two layers and 32 dimensions."""
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    }
    return Qwen3Config(
        vocab_size=vocab_size, num_attention_heads=2, num_key_value_heads=1, head_dim=16, **sizes
    )


def tiny_encoder(tied: bool = True, dropout: float = 0.0, **given: Any) -> Any:
    """A fresh DualEncoder of one layer: always the same weights."""
    from contaccum import DualEncoder  # which takes seconds that most tests can do without

    set_seed(7)
    config = bert_config(
        1, 16, 16, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    given = {
        "pooling": "mean",
        "normalize": True,
        "tokenizer": word_tokenizer(),
        "device": "cpu",
        **given,
    }
    return DualEncoder.from_backbone(config, tied=tied, **given)
