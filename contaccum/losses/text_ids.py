"""Functions on the features of a column: text ids, the number of texts, the first texts.

The features of a column are the dict of tensors that a sentence-transformers model takes as input.
Three layouts of n texts occur:

| layout | ``input_ids`` | where each text starts |
|---|---|---|
| padded rows | (n, length) | each text is a row; ``attention_mask`` marks its tokens |
| one flattened row (FlashAttention) | (1, tokens) | ``cu_seq_lens_q`` |
| one stream (StaticEmbedding) | (tokens,) | ``offsets`` |

Equal texts have equal ids in every layout. The id of a text is a polynomial modulo 2^64, whose
coefficients are its tokens: the sum of (token + 1) * `_BASE` ** position. This hash has few
operators, and with small micro-batches a GPU waits for each of them. Ids are stored in checkpoints
with the bank, so the numbers of the hash must not change.
"""

from __future__ import annotations

from typing import Any

import torch

# Private functions, but the only ones that split and count features of every layout.
from sentence_transformers.base.losses.gradcache import _create_minibatch, _get_batch_size
from torch import Tensor
from torch.nn.functional import pad

from contaccum.bank.ids import NO_ID

_BASE = -7046029254386353131
"""Base of the polynomial. Modulo 8 it is 5, so that all its powers up to 2^62 are different."""


def content_ids(features: dict[str, Any]) -> Tensor | None:
    """Compute a 64-bit hash of each text's tokens, int64 (n,), from the features of a column.

    Padding on either side, flattening and streaming do not change the hash. Texts that are equal
    after truncation have equal ids, because the encoder gets the same tokens. Embeddings that a
    model has added are ignored. The result is None if a text has an image or a sound beside its
    tokens or in their place.
    """
    if _has_media(features):
        return None
    tokens = features["input_ids"].long()
    coefficients = tokens + 1  # token 0 must count too
    starts = features.get("offsets")  # int64 (n,), the first token of each text
    if "cu_seq_lens_q" in features:
        starts = features["cu_seq_lens_q"][:-1].long()  # the last one is the end of all texts
    if starts is None:
        attention_mask = features.get("attention_mask")
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens)
        mask = attention_mask.long()  # (n, length), 0 for padding
        powers = torch.pow(_BASE, mask.cumsum(1))  # the exponent counts the tokens, from 1
        return (coefficients * mask * powers).sum(1)
    # One row or stream of all texts: sum over the tokens of each text.
    indices = torch.arange(tokens.numel(), device=tokens.device)
    text_of_token = torch.searchsorted(starts, indices, right=True) - 1  # (tokens,)
    powers = torch.pow(_BASE, indices - starts[text_of_token] + 1)
    terms = coefficients.flatten() * powers
    return terms.new_zeros(len(starts)).index_add(0, text_of_token, terms)


def _has_media(features: dict[str, Any]) -> bool:
    """Return True if there are no tokens, or a floating-point input of two or more dimensions."""
    if "input_ids" not in features:
        return True
    for key, value in features.items():
        is_output = key == "sentence_embedding" or key.endswith("_embeddings")
        is_matrix = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1
        if is_matrix and not is_output:
            return True
    return False


def combine_ids(label_ids: Tensor | None, content_hashes: Tensor | None) -> Tensor | None:
    """Stack the two ids of each text, int64 (n,) each, to (n, 2); missing ids are `NO_ID`.

    Both are needed: texts that differ only in case, in white space or after truncation have
    different label ids (of the data set) but equal tokens (see `content_ids`). The result is None
    if both are None.
    """
    if content_hashes is None:
        if label_ids is None:
            return None
        content_hashes = torch.full_like(label_ids, NO_ID)
    if label_ids is None:
        return pad(content_hashes[:, None], (1, 0), value=NO_ID)
    return torch.stack([label_ids, content_hashes.to(label_ids.device)], dim=1)


def count_texts(features: dict[str, Any]) -> int:
    """Return the number of texts of a column."""
    if "offsets" in features:
        return len(features["offsets"])
    return _get_batch_size(features)


def copy_first_texts(features: dict[str, Any], max_texts: int) -> dict[str, Tensor] | None:
    """Copy the features of the first ``max_texts`` texts of a column, or of all if there are fewer.

    Only tensors and numbers are copied; numbers become tensors (). The result is None for texts
    with images or sounds, which may have any number of rows.
    """
    if _has_media(features):
        return None
    if count_texts(features) > max_texts:
        if "offsets" in features:
            offsets = features["offsets"]
            tokens = features["input_ids"][: offsets[max_texts]]
            features = {"input_ids": tokens, "offsets": offsets[:max_texts]}
        else:
            features = _create_minibatch(features, 0, max_texts)
    copied = {key: x for key, x in features.items() if isinstance(x, (Tensor, int, float))}
    return {key: torch.as_tensor(x).clone() for key, x in copied.items()}
