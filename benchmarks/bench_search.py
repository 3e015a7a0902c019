"""Compare contaccum's exact search with BEIR's, or measure approximate FAISS indexes.

    python benchmarks/bench_search.py --rows 1000000 --queries 1000 --k 1000   # compare with BEIR
    python benchmarks/bench_search.py --rows 100000 --k 100 \\
        --indexes Flat HNSW32@efSearch=64 IVF1024,Flat@nprobe=16

The embeddings are generated in clusters; see measuring/embeddings.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from measuring.embeddings import make_clustered_embeddings

from contaccum.evaluation.results import Run
from contaccum.files import provenance, write_json
from contaccum.retrieval.search import FaissSearcher, build_index, recall_against_exact, search


class StubModel:
    """A model that returns prepared embeddings and records when the first block is read."""

    device = SimpleNamespace(type="cpu")
    training = False

    def __init__(
        self, documents: np.ndarray | torch.Tensor, queries: np.ndarray | torch.Tensor
    ) -> None:
        self.documents = documents
        self.queries = queries
        self.num_read = 0  # documents returned so far
        self.start_time = 0.0  # time.perf_counter() at the first block of documents
        self.start_cpu_time = 0.0  # time.process_time() at the first block of documents

    def train(self, mode: bool) -> None:
        pass

    def encode_query(self, texts: Sequence[str], **settings: Any) -> np.ndarray | torch.Tensor:
        return self.queries

    def encode_document(self, texts: Sequence[Any], **settings: Any) -> np.ndarray | torch.Tensor:
        if self.num_read == 0:
            self.start_time = time.perf_counter()
            self.start_cpu_time = time.process_time()
        start = self.num_read
        self.num_read += len(texts)
        return self.documents[start : self.num_read]

    # The names of these methods in BEIR
    encode_queries = encode_query
    encode_corpus = encode_document


def time_search(
    searcher: Any, model: StubModel, corpus: dict[str, Any], queries: dict[str, str], k: int
) -> tuple[Run, float, float]:
    """Search; return the run, and seconds and CPU seconds since the first block of documents."""
    run: Run = searcher.search(corpus, queries, k, "cos_sim")
    seconds = time.perf_counter() - model.start_time
    cpu_seconds = time.process_time() - model.start_cpu_time
    return run, seconds, cpu_seconds


def compare_with_beir(
    args: argparse.Namespace, documents: np.ndarray, queries: np.ndarray
) -> dict[str, Any]:
    """Search with contaccum and with BEIR in turns, and compare times and results.

    The time starts at the first block of documents. For contaccum it includes everything after
    encoding: checks, search and the dictionary of results. For BEIR it includes scores, top k and
    heaps, but not the sorting of the corpus by length.
    """
    from beir.retrieval.search.dense import DenseRetrievalExactSearch

    # BEIR sorts documents by length. All texts have the same length, so that their order is kept.
    corpus = {f"d{row}": {"title": "", "text": f"{row:09}"} for row in range(len(documents))}
    query_texts = {f"q{row}": f"{row:09}" for row in range(len(queries))}
    turns = []
    for turn in range(args.repeats):
        model = StubModel(documents, queries)
        searcher = FaissSearcher(model, show_progress_bar=False)
        our_run, seconds, cpu_seconds = time_search(searcher, model, corpus, query_texts, args.k)
        model = StubModel(torch.from_numpy(documents), torch.from_numpy(queries))
        searcher = DenseRetrievalExactSearch(model, show_progress_bar=False)
        beir_run, beir_seconds, beir_cpu_seconds = time_search(
            searcher, model, corpus, query_texts, args.k
        )
        figures = {
            "seconds": seconds,
            "cpu": cpu_seconds,
            "seconds_beir": beir_seconds,
            "cpu_beir": beir_cpu_seconds,
        }
        turns.append(figures)
        print(f"turn {turn + 1}: {figures}", flush=True)

    has_same_documents = []
    score_differences = []
    for query_id, hits in our_run.items():
        beir_hits = beir_run[query_id]
        has_same_documents.append(hits.keys() == beir_hits.keys())
        for document_id in hits.keys() & beir_hits.keys():
            score_differences.append(abs(hits[document_id] - beir_hits[document_id]))
    return {
        "turns": turns,
        "speedup": statistics.median(turn["seconds_beir"] / turn["seconds"] for turn in turns),
        "speedup_cpu": statistics.median(turn["cpu_beir"] / turn["cpu"] for turn in turns),
        "same_documents": statistics.fmean(has_same_documents),
        "score_difference": max(score_differences, default=0.0),
    }


def measure_indexes(
    args: argparse.Namespace, documents: np.ndarray, queries: np.ndarray
) -> list[dict[str, Any]]:
    """Measure the build time, the queries per second and the recall of each index."""
    results = []
    for factory_and_parameters in args.indexes:
        factory, _, parameter_text = factory_and_parameters.partition("@")
        started = time.perf_counter()
        index = build_index(documents, factory, "dot", parameters=parameter_text or None)
        build_seconds = time.perf_counter() - started
        speeds = []
        for _ in range(args.repeats):
            started = time.perf_counter()
            _, rows = search(index, queries, args.k)
            speeds.append(len(queries) / (time.perf_counter() - started))
        recall = recall_against_exact(index, queries, rows) or {}  # None for an exact index
        result = {
            "index": factory,
            "parameters": index.parameters,
            "build_seconds": build_seconds,
            "queries_per_second": statistics.median(speeds),
            **recall,
        }
        results.append(result)
        print(result, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", type=int, default=200_000, help="number of documents")
    add("--dimension", type=int, default=384, help="embedding dimension")
    add("--queries", type=int, default=1000, help="number of queries")
    add("--k", type=int, default=1000, help="results per query")
    add("--clusters", type=int, default=2000, help="number of centres")
    add("--repeats", type=int, default=1, help="number of turns")
    add("--seed", type=int, default=0)
    add("--spread", type=float, default=0.7, help="length of the noise / length of a centre")
    add(
        "--indexes",
        nargs="+",
        metavar="FACTORY[@PARAMETERS]",
        help="measure these indexes instead of comparing with BEIR",
    )
    add("--output", metavar="FILE.json")
    args = parser.parse_args()
    documents, queries = make_clustered_embeddings(
        args.rows, args.queries, args.dimension, args.clusters, args.spread, args.seed
    )
    result: Any
    if args.indexes:
        result = measure_indexes(args, documents, queries)
    else:
        result = compare_with_beir(args, documents, queries)
    print(result)
    if args.output:
        write_json(args.output, {"settings": vars(args), "result": result, **provenance()})


if __name__ == "__main__":
    main()
