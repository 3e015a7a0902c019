"""A data set in memory, to evaluate on while a tiny model trains."""

from __future__ import annotations

from pathlib import Path

from sample_texts import sentences

from contaccum.data.beir_folder import BeirDataset
from contaccum.data.records import RecordReport


def dev_set(fingerprint: str = "d" * 64) -> BeirDataset:
    """20 documents, 6 queries with two relevant documents each."""
    corpus = {f"d{n}": {"title": "", "text": text} for n, text in enumerate(sentences(20, 8))}
    queries = {f"q{n}": text for n, text in enumerate(sentences(6, 9))}
    qrels = {f"q{n}": {f"d{n}": 1, f"d{n + 10}": 1} for n in range(6)}
    return BeirDataset("made", corpus, queries, qrels, "dev", fingerprint, Path("made"), RecordReport("stop"))
