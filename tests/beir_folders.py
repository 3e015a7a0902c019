"""A BEIR folder in miniature: 24 documents, 6 judged queries of three relevant documents each, one query unjudged."""

from __future__ import annotations

import json
from pathlib import Path

ANIMALS, PLACES = ("cat", "dog", "bird", "fish"), ("tree", "river", "stone", "house", "road", "city")


def write_beir_folder(folder: Path) -> Path:
    """Write it, and return ``folder``."""
    (folder / "qrels").mkdir(parents=True)
    documents = [
        {"_id": f"{a}-{p}", "title": f"the {a}", "text": f"one {a} sits on the {p}"} for a in ANIMALS for p in PLACES
    ]
    queries = [{"_id": f"q{number}", "text": f"where is the {place}"} for number, place in enumerate(PLACES)]
    grades = zip(ANIMALS, (2, 1, 0, 1), strict=True)
    rows = [f"q{n}\t{a}-{p}\t{grade}" for a, grade in grades for n, p in enumerate(PLACES)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(one) + "\n" for one in documents))
    lines = [json.dumps(one) + "\n" for one in [*queries, {"_id": "unjudged", "text": "who"}]]
    (folder / "queries.jsonl").write_text("".join(lines))
    (folder / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *rows]) + "\n")
    return folder
