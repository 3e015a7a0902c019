"""First experiment with query-side training: a grid of runs, with one JSON file per run.

    python eval/study/split_pairs.py contaccum/data/scifact runs/scifact --dev 0.19 --by_query
    python eval/study/query_side.py runs/scifact --name scifact --model MODEL \\
        --output benchmarks/query_side --work runs/query_side

The data is a BEIR folder with the splits train, dev and test over one corpus. The evaluation
searches the whole corpus. Documents that are relevant to dev or test queries only are never
negatives in training. Every arm is trained for the same number of updates of the same number of
pairs. First each arm is trained with the first seed at every learning rate, then with the other
seeds at the rate with the best dev score. Runs that already have a JSON file are skipped.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from time_study.stores import make_stores

from contaccum import DualEncoder
from contaccum.data import load_beir_folder
from contaccum.data.beir import BeirDataset
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.files import provenance, write_json
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.encode import CorpusEncoder
from contaccum.retrieval.store import EmbeddingStore
from contaccum.training.log import read_log

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
    """A training method of the experiment."""

    settings: dict[str, Any]  # training options in addition to COMMON
    store: str | None  # name of the passage store, if the method needs one
    rates: tuple[str, ...]  # learning rates to try


FULL_RATES = ("5e-5", "1.6e-4", "4e-4", "1e-3")
QUERY_SIDE = {"method": "query_side", "per_device_train_batch_size": 32}
BANK = {"method": "contaccum", "bank_size": 512, "per_device_train_batch_size": 8}
ADAPTER = {**QUERY_SIDE, "lora_r": 16}
ARMS = {
    "query_full_corpus": Arm(QUERY_SIDE, "without_held_out", FULL_RATES),
    "query_adapter_corpus": Arm(ADAPTER, "without_held_out", ("4e-4", "1e-3", "3e-3")),
    "query_full_train": Arm(QUERY_SIDE, "train", FULL_RATES),
    "contaccum": Arm(BANK, None, FULL_RATES[:3]),
}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="a BEIR folder with train, dev and test")
    parser.add_argument("--name", required=True, help="name of the data in result file names")
    parser.add_argument("--model", required=True, help="the model to fine-tune")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rates", nargs="+", help="learning rates of all arms; default: see ARMS")
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of embedding stores and models"
    )
    return parser.parse_args()


def main() -> None:
    """Do all runs that have no result yet, and print all results."""
    args = parse_arguments()
    eval_sets = {split: load_beir_folder(args.data, split) for split in ("dev", "test")}
    train = load_beir_folder(args.data, "train")
    folder = args.work / "stores" / args.name
    stores = make_stores(args.model, args.data, folder, train, eval_sets)
    evaluate_baselines(args, eval_sets, stores["haystack"])
    for name in args.arms:
        arm = ARMS[name]
        for rate in args.rates or arm.rates:
            run_experiment(args, name, rate, args.seeds[0], eval_sets, stores)
        best_rate = choose_rate(args, name)
        for seed in args.seeds[1:]:
            run_experiment(args, name, best_rate, seed, eval_sets, stores)
    print_table(args)


def run_experiment(
    args: argparse.Namespace,
    name: str,
    rate: str,
    seed: int,
    eval_sets: dict[str, BeirDataset],
    stores: dict[str, Path],
) -> None:
    """Train and evaluate a model and write the result, unless there is a result already."""
    result_file = args.output / f"{args.name}-{name}-{rate}-{seed}.json"
    if result_file.exists():
        return
    arm = ARMS[name]
    folder = args.work / result_file.stem
    settings = {
        **COMMON,
        **arm.settings,
        "max_steps": args.updates,
        "learning_rate": rate,
        "seed": seed,
    }
    if arm.store is not None:
        settings["passage_store"] = stores[arm.store]
    settings["model"] = args.model
    settings["train_data"] = args.data
    settings["output_dir"] = folder
    settings["overwrite_output_dir"] = "true"
    command = [sys.executable, "-m", "contaccum.cli", "train"]
    for key, value in settings.items():
        command += [f"--{key}", str(value)]
    cpu_before = cpu_seconds_of_children()
    subprocess.run(command, check=True)
    cpu_seconds = cpu_seconds_of_children() - cpu_before
    log = read_log(folder / "train_log.jsonl")
    haystack = stores["haystack"]
    if arm.store is None:
        # Training has changed the document encoder as well, so the corpus is encoded again.
        haystack = folder / "haystack"
        trained = DualEncoder.from_pretrained(folder, device="cpu")
        CorpusEncoder(trained, args.name, args.data, haystack, overwrite=True).encode()
    documents = StoreDocuments(EmbeddingStore.open(haystack))
    scores = {}
    for split, dataset in eval_sets.items():
        scores[split] = evaluate(folder, dataset, documents)
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
            "median_seconds_per_update": statistics.median(line["seconds"] for line in log),
            "peak_memory_mb": max(line["peak_memory_mb"] for line in log),
            "settings": {key: format_setting(value) for key, value in settings.items()},
            "documents": run_record.get("documents", {}).get("documents"),
            "data_fingerprint": run_record["data"]["fingerprint"],
            **provenance(),
        },
    )
    print(f"{result_file.stem}: dev {scores['dev']:.3f}, test {scores['test']:.3f}", flush=True)


def format_setting(value: str | int | float | Path) -> str:
    """Format a setting for the result file. Of a path, only the last part is kept.

    The other parts of a path are different on every machine.
    """
    text = str(value)
    if isinstance(value, Path) or Path(text).is_absolute():
        return Path(text).name
    return text


def evaluate_baselines(
    args: argparse.Namespace, eval_sets: dict[str, BeirDataset], haystack: Path
) -> None:
    """Evaluate the model before training, and BM25."""
    result_file = args.output / f"{args.name}-base.json"
    if result_file.exists():
        return
    documents = StoreDocuments(EmbeddingStore.open(haystack))
    scores = {}
    bm25 = {}
    for split, dataset in eval_sets.items():
        scores[split] = evaluate(args.model, dataset, documents)
        bm25[split] = RetrievalEvaluator(dataset, [METRIC]).score_bm25()[METRIC]
    result = {"data": args.name, "arm": "base", "scores": scores, "bm25": bm25, **provenance()}
    write_json(result_file, result)


def evaluate(model: str | Path, dataset: BeirDataset, documents: StoreDocuments) -> float:
    """Evaluate a model on a split.

    Args:
        documents: the documents, encoded by the document tower of the same model.
    """
    evaluator = RetrievalEvaluator(dataset, [METRIC])
    evaluator.documents = documents
    encoder = DualEncoder.from_pretrained(model, device="cpu")
    return evaluator.score(encoder)[METRIC]


def cpu_seconds_of_children() -> float:
    """Return the CPU time of all finished child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def choose_rate(args: argparse.Namespace, name: str) -> str:
    """Return the learning rate with the best dev score of the first seed."""
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
