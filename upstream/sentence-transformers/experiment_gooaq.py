"""GooAQ and MPNet: what banks add to batches of 128, beside the batch of 1,024 that GradCache makes possible.

All methods take the same 90,000 pairs in the same number of updates of 1,024 pairs. After each run the file has its
record, and a second call goes on with those that it lacks.

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
# What takes the place of the defaults in a dry run.
SMALL = {"pairs": 160, "held_out": 32, "large_batch": 32, "small_batch": 4, "mini_batch": 8, "bank_size": 64}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_file", type=Path, required=True, help="JSON")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--learning_rates", nargs="+", type=float, default=[8e-5], help="every method takes each")
    parser.add_argument("--model", default="microsoft/mpnet-base")
    parser.add_argument("--pairs_file", type=Path, help='instead of GooAQ: lines of {"query": ..., "positive": ...}')
    parser.add_argument("--pairs", type=int, default=100_000, help="of these, held-out ones included")
    parser.add_argument("--held_out", type=int, default=10_000, help="pairs to evaluate on")
    parser.add_argument("--large_batch", type=int, default=1024, help="pairs per update, of all methods")
    parser.add_argument("--small_batch", type=int, default=128, help="pairs that are embedded with gradients at once")
    parser.add_argument("--mini_batch", type=int, default=64, help="of GradCache")
    parser.add_argument("--bank_size", type=int, default=1024)
    parser.add_argument("--nano_beir", action="store_true", help="evaluate on NanoBEIR too")
    parser.add_argument("--dry_run", action="store_true", help="a tiny BERT, and SciFact unless --pairs_file is given")
    if parser.parse_known_args(argv)[0].dry_run:
        parser.set_defaults(**SMALL)
    options = parser.parse_args(argv)
    if options.large_batch % options.small_batch:
        parser.error(f"--small_batch {options.small_batch} does not divide --large_batch {options.large_batch}")
    return options


def load_pairs(options: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Training pairs and held-out ones, with the columns query and positive."""
    if options.pairs_file is not None:
        lines = options.pairs_file.read_text(encoding="utf-8").splitlines()
        dataset = Dataset.from_list([json.loads(line) for line in lines]).select_columns(["query", "positive"])
    elif options.dry_run:
        texts = {}
        for name in ("corpus", "queries"):
            with gzip.open(SCIFACT / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
                texts[name] = {row["_id"]: row["text"] for row in map(json.loads, file)}
        rows = [line.split("\t") for line in (SCIFACT / "qrels" / "train.tsv").read_text().splitlines()[1:]]
        pairs = [{"query": texts["queries"][row[0]], "positive": texts["corpus"][row[1]]} for row in rows]
        dataset = Dataset.from_list(pairs)
    else:
        dataset = load_dataset("sentence-transformers/gooaq", split="train")
        dataset = dataset.rename_columns({"question": "query", "answer": "positive"})
    dataset = dataset.select(range(min(options.pairs, len(dataset))))
    parts = dataset.train_test_split(test_size=options.held_out, seed=12)
    return parts["train"], parts["test"]


def fingerprint(*parts: Dataset) -> str:
    digest = hashlib.sha256()
    for part in parts:
        for row in part:
            digest.update(json.dumps([row["query"], row["positive"]]).encode())
    return digest.hexdigest()


def make_model(options: argparse.Namespace, train: Dataset) -> SentenceTransformer:
    if not options.dry_run:
        return SentenceTransformer(options.model)
    words = Counter(re.findall(r"\w+", " ".join([*train["query"], *train["positive"]]).lower()))
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(word for word, _ in words.most_common(2000))]
    tokenizer = BertTokenizerFast(vocab={token: index for index, token in enumerate(tokens)}, model_max_length=64)
    config = BertConfig(
        vocab_size=len(tokens), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    with tempfile.TemporaryDirectory() as folder:
        BertModel(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        transformer = Transformer(folder, max_seq_length=64)
    return SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu")


def make_evaluator(held_out: Dataset) -> InformationRetrievalEvaluator:
    """Held-out questions against held-out answers, of which equal ones are one document."""
    corpus = {hashlib.sha256(text.encode()).hexdigest(): text for text in held_out["positive"]}
    answers: dict[str, set[str]] = {}
    for row in held_out:
        answers.setdefault(row["query"], set()).add(hashlib.sha256(row["positive"].encode()).hexdigest())
    queries = {str(index): query for index, query in enumerate(answers)}
    relevant = {index: answers[query] for index, query in queries.items()}
    return InformationRetrievalEvaluator(queries, corpus, relevant, name="held-out", show_progress_bar=False)


def train_one(
    options: argparse.Namespace, method: str, learning_rate: float, seed: int, train: Dataset, held_out: Dataset
) -> dict[str, Any]:
    """One run: its settings, scores, seconds of training and peak of GPU memory."""
    set_seed(seed)
    model = make_model(options, train)
    batch_size = options.large_batch if method == "cached_large" else options.small_batch
    loss: Any
    if method == "banked_small":
        loss = BankedMultipleNegativesRankingLoss(model, options.bank_size)
    elif method == "plain_small":
        loss = MultipleNegativesRankingLoss(model)
    else:
        loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=options.mini_batch)
    on_gpu = torch.cuda.is_available() and not options.dry_run
    with tempfile.TemporaryDirectory() as folder:
        args = SentenceTransformerTrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=options.large_batch // batch_size,
            learning_rate=learning_rate,
            warmup_steps=0.1,
            bf16=on_gpu and torch.cuda.is_bf16_supported(),
            batch_sampler=BatchSamplers.NO_DUPLICATES,
            seed=seed,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            use_cpu=not on_gpu,
            disable_tqdm=options.dry_run,
        )
        trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=train, loss=loss)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
    scores = make_evaluator(held_out)(model)
    if options.nano_beir:
        scores |= NanoBEIREvaluator(show_progress_bar=False)(model)
    return {
        "method": method,
        "learning_rate": learning_rate,
        "seed": seed,
        "batch_size": batch_size,
        "updates": trainer.state.global_step,
        "loss": getattr(loss, "get_config_dict", dict)(),
        "scores": {key: float(value) for key, value in scores.items()},
        "ndcg@10": float(scores["held-out_cosine_ndcg@10"]),
        "train_loss": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "seconds": round(seconds, 1),
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation over seeds, for each method and learning rate."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["method"], run["learning_rate"]), []).append(run)
    return [
        {
            "method": method,
            "learning_rate": learning_rate,
            "seeds": len(group),
            "ndcg@10": statistics.mean(run["ndcg@10"] for run in group),
            "ndcg@10_std": statistics.stdev(run["ndcg@10"] for run in group) if len(group) > 1 else None,
            "seconds": statistics.mean(run["seconds"] for run in group),
        }
        for (method, learning_rate), group in groups.items()
    ]


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    train, held_out = load_pairs(options)
    settings = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in vars(options).items()
        if key not in ("output_file", "methods", "seeds", "learning_rates")
    }
    about = {
        "settings": settings,
        "data": {"train": len(train), "held_out": len(held_out), "sha256": fingerprint(train, held_out)},
        "versions": {
            "python": platform.python_version(),
            **{
                module.__name__: module.__version__
                for module in (torch, transformers, sentence_transformers, datasets)
            },
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() and not options.dry_run else "cpu",
        },
    }
    runs: list[dict[str, Any]] = []
    if options.output_file.exists():
        known = json.loads(options.output_file.read_text(encoding="utf-8"))
        if {key: known[key] for key in about} != about:
            raise SystemExit(f"{options.output_file}: of other settings, data or versions; choose another file")
        runs = known["runs"]
    for learning_rate in options.learning_rates:
        for seed in options.seeds:
            for method in options.methods:
                if any((method, learning_rate, seed) == (r["method"], r["learning_rate"], r["seed"]) for r in runs):
                    continue
                runs.append(train_one(options, method, learning_rate, seed, train, held_out))
                text = json.dumps({**about, "summary": summarize(runs), "runs": runs}, indent=1)
                partial = options.output_file.with_suffix(".partial")
                partial.write_text(text + "\n", encoding="utf-8")
                partial.replace(options.output_file)
    for row in summarize(runs):
        print(" ".join(f"{key}={value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
