"""Logits of queries against documents, with the false negatives masked that rules find.

`masked_logits` scores any rows against any columns. The loss calls it for every block of the score
matrix, so each rule applies to all blocks alike. The rules are in `false_negatives`.

Letters in shapes: n pairs in the micro-batch, m pairs in the bank, r rows, c columns (pairs), h
hard negatives per query, d the embedding size, g the embedding size of a guide. The documents of a
pair are its positive passage, then its hard negatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NO_ID = torch.iinfo(torch.int64).min
"""Stands for a missing id. Two texts without an id are not the same text."""

NO_ID_OF_ROW = NO_ID + 1
"""Replaces `NO_ID` among the ids of rows while they are compared with those of columns."""

IDS_PER_TEXT = 2
"""Ids per text, for example one from the data set and a hash of its tokens; or one and `NO_ID`.

Two texts are the same if their first ids are equal, or their second.
"""

MASKED = -1e30
"""Logit of an excluded document; finite, so a row with all documents excluded gives no NaN."""


ROWS_PER_PRODUCT = 2048
"""A long matrix is multiplied in parts of this many rows, which is faster on a CPU."""


class Pairs(NamedTuple):
    """Query-document pairs: a micro-batch, or the contents of a bank."""

    queries: Tensor  # (n, d)
    documents: Tensor  # (n, 1 + h, d)
    query_ids: Tensor  # int64 (IDS_PER_TEXT, n)
    document_ids: Tensor  # int64 (IDS_PER_TEXT, n, 1 + h)
    positive_logits: Tensor  # (n,), of each query and its own positive
    valid: Tensor  # bool (n, 1 + h), False for documents that must not be used
    guide: GuideEmbeddings | None = None


class GuideEmbeddings(NamedTuple):
    """L2-normalised embeddings of the same texts by a guide, a frozen model."""

    queries: Tensor  # (n, g)
    documents: Tensor  # (n, 1 + h, g)
    ceilings: Tensor  # (n,), a document that scores above its row's ceiling is a false negative


FalseNegativeRule = Callable[[Pairs, Pairs, Tensor], Tensor]
"""A function of rows (r pairs), columns (c pairs) and their logits (r, c, 1 + h).

It returns a bool tensor of that shape, True for documents that are false negatives of a row.
"""


def masked_logits(
    rows: Pairs,
    columns: Pairs,
    temperature: float,
    rules: Sequence[FalseNegativeRule],
    query_drift: Tensor | None = None,
) -> Tensor:
    """Score the queries of ``rows`` (r pairs) against the documents of ``columns`` (c pairs).

    Documents that are not valid or that one of the ``rules`` excludes have the logit `MASKED`. A
    rule looks at one query and one document when they first meet; the bank does not ask again. If
    ``rows`` and ``columns`` are the same object, no rule excludes a row's own positive.

    Args:
        query_drift: (b, d), for b consecutive runs of rows, of equal length: how far the mean of
            the query tower has moved since the run was stored. It changes gradients alone: logits
            are those of the stored queries, as in the log-sums of the bank, and documents get the
            gradient of stored query + drift.

    Returns:
        (r, c, 1 + h), similarities over the temperature.
    """
    documents = columns.documents.flatten(0, 1)
    logits = _inner_products(rows.queries, documents) / temperature
    if query_drift is not None:
        gradient_only = documents - documents.detach()  # zero in value
        drift_logits = _inner_products(query_drift, gradient_only) / temperature
        by_run = logits.unflatten(0, (len(query_drift), -1))
        logits = (by_run + drift_logits[:, None]).flatten(0, 1)
    logits = logits.unflatten(1, columns.valid.shape)

    with torch.no_grad():
        excluded = torch.zeros_like(logits, dtype=torch.bool)
        excluded |= ~columns.valid
        for rule in rules:
            excluded |= rule(rows, columns, logits)
        if rows is columns:
            is_own_excluded = excluded[:, :, 0].diagonal()  # a view, so this writes into the mask
            is_own_excluded.copy_(~columns.valid[:, 0])
    return logits.masked_fill(excluded, MASKED)


def _inner_products(queries: Tensor, documents: Tensor) -> Tensor:
    """Return queries (r, d) @ documents.T, (r, k) for k documents.

    The longer dimension of the result is contiguous in memory: on a CPU, sums over the shorter one
    are faster then.
    """
    if len(queries) > len(documents):
        return _inner_products(documents, queries).T
    parts = [queries @ part.T for part in documents.split(ROWS_PER_PRODUCT)]
    return torch.cat(parts, dim=1)
