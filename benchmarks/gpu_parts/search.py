"""Seconds of exact and approximate search on a GPU and on the CPU, and the recall.

contaccum searches a "Flat" index on the GPU by torch. The approximate indexes are measured only if
FAISS can build them on the GPU: inverted files with faiss-gpu, graphs with cuVS.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import faiss
import numpy as np
from measuring.embeddings import make_clustered_embeddings

from contaccum.retrieval.search import DenseIndex, build_index, find_gpus, search
from gpu_parts.settings import NotMeasured, Run, add_failures, collect_error
from gpu_parts.turns import quartiles

EXACT_CASES = ("Flat, CPU", "Flat, GPU", "Flat, float16, GPU")


@dataclass(frozen=True)
class SearchSizes:
    """Sizes of this part."""

    documents: int = 1_000_000
    queries: int = 1000
    dimension: int = 384
    k: int = 100  # results per query
    inverted_file: tuple[str, str] = ("IVF4096,PQ32np", "nprobe=64")  # factory, parameters
    graph: tuple[str, str] = ("HNSW32", "efSearch=128")
    turns: int = 3


TINY = SearchSizes(400, 10, 16, 5, ("IVF4,PQ4np", "nprobe=2"), ("HNSW4", "efSearch=8"), 1)


def measure(run: Run) -> dict[str, Any]:
    """Measure search with FAISS on the GPU and on the CPU."""
    if not run.is_cuda:
        raise NotMeasured(f"the device is {run.device}, not a GPU")
    sizes = TINY if run.is_tiny else SearchSizes()
    has_faiss_gpu = faiss.get_num_gpus() > 0
    has_cuvs = has_faiss_gpu and hasattr(faiss, "GpuIndexCagra")
    return measure_indexes(run, sizes, find_gpus(), has_faiss_gpu, has_cuvs)


def measure_indexes(
    run: Run, sizes: SearchSizes, gpus: Sequence[int], has_faiss_gpu: bool, has_cuvs: bool
) -> dict[str, Any]:
    """Measure an exact and two approximate indexes, each on the CPU and on the GPU.

    Args:
        run: the deadline.
        sizes: sizes of this part.
        gpus: numbers of the GPUs for the exact search.
        has_faiss_gpu, has_cuvs: whether the inverted file and the graph are measured.
    """
    documents, queries = make_clustered_embeddings(sizes.documents, sizes.queries, sizes.dimension)
    failures: list[str] = []
    cases: dict[str, Any] = {}
    rows_by_name: dict[str, np.ndarray] = {}
    build_seconds: dict[str, float] = {}
    result: dict[str, Any] = {
        "sizes": asdict(sizes),
        "cases": cases,
        "build_seconds": build_seconds,
    }

    def measure_case(name: str, index: DenseIndex) -> None:
        if not run.has_time():
            return
        with collect_error(failures, name):
            figures, rows_by_name[name] = measure_search(index, queries, sizes)
            if name.endswith("GPU") and gpus and not index.gpus:
                raise RuntimeError("the CPU searched instead of a GPU")
            figures["recall"] = compute_recall(find_exact_rows(rows_by_name), rows_by_name[name])
            cases[name] = figures
        add_failures(result, failures)
        run.save_partial(result)

    flat_index = replace(build_index(documents, metric="dot"), gpus=())
    measure_case(EXACT_CASES[0], flat_index)
    measure_case(EXACT_CASES[1], replace(flat_index, gpus=gpus))
    flat_index = replace(flat_index, corpus=documents.astype(np.float16), gpus=gpus)
    measure_case(EXACT_CASES[2], flat_index)
    names = [*EXACT_CASES]
    for (factory, parameters), is_possible in (
        (sizes.inverted_file, has_faiss_gpu),
        (sizes.graph, has_cuvs),
    ):
        names += [f"{factory}, CPU", f"{factory}, GPU"]
        if is_possible and run.has_time():
            started = time.perf_counter()
            index = build_index(documents, factory, "dot", parameters=parameters)
            build_seconds[factory] = time.perf_counter() - started
            measure_case(names[-2], replace(index, gpus=()))
            measure_case(names[-1], index)
    if not cases and not failures:
        raise NotMeasured("the time was over before the first search; increase --minutes")
    missing = [name for name in names if name not in cases]
    if missing:
        result["not_run"] = "; ".join(missing)
        if not has_cuvs:
            result["not_run"] += f" (FAISS without {'cuVS' if has_faiss_gpu else 'GPU'})"
    add_failures(result, failures)
    return result


def measure_search(
    index: DenseIndex, queries: np.ndarray, sizes: SearchSizes
) -> tuple[dict[str, Any], np.ndarray]:
    """Search in several turns; return the figures, and the rows that were found, (n, k)."""
    seconds = []
    for _ in range(1 + sizes.turns):
        started = time.perf_counter()
        # The result is in the host's memory, so the GPU has finished.
        _, rows = search(index, queries, sizes.k)
        seconds.append(time.perf_counter() - started)
    first_seconds, *seconds = seconds  # the first search copies the documents to the GPU
    figures = {
        "first_seconds": first_seconds,
        "seconds": quartiles(seconds),
        "queries_per_second": len(queries) / float(np.median(seconds)),
    }
    return figures, rows


def find_exact_rows(rows_by_name: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Return the rows, (n, k), that an exact search has found; None if all of them failed."""
    for name in EXACT_CASES:
        if name in rows_by_name:
            return rows_by_name[name]
    return None


def compute_recall(exact_rows: np.ndarray | None, rows: np.ndarray) -> float | None:
    """Return the share of the exact results, (n, k), that are among the rows, (n, k).

    Without exact results the recall is None.
    """
    if exact_rows is None:
        return None
    recalls = []
    for exact_line, line in zip(exact_rows, rows, strict=True):
        recalls.append(np.isin(exact_line, line).mean())
    return float(np.mean(recalls))
