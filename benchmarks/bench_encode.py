"""`contaccum encode` beside sentence-transformers, or the memory that it takes for millions of rows.

    python benchmarks/bench_encode.py MODEL --corpus contaccum/data/scifact --limit 300 --threads 2
    python benchmarks/bench_encode.py --stub --rows 10000000

With a MODEL, both encode the same documents with the same batch size, in turns within one run, and the embeddings are
compared. Ours is all that `contaccum encode` does after the model is loaded: reading, encoding, writing a store. With
`--stub` a made-up corpus goes through a function in place of a model; run it alone, it reports its process's peak.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measuring.memory import peak_memory_mb

from contaccum.data import RecordReport, read_passages
from contaccum.files import provenance, write_json
from contaccum.retrieval.encode import encode_texts, encoding_identity, read_texts
from contaccum.retrieval.store import EmbeddingStore, StoreWriter


def measure_speed(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each per turn, how many times as fast ours is (median), and how far apart the embeddings are."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(args.threads)
    passages = list(read_passages(args.corpus, RecordReport("skip")))[: args.limit]
    texts = [passage.passage for passage in passages]
    model = SentenceTransformer(args.model, device="cpu")
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as name:
        corpus = Path(name, "corpus.jsonl")
        lines = (
            json.dumps({"_id": p.id, "title": p.title, "text": p.text}) + "\n" for p in passages
        )
        corpus.write_text("".join(lines), encoding="utf-8")
        for turn in range(args.repeats):
            store = Path(name, f"store-{turn}")
            started = time.perf_counter()
            writer = StoreWriter(
                store, encoding_identity(model, "document", "float32", "float32", 4096)
            )
            writer.fill(
                read_texts(corpus, "document", RecordReport()),
                lambda some: encode_texts(model, some, "document", args.batch_size),
            )
            ours.append(time.perf_counter() - started)
            started = time.perf_counter()
            embeddings = model.encode_document(texts, batch_size=args.batch_size)
            theirs.append(time.perf_counter() - started)
            print(
                f"turn {turn + 1}: ours {ours[-1]:.1f} s, sentence-transformers {theirs[-1]:.1f} s",
                flush=True,
            )
        stored = EmbeddingStore.open(store)
        difference = float(np.abs(stored[:] - embeddings).max())
    result = {
        "documents": len(passages),
        "seconds": {"ours": ours, "sentence_transformers": theirs},
    }
    speedup = statistics.median(their / our for our, their in zip(ours, theirs, strict=True))
    return {**result, "difference": difference, "speedup": speedup}


def measure_memory(args: argparse.Namespace) -> dict[str, Any]:
    """Megabytes of this process at its peak, before the first row and after the last, and seconds."""
    import sentence_transformers  # noqa: F401  # part of what a real run holds

    def stub(texts: list[str]) -> np.ndarray:
        lengths = np.fromiter(map(len, texts), dtype=np.float32, count=len(texts))
        return lengths[:, None] / np.arange(1, 385, dtype=np.float32)

    body = " ".join(f"word{n % 977}" for n in range(98))
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.tsv")
        with corpus.open("w", encoding="utf-8") as file:
            file.write("id\ttext\ttitle\n")
            file.writelines(
                f"{n}\tpassage {n} {body}\ttitle {n % 1000}\n" for n in range(args.rows)
            )
        before, started = peak_memory_mb("cpu"), time.perf_counter()
        writer = StoreWriter(
            Path(folder, "store"), {"dtype": "float16", "shard_size": 50_000, "kind": "document"}
        )
        assert writer.fill(read_texts(corpus, "document", RecordReport()), stub)
        seconds = time.perf_counter() - started
    return {
        "rows": args.rows,
        "peak_mb": peak_memory_mb("cpu"),
        "before_mb": before,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", nargs="?", help="none with --stub")
    add("--stub", action="store_true", help="memory instead of speed")
    add("--corpus", type=Path, help="what contaccum encode takes")
    for name, value in {
        "limit": 300,
        "batch_size": 32,
        "repeats": 3,
        "threads": 1,
        "rows": 1_000_000,
    }.items():
        add(f"--{name}", type=int, default=value)
    add("--output", metavar="FILE.json")
    args = parser.parse_args()
    result = measure_memory(args) if args.stub else measure_speed(args)
    print(result)
    if args.output:
        settings = {name: str(value) for name, value in vars(args).items()}
        write_json(args.output, {"settings": settings, **provenance(), "result": result})


if __name__ == "__main__":
    main()
