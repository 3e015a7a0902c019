"""The wire format of the "label" column: row numbers, text ids and teacher scores of a row.

sentence-transformers passes one tensor of labels to a loss, so everything that a loss needs besides
the texts is in one column. With c text columns (query, positive, negatives), a row's label is one
of these:

| content | value of a row | shape of a batch |
|---|---|---|
| row number | int | int64 (n,) |
| text ids | list of c ints | int64 (n, c) |
| row number, text ids | list of 1 + c ints | int64 (n, 1 + c) |
| teacher scores | list of c - 1 floats | float (n, c - 1) |
| text ids, teacher scores | list of c + (c - 1) ints | int64 (n, 2 c - 1) |

A tensor has one dtype, so scores beside ids are stored as the 32 bits of a float32, read as an
integer. Row numbers are for the process that reads the data (`NegativeRefresh`), which removes them
before the loss sees the labels. No row has a row number and scores: negatives that are mined during
training have no teacher scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Labels:
    """Decoded labels of a batch of n rows with c text columns; None for a missing part.

    Attributes:
        row_numbers: row numbers, int64 (n,).
        text_ids: ids of query, positive and negatives, int64 (n, c).
        teacher_scores: scores of positive and negatives, (n, c - 1).
    """

    row_numbers: Tensor | None = None
    text_ids: Tensor | None = None
    teacher_scores: Tensor | None = None


def encode(
    row_number: int | None = None,
    text_ids: Sequence[int] = (),
    teacher_scores: Sequence[float] = (),
) -> int | list[int] | list[float]:
    """Encode the label of one row in the format of this module.

    Args:
        row_number: None to leave it out.
        text_ids: 64-bit ids of the query, the positive and the negatives; empty to leave them out.
        teacher_scores: scores of the positive and the negatives; empty to leave them out.

    Raises:
        ValueError: for a row number together with teacher scores.
    """
    if teacher_scores:
        if row_number is not None:
            raise ValueError("a label cannot hold a row number and teacher scores")
        if not text_ids:
            return list(teacher_scores)
        bits = np.array(teacher_scores, dtype=np.float32).view(np.int32)
        return [*text_ids, *bits.tolist()]
    if row_number is None:
        return list(text_ids)
    if not text_ids:
        return row_number
    return [row_number, *text_ids]


def decode(labels: Tensor | None, num_columns: int) -> Labels:
    """Decode the text ids and teacher scores in the labels of a batch.

    Labels of another shape or dtype come from a user's own data set; they decode to None.

    Args:
        labels: the labels of a batch without row numbers; see `decode_row_numbers`.
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


def decode_row_numbers(labels: Tensor) -> Labels:
    """Decode the row numbers and, if present, the text ids of a batch with row numbers."""
    if labels.ndim == 1:
        return Labels(row_numbers=labels)
    return Labels(row_numbers=labels[:, 0], text_ids=labels[:, 1:])
