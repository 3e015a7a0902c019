"""`contaccum search MODEL --store FOLDER`: search a store for questions, or for a file of queries.

Questions are words of the command line, or lines that are typed; the best three documents of each
are shown. With ``--queries``, the best documents of each query are written as a run in TREC's
format, which `contaccum evaluate --run` scores.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from contaccum.cli.options import (
    ENCODING_OPTIONS,
    MODEL_HELP,
    Parser,
    load_model,
    positive_int,
    print_at_once,
)
from contaccum.data.beir import read_split_queries
from contaccum.data.corpus import read_texts
from contaccum.data.rows import RecordReport, passage_text
from contaccum.encoders.names import require_model
from contaccum.errors import ConfigError
from contaccum.evaluation.results import trec_lines
from contaccum.files import provenance, require_writable, write_json, write_text
from contaccum.retrieval import bm25
from contaccum.retrieval.store import BM25_FOLDER, EmbeddingStore

_NUM_SHOWN = 3  # documents of a question
_SHOWN_CHARACTERS = 300  # of a document's text


def run(argv: Sequence[str]) -> int:
    """Search a store, show the answers or write the run, and return exit code 0."""
    args = _parse_arguments(argv)
    searched_for = "" if args.queries is None else f" for {args.queries}"
    print_at_once(f"searching {args.store} with {args.model}{searched_for}")
    require_model(args.model)
    store = EmbeddingStore.open(args.store)
    if args.queries is None:
        return _answer(args, store)
    return _write_run(args, store)


def _answer(args: argparse.Namespace, store: EmbeddingStore) -> int:
    """Show the best documents of each question, those of the command line or those that are typed.

    BM25 has the weight that `contaccum fit` has chosen for the model, unless another is given.
    """
    weight = args.bm25_weight
    if weight is None:
        weight = bm25.read_bm25_weight(args.model)
        if weight > 0 and not (store.folder / BM25_FOLDER).exists():
            print_at_once(
                f"without BM25, to which contaccum fit gave the weight {weight:g}: the store has "
                "no BM25 index (run the same contaccum encode again with --bm25)"
            )
            weight = 0.0
    if not store.has_passages:
        print_at_once("the store has no texts, so ids alone are shown")
    bm25_index = bm25.open_index(store) if weight > 0 else None
    from contaccum.retrieval import search as faiss_index
    from contaccum.retrieval.encode import check_store_fits, encode_texts

    model = load_model(args.model, args)
    check_store_fits(model, store)
    index = faiss_index.build_index(store, metric=args.similarity)
    for question in args.questions or _read_typed_questions():
        query = encode_texts(model, [question], "query", precision=args.precision)
        depth = _NUM_SHOWN if bm25_index is None else bm25.FUSION_DEPTH
        [hits] = faiss_index.list_hits(index, *faiss_index.search(index, query, depth))
        if bm25_index is not None:
            words = bm25.search(bm25_index, store.ids, {"": question}, depth)
            hits = bm25.fuse_runs({"": hits}, words, weight)[""]
        best = dict(list(hits.items())[:_NUM_SHOWN])
        passages = store.read_passages(best) if store.has_passages else {}
        print(f"\n{question}")
        for rank, (document_id, score) in enumerate(best.items(), start=1):
            print(f"{rank}. {document_id}  {score:.3f}")
            text = passage_text(*passages.get(document_id, ("", "")))
            if text := textwrap.shorten(text, _SHOWN_CHARACTERS, placeholder=" ..."):
                print(textwrap.indent(textwrap.fill(text, 100), "   "))
    return 0


def _read_typed_questions() -> Iterator[str]:
    """Yield the lines of the standard input, with a prompt in a terminal; an empty line ends it."""
    prompt = "\nquestion (an empty line ends): " if sys.stdin.isatty() else ""
    print(prompt, end="", flush=True)
    while line := sys.stdin.readline().strip():
        yield line
        print(prompt, end="", flush=True)


def _write_run(args: argparse.Namespace, store: EmbeddingStore) -> int:
    bm25_weight = args.bm25_weight or 0.0
    bm25_index = bm25.open_index(store) if bm25_weight > 0 else None
    depth = args.top_k if bm25_index is None else max(args.top_k, bm25.FUSION_DEPTH)
    require_writable(args.output)
    if args.index_file is not None and not args.index_file.exists():
        require_writable(args.index_file)
    show_progress = not args.no_progress
    report = RecordReport(args.on_bad_record)
    if args.split:
        texts = read_split_queries(args.queries, args.split, report)
    else:
        records = read_texts(args.queries, "query", report)
        texts = {query.id: query.passage for query in records}
    print_at_once(report.summary())
    from contaccum.retrieval import search as faiss_index
    from contaccum.retrieval.encode import check_store_fits, encode_texts

    faiss_index.check_factory(args.index, store.shape[1], len(store), args.index_parameters)
    model = load_model(args.model, args)
    check_store_fits(model, store)
    queries = encode_texts(
        model, list(texts.values()), "query", args.batch_size, args.precision, show_progress
    )

    index = faiss_index.open_index(
        args.index_file, store, args.index, args.similarity, args.index_parameters
    )
    start_time = time.perf_counter()
    scores, rows = faiss_index.search(index, queries, depth, show_progress)
    hits = zip(texts, faiss_index.list_hits(index, scores, rows), strict=True)
    if bm25_index is not None:
        bm25_run = bm25.search(bm25_index, store.ids, texts, depth)
        fused = bm25.fuse_runs(dict(hits), bm25_run, bm25_weight)
        best = [dict(list(documents.items())[: args.top_k]) for documents in fused.values()]
        hits = zip(texts, best, strict=True)
    seconds = time.perf_counter() - start_time
    recall = None
    if not args.no_recall:
        recall = faiss_index.recall_against_exact(index, queries, rows, show_progress)

    write_text(args.output, trec_lines(hits, "contaccum"))
    record = {
        "store": {"path": str(args.store), "fingerprint": store.fingerprint, "rows": len(store)},
        "model": {"name": store.metadata.get("model_name"), "similarity": index.metric},
        "queries": {"path": str(args.queries), "count": len(texts)},
        "search": {
            "index": index.factory,
            "index_parameters": index.parameters,
            "k": min(args.top_k, len(store)),
            "bm25_weight": bm25_weight,
            "gpus": len(index.gpus),
            "index_file": str(args.index_file) if args.index_file else None,
            "seconds": seconds,
            "recall": recall,
        },
        **provenance(),
    }
    record_file = Path(f"{args.output}.json")
    write_json(record_file, record)
    quality = "exact search" if args.index == "Flat" else "recall not measured"
    if recall is not None:
        quality = f"recall against exact search: {recall}"
    print(f"{len(texts):,} queries over {len(store):,} rows in {seconds:,.1f} s; {quality}")
    print(f"written: {args.output}, and its record {record_file}")
    return 0


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "search",
        "Search a store that contaccum encode wrote, for questions or for a file of queries.",
        *("index", "index_parameters", "similarity", "query_max_length"),
        *ENCODING_OPTIONS,
        usage="contaccum search MODEL --store FOLDER [QUESTION ... | --queries PATH] [OPTIONS]",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL_HELP)
    store = "store of documents that contaccum encode wrote"
    add("--store", type=Path, required=True, metavar="FOLDER", help=store)
    questions = "questions whose best three documents are shown; without any, they are typed"
    add("questions", nargs="*", metavar="QUESTION", help=questions)
    queries = "write a run for these queries: jsonl, tsv (id, text), DPR's .qa.csv, a BEIR folder"
    add("--queries", type=Path, metavar="PATH", help=queries)
    add("--split", help="of a BEIR folder: only queries with judgements in this split")
    output = "file of the run, beside which RUN.trec.json is written; default: %(default)s"
    add("--output", type=Path, default=Path("run.trec"), metavar="RUN.trec", help=output)
    top_k = "number of documents per query; default: %(default)s"
    add("--top_k", type=positive_int, default=100, metavar="K", help=top_k)
    add(
        "--bm25_weight",
        type=float,
        metavar="WEIGHT",
        help="add the scores of the store's BM25 index with this weight, from 0 to 1; default: 0 "
        "with --queries, and for questions the weight that contaccum fit chose for MODEL",
    )
    index_file = "memory-map the index in this file; if there is none, build and write it"
    add("--index_file", type=Path, metavar="PATH", help=index_file)
    no_recall = "do not measure the recall of an approximate index, which reads the whole store"
    add("--no_recall", action="store_true", help=no_recall)
    args = parser.parse(argv)
    if args.queries is not None and args.questions:
        raise ConfigError("--queries with a QUESTION: give one of them")
    if not 0.0 <= (args.bm25_weight or 0.0) <= 1.0:
        raise ConfigError(f"--bm25_weight must be between 0 and 1, not {args.bm25_weight:g}")
    if args.index_file and args.index == "Flat":
        raise ConfigError("--index_file: --index Flat has no file; leave one out")
    return args
