"""`contaccum encode MODEL --corpus PATH --output FOLDER`: a corpus of any size into a store of embeddings.

Refuses early, then reads and encodes shard by shard. Under torchrun or `accelerate launch` each process takes every
n-th shard; they meet once, at the start.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from contaccum.cli.options import MODEL, Parser, load_model, positive


def run(argv: Sequence[str]) -> int:
    """Returns 0; raises `UserError` for every mistake in the arguments, the data, the model or the folder."""
    from contaccum.retrieval.store import STORED, check_folder

    what = "Encode a corpus of any size into a memory-mapped store of embeddings."
    parser = Parser("encode", what, "output", "passage_max_length", *MODEL)
    add = parser.add_argument
    parser.add_model("a folder, or a name on the model hub")
    forms = "jsonl, psgs_w100.tsv, collection.tsv (plain or gzip), or a BEIR folder"
    add("--corpus", type=Path, required=True, metavar="PATH", help=forms)
    add(
        "--kind",
        choices=("document", "query"),
        default="document",
        help="what the texts are encoded as",
    )
    add("--dtype", choices=STORED, default="float32", help="of the store")
    add(
        "--shard_size",
        type=positive,
        default=50_000,
        metavar="ROWS",
        help="what a killed run loses at most",
    )
    add("--overwrite", action="store_true", help="start anew where another store lies")
    args = parser.parse(argv)
    if args.model is None:
        parser.error("name a MODEL to encode with")
    import torch
    from accelerate import PartialState

    from contaccum.retrieval.corpus import CorpusEncoder, require_texts

    # What cannot be read or written is refused before a model is loaded.
    require_texts(args.corpus, args.kind, args.on_bad_record)
    check_folder(args.output)
    # Unless it is set, accelerate takes each process of a machine without an accelerator for the only one.
    state = PartialState(cpu=args.device == "cpu" or not torch.accelerator.is_available())
    rank = state.process_index
    ranks = state.num_processes
    args.device = args.device or str(state.device)
    model = load_model(args.model, args)
    with state.main_process_first():
        encoder = CorpusEncoder(
            model,
            args.model,
            args.corpus,
            args.output,
            kind=args.kind,
            dtype=args.dtype,
            batch_size=args.batch_size,
            precision=args.precision,
            shard_size=args.shard_size,
            overwrite=args.overwrite and rank == 0,
            on_bad_record=args.on_bad_record,
        )
    state.destroy_process_group()  # a rank may take hours longer than another, and no collective waits so long

    started = time.perf_counter()
    show_progress = not args.no_progress and rank == 0
    encoded = encoder.encode(rank, ranks, show_progress)
    rate = encoded.num_encoded / (time.perf_counter() - started)
    if rank == 0:
        print(encoded.report.summary())
    end = "other ranks are still at work"
    if encoded.is_finished:
        end = f"written: {args.output} ({encoded.report.used:,} rows)"
    print(f"{encoded.num_encoded:,} encoded by rank {rank}, {rate:,.0f} a second; {end}")
    return 0
