"""Exact search with FAISS in embeddings of any number, slice by slice, on the CPU or on GPUs.

An array or a store is searched where it is, and no index is built. A slice is a number of rows that
fits into `SLICE_BYTES` as float32. The k best documents of each query so far are held in a FAISS
`ResultHeap`, to which the results of every slice are added. The order of documents with equal
scores is decided in `index`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from contaccum.errors import UserError
from contaccum.retrieval.encode import Similarity
from contaccum.retrieval.store import EmbeddingStore

# Bytes of float32 rows that are searched at a time: enough for matrix products to run at full
# speed, and little memory compared with a corpus.
SLICE_BYTES = 2**28
# On a GPU, FAISS keeps the k best results in the GPU's shared memory, which limits k.
_MAX_K_ON_GPU = 2048
# A thread with fewer queries costs more than it gains.
_MIN_QUERIES_PER_THREAD = 64
# Limits the memory for the results of a slice before they are merged.
_MAX_QUERIES_PER_GROUP = 4096

Embeddings = np.ndarray | EmbeddingStore
"""Types of embeddings (N, d) that can be searched; slices of them are float32."""


def search_slices(
    corpus: Embeddings,
    queries: np.ndarray,
    k: int,
    metric: Similarity,
    gpus: Sequence[int] = (),
    show_progress: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Find the k best documents of n queries exactly. Documents with equal scores are in any order.

    Args:
        corpus: embeddings (N, d) of the documents.
        queries: the result of `prepare_vectors`, (n, d).
        k: number of documents per query, at most N.
        metric: "cos" or "dot".
        gpus: numbers of the GPUs that search; the CPU searches if there are none, or if k is too
            large for them.
        show_progress: show a progress bar over the slices.

    Returns:
        Scores, float32 (n, k), descending, and rows, int64 (n, k).

    Raises:
        UserError: a vector of the corpus holds NaN or infinity.
    """
    import faiss
    from tqdm.auto import tqdm

    num_rows, dimension = corpus.shape
    if k > _MAX_K_ON_GPU:
        gpus = ()
    # FAISS's threads wait for each other after every block of a product. One thread per group of
    # queries needs half the CPU time, and on a busy machine a fraction of the wall time.
    num_threads = faiss.omp_get_max_threads()
    num_workers = 1
    if not gpus:
        num_workers = max(1, min(num_threads, len(queries) // _MIN_QUERIES_PER_THREAD))
    num_groups = max(num_workers, math.ceil(len(queries) / _MAX_QUERIES_PER_GROUP))
    query_groups = np.array_split(queries, num_groups)
    heaps = [faiss.ResultHeap(len(group), k, keep_max=True) for group in query_groups]

    slice_size = min(compute_slice_size(dimension), num_rows)
    buffer = None
    if metric == "cos":
        # Reused, because allocating memory for every slice costs more than writing to it.
        buffer = np.empty((slice_size, dimension), dtype=np.float32)
    workers = ThreadPoolExecutor(
        num_workers,
        initializer=faiss.omp_set_num_threads,
        initargs=(num_threads // num_workers,),
    )
    with _use_blas(dimension), workers:
        slices = _list_slices(corpus, slice_size)
        for rows in tqdm(slices, desc="Searching", disable=not show_progress):
            start = rows.start
            documents = prepare_vectors(corpus[rows], metric, "document embedding", start, buffer)
            search_slice = _make_slice_search(documents, gpus)
            add_results = partial(_add_results, search_slice, start, min(k, len(documents)))
            # list() waits for all groups, and raises the error of a group that failed.
            list(workers.map(add_results, query_groups, heaps))
    for heap in heaps:
        heap.finalize()
    return np.concatenate([heap.D for heap in heaps]), np.concatenate([heap.I for heap in heaps])


def _list_slices(corpus: Embeddings, size: int) -> list[slice]:
    """Return the slices to search, of at most ``size`` rows.

    A slice of a store never crosses the border of a shard, so that it is read from one file.
    """
    num_rows = len(corpus)
    shard_size = num_rows
    if isinstance(corpus, EmbeddingStore):
        shard_size = corpus.shard_size
    slices = []
    for shard_start in range(0, num_rows, shard_size):
        shard_end = min(shard_start + shard_size, num_rows)
        for start in range(shard_start, shard_end, size):
            slices.append(slice(start, min(start + size, shard_end)))
    return slices


@contextmanager
def _use_blas(dimension: int) -> Iterator[None]:
    """Make FAISS use BLAS for 8 queries or more, and restore its threshold afterwards.

    By default, FAISS uses BLAS only if queries x dimensions reach 128,000. Below that, products are
    computed one by one, which takes up to ten times as long.
    """
    import faiss

    threshold = faiss.cvar.distance_compute_blas_threshold
    faiss.cvar.distance_compute_blas_threshold = 8 * dimension
    try:
        yield
    finally:
        faiss.cvar.distance_compute_blas_threshold = threshold


def _make_slice_search(documents: np.ndarray, gpus: Sequence[int]) -> Callable[..., Any]:
    """Return a function that searches documents, float32 (b, d), by inner product.

    The function has the arguments (queries, k) and returns scores and rows in the slice, (n, k).
    """
    import faiss

    if gpus:
        flat_index = faiss.IndexFlatIP(documents.shape[1])
        flat_index.add(documents)
        return faiss.index_cpu_to_gpus_list(flat_index, gpus=list(gpus)).search
    return partial(faiss.knn, xb=documents, metric=faiss.METRIC_INNER_PRODUCT)


def _add_results(
    search_slice: Callable[..., Any], start: int, k: int, queries: np.ndarray, heap: Any
) -> None:
    """Search a slice that begins at row ``start`` and merge the results into a heap."""
    scores, rows = search_slice(queries, k=k)
    heap.add_result(scores, rows + start)


def prepare_vectors(
    vectors: np.ndarray,
    metric: Similarity,
    description: str,
    first_row: int = 0,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Convert vectors to contiguous float32; L2-normalise a copy if the metric is "cos".

    A zero vector stays zero.

    Args:
        vectors: (n, d).
        metric: "cos" or "dot".
        description: name of a vector in errors, such as "query embedding".
        first_row: number of the first vector in errors.
        out: array for the normalised copy, at least (n, d).

    Returns:
        float32 (n, d).

    Raises:
        UserError: a vector or its squares hold NaN or infinity. FAISS would return row -1 for such
            a vector without an error, which would look like a poor model.
    """
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    norms = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
    is_finite = np.isfinite(norms)
    if not is_finite.all():
        row = first_row + int(np.flatnonzero(~is_finite)[0])
        raise UserError(
            f"{description} {row} holds NaN, infinity or numbers too large for float32 scores "
            "(check the model's weights and precision)"
        )
    if metric == "dot":
        return vectors
    divisors = np.where(norms > 0, norms, 1)[:, None]
    if out is not None:
        out = out[: len(vectors)]
    return np.divide(vectors, divisors, out=out)


def compute_slice_size(dimension: int) -> int:
    """Return the number of float32 rows in a slice."""
    return max(1, SLICE_BYTES // (4 * dimension))
