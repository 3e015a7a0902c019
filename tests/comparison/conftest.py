"""A tiny encoder, training pairs and a BEIR folder, made once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_texts import sentences


@pytest.fixture(scope="session")
def places(tiny_config: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths: ``backbone``, ``pairs`` (43 training pairs) and ``beir`` (a folder with splits dev and test)."""
    from transformers import AutoModel

    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("comparison")
    AutoModel.from_config(tiny_config).save_pretrained(root / "backbone")
    tiny_tokenizer.save_pretrained(root / "backbone")
    rows = zip(sentences(43, 1), sentences(43, 2, 9), strict=True)
    (root / "pairs.jsonl").write_text("".join(json.dumps({"query": q, "positive": p}) + "\n" for q, p in rows))
    beir = root / "beir"
    (beir / "qrels").mkdir(parents=True)
    write_lines(beir / "corpus.jsonl", [{"_id": f"d{i}", "text": text} for i, text in enumerate(sentences(30, 4, 9))])
    write_lines(beir / "queries.jsonl", [{"_id": f"q{i}", "text": text} for i, text in enumerate(sentences(12, 5))])
    judged = [f"q{i}\td{(7 * i + j) % 30}\t{1 - j % 2}" for i in range(12) for j in range(3)]
    for split in ("dev", "test"):
        (beir / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(judged) + "\n")
    return {"backbone": str(root / "backbone"), "pairs": str(root / "pairs.jsonl"), "beir": str(beir)}


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def options(places: dict[str, str]) -> dict[str, list[str]]:
    """Training options of a run that takes a second: 43 pairs, n=4, K=3, two epochs of 4 updates."""
    return {
        "model": [places["backbone"]],
        "train_data": [places["pairs"]],
        "pooling": ["mean"],
        "normalize": ["true"],
        "per_device_train_batch_size": ["4"],
        "gradient_accumulation_steps": ["3"],
        "num_train_epochs": ["2"],
        "learning_rate": ["1e-3"],
        "bank_size": ["20"],
        "use_cpu": ["true"],
    }
