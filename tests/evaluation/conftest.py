"""A tiny model and a tiny BEIR folder, on disk, for evaluations that run in a second."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from contaccum import DualEncoder

ANIMALS, PLACES = ("cat", "dog", "bird", "fish"), ("tree", "river", "stone", "house", "road", "city")


@pytest.fixture(scope="session")
def tiny_model_path(tiny_config, tiny_tokenizer, tmp_path_factory) -> str:
    """A saved random encoder, mean pooling, cosine."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    model = DualEncoder.from_backbone(
        tiny_config, tokenizer=tiny_tokenizer, pooling="mean", normalize=True, passage_max_length=40, device="cpu"
    )
    model.save_pretrained(str(path))
    return str(path)


@pytest.fixture
def beir_folder(tmp_path) -> Path:
    """24 documents, 6 judged queries, one more that is not judged."""
    return _write(tmp_path / "places")


@pytest.fixture
def write_beir_folder() -> Callable[[Path], Path]:
    """Writes the same to a folder of the test's choice."""
    return _write


def _write(folder: Path) -> Path:
    (folder / "qrels").mkdir(parents=True)
    documents = [
        (f"{a}-{p}", {"title": f"the {a}", "text": f"one {a} sits on the {p}"}) for a in ANIMALS for p in PLACES
    ]
    queries = [(f"q{number}", f"where is the {place}") for number, place in enumerate(PLACES)]
    rows = [
        f"q{n}\t{a}-{p}\t{grade}" for n, p in enumerate(PLACES) for a, grade in zip(ANIMALS, (2, 1, 0, 1), strict=True)
    ]
    lines = {
        "corpus.jsonl": [json.dumps({"_id": docid, **document}) for docid, document in documents],
        "queries.jsonl": [json.dumps({"_id": qid, "text": text}) for qid, text in [*queries, ("unjudged", "who")]],
        "qrels/test.tsv": ["query-id\tcorpus-id\tscore", *rows],
    }
    for name, content in lines.items():
        (folder / name).write_text("\n".join(content) + "\n")
    return folder
