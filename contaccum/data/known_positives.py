"""Queries that have several positives: all their (query, positive) pairs, as hashes of the texts.

It finds them among all pairs of a data set and looks them up. Masking by them is the loss's affair (`duplicates`).
"""

from __future__ import annotations

import numpy as np

_ODD = np.uint64(0x9E3779B97F4A7C15)


def count_distinct(queries: np.ndarray, positives: np.ndarray) -> int:
    """How many of (query, positive) pairs are different, int64 hashes (r,) each."""
    if len(queries) == 0:
        return 0
    keys = queries.view(np.uint64) * _ODD
    keys ^= keys >> np.uint64(32)
    keys += positives.view(np.uint64)
    keys.sort()
    return 1 + int(np.count_nonzero(keys[1:] != keys[:-1]))


def several_positives(queries: np.ndarray, positives: np.ndarray) -> np.ndarray:
    """The pairs of all queries that have more than one positive, each pair once: int64 (r, 2), sorted.

    Args:
        queries, positives: int64 hashes of a query's and a positive's text for every pair of a data set.
    """
    order = np.argsort(queries)
    ordered, others = queries[order], positives[order]
    del order
    # Within a query's run some neighbours differ if and only if not all are the same.
    differ = (ordered[1:] == ordered[:-1]) & (others[1:] != others[:-1])
    several = np.unique(ordered[1:][differ])
    if len(several) == 0:
        return np.empty((0, 2), dtype=np.int64)
    chosen = several[np.searchsorted(several, ordered).clip(max=len(several) - 1)] == ordered
    ordered, others = ordered[chosen], others[chosen]
    order = np.lexsort((others, ordered))
    pairs = np.stack([ordered[order], others[order]], axis=1)
    first = np.ones(len(pairs), dtype=bool)
    first[1:] = (pairs[1:] != pairs[:-1]).any(axis=1)
    return pairs[first]


def positives_of(query: int, known: np.ndarray | None) -> list[int]:
    """The known positives of a query, by hash; none where it has one alone, which then is not in ``known``."""
    if known is None:
        return []
    queries = known[:, 0]
    low, high = np.searchsorted(queries, query), np.searchsorted(queries, query, side="right")
    return known[low:high, 1].tolist()
