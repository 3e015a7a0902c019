"""Cross-entropy of queries over all documents of an index that stands still.

Row i has its positive i+ and every document j as a column, with the similarity s and the
temperature tau:

    loss = mean_i ( logsumexp_j s(i, j)/tau - s(i, i+)/tau )

Documents come in blocks, and each block is read once: the log-sums and the softmax-weighted sums of
documents, which are the gradient of the queries, grow together. So memory is n x block, whatever
the number of documents. Documents have no gradient.

Letters in shapes: n queries, c documents, b documents in a block, p known positives per query at
most, d the embedding size.

Source: the running maximum is that of Milakov and Gimelshein, 2018 (arXiv 1805.02867).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from contaccum.bank.logits import MASKED
from contaccum.bank.precomputed_gradient import PrecomputedGradient
from contaccum.distributed import gather_rows, over_ranks, world_size

NO_ROW = -1
"""Fills up a query's list of known positives; no document has this row number."""


class DocumentBlock(NamedTuple):
    """Consecutive documents of an index."""

    first_row: int  # the number of the first one
    documents: Tensor  # (b, d)
    scales: Tensor | None = None  # (b,), documents count times these: 1 / length with cosine


class SoftmaxSums(NamedTuple):
    """Sums over documents for n queries, with logits relative to the largest one of each query."""

    largest: Tensor  # (n,), the largest logit
    total: Tensor  # (n,), sum of exp(logit - largest)
    weighted: Tensor  # (n, d), sum of exp(logit - largest) * document

    @property
    def log_sums(self) -> Tensor:
        """(n,), logsumexp of the logits of each query."""
        return self.largest + self.total.log()

    @property
    def mean_documents(self) -> Tensor:
        """(n, d), mean of the documents under each query's softmax."""
        return self.weighted / self.total[:, None]


def full_softmax_loss(
    queries: Tensor,
    positives: Tensor,
    excluded_rows: Tensor,
    blocks: Iterable[DocumentBlock],
    temperature: float,
    is_partitioned: bool = False,
) -> Tensor:
    """Compute the mean loss of n queries over all documents, a scalar with a gradient.

    Args:
        queries: (n, d).
        positives: (n, d), the document of each query that is its positive in this row.
        excluded_rows: int64 (n, p), rows of documents that are no negatives of a query: its other
            positives, and copies of its positive. Filled up with `NO_ROW`.
        blocks: the documents; each query's positive is among them.
        is_partitioned: each rank of ``torch.distributed`` has a part of the documents in its
            ``blocks``, and queries of its own, of which n may differ. Every rank returns the mean
            over the queries of all. Gradients are multiplied by the number of ranks, for a
            reduction that averages, as DDP's.
    """
    with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
        dtype = torch.promote_types(queries.dtype, torch.float32)
        rows = queries.to(dtype)
        positives = positives.to(rows)
        local_rows = slice(None)
        if is_partitioned:
            excluded_rows = _pad_to_widest(excluded_rows)
            gathered, local_rows = gather_rows([rows, positives, excluded_rows])
            rows, positives, excluded_rows = gathered
        sums = sum_over_documents(rows, excluded_rows, blocks, temperature)
        if is_partitioned:
            sums = _combine_over_ranks(sums)
        positive_logits = (rows * positives).sum(1) / temperature
        loss = (sums.log_sums - positive_logits).mean()
        gradient = (sums.mean_documents - positives) / (temperature * len(rows))
        if is_partitioned:
            gradient = gradient[local_rows] * world_size()
    if not torch.is_grad_enabled():
        return loss
    return PrecomputedGradient.apply(loss, [gradient], queries)


@torch.no_grad()
def sum_over_documents(
    queries: Tensor,
    excluded_rows: Tensor,
    blocks: Iterable[DocumentBlock],
    temperature: float,
) -> SoftmaxSums:
    """Sum over the documents of all blocks; arguments as in `full_softmax_loss`."""
    largest = queries.new_full((len(queries),), MASKED)
    total = torch.zeros_like(largest)
    weighted = torch.zeros_like(queries)
    for block in blocks:
        documents = block.documents.to(queries)
        logits = queries @ documents.T / temperature
        if block.scales is not None:
            logits *= block.scales
        logits.masked_fill_(_is_excluded(block, excluded_rows), MASKED)

        new_largest = torch.maximum(largest, logits.amax(1))
        correction = (largest - new_largest).exp()
        weights = (logits - new_largest[:, None]).exp()
        total = total * correction + weights.sum(1)
        if block.scales is not None:
            weights *= block.scales
        weighted = weighted * correction[:, None] + weights @ documents
        largest = new_largest
    return SoftmaxSums(largest, total, weighted)


def _is_excluded(block: DocumentBlock, excluded_rows: Tensor) -> Tensor:
    """Return bool (n, b): the documents of a block that are no negatives of each query."""
    num_documents = len(block.documents)
    position = excluded_rows - block.first_row
    is_inside = (position >= 0) & (position < num_documents)
    # The column after the last one takes what lies in other blocks, so that no host read is needed.
    position = torch.where(is_inside, position, num_documents)
    shape = (len(excluded_rows), num_documents + 1)
    excluded = torch.zeros(shape, dtype=torch.bool, device=excluded_rows.device)
    return excluded.scatter_(1, position, True)[:, :num_documents]


def _combine_over_ranks(sums: SoftmaxSums) -> SoftmaxSums:
    """Combine the sums of all ranks, each over its part of the documents."""
    largest = over_ranks("MAX", sums.largest)
    correction = (sums.largest - largest).exp()
    total = over_ranks("SUM", sums.total * correction)
    weighted = over_ranks("SUM", sums.weighted * correction[:, None])
    return SoftmaxSums(largest, total, weighted)


def _pad_to_widest(excluded_rows: Tensor) -> Tensor:
    """Fill up the rows of this rank, (n, p), to the largest p of all ranks."""
    width = torch.tensor(excluded_rows.shape[1], device=excluded_rows.device)
    missing = int(over_ranks("MAX", width)) - excluded_rows.shape[1]
    return torch.nn.functional.pad(excluded_rows, (0, missing), value=NO_ROW)
