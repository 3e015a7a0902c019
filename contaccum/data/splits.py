"""Held-out dev and test sets from plain training pairs, split by passage so that no text is on both sides.

Where passages repeat, splitting by question would put the same passage into training and test. Here a hash of the
passage's text decides, so that every run and machine agrees; nothing is drawn.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from contaccum.data.pairs import load_training_data
from contaccum.errors import ConfigError, DataError


def split_pairs(
    source: str | Path, output: str | Path, dev: float = 0.1, test: float = 0.1, limit: int | None = None
) -> dict[str, int]:
    """Write ``output/train.jsonl`` and the BEIR folders ``output/dev`` and ``output/test``.

    Passages are ordered by a hash of their text: the last tenth (``dev``) is the dev set, the tenth before it
    (``test``) the test set. A corpus is its set's own passages; equal passages are one document. A training pair whose
    query is also asked in a held-out set is left out, and so is a test query that dev asks.

    Args:
        source: training pairs in any format that :func:`load_training_data` reads.
        output: a folder that does not exist yet.
        dev, test: shares of the passages.
        limit: keep this many passages of the training set and of each held-out one, first by hash; None: all.

    Returns:
        Counts: pairs of ``train``, queries of ``dev`` and ``test``, and pairs ``left_out``.

    Raises:
        ConfigError: shares that leave nothing to train on.
        DataError: for unreadable input, an output that exists, or a part that comes out empty.
    """
    if dev <= 0 or test < 0 or dev + test >= 1:
        raise ConfigError(f"dev={dev} and test={test} are shares of the passages: above 0, and below 1 together")
    target = Path(output)
    if target.exists():
        raise DataError(f"{target}: exists already; choose another folder or remove it")
    dataset = load_training_data(source, on_bad_record="skip", positives="first").dataset.with_format(None)
    parts: dict[str, list[tuple[str, str, str]]] = {"train": [], "dev": [], "test": []}
    for query, passage in zip(dataset["query"], dataset["positive"], strict=True):
        digest = hashlib.sha256(passage.encode()).hexdigest()
        place = int(digest[:15], 16) / 16**15
        part = "dev" if place >= 1 - dev else "test" if place >= 1 - dev - test else "train"
        parts[part].append((digest, query, passage))
    if limit is not None:
        for name, rows in parts.items():
            kept = set(sorted({digest for digest, _, _ in rows})[:limit])
            parts[name] = [row for row in rows if row[0] in kept]
    asked_in_dev = {query for _, query, _ in parts["dev"]}
    test_rows = [row for row in parts["test"] if row[1] not in asked_in_dev]
    held_out = asked_in_dev | {query for _, query, _ in test_rows}
    train_rows = [row for row in parts["train"] if row[1] not in held_out]
    left_out = len(parts["test"]) - len(test_rows) + len(parts["train"]) - len(train_rows)
    for name, rows in (("train", train_rows), ("dev", parts["dev"]), *((("test", test_rows),) if test else ())):
        if not rows:
            raise DataError(f"{source}: its {name} part is empty; give it a larger share")

    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with open(partial / "train.jsonl", "w", encoding="utf-8") as file:
        for _, query, passage in train_rows:
            file.write(json.dumps({"query": query, "positive": passage}) + "\n")
    counts = {"train": len(train_rows), "dev": _write_beir(parts["dev"], partial / "dev"), "test": 0}
    if test:
        counts["test"] = _write_beir(test_rows, partial / "test")
    partial.rename(target)
    return {**counts, "left_out": left_out}


def _write_beir(rows: list[tuple[str, str, str]], folder: Path) -> int:
    """A BEIR folder with the split ``test``; returns how many queries it has."""
    (folder / "qrels").mkdir(parents=True)
    documents = {digest[:16]: passage for digest, _, passage in rows}
    queries: dict[str, str] = {}
    with open(folder / "qrels" / "test.tsv", "w", encoding="utf-8") as file:
        file.write("query-id\tcorpus-id\tscore\n")
        for digest, query, _ in dict.fromkeys(rows):
            query_id = queries.setdefault(query, f"q{len(queries)}")
            file.write(f"{query_id}\t{digest[:16]}\t1\n")
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as file:
        for document_id, passage in documents.items():
            file.write(json.dumps({"_id": document_id, "title": "", "text": passage}) + "\n")
    with open(folder / "queries.jsonl", "w", encoding="utf-8") as file:
        for query, query_id in queries.items():
            file.write(json.dumps({"_id": query_id, "text": query}) + "\n")
    return len(queries)
