"""Embeddings to be searched, wherever they lie: an array in memory, or a store on disk that memory need not hold.

Rows are read in slices and singly, as float32 and as they are: normalising is left to those who search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from contaccum.errors import ConfigError, UserError
from contaccum.retrieval.store import EmbeddingStore

# Bytes of float32 read at a time: enough for a matrix product to run at full speed, little beside a corpus.
SLICE_BYTES = 2**28


class EmbeddingRows(Protocol):
    """n embeddings of d dimensions, one row per document.

    Attributes:
        in_memory: single rows cost nothing to read, in any order and as often as one likes.
    """

    dim: int
    in_memory: bool

    def __len__(self) -> int: ...

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop - 1, float32 (stop - start, d), not to be written to."""

    def norms(self, start: int, rows: np.ndarray) -> np.ndarray:
        """Lengths (n,) of `rows`, which `slice` gave from `start` on; raises `UserError` as `norms_of` does."""

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """Some rows, ascending and each once where they are not in memory: float32 (len(rows), d)."""

    def ids(self, rows: np.ndarray) -> Sequence[Any]:
        """What orders documents of equal scores, for some rows."""


class ArrayRows:
    """An array (n, d) and the n ids of its rows; without ids, rows are ordered as they are numbered.

    The array is held, not copied: it must not change while it is searched.
    """

    in_memory = True

    def __init__(self, embeddings: np.ndarray, ids: Sequence[str] | None = None) -> None:
        if embeddings.ndim != 2 or not len(embeddings):
            raise ConfigError(f"an index needs embeddings of shape (n, d) with n > 0, not {embeddings.shape}")
        if ids is not None and len(ids) != len(embeddings):
            raise ConfigError(f"{len(ids)} ids for {len(embeddings)} embeddings")
        self.embeddings, self._ids = embeddings, ids
        self._norms: np.ndarray | None = None
        self.dim = embeddings.shape[1]

    def __len__(self) -> int:
        return len(self.embeddings)

    def slice(self, start: int, stop: int) -> np.ndarray:
        return np.ascontiguousarray(self.embeddings[start:stop], dtype=np.float32)

    def norms(self, start: int, rows: np.ndarray) -> np.ndarray:
        if self._norms is None:
            self._norms = np.full(len(self), np.nan, dtype=np.float32)
        known = self._norms[start : start + len(rows)]
        if np.isnan(known).any():
            known[:] = norms_of(rows, "document embedding", start)
        return known

    def gather(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(self.embeddings[rows], dtype=np.float32)

    def ids(self, rows: np.ndarray) -> Sequence[Any]:
        return rows.tolist() if self._ids is None else [self._ids[row] for row in rows.tolist()]


class StoreRows:
    """A store that `contaccum encode` wrote; its ids order documents of equal scores."""

    in_memory = False

    def __init__(self, store: EmbeddingStore) -> None:
        self.store, self.dim = store, store.dim

    def __len__(self) -> int:
        return len(self.store)

    def slice(self, start: int, stop: int) -> np.ndarray:
        return self.store.slice(start, stop)

    def norms(self, start: int, rows: np.ndarray) -> np.ndarray:
        return norms_of(rows, "document embedding", start)

    def gather(self, rows: np.ndarray) -> np.ndarray:
        return self.store.take(rows)

    def ids(self, rows: np.ndarray) -> Sequence[Any]:
        return self.store.ids(rows)


def slices(rows: EmbeddingRows, size: int | None = None) -> Iterator[tuple[int, int]]:
    """(start, stop) of each slice: `size` rows, or as many as `SLICE_BYTES` hold."""
    size = size or max(1, SLICE_BYTES // (4 * rows.dim))
    for start in range(0, len(rows), size):
        yield start, min(start + size, len(rows))


def growing_slices(rows: EmbeddingRows, first: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of slices that hold `first` rows, then as many as all before them, up to those of `slices`."""
    most = max(1, SLICE_BYTES // (4 * rows.dim))
    start, size = 0, min(first, most)
    while start < len(rows):
        yield start, min(start + size, len(rows))
        start += size
        size = min(start, most)


def norms_of(vectors: np.ndarray, what: str, first: int = 0) -> np.ndarray:
    """Lengths of float32 vectors (n, d), in float32.

    Raises:
        UserError: NaN or infinity, or numbers whose squares float32 cannot hold; `what` and the row, counted from
            `first`, name the vector. FAISS answers NaN with row -1 and no word, which would read as a poor model.
    """
    norms = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
    if not np.isfinite(norms).all():
        row = int(np.flatnonzero(~np.isfinite(norms))[0])
        problem = "is too large for float32 scores" if np.isfinite(vectors[row]).all() else "holds NaN or infinity"
        raise UserError(f"{what} {first + row} {problem}")
    return norms


def scale_to_unit(norms: np.ndarray) -> np.ndarray:
    """What vectors of these lengths are multiplied by for "cos"; a zero vector stays zero."""
    return 1 / np.where(norms > 0, norms, 1)


def unit_or_same(vectors: np.ndarray, norms: np.ndarray, metric: str, out: np.ndarray | None = None) -> np.ndarray:
    """What an inner product compares: for "cos" a copy scaled to length 1.

    Args:
        out: float32 of at least that shape, for the copy: fresh memory costs more than the scaling.
    """
    if metric == "dot":
        return vectors
    return np.multiply(vectors, scale_to_unit(norms)[:, None], out=None if out is None else out[: len(vectors)])
