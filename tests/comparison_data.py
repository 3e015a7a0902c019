"""A tiny encoder with training pairs and a BEIR folder, and made-up results of a comparison's runs."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import torch
from sample_texts import sentences

METRICS = ("NDCG@10", "Recall@100", "MRR@10", "Accuracy@20")


def write_tiny_training(root: Path, config: Any, tokenizer: Any) -> list[str]:
    """Options of a run that takes a second: 43 pairs, n=4, K=3, two epochs of 4 updates.

    ``root / "beir"`` is to be scored on: 30 documents, 12 queries.
    """
    from transformers import AutoModel

    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(root / "backbone")
    tokenizer.save_pretrained(root / "backbone")
    rows = zip(sentences(43, 1), sentences(43, 2, 9), strict=True)
    (root / "pairs.jsonl").write_text("".join(json.dumps({"query": q, "positive": p}) + "\n" for q, p in rows))
    (root / "beir" / "qrels").mkdir(parents=True)
    corpus = [{"_id": f"d{i}", "text": text} for i, text in enumerate(sentences(30, 4, 9))]
    queries = [{"_id": f"q{i}", "text": text} for i, text in enumerate(sentences(12, 5))]
    for name, records in (("corpus", corpus), ("queries", queries)):
        (root / "beir" / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    judged = "\n".join(f"q{i}\td{(7 * i + j) % 30}\t{1 - j % 2}" for i in range(12) for j in range(3))
    (root / "beir" / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}\n")
    settings = "pooling=mean normalize=true num_train_epochs=2 learning_rate=1e-3 bank_size=20 use_cpu=true"
    settings += f" per_device_train_batch_size=4 gradient_accumulation_steps=3 model={root / 'backbone'}"
    return [f"--{setting}" for setting in f"{settings} train_data={root / 'pairs.jsonl'}".split()]


def score(entry: str, labels: dict[str, str], seed: int, query: int) -> float:
    """Made-up: better with a greater bank, a little other for each seed and query."""
    gain = {"grad_accum": 0.0, "contaccum": 0.1, "published": -0.02}[entry]
    bank = int(labels.get("bank_size", 0)) / 1000
    return 0.4 + gain + bank + 0.01 * seed + (query * 37 % 11) / 50 + (query * seed * 13 % 7) / 70


def made_up(plan: Any) -> dict[str, dict[str, Any]]:
    """A result of every run, as its process would leave it."""
    results = {}
    for group in plan.groups.values():
        for seed in plan.seeds:
            values = [score(group.entry, group.labels, seed, number) for number in range(20)]
            metrics = dict.fromkeys(METRICS, statistics.fmean(values))
            results[group.run(seed)] = {
                "name": group.run(seed),
                "entry": group.entry,
                "labels": group.labels,
                "seed": seed,
                "evaluations": {
                    "beir": {
                        "metrics": metrics,
                        "per_query": {f"q{n}": dict.fromkeys(METRICS, value) for n, value in enumerate(values)},
                    }
                },
                "initial_weights": f"weights {seed}",
                "data_order": f"order {seed}",
                "pairs_per_update": group.parsed[2].total_train_batch_size,
                "updates": 8,
                "git_commit": "c",
                "versions": {"torch": "2"},
                "machine": {"threads": 1},
                "train_seconds": 8.0 + seed,
                "seconds_per_update": 1.0,
                "peak_memory_mb": 100.0 + seed,
                "grad_norm_ratio": 1.5,
                "final_loss": None,
                "curve": [{"update": u, "train_seconds": float(u), "NDCG@10": u / 10} for u in (4, 8)],
            }
    return results
