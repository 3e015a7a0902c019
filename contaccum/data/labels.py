"""The wire format of the "label" column: text ids and teacher scores of a row.

sentence-transformers passes one tensor of labels to a loss, so everything that a loss needs besides
the texts is in one column. With c text columns (query, positive, negatives), a row's label is one
of these:

| content | value of a row | shape of a batch |
|---|---|---|
| text ids | list of c ints | int64 (n, c) |
| teacher scores | list of c - 1 floats | float (n, c - 1) |
| text ids, teacher scores | list of c + (c - 1) ints | int64 (n, 2 c - 1) |

A tensor has one dtype, so scores beside ids are stored as the 32 bits of a float32, read as an
integer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


_LEAST_HASH = 1 << 48


@dataclass(frozen=True)
class Labels:
    """Decoded labels of a batch of n rows with c text columns; None for a missing part.

    Attributes:
        text_ids: ids of query, positive and negatives, int64 (n, c).
        teacher_scores: scores of positive and negatives, (n, c - 1).
    """

    text_ids: Tensor | None = None
    teacher_scores: Tensor | None = None


def encode(
    text_ids: Sequence[int] = (), teacher_scores: Sequence[float] = ()
) -> list[int] | list[float]:
    """Encode the label of one row in the format of this module.

    Args:
        text_ids: 64-bit ids of the query, the positive and the negatives; empty to leave them out.
        teacher_scores: scores of the positive and the negatives; empty to leave them out.
    """
    if not teacher_scores:
        return list(text_ids)
    if not text_ids:
        return list(teacher_scores)
    bits = np.array(teacher_scores, dtype=np.float32).view(np.int32)
    return [*text_ids, *bits.tolist()]


def are_text_ids(ids: Tensor) -> bool:
    """Return False if all ids are small integers, such as classes or row numbers.

    Text ids are 64-bit hashes. Those of a single pair are all below 2^48 with a probability of
    1e-9.
    """
    return bool((ids.abs() >= _LEAST_HASH).any())


def decode(labels: Tensor | None, num_columns: int) -> Labels:
    """Decode the text ids and teacher scores in the labels of a batch.

    Labels of another shape or dtype come from a user's own data set; they decode to None.

    Args:
        labels: the labels of a batch.
        num_columns: c, the number of text columns.
    """
    import torch

    if labels is None or labels.ndim != 2:
        return Labels()
    width = labels.shape[1]
    if width == num_columns - 1:
        return Labels(teacher_scores=labels)
    if labels.dtype != torch.int64:
        return Labels()
    if width == num_columns:
        return Labels(text_ids=labels)
    if width == 2 * num_columns - 1:
        bits = labels[:, num_columns:].to(torch.int32)
        scores = bits.view(torch.float32)
        return Labels(text_ids=labels[:, :num_columns], teacher_scores=scores)
    return Labels()
