"""Comparison on GooAQ with MPNet: batches of 128 with and without a bank, and GradCache with batches of 1,024.

All methods train on the same 90,000 pairs, in the same number of updates of 1,024 pairs. The program writes the record
of each run to the output file when the run ends. If you start the program again, it does the missing runs only.

    python experiment_gooaq.py --output_file gooaq.json                 # a GPU and the Hub: 12 runs
    python experiment_gooaq.py --output_file dry_run.json --dry_run     # no GPU, no Hub: a minute
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import platform
import re
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from datasets import Dataset, load_dataset
from transformers import BertConfig, BertModel, BertTokenizerFast, set_seed

import sentence_transformers
from banked_multiple_negatives_ranking import BankedMultipleNegativesRankingLoss
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.sampler import BatchSamplers
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator, NanoBEIREvaluator
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

SCIFACT = Path(__file__).parents[2] / "contaccum" / "data" / "scifact"
METHODS = ("cached_large", "cached_small", "plain_small", "banked_small")
# Default values of the options in a dry run
DRY_RUN_DEFAULTS = {
    "pairs": 160,
    "held_out": 32,
    "large_batch": 32,
    "small_batch": 4,
    "mini_batch": 8,
    "bank_size": 64,
}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_file", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--learning_rates", nargs="+", type=float, default=[8e-5], help="used by every method")
    parser.add_argument("--model", default="microsoft/mpnet-base")
    parser.add_argument("--pairs_file", type=Path, help='jsonl file with "query" and "positive", instead of GooAQ')
    parser.add_argument("--pairs", type=int, default=100_000, help="number of pairs, including the held-out pairs")
    parser.add_argument("--held_out", type=int, default=10_000, help="number of pairs for the evaluation")
    parser.add_argument("--large_batch", type=int, default=1024, help="pairs per update, for all methods")
    parser.add_argument("--small_batch", type=int, default=128, help="pairs per batch of the *_small methods")
    parser.add_argument("--mini_batch", type=int, default=64, help="mini-batch size of GradCache")
    parser.add_argument("--bank_size", type=int, default=1024)
    parser.add_argument("--nano_beir", action="store_true", help="also evaluate on NanoBEIR")
    parser.add_argument("--dry_run", action="store_true", help="use a tiny BERT, and SciFact instead of GooAQ")
    preliminary_options, _ = parser.parse_known_args(argv)
    if preliminary_options.dry_run:
        parser.set_defaults(**DRY_RUN_DEFAULTS)
    options = parser.parse_args(argv)
    if options.large_batch % options.small_batch:
        parser.error(f"--large_batch {options.large_batch} must be a multiple of --small_batch {options.small_batch}")
    return options


def load_pairs(options: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Load training and held-out pairs, with the columns query and positive."""
    if options.pairs_file is not None:
        lines = options.pairs_file.read_text(encoding="utf-8").splitlines()
        dataset = Dataset.from_list([json.loads(line) for line in lines])
        dataset = dataset.select_columns(["query", "positive"])
    elif options.dry_run:
        dataset = load_scifact_pairs()
    else:
        dataset = load_dataset("sentence-transformers/gooaq", split="train")
        dataset = dataset.rename_columns({"question": "query", "answer": "positive"})
    dataset = dataset.select(range(min(options.pairs, len(dataset))))
    parts = dataset.train_test_split(test_size=options.held_out, seed=12)
    return parts["train"], parts["test"]


def load_scifact_pairs() -> Dataset:
    """Load the relevant query-document pairs of SciFact's train split."""
    queries = read_texts(SCIFACT / "queries.jsonl.gz")
    documents = read_texts(SCIFACT / "corpus.jsonl.gz")
    pairs = []
    for line in (SCIFACT / "qrels" / "train.tsv").read_text().splitlines()[1:]:
        query_id, document_id, _ = line.split("\t")
        pairs.append({"query": queries[query_id], "positive": documents[document_id]})
    return Dataset.from_list(pairs)


def read_texts(path: Path) -> dict[str, str]:
    """Read the texts of a gzipped BEIR file, by their ids."""
    texts = {}
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            texts[row["_id"]] = row["text"]
    return texts


def compute_fingerprint(*parts: Dataset) -> str:
    """Return the SHA-256 hash of all pairs."""
    digest = hashlib.sha256()
    for part in parts:
        for row in part:
            digest.update(json.dumps([row["query"], row["positive"]]).encode())
    return digest.hexdigest()


def make_model(options: argparse.Namespace, train: Dataset) -> SentenceTransformer:
    """Load the model. In a dry run, create a tiny BERT whose vocabulary is the most common words of the data."""
    if not options.dry_run:
        return SentenceTransformer(options.model)
    all_text = " ".join([*train["query"], *train["positive"]]).lower()
    word_counts = Counter(re.findall(r"\w+", all_text))
    words = [word for word, _ in word_counts.most_common(2000)]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = BertTokenizerFast(vocab=vocabulary, model_max_length=64)
    config = BertConfig(
        vocab_size=len(tokens), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    with tempfile.TemporaryDirectory() as folder:
        BertModel(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        transformer = Transformer(folder, max_seq_length=64)
    return SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu")


def make_evaluator(held_out: Dataset) -> InformationRetrievalEvaluator:
    """Create an evaluator that searches held-out answers for held-out questions. Equal answers are one document."""
    corpus: dict[str, str] = {}
    answer_ids: dict[str, set[str]] = {}
    for row in held_out:
        answer_id = hashlib.sha256(row["positive"].encode()).hexdigest()
        corpus[answer_id] = row["positive"]
        answer_ids.setdefault(row["query"], set()).add(answer_id)
    queries = {str(index): query for index, query in enumerate(answer_ids)}
    relevant_ids = {query_id: answer_ids[query] for query_id, query in queries.items()}
    return InformationRetrievalEvaluator(queries, corpus, relevant_ids, name="held-out", show_progress_bar=False)


def make_loss(options: argparse.Namespace, method: str, model: SentenceTransformer) -> torch.nn.Module:
    if method == "banked_small":
        return BankedMultipleNegativesRankingLoss(model, options.bank_size)
    if method == "plain_small":
        return MultipleNegativesRankingLoss(model)
    return CachedMultipleNegativesRankingLoss(model, mini_batch_size=options.mini_batch)


def train_and_evaluate(
    options: argparse.Namespace, method: str, learning_rate: float, seed: int, train: Dataset, held_out: Dataset
) -> dict[str, Any]:
    """Train and evaluate one model; return settings, scores, training time and peak GPU memory."""
    set_seed(seed)
    model = make_model(options, train)
    batch_size = options.large_batch if method == "cached_large" else options.small_batch
    loss = make_loss(options, method, model)
    uses_gpu = torch.cuda.is_available() and not options.dry_run
    with tempfile.TemporaryDirectory() as folder:
        args = SentenceTransformerTrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=options.large_batch // batch_size,
            learning_rate=learning_rate,
            warmup_steps=0.1,
            bf16=uses_gpu and torch.cuda.is_bf16_supported(),
            batch_sampler=BatchSamplers.NO_DUPLICATES,
            seed=seed,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            use_cpu=not uses_gpu,
            disable_tqdm=options.dry_run,
        )
        trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=train, loss=loss)
        if uses_gpu:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
    scores = make_evaluator(held_out)(model)
    if options.nano_beir:
        scores.update(NanoBEIREvaluator(show_progress_bar=False)(model))
    loss_settings = loss.get_config_dict() if hasattr(loss, "get_config_dict") else {}
    return {
        "method": method,
        "learning_rate": learning_rate,
        "seed": seed,
        "batch_size": batch_size,
        "updates": trainer.state.global_step,
        "loss": loss_settings,
        "scores": {key: float(value) for key, value in scores.items()},
        "ndcg@10": float(scores["held-out_cosine_ndcg@10"]),
        "train_loss": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "seconds": round(seconds, 1),
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if uses_gpu else None,
    }


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compute mean and standard deviation over the seeds, for each method and learning rate."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["method"], run["learning_rate"]), []).append(run)
    summary = []
    for (method, learning_rate), group in groups.items():
        scores = [run["ndcg@10"] for run in group]
        row = {
            "method": method,
            "learning_rate": learning_rate,
            "seeds": len(group),
            "ndcg@10": statistics.mean(scores),
            "ndcg@10_std": statistics.stdev(scores) if len(scores) > 1 else None,
            "seconds": statistics.mean(run["seconds"] for run in group),
        }
        summary.append(row)
    return summary


def describe_experiment(options: argparse.Namespace, train: Dataset, held_out: Dataset) -> dict[str, Any]:
    """Return the settings, data and versions, which must be the same for all runs in an output file."""
    settings = {}
    for key, value in vars(options).items():
        if key not in ("output_file", "methods", "seeds", "learning_rates"):
            settings[key] = str(value) if isinstance(value, Path) else value
    versions = {"python": platform.python_version()}
    for module in (torch, transformers, sentence_transformers, datasets):
        versions[module.__name__] = module.__version__
    uses_gpu = torch.cuda.is_available() and not options.dry_run
    versions["device"] = torch.cuda.get_device_name() if uses_gpu else "cpu"
    return {
        "settings": settings,
        "data": {
            "train": len(train),
            "held_out": len(held_out),
            "sha256": compute_fingerprint(train, held_out),
        },
        "versions": versions,
    }


def read_finished_runs(path: Path, description: dict[str, Any]) -> list[dict[str, Any]]:
    """Read the runs of an earlier call; exit with an error if its settings, data or versions are different."""
    if not path.exists():
        return []
    report = json.loads(path.read_text(encoding="utf-8"))
    if {key: report[key] for key in description} != description:
        raise SystemExit(f"{path} has runs with other settings, data or versions; choose another --output_file")
    return report["runs"]


def write_report(path: Path, description: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    text = json.dumps({**description, "summary": summarize(runs), "runs": runs}, indent=1)
    partial = path.with_suffix(".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


def main(argv: list[str] | None = None) -> None:
    options = parse_arguments(argv)
    train, held_out = load_pairs(options)
    description = describe_experiment(options, train, held_out)
    runs = read_finished_runs(options.output_file, description)
    finished = {(run["method"], run["learning_rate"], run["seed"]) for run in runs}
    for learning_rate in options.learning_rates:
        for seed in options.seeds:
            for method in options.methods:
                if (method, learning_rate, seed) in finished:
                    continue
                runs.append(train_and_evaluate(options, method, learning_rate, seed, train, held_out))
                write_report(options.output_file, description, runs)
    for row in summarize(runs):
        print(" ".join(f"{key}={value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
