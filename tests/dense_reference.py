"""The loss written down as plainly as possible: one (n + m) x (n + m) score matrix, autograd, loops for masks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize


def dense_loss(
    rows: list[Tensor],
    columns: list[Tensor],
    positives: list[int],
    local_rows: int,
    temperature: float,
    similarity: str,
    normalize_by: str = "local",
    masked: Tensor | None = None,
    moved: Tensor | None = None,
) -> Tensor:
    """Mean row loss over local rows (or all), of every row against every column.

    Args:
        rows, columns: parts to concatenate; gradients flow to the ones that require them.
        positives: the column of each row's positive.
        masked: bool (rows, columns), columns that a row leaves out.
        moved: (rows, d), how far a row counts as moved in its push on the columns, though not in its scores.
    """
    q, c = torch.cat(rows), torch.cat(columns)
    if similarity == "cos":
        q, c = normalize(q, dim=-1), normalize(c, dim=-1)
    scores = q @ c.T / temperature
    if moved is not None:
        push = moved @ c.T / temperature
        scores = scores + push - push.detach()
    if masked is not None:
        scores = scores.masked_fill(masked, -torch.inf)
    losses = torch.nn.functional.cross_entropy(scores, torch.tensor(positives), reduction="none")
    return losses.sum() / (local_rows if normalize_by == "local" else len(losses))


def brute_force_mask(
    row_query_ids: list[int],
    positives: list[int],
    column_passage_ids: list[int],
    known: list[tuple[int, int]],
) -> Tensor:
    """True where a column other than the row's own positive holds a passage known as a positive of the row's query."""
    mask = torch.zeros(len(row_query_ids), len(column_passage_ids), dtype=torch.bool)
    for i, query in enumerate(row_query_ids):
        for j, passage in enumerate(column_passage_ids):
            if j != positives[i] and (query, passage) in known:
                mask[i, j] = True
    return mask
