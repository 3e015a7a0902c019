"""Encoders with random weights in the shapes of well-known models, and random inputs for them.

Random weights and token ids have the cost of real ones, so nothing is downloaded.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import BertConfig, BertTokenizer, Qwen3Config

from contaccum import DualEncoder

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_NUM_ADDED_TOKENS = 2  # the tokenizer puts [CLS] before a text and [SEP] after it


@dataclass(frozen=True)
class Shape:
    """The sizes of a backbone.

    With ``num_key_value_heads`` and ``head_dim`` the backbone is a decoder of Qwen3's architecture,
    else an encoder of BERT's.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    vocabulary: int = 30522

    @property
    def is_decoder(self) -> bool:
        """True for a decoder."""
        return self.num_key_value_heads is not None


BACKBONES = {
    "bert-base": Shape(12, 768, 12, 3072),
    "minilm": Shape(6, 384, 12, 1536),
    "tiny": Shape(2, 32, 2, 64),
    "decoder-0.6b": Shape(28, 1024, 16, 3072, 8, 128, 151_669),  # Qwen3-Embedding-0.6B
    "decoder-100m": Shape(12, 768, 12, 2048, 4, 64),
    "decoder-tiny": Shape(2, 32, 2, 64, 1, 16),
}


def make_config(shape: Shape, dropout: float = 0.0) -> BertConfig | Qwen3Config:
    """Return the configuration of a backbone. Decoders have no dropout."""
    sizes = {
        "vocab_size": shape.vocabulary,
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "intermediate_size": shape.intermediate_size,
    }
    if shape.is_decoder:
        return Qwen3Config(
            **sizes,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
        )
    return BertConfig(**sizes, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)


def make_words(num_words: int) -> list[str]:
    """Return the words "w0", "w1" and so on."""
    return [f"w{number}" for number in range(num_words)]


def make_tokenizer(words: Sequence[str] = ()) -> BertTokenizer:
    """Create a tokenizer for some words in lower case; each of them is one token."""
    tokens = [*SPECIAL_TOKENS, *words]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return BertTokenizer(vocab=vocabulary, model_max_length=512)


def make_encoder(
    shape: Shape,
    device: torch.device | str,
    tied: bool = True,
    dropout: float = 0.0,
    words: Sequence[str] = (),
    **options: Any,
) -> DualEncoder:
    """Create an encoder with random weights.

    Args:
        shape: sizes of the backbone.
        device: device of the encoder.
        tied: True for one tower, False for two.
        dropout: dropout of a backbone that is no decoder.
        words: words of the tokenizer; see `make_tokenizer`.
        **options: further arguments of `DualEncoder.from_backbone`.
    """
    return DualEncoder.from_backbone(
        make_config(shape, dropout),
        tied=tied,
        tokenizer=make_tokenizer(words),
        device=str(device),
        **options,
    )


def use_autocast(model: DualEncoder, precision: str) -> None:
    """Run the forward pass of a model under autocast to a precision; do nothing for float32."""
    dtype = getattr(torch, precision)
    if dtype == torch.float32:
        return
    # Wrap the forward method, as accelerate does. GradCache's second forward pass runs inside
    # backward, where an autocast context of the training loop is not active.
    autocast = torch.autocast(model.device.type, dtype=dtype)
    model.forward = autocast(model.forward)


def make_features(
    vocabulary: int, num_pairs: int, query_length: int, passage_length: int, device: Any
) -> list[dict[str, Any]]:
    """Return random token ids of queries and passages, as sentence-transformers passes them."""
    features = []
    for task, length in (("query", query_length), ("document", passage_length)):
        shape = (num_pairs, length)
        token_ids = torch.randint(len(SPECIAL_TOKENS), vocabulary, shape, device=device)
        mask = torch.ones_like(token_ids)
        features.append({"input_ids": token_ids, "attention_mask": mask, "task": task})
    return features


def make_texts(num_texts: int, num_tokens: int, num_words: int, seed: int = 0) -> list[str]:
    """Return random texts of ``num_tokens`` tokens each, special tokens included.

    Args:
        num_texts: number of texts.
        num_tokens: number of tokens of each text.
        num_words: number of different words; see `make_words`.
        seed: seed of the words.
    """
    generator = random.Random(seed)
    words = make_words(num_words)
    num_words_of_text = num_tokens - _NUM_ADDED_TOKENS
    texts = []
    for _ in range(num_texts):
        texts.append(" ".join(generator.choices(words, k=num_words_of_text)))
    return texts
