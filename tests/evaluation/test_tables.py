"""Comparison with earlier results, query by query."""

import json
from pathlib import Path

import pytest

from contaccum.errors import DataError
from contaccum.evaluation import tables
from contaccum.evaluation.metrics import add_holm, sign_flip_test


def test_a_comparison_counts_wins_ties_and_losses_and_lists_the_greatest_changes():
    ours = {"a": 0.9, "b": 0.5, "c": 0.1, "d": 0.2, "e": 0.5}
    theirs = {"e": 0.5 + 1e-12, "d": 0.1, "c": 0.6, "b": 0.4, "a": 0.2}
    groups = {"a": 0, "b": 0, "c": 1, "d": 2, "e": 3}
    comparison = tables.compare(
        Path("r.json"), "NDCG@10", {"x": ours}, {"x": theirs}, {"x": groups}
    )
    (row,) = comparison["rows"]
    assert row["wins"] == 3
    assert row["ties"] == 1
    assert row["losses"] == 1
    assert row["queries"] == 5
    assert [change["query"] for change in row["greatest_gains"]] == ["a", "b", "d"]
    loss = {"query": "c", "difference": -0.5, "ours": 0.1, "earlier": 0.6}
    assert row["greatest_losses"] == [loss]
    assert row["ours"] == pytest.approx(0.44)
    assert row["earlier"] == pytest.approx(0.36)
    assert row["groups"] == 4
    for key, expected in sign_flip_test(ours, theirs, groups).items():
        assert row[key] == pytest.approx(expected), key
    table = tables.comparison_table(comparison)
    assert table.startswith("## NDCG@10 against r.json\n")
    assert "| 0.4400 | 0.3600  | +0.0800    |" in table
    assert "- x, greatest gains: a +0.7000, b +0.1000, d +0.1000\n" in table
    assert "- the queries of x are about only 4 different passages" in table


def write_record(folder: Path, name: str) -> None:
    """Write a result, s.NAME.json, on a data set that has the fingerprint "of NAME"."""
    record = {
        "metrics": {"NDCG@10": 0.5},
        "per_query": {"q": {"NDCG@10": 0.5}, "r": {"NDCG@10": 0.5}},
        "data": {"fingerprint": f"of {name}"},
    }
    (folder / f"s.{name}.json").write_text(json.dumps(record))


def test_sets_of_the_same_data_are_compared_with_holms_correction(tmp_path):
    for name in ("x", "y", "old"):
        write_record(tmp_path, name)
    parts = [{"file": "/s.y.json"}, {"file": "../s.old.json"}]
    sets = [{"file": "s.x.json"}, {"parts": parts}]
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"sets": sets}))
    labels = {"of x": "x", "of y": "y", "of z": "z"}
    previous = tables.read_previous(path, labels, "NDCG@10")
    # Only names of files are read. The set "old" has no label, so it is not compared.
    assert previous == {"x": {"q": 0.5, "r": 0.5}, "y": {"q": 0.5, "r": 0.5}}
    ours = {"x": {"q": 0.25, "r": 0.5}, "y": {"q": 1.0, "r": 0.75}}
    groups = {label: {"q": 0, "r": 1} for label in ours}
    rows = tables.compare(path, "NDCG@10", ours, previous, groups)["rows"]
    tests = [{"p_value": row["p_value"]} for row in rows]
    add_holm(tests)
    for row, test in zip(rows, tests, strict=True):
        assert row["p_holm"] == test["p_holm"]


def test_an_earlier_result_without_the_metric_or_on_other_data_is_refused(tmp_path):
    write_record(tmp_path, "x")
    write_record(tmp_path, "y")
    with pytest.raises(DataError, match=r"s\.x\.json: has no MRR@10"):
        tables.read_previous(tmp_path / "s.x.json", {"of x": "x"}, "MRR@10")
    with pytest.raises(DataError, match=r"s\.y\.json: is on other data than x"):
        tables.read_previous(tmp_path / "s.y.json", {"of x": "x"}, "NDCG@10")
