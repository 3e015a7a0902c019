"""`contaccum encode MODEL --corpus PATH --output FOLDER`: a corpus of any size into a store of embeddings.

Refuses early, then reads and encodes shard by shard. Under torchrun or `accelerate launch` each process takes every
n-th shard; they meet once, at the start.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from contaccum.data.beir_folder import beir_file
from contaccum.data.passages import Passage, count_roughly, read_passages
from contaccum.data.questions import load_questions
from contaccum.data.records import RecordReport
from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.arguments import Parser, load_model
from contaccum.evaluation.checks import check_device
from contaccum.evaluation.provenance import git_commit, package_versions
from contaccum.redaction import redact
from contaccum.retrieval.corpus_shards import Progress, corpus_shards, distinct_passages, encode_shards
from contaccum.retrieval.encoding import AUTOCAST_DTYPES, Kind, encode_texts
from contaccum.retrieval.store import DTYPES
from contaccum.retrieval.store_identity import store_identity
from contaccum.retrieval.store_writer import StoreWriter, check_folder

DEFAULT_SHARD_SIZE = 50_000


def run(argv: Sequence[str] | None = None) -> int:
    """`contaccum encode MODEL --corpus PATH --output FOLDER`; returns 0.

    Raises `UserError` for every mistake in the arguments, the data, the model or the folder.
    """
    args = _parse(argv)
    team = _team(args)
    # What cannot be read is refused before a model is loaded.
    next(read_source(args.corpus, args.kind, RecordReport(args.on_bad_record)), None)
    check_folder(args.output)
    model = load_model(args)
    autocast_dtype = None if args.precision == "float32" else args.precision
    identity = store_identity(model, args.kind, autocast_dtype, args.dtype, args.shard_size)
    with team.first():
        if team.rank == 0:
            notes = {"model_name": redact(str(args.model)), "corpus": {"path": redact(str(args.corpus))}}
            software = {"versions": package_versions(), "git_commit": git_commit()}
            writer = StoreWriter.start(args.output, identity, notes, software, args.overwrite)
        else:
            writer = StoreWriter.join(args.output, identity)
    team.part()

    report = RecordReport(args.on_bad_record)
    started = time.perf_counter()
    with _Bar(args, team) as bar:

        def encode(texts: list[str]) -> Any:
            return encode_texts(
                model, texts, args.kind, args.batch_size, autocast_dtype, show_progress=False, on_encoded=bar.encoded
            )

        progress, whole = fill_store(
            writer, args.corpus, args.kind, report, encode, team.rank, team.size, bar.shard_done
        )
    seconds = time.perf_counter() - started
    if team.rank == 0:
        print(report.summary())
    speed = f", {progress.encoded / seconds:,.0f} a second" if progress.encoded else ""
    mine = f"{progress.encoded:,} encoded{f' by rank {team.rank}' if team.size > 1 else ''}{speed}"
    if whole:
        print(f"{mine}; written: {args.output} ({report.used:,} rows in {progress.shards:,} shards)")
    else:
        print(f"{mine}; other ranks are still at work")
    return 0


def fill_store(
    writer: StoreWriter,
    corpus: Path,
    kind: Kind,
    report: RecordReport,
    encode: Callable[[list[str]], np.ndarray],
    rank: int = 0,
    ranks: int = 1,
    after_shard: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Progress, bool]:
    """Read a corpus, encode what the store lacks of it (see `encode_shards`), and whether the store is whole then."""
    passages = distinct_passages(read_source(corpus, kind, report), corpus, report)
    shards = corpus_shards(passages, writer.about["shard_size"])
    progress = encode_shards(shards, encode, writer, rank, ranks, after_shard)
    report.refuse_if_nothing_left(corpus, report.used, "passages")
    about = {"path": redact(str(corpus)), "fingerprint": progress.fingerprint, "records": report.summary()}
    return progress, writer.finish(progress.shards, {"corpus": about})


def read_source(path: Path, kind: Kind, report: RecordReport) -> Iterator[Passage]:
    """Documents as `read_passages`; queries likewise, of a BEIR folder's queries.jsonl or of DPR's .csv too."""
    path = source_file(path, kind)
    if kind == "query" and path.name.removesuffix(".gz").endswith(".csv"):
        questions = load_questions(path, report.on_bad_record)
        report.restore(questions.report.to_dict())
        return (Passage(name, "", text) for name, text in questions.texts.items())
    return read_passages(path, report)


def source_file(path: Path, kind: Kind) -> Path:
    """The file of a BEIR folder that texts of a kind are in; the path itself where it is no folder."""
    return beir_file(path, "queries.jsonl" if kind == "query" else "corpus.jsonl") if path.is_dir() else path


class _Team(NamedTuple):
    """The processes that encode together, and this one's place among them."""

    rank: int
    size: int
    first: Callable[[], Any]
    part: Callable[[], None]


def _team(args: argparse.Namespace) -> _Team:
    """Who else encodes; sets the device of this process where several share the machine's."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size < 2:
        if args.device is not None:
            check_device(args.device)
        return _Team(0, 1, nullcontext, lambda: None)
    import torch
    from accelerate import PartialState

    # Unless it is told so, accelerate takes each process of a machine without an accelerator for the only one.
    state = PartialState(cpu=args.device == "cpu" or (args.device is None and not torch.accelerator.is_available()))
    if state.num_processes != size:
        raise ConfigError(f"{size} processes cannot work together on {state.device} (give them --device cpu)")
    if args.device is None:
        args.device = str(state.device)
    check_device(args.device)
    # Nothing is exchanged after the start: a rank may take hours longer than another, and no collective waits so long.
    return _Team(state.process_index, state.num_processes, state.main_process_first, state.destroy_process_group)


class _Bar:
    """Passages of this process's shards; rank 0 alone shows it. The whole is known once the lines are counted."""

    def __init__(self, args: argparse.Namespace, team: _Team) -> None:
        from tqdm.auto import tqdm

        what = "queries" if args.kind == "query" else "documents"
        among = f" (rank 0 of {team.size})" if team.size > 1 else ""
        self._source = source_file(args.corpus, args.kind)
        self._ranks = team.size
        self._kept = 0
        # Batches come longest first, so that the speed of the last moment says little: the bar shows the mean.
        hidden = args.no_progress or team.rank > 0
        self._bar = tqdm(unit=f" {what}", desc=f"Encoding {what}{among}", disable=hidden, smoothing=0)

    def __enter__(self) -> _Bar:
        if not self._bar.disable:
            # Counting a large file takes a while, and encoding need not wait for it.
            _in_background(self._count)
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def encoded(self, count: int) -> None:
        self._bar.update(count)

    def shard_done(self, progress: Progress) -> None:
        found, self._kept = progress.kept - self._kept, progress.kept
        if found and not self._bar.disable:
            self._bar.initial += found  # what lay there says nothing about our speed
            self._bar.update(found)

    def _count(self) -> None:
        with suppress(DataError, OSError, EOFError, zlib.error, ValueError):
            self._bar.total = -(-count_roughly(self._source) // self._ranks)


def _in_background(function: Callable[[], None]) -> None:
    threading.Thread(target=function, daemon=True).start()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="contaccum encode",
        description="Encode a corpus of any size into a memory-mapped store of embeddings.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder, or a name on the model hub")
    add(
        "--corpus",
        type=Path,
        required=True,
        metavar="PATH",
        help="jsonl, parquet, psgs_w100.tsv, collection.tsv (plain or gzip), or a BEIR folder",
    )
    add("--output", type=Path, required=True, metavar="FOLDER", help="the store; goes on with what lies there")
    add("--kind", choices=("document", "query"), default="document", help="what the texts are encoded as")
    add("--dtype", choices=DTYPES, default="float32", help="of the store")
    add("--precision", choices=("float32", *AUTOCAST_DTYPES), default="float32", help="of the encoder")
    add("--batch_size", type=int, default=32, help="texts of the greatest length per batch")
    add("--shard_size", type=int, default=DEFAULT_SHARD_SIZE, metavar="ROWS", help="what a killed run loses at most")
    add("--overwrite", action="store_true", help="start anew where another store lies")
    add("--query_max_length", type=int, metavar="TOKENS")
    add("--passage_max_length", type=int, metavar="TOKENS")
    add("--on_bad_record", choices=("stop", "skip"), default="stop")
    add("--device", help="of the model, such as cpu or cuda:1")
    add("--no_progress", action="store_true")
    add("--trust_remote_code", action="store_true", help="run code that comes with the model")
    args = parser.parse(argv)
    for name in ("batch_size", "shard_size"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{name} must be at least 1, not {getattr(args, name)}")
    return args
