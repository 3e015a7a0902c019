"""`contaccum encode MODEL --corpus PATH --output FOLDER`: encode a corpus into an embedding store.

Under torchrun or `accelerate launch`, each of N processes encodes every N-th shard. The processes
synchronise once, at the start.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from contaccum import work
from contaccum.cli.options import (
    ENCODING_OPTIONS,
    MODEL_HELP,
    Parser,
    load_model,
    positive_int,
    print_at_once,
)
from contaccum.data.corpus import require_texts
from contaccum.encoders.names import require_model
from contaccum.errors import ConfigError
from contaccum.retrieval import bm25
from contaccum.retrieval.store import STORE, STORED, EmbeddingStore, write_parquet


def run(argv: Sequence[str]) -> int:
    """Encode a corpus and return exit code 0."""
    args = _parse_arguments(argv)
    print_at_once(f"encoding {args.corpus} with {args.model}")
    require_model(args.model)
    require_texts(args.corpus, args.on_bad_record, args.corpus_columns)
    work.require_own_folder(args.output, STORE)
    import torch
    from accelerate import PartialState

    from contaccum.distributed import RANK_TIMEOUT
    from contaccum.retrieval.encode import CorpusEncoder

    # Without --device, each rank on a machine has a GPU of its own, or all ranks use the CPU, where
    # PartialState without cpu=True would report a single process for all ranks.
    use_cpu = args.device == "cpu" or not torch.accelerator.is_available()
    state = PartialState(cpu=use_cpu, timeout=RANK_TIMEOUT)
    args.device = args.device or str(state.device)
    rank = state.process_index
    num_ranks = state.num_processes
    model = load_model(args.model, args)
    # Rank 0 creates the store, and the other ranks open it afterwards.
    with state.main_process_first():
        encoder = CorpusEncoder(
            model,
            args.model,
            args.corpus,
            args.output,
            dtype=args.dtype,
            batch_size=args.batch_size,
            precision=args.precision,
            shard_size=args.shard_size,
            overwrite=args.overwrite and rank == 0,
            on_bad_record=args.on_bad_record,
            columns=args.corpus_columns,
            has_passages=not args.no_texts,
        )
    # One rank may need hours more than another, so waiting in a collective could time out.
    state.destroy_process_group()

    start_time = time.perf_counter()
    show_progress = not args.no_progress and rank == 0
    is_finished = encoder.encode(rank, num_ranks, show_progress)
    texts_per_second = encoder.num_encoded / (time.perf_counter() - start_time)
    if rank == 0:
        print(encoder.report.summary())
        if line := encoder.describe_cut():
            print(line)
    status = "other ranks are still encoding"
    if is_finished:
        status = f"written: {args.output} ({encoder.report.used:,} rows)"
    print(
        f"{encoder.num_encoded:,} encoded by rank {rank}, "
        f"{texts_per_second:,.0f} per second; {status}"
    )
    # The rank that finishes the store writes what is derived from it.
    if is_finished and args.format == "parquet":
        print(f"written: {write_parquet(EmbeddingStore.open(args.output), show_progress)}")
    if is_finished and args.bm25:
        print(f"written: {bm25.write_index(EmbeddingStore.open(args.output), show_progress)}")
    return 0


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "encode",
        "Encode a corpus of any size into a memory-mapped store of embeddings.",
        "corpus_columns",
        *ENCODING_OPTIONS,
        usage="contaccum encode MODEL --corpus PATH --output FOLDER [OPTIONS]",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL_HELP)
    documents = "documents: jsonl, a JSON array or a table (plain or gzip), parquet, a BEIR folder"
    add("--corpus", type=Path, required=True, metavar="PATH", help=documents)
    add("--output", type=Path, required=True, metavar="FOLDER", help="folder of the store")
    add("--dtype", choices=STORED, default="float32", help="type in the store; default: float32")
    parquet = (
        "parquet: also write ids, texts and embeddings to FOLDER/parquet; default: %(default)s"
    )
    add("--format", choices=("store", "parquet"), default="store", help=parquet)
    words = "also write a BM25 index to FOLDER/bm25, for contaccum search"
    add("--bm25", action="store_true", help=words)
    bare = "keep no titles and texts; then there is neither --bm25 nor --format parquet"
    add("--no_texts", action="store_true", help=bare)
    rows = "rows per shard; a killed run loses at most one shard; default: %(default)s"
    add("--shard_size", type=positive_int, default=50_000, metavar="ROWS", help=rows)
    overwrite = "replace a store in the folder; without it, an unfinished one is continued"
    add("--overwrite", action="store_true", help=overwrite)
    args = parser.parse(argv)
    if args.no_texts and (args.bm25 or args.format == "parquet"):
        raise ConfigError("--no_texts: --bm25 and --format parquet need the texts; leave one out")
    return args
