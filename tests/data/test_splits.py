"""Held-out sets from pairs: nothing on two sides, the same on every run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from contaccum.data.beir_folder import load_beir_folder
from contaccum.data.pairs import load_training_data
from contaccum.data.splits import split_pairs
from contaccum.errors import ConfigError, DataError


def write_pairs(path: Path, rows: list[tuple[str, str]]) -> Path:
    path.write_text("".join(json.dumps({"query": q, "positive": p}) + "\n" for q, p in rows), encoding="utf-8")
    return path


def rows(n: int) -> list[tuple[str, str]]:
    """Three questions to a passage, and every 20th question asked of two passages."""
    return [(f"question {i if i % 20 else 0}", f"passage {i // 3}") for i in range(n)]


def read(folder: Path, part: str) -> tuple[set[str], set[str]]:
    if part == "train":
        data = load_training_data(folder / "train.jsonl").dataset
        return set(data["query"]), set(data["positive"])
    data: Any = load_beir_folder(folder / part, split="test")
    return set(data.queries.values()), {document["text"] for document in data.corpus.values()}


def test_no_passage_and_no_query_is_in_two_parts_and_every_pair_is_accounted_for(tmp_path: Path) -> None:
    source = write_pairs(tmp_path / "pairs.jsonl", rows(600))
    counts = split_pairs(source, tmp_path / "out")
    parts = {part: read(tmp_path / "out", part) for part in ("train", "dev", "test")}
    for which in (0, 1):
        texts = [part[which] for part in parts.values()]
        assert sum(map(len, texts)) == len(set().union(*texts))
    assert sum(len(part[1]) for part in parts.values()) >= 190  # of 200 passages; some lose all their questions
    assert len(parts["dev"][1]) == pytest.approx(20, abs=12)
    judged = sum(
        len((tmp_path / "out" / part / "qrels" / "test.tsv").read_text().splitlines()) - 1 for part in ("dev", "test")
    )
    assert counts["train"] + judged + counts["left_out"] == 600
    assert counts["dev"] == len(parts["dev"][0]) and counts["left_out"] > 0


def test_every_run_gives_the_same_bytes_whatever_the_order_of_the_pairs(tmp_path: Path) -> None:
    a = split_pairs(write_pairs(tmp_path / "a.jsonl", rows(300)), tmp_path / "a")
    b = split_pairs(write_pairs(tmp_path / "b.jsonl", rows(300)[::-1]), tmp_path / "b")
    assert a == b
    for part in ("train", "dev", "test"):
        assert read(tmp_path / "a", part) == read(tmp_path / "b", part)
    assert split_pairs(tmp_path / "a.jsonl", tmp_path / "c") == a
    for path in sorted((tmp_path / "a").rglob("*.*")):
        assert path.read_bytes() == (tmp_path / "c" / path.relative_to(tmp_path / "a")).read_bytes()


def test_limit_keeps_whole_passages(tmp_path: Path) -> None:
    source = write_pairs(tmp_path / "pairs.jsonl", rows(600))
    split_pairs(source, tmp_path / "out", limit=10)
    assert len(read(tmp_path / "out", "train")[1]) == 10 and len(read(tmp_path / "out", "dev")[1]) <= 10


def test_bad_shares_and_taken_folders_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    source = write_pairs(tmp_path / "pairs.jsonl", rows(60))
    for dev, test in ((0.0, 0.1), (0.6, 0.4)):
        with pytest.raises(ConfigError, match="shares"):
            split_pairs(source, tmp_path / "out", dev, test)
    with pytest.raises(DataError, match="its dev part is empty"):
        split_pairs(write_pairs(tmp_path / "one.jsonl", rows(1)), tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("*.partial"))
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match="exists already"):
        split_pairs(source, tmp_path / "out")
