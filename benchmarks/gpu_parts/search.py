"""Seconds of exact and approximate search on a GPU and on the CPU, and the recall.

contaccum searches a "Flat" index on the GPU by torch. The inverted file is measured only with
faiss-gpu.

The embeddings are in clusters, because text embeddings are too; with plain normal vectors, every
approximate index would have a low recall. Centres are normal vectors. A document is a centre plus a
normal vector that is `SPREAD` times as long, and a query is a document plus another such vector.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import faiss
import numpy as np
import torch
from measuring.run import Cases, NotMeasured, Run, quartiles

from contaccum.retrieval.search import DenseIndex, build_index, find_gpus, search

NUM_CLUSTERS = 2000
SPREAD = 0.7
BLOCK_SIZE = 65_536  # documents that are generated at once


@dataclass(frozen=True)
class Sizes:
    """Sizes of this part."""

    documents: int = 1_000_000
    queries: int = 1000
    dimension: int = 384
    k: int = 100  # results per query
    inverted_file: tuple[str, str] = ("IVF4096,PQ32np", "nprobe=64")  # factory, parameters
    turns: int = 3


SIZES = Sizes()
TINY = Sizes(400, 10, 16, 5, ("IVF4,PQ4np", "nprobe=2"), 1)


def list_cases(sizes: Sizes, run: Run) -> Cases:
    """Yield exact and approximate indexes, each on the CPU and on the GPU."""
    if not run.is_cuda:
        raise NotMeasured(f"the device is {run.device}, not a GPU")
    yield from list_indexes(sizes, find_gpus(), faiss.get_num_gpus() > 0)


def list_indexes(sizes: Sizes, gpus: Sequence[torch.device], has_faiss_gpu: bool) -> Cases:
    """Yield all indexes."""
    documents, queries = make_embeddings(sizes)
    exact_rows: list[np.ndarray] = []
    measure = partial(measure_index, queries, exact_rows, sizes)
    flat = replace(build_index(documents, metric="dot"), gpus=())
    half = replace(flat, corpus=documents.astype(np.float16), gpus=gpus)
    yield "Flat, CPU", partial(measure, lambda: flat)
    yield "Flat, GPU", partial(measure, lambda: replace(flat, gpus=gpus), gpus)
    yield "Flat, float16, GPU", partial(measure, lambda: half, gpus)
    factory, parameters = sizes.inverted_file

    @cache
    def build() -> DenseIndex:
        if not has_faiss_gpu:
            raise NotMeasured("FAISS without GPU")
        return build_index(documents, factory, "dot", parameters=parameters)

    yield f"{factory}, CPU", partial(measure, lambda: replace(build(), gpus=()))
    yield f"{factory}, GPU", partial(measure, build, gpus)


def make_embeddings(sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Return normalized float32 embeddings of documents (N, d) and queries (n, d)."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((NUM_CLUSTERS, sizes.dimension), dtype=np.float32)

    def add_noise(vectors: np.ndarray) -> np.ndarray:
        """Add noise to the vectors in place; return them normalized."""
        vectors += SPREAD * rng.standard_normal(vectors.shape, dtype=np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    documents = np.empty((sizes.documents, sizes.dimension), dtype=np.float32)
    for start in range(0, sizes.documents, BLOCK_SIZE):
        block = documents[start : start + BLOCK_SIZE]
        block[:] = add_noise(centres[rng.integers(0, NUM_CLUSTERS, len(block))])
    query_documents = documents[rng.integers(0, sizes.documents, sizes.queries)]
    # Documents get the length of a centre again, so that the noise has the same share.
    return documents, add_noise(query_documents * np.float32(np.sqrt(sizes.dimension)))


def measure_index(
    queries: np.ndarray,
    exact_rows: list[np.ndarray],
    sizes: Sizes,
    get_index: Callable[[], DenseIndex],
    gpus: Sequence[torch.device] = (),
) -> dict[str, Any]:
    """Search in several turns; an exact search adds its rows to ``exact_rows``."""
    started = time.perf_counter()
    index = get_index()
    build_seconds = time.perf_counter() - started
    if gpus and not index.gpus:
        raise RuntimeError("the CPU searched instead of a GPU")
    seconds = []
    for _ in range(1 + sizes.turns):
        started = time.perf_counter()
        # The result is in the host's memory, so the GPU has finished.
        _, rows = search(index, queries, sizes.k)
        seconds.append(time.perf_counter() - started)
    if index.factory == "Flat":
        exact_rows.append(rows)
    recalls = []
    for exact_line, line in zip(exact_rows[0], rows, strict=True) if exact_rows else ():
        recalls.append(np.isin(exact_line, line).mean())
    return {
        "build_seconds": build_seconds,
        "first_seconds": seconds[0],  # copies the documents to the GPU
        "seconds": quartiles(seconds[1:]),
        "queries_per_second": len(queries) / float(np.median(seconds[1:])),
        "recall": float(np.mean(recalls)) if exact_rows else None,
    }
