"""Earlier results, compared query by query."""

import json
from pathlib import Path

import pytest

from contaccum.errors import DataError
from contaccum.evaluation import tables
from contaccum.evaluation.metrics import add_holm, paired_bootstrap


def test_wins_ties_losses_and_the_extreme_queries_are_exact():
    ours = {"a": 0.9, "b": 0.5, "c": 0.1, "d": 0.2, "e": 0.5}
    theirs = {"e": 0.5 + 1e-12, "d": 0.1, "c": 0.6, "b": 0.4, "a": 0.2}
    comparison = tables.compare(Path("r.json"), "NDCG@10", {"x": ours}, {"x": theirs})
    (found,) = comparison["rows"]
    assert (found["wins"], found["ties"], found["losses"], found["queries"]) == (3, 1, 1, 5)
    assert [change["query"] for change in found["greatest_gains"]] == ["a", "b", "d"]
    assert found["greatest_losses"] == [
        {"query": "c", "difference": -0.5, "ours": 0.1, "earlier": 0.6}
    ]
    assert (found["ours"], found["earlier"]) == (pytest.approx(0.44), pytest.approx(0.36))
    expected = paired_bootstrap(list(ours.values()), [theirs[q] for q in ours])
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    shown = tables.comparison_table(comparison)
    assert (
        shown.startswith("## NDCG@10 against r.json\n")
        and "| 0.4400 | 0.3600  | +0.0800    |" in shown
    )
    assert "- x, greatest gains: a +0.7000, b +0.1000, d +0.1000\n" in shown


def test_sets_of_the_same_data_are_compared_with_holms_correction_and_others_are_refused(tmp_path):
    for name in ("x", "y", "old"):
        per_query = {"q": {"NDCG@10": 0.5}, "r": {"NDCG@10": 0.5}}
        record = {
            "metrics": {"NDCG@10": 0.5},
            "per_query": per_query,
            "data": {"fingerprint": f"of {name}"},
        }
        (tmp_path / f"s.{name}.json").write_text(json.dumps(record))
    files = [{"file": "s.x.json"}, {"parts": [{"file": "s.y.json"}, {"file": "s.old.json"}]}]
    (tmp_path / "s.json").write_text(json.dumps({"sets": files}))
    previous = tables.read_previous(
        tmp_path / "s.json", {"of x": "x", "of y": "y", "of z": "z"}, "NDCG@10"
    )
    assert previous == {"x": {"q": 0.5, "r": 0.5}, "y": {"q": 0.5, "r": 0.5}}
    ours = {"x": {"q": 0.25, "r": 0.5}, "y": {"q": 1.0, "r": 0.75}}
    rows = tables.compare(tmp_path / "s.json", "NDCG@10", ours, previous)["rows"]
    add_holm(again := [{"p_value": found["p_value"]} for found in rows])
    assert [found["p_holm"] for found in rows] == [found["p_holm"] for found in again]
    with pytest.raises(DataError, match=r"s\.x\.json: has no MRR@10"):
        tables.read_previous(tmp_path / "s.x.json", {"of x": "x"}, "MRR@10")
    with pytest.raises(DataError, match=r"s\.y\.json: is on other data than x"):
        tables.read_previous(tmp_path / "s.y.json", {"of x": "x"}, "NDCG@10")
