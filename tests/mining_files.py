"""Writes training data for the tests of mining."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sample_texts import sentences


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_beir(folder: Path, documents: dict[str, Any], queries: dict[str, str], qrels: list[tuple]) -> Path:
    write_lines(folder / "corpus.jsonl", [{"_id": i, "title": t, "text": x} for i, (t, x) in documents.items()])
    write_lines(folder / "queries.jsonl", [{"_id": i, "text": text} for i, text in queries.items()])
    (folder / "qrels").mkdir()
    rows = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in qrels)]
    (folder / "qrels" / "train.tsv").write_text("\n".join(rows) + "\n")
    return folder


def write_pairs(path: Path) -> Path:
    """40 pairs of 36 queries: the last four repeat the first four with another positive."""
    queries = sentences(36, 1)
    rows = zip([*queries, *queries[:4]], sentences(40, 2, 9), strict=True)
    return write_lines(path, [{"query": q, "positive": p} for q, p in rows])


def write_beir_data(folder: Path) -> Path:
    """30 documents with titles, 10 queries with 1 or 2 positives each and one judged 0."""
    titles, texts = sentences(30, 3, 2), sentences(30, 4, 9)
    documents = {f"d{i}": (title, text) for i, (title, text) in enumerate(zip(titles, texts, strict=True))}
    queries = {f"q{i}": text for i, text in enumerate(sentences(10, 5))}
    qrels = [(f"q{i}", f"d{(3 * i + j) % 30}", (1, 0, 2)[j]) for i in range(10) for j in range(3 - i % 2)]
    return write_beir(folder, documents, queries, qrels)
