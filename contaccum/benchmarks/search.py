"""`contaccum bench search`: what indexes cost and find, and with `--beir` our exact search beside beir's.

Embeddings are made up unless a store is named: `clusters` centres drawn from a normal distribution in d dimensions,
each document one of them plus a normal vector `spread` times as long, each query a document plus the same again; all of
length 1. Text embeddings are clustered too, and plain normal vectors would make every approximate index look poor.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from contaccum.benchmarks.search_pictures import draw, format_beir, format_indexes
from contaccum.errors import ConfigError
from contaccum.evaluation.arguments import Parser
from contaccum.redaction import redact
from contaccum.retrieval.exact import exact_search
from contaccum.retrieval.gpus import find_gpus
from contaccum.retrieval.index import DenseIndex, build_index, check_factory, ready_index, search
from contaccum.retrieval.recall import recall_of_rows
from contaccum.retrieval.rows import ArrayRows, EmbeddingRows, StoreRows
from contaccum.retrieval.store import EmbeddingStore

# FACTORY, then @PARAMETERS for each way to search it.
INDEXES = (
    "Flat",
    "IVF1024,Flat@nprobe=1@nprobe=4@nprobe=16@nprobe=64",
    "HNSW32@efSearch=16@efSearch=64@efSearch=256",
    "SQ8",
    "PQ96",
    "OPQ32_128,IVF1024,PQ32@nprobe=16@nprobe=64",
    "IVF1024,SQ8@nprobe=16@nprobe=64",
)


@dataclass
class SearchBenchSettings:
    """One benchmark: everything that decides what is measured.

    Attributes:
        store, queries_store: stores of documents and of queries to search instead of made-up embeddings.
        sample: queries whose exact answer the recall is against.
    """

    rows: int = 100_000
    dimension: int = 384
    queries: int = 1000
    k: int = 100
    clusters: int = 2000
    spread: float = 0.7
    indexes: list[str] = field(default_factory=lambda: list(INDEXES))
    sample: int = 200
    repeats: int = 3
    seed: int = 0
    threads: int | None = None
    store: str | None = None
    queries_store: str | None = None

    def check(self) -> None:
        """Raise ConfigError for what cannot be measured."""
        for name in ("rows", "dimension", "queries", "k", "clusters", "sample", "repeats", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.spread < 0:
            raise ConfigError(f"spread must be at least 0, got {self.spread}")
        if (self.store is None) != (self.queries_store is None):
            raise ConfigError("--store and --queries_store go together: documents and the queries to search them with")


def made_up(settings: SearchBenchSettings) -> tuple[np.ndarray, np.ndarray]:
    """Documents (rows, d) and queries (queries, d), float32, of length 1; see the module."""
    rng = np.random.default_rng(settings.seed)
    d = settings.dimension
    centres = rng.standard_normal((settings.clusters, d), dtype=np.float32)

    def near(some: np.ndarray) -> np.ndarray:
        some += settings.spread * rng.standard_normal(some.shape, dtype=np.float32)
        some /= np.linalg.norm(some, axis=1, keepdims=True)
        return some

    documents = np.empty((settings.rows, d), dtype=np.float32)
    for start in range(0, settings.rows, 65_536):
        part = documents[start : start + 65_536]
        part[:] = near(centres[rng.integers(0, settings.clusters, len(part))])
    chosen = documents[rng.integers(0, settings.rows, settings.queries)]
    return documents, near(chosen * np.float32(np.sqrt(d)))


def measure_indexes(settings: SearchBenchSettings, progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """One record per index and search parameters.

    A record: ``index``, ``parameters``; ``build_seconds`` (training and adding), ``bytes_per_vector`` (of the index as
    it is written; the embeddings, for Flat); ``queries_per_second`` (all queries in one call, median of the repeats,
    with ``_low`` and ``_high``); ``recall`` at k against exact search, over the sample; ``k``, ``rows``.
    """
    settings.check()
    set_threads(settings.threads)
    corpus, queries, metric = _embeddings(settings)
    settings.k = min(settings.k, len(corpus))
    parts = [given.split("@") for given in settings.indexes]
    for factory, *parameters in parts:
        check_factory(factory, corpus.dim, len(corpus), metric)
        for one in parameters:
            check_factory(factory, corpus.dim, len(corpus), metric, one)
    sample = np.unique(np.linspace(0, len(queries) - 1, settings.sample).astype(np.int64))
    _, exact = exact_search(corpus, queries[sample], settings.k, metric)
    records = []
    for factory, *parameters in parts:
        started = time.perf_counter()
        built = build_index(corpus, factory, metric, parameters=parameters[0] if parameters else None)
        seconds = time.perf_counter() - started
        size = _bytes_per_vector(built)
        for index in _ways(built, parameters):
            times = []
            for _ in range(settings.repeats):
                started = time.perf_counter()
                _, rows = search(index, queries, settings.k)
                times.append(time.perf_counter() - started)
            speeds = sorted(len(queries) / seconds for seconds in times)
            records.append(
                {
                    "index": factory,
                    "parameters": index.parameters,
                    "rows": len(corpus),
                    "dimension": corpus.dim,
                    "k": settings.k,
                    "build_seconds": seconds,
                    "bytes_per_vector": size,
                    "queries_per_second": statistics.median(speeds),
                    "queries_per_second_low": speeds[0],
                    "queries_per_second_high": speeds[-1],
                    "recall": recall_of_rows(rows[sample], exact),
                    "gpus": index.gpus,
                }
            )
            progress(f"{factory} {index.parameters or ''}: recall {records[-1]['recall']:.4f}")
    return records


def set_threads(threads: int | None) -> None:
    """Of torch and FAISS; None leaves both as they are."""
    if threads:
        import faiss
        import torch

        torch.set_num_threads(threads)
        faiss.omp_set_num_threads(threads)


def _embeddings(settings: SearchBenchSettings) -> tuple[EmbeddingRows, np.ndarray, Any]:
    if settings.store is None or settings.queries_store is None:
        documents, queries = made_up(settings)
        return ArrayRows(documents), queries, "dot"
    store, encoded = EmbeddingStore.open(settings.store), EmbeddingStore.open(settings.queries_store)
    if store.dim != encoded.dim:
        raise ConfigError(f"{settings.queries_store} has {encoded.dim} dimensions, {settings.store} has {store.dim}")
    return StoreRows(store), encoded.slice(0, min(len(encoded), settings.queries)), store.similarity


def _ways(index: DenseIndex, parameters: Sequence[str]) -> Iterator[DenseIndex]:
    """One filled index, with each of the search parameters."""
    yield index
    for one in parameters[1:]:
        on_cpu = index.cpu_index if index.gpus else index.faiss_index
        yield ready_index(index.corpus, on_cpu, index.factory, index.metric, one, find_gpus("auto"))


def _bytes_per_vector(index: DenseIndex) -> float:
    if index.is_exact:
        return 4.0 * index.dimension
    import faiss

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "index.faiss")
        faiss.write_index(index.cpu_index if index.gpus else index.faiss_index, path)
        return os.path.getsize(path) / len(index)


def run(argv: Sequence[str]) -> int:
    """``contaccum bench search [OPTIONS]``; returns the exit code: 1 when beir finds other documents."""
    from contaccum.benchmarks.command import machine
    from contaccum.benchmarks.search_beir import BEIR_DEFAULTS, measure_beir
    from contaccum.evaluation.provenance import git_commit, package_versions
    from contaccum.evaluation.results import require_writable, write_atomically

    options = vars(_parser().parse_args(list(argv)))
    output: Path = options.pop("output")
    beir = options.pop("beir")
    if beir:
        for name in ("indexes", "store", "queries_store"):
            if name in options:
                raise ConfigError(f"--{name} has no effect with --beir: leave it out")
        options = {**BEIR_DEFAULTS, **options}
    settings = SearchBenchSettings(**options)
    settings.check()
    require_writable(output)
    measure, show = (measure_beir, format_beir) if beir else (measure_indexes, format_indexes)
    records = measure(settings, progress=lambda line: print(line, flush=True))
    print(show(records))
    result = {
        "command": redact(" ".join(["contaccum", "bench", "search", *argv])),
        "settings": asdict(settings),
        "records": records,
        "machine": machine("cpu"),
        "versions": package_versions(),
        "git_commit": git_commit(),
    }
    write_atomically(output, [json.dumps(result, indent=1), "\n"])
    print(f"written: {output}")
    if not beir:
        draw(records, output.with_suffix(".png"))
        print(f"written: {output.with_suffix('.png')}")
    return 1 if beir and records[0]["other_documents"] else 0


def _parser() -> Parser:
    parser = Parser(prog="contaccum bench search", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--beir", action="store_true", help="against beir's DenseRetrievalExactSearch instead of among indexes")
    helps = {
        "rows": "documents",
        "dimension": None,
        "queries": None,
        "k": "documents per query",
        "clusters": "of the made-up embeddings",
        "spread": "distance from a cluster's centre, over the centre's length",
        "sample": "queries that the recall is measured on",
        "repeats": None,
        "seed": None,
    }
    defaults = SearchBenchSettings()
    for name, text in helps.items():
        kind = type(getattr(defaults, name))
        add(f"--{name}", type=kind, default=argparse.SUPPRESS, help=text)
    add("--indexes", nargs="+", metavar="FACTORY[@PARAMETERS...]", default=argparse.SUPPRESS)
    add("--store", default=argparse.SUPPRESS, metavar="FOLDER", help="documents that contaccum encode wrote")
    add("--queries_store", default=argparse.SUPPRESS, metavar="FOLDER", help="queries that contaccum encode wrote")
    add("--threads", type=int, default=argparse.SUPPRESS)
    add("--output", type=Path, default=Path("bench_search.json"))
    return parser
