"""Cross-entropy of queries over all documents of an index that stands still.

With the similarity s and the temperature tau, query i and its positive i+ have the loss

    l_i = logsumexp_j s(i, j)/tau - s(i, i+)/tau

over all documents j, its positive among them, but for those that are excluded for this query.

Documents come in blocks, and each block is read once: the log-sums grow together with the
softmax-weighted sums of documents, from which the gradient follows, (weighted mean - positive) /
(tau n). So memory is n x block, whatever the number of documents. Documents have no gradient.

Letters in shapes: n queries, c documents, b documents in a block, p excluded documents per query at
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
"""Fills up a query's list of documents; no document has this number."""


class DocumentBlock(NamedTuple):
    """Consecutive documents of an index."""

    first: int  # the number of the first one in the index
    documents: Tensor  # (b, d)
    scales: Tensor | None = None  # (b,), factor of each: 1 / its length with cosine; None: 1


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
    excluded: Tensor,
    blocks: Iterable[DocumentBlock],
    temperature: float,
    is_partitioned: bool = False,
) -> Tensor:
    """Compute the mean loss of n queries over all documents, a scalar with a gradient.

    Args:
        queries: (n, d).
        positives: (n, d), the embedding of each query's positive, times its scale.
        excluded: int64 (n, p), numbers of documents that are no negatives of a query: its other
            positives, and copies of its positive, but never the positive itself. Filled up with
            `NO_ROW`.
        blocks: the documents, at least one over all ranks; each query's positive is among them.
        temperature: tau > 0.
        is_partitioned: each rank of ``torch.distributed`` has its own part of the documents in
            ``blocks`` and its own queries, whose n may differ. Every rank returns the mean over the
            queries of all ranks. Gradients are multiplied by the number of ranks, because DDP
            averages them.
    """
    with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
        dtype = torch.promote_types(queries.dtype, torch.float32)
        all_queries = queries.to(dtype)
        positives = positives.to(all_queries)
        own_queries = slice(None)
        if is_partitioned:
            excluded = _pad_to_widest(excluded)
            gathered, own_queries = gather_rows([all_queries, positives, excluded])
            all_queries, positives, excluded = gathered
        sums = sum_over_documents(all_queries, excluded, blocks, temperature)
        if is_partitioned:
            sums = _combine_over_ranks(sums)
        positive_logits = (all_queries * positives).sum(1) / temperature
        loss = (sums.log_sums - positive_logits).mean()
        gradient = (sums.mean_documents - positives) / (temperature * len(all_queries))
        if is_partitioned:
            gradient = gradient[own_queries] * world_size()
    if not torch.is_grad_enabled():
        return loss
    return PrecomputedGradient.apply(loss, [gradient], queries)


@torch.no_grad()
def sum_over_documents(
    queries: Tensor,
    excluded: Tensor,
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
        scales = None
        if block.scales is not None:
            scales = block.scales.to(queries)
            logits *= scales
        logits.masked_fill_(_is_excluded(block, excluded), MASKED)

        new_largest = torch.maximum(largest, logits.amax(1))
        correction = (largest - new_largest).exp()
        weights = (logits - new_largest[:, None]).exp()
        total = total * correction + weights.sum(1)
        if scales is not None:
            weights *= scales
        weighted = weighted * correction[:, None] + weights @ documents
        largest = new_largest
    return SoftmaxSums(largest, total, weighted)


def _is_excluded(block: DocumentBlock, excluded: Tensor) -> Tensor:
    """Return bool (n, b): the documents of a block that are excluded for each query."""
    num_documents = len(block.documents)
    position = excluded - block.first
    is_inside = (position >= 0) & (position < num_documents)
    # Documents of other blocks go to an extra last column, which is cut off. Selecting them by a
    # mask would make the host wait for the device.
    position = torch.where(is_inside, position, num_documents)
    shape = (len(excluded), num_documents + 1)
    is_excluded = torch.zeros(shape, dtype=torch.bool, device=excluded.device)
    return is_excluded.scatter_(1, position, True)[:, :num_documents]


def _combine_over_ranks(sums: SoftmaxSums) -> SoftmaxSums:
    """Combine the sums of all ranks, each over its part of the documents."""
    largest = over_ranks("MAX", sums.largest)
    correction = (sums.largest - largest).exp()
    total = over_ranks("SUM", sums.total * correction)
    weighted = over_ranks("SUM", sums.weighted * correction[:, None])
    return SoftmaxSums(largest, total, weighted)


def _pad_to_widest(excluded: Tensor) -> Tensor:
    """Fill up this rank's lists of documents, (n, p), to the largest p of all ranks."""
    width = torch.tensor(excluded.shape[1], device=excluded.device)
    missing = int(over_ranks("MAX", width)) - excluded.shape[1]
    return torch.nn.functional.pad(excluded, (0, missing), value=NO_ROW)
