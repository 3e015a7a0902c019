"""Encoders with random weights in the shapes of well-known models, and random inputs for them.

Random weights and token ids have the cost of real ones, so nothing is downloaded.
"""

from __future__ import annotations

import random
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


BACKBONES = {
    "bert-base": Shape(12, 768, 12, 3072),
    "minilm": Shape(6, 384, 12, 1536),
    "tiny": Shape(2, 32, 2, 64),
    "decoder-0.6b": Shape(28, 1024, 16, 3072, 8, 128, 151_669),  # Qwen3-Embedding-0.6B
    "decoder-100m": Shape(12, 768, 12, 2048, 4, 64),
    "decoder-tiny": Shape(2, 32, 2, 64, 1, 16),
}


def make_encoder(
    backbone: str,
    device: torch.device | str,
    dropout: float = 0.0,
    num_words: int = 0,
    **options: Any,
) -> DualEncoder:
    """Create an encoder with random weights.

    Args:
        backbone: a name in `BACKBONES`.
        device: device of the encoder.
        dropout: dropout of a backbone that is no decoder.
        num_words: number of words of the tokenizer, "w0", "w1" and so on; each is one token.
        **options: further arguments of `DualEncoder.from_backbone`.
    """
    shape = BACKBONES[backbone]
    sizes = {
        "vocab_size": shape.vocabulary,
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "intermediate_size": shape.intermediate_size,
    }
    if shape.num_key_value_heads is None:
        dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        config = BertConfig(**sizes, **dropouts)
    else:
        heads = {"num_key_value_heads": shape.num_key_value_heads, "head_dim": shape.head_dim}
        config = Qwen3Config(**sizes, **heads)
    tokens = [*SPECIAL_TOKENS, *(f"w{number}" for number in range(num_words))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = BertTokenizer(vocab=vocabulary, model_max_length=512)
    return DualEncoder.from_backbone(config, tokenizer=tokenizer, device=str(device), **options)


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

    The words are those of an encoder with ``num_words``.
    """
    generator = random.Random(seed)
    words = [f"w{number}" for number in range(num_words)]
    num_words_of_text = num_tokens - _NUM_ADDED_TOKENS
    return [" ".join(generator.choices(words, k=num_words_of_text)) for _ in range(num_texts)]
