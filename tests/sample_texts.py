"""Made-up texts over a small vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import torch

WORDS = (  # noqa: SIM905  # sixty quoted words are harder to read
    "the a of in is was cat dog bird fish tree river stone cloud rain sun moon star city road house door window "
    "red blue green small large old new fast slow warm cold what where who when why how does do sits runs flies swims "
    "grows falls shines on under over near far with without and or not one two three four five six seven eight nine"
).split()


def sentences(count: int, seed: int = 0, length: int = 6) -> list[str]:
    """``count`` distinct sentences over WORDS."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(WORDS), (count, length), generator=generator)
    return [" ".join(WORDS[i] for i in row) + f" {number}" for number, row in enumerate(picks.tolist())]


def write_training_and_beir_data(root: Path, pairs: int) -> None:
    """``pairs.jsonl`` to train on, and the folder ``beir``: 8 documents, 4 queries with one positive each."""
    rows = zip(sentences(pairs, 1), sentences(pairs, 2, 9), strict=True)
    (root / "pairs.jsonl").write_text("".join(json.dumps({"query": q, "positive": p}) + "\n" for q, p in rows))
    (root / "beir" / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", sentences(8, 3)), ("queries", sentences(4, 4))):
        lines = "".join(json.dumps({"_id": f"{name}{i}", "text": text}) + "\n" for i, text in enumerate(texts))
        (root / "beir" / f"{name}.jsonl").write_text(lines)
    judged = "".join(f"queries{i}\tcorpus{i}\t1\n" for i in range(4))
    (root / "beir" / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
