"""`contaccum search MODEL --store FOLDER --queries FILE --output run.trec`: the best rows of a store for each query.

What cannot work is refused before a query is encoded. Nothing is scored here: that is for `contaccum evaluate` and
`open_qa`.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from contaccum.cli.options import Parser, autocast_dtype, load_model
from contaccum.errors import ConfigError, DataError
from contaccum.files import git_commit, package_versions, redact, require_writable, write_json, write_text

_GPU: dict[str, Any] = {"auto": "auto", "yes": True, "no": False}
# Queries whose results are held as text at a time.
_WRITTEN = 256


def run(argv: Sequence[str] | None = None) -> int:
    """`contaccum search [MODEL] --store FOLDER --queries QUERIES --output run.trec`; returns 0.

    Writes the run and, beside it, run.json. Raises `UserError` for every mistake in the arguments, the data, the model,
    the store or the index file.
    """
    args = _parse(argv)
    from contaccum.retrieval.index import (
        build_index,
        check_factory,
        description_path,
        find_gpus,
        load_index,
        recall_against_exact,
        save_index,
        search,
    )
    from contaccum.retrieval.store import EmbeddingStore

    record_path = args.output.with_suffix(".json")
    require_writable(record_path)
    store = EmbeddingStore.open(args.store)
    if store.about["kind"] != "document":
        raise DataError(f"{args.store}: a store of queries; --store takes one of documents")
    metric = args.similarity or store.similarity
    check_factory(args.index, store.dim, len(store), metric, args.index_parameters)
    gpu = (_GPU[args.gpu], args.gpu_mode, args.gpu_float16)
    find_gpus(*gpu)

    timing = {"start": time.perf_counter()}
    ids, queries = _queries(args, store)
    timing["encode_queries_seconds"] = time.perf_counter()
    if args.index_file and description_path(args.index_file).exists():
        print(f"searching {args.index_file}")
        settings = (args.index, metric, args.index_parameters, find_gpus(*gpu), gpu[0] is True)
        index = load_index(args.index_file, store, store.fingerprint, *settings)
    else:
        index = build_index(store, args.index, metric, gpu[0], None, args.index_parameters, *gpu[1:])
        if args.index_file:
            save_index(index, args.index_file, store.fingerprint, str(args.store))
            print(f"written: {args.index_file}")
    timing["index_seconds"] = time.perf_counter()
    scores, rows = search(index, queries, args.top_k, show_progress=not args.no_progress)
    timing["search_seconds"] = time.perf_counter()
    recall = recall_against_exact(index, queries, rows)
    timing["recall_seconds"] = time.perf_counter()
    moments = list(timing.values())
    seconds = {name: end - start for name, start, end in zip(list(timing)[1:], moments, moments[1:], strict=False)}

    tag = re.sub(r"\s+", "_", Path(redact(str(args.model or args.queries))).name) or "contaccum"
    write_text(args.output, _lines(ids, store, scores, rows, tag))
    about = {"index": index.factory, "index_parameters": index.parameters, "k": rows.shape[1], "gpus": index.gpus}
    about["index_file"] = str(args.index_file) if args.index_file else None
    record = {
        "store": {"path": str(args.store), "fingerprint": store.fingerprint, "rows": len(store)},
        "model": {"name": str(args.model or store.about.get("model_name")), "similarity": metric},
        "queries": {"path": str(args.queries), "count": len(ids)},
        "search": about | ({"recall": recall} if recall else {}),
        "timing": seconds,
        "versions": package_versions(),
        "git_commit": git_commit(),
    }
    write_json(record_path, record)
    speed = len(ids) / max(seconds["search_seconds"], 1e-9)
    print(f"{len(ids):,} queries over {len(store):,} rows, {speed:,.0f} a second")
    if recall:
        found = ", ".join(f"{name} {value:.4f}" for name, value in recall.items() if name != "queries")
        print(f"against exact search, on {recall['queries']} queries: {found}")
    print("written:", args.output, record_path)
    return 0


def _queries(args: argparse.Namespace, store: Any) -> tuple[list[str], Any]:
    """Ids and embeddings (n, d) of queries from their own store, or encoded now; of the store's own model alone."""
    from contaccum.data import RecordReport
    from contaccum.data.beir import judged_queries
    from contaccum.retrieval.encode import encode_texts, model_fingerprint
    from contaccum.retrieval.sources import read_texts
    from contaccum.retrieval.store import ABOUT, EmbeddingStore

    encoded = EmbeddingStore.open(args.queries) if (args.queries / ABOUT).is_file() else None
    if encoded is not None:
        if args.split is not None or args.model is not None:
            what = "--split" if args.split is not None else "the MODEL"
            raise ConfigError(f"{args.queries}: a store of encoded queries: leave {what} out")
        if encoded.about["kind"] != "query":
            raise DataError(f"{args.queries}: a store of documents (encode queries with --kind query)")
        fingerprint = encoded.about["model"]
    elif args.model is None:
        raise ConfigError("name a MODEL to encode the queries with, or give a store of encoded queries to --queries")
    else:
        report = RecordReport(args.on_bad_record)
        judged = judged_queries(args.queries, args.split) if args.split else None
        found = read_texts(args.queries, "query", report)
        texts = {query.id: query.passage for query in found if judged is None or query.id in judged}
        report.refuse_if_nothing_left(args.queries, len(texts), "queries")
        print(report.summary())
        model = load_model(args.model, args)
        fingerprint = model_fingerprint(model)
    if fingerprint != store.about["model"]:
        raise DataError(
            f"{store.folder}: was encoded by another model than {args.model or args.queries} "
            f"({store.about.get('model_name')}): their embeddings cannot be compared (use that model, or encode again)"
        )
    if encoded is not None:
        return encoded.ids(range(len(encoded))), encoded.slice(0, len(encoded))
    settings = (args.batch_size, autocast_dtype(args), not args.no_progress)
    return list(texts), encode_texts(model, list(texts.values()), "query", *settings)


def _lines(queries: list[str], store: Any, scores: Any, rows: Any, tag: str) -> Iterator[str]:
    from contaccum.evaluation.results import trec_lines

    for start in range(0, len(queries), _WRITTEN):
        part = slice(start, start + _WRITTEN)
        there = rows[part] >= 0
        ids = iter(store.ids(rows[part][there]))
        for query, of_query, hits in zip(queries[part], there, scores[part], strict=True):
            yield from trec_lines({query: {next(ids): float(score) for score in hits[of_query]}}, tag)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("search", "Search a store that contaccum encode wrote, and write a run in TREC's format.")
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="that wrote the store; none where --queries is a store too")
    add("--store", type=Path, required=True, metavar="FOLDER", help="documents that contaccum encode wrote")
    forms = "jsonl, tsv (id, text), DPR's .qa.csv, a BEIR folder, or a store of encoded queries"
    add("--queries", type=Path, required=True, metavar="PATH", help=forms)
    add("--split", help="of a BEIR folder: only the queries that qrels/SPLIT.tsv judges; default: all")
    add("--output", type=Path, default=Path("run.trec"), metavar="RUN.trec", help="and RUN.json beside it")
    add("--top_k", type=int, default=100, metavar="K", help="documents per query")
    parser.add_shared("index", "index_parameters")
    add("--index_file", type=Path, metavar="PATH", help="map this index; where there is none, build it and write it")
    add("--gpu", choices=tuple(_GPU), default="auto", help="for the search: auto takes those that FAISS sees")
    add("--gpu_mode", choices=("replicate", "shard"), default="replicate", help="a copy on each GPU, or a part")
    add("--gpu_float16", action="store_true", help="vectors on the GPU in half the memory")
    parser.add_shared("similarity", "batch_size", "precision", "query_max_length", "on_bad_record")
    parser.add_shared("device", "no_progress", "trust_remote_code")
    parser.set_defaults(passage_max_length=None)
    args = parser.parse(argv)
    for name in ("top_k", "batch_size"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{name} must be at least 1, not {getattr(args, name)}")
    if args.output.suffix != ".trec":
        raise ConfigError(f"{args.output}: the output is a run in TREC's format; end its name in .trec")
    if args.index_file and args.index == "Flat":
        raise ConfigError("--index Flat searches the store itself: leave --index_file out, or name another --index")
    return args
