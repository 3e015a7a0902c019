"""`contaccum encode MODEL --corpus PATH --output FOLDER`: a corpus of any size into a store of embeddings.

Refuses early, then reads and encodes shard by shard. Under torchrun or `accelerate launch` each process takes every
n-th shard; they meet once, at the start.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contaccum.cli.options import MODEL, Parser, load_model, positive


def run(argv: Sequence[str]) -> int:
    """Returns 0; raises `UserError` for every mistake in the arguments, the data, the model or the folder."""
    from contaccum.retrieval.store import STORED, StoreWriter, check_bits, check_folder

    what = "Encode a corpus of any size into a memory-mapped store of embeddings."
    parser = Parser("encode", what, "output", "passage_max_length", *MODEL)
    add = parser.add_argument
    parser.add_model("a folder, or a name on the model hub")
    forms = "jsonl, psgs_w100.tsv, collection.tsv (plain or gzip), or a BEIR folder"
    add("--corpus", type=Path, required=True, metavar="PATH", help=forms)
    add("--kind", choices=("document", "query"), default="document", help="what the texts are encoded as")
    add("--dtype", choices=STORED, default="float32", help="of the store")
    add("--shard_size", type=positive, default=50_000, metavar="ROWS", help="what a killed run loses at most")
    add("--overwrite", action="store_true", help="start anew where another store lies")
    args = parser.parse(argv)
    if args.model is None:
        parser.error("name a MODEL to encode with")
    import torch
    from accelerate import PartialState
    from tqdm.auto import tqdm

    from contaccum.data import RecordReport
    from contaccum.files import redact
    from contaccum.retrieval.encode import encode_texts, encoding_identity, read_texts

    # What cannot be read or written is refused before a model is loaded.
    next(read_texts(args.corpus, args.kind, RecordReport(args.on_bad_record)), None)
    check_folder(args.output)
    # Unless it is told so, accelerate takes each process of a machine without an accelerator for the only one.
    state = PartialState(cpu=args.device == "cpu" or not torch.accelerator.is_available())
    rank, ranks, args.device = state.process_index, state.num_processes, args.device or str(state.device)
    model = load_model(args.model, args)
    check_bits(args.dtype, model.get_embedding_dimension())
    identity = encoding_identity(model, args.kind, args.precision, args.dtype, args.shard_size)
    notes = {"model_name": redact(args.model), "corpus": {"path": redact(str(args.corpus))}}
    with state.main_process_first():
        writer = StoreWriter(args.output, identity, notes, overwrite=args.overwrite and rank == 0)
    state.destroy_process_group()  # a rank may take hours longer than another, and no collective waits so long

    report, started, encoded = RecordReport(args.on_bad_record), time.perf_counter(), 0
    hidden = args.no_progress or rank > 0

    def encode(texts: list[str]) -> Any:
        nonlocal encoded
        encoded += len(texts)
        return encode_texts(model, texts, args.kind, args.batch_size, args.precision, not hidden)

    texts = read_texts(args.corpus, args.kind, report)
    finished = writer.fill(tqdm(texts, "Shards", unit=f" {args.kind}s", disable=hidden), encode, rank, ranks)
    if rank == 0:
        print(report.summary())
    end = f"written: {args.output} ({report.used:,} rows)" if finished else "other ranks are still at work"
    print(f"{encoded:,} encoded by rank {rank}, {encoded / (time.perf_counter() - started):,.0f} a second; {end}")
    return 0
