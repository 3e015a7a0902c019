"""Exact search in embeddings of any number, slice by slice: by FAISS on the CPU, by torch on GPUs.

An array or a store is searched where it is, and no index is built. On the CPU, a slice is a number
of rows that fits into `SLICE_BYTES` as float32. The k best documents of each query so far are held
in a FAISS `ResultHeap`, to which the results of every slice are added. On GPUs, the embeddings stay
in their memory if they have room (see `device_blocks`). The order of documents with equal scores is
decided in `index`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contaccum.bank.full_softmax import multiply, without_tf32
from contaccum.errors import UserError
from contaccum.retrieval.device_blocks import DeviceEmbeddings, Embeddings
from contaccum.retrieval.encode import Similarity
from contaccum.retrieval.store import EmbeddingStore

# Bytes of float32 rows that are searched at a time: enough for matrix products to run at full
# speed, and little memory compared with a corpus.
SLICE_BYTES = 2**28
# A thread with fewer queries costs more than it gains.
_MIN_QUERIES_PER_THREAD = 64
# Limits the memory for the results of a slice before they are merged.
_MAX_QUERIES_PER_GROUP = 4096
# The same on a GPU, and the scores that are computed at once: 512 MB in float32.
_MAX_QUERIES_PER_GROUP_ON_GPU = 1024
_MAX_SCORES_ON_GPU = 2**27


def search_slices(
    corpus: Embeddings,
    queries: np.ndarray,
    k: int,
    metric: Similarity,
    show_progress: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Find the k best documents of n queries exactly, on the CPU.

    Documents with equal scores are in any order.

    Args:
        corpus: embeddings (N, d) of the documents.
        queries: the result of `prepare_vectors`, (n, d).
        k: number of documents per query, at most N.
        metric: "cos" or "dot".
        show_progress: show a progress bar over the slices.

    Returns:
        Scores, float32 (n, k), descending, and rows, int64 (n, k).

    Raises:
        UserError: a vector of the corpus holds NaN or infinity.
    """
    import faiss
    from tqdm.auto import tqdm

    num_rows, dimension = corpus.shape
    # FAISS's threads wait for each other after every block of a product. One thread per group of
    # queries needs half the CPU time, and on a busy machine a fraction of the wall time.
    num_threads = faiss.omp_get_max_threads()
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
            add_results = partial(_add_results, documents, start, min(k, len(documents)))
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


def _add_results(documents: np.ndarray, start: int, k: int, queries: np.ndarray, heap: Any) -> None:
    """Search a slice of documents, float32 (b, d), that begins at row ``start``.

    The results are merged into a heap.
    """
    import faiss

    scores, rows = faiss.knn(queries, documents, k, metric=faiss.METRIC_INNER_PRODUCT)
    heap.add_result(scores, rows + start)


class GpuSearch:
    """Exact search by torch. Each device searches its part of the embeddings.

    Args:
        corpus: embeddings (N, d) of the documents.
        metric: "cos" or "dot".
        devices: the GPUs; the same program also runs on a CPU.
    """

    def __init__(
        self, corpus: Embeddings, metric: Similarity, devices: Sequence[torch.device]
    ) -> None:
        self._has_scales = metric == "cos"
        self._is_checked = False
        self._parts = []
        for number, device in enumerate(devices):
            first_row = len(corpus) * number // len(devices)
            end_row = len(corpus) * (number + 1) // len(devices)
            self._parts.append(DeviceEmbeddings(corpus, device, first_row, end_row))

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the k best documents of n queries; `search_slices` describes arguments and result.

        Raises:
            UserError: a vector of the corpus holds NaN or infinity.
            torch.OutOfMemoryError: a GPU has no memory for the scores of a slice.
        """
        with torch.inference_mode(), without_tf32():
            self._check()
            results = [self._search_part(part, queries, k) for part in self._parts]
            # All devices are at work before the first result is waited for.
            scores = torch.cat([scores.cpu() for scores, _ in results], 1)
            rows = torch.cat([rows.cpu() for _, rows in results], 1)
            scores, rows = _select_best(scores, rows, k)
        return scores.numpy(), rows.numpy()

    def _check(self) -> None:
        """Refuse vectors as `prepare_vectors` does, before the first search."""
        if self._is_checked:
            return
        for part in self._parts:
            is_finite = part.norms().isfinite().cpu()
            if not is_finite.all():
                row = part.first_row + int((~is_finite).nonzero()[0])
                raise _make_vector_error("document embedding", row)
        self._is_checked = True

    def _search_part(
        self, part: DeviceEmbeddings, queries: np.ndarray, k: int
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and rows, (n, k), of the best documents of a part, on its device."""
        all_queries = torch.from_numpy(queries).to(part.device)
        groups = all_queries.split(_MAX_QUERIES_PER_GROUP_ON_GPU)
        num_documents = max(1, _MAX_SCORES_ON_GPU // len(groups[0]))
        best_scores = [queries.new_empty(len(queries), 0) for queries in groups]
        best_rows = [scores.long() for scores in best_scores]
        for block in part.blocks(self._has_scales):
            for documents in block.split(num_documents):
                for number, group in enumerate(groups):
                    scores = multiply(group, documents.documents.T)
                    if documents.scales is not None:
                        scores *= documents.scales
                    scores, rows = scores.topk(min(k, scores.shape[1]))
                    scores = torch.cat([best_scores[number], scores], 1)
                    rows = torch.cat([best_rows[number], rows + documents.first], 1)
                    best_scores[number], best_rows[number] = _select_best(scores, rows, k)
        return torch.cat(best_scores), torch.cat(best_rows)


def _select_best(scores: Tensor, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best of scores (n, m) and their rows, by descending score."""
    best = scores.topk(min(k, scores.shape[1]))
    return best.values, rows.gather(1, best.indices)


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
        raise _make_vector_error(description, first_row + int(np.flatnonzero(~is_finite)[0]))
    if metric == "dot":
        return vectors
    divisors = np.where(norms > 0, norms, 1)[:, None]
    if out is not None:
        out = out[: len(vectors)]
    return np.divide(vectors, divisors, out=out)


def _make_vector_error(description: str, row: int) -> UserError:
    return UserError(
        f"{description} {row} holds NaN, infinity or numbers too large for float32 scores "
        "(check the model's weights and precision)"
    )


def compute_slice_size(dimension: int) -> int:
    """Return the number of float32 rows in a slice."""
    return max(1, SLICE_BYTES // (4 * dimension))
