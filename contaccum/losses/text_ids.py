"""The features of a column, as sentence-transformers' preprocessors give them: how many texts, the first, ids of each.

Texts lie in padded rows, flattened into one row (FlashAttention), or in one stream with offsets
(StaticEmbedding); images, audio and video lie beside their tokens or alone. Equal content has an
equal id, however it lies. Nothing here knows a loss.
"""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers.base.losses.gradcache import (
    _create_minibatch,  # private, but who else knows all layouts
)
from torch import Tensor

from contaccum.bank.logits import NO_ID

# Odd constants, one for each axis along which content has a place.
_PLACES = (
    -4417276706812531889,
    -7046029254386353131,
    3202034522624059733,
    4593380528125082431,
    6364136223846793005,
)
_VALUES_AT_ONCE = 2**20  # of images, audio and video: hashing takes some 40 bytes for each


def content_ids(features: dict[str, Any]) -> Tensor | None:
    """A 64-bit hash of each text's content, int64 (n,); the same padded on any side, flattened or in a stream.

    Texts that truncation makes equal are equal to the encoder as well, and so they are here.

    Args:
        features: of one column, whatever a model has added: ``input_ids`` (n, length) with
            ``attention_mask``, (1, tokens) with ``cu_seq_lens_q`` or ``position_ids``, or (tokens,)
            with ``offsets``; beside them or alone any floating-point tensors: (n, ...), or rows of
            images or patches with ``num_images_per_sample``, ``image_grid_thw`` and the like.

    Returns:
        None where it cannot be known what belongs to which text.
    """
    given = {
        key: x
        for key, x in features.items()
        if isinstance(x, Tensor) and not key.endswith("_embeddings")
    }
    media = {
        key: x
        for key, x in given.items()
        if x.is_floating_point() and x.ndim > 1 and key != "sentence_embedding"
    }
    tokens, n = features.get("input_ids"), rows_in(features)
    if n is None or (tokens is None and not media):
        return None
    if tokens is None:
        found = torch.zeros(n, dtype=torch.int64, device=next(iter(media.values())).device)
    else:
        found = _of_tokens(features)
    for key, values in media.items():
        owners = _owners(features, key, n)
        if owners is None:
            return None
        place = torch.arange(len(values), device=owners.device) - torch.searchsorted(owners, owners)
        found = mix64(found).index_add(0, owners, mix64(_of_values(values) + place * _PLACES[1]))
    return mix64(found)


def combine_ids(label_ids: Tensor | None, token_ids: Tensor | None) -> Tensor | None:
    """Stack the two ids of each text, int64 (n, 2): the one in the labels and the hash of its tokens.

    Texts that differ in case, in white space or behind the truncation have equal tokens but no
    equal label. A missing id is `NO_ID`; None if both are missing.
    """
    present = label_ids if label_ids is not None else token_ids
    if present is None:
        return None
    columns = []
    for ids in (label_ids, token_ids):
        column = torch.full_like(present, NO_ID) if ids is None else ids.to(present.device)
        columns.append(column)
    return torch.stack(columns, dim=1)


def rows_in(features: dict[str, Any]) -> int | None:
    """How many texts a column has, n; None where nothing tells."""
    starts, tokens = _starts(features), features.get("input_ids")
    if starts is not None:
        return len(starts)
    if isinstance(tokens, Tensor):
        return len(tokens) if tokens.ndim == 2 else None
    counts = [
        x for key, x in features.items() if key.startswith("num_") and key.endswith("_per_sample")
    ]
    rows = counts or [x for x in features.values() if isinstance(x, Tensor) and x.ndim]
    return len(rows[0]) if rows else None


def first_rows(features: dict[str, Any], rows: int) -> dict[str, Tensor] | None:
    """Copies of the tensors and numbers of a column's first texts; None where the others cannot be left out."""
    n, found = rows_in(features), features
    if n is None or n > rows:
        ids = content_ids(features)
        if ids is None:
            return None
        if "offsets" in features:
            tokens, offsets = features["input_ids"], features["offsets"]
            found = {"input_ids": tokens[: offsets[rows]], "offsets": offsets[:rows]}
        else:
            found = _create_minibatch(features, 0, rows)
        first = content_ids(found)
        # Some layouts are cut elsewhere: texts told apart by places alone, pictures before
        # sentence-transformers 6.2.
        if first is None or not torch.equal(first, ids[:rows]):
            return None
    return {
        key: torch.as_tensor(x).clone()
        for key, x in found.items()
        if isinstance(x, (Tensor, int, float))
    }


def _of_tokens(features: dict[str, Any]) -> Tensor:
    """The sum of hashes of token and place for each text, int64 (n,); places count real tokens alone."""
    tokens, starts = features["input_ids"].long(), _starts(features)
    if starts is None:
        attention = features.get("attention_mask")
        present = torch.ones_like(tokens) if attention is None else attention.long()
        return (mix64(tokens * _PLACES[1] + present.cumsum(1) * _PLACES[0]) * present).sum(1)
    places = torch.arange(tokens.numel(), device=tokens.device)
    owners = torch.searchsorted(starts, places, right=True) - 1
    mixed = mix64(tokens.flatten() * _PLACES[1] + (places - starts[owners] + 1) * _PLACES[0])
    return mixed.new_zeros(len(starts)).index_add(0, owners, mixed)


def _starts(features: dict[str, Any]) -> Tensor | None:
    """Where texts begin in a row of all tokens, int64 (n,); None where each has a row of its own."""
    tokens, bounds, places = (
        features.get(key) for key in ("input_ids", "cu_seq_lens_q", "position_ids")
    )
    if isinstance(bounds, Tensor):
        return bounds[:-1].long()
    if not isinstance(tokens, Tensor) or tokens.ndim == 1:
        return features.get("offsets")
    if isinstance(places, Tensor) and len(tokens) == 1 and features.get("attention_mask") is None:
        return (places.flatten() == places.min()).nonzero().flatten()
    return None


def _owners(features: dict[str, Any], key: str, n: int) -> Tensor | None:
    """The text that each row of a tensor of images, audio or video belongs to, int64, ascending; None: nobody knows."""
    values, kind = features[key], "video" if "video" in key else "image"
    owners = torch.arange(n, device=values.device)
    counts, grid = features.get(f"num_{kind}s_per_sample"), features.get(f"{kind}_grid_thw")
    for each in (
        counts,
        None if grid is None else grid.prod(1),
    ):  # images of a text, patches of an image
        if len(owners) != len(values) and each is not None and len(each) == len(owners):
            owners = owners.repeat_interleave(each.to(owners.device))
    return owners if len(owners) == len(values) else None


def _of_values(values: Tensor) -> Tensor:
    """Of the bits of each row of (rows, ...), int64 (rows,); zeros count for nothing, so padding with them neither."""
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    shape, places = values.shape[1:], torch.zeros((), dtype=torch.int64, device=values.device)
    for axis, size in enumerate(shape):
        steps = torch.arange(1, size + 1, device=values.device) * _PLACES[axis % len(_PLACES)]
        places = places + mix64(steps).view(-1, *[1] * (len(shape) - axis - 1))
    hashes = []
    for some in values.detach().split(max(1, _VALUES_AT_ONCE // max(shape.numel(), 1))):
        bits = (some + 0.0).contiguous().view(width).long()  # -0.0 becomes 0.0
        hashes.append(
            torch.where(bits == 0, 0, mix64(bits * _PLACES[1] + places)).flatten(1).sum(1)
        )
    return torch.cat(hashes)


def mix64(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele et al., 2014), a bijection, on int64, whose products wrap around."""
    # int64 shifts repeat the sign, where the finaliser shifts in zeros: with the sign, -1 and 0
    # would be one.
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685
    return x ^ (x >> 31 & (1 << 33) - 1)
