"""`contaccum search MODEL --store FOLDER --queries FILE --output run.trec`: the best rows of a store for each query.

What cannot work is refused before a query is encoded. Nothing is scored here: that is for `contaccum evaluate` and
`open_qa`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from contaccum.cli.options import Parser, autocast_dtype, load_model, positive
from contaccum.errors import ConfigError, DataError
from contaccum.files import git_commit, package_versions, require_writable, write_json, write_text


def run(argv: Sequence[str] | None = None) -> int:
    """Returns 0; raises `UserError` for every mistake in the arguments, the data, the model, the store or the index."""
    args = _parse(argv)
    from contaccum.retrieval.index import build_index, check_factory, open_index, recall_against_exact, search
    from contaccum.retrieval.store import EmbeddingStore

    record_path = args.output.with_suffix(".json")
    require_writable(record_path)
    store = EmbeddingStore.open(args.store)
    metric = args.similarity or store.similarity
    check_factory(args.index, store.shape[1], len(store), metric, args.index_parameters)
    ids, queries = _queries(args, store)

    started = time.perf_counter()
    if args.index_file:
        index = open_index(args.index_file, store, args.index, metric, args.index_parameters)
    else:
        index = build_index(store, args.index, metric, parameters=args.index_parameters)
    ready = time.perf_counter()
    scores, rows = search(index, queries, args.top_k, show_progress=not args.no_progress)
    seconds = time.perf_counter() - ready
    recall = recall_against_exact(index, queries, rows)

    write_text(args.output, _lines(ids, store, scores, rows))
    about = {"index": index.factory, "index_parameters": index.parameters, "k": rows.shape[1], "gpus": index.gpus}
    record = {
        "store": {"path": str(args.store), "fingerprint": store.fingerprint, "rows": len(store)},
        "model": {"name": str(args.model or store.about.get("model_name")), "similarity": metric},
        "queries": {"path": str(args.queries), "count": len(ids)},
        "search": about | {"index_file": args.index_file and str(args.index_file), "recall": recall},
        "timing": {"index_seconds": ready - started, "search_seconds": seconds},
        "versions": package_versions(),
        "git_commit": git_commit(),
    }
    write_json(record_path, record)
    print(f"{len(ids):,} queries over {len(store):,} rows, {len(ids) / max(seconds, 1e-9):,.0f} a second")
    if recall:
        print("against exact search:", ", ".join(f"{name} {value:.4g}" for name, value in recall.items()))
    print("written:", args.output, record_path)
    return 0


def _queries(args: argparse.Namespace, store: Any) -> tuple[list[str], Any]:
    """Ids and embeddings (n, d) of queries from their own store, or encoded now; of the store's own model alone."""
    from contaccum.data import RecordReport, load_beir_folder
    from contaccum.retrieval.encode import encode_texts, model_fingerprint, read_texts
    from contaccum.retrieval.store import ABOUT, EmbeddingStore

    if (args.queries / ABOUT).is_file():
        encoded = EmbeddingStore.open(args.queries)
        _check_model(args, store, encoded.about["model"], encoded.about["kind"])
        return encoded.ids(range(len(encoded))), encoded[:]
    if args.model is None:
        raise ConfigError("name a MODEL to encode the queries with, or give a store of encoded queries to --queries")
    report = RecordReport(args.on_bad_record)
    if args.split:
        texts = load_beir_folder(args.queries, args.split, report=report).queries
    else:
        texts = {query.id: query.passage for query in read_texts(args.queries, "query", report)}
    print(report.summary())
    model = load_model(args.model, args)
    _check_model(args, store, model_fingerprint(model), "query")
    settings = (args.batch_size, autocast_dtype(args), not args.no_progress)
    return list(texts), encode_texts(model, list(texts.values()), "query", *settings)


def _check_model(args: argparse.Namespace, store: Any, model: str | None, kind: str) -> None:
    if (store.about["kind"], kind) != ("document", "query"):
        raise DataError(f"{args.store}: of {store.about['kind']}s, {args.queries}: of {kind}s (see encode --kind)")
    if model != store.about["model"]:
        name = store.about.get("model_name")
        raise DataError(f"{args.store}: was encoded by another model, {name}: use that one, or encode again")


def _lines(queries: list[str], store: Any, scores: Any, rows: Any) -> Iterator[str]:
    from contaccum.evaluation.results import trec_lines

    for query, of_query, hits in zip(queries, rows, scores, strict=True):
        found = store.ids(of_query[of_query >= 0])
        yield from trec_lines({query: dict(zip(found, hits.tolist(), strict=False))}, "contaccum")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("search", "Search a store that contaccum encode wrote, and write a run in TREC's format.")
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="that wrote the store; none where --queries is a store too")
    add("--store", type=Path, required=True, metavar="FOLDER", help="documents that contaccum encode wrote")
    forms = "jsonl, tsv (id, text), DPR's .qa.csv, a BEIR folder, or a store of encoded queries"
    add("--queries", type=Path, required=True, metavar="PATH", help=forms)
    add("--split", help="of a BEIR folder the queries that this split judges, not all")
    add("--output", type=Path, default=Path("run.trec"), metavar="RUN.trec", help="and RUN.json beside it")
    add("--top_k", type=positive, default=100, metavar="K", help="documents per query")
    parser.add_shared("index", "index_parameters")
    add("--index_file", type=Path, metavar="PATH", help="map this index; where there is none, build it and write it")
    parser.add_shared("similarity", "batch_size", "precision", "query_max_length", "on_bad_record")
    parser.add_shared("device", "no_progress", "trust_remote_code")
    parser.set_defaults(passage_max_length=None)
    args = parser.parse(argv)
    if args.output.suffix != ".trec":
        raise ConfigError(f"{args.output}: the output is a run in TREC's format; end its name in .trec")
    if args.index_file and args.index == "Flat":
        raise ConfigError("--index Flat searches the store itself: leave --index_file out, or name another --index")
    return args
