"""Exact search by FAISS over an array or a store of any size, slice by slice, with equal scores in the order of ids.

Matrix products only find candidates: their last bits depend on where a document lies in a slice. The scores that count
are summed pair by pair, so that slices, threads and batches decide neither them nor the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import numpy as np

from contaccum.errors import ConfigError, UserError
from contaccum.retrieval.store import EmbeddingStore

Metric = Literal["cos", "dot"]

# Rows of float32 searched at a time: enough for products to run at full speed, little beside a corpus.
SLICE_BYTES = 2**28
# FAISS keeps its top k on a GPU in shared memory, which bounds k.
GPU_MAX_K = 2048
# Candidates (float32 and int64) of the queries that are searched together: half a gigabyte.
_HELD = 2**25
# Fewer are not worth a thread of their own.
_QUERIES_PER_THREAD = 64


class ArrayRows:
    """An array (N, d) to be searched like a store; held without a copy. Without `ids`, row numbers are the ids."""

    def __init__(self, embeddings: np.ndarray, ids: Sequence[str] | None = None) -> None:
        if embeddings.ndim != 2 or not len(embeddings):
            raise ConfigError(f"an index needs embeddings of shape (n, d) with n > 0, not {embeddings.shape}")
        if ids is not None and len(ids) != len(embeddings):
            raise ConfigError(f"{len(ids)} ids for {len(embeddings)} embeddings")
        self.embeddings, self._ids, self.dim = embeddings, ids, embeddings.shape[1]

    def __len__(self) -> int:
        return len(self.embeddings)

    def slice(self, start: int, stop: int) -> np.ndarray:
        return np.ascontiguousarray(self.embeddings[start:stop], dtype=np.float32)

    def take(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(self.embeddings[rows], dtype=np.float32)

    def ids(self, rows: np.ndarray) -> list[Any]:
        return rows.tolist() if self._ids is None else [self._ids[row] for row in rows.tolist()]


Rows = ArrayRows | EmbeddingStore


def exact_search(
    corpus: Rows,
    queries: np.ndarray,
    k: int,
    metric: Metric = "cos",
    gpu: Any = None,
    slice_rows: int | None = None,
    on_slice: Callable[[int], object] = lambda rows: None,
) -> tuple[np.ndarray, np.ndarray]:
    """The k best rows of each query (n, d): scores float32 and rows int64, both (n, min(k, N)).

    Ordered by score, descending, then by id, ascending, at the k-th place too. Memory holds a slice and some 3 k
    candidates for each query.

    Args:
        gpu: FAISS's cloner options, to search slices on GPUs; see `index.find_gpus`.
        slice_rows: rows read at a time; by default 256 MB of them.
        on_slice: called with the number of rows of each slice that was searched, for each batch of queries.

    Raises:
        UserError: NaN or infinity in a query or a document, or vectors too long for float32 scores.
    """
    k = min(k, len(corpus))
    scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
    rows = np.full((len(queries), k), -1, dtype=np.int64)
    size = slice_rows or max(1, SLICE_BYTES // (4 * corpus.dim))
    together = max(1, _HELD // (3 * k))
    # What a product and the sum of a pair may differ by, relative to |query| |document|; a GPU may hold eleven bits.
    relative = (corpus.dim + 16) * 2.0**-23 + (2.0**-9 if gpu is not None and gpu.useFloat16 else 0)
    # Fresh memory for every slice would cost more than what is written to it.
    buffer = np.empty((min(size, len(corpus)) if metric == "cos" else 0, corpus.dim), dtype=np.float32)
    for first in range(0, len(queries), together):
        part = slice(first, first + together)
        batch, lengths = prepared(queries[part], metric, "query embedding", first)
        for start in range(0, len(corpus), size):
            stop = min(start + size, len(corpus))
            documents, norms = prepared(corpus.slice(start, stop), metric, "document embedding", start, buffer)
            one = _Slice(corpus, start, documents, gpu)
            found, found_rows = one.best(batch, k, scores[part, -1], relative * lengths * norms.max())
            both = np.concatenate([scores[part], found], axis=1)
            both_rows = np.concatenate([rows[part], found_rows], axis=1)
            scores[part], rows[part] = ordered(both, both_rows, k, corpus.ids)
            on_slice(stop - start)
    return scores, rows


class _Slice:
    """Documents `start` and on of a corpus, prepared, in memory."""

    def __init__(self, corpus: Rows, start: int, documents: np.ndarray, gpu: Any) -> None:
        self.corpus, self.start, self.documents, self.gpu = corpus, start, documents, gpu
        self._ranks: np.ndarray | None = None

    def best(self, queries: np.ndarray, k: int, least: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scores and rows (n, f), row -1 for none, among which are all that may be among the k best of the corpus.

        Args:
            least: (n,), the k-th best score so far: nothing below it is looked for.
            error: (n,), how far products may be off.
        """
        fetch = min(k + max(8, k // 8), len(self.documents))
        products, places = self._products(queries, fetch)
        inside = products >= (least - error)[:, None]
        # Best first: of what is too low nothing is scored again, and after the first slices that is most of it.
        width = max(1, int(inside.sum(axis=1).max()))
        places = np.where(inside, places, -1)[:, :width]
        scores = self._scores(queries, places)
        if width == fetch < len(self.documents):
            # What was not fetched scores products[:, -1] + error at the most. Where that may be among the k best (many
            # documents alike, as of an encoder that has collapsed), all of the slice is looked at.
            bound = np.maximum(least, np.partition(scores, fetch - k, axis=1)[:, fetch - k])
            for line in np.flatnonzero(products[:, -1] + error >= bound).tolist():
                found, found_places = self._all_above(queries[line : line + 1], k, bound[line] - error[line])
                scores[line], places[line] = -np.inf, -1
                scores[line, : len(found)], places[line, : len(found)] = found, found_places
        return scores, np.where(places >= 0, places + self.start, -1)

    def _products(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores and places (n, k) of the best by matrix products."""
        import faiss

        if self.gpu is not None and k <= GPU_MAX_K:
            index = faiss.IndexFlatIP(self.documents.shape[1])
            index.add(self.documents)
            return faiss.index_cpu_to_all_gpus(index, co=self.gpu).search(queries, k)
        # Threads that share a block of FAISS's wait for each other at each: a group of queries for each takes half the
        # CPU time, and on a busy machine a fraction of the wall time.
        threads = faiss.omp_get_max_threads()
        groups = max(1, min(threads, len(queries) // _QUERIES_PER_THREAD))
        # FAISS 1.15 takes products one by one below 333 queries of 384 dimensions, at a fifteenth of the speed.
        before = faiss.cvar.distance_compute_blas_threshold
        faiss.cvar.distance_compute_blas_threshold = min(before, 8 * queries.shape[1])
        try:
            each = partial(faiss.omp_set_num_threads, threads // groups)
            with ThreadPoolExecutor(groups, initializer=each) as pool:
                knn = partial(faiss.knn, xb=self.documents, k=k, metric=faiss.METRIC_INNER_PRODUCT)
                parts = list(pool.map(knn, np.array_split(queries, groups)))
        finally:
            faiss.cvar.distance_compute_blas_threshold = before
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def _scores(self, queries: np.ndarray, places: np.ndarray) -> np.ndarray:
        """float32 (n, f) of query i and the documents places[i], each pair summed by itself; -inf for place -1.

        By the C++ function: what FAISS has for Python takes the documents from a copy inside an index alone.
        """
        import faiss

        places = np.ascontiguousarray(places, dtype=np.int64)
        scores = np.empty(places.shape, dtype=np.float32)
        pointers = [faiss.swig_ptr(array) for array in (scores, queries, self.documents, places)]
        by_idx: Any = getattr(faiss, "fvec_inner_products_by_idx")  # noqa: B009  # FAISS's stubs lack it
        by_idx(*pointers, queries.shape[1], len(queries), places.shape[1])
        return scores

    def _all_above(self, query: np.ndarray, k: int, bound: float) -> tuple[np.ndarray, np.ndarray]:
        """The k best scores and places of one query (1, d), however many documents are equally good."""
        close = np.flatnonzero(self.documents @ query[0] >= bound)
        scores = self._scores(query, close[None])[0]
        if self._ranks is None:
            self._ranks = _ranks(self.corpus.ids(np.arange(self.start, self.start + len(self.documents))))
        best = np.lexsort((self._ranks[close], -scores))[:k]
        return scores[best], close[best]


def prepared(
    vectors: np.ndarray, metric: Metric, what: str, first: int = 0, out: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """float32, C-contiguous, for "cos" a copy of length 1 (a zero vector stays zero); and the lengths (n,) of these.

    Args:
        what, first: name a vector in errors, and the row of the first one.
        out: memory of at least that shape for the copy.

    Raises:
        UserError: NaN, infinity, or squares beyond float32. FAISS answers NaN with row -1 and no word, which would read
            as a poor model.
    """
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    norms = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
    if not np.isfinite(norms).all():
        row = int(np.flatnonzero(~np.isfinite(norms))[0])
        problem = "is too large for float32 scores" if np.isfinite(vectors[row]).all() else "holds NaN or infinity"
        raise UserError(f"{what} {first + row} {problem}")
    if metric == "dot":
        return vectors, norms
    unit = np.where(norms > 0, norms, 1)[:, None]
    return np.divide(vectors, unit, out=None if out is None else out[: len(vectors)]), np.ones_like(norms)


def ordered(
    scores: np.ndarray, rows: np.ndarray, k: int, ids: Callable[[np.ndarray], Sequence[Any]]
) -> tuple[np.ndarray, np.ndarray]:
    """The k best of each line by score, descending, then by id, ascending; row -1 stands for none and comes last.

    Only ids of documents that tie are asked for.
    """
    order = np.argsort(-scores, axis=1)
    scores, rows = np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)
    equal = (scores[:, 1:] == scores[:, :-1]) & (rows[:, 1:] >= 0)
    lines = np.flatnonzero(equal.any(axis=1))
    if len(lines):
        tied = np.zeros((len(lines), scores.shape[1]), dtype=bool)
        tied[:, 1:] |= equal[lines]
        tied[:, :-1] |= equal[lines]
        known = np.unique(rows[lines][tied])
        ranks = np.zeros(tied.shape, dtype=np.int64)
        ranks[tied] = _ranks(ids(known))[np.searchsorted(known, rows[lines][tied])]
        rows[lines] = np.take_along_axis(rows[lines], np.lexsort((ranks, -scores[lines]), axis=1), axis=1)
    return scores[:, :k], rows[:, :k]


def _ranks(ids: Sequence[Any]) -> np.ndarray:
    """The place of each id in the order of all of them."""
    ranks = np.empty(len(ids), dtype=np.int64)
    ranks[sorted(range(len(ids)), key=ids.__getitem__)] = np.arange(len(ids))
    return ranks
