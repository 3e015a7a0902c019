"""Scores that depend on their pair alone, and the order by score and id: what makes two searches equal to the bit.

A score is the inner product (or cosine) in float64, summed in one fixed order, and rounded to float32. Which pairs to
score is decided in `exact`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

Metric = Literal["cos", "dot"]

# Float64 copies of documents scored at a time: 64 MB.
BLOCK_BYTES = 2**26


class ExactScores:
    """Exact scores of n queries (n, d), float32, which are called by their numbers."""

    def __init__(self, queries: np.ndarray, metric: Metric) -> None:
        self.metric = metric
        self.queries = queries.astype(np.float64)
        if metric == "cos":
            self.queries /= _norms(self.queries)[:, None]
        self.lengths = np.sqrt(np.einsum("nd,nd->n", self.queries, self.queries))

    def of(self, query: int, documents: np.ndarray) -> np.ndarray:
        """float32 (m,) of one query and float32 documents (m, d).

        einsum sums each row in one fixed order, wherever it lies; a matrix product does not.
        """
        exact = documents.astype(np.float64)
        scores = np.einsum("md,d->m", exact, self.queries[query])
        if self.metric == "cos":
            scores /= _norms(exact)
        return scores.astype(np.float32)

    def of_all(self, chosen: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """float32 (chosen, documents), the same as `of` pair by pair, by a product of float64 matrices.

        Another order of summation changes the float64 score by 1e-13 at the most, and the float32 score only where it
        lies so close between two of them: those pairs are scored one by one.
        """
        dimension = documents.shape[1]
        scores = np.empty((len(chosen), len(documents)), dtype=np.float32)
        size = max(1, BLOCK_BYTES // (8 * dimension))
        for start in range(0, len(documents), size):
            block = documents[start : start + size].astype(np.float64)
            norms = _norms(block)
            product = self.queries[chosen] @ block.T
            if self.metric == "cos":
                product /= norms
                norms = np.ones_like(norms)
            doubt = (dimension + 16) * 2.0**-52 * self.lengths[chosen][:, None] * norms
            rounded = product.astype(np.float32)
            unclear = (product - doubt).astype(np.float32) != (product + doubt).astype(np.float32)
            for line in np.flatnonzero(unclear.any(axis=1)):
                places = np.flatnonzero(unclear[line])
                rounded[line, places] = self.of(chosen[line], documents[start + places])
            scores[:, start : start + size] = rounded
        return scores


def ordered(
    scores: np.ndarray, rows: np.ndarray, k: int, ids: Callable[[np.ndarray], Sequence[Any]]
) -> tuple[np.ndarray, np.ndarray]:
    """The k best of each line by score, descending, then by id, ascending; row -1 stands for none and comes last.

    Only ids of documents that tie are asked for.
    """
    order = np.argsort(-scores, axis=1, kind="stable")
    scores, rows = np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)
    equal = (scores[:, 1:] == scores[:, :-1]) & (rows[:, 1:] >= 0)
    lines = np.flatnonzero(equal.any(axis=1))
    if len(lines):
        tied = np.zeros((len(lines), scores.shape[1]), dtype=bool)
        tied[:, 1:] |= equal[lines]
        tied[:, :-1] |= equal[lines]
        known = np.unique(rows[lines][tied])
        ranks = np.zeros(tied.shape, dtype=np.int64)
        ranks[tied] = ranks_of(ids(known))[np.searchsorted(known, rows[lines][tied])]
        order = np.lexsort((ranks, -scores[lines]), axis=1)
        rows[lines] = np.take_along_axis(rows[lines], order, axis=1)
    return scores[:, :k], rows[:, :k]


def ranks_of(ids: Sequence[Any]) -> np.ndarray:
    """The place of each id in the order of all of them."""
    ranks = np.empty(len(ids), dtype=np.int64)
    ranks[sorted(range(len(ids)), key=ids.__getitem__)] = np.arange(len(ids))
    return ranks


def _norms(documents: np.ndarray) -> np.ndarray:
    """Lengths of float64 vectors, 1 for a zero vector, which scores zero then."""
    norms = np.sqrt(np.einsum("nd,nd->n", documents, documents))
    return np.where(norms > 0, norms, 1)
