"""`contaccum search MODEL --store FOLDER --queries FILE --output run.trec`: the best rows of a store for each query.

What cannot work is refused before a query is encoded. Nothing is scored here: that is for `contaccum evaluate` and
`open_qa`.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from contaccum.data.beir_folder import judged_queries
from contaccum.data.records import RecordReport, one_line
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.evaluation.arguments import Parser, load_model
from contaccum.evaluation.checks import check_device
from contaccum.evaluation.provenance import git_commit, package_versions
from contaccum.evaluation.results import require_writable, trec_lines, write_atomically
from contaccum.redaction import redact
from contaccum.retrieval.encoding import AUTOCAST_DTYPES, encode_texts
from contaccum.retrieval.exact_scores import Metric
from contaccum.retrieval.gpus import GPU_MODES, find_gpus
from contaccum.retrieval.index import DenseIndex, build_index, check_factory, search
from contaccum.retrieval.index_file import load_index, read_description, save_index, store_fingerprint
from contaccum.retrieval.recall import recall_against_exact
from contaccum.retrieval.rows import StoreRows
from contaccum.retrieval.store import ABOUT, EmbeddingStore

# Ids of results held as text at a time.
_QUERIES_WRITTEN = 256
_GPU: dict[str, bool | Literal["auto"]] = {"auto": "auto", "yes": True, "no": False}


class _Queries(NamedTuple):
    """n ids and their embeddings (n, d)."""

    ids: list[str]
    embeddings: np.ndarray


def run(argv: Sequence[str] | None = None) -> int:
    """`contaccum search [MODEL] --store FOLDER --queries QUERIES --output run.trec`; returns 0.

    Writes the run and, beside it, run.json. Raises `UserError` for every mistake in the arguments, the data, the model,
    the store or the index file.
    """
    args = _parse(argv)
    if args.output.suffix != ".trec":
        raise UserError(one_line(f"{args.output}: the output is a run in TREC's format; end its name in .trec"))
    record_path = args.output.with_suffix(".json")
    require_writable(record_path)
    store = EmbeddingStore.open(args.store)
    if store.about.get("kind") != "document":
        raise DataError(one_line(f"{args.store}: a store of queries; --store takes one of documents"))
    metric = cast(Metric, args.similarity or store.similarity)
    corpus, fingerprint = StoreRows(store), store_fingerprint(store)
    # Cheap, and a mistake should not cost an encoding.
    check_factory(args.index, store.dim, len(store), metric, args.index_parameters)
    find_gpus(_GPU[args.gpu], args.gpu_mode, args.gpu_float16)
    if args.index_file and args.index == "Flat":
        raise ConfigError("--index Flat searches the store itself: leave --index_file out, or name another --index")
    if args.index_file:
        read_description(args.index_file)

    logging.getLogger("contaccum.retrieval").setLevel(logging.INFO)
    timing: dict[str, float] = {}
    started = time.perf_counter()
    queries = _queries(args, store)
    if queries.embeddings.shape[1] != store.dim:
        raise DataError(
            one_line(f"{args.store}: has {store.dim} dimensions, the queries have {queries.embeddings.shape[1]}")
        )
    timing["encode_queries_seconds"] = time.perf_counter() - started

    started = time.perf_counter()
    index = _index(args, corpus, fingerprint, metric)
    timing["index_seconds"] = time.perf_counter() - started
    started = time.perf_counter()
    scores, rows = search(index, queries.embeddings, args.top_k, show_progress=not args.no_progress)
    timing["search_seconds"] = time.perf_counter() - started
    started = time.perf_counter()
    recall = recall_against_exact(index, queries.embeddings, rows)
    if recall:
        timing["recall_seconds"] = time.perf_counter() - started

    tag = re.sub(r"\s+", "_", Path(redact(str(args.model or args.queries))).name) or "contaccum"
    write_atomically(args.output, _lines(queries.ids, store, scores, rows, tag))
    record = {
        "store": {"path": redact(str(args.store)), "fingerprint": fingerprint, "rows": len(store)},
        "model": {"name": redact(str(args.model or store.about.get("model_name"))), "similarity": metric},
        "queries": {"path": redact(str(args.queries)), "count": len(queries.ids)},
        "search": {
            "index": index.factory,
            "index_parameters": index.parameters,
            "index_file": str(args.index_file) if args.index_file else None,
            "k": rows.shape[1],
            "gpus": index.gpus,
            **({"recall": recall} if recall else {}),
        },
        "timing": timing,
        "versions": package_versions(),
        "git_commit": git_commit(),
    }
    write_atomically(record_path, [json.dumps(record, indent=1, ensure_ascii=False), "\n"])
    per_second = len(queries.ids) / max(timing["search_seconds"], 1e-9)
    print(f"{len(queries.ids):,} queries over {len(store):,} rows, {per_second:,.0f} a second")
    if recall:
        found = ", ".join(f"{name} {value:.4f}" for name, value in recall.items() if name != "queries")
        print(f"against exact search, on {recall['queries']} queries: {found}")
    print("written:", args.output, record_path)
    return 0


def _queries(args: argparse.Namespace, store: EmbeddingStore) -> _Queries:
    """Queries from their own store, or encoded now; refuses those of another model than the store's."""
    if (args.queries / ABOUT).is_file():
        if args.split is not None:
            raise ConfigError(one_line(f"--split: {args.queries} is a store of encoded queries, not a BEIR folder"))
        if args.model is not None:
            raise ConfigError(one_line(f"{args.queries}: a store of encoded queries: leave the MODEL out"))
        encoded = EmbeddingStore.open(args.queries)
        if encoded.about.get("kind") != "query":
            raise DataError(one_line(f"{args.queries}: a store of documents (encode queries with --kind query)"))
        _require_same_model(encoded.about.get("model"), args.queries, store)
        everything = np.arange(len(encoded))
        return _Queries(encoded.ids(everything), encoded.slice(0, len(encoded)))
    if args.model is None:
        raise ConfigError("name a MODEL to encode the queries with, or give a store of encoded queries to --queries")
    from contaccum.evaluation.model_record import model_fingerprint
    from contaccum.retrieval.corpus_shards import distinct_passages
    from contaccum.retrieval.encode_command import read_source

    if args.device is not None:
        check_device(args.device)
    report = RecordReport(args.on_bad_record)
    judged = judged_queries(args.queries, args.split) if args.split else None
    found = distinct_passages(read_source(args.queries, "query", report), args.queries, report)
    texts = {query.id: query.passage for query in found if judged is None or query.id in judged}
    report.refuse_if_nothing_left(args.queries, len(texts), "queries")
    print(report.summary())
    model = load_model(args)
    _require_same_model(model_fingerprint(model), args.model, store)
    autocast_dtype = None if args.precision == "float32" else args.precision
    embeddings = encode_texts(
        model, list(texts.values()), "query", args.batch_size, autocast_dtype, show_progress=not args.no_progress
    )
    return _Queries(list(texts), embeddings)


def _require_same_model(fingerprint: Any, name: Any, store: EmbeddingStore) -> None:
    if fingerprint != store.about.get("model"):
        raise DataError(
            one_line(
                f"{store.folder}: was encoded by another model than {name} ({store.about.get('model_name')}): their "
                "embeddings cannot be compared (use that model, or encode the corpus again)"
            )
        )


def _index(args: argparse.Namespace, corpus: StoreRows, fingerprint: str, metric: Metric) -> DenseIndex:
    gpu = (_GPU[args.gpu], args.gpu_mode, args.gpu_float16)
    if args.index_file and read_description(args.index_file) is not None:
        print(f"searching {args.index_file}")
        return load_index(
            args.index_file, corpus, fingerprint, args.index, metric, gpu[0], args.index_parameters, *gpu[1:]
        )
    index = build_index(corpus, args.index, metric, gpu[0], None, args.index_parameters, *gpu[1:])
    if args.index_file:
        save_index(index, args.index_file, fingerprint, redact(str(args.store)))
        print(f"written: {args.index_file}")
    return index


def _lines(
    queries: Sequence[str], store: EmbeddingStore, scores: np.ndarray, rows: np.ndarray, tag: str
) -> Iterator[str]:
    for start in range(0, len(queries), _QUERIES_WRITTEN):
        part = slice(start, start + _QUERIES_WRITTEN)
        there = rows[part] >= 0
        ids = iter(store.ids(rows[part][there]))
        for query, of_query, hits in zip(queries[part], there, scores[part], strict=True):
            found = [(next(ids), float(score)) for score in hits[of_query]]
            yield from trec_lines({query: dict(found)}, tag)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="contaccum search",
        description="Search a store that contaccum encode wrote, and write a run in TREC's format.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="a folder, or a name on the model hub; none for encoded queries")
    add("--store", type=Path, required=True, metavar="FOLDER", help="what contaccum encode wrote")
    add(
        "--queries",
        type=Path,
        required=True,
        metavar="QUERIES",
        help="jsonl, tsv (id, text), DPR's .qa.csv, a BEIR folder, or a store of encoded queries",
    )
    add("--split", help="of a BEIR folder: only the queries that qrels/SPLIT.tsv judges; default: all")
    add("--output", type=Path, default=Path("run.trec"), metavar="RUN.trec", help="and RUN.json beside it")
    add("--top_k", type=int, default=100, metavar="K", help="documents per query")
    add("--index", default="Flat", help="FAISS factory string; Flat is exact, and reads the store in slices")
    add("--index_parameters", help="FAISS search parameters, such as nprobe=32")
    add("--index_file", type=Path, metavar="PATH", help="map this index; where there is none, build it and write it")
    add("--similarity", choices=("cos", "dot"), help="default: the model's own")
    add("--gpu", choices=tuple(_GPU), default="auto", help="for the search: auto takes those that FAISS sees")
    add("--gpu_mode", choices=GPU_MODES, default="replicate", help="of several: a copy on each, or a part on each")
    add("--gpu_float16", action="store_true", help="vectors on the GPU in half the memory")
    add("--batch_size", type=int, default=32)
    add("--precision", choices=("float32", *AUTOCAST_DTYPES), default="float32", help="of the encoder")
    add("--query_max_length", type=int, metavar="TOKENS")
    add("--on_bad_record", choices=("stop", "skip"), default="stop")
    add("--device", help="of the model, such as cpu or cuda:1")
    add("--no_progress", action="store_true")
    add("--trust_remote_code", action="store_true", help="run code that comes with the model")
    parser.set_defaults(passage_max_length=None)
    args = parser.parse(argv)
    for name in ("top_k", "batch_size"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{name} must be at least 1, not {getattr(args, name)}")
    return args
