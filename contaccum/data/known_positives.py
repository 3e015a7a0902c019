"""Queries that have several positives: all their (query, positive) pairs, as hashes of the texts.

It finds them among all pairs of a data set and looks them up. Masking by them is the loss's affair (`duplicates`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ODD = np.uint64(0x9E3779B97F4A7C15)


def count_distinct(queries: np.ndarray, positives: np.ndarray) -> int:
    """How many of (query, positive) pairs are different, int64 hashes (r,) each."""
    if len(queries) == 0:
        return 0
    keys = queries.view(np.uint64) * _ODD
    for start in range(0, len(keys), 1 << 20):
        keys[start : start + (1 << 20)] ^= keys[start : start + (1 << 20)] >> np.uint64(32)
    keys += positives.view(np.uint64)
    keys.sort()
    return 1 + int(np.count_nonzero(keys[1:] != keys[:-1]))


def several_positives(queries: np.ndarray, positives: np.ndarray) -> np.ndarray:
    """The pairs of all queries that have more than one positive, each pair once: int64 (r, 2), sorted.

    Args:
        queries, positives: int64 hashes of a query's and a positive's text for every pair of a data set.
    """
    ordered = np.sort(queries)
    again = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    if len(again) == 0:
        return np.empty((0, 2), dtype=np.int64)
    rows = np.flatnonzero(among(queries, again))
    queries, positives = (queries, positives) if len(rows) == len(queries) else (queries[rows], positives[rows])
    del rows
    order = np.lexsort((positives, queries))
    pairs = np.empty((len(order), 2), dtype=np.int64)
    pairs[:, 0], pairs[:, 1] = queries[order], positives[order]
    del order
    same_query = pairs[1:, 0] == pairs[:-1, 0]
    other_pair = ~(same_query & (pairs[1:, 1] == pairs[:-1, 1]))
    # With each pair once, a query has several positives if its pair has a neighbour of the same query.
    chosen = np.concatenate([[True], other_pair])[: len(pairs)]
    pairs = pairs if chosen.all() else pairs[chosen]
    same_query = pairs[1:, 0] == pairs[:-1, 0]
    several = np.zeros(len(pairs), dtype=bool)
    several[1:] |= same_query
    several[:-1] |= same_query
    return pairs if several.all() else pairs[several]


def shared_queries(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Queries that occur in several data sets, int64 (s,) in order: hashes (N,) of the queries of each one's rows."""
    once = np.sort(np.concatenate([np.unique(part) for part in parts]))
    return np.unique(once[1:][once[1:] == once[:-1]])


def among(values: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Which values are in an ordered array: bool, a piece at a time, because places take eight times the memory."""
    found = np.empty(len(values), dtype=bool)
    for start in range(0, len(values), 1 << 20):
        piece = values[start : start + (1 << 20)]
        found[start : start + len(piece)] = ordered[np.searchsorted(ordered, piece).clip(max=len(ordered) - 1)] == piece
    return found


def positives_of(query: int, known: np.ndarray | None) -> list[int]:
    """The known positives of a query, by hash; none where it has one alone, which then is not in ``known``."""
    if known is None:
        return []
    queries = known[:, 0]
    low, high = np.searchsorted(queries, query), np.searchsorted(queries, query, side="right")
    return known[low:high, 1].tolist()
