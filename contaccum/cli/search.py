"""`contaccum search MODEL --store FOLDER --queries FILE --output run.trec`: the best rows of a store for each query.

What cannot work is refused before a query is encoded. Nothing is scored here: that is for `contaccum evaluate` and
`open_qa`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contaccum.cli.options import MODEL, Parser, load_model, positive
from contaccum.errors import ConfigError, DataError
from contaccum.files import provenance, require_writable, write_json, write_text


def run(argv: Sequence[str]) -> int:
    """Returns 0; raises `UserError` for every mistake in the arguments, the data, the model, the store or the index."""
    what = "Search a store that contaccum encode wrote, and write a run in TREC's format."
    parser = Parser("search", what, "index", "index_parameters", "similarity", *MODEL)
    parser.set_defaults(passage_max_length=None)
    add = parser.add_argument
    parser.add_model("that wrote the store; none where --queries is a store too")
    add(
        "--store",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="documents that contaccum encode wrote",
    )
    forms = "jsonl, tsv (id, text), DPR's .qa.csv, a BEIR folder, or a store of encoded queries"
    add("--queries", type=Path, required=True, metavar="PATH", help=forms)
    add("--split", help="of a BEIR folder the queries that this split judges, not all")
    add(
        "--output",
        type=Path,
        default=Path("run.trec"),
        metavar="RUN.trec",
        help="and RUN.json beside it",
    )
    add("--top_k", type=positive, default=100, metavar="K", help="documents per query")
    add(
        "--index_file",
        type=Path,
        metavar="PATH",
        help="map this index; where there is none, build it and write it",
    )
    args = parser.parse(argv)
    if args.output.suffix != ".trec":
        raise ConfigError(
            f"{args.output}: the output is a run in TREC's format; end its name in .trec"
        )
    if args.index_file and args.index == "Flat":
        raise ConfigError(
            "--index Flat searches the store itself: leave --index_file out, or name another --index"
        )
    from contaccum.evaluation.results import trec_lines
    from contaccum.retrieval import index as faiss_index
    from contaccum.retrieval.store import EmbeddingStore

    require_writable(args.output)
    store = EmbeddingStore.open(args.store)
    how = {
        "factory": args.index,
        "metric": args.similarity or store.similarity,
        "parameters": args.index_parameters,
    }
    faiss_index.check_factory(dimension=store.shape[1], n=len(store), **how)
    names, queries = _queries(args, store)
    file = args.index_file
    index = (
        faiss_index.open_index(file, store, **how)
        if file
        else faiss_index.build_index(store, **how)
    )
    started = time.perf_counter()
    scores, rows = faiss_index.search(
        index, queries, args.top_k, show_progress=not args.no_progress
    )
    seconds = time.perf_counter() - started

    found = (store.ids(line[line >= 0]) for line in rows)  # rows that are not there come last
    hits = (
        dict(zip(ids, line.tolist(), strict=False)) for ids, line in zip(found, scores, strict=True)
    )
    write_text(args.output, trec_lines(zip(names, hits, strict=True), "contaccum"))
    about = {
        "index": index.factory,
        "index_parameters": index.parameters,
        "k": rows.shape[1],
        "gpus": index.num_gpus,
    }
    about |= {"index_file": file and str(file), "seconds": seconds}
    about["recall"] = faiss_index.recall_against_exact(index, queries, rows)
    record = {
        "store": {"path": str(args.store), "fingerprint": store.fingerprint, "rows": len(store)},
        "model": {"name": store.metadata.get("model_name"), "similarity": index.metric},
        "queries": {"path": str(args.queries), "count": len(names)},
        "search": about,
        **provenance(),
    }
    write_json(args.output.with_suffix(".json"), record)
    print(
        f"{len(names):,} queries over {len(store):,} rows in {seconds:,.1f} s; recall: {about['recall'] or 'exact'}"
    )
    print(f"written: {args.output}, and a record beside it")
    return 0


def _queries(args: argparse.Namespace, store: Any) -> tuple[list[str], Any]:
    """Ids and embeddings (n, d) of queries from their own store, or encoded now; of the store's own model alone."""
    from contaccum.data import RecordReport, load_beir_folder
    from contaccum.retrieval.encode import encode_texts, model_fingerprint, read_texts
    from contaccum.retrieval.store import EmbeddingStore
    from contaccum.retrieval.store_files import STORE_FILE

    def check(model: str | None, kind: str) -> None:
        if (store.metadata["kind"], kind) != ("document", "query"):
            raise DataError(
                f"{args.store}: of {store.metadata['kind']}s, {args.queries}: of {kind}s (see encode --kind)"
            )
        if model != store.metadata["model"]:
            name = store.metadata.get("model_name")
            raise DataError(
                f"{args.store}: was encoded by another model, {name}: use that one, or encode again"
            )

    if (args.queries / STORE_FILE).is_file():
        encoded = EmbeddingStore.open(args.queries)
        check(encoded.metadata["model"], encoded.metadata["kind"])
        return encoded.ids(range(len(encoded))), encoded[:]
    if args.model is None:
        raise ConfigError(
            "name a MODEL to encode the queries with, or give a store of encoded queries to --queries"
        )
    report = RecordReport(args.on_bad_record)
    if args.split:
        texts = load_beir_folder(args.queries, args.split, report=report).queries
    else:
        texts = {query.id: query.passage for query in read_texts(args.queries, "query", report)}
    print(report.summary())
    model = load_model(args.model, args)
    check(model_fingerprint(model, "document"), "query")
    settings = (args.batch_size, args.precision, not args.no_progress)
    return list(texts), encode_texts(model, list(texts.values()), "query", *settings)
