"""Functions on the features of a column: text ids, the number of texts, the first texts.

The features of a column are the dict of tensors that a sentence-transformers model takes as input.
Three layouts of n texts occur:

| layout | ``input_ids`` | where each text starts |
|---|---|---|
| padded rows | (n, length) | each text is a row; ``attention_mask`` marks its tokens |
| one flattened row (FlashAttention) | (1, tokens) | ``cu_seq_lens_q`` or ``position_ids`` |
| one stream (StaticEmbedding) | (tokens,) | ``offsets`` |

Equal texts have equal ids in every layout. A text may have images, audio or video beside its tokens
or in place of them; they are called media here.

The id of a text is a polynomial modulo 2^64, whose coefficients are its tokens: the sum of
(token + 1) * `_BASE` ** position. This hash has few operators, and with small micro-batches a GPU
waits for each of them. Hashes of the text's media tensors are added, if they have a row for each
text. Ids are stored in checkpoints with the bank, so the numbers of the hash must not change.
"""

from __future__ import annotations

from typing import Any

import torch

# A private function, but the only one that splits features of every layout.
from sentence_transformers.base.losses.gradcache import _create_minibatch
from torch import Tensor
from torch.nn.functional import pad

from contaccum.bank.logits import NO_ID

# Random odd 64-bit numbers: a value and its position must not have equal products.
_POSITION_FACTOR = -4417276706812531889
_VALUE_FACTOR = -7046029254386353131

_BASE = -7046029254386353131
"""Base of the polynomial. Modulo 8 it is 5, so that all its powers up to 2^62 are different."""

_INT_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by their size in bytes."""


def content_ids(features: dict[str, Any]) -> Tensor | None:
    """Compute a 64-bit hash of each text's content, int64 (n,).

    Padding on either side, flattening and streaming do not change the hash. Texts that are equal
    after truncation have equal ids, because the encoder gets the same tokens.

    Args:
        features: the features of one column, in any layout of this module. Embeddings that a model
            has added are ignored.

    Returns:
        The hashes, or None if the features do not show which content belongs to which text. This is
        so for media tensors with a row for each image or patch.
    """
    num_texts = count_texts(features)
    has_tokens = features.get("input_ids") is not None
    media = _select_media(features)
    has_row_per_text = all(len(values) == num_texts for values in media)
    if num_texts is None or not has_row_per_text or not (has_tokens or media):
        return None
    if has_tokens:
        hashes = _hash_tokens(features)
    else:
        hashes = torch.zeros(num_texts, dtype=torch.int64, device=media[0].device)
    for values in media:
        # Mixing makes the order count: the same media in another order have another hash.
        hashes = mix_bits(hashes) + _hash_rows(values)
    return hashes


def combine_ids(label_ids: Tensor | None, content_hashes: Tensor | None) -> Tensor | None:
    """Stack the two ids of each text to int64 (n, 2); missing ids are `NO_ID`.

    Both are needed: texts that differ only in case, in white space or after truncation have
    different label ids but equal tokens.

    Args:
        label_ids: int64 (n,), ids of the texts in the data set, or None.
        content_hashes: int64 (n,), from `content_ids`, or None.

    Returns:
        The stack, or None if both are None.
    """
    if content_hashes is None:
        if label_ids is None:
            return None
        content_hashes = torch.full_like(label_ids, NO_ID)
    if label_ids is None:
        return pad(content_hashes[:, None], (1, 0), value=NO_ID)
    return torch.stack([label_ids, content_hashes.to(label_ids.device)], dim=1)


def count_texts(features: dict[str, Any]) -> int | None:
    """Return the number of texts of a column, or None if the features do not show it."""
    starts = _get_text_starts(features)
    if starts is not None:
        return len(starts)
    tokens = features.get("input_ids")
    if isinstance(tokens, Tensor):
        if tokens.ndim == 2:
            return len(tokens)
        return None
    for key, value in features.items():
        if key.startswith("num_") and key.endswith("_per_sample"):
            return len(value)
    for value in features.values():
        if isinstance(value, Tensor) and value.ndim > 0:
            return len(value)
    return None


def copy_first_texts(features: dict[str, Any], max_texts: int) -> dict[str, Tensor] | None:
    """Copy the features of the first ``max_texts`` texts of a column, or of all if there are fewer.

    Only tensors and numbers are copied; numbers become tensors ().

    Returns:
        The copies, or None if these texts cannot be separated from the other texts.
    """
    num_texts = count_texts(features)
    if num_texts is None or num_texts > max_texts:
        selected = _select_first_texts(features, max_texts)
        if selected is None:
            return None
        features = selected
    copies = {}
    for key, value in features.items():
        if isinstance(value, (Tensor, int, float)):
            copies[key] = torch.as_tensor(value).clone()
    return copies


def mix_bits(x: Tensor) -> Tensor:
    """Hash int64 numbers with the finaliser of SplitMix64 (Steele et al., 2014).

    Every input bit affects all output bits, and different numbers have different hashes. The
    products overflow, which is intended.
    """
    x = (x ^ _shift_right(x, 30)) * -4658895280553007687
    x = (x ^ _shift_right(x, 27)) * -7723592293110705685
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 numbers to the right, and fill up with zeros on the left.

    The operator ``>>`` fills up with the sign bit, and `mix_bits` would then give -1 and 0 the same
    hash.
    """
    remaining_bits = (1 << (64 - bits)) - 1
    return (x >> bits) & remaining_bits


def _select_first_texts(features: dict[str, Any], num_texts: int) -> dict[str, Any] | None:
    """Return the features of the first texts, or None if they cannot be selected correctly.

    The selection is correct if the selected texts have the same ids as in ``features``.
    """
    ids = content_ids(features)
    if ids is None:
        return None
    if "offsets" in features:
        offsets = features["offsets"]
        selected = {
            "input_ids": features["input_ids"][: offsets[num_texts]],
            "offsets": offsets[:num_texts],
        }
    else:
        selected = _create_minibatch(features, 0, num_texts)
    # The check is needed because `_create_minibatch` cannot split a flattened row that has only
    # position ids.
    selected_ids = content_ids(selected)
    if selected_ids is None or not torch.equal(selected_ids, ids[:num_texts]):
        return None
    return selected


def _select_media(features: dict[str, Any]) -> list[Tensor]:
    """Return the media tensors: the floating-point features of two or more dimensions.

    Embeddings are left out, because they are outputs that a model has added.
    """
    media = []
    for key, value in features.items():
        if key == "sentence_embedding" or key.endswith("_embeddings"):
            continue
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
            media.append(value)
    return media


def _hash_tokens(features: dict[str, Any]) -> Tensor:
    """Hash the tokens of each text with their positions, int64 (n,).

    Padding tokens are skipped, and positions, which start at 1, do not count them.
    """
    tokens = features["input_ids"].long()
    coefficients = tokens + 1  # token 0 must count too
    starts = _get_text_starts(features)
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


def _get_text_starts(features: dict[str, Any]) -> Tensor | None:
    """Return the index of each text's first token, int64 (n,), in a flattened row or a stream.

    Return None if each text has its own row.
    """
    bounds = features.get("cu_seq_lens_q")  # the starts of all texts, and the end of the last one
    if isinstance(bounds, Tensor):
        return bounds[:-1].long()
    tokens = features.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.ndim == 1:
        return features.get("offsets")
    positions = features.get("position_ids")
    is_flattened = len(tokens) == 1 and features.get("attention_mask") is None
    if is_flattened and isinstance(positions, Tensor):
        # The position ids start again from the smallest number at each text.
        is_first_token = positions.flatten() == positions.min()
        return is_first_token.nonzero().flatten()
    return None


def _hash_rows(values: Tensor) -> Tensor:
    """Hash the bytes of each row of a tensor (rows, ...), int64 (rows,)."""
    bits = values.detach().flatten(1).view(_INT_TYPES[values.element_size()])  # (rows, numbers)
    positions = torch.arange(bits.shape[1], device=values.device) * _POSITION_FACTOR
    # The hashes of a row take several times its memory, so only one row is hashed at a time.
    hashes = [mix_bits(row.long() * _VALUE_FACTOR + positions).sum() for row in bits]
    return torch.stack(hashes)
