"""A tiny encoder and a tiny cross-encoder on disk, and training data in every format that mining reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mining_files import write_beir, write_lines
from sample_texts import sentences
from transformers import BertForSequenceClassification

from contaccum import DualEncoder


@pytest.fixture(scope="session")
def model_path(tiny_config: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved random encoder, mean pooling, cosine."""
    path = tmp_path_factory.mktemp("mining") / "encoder"
    torch.manual_seed(0)
    model = DualEncoder.from_backbone(
        tiny_config, tokenizer=tiny_tokenizer, pooling="mean", normalize=True, passage_max_length=40, device="cpu"
    )
    model.save_pretrained(str(path))
    return str(path)


@pytest.fixture(scope="session")
def model(model_path: str) -> DualEncoder:
    return DualEncoder.from_pretrained(model_path, device="cpu")


@pytest.fixture(scope="session")
def cross_encoder_path(tiny_config: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved random cross-encoder whose logits spread over some 10 points."""
    path = tmp_path_factory.mktemp("mining") / "cross-encoder"
    options = {"initializer_range": 0.5, "id2label": {0: "relevant"}, "label2id": {"relevant": 0}}
    torch.manual_seed(0)
    classifier = BertForSequenceClassification(type(tiny_config)(**{**tiny_config.to_dict(), **options}))
    classifier.save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """40 pairs of 36 queries: the last four repeat the first four with another positive."""
    queries = sentences(36, 1)
    rows = zip([*queries, *queries[:4]], sentences(40, 2, 9), strict=True)
    return write_lines(tmp_path / "pairs.jsonl", [{"query": q, "positive": p} for q, p in rows])


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    """30 documents with titles, 10 queries with 1 or 2 positives each and one judged 0."""
    titles, texts = sentences(30, 3, 2), sentences(30, 4, 9)
    documents = {f"d{i}": (title, text) for i, (title, text) in enumerate(zip(titles, texts, strict=True))}
    queries = {f"q{i}": text for i, text in enumerate(sentences(10, 5))}
    qrels = [(f"q{i}", f"d{(3 * i + j) % 30}", (1, 0, 2)[j]) for i in range(10) for j in range(3 - i % 2)]
    return write_beir(tmp_path / "beir", documents, queries, qrels)
