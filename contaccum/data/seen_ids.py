"""Whether an id occurs twice among any number of them, without holding the ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

# Merging makes a copy: of no more than this, so that it stays small beside all the rest.
_LONGEST_RUN = 2**22


class SeenIds:
    """A set of ids by their 128-bit hashes: 16 bytes an id, 160 MB for ten million.

    Two ids of a hundred million have the same hash with a probability of 1e-23, so what it says is taken as exact.
    """

    def __init__(self) -> None:
        # Hashes in two halves, sorted by the first; each run is at least twice as long as the next.
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, ids: Sequence[str]) -> np.ndarray:
        """Add n ids; returns bool (n,), whether each was there before, or came before among these."""
        raw = b"".join(hashlib.blake2b(name.encode("utf-8"), digest_size=16).digest() for name in ids)
        hashes = np.frombuffer(raw, dtype=np.uint64).reshape(-1, 2)
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: of equal ones the first comes first
        high, low = np.ascontiguousarray(hashes[order, 0]), np.ascontiguousarray(hashes[order, 1])
        seen = np.zeros(len(order), dtype=bool)
        seen[1:] = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
        for known_high, known_low in self._runs:
            places = np.searchsorted(known_high, high)
            candidates = np.flatnonzero(known_high[np.minimum(places, len(known_high) - 1)] == high)
            for row in candidates.tolist():
                end = np.searchsorted(known_high, high[row], side="right")
                seen[row] |= bool((known_low[places[row] : end] == low[row]).any())
        self._insert(high[~seen], low[~seen])
        told = np.empty_like(seen)
        told[order] = seen
        return told

    def _insert(self, high: np.ndarray, low: np.ndarray) -> None:
        if not len(high):
            return
        while self._runs and len(self._runs[-1][0]) <= 2 * len(high) and 2 * len(high) <= _LONGEST_RUN:
            other_high, other_low = self._runs.pop()
            high, low = np.concatenate([other_high, high]), np.concatenate([other_low, low])
            order = np.argsort(high, kind="stable")
            high, low = high[order], low[order]
        self._runs.append((high, low))
