"""The first check of query-side training: a grid of runs on one data set, a JSON file for each.

    python eval/study/split_pairs.py contaccum/data/scifact runs/scifact --dev 0.19 --by_query
    python eval/study/query_side.py runs/scifact --name scifact --model MODEL \\
        --output benchmarks/query_side --work runs/query_side

The data is a BEIR folder with the splits train, dev and test over one corpus. Passages that only dev
or test queries need are part of the haystack, and never negatives in training. Every arm gets as many
updates of as many pairs. First each arm is trained with the first seed at every rate; then, with the
other seeds, at the rate whose dev score is best. A cell whose JSON is there is skipped.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from contaccum import DualEncoder
from contaccum.data import load_beir_folder
from contaccum.data.beir import BeirDataset
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.files import provenance, write_json
from contaccum.retrieval.corpus import CorpusEncoder
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.encode import encoding_identity
from contaccum.retrieval.store import EmbeddingStore, StoreWriter

METRIC = "ndcg@10"
PAIRS_PER_UPDATE = 128
COMMON = {
    "total_train_batch_size": PAIRS_PER_UPDATE,
    "temperature": 0.05,
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
    "weight_decay": 0.01,
    "dropout": 0.0,
    "save_strategy": "no",
    "logging_steps": 4,
    "disable_tqdm": "true",
}


class Arm(NamedTuple):
    """A way to train: settings beside those of all, the store if it has one, and its rates."""

    settings: dict[str, Any]
    store: str | None
    rates: tuple[str, ...]


FULL_RATES = ("5e-5", "1.6e-4", "4e-4", "1e-3")
QUERY_SIDE = {"method": "query_side", "per_device_train_batch_size": 32}
BANK = {"method": "contaccum", "bank_size": 512, "per_device_train_batch_size": 8}
ADAPTER = {**QUERY_SIDE, "lora_r": 16}
ARMS = {
    "query_full_corpus": Arm(QUERY_SIDE, "corpus", FULL_RATES),
    "query_adapter_corpus": Arm(ADAPTER, "corpus", ("4e-4", "1e-3", "3e-3")),
    "query_full_train": Arm(QUERY_SIDE, "train", FULL_RATES),
    "contaccum": Arm(BANK, None, FULL_RATES[:3]),
}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="a BEIR folder with train, dev and test")
    parser.add_argument("--name", required=True, help="of the data, in names of results")
    parser.add_argument("--model", required=True)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rates", nargs="+", help="of all arms; default: a ladder for each")
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--work", type=Path, required=True, help="folder of stores and models")
    return parser.parse_args()


def main() -> None:
    """Do the cells that are missing, and print the table."""
    args = parse_arguments()
    haystack = {split: load_beir_folder(args.data, split) for split in ("dev", "test")}
    train = load_beir_folder(args.data, "train")
    stores = make_stores(args, train, haystack)
    score_base(args, haystack, stores["haystack"])
    for name in args.arms:
        arm = ARMS[name]
        for rate in args.rates or arm.rates:
            run_cell(args, name, rate, args.seeds[0], haystack, stores)
        best_rate = choose_rate(args, name)
        for seed in args.seeds[1:]:
            run_cell(args, name, best_rate, seed, haystack, stores)
    print_table(args)


def make_stores(
    args: argparse.Namespace, train: BeirDataset, haystack: dict[str, BeirDataset]
) -> dict[str, Path]:
    """Encode the whole corpus once; its parts for training take their embeddings from there."""
    model = DualEncoder.from_pretrained(args.model, device="cpu")
    folder = args.work / "stores" / args.name
    whole = folder / "haystack"
    CorpusEncoder(model, args.name, args.data, whole).encode()

    train_documents = positives_of(train)
    held_out = positives_of(haystack["dev"]) | positives_of(haystack["test"])
    in_training = [name for name in train.corpus if name not in held_out - train_documents]
    write_part(whole, folder / "corpus", model, train, in_training)
    write_part(whole, folder / "train", model, train, sorted(train_documents))
    return {"haystack": whole, "corpus": folder / "corpus", "train": folder / "train"}


def positives_of(dataset: BeirDataset) -> set[str]:
    """Return the ids of all relevant documents."""
    positives = set()
    for judged in dataset.qrels.values():
        positives |= {document for document, grade in judged.items() if grade > 0}
    return positives


def write_part(
    whole: Path, folder: Path, model: DualEncoder, dataset: BeirDataset, names: Sequence[str]
) -> None:
    """Write a store of some documents, with the embeddings that the whole store has."""
    documents = StoreDocuments(EmbeddingStore.open(whole))

    def look_up(texts: list[str]) -> np.ndarray:
        return documents.find_embeddings(texts)[1]

    passages = []
    for name in names:
        document = dataset.corpus[name]
        passages.append((name, document["title"], document["text"]))
    identity = encoding_identity(model, "document", "float32", "float32", 50_000)
    StoreWriter(folder, identity, {"model_name": "part of the corpus"}).fill(passages, look_up)


def run_cell(
    args: argparse.Namespace,
    name: str,
    rate: str,
    seed: int,
    haystack: dict[str, BeirDataset],
    stores: dict[str, Path],
) -> None:
    """Train and score a cell, and write its result, unless it is there."""
    result_file = args.output / f"{args.name}-{name}-{rate}-{seed}.json"
    if result_file.exists():
        return
    arm = ARMS[name]
    folder = args.work / result_file.stem
    settings = {**COMMON, **arm.settings, "max_steps": args.updates}
    settings |= {"learning_rate": rate, "seed": seed}
    if arm.store is not None:
        settings["passage_store"] = stores[arm.store]
    settings |= {"model": args.model, "train_data": args.data, "output_dir": folder}
    settings["overwrite_output_dir"] = "true"
    command = [sys.executable, "-m", "contaccum.cli", "train"]
    for key, value in settings.items():
        command += [f"--{key}", str(value)]
    started = time.perf_counter()
    cpu_before = cpu_seconds_of_children()
    subprocess.run(command, check=True)
    cpu_seconds = cpu_seconds_of_children() - cpu_before
    log_lines = (folder / "train_log.jsonl").read_text(encoding="utf-8").splitlines()
    log = [json.loads(line) for line in log_lines]
    whole = stores["haystack"]
    if arm.store is None:  # its documents have moved
        whole = folder / "haystack"
        trained = DualEncoder.from_pretrained(folder, device="cpu")
        CorpusEncoder(trained, args.name, args.data, whole, overwrite=True).encode()
    documents = StoreDocuments(EmbeddingStore.open(whole))
    scores = {split: score(folder, dataset, documents) for split, dataset in haystack.items()}
    run_record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    write_json(
        result_file,
        {
            "data": args.name,
            "arm": name,
            "rate": rate,
            "seed": seed,
            "scores": scores,
            "pairs": sum(line["pairs"] for line in log),
            "updates": len(log),
            "cpu_seconds_of_training": round(cpu_seconds, 1),
            "seconds_of_training": round(time.perf_counter() - started, 1),
            "median_seconds_per_update": statistics.median(line["seconds"] for line in log),
            "peak_memory_mb": max(line["peak_memory_mb"] for line in log),
            "settings": {key: without_folders(value) for key, value in settings.items()},
            "documents": run_record.get("documents", {}).get("documents"),
            "data_fingerprint": run_record["data"]["fingerprint"],
            **provenance(),
        },
    )
    print(f"{result_file.stem}: dev {scores['dev']:.3f}, test {scores['test']:.3f}", flush=True)


def without_folders(value: Any) -> str:
    """Return a setting as text; of a path the last part, as the rest is this machine's."""
    text = str(value)
    return Path(text).name if isinstance(value, Path) or Path(text).is_absolute() else text


def score_base(args: argparse.Namespace, haystack: dict[str, BeirDataset], whole: Path) -> None:
    """Score the model as it is, and BM25."""
    result_file = args.output / f"{args.name}-base.json"
    if result_file.exists():
        return
    documents = StoreDocuments(EmbeddingStore.open(whole))
    scores = {}
    bm25 = {}
    for split, dataset in haystack.items():
        scores[split] = score(args.model, dataset, documents)
        bm25[split] = RetrievalEvaluator(dataset, [METRIC]).score_bm25()[METRIC]
    result = {"data": args.name, "arm": "base", "scores": scores, "bm25": bm25, **provenance()}
    write_json(result_file, result)


def score(model: Any, dataset: BeirDataset, documents: StoreDocuments) -> float:
    """Score a model on a split; its document tower encoded the ``documents``."""
    evaluator = RetrievalEvaluator(dataset, [METRIC])
    evaluator.documents = documents
    encoder = DualEncoder.from_pretrained(model, device="cpu")
    return evaluator.score(encoder)[METRIC]


def cpu_seconds_of_children() -> float:
    """Return the CPU time of all processes that this one has started."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def choose_rate(args: argparse.Namespace, name: str) -> str:
    """Return the rate with the best dev score of the first seed."""
    scores = {}
    for rate in args.rates or ARMS[name].rates:
        file = args.output / f"{args.name}-{name}-{rate}-{args.seeds[0]}.json"
        scores[rate] = json.loads(file.read_text(encoding="utf-8"))["scores"]["dev"]
    return max(scores, key=lambda rate: scores[rate])


def print_table(args: argparse.Namespace) -> None:
    """Print all results of the data set."""
    for file in sorted(args.output.glob(f"{args.name}-*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        scores = result["scores"]
        print(f"{file.stem:45} dev {100 * scores['dev']:.1f} test {100 * scores['test']:.1f}")


if __name__ == "__main__":
    main()
