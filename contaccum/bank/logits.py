"""Logits of queries against documents, with false negatives masked.

`masked_logits` scores any rows against any columns. The loss calls it for every block of the score
matrix, so a rule that excludes false negatives applies to all blocks alike. The rules themselves
are in `contaccum.bank.false_negatives`.

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
"""Id of a text that came without one. It equals no other id, not even another `NO_ID`."""

NO_ID_OF_ROW = NO_ID + 1
"""Value that replaces `NO_ID` in the ids of rows, because columns have `NO_ID` as well."""

IDS_PER_TEXT = 2
"""Number of ids per text: for example an id from the data set and a hash of the tokens.

Two texts are the same if their first ids are equal or their second ids are equal. A text with one
id has `NO_ID` as the other.
"""

MASKED = -1e30
"""Logit of an excluded document. Finite, so that a row of excluded documents gives no NaN."""

ROWS_PER_PRODUCT = 2048
"""Rows of a long matrix that are multiplied at once; smaller products are faster on a CPU."""


class Pairs(NamedTuple):
    """Query-document pairs: a micro-batch, or the contents of a bank."""

    queries: Tensor  # (n, d)
    documents: Tensor  # (n, 1 + h, d)
    query_ids: Tensor  # int64 (IDS_PER_TEXT, n)
    document_ids: Tensor  # int64 (IDS_PER_TEXT, n, 1 + h)
    positive_logits: Tensor  # (n,), logit of each query and its own positive
    valid: Tensor  # bool (n, 1 + h), False for documents that must not be used
    guide: GuideEmbeddings | None = None


class GuideEmbeddings(NamedTuple):
    """L2-normalised guide embeddings of the same texts; a guide is a second, frozen model."""

    queries: Tensor  # (n, g)
    documents: Tensor  # (n, 1 + h, g)
    ceilings: Tensor  # (n,), a document with a cosine above its row's ceiling is a false negative


class LogitBlocks(NamedTuple):
    """Logits of a micro-batch: the three blocks of the score matrix that have a gradient."""

    in_batch: Tensor  # (n, n, 1 + h), local queries against local documents
    against_bank: Tensor  # (n, m, 1 + h), local queries against banked documents
    from_bank: Tensor  # (m, n, 1 + h), banked queries against local documents; m = 0 without them
    against_bank_sums: Tensor  # (n, blocks), logsumexp of against_bank per block of the ring buffer


FalseNegativeRule = Callable[[Pairs, Pairs, Tensor], Tensor]
"""Function of rows (r pairs), columns (c pairs) and their logits (r, c, 1 + h).

It returns a bool tensor of the shape of the logits: True where a document is a false negative of
the row.
"""


def masked_logits(
    rows: Pairs,
    columns: Pairs,
    temperature: float,
    rules: Sequence[FalseNegativeRule],
    query_drift: Tensor | None = None,
) -> Tensor:
    """Score the queries of ``rows`` (r pairs) against the documents of ``columns`` (c pairs).

    The logit is s(query, document) / temperature, with s the inner product. It is `MASKED` if the
    document is not valid, or if one of the ``rules`` excludes it. A rule decides from one query and
    one document when they are first scored against each other; the bank stores the result, and no
    decision changes later. If ``rows`` and ``columns`` are the same object, no rule excludes a
    row's own positive.

    Args:
        query_drift: (b, d). The rows are b consecutive runs of equal length, and entry i is the
            movement of the query tower's mean since run i was stored. It changes gradients only:
            the logits are those of the stored queries, so that they agree with the log-sums of the
            bank, and the gradient of a document is computed with stored query + drift.

    Returns:
        (r, c, 1 + h).
    """
    documents = columns.documents.flatten(0, 1)
    logits = _inner_products(rows.queries, documents) / temperature
    if query_drift is not None:
        zeros_with_gradient = documents - documents.detach()
        drift_logits = _inner_products(query_drift, zeros_with_gradient) / temperature
        logits_by_run = logits.unflatten(0, (len(query_drift), -1))
        logits = (logits_by_run + drift_logits[:, None]).flatten(0, 1)
    logits = logits.unflatten(1, columns.valid.shape)

    with torch.no_grad():
        is_excluded = torch.zeros_like(logits, dtype=torch.bool)
        is_excluded |= ~columns.valid
        for rule in rules:
            is_excluded |= rule(rows, columns, logits)
        if rows is columns:
            pair = torch.arange(len(logits), device=logits.device)
            is_excluded[pair, pair, 0] = ~columns.valid[:, 0]
    return logits.masked_fill(is_excluded, MASKED)


def _inner_products(queries: Tensor, documents: Tensor) -> Tensor:
    """Compute queries (r, d) @ documents.T, (r, k) for k documents.

    The longer dimension of the result is contiguous in memory, because a CPU then sums faster over
    the shorter one.
    """
    if len(queries) > len(documents):
        return _inner_products(documents, queries).T
    products = [queries @ part.T for part in documents.split(ROWS_PER_PRODUCT)]
    return torch.cat(products, dim=1)
