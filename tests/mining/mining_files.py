"""Writes training data for the tests of mining."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


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
