"""Exact search beside beir's, and what approximate indexes cost and find, on the same embeddings in one run.

    python benchmarks/bench_search.py --rows 1000000 --queries 1000 --k 1000              # ours beside beir's, in turns
    python benchmarks/bench_search.py --rows 100000 --k 100 --indexes Flat HNSW32@efSearch=64 IVF1024,Flat@nprobe=16

Embeddings are made up: `clusters` centres drawn from a normal distribution, each document one of them plus a normal
vector `spread` times as long, each query a document plus the same again; all of length 1. Text embeddings are clustered
too, and plain normal vectors would make every approximate index look poor.
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from contaccum.files import provenance, write_json
from contaccum.retrieval.index import build_index, check_factory, recall_against_exact, search
from contaccum.retrieval.searcher import FaissSearcher, Run


def made_up(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Documents (rows, d) and queries (queries, d), float32, of length 1."""
    rng = np.random.default_rng(args.seed)
    centres = rng.standard_normal((args.clusters, args.dimension), dtype=np.float32)

    def near(some: np.ndarray) -> np.ndarray:
        some += args.spread * rng.standard_normal(some.shape, dtype=np.float32)
        return some / np.linalg.norm(some, axis=1, keepdims=True)

    documents = np.empty((args.rows, args.dimension), dtype=np.float32)
    for start in range(0, args.rows, 65_536):
        part = documents[start : start + 65_536]
        part[:] = near(centres[rng.integers(0, args.clusters, len(part))])
    chosen = documents[rng.integers(0, args.rows, args.queries)]
    return documents, near(chosen * np.float32(np.sqrt(args.dimension)))


class Stub:
    """A model that hands out embeddings, and says when the first block of documents was had."""

    device, training = SimpleNamespace(type="cpu"), False

    def __init__(self, documents: Any, queries: Any) -> None:
        self.documents, self.queries, self.place, self.began = documents, queries, 0, (0.0, 0.0)

    def train(self, mode: bool) -> None:
        pass

    def encode_query(self, texts: Any, **settings: Any) -> Any:
        return self.queries

    def encode_document(self, texts: Any, **settings: Any) -> Any:
        if not self.place:
            self.began = time.perf_counter(), time.process_time()
        self.place += len(texts)
        return self.documents[self.place - len(texts) : self.place]

    encode_queries, encode_corpus = encode_query, encode_document  # as BEIR calls them


def against_beir(
    args: argparse.Namespace, documents: np.ndarray, queries: np.ndarray
) -> dict[str, Any]:
    """Turns of ours and theirs. Timed from the first block of the corpus on: theirs are scores, top k and heaps (not
    sorting the corpus by length), ours all that follows encoding: checks, search, the dictionary of results.
    """
    import torch
    from beir.retrieval.search.dense import DenseRetrievalExactSearch

    # Of one length: beir sorts by length, and so leaves the order.
    corpus = {f"d{row}": {"title": "", "text": f"{row:09}"} for row in range(len(documents))}
    asked = {f"q{row}": f"{row:09}" for row in range(len(queries))}
    turns = []
    for turn in range(args.repeats):
        model = Stub(documents, queries)
        ours: Run = FaissSearcher(model, show_progress_bar=False).search(
            corpus, asked, args.k, "cos_sim"
        )
        figures = {
            "seconds": time.perf_counter() - model.began[0],
            "cpu": time.process_time() - model.began[1],
        }
        model = Stub(torch.from_numpy(documents), torch.from_numpy(queries))
        theirs: Run = DenseRetrievalExactSearch(model, show_progress_bar=False).search(
            corpus, asked, args.k, "cos_sim"
        )
        figures["seconds_beir"] = time.perf_counter() - model.began[0]
        figures["cpu_beir"] = time.process_time() - model.began[1]
        turns.append(figures)
        print(f"turn {turn + 1}: {figures}", flush=True)
    return {
        "turns": turns,
        "speedup": statistics.median(turn["seconds_beir"] / turn["seconds"] for turn in turns),
        "speedup_cpu": statistics.median(turn["cpu_beir"] / turn["cpu"] for turn in turns),
        "same_documents": statistics.fmean(
            ours[query].keys() == theirs[query].keys() for query in ours
        ),
        "score_difference": max(
            abs(score - theirs[query].get(name, score))
            for query, hits in ours.items()
            for name, score in hits.items()
        ),
    }


def compare_indexes(
    args: argparse.Namespace, documents: np.ndarray, queries: np.ndarray
) -> list[dict[str, Any]]:
    """For each index and search parameters: seconds to build, queries a second, and recall against exact search."""
    results = []
    for factory, _, parameters in [given.partition("@") for given in args.indexes]:
        check_factory(factory, args.dimension, args.rows, "dot", parameters or None)
        started = time.perf_counter()
        index = build_index(documents, factory, "dot", parameters=parameters or None)
        built = time.perf_counter() - started
        speeds = []
        for _ in range(args.repeats):
            started = time.perf_counter()
            _, rows = search(index, queries, args.k)
            speeds.append(len(queries) / (time.perf_counter() - started))
        result = {"index": factory, "parameters": index.parameters, "build_seconds": built}
        result["queries_per_second"] = statistics.median(speeds)
        results.append(result | (recall_against_exact(index, queries, rows) or {}))
        print(results[-1], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = {"rows": 200_000, "dimension": 384, "queries": 1000, "k": 1000, "clusters": 2000}
    for name, value in {**defaults, "repeats": 1, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--spread", type=float, default=0.7, help="from a centre, over its length")
    parser.add_argument(
        "--indexes", nargs="+", metavar="FACTORY[@PARAMETERS]", help="these instead of beir"
    )
    parser.add_argument("--output", metavar="FILE.json")
    args = parser.parse_args()
    documents, queries = made_up(args)
    measure = compare_indexes if args.indexes else against_beir
    result = {"settings": vars(args), "result": measure(args, documents, queries)}
    print(result["result"])
    if args.output:
        write_json(args.output, {**result, **provenance()})


if __name__ == "__main__":
    main()
