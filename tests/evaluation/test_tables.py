"""Tables: published figures only where they are of the same data, and earlier results query by query."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from contaccum.data import PUBLIC_NAMES
from contaccum.errors import DataError
from contaccum.evaluation import tables
from contaccum.evaluation.metrics import holm, paired_bootstrap
from contaccum.files import read_json

PUBLISHED = read_json(Path(tables.__file__).with_name("published.json"))


def row(name: str, value: float, queries: int | None = None, split: str | None = None) -> dict[str, Any]:
    judged = PUBLISHED["judged_queries"].get(name, 1) if queries is None else queries
    about = {"name": name, "split": split or ("dev" if name == "msmarco" else "test"), "queries": judged}
    return {**about, "documents": 9, "metrics": {"NDCG@10": value, "MRR@10": value / 2}}


def cells(table: str) -> list[list[str]]:
    """The cells of each line of the table."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]


def test_published_figures_are_complete_and_are_those_of_their_sources():
    models = {model["name"]: model["scores"] for model in PUBLISHED["models"]}
    assert set(PUBLISHED["judged_queries"]) == set(PUBLIC_NAMES)
    for name, scores in models.items():
        assert set(scores) == set(PUBLIC_NAMES) - ({"msmarco"} if name == "BM25" else set())
    assert models["all-MiniLM-L6-v2"]["scifact"] == 0.64508 and models["all-MiniLM-L6-v2"]["nfcorpus"] == 0.31594
    # The average over all fifteen in the table of bge's model card, a source that gives nothing else here.
    assert round(100 * sum(models["bge-small-en-v1.5"].values()) / 15, 2) == 51.68


def test_published_figures_stand_beside_those_of_the_same_data_and_the_mean_is_over_the_sets_that_all_have():
    # MS MARCO has no figure of BM25; the last three are other data.
    rows = [row("scifact", 0.7), row("nfcorpus", 0.3), row("msmarco", 0.4)]
    rows += [row("mine", 0.9), row("scidocs", 0.1, 6), row("fever", 0.5, split="dev")]
    header, _, *found = cells(tables.published_table(rows))
    assert header[:3] == ["data", "this model", "BM25"]
    assert [line[0] for line in found] == ["scifact", "nfcorpus", "msmarco", "mean of 2"]
    assert found[2][1:3] == ["0.4000", ""] and found[3][1:3] == ["0.5000", f"{(0.6789 + 0.3218) / 2:.4f}"]
    assert tables.published_table(rows[3:]) == ""
    assert tables.published_table([row("scifact", 0.5) | {"metrics": {"NDCG@5": 0.5}}]) == ""


def test_wins_ties_losses_and_the_extreme_queries_are_exact():
    ours = {"a": 0.9, "b": 0.5, "c": 0.1, "d": 0.2, "e": 0.5}
    theirs = {"e": 0.5 + 1e-12, "d": 0.1, "c": 0.6, "b": 0.4, "a": 0.2}
    comparison = tables.compare(Path("r.json"), "NDCG@10", {"x": ours}, {"x": theirs})
    (found,) = comparison["rows"]
    assert (found["wins"], found["ties"], found["losses"], found["queries"]) == (3, 1, 1, 5)
    assert [change["query"] for change in found["greatest_gains"]] == ["a", "b", "d"]
    assert found["greatest_losses"] == [{"query": "c", "difference": -0.5, "ours": 0.1, "earlier": 0.6}]
    assert (found["ours"], found["earlier"]) == (pytest.approx(0.44), pytest.approx(0.36))
    expected = paired_bootstrap(list(ours.values()), [theirs[q] for q in ours])
    assert {key: found[key] for key in expected._fields} == pytest.approx(expected._asdict())
    shown = tables.comparison_table(comparison)
    assert shown.startswith("## NDCG@10 against r.json\n") and cells(shown)[2][3] == "+0.0800"
    assert "- x, greatest gains: a +0.7000, b +0.1000, d +0.1000\n" in shown


def test_sets_of_the_same_data_are_compared_with_holms_correction_and_others_are_refused(tmp_path):
    for name in ("x", "y", "old"):
        per_query = {"q": {"NDCG@10": 0.5}, "r": {"NDCG@10": 0.5}}
        record = {"metrics": {"NDCG@10": 0.5}, "per_query": per_query, "data": {"fingerprint": f"of {name}"}}
        (tmp_path / f"s.{name}.json").write_text(json.dumps(record))
    files = [{"file": "s.x.json"}, {"parts": [{"file": "s.y.json"}, {"file": "s.old.json"}]}]
    (tmp_path / "s.json").write_text(json.dumps({"sets": files}))
    previous = tables.read_previous(tmp_path / "s.json", {"of x": "x", "of y": "y", "of z": "z"}, "NDCG@10")
    assert previous == {"x": {"q": 0.5, "r": 0.5}, "y": {"q": 0.5, "r": 0.5}}
    ours = {"x": {"q": 0.25, "r": 0.5}, "y": {"q": 1.0, "r": 0.75}}
    rows = tables.compare(tmp_path / "s.json", "NDCG@10", ours, previous)["rows"]
    assert [found["p_holm"] for found in rows] == holm([found["p_value"] for found in rows])
    with pytest.raises(DataError, match=r"s\.x\.json: has no MRR@10"):
        tables.read_previous(tmp_path / "s.x.json", {"of x": "x"}, "MRR@10")
    with pytest.raises(DataError, match=r"s\.y\.json: is on other data than x"):
        tables.read_previous(tmp_path / "s.y.json", {"of x": "x"}, "NDCG@10")
