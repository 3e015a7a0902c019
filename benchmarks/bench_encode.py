"""Compare the speed of `contaccum encode` with sentence-transformers, or measure its peak memory.

    python benchmarks/bench_encode.py MODEL --corpus contaccum/data/scifact --limit 300 --threads 2
    python benchmarks/bench_encode.py --stub --rows 10000000

With a MODEL, contaccum and sentence-transformers encode the same documents with the same
`--batch_size`; on a CPU, contaccum lowers it to 8 texts, which is faster. They alternate within one
run, and their embeddings are compared. The time of contaccum includes all that `contaccum encode`
does after loading the model: reading, encoding and writing a store.

With `--stub`, the program encodes a generated corpus with a function instead of a model and reports
the peak memory of its process.
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
    """Encode the corpus with contaccum and sentence-transformers in turns.

    Returns:
        Seconds of each turn, the median speedup of contaccum, and the largest difference between
        the embeddings.
    """
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(args.threads)
    passages = list(read_passages(args.corpus, RecordReport("skip")))[: args.limit]
    texts = [passage.passage for passage in passages]
    model = SentenceTransformer(args.model, device="cpu")

    def encode_batch(batch: list[str]) -> np.ndarray:
        return encode_texts(model, batch, "document", args.batch_size)

    our_seconds = []
    their_seconds = []
    with tempfile.TemporaryDirectory() as name:
        corpus = Path(name, "corpus.jsonl")
        with corpus.open("w", encoding="utf-8") as file:
            for passage in passages:
                row = {"_id": passage.id, "title": passage.title, "text": passage.text}
                file.write(json.dumps(row) + "\n")
        for turn in range(args.repeats):
            store_folder = Path(name, f"store-{turn}")
            started = time.perf_counter()
            identity = encoding_identity(model, "float32", "float32", 4096)
            writer = StoreWriter(store_folder, identity)
            writer.fill(read_texts(corpus, "document", RecordReport()), encode_batch)
            our_seconds.append(time.perf_counter() - started)
            started = time.perf_counter()
            embeddings = model.encode_document(texts, batch_size=args.batch_size)
            their_seconds.append(time.perf_counter() - started)
            print(
                f"turn {turn + 1}: contaccum {our_seconds[-1]:.1f} s, "
                f"sentence-transformers {their_seconds[-1]:.1f} s",
                flush=True,
            )
        stored_embeddings = EmbeddingStore.open(store_folder)[:]
        difference = float(np.abs(stored_embeddings - embeddings).max())
    speedups = [their / our for our, their in zip(our_seconds, their_seconds, strict=True)]
    return {
        "documents": len(passages),
        "seconds": {"ours": our_seconds, "sentence_transformers": their_seconds},
        "difference": difference,
        "speedup": statistics.median(speedups),
    }


def measure_memory(args: argparse.Namespace) -> dict[str, Any]:
    """Encode a generated corpus with a stub in place of a model.

    Returns:
        Peak memory of this process in MB, before the first row and after the last, and seconds.
    """
    # A real run imports this library as well, so its memory belongs to the peak.
    import sentence_transformers  # noqa: F401

    def encode_stub(texts: list[str]) -> np.ndarray:
        lengths = np.fromiter(map(len, texts), dtype=np.float32, count=len(texts))
        return lengths[:, None] / np.arange(1, 385, dtype=np.float32)

    body = " ".join(f"word{number % 977}" for number in range(98))
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.tsv")
        with corpus.open("w", encoding="utf-8") as file:
            file.write("id\ttext\ttitle\n")
            for number in range(args.rows):
                file.write(f"{number}\tpassage {number} {body}\ttitle {number % 1000}\n")
        peak_before = peak_memory_mb("cpu")
        started = time.perf_counter()
        identity = {"dtype": "float16", "shard_size": 50_000, "kind": "document"}
        writer = StoreWriter(Path(folder, "store"), identity)
        is_complete = writer.fill(read_texts(corpus, "document", RecordReport()), encode_stub)
        assert is_complete
        seconds = time.perf_counter() - started
    return {
        "rows": args.rows,
        "peak_mb": peak_memory_mb("cpu"),
        "before_mb": peak_before,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", nargs="?", help="a SentenceTransformer; not needed with --stub")
    add("--stub", action="store_true", help="measure memory instead of speed")
    add("--corpus", type=Path, help="a corpus in a format of `contaccum encode`")
    add("--limit", type=int, default=300, help="number of documents")
    add("--batch_size", type=int, default=32, help="texts per batch")
    add("--repeats", type=int, default=3, help="number of turns")
    add("--threads", type=int, default=1, help="torch's CPU threads")
    add("--rows", type=int, default=1_000_000, help="number of generated documents with --stub")
    add("--output", metavar="FILE.json")
    args = parser.parse_args()
    result = measure_memory(args) if args.stub else measure_speed(args)
    print(result)
    if args.output:
        settings = {name: str(value) for name, value in vars(args).items()}
        write_json(args.output, {"settings": settings, **provenance(), "result": result})


if __name__ == "__main__":
    main()
