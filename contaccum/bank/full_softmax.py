"""Cross-entropy of queries over all documents of an index whose embeddings never change.

It is the loss of query-side training, which trains the query encoder alone. With the similarity s
and the temperature tau, query i and its positive p(i) have the loss

    l_i = log(1 + exp(D_i)),    D_i = logsumexp_j s(i, j)/tau - s(i, p(i))/tau,

where j runs over the negatives: all documents but the positive and others that are excluded for
this query. With the softmax weights a(i, j) of the negatives and the document embeddings x_j, the
gradient of the mean loss for query i is

    sigmoid(D_i) (sum_j a(i, j) x_j - x_p(i)) / (tau n).

In this form it stays exact for a query that is almost solved, whose positive has nearly all of the
softmax. Documents are read in blocks, each block once: logsumexp_j and sum_j a(i, j) x_j are
accumulated together, so only n x b logits are in memory at once. Documents get no gradient.

Letters in shapes: n queries, b documents in a block, e excluded documents per query at most, d the
embedding size.

Source: the running maximum is that of Milakov and Gimelshein, 2018 (arXiv 1805.02867).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from contaccum.bank.logits import MASKED
from contaccum.bank.row_losses import SOFTPLUS_THRESHOLD, PrecomputedGradient
from contaccum.distributed import gather_rows, over_ranks, world_size

Multiply = Callable[[Tensor, Tensor], Tensor]
"""Function of two matrices, (n, k) and (k, m), that returns their product (n, m)."""
NO_ROW = -1
"""Padding of a query's list of document numbers (rows of the index); no document has it."""

# Logits that are computed at once, for all queries together: 64 MB in float32. Several matrices of
# this size are in memory.
_MAX_LOGITS = 2**24
# At least so many documents are compared at once, however many queries there are.
_MIN_DOCUMENTS = 8192


class DocumentBlock(NamedTuple):
    """Consecutive documents of an index."""

    first: int  # number of the block's first document in the index
    documents: Tensor  # (b, d)
    scales: Tensor | None = None  # (b,), factor of each document: with cosine, 1 / its length

    def split(self, size: int) -> Iterator[DocumentBlock]:
        """Yield the documents in blocks of at most ``size``."""
        for start in range(0, len(self.documents), size):
            rows = slice(start, start + size)
            scales = None if self.scales is None else self.scales[rows]
            yield DocumentBlock(self.first + start, self.documents[rows], scales)


def compute_full_softmax_loss(
    queries: Tensor,
    positives: Tensor,
    excluded: Tensor,
    blocks: Iterable[DocumentBlock],
    temperature: float,
    is_partitioned: bool = False,
    multiply: Multiply = torch.matmul,
) -> Tensor:
    """Compute the mean loss of n queries over all documents, a scalar with a gradient.

    Args:
        queries: (n, d), at least one over all ranks; normalised if similarity is the cosine.
        positives: (n, d), the embedding of each query's positive, times its scale (see
            `DocumentBlock`).
        excluded: int64 (n, e), numbers of the documents that are not negatives of a query: its
            positive, its other positives, and copies of them. Shorter lists are padded with
            `NO_ROW`.
        blocks: the documents, no block empty, at least one over all ranks. They include each
            query's positive. Numbers of documents count over the whole index, on all ranks.
        temperature: tau > 0.
        is_partitioned: True if each rank of ``torch.distributed`` has its own part of the documents
            in ``blocks`` and its own queries, whose number n may differ. Every rank then returns
            the mean over the queries of all ranks. Gradients are multiplied by the number of
            ranks, because DDP averages them.
        multiply: product of a matrix, at least float32, and documents. The default needs documents
            of the same number type.
    """
    with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
        dtype = torch.promote_types(queries.dtype, torch.float32)
        all_queries = queries.to(dtype)
        positives = positives.to(all_queries)
        rows_of_this_rank = slice(None)
        if is_partitioned:
            # Every rank has the queries of all ranks from here on; n is their number.
            width = torch.tensor(excluded.shape[1], device=excluded.device)
            num_missing = int(over_ranks("MAX", width)) - excluded.shape[1]
            excluded = pad(excluded, (0, num_missing), value=NO_ROW)  # the widest e of all ranks
            gathered, rows_of_this_rank = gather_rows([all_queries, positives, excluded])
            all_queries, positives, excluded = gathered
        max_logits, exp_sums, weighted_documents = sum_over_documents(
            all_queries, excluded, blocks, temperature, multiply
        )
        if is_partitioned:
            # The sums of each rank are over its part of the documents.
            max_logits_of_rank = max_logits
            max_logits = over_ranks("MAX", max_logits_of_rank)
            rescaling = (max_logits_of_rank - max_logits).exp()
            exp_sums = over_ranks("SUM", exp_sums * rescaling)
            weighted_documents = over_ranks("SUM", weighted_documents * rescaling[:, None])
        log_sums = max_logits + exp_sums.log()  # (n,), over the negatives
        mean_documents = weighted_documents / exp_sums[:, None]  # (n, d), under their softmax
        positive_logits = (all_queries * positives).sum(1) / temperature
        differences = log_sums - positive_logits  # (n,), D
        loss = softplus(differences, threshold=SOFTPLUS_THRESHOLD).mean()
        weights = differences.sigmoid() / (temperature * len(all_queries))
        gradient = weights[:, None] * (mean_documents - positives)  # (n, d)
        if is_partitioned:
            gradient = gradient[rows_of_this_rank] * world_size()
    if not torch.is_grad_enabled():
        return loss
    return PrecomputedGradient.apply(loss, gradient, queries)


def sum_over_documents(
    queries: Tensor,
    excluded: Tensor,
    blocks: Iterable[DocumentBlock],
    temperature: float,
    multiply: Multiply,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute sums over the negatives of each query, from all blocks.

    Returns:
        The largest logit of each query, (n,), which is subtracted from its logits before the
        exponential; the sum of the exponentials, (n,); and of exponential times document, (n, d).
    """
    max_logits = queries.new_full((len(queries),), MASKED)
    exp_sums = torch.zeros_like(max_logits)
    weighted_documents = torch.zeros_like(queries)
    num_documents = max(_MIN_DOCUMENTS, _MAX_LOGITS // len(queries))
    for block in chain.from_iterable(block.split(num_documents) for block in blocks):
        logits = multiply(queries, block.documents.T).div_(temperature)  # (n, b)
        scales = None
        if block.scales is not None:
            scales = block.scales.to(queries)
            logits *= scales

        # Mask the documents that are excluded for a query. Documents in other blocks (and `NO_ROW`)
        # leave the first logit as it is. Selecting with a bool mask instead would make the host
        # wait for the device.
        position = excluded - block.first  # (n, e)
        is_inside = (position >= 0) & (position < len(block.documents))
        position = torch.where(is_inside, position, 0)
        limits = torch.where(is_inside, MASKED, torch.inf).to(logits)
        logits.scatter_reduce_(1, position, limits, "amin")

        # Sums so far are relative to the old largest logits: rescale them to the new ones. If all
        # documents so far were excluded, their sums mean nothing. MASKED is finite but very small,
        # so the factor is 0 at the first document that is not excluded.
        new_max_logits = torch.maximum(max_logits, logits.amax(1))
        rescaling = (max_logits - new_max_logits).exp()
        weights = logits.sub_(new_max_logits[:, None]).exp_()
        exp_sums = exp_sums * rescaling + weights.sum(1)
        if scales is not None:
            weights *= scales
        weighted_documents *= rescaling[:, None]
        weighted_documents += multiply(weights, block.documents)
        max_logits = new_max_logits
    return max_logits, exp_sums, weighted_documents
