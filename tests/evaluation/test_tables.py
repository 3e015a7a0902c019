"""Tables: published figures only where they are of the same data, and earlier results query by query."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from contaccum.data import PUBLIC_NAMES
from contaccum.errors import DataError
from contaccum.evaluation import tables
from contaccum.evaluation.beir import EvaluationSet
from contaccum.evaluation.metrics import holm, paired_bootstrap
from contaccum.evaluation.tables import compare, comparison_section, published, read_previous


def row(name: str, value: float, queries: int | None = None, split: str | None = None) -> dict[str, Any]:
    judged = published()["judged_queries"].get(name, 1) if queries is None else queries
    about = {"name": name, "split": split or ("dev" if name == "msmarco" else "test"), "queries": judged}
    return {**about, "documents": 9, "metrics": {"NDCG@10": value, "MRR@10": value / 2}}


def test_published_figures_are_complete_and_are_those_of_their_sources():
    models = {model["name"]: model["scores"] for model in published()["models"]}
    assert set(published()["judged_queries"]) == set(PUBLIC_NAMES)
    for name, scores in models.items():
        assert set(scores) == set(PUBLIC_NAMES) - ({"msmarco"} if name == "BM25" else set())
        assert all(0.1 < value < 0.9 for value in scores.values())
    assert models["all-MiniLM-L6-v2"]["scifact"] == 0.64508 and models["all-MiniLM-L6-v2"]["nfcorpus"] == 0.31594
    # The averages over all fifteen in the table of bge's model card, a source that gives nothing else here.
    for name, average in {"all-mpnet-base-v2": 43.81, "bge-small-en-v1.5": 51.68, "e5-base-v2": 50.29}.items():
        assert round(100 * sum(models[name].values()) / 15, 2) == average
    assert all(model["how"] and model["sources"] for model in published()["models"])


def test_the_mean_beside_published_figures_is_over_the_sets_that_all_have():
    # MS MARCO has no figure of BM25, "mine" none at all, and scidocs here is other data.
    rows = [row("scifact", 0.7), row("nfcorpus", 0.3), row("msmarco", 0.4), row("mine", 0.9), row("scidocs", 0.1, 6)]
    found = tables.published_section(rows)
    assert found is not None and found.header[1:3] == ["this model", "BM25"]
    cells = {cells[0]: cells[1:] for cells in found.cells}
    assert cells["mean of 2"][:2] == [pytest.approx(0.5), pytest.approx((0.6789 + 0.3218) / 2)]
    assert cells["scidocs*"][:2] == [0.1, 0.149] and cells["mine"] == [0.9, None, None, None, None, None]
    assert found.notes == ["*scidocs: 6 judged queries, BEIR has 1,000: other data, not to be compared"]


@pytest.mark.parametrize(
    "given", [row("mine", 0.5), row("scifact", 0.5, split="train"), row("scifact", 0.5) | {"metrics": {"NDCG@5": 0.5}}]
)
def test_nothing_is_shown_beside_what_nobody_published(given):
    assert tables.published_section([given]) is None


def test_all_forms_hold_the_same_numbers():
    rows, names = [row("scifact", 0.7), row("a|b", 0.3)], ["MRR@10", "NDCG@10"]
    lines = list(csv.DictReader(io.StringIO(tables.as_csv(rows, names))))
    assert [(line["data"], float(line["NDCG@10"])) for line in lines] == [("scifact", 0.7), ("a|b", 0.3), ("mean", 0.5)]
    found = [tables.table_section(rows, names)]
    page = tables.as_markdown("title", found)
    assert "| scifact | test | 300 | 0.3500 | 0.7000 |" in page and r"| a\|b | test | 1 | 0.1500 | 0.3000 |" in page
    lines = [line.split() for line in tables.as_text(found).splitlines()]
    assert lines[:2] == [["data", "split", "queries", *names], ["scifact", "test", "300", "0.3500", "0.7000"]]


def write(path: Path, name: str, scores: dict[str, float]) -> Path:
    """A record of one set, with no more in it than the version before wrote."""
    data = {"name": name, "split": "test", "fingerprint": f"fingerprint of {name}"}
    per_query = {query: {"NDCG@10": score} for query, score in scores.items()}
    path.write_text(json.dumps({"metrics": {}, "per_query": per_query, "data": data}))
    return path


def a_set(label: str) -> EvaluationSet:
    return EvaluationSet(label, "test", label, label, fingerprint=f"fingerprint of {label}")


def test_wins_ties_losses_and_the_extreme_queries_are_exact(tmp_path):
    ours = {"a": 0.9, "b": 0.5, "c": 0.1, "d": 0.2, "e": 0.5}
    theirs = {"e": 0.5 + 1e-12, "d": 0.1, "c": 0.6, "b": 0.4, "a": 0.2}
    path = write(tmp_path / "r.json", "x", theirs)
    comparison = compare({"x": ours}, read_previous(path, [a_set("x")], "NDCG@10"))
    (found,) = comparison["rows"]
    assert (found["wins"], found["ties"], found["losses"], found["queries"]) == (3, 1, 1, 5)
    assert [change["query"] for change in found["greatest_gains"]] == ["a", "b", "d"]
    assert found["greatest_losses"] == [{"query": "c", "difference": -0.5, "ours": 0.1, "earlier": 0.6}]
    assert (found["ours"], found["earlier"]) == (pytest.approx(0.44), pytest.approx(0.36))
    expected = paired_bootstrap(list(ours.values()), [theirs[q] for q in ours])
    assert {key: found[key] for key in expected._fields} == pytest.approx(expected._asdict())
    shown = comparison_section(comparison)
    assert shown.title == f"NDCG@10 against {path}" and shown.cells[0][3] == "+0.0800"
    assert shown.notes[0] == "x, greatest gains: a +0.7000, b +0.1000, d +0.1000"


def test_sets_of_the_same_data_are_compared_and_others_named_or_refused(tmp_path):
    for name in ("x", "y", "old"):
        write(tmp_path / f"s.{name}.json", name, {"q": 0.5, "r": 0.5})
    files = [{"file": "s.x.json"}, {"parts": [{"file": "s.y.json"}, {"file": "s.old.json"}]}]
    (tmp_path / "s.json").write_text(json.dumps({"sets": files}))
    previous = read_previous(tmp_path / "s.json", [a_set("x"), a_set("y"), a_set("z")], "NDCG@10")
    comparison = compare({"x": {"q": 0.25, "r": 0.5}, "y": {"q": 1.0, "r": 0.75}}, previous)
    assert [found["data"] for found in comparison["rows"]] == ["x", "y"]
    assert [found["p_holm"] for found in comparison["rows"]] == holm([r["p_value"] for r in comparison["rows"]])
    notes = comparison_section(comparison).notes
    assert notes[0] == "x, greatest losses: q -0.2500" and "only the earlier has it: old test" in notes[-2]
    with pytest.raises(DataError, match="scores of other queries on x"):
        compare({"x": {"other": 0.5}, "y": {}}, previous)
    with pytest.raises(DataError, match=r"has no MRR@10 of every query"):
        read_previous(tmp_path / "s.x.json", [a_set("x")], "MRR@10")
    other = r"s\.y\.json: is on other data: y test \(fingerprint fingerprint \); here: x test [^\n]*$"
    with pytest.raises(DataError, match=other):
        read_previous(tmp_path / "s.y.json", [a_set("x")], "NDCG@10")
