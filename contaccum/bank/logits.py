"""Logits of queries against documents, with false negatives masked.

`masked_logits` scores the queries of any pairs (rows) against the documents of any pairs (columns).
The loss calls it for every block of its score matrix: the queries of the micro-batch (local) and of
the memory bank (banked) against the documents of either. So a rule that excludes false negatives
applies to all blocks alike. The rules themselves are in `contaccum.bank.false_negatives`.

Letters in shapes: n pairs in the micro-batch, m pairs in the bank, r pairs whose queries are rows,
c pairs whose documents are columns, h hard negatives per query, d the embedding size, g the
embedding size of a guide. A pair's documents are its positive passage, then its hard negatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NO_ID = torch.iinfo(torch.int64).min
"""Id of a text that came without one. Such a text is never the same as another text."""

NO_ID_OF_ROW = NO_ID + 1
"""Value that replaces `NO_ID` in the ids of rows before they are compared with those of columns.

No column has it, so two missing ids are never equal.
"""

IDS_PER_TEXT = 2
"""Number of ids per text: for example an id from the data set and a hash of the tokens.

Two texts are the same if their first ids are equal or their second ids are equal. A text with one
id has `NO_ID` as the other.
"""

MASKED = -1e30
"""Logit of an excluded document. It is finite: a softmax over minus infinity alone gives NaN."""

SOFTPLUS_THRESHOLD = 40.0
"""Argument above which softplus(x) = log(1 + exp(x)) is x, which is exact in float64 too."""

ROWS_PER_PRODUCT = 2048
"""Number of documents (or queries) per matrix product; smaller products are faster on a CPU."""


class Pairs(NamedTuple):
    """Query-document pairs: a micro-batch, or the contents of a bank."""

    queries: Tensor  # (n, d)
    documents: Tensor  # (n, 1 + h, d)
    query_ids: Tensor  # int64 (IDS_PER_TEXT, n)
    document_ids: Tensor  # int64 (IDS_PER_TEXT, n, 1 + h)
    positive_logits: Tensor  # (n,), logit of each query and its own positive
    # bool (n, 1 + h), True for padding, retired and non-finite documents; None if there are none
    invalid: Tensor | None = None
    guide: GuideEmbeddings | None = None


class GuideEmbeddings(NamedTuple):
    """L2-normalised embeddings of the texts of `Pairs` by a guide, a second, frozen model."""

    queries: Tensor  # (n, g)
    documents: Tensor  # (n, 1 + h, g)
    ceilings: Tensor  # (n,), a document with a cosine above its row's ceiling is a false negative


class LogitBlocks(NamedTuple):
    """Logits of a micro-batch: the three blocks of the score matrix that have a gradient.

    A ring block is one of the equal parts of the bank's ring buffer; see `MemoryBank`.
    """

    banked: Pairs | None  # the bank's pairs; None without a bank

    in_batch: Tensor  # (n, n, 1 + h), local queries against local documents, own positives masked
    against_bank: Tensor  # (n, m, 1 + h), local queries against banked documents
    from_bank: Tensor  # (m, n, 1 + h), banked queries against local documents; m = 0 without them
    against_bank_sums: Tensor  # (n, ring blocks), logsumexp of against_bank over each ring block


FalseNegativeRule = Callable[[Pairs, Pairs, Tensor], Tensor]
"""Function of rows (r pairs), columns (c pairs) and their logits (r, c, 1 + h).

It returns a bool tensor that broadcasts to the shape of the logits: True where a document is a
false negative of the row, which means that it is (probably) relevant to the row's query.
"""


def masked_logits(
    rows: Pairs, columns: Pairs, temperature: float, rules: Sequence[FalseNegativeRule]
) -> Tensor:
    """Score the queries of ``rows`` (r pairs) against the documents of ``columns`` (c pairs).

    The logit is the inner product of query and document, divided by the temperature. It is `MASKED`
    if the document is not valid, or if one of the ``rules`` excludes it. If ``rows`` and
    ``columns`` are the same object, a row's own positive is masked too: it is no negative, and
    `Pairs` has its logit.

    A rule depends on one query and one document only, and is applied when the two are first scored
    against each other. The bank keeps the masked logits in its log-sums, so a mask never changes
    later.

    Args:
        rows, columns: the pairs.
        temperature: divisor of the inner products.
        rules: the rules that find false negatives.

    Returns:
        (r, c, 1 + h).
    """
    documents = columns.documents.flatten(0, 1)
    products = _compute_inner_products(rows.queries, documents, temperature)
    logits = products.unflatten(1, columns.documents.shape[:2])
    # All rules get the logits before any of them is masked.
    masks = [rule(rows, columns, logits) for rule in rules]
    if columns.invalid is not None:
        masks.append(columns.invalid)
    for mask in masks:
        logits.masked_fill_(mask, MASKED)
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
