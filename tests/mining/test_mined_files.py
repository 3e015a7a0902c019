"""Mined negatives as files: scores beside their passages, read back as training data, whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mining_files import write_beir_data, write_lines, write_pairs

from contaccum import DualEncoder
from contaccum.data import load_training_data
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.mining import OUTPUT_FORMATS, check_output, load_mining_data, mine_hard_negatives, write_mined


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    return {"pairs": write_pairs(root / "pairs.jsonl"), "beir": write_beir_data(root / "beir")}


@pytest.fixture(scope="module")
def mined(tiny_model_path: str, sources: dict[str, Path]) -> dict[str, Any]:
    """Two negatives for every query of each source."""
    model = DualEncoder.from_pretrained(tiny_model_path, device="cpu")
    settings = {"num_negatives": 2, "show_progress": False}
    return {name: mine_hard_negatives(path, model, **settings) for name, path in sources.items()}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def output(folder: Path, output_format: str) -> Path:
    return folder / f"out.json{'' if output_format == 'dpr' else 'l'}"


@pytest.mark.parametrize("output_format", OUTPUT_FORMATS)
@pytest.mark.parametrize("source", ["pairs", "beir"])
def test_what_is_written_is_read_back_as_training_data(mined, tmp_path, output_format, source):
    found = mined[source]
    path, report = write_mined(found, output(tmp_path / "new", output_format), output_format)
    training = load_training_data(path, num_hard_negatives=2, negatives_from=2, positives="first").dataset
    columns = ("query", "positive", "negative_1", "negative_2")
    data = found.data
    expected = [
        (data.queries[q], *(data.documents[row].passage for row in (positive, *found.rows[q])))
        for q, rows in enumerate(data.positives)
        for positive in rows[: 1 if output_format in ("dpr", "tevatron") else data.pair_counts[q]]
    ]
    assert [tuple(row[name] for name in columns) for row in training] == expected
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [path.name, report.name]


def test_scores_are_written_beside_their_passages(mined, tmp_path):
    found = mined["beir"]
    ntuples = lines_of(write_mined(found, tmp_path / "n.jsonl", "ntuples")[0])
    pairs = lines_of(write_mined(found, tmp_path / "p.jsonl")[0])
    expected = [(query, at) for query, count in enumerate(found.data.pair_counts) for at in range(count)]
    for line, ntuple, (query, at) in zip(pairs, ntuples, expected, strict=True):
        assert line["positive_score"] == pytest.approx(found.positive_scores[query][at], rel=1e-6)
        assert line["negative_scores"] == pytest.approx(found.scores[query].tolist(), rel=1e-6)
        assert ntuple["scores"] == [line["positive_score"], *line["negative_scores"]]


def test_tevatron_and_dpr_records_have_their_formats_fields_and_all_positives(mined, tmp_path):
    tevatron = lines_of(write_mined(mined["beir"], tmp_path / "t.jsonl", "tevatron")[0])
    dpr = json.loads(write_mined(mined["beir"], tmp_path / "d.json", "dpr")[0].read_text())
    assert len(tevatron) == len(dpr) == 10
    for line, record in zip(tevatron, dpr, strict=True):
        assert list(line) == ["query_id", "query", "positive_passages", "negative_passages"]
        number = int(line["query_id"].removeprefix("q"))
        judged = [f"d{(3 * number + j) % 30}" for j in (0, 2)[: 2 - number % 2]]
        assert [passage["docid"] for passage in line["positive_passages"]] == judged
        assert set(record) == {"question", "answers", "positive_ctxs", "negative_ctxs", "hard_negative_ctxs"}
        for ours, theirs in (("positive_passages", "positive_ctxs"), ("negative_passages", "hard_negative_ctxs")):
            assert all(list(passage) == ["docid", "title", "text", "score"] for passage in line[ours])
            assert all(list(context) == ["passage_id", "title", "text", "score"] for context in record[theirs])
            assert [list(passage.values()) for passage in line[ours]] == [list(c.values()) for c in record[theirs]]


def test_queries_with_too_few_negatives_are_dropped_or_written_and_counted(tiny_model_path, tmp_path):
    model = DualEncoder.from_pretrained(tiny_model_path, device="cpu")
    rows = [("q1", "the cat"), ("q1", "the dog"), ("q1", "the bird"), ("q2", "the fish")]
    data = load_mining_data(write_lines(tmp_path / "p.jsonl", [{"query": q, "positive": p} for q, p in rows]))
    found = mine_hard_negatives(data, model, num_negatives=2, show_progress=False)
    dropped, report = write_mined(found, tmp_path / "drop.jsonl")
    assert [line["query"] for line in lines_of(dropped)] == ["q2"]
    record = json.loads(report.read_text())
    assert (record["queries_with_too_few"], record["queries_kept"], record["pairs_kept"]) == (1, 1, 1)
    kept, report = write_mined(found, tmp_path / "keep.jsonl", on_too_few="keep")
    assert [len(line["negatives"]) for line in lines_of(kept)] == [1, 1, 1, 2]
    assert json.loads(report.read_text())["pairs_kept"] == 4
    with pytest.raises(DataError, match="no query has 4 negatives"):
        write_mined(mine_hard_negatives(data, model, num_negatives=4, show_progress=False), tmp_path / "none.jsonl")
    assert not list(tmp_path.glob("none*"))


def test_an_output_that_would_lose_something_is_refused(tmp_path, sources):
    (tmp_path / "there.jsonl").write_text("mine")
    folder = tmp_path / "folder.jsonl"
    folder.mkdir()
    for path, settings, words in [
        (tmp_path / "there.jsonl", {}, "--overwrite"),
        (tmp_path / "there.json", {}, "ends in .jsonl"),
        (folder, {}, "is a folder"),
        (tmp_path / "x.jsonl", {"output_format": "csv"}, "output_format"),
        (sources["pairs"], {"overwrite": True, "inputs": [sources["pairs"], None]}, "also the input"),
    ]:
        with pytest.raises((ConfigError, UserError), match=words):
            check_output(path, **{"output_format": "pairs", **settings})
    assert (tmp_path / "there.jsonl").read_text() == "mine"
