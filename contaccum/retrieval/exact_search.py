"""Exact search in embeddings of any size, block by block: by FAISS on the CPU, by torch on GPUs.

`DeviceEmbeddings` reads them in blocks on a device, also for a loss over all documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contaccum.bank.full_softmax import DocumentBlock
from contaccum.errors import UserError
from contaccum.retrieval.products import multiply, without_tf32
from contaccum.retrieval.store import EmbeddingStore, Similarity

Embeddings = np.ndarray | EmbeddingStore
"""Types of embeddings (N, d) that can be searched."""

# Bytes of float32 rows that the CPU searches at a time: enough for matrix products to run at full
# speed, and little memory compared with a corpus.
SLICE_BYTES = 2**28
_MIN_QUERIES_PER_THREAD = 64  # a thread with fewer queries costs more than it gains
_MAX_QUERIES_PER_GROUP = 4096  # limits the memory for the results of a slice before they are merged
# The same on a GPU, and the scores that are computed at once: 512 MB in float32.
_MAX_QUERIES_PER_GROUP_ON_GPU = 1024
_MAX_SCORES_ON_GPU = 2**27

_ROWS_PER_BLOCK_ON_CPU = 8192
_BYTES_PER_COPY = 2**26  # bytes that are copied to a GPU at once
# Embeddings stay on a GPU if they need less than this share of its free memory.
_MAX_SHARE_OF_FREE_MEMORY = 0.5


def search_slices(
    corpus: Embeddings, queries: np.ndarray, k: int, metric: Similarity, show_progress: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Find the k <= N best of N documents, (N, d), for n queries on the CPU, slice by slice.

    Queries (n, d) are the result of `prepare_vectors`. Returned are scores, float32 (n, k),
    descending, and rows, int64 (n, k); documents with equal scores are in any order.
    """
    import faiss
    from tqdm.auto import tqdm

    num_rows, dimension = corpus.shape
    # FAISS's threads wait for each other after every block of a product. One thread per group of
    # queries needs half the CPU time.
    num_threads = faiss.omp_get_max_threads()
    num_workers = max(1, min(num_threads, len(queries) // _MIN_QUERIES_PER_THREAD))
    num_groups = max(num_workers, math.ceil(len(queries) / _MAX_QUERIES_PER_GROUP))
    query_groups = np.array_split(queries, num_groups)
    # Each heap holds the k best documents so far of a group's queries.
    heaps = [faiss.ResultHeap(len(group), k, keep_max=True) for group in query_groups]

    def add_results(documents: np.ndarray, start: int, group: np.ndarray, heap: Any) -> None:
        num_results = min(k, len(documents))
        scores, rows = faiss.knn(group, documents, num_results, faiss.METRIC_INNER_PRODUCT)
        heap.add_result(scores, rows + start)

    workers = ThreadPoolExecutor(
        num_workers, initializer=faiss.omp_set_num_threads, initargs=(num_threads // num_workers,)
    )
    progress = tqdm(
        total=num_rows, desc="Searching", unit=" rows", leave=False, disable=not show_progress
    )
    # By default, FAISS uses BLAS only if queries x dimensions reach 128,000, and needs up to ten
    # times as long below that. Now eight queries are enough.
    blas_threshold = faiss.cvar.distance_compute_blas_threshold
    faiss.cvar.distance_compute_blas_threshold = 8 * dimension
    try:
        with workers, progress:
            for start, documents in list_slices(corpus, metric):
                add = partial(add_results, documents, start)
                # list() waits for all groups, and raises the error of a group that failed.
                list(workers.map(add, query_groups, heaps))
                progress.update(len(documents))
    finally:
        faiss.cvar.distance_compute_blas_threshold = blas_threshold
    for heap in heaps:
        heap.finalize()
    return np.concatenate([heap.D for heap in heaps]), np.concatenate([heap.I for heap in heaps])


def prepare_vectors(
    vectors: np.ndarray,
    metric: Similarity,
    description: str,
    first_row: int = 0,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return n vectors as contiguous float32 (n, d), with "cos" as an L2-normalised copy.

    ``description`` and ``first_row`` name the first vector in errors; ``out``, at least (n, d),
    gets the copy. A vector with NaN or infinity, also in its squares, raises `UserError`: FAISS
    would return row -1 for it, which would look like a poor model.
    """
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    norms = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
    is_finite = np.isfinite(norms)
    if not is_finite.all():
        raise _make_vector_error(description, first_row + int(np.flatnonzero(~is_finite)[0]))
    if metric == "dot":
        return vectors
    divisors = np.where(norms > 0, norms, 1)[:, None]  # a zero vector stays zero
    return np.divide(vectors, divisors, out=None if out is None else out[: len(vectors)])


def _make_vector_error(description: str, row: int) -> UserError:
    return UserError(
        f"{description} {row} holds NaN, infinity or numbers too large for float32 scores "
        "(check the model's weights and precision)"
    )


def list_slices(embeddings: Embeddings, metric: Similarity) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the first row and the `prepare_vectors` of each slice; it is valid until the next."""
    num_rows, dimension = embeddings.shape
    size = min(max(1, SLICE_BYTES // (4 * dimension)), num_rows)
    buffer = None
    if metric == "cos":
        # Reused, because allocating memory for every slice costs more than writing to it.
        buffer = np.empty((size, dimension), dtype=np.float32)
    for start, block in list_blocks(embeddings, size, range(num_rows)):
        yield start, prepare_vectors(block, metric, "document embedding", start, buffer)


def search_on_devices(
    parts: Sequence[DeviceEmbeddings], queries: np.ndarray, k: int, metric: Similarity
) -> tuple[np.ndarray, np.ndarray]:
    """Find the k best documents of n queries by torch, as `search_slices`; a device has its part.

    A GPU without memory for the scores of a slice raises torch.OutOfMemoryError.
    """
    with torch.inference_mode(), without_tf32():
        for part in parts:
            is_finite = part.norms.isfinite().cpu()
            if not is_finite.all():
                row = part.rows.start + int((~is_finite).nonzero()[0])
                raise _make_vector_error("document embedding", row)
        results = [_search_part(part, queries, k, metric) for part in parts]
        # All devices are at work before the first result is waited for.
        scores = torch.cat([scores.cpu() for scores, _ in results], 1)
        rows = torch.cat([rows.cpu() for _, rows in results], 1)
        scores, rows = _select_best(scores, rows, k)
    return scores.numpy(), rows.numpy()


def _search_part(
    part: DeviceEmbeddings, queries: np.ndarray, k: int, metric: Similarity
) -> tuple[Tensor, Tensor]:
    """Return the scores and rows, (n, k), of the best documents of a part, on its device."""
    groups = torch.from_numpy(queries).to(part.device).split(_MAX_QUERIES_PER_GROUP_ON_GPU)
    num_documents = max(1, _MAX_SCORES_ON_GPU // len(groups[0]))
    best_scores = [group.new_empty(len(group), 0) for group in groups]
    best_rows = [scores.long() for scores in best_scores]
    for block in part.blocks(has_scales=metric == "cos"):
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
    best = scores.topk(min(k, scores.shape[1]))
    return best.values, rows.gather(1, best.indices)


class DeviceEmbeddings:
    """One of several consecutive parts of N embeddings, read in blocks on a device.

    On a GPU, the embeddings stay in its memory if it has room. Otherwise their blocks are copied to
    it each time they are read, and the next block is copied while the GPU works on this one. They
    keep the number type of the array, which must not change, or of the store.
    """

    def __init__(
        self, embeddings: Embeddings, device: torch.device, part: int, num_parts: int
    ) -> None:
        self._embeddings = embeddings
        self.device = device
        self.rows = range(*(len(embeddings) * n // num_parts for n in (part, part + 1)))
        self._dtype = np.dtype("float16" if embeddings.dtype == "float16" else "float32")
        self._rows_per_block = _ROWS_PER_BLOCK_ON_CPU
        if device.type == "cuda":
            bytes_per_row = self._dtype.itemsize * embeddings.shape[1]
            self._rows_per_block = min(len(self.rows), max(1, _BYTES_PER_COPY // bytes_per_row))
        self._kept: Tensor | None = None  # all rows, in the memory of a GPU

    @cached_property
    def norms(self) -> Tensor:
        """L2 norms of the rows, float32 (n,), on the device."""
        norms = [torch.empty(0, device=self.device)]
        for _, block in self._read():
            norms += [part.float().norm(dim=1) for part in block.split(self._rows_per_block)]
        return torch.cat(norms)

    def blocks(self, has_scales: bool) -> Iterator[DocumentBlock]:
        """Yield the rows in blocks. On a GPU, a block is valid until the next one is asked for.

        With ``has_scales``, a block has 1 / L2 norm of each row; 0 for a row of zeros.
        """
        norms = self.norms if has_scales else None
        for first_row, documents in self._read():
            scales = None
            if norms is not None:
                start = first_row - self.rows.start
                scales = norms[start : start + len(documents)].reciprocal()
                scales.masked_fill_(scales.isinf(), 0.0)
            yield DocumentBlock(first_row, documents, scales)

    def _read(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the first row and the embeddings, (b, d), of each block on the device."""
        if not self.rows:
            return
        if self._kept is None and self._fits():
            shape = (len(self.rows), self._embeddings.shape[1])
            kept = torch.empty(shape, dtype=getattr(torch, self._dtype.name), device=self.device)
            for first_row, block in self._copy():
                start = first_row - self.rows.start
                kept[start : start + len(block)] = block
            self._kept = kept
        if self._kept is None:
            yield from self._copy()
        else:
            yield self.rows.start, self._kept

    def _fits(self) -> bool:
        """Return True if the embeddings fit into the free memory of a GPU."""
        if self.device.type != "cuda":
            return False
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        needed_bytes = self._dtype.itemsize * len(self.rows) * self._embeddings.shape[1]
        return needed_bytes < _MAX_SHARE_OF_FREE_MEMORY * free_bytes

    def _copy(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the first row and the embeddings of each block, copied to the device."""
        if self.device.type != "cuda":
            for first_row, block in self._read_host():
                yield first_row, block.to(self.device)
            return
        # Blocks alternate between two places in page-locked memory of the host and two on the GPU.
        # A stream of its own copies a block while the GPU works on the last one, and a thread reads
        # it from the file while this thread gives the GPU its work.
        shape = (2, self._rows_per_block, self._embeddings.shape[1])
        dtype = getattr(torch, self._dtype.name)
        on_host = torch.empty(shape, dtype=dtype, pin_memory=True)
        on_device = torch.empty(shape, dtype=dtype, device=self.device)
        copied = [torch.cuda.Event(), torch.cuda.Event()]
        used = [torch.cuda.Event(), torch.cuda.Event()]
        copy_stream = torch.cuda.Stream(self.device)
        # Earlier work may still use the memory that `on_device` got.
        copy_stream.wait_stream(torch.cuda.current_stream(self.device))

        def copy(place: int, block: Tensor) -> None:
            # The tensors may be of inference mode, and can be written only in it.
            with torch.inference_mode(), torch.cuda.stream(copy_stream):
                copied[place].synchronize()  # the block before the last one has left the host
                source = on_host[place, : len(block)].copy_(block)
                copy_stream.wait_event(used[place])
                on_device[place, : len(block)].copy_(source, non_blocking=True)
                copied[place].record()

        def use(
            copying: Future[None], place: int, first_row: int, size: int
        ) -> Iterator[tuple[int, Tensor]]:
            copying.result()
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copied[place])
            yield first_row, on_device[place, :size]
            used[place].record(stream)

        last = None
        with ThreadPoolExecutor(1) as reader:
            for number, (first_row, block) in enumerate(self._read_host()):
                place = number % 2
                copying = reader.submit(copy, place, block)
                if last is not None:
                    yield from use(*last)
                last = (copying, place, first_row, len(block))
            if last is not None:
                yield from use(*last)

    def _read_host(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the first row and the embeddings of each block, on the host."""
        for first_row, block in list_blocks(self._embeddings, self._rows_per_block, self.rows):
            # torch accepts neither a reversed array nor, without a warning, a read-only one.
            yield first_row, torch.from_numpy(np.require(block, self._dtype, ("C", "W")))


def list_blocks(embeddings: Embeddings, size: int, rows: range) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the first row and the embeddings of each block of at most ``size`` rows."""
    if isinstance(embeddings, EmbeddingStore):
        yield from embeddings.blocks(size, rows)
        return
    for first_row in rows[::size]:
        yield first_row, embeddings[first_row : min(first_row + size, rows.stop)]
