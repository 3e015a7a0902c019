"""Slices of a corpus searched on the CPU: the best of a slice by FAISS, or all that reach a bound by matrix products.

Scores are float32 and as exact as that allows; which are needed, and their order, is decided in `exact`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

# Fewer queries than this are not worth a thread of their own.
_QUERIES_PER_THREAD = 64
# Scores that a thread computes at a time: 32 MB.
_SCORES = 2**23
# Documents prepared at a time: of 384 dimensions, less than a megabyte.
_CHUNK = 512
# Rounding to eight bits.
BFLOAT16 = 2.0**-8


class Pairs(NamedTuple):
    """m pairs: numbers of queries, places of documents, and scores, each (m,); and a bound on the error per query (q,).

    Scores that were rounded to bfloat16 are off by `BFLOAT16` of themselves besides.
    """

    queries: np.ndarray
    places: np.ndarray
    scores: np.ndarray
    error: np.ndarray


class CpuSlices:
    """Implements `exact.SliceSearch`. Work is shared out to as many threads as FAISS would use.

    FAISS itself lets all threads work on each small block and wait for each other, which takes twice the CPU time, and
    many times the wall time on a machine that has other work to do.
    """

    max_fetch: int | None = None
    slice_rows: int | None = None

    def margin(self, k: int) -> int:
        return max(8, k // 8)

    def error(self, dimension: int) -> tuple[float, float]:
        # A sum of d products in any order, its terms' rounding, and that of vectors scaled to length 1.
        return (dimension + 16) * 2.0**-24, 0.0

    def search(self, documents: np.ndarray, first: int, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        groups = max(1, min(threads(), len(queries) // _QUERIES_PER_THREAD))
        with _matrix_products(queries.shape[1]):
            if groups == 1:
                return _best_products(documents, k, queries)
            each = threads() // groups
            with ThreadPoolExecutor(groups, initializer=_use_threads, initargs=(each,)) as pool:
                parts = list(pool.map(partial(_best_products, documents, k), np.array_split(queries, groups)))
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def above(
        self,
        documents: np.ndarray,
        queries: np.ndarray,
        bound: np.ndarray,
        most: int,
        rounded: bool = False,
        scale: np.ndarray | None = None,
    ) -> Pairs | None:
        """All pairs whose true score may be `bound` (q,) or more; None where that cannot be said, or for too many.

        Args:
            scale: what each document (n,) is to be multiplied by.
            most: pairs to find at the most.
            rounded: multiply in bfloat16, which processors with instructions for it do several times as fast. The bound
                on the error is that of the vectors at hand.
        """
        import torch

        if not rounded and torch.get_float32_matmul_precision() != "highest":
            return None  # somebody traded precision for speed, and the bound on the error would not hold
        finder = _Finder(queries, bound, most, min(len(documents), max(256, _SCORES // len(queries))), rounded)
        starts = range(0, len(documents), finder.size)
        with _one_thread_each(threads()) as pool:
            parts = list(pool.map(lambda start: finder.find(documents, start, scale), starts))
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            return None
        numbers, places, scores = (np.concatenate([part[column] for part in whole]) for column in range(3))
        return Pairs(numbers, places, scores, np.max([part.error for part in whole], axis=0))


class _Finder:
    """`CpuSlices.above` for blocks of documents, each by the thread that comes to it."""

    def __init__(self, queries: np.ndarray, bound: np.ndarray, most: int, size: int, rounded: bool) -> None:
        import torch

        self.bound, self.most, self.size, self.rounded = bound, most, size, rounded
        self.found = 0
        self.own = threading.local()
        exact = torch.from_numpy(queries)
        self.dtype = torch.bfloat16 if rounded else torch.float32
        self.queries = exact.to(self.dtype)
        self.lengths = exact.norm(dim=1).numpy()
        self.residues = (exact - self.queries.float()).norm(dim=1).numpy()

    def find(self, documents: np.ndarray, start: int, scale: np.ndarray | None) -> Pairs | None:
        import torch

        if self.found > self.most:
            return None
        documents = documents[start : start + self.size]
        if not hasattr(self.own, "scores"):
            self.own.scores = torch.empty(len(self.queries) * self.size, dtype=self.dtype)
            self.own.reached = np.empty(len(self.queries) * self.size, dtype=bool)
            self.own.block = torch.empty(self.size, documents.shape[1], dtype=self.dtype)
            self.own.scaled = torch.empty(_CHUNK, documents.shape[1])
            self.own.residue = torch.empty(_CHUNK, documents.shape[1])
        block, longest, residue = self._block(documents, None if scale is None else scale[start : start + self.size])
        # Of the sum; for rounded vectors also what is missing of either, times the other. A hundredth for these norms.
        error = (documents.shape[1] + 16) * 2.0**-24 * self.lengths * longest
        if self.rounded:
            error = 1.01 * (error + self.residues * (longest + residue) + self.lengths * residue)
        width, count = len(block), len(self.queries)
        scores = self.own.scores[: count * width].view(count, width)
        torch.mm(self.queries, block.T, out=scores)
        reached = self.own.reached[: count * width].reshape(count, width)
        least = (self.bound - error).astype(np.float32)
        least = np.nextafter(least, np.float32(-np.inf))
        if self.rounded:
            # The upper half of a float32 is the bfloat16 below it, and rounding keeps scores on their side of that.
            # Compared as whole numbers, which have the order of positive numbers alone.
            if not (least > 0).all():
                return None
            halves = (least.view(np.int32) >> 16).astype(np.int16)
            np.greater_equal(scores.view(torch.int16).numpy(), halves[:, None], out=reached)
        else:
            np.greater_equal(scores.numpy(), least[:, None], out=reached)
        places = np.flatnonzero(reached)
        # Threads may lose a count: it bounds memory, and decides no result.
        self.found += len(places)
        if self.found > self.most:
            return None
        chosen = scores.view(-1)[torch.from_numpy(places)].float().numpy()
        return Pairs(places // width, places % width + start, chosen, error)

    def _block(self, documents: np.ndarray, scale: np.ndarray | None) -> tuple[Any, float, float]:
        """Documents as they are multiplied; the longest of them, and the most that rounding took from one.

        In chunks that the processor's cache holds: a scaled copy of all would be written out and read again.
        """
        import torch

        block, longest, residue = self.own.block[: len(documents)], 0.0 if scale is None else 1.0, 0.0
        for start in range(0, len(documents), _CHUNK):
            chunk = torch.from_numpy(documents[start : start + _CHUNK])
            if scale is not None:
                factors = torch.from_numpy(scale[start : start + _CHUNK, None])
                chunk = torch.mul(chunk, factors, out=self.own.scaled[: len(chunk)])
            else:
                longest = max(longest, float(chunk.norm(dim=1).max()))
            part = block[start : start + _CHUNK].copy_(chunk)
            if self.rounded:
                missing = self.own.residue[: len(chunk)].copy_(part).sub_(chunk)
                residue = max(residue, float(missing.norm(dim=1).max()))
        return block, longest, residue


@lru_cache(1)
def rounding_pays() -> bool:
    """Whether this machine multiplies bfloat16 at least twice as fast as float32; tried once. Decides no result."""
    import torch

    def best(dtype: torch.dtype) -> float:
        left, right = torch.ones(256, 384, dtype=dtype), torch.ones(4096, 384, dtype=dtype)
        seconds = []
        for _ in range(5):
            started = time.thread_time()
            torch.mm(left, right.T)
            seconds.append(time.thread_time() - started)
        return min(seconds)

    with _one_thread_each(1) as pool:
        return pool.submit(best, torch.float32).result() > 2 * pool.submit(best, torch.bfloat16).result()


@contextmanager
def _one_thread_each(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Workers that each run torch on a single thread; the setting is put back afterwards."""
    import torch

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        # The setting of a thread is also the default of threads that start later.
        torch.set_num_threads(before)


def threads() -> int:
    """Those that FAISS uses, so that one setting (OMP_NUM_THREADS) is for both."""
    import faiss

    return faiss.omp_get_max_threads()


def _use_threads(number: int) -> None:
    """Of FAISS, in the thread that calls this."""
    import faiss

    faiss.omp_set_num_threads(number)


def _best_products(documents: np.ndarray, k: int, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    import faiss

    return faiss.knn(queries, documents, k, faiss.METRIC_INNER_PRODUCT)


@contextmanager
def _matrix_products(dimension: int) -> Iterator[None]:
    """Let FAISS multiply matrices from eight queries on.

    FAISS 1.15 takes the products one by one below 128,000 numbers (333 queries of 384 dimensions), at a fifteenth of
    the speed. Before, its bound was twenty queries.
    """
    import faiss

    before = faiss.cvar.distance_compute_blas_threshold
    faiss.cvar.distance_compute_blas_threshold = min(before, 8 * dimension)
    try:
        yield
    finally:
        faiss.cvar.distance_compute_blas_threshold = before
