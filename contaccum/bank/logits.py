"""Pairs of texts, and the logits of queries against documents with false negatives masked.

`masked_logits` scores the queries of any pairs (rows) against the documents of any pairs (columns),
which are a micro-batch or the contents of a bank. Every rule that excludes a document as a negative
belongs there, and then holds in the whole score matrix.

A false negative of a row is a copy of its positive, or another document that is (probably) relevant
to its query.

Letters in shapes: n pairs in the micro-batch, r pairs whose queries are rows, c pairs whose
documents are columns, h hard negatives per query, d the embedding size. The texts of a pair are its
query, its positive passage, then its hard negatives; its documents are all but the query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from contaccum.bank.ids import NO_ID, PositivesTable
from contaccum.settings import InfoNCESettings

NO_ID_OF_ROW = NO_ID + 1
"""Value that replaces `NO_ID` in the ids of rows before they are compared with those of columns.

No column has it, so two missing ids are never equal.
"""

MASKED = -1e30
"""Logit of an excluded document. It is finite: a softmax over minus infinity alone gives NaN."""

ROWS_PER_PRODUCT = 2048
"""Number of documents (or queries) per matrix product; smaller products are faster on a CPU."""


class Pairs(NamedTuple):
    """Query-document pairs: a micro-batch, or the contents of a bank."""

    queries: Tensor  # (n, d)
    documents: Tensor  # (n, 1 + h, d)
    # The ids come first in the shape, because ids of different kinds are never compared.
    query_ids: Tensor  # int64 (IDS_PER_TEXT, n)
    document_ids: Tensor  # int64 (IDS_PER_TEXT, n, 1 + h)
    positive_logits: Tensor  # (n,), logit of each query and its own positive
    # bool (n, 1 + h), True for padding, retired and non-finite documents; None if there are none
    invalid: Tensor | None = None


def stack_embeddings(columns: Sequence[Tensor], may_be_empty: bool = False) -> Tensor:
    """Stack the embeddings of each pair's texts, (n, 2 + h, d), in float32 at least.

    All that follows is computed for the whole stack: with a small micro-batch, a GPU waits for the
    number of operators, not for their size.

    Args:
        columns: queries (n, d), passages (n, d) and, if any, hard negatives (n, h, d).
        may_be_empty: True if n may be 0.

    Raises:
        ValueError: for other shapes.
    """
    queries, passages = columns[:2]
    if queries.ndim != 2 or queries.shape != passages.shape:
        shapes = f"{tuple(queries.shape)} and {tuple(passages.shape)}"
        raise ValueError(f"queries and passages must have the same shape (n, d), got {shapes}")
    n, d = queries.shape
    if n == 0 and not may_be_empty:
        raise ValueError(
            "the micro-batch is empty: skip it (only with several ranks and "
            "gather_across_devices=True may a rank have no pairs)"
        )
    for negatives in columns[2:]:
        if negatives.ndim != 3 or len(negatives) != n or negatives.shape[2] != d:
            shape = tuple(negatives.shape)
            raise ValueError(f"negatives must be (n, h, d) = ({n}, h, {d}), got {shape}")
    embeddings = torch.cat([queries[:, None], passages[:, None], *columns[2:]], dim=1)
    return embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))


def make_pairs(
    embeddings: Tensor,
    ids: Tensor,
    temperature: float,
    passage_mean: Tensor | None = None,
) -> Pairs:
    """Make `Pairs` of a micro-batch: embeddings (n, 2 + h, d) without a gradient, with their ids.

    The vector ``passage_mean``, (d,), is subtracted from the documents.
    """
    queries = embeddings[:, 0]
    documents = embeddings[:, 1:]
    if passage_mean is not None:
        documents = documents - passage_mean
    return Pairs(
        queries=queries,
        documents=documents,
        query_ids=ids[:, 0].T,
        document_ids=ids[:, 1:].movedim(-1, 0),
        positive_logits=(queries * documents[:, 0]).sum(1) / temperature,
    )


def masked_logits(
    rows: Pairs,
    columns: Pairs,
    settings: InfoNCESettings,
    positives: PositivesTable | None = None,
) -> Tensor:
    """Score the queries of ``rows`` (r pairs) against the documents of ``columns`` (c pairs).

    The logit is the inner product of query and document, divided by the temperature. It is `MASKED`
    if the document is not valid or, with ``mask_duplicates``, is a false negative of the row: by
    the ids of the texts or by the table of positives. If ``rows`` and ``columns`` are the same
    object, a row's own positive is masked too: it is no negative, and `Pairs` has its logit.

    A mask depends on one row pair and one column pair only, and is made when the two are first
    scored against each other. The bank keeps the masked logits in its log-sums, so a mask must
    never change later.

    Returns:
        (r, c, 1 + h).
    """
    documents = columns.documents.flatten(0, 1)  # (c * (1 + h), d)
    products = _compute_inner_products(rows.queries, documents, settings.temperature)
    logits = products.unflatten(1, columns.documents.shape[:2])  # (r, c, 1 + h)

    if settings.mask_duplicates:
        logits.masked_fill_(find_duplicates(rows, columns), MASKED)
        if positives is not None:
            is_listed = positives.contains(rows.query_ids[0], columns.document_ids[0])
            logits.masked_fill_(is_listed, MASKED)
    if columns.invalid is not None:
        logits.masked_fill_(columns.invalid, MASKED)
    if rows is columns:
        logits[:, :, 0].fill_diagonal_(MASKED)
    return logits


def _compute_inner_products(queries: Tensor, documents: Tensor, temperature: float) -> Tensor:
    """Compute the inner products (r, k) of r queries and k documents, divided by the temperature.

    The longer dimension of the result is contiguous in memory, because a CPU then sums faster over
    the shorter one.
    """
    if len(queries) > len(documents):
        return _compute_inner_products(documents, queries, temperature).T
    scaled = queries / temperature
    products = [scaled @ part.T for part in documents.split(ROWS_PER_PRODUCT)]
    if len(products) == 1:
        return products[0]
    return torch.cat(products, dim=1)


def find_duplicates(rows: Pairs, columns: Pairs) -> Tensor:
    """Find copies of a row's own positive, and positives of the same query: bool (r, c, 1 + h)."""
    positive_ids = rows.document_ids[:, :, 0]
    row_keys = torch.cat([positive_ids, rows.query_ids])  # (2 * IDS_PER_TEXT, r)
    # Two missing ids are not equal.
    row_keys = row_keys.masked_fill(row_keys == NO_ID, NO_ID_OF_ROW)
    # Keys are compared one by one: the row's positive with each document, query with query. If a
    # column pair has the row's query, its passage (index 0) is a positive of the row; its hard
    # negatives are not.
    num_negatives = columns.document_ids.shape[2] - 1
    query_ids = columns.query_ids[:, :, None]
    if num_negatives > 0:
        query_ids = pad(query_ids, (0, num_negatives), value=NO_ID)
    column_keys = torch.cat([columns.document_ids, query_ids])  # (2 * IDS_PER_TEXT, c, 1 + h)
    if row_keys.shape[1] > column_keys[0].numel():
        # The result gets the layout of the logits in memory, with which it is combined faster.
        is_equal = row_keys[:, None, None, :] == column_keys[:, :, :, None]
        return is_equal.any(0).movedim(-1, 0)
    is_equal = row_keys[:, :, None, None] == column_keys[:, None]
    return is_equal.any(0)
