"""Comparisons with previous results: the same data or none, and every query accounted for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from contaccum.data import CQADUPSTACK_FORUMS
from contaccum.errors import DataError
from contaccum.evaluation.beir import EvaluationSet
from contaccum.evaluation.compare import compare, read_previous, section
from contaccum.evaluation.metrics import holm, paired_bootstrap


def write(path: Path, name: str, fingerprint: str, scores: dict[str, float]) -> Path:
    """A record of one set, with no more in it than the version before wrote."""
    record = {
        "metrics": {"NDCG@10": float(np.mean(list(scores.values())))},
        "per_query": {query: {"NDCG@10": score} for query, score in scores.items()},
        "data": {"name": name, "split": "test", "fingerprint": fingerprint},
    }
    path.write_text(json.dumps(record))
    return path


def a_set(label: str, row: str | None = None) -> EvaluationSet:
    return EvaluationSet(label, "test", label, row or label, fingerprint=f"fingerprint of {label}")


def some_scores(n: int, seed: int) -> dict[str, float]:
    return {f"q{i}": float(v) for i, v in enumerate(np.random.default_rng(seed).uniform(size=n))}


def test_wins_ties_losses_and_the_extreme_queries_are_exact(tmp_path):
    ours = {"a": 0.9, "b": 0.5, "c": 0.1, "d": 0.2, "e": 0.5}
    theirs = {"e": 0.5 + 1e-12, "d": 0.1, "c": 0.6, "b": 0.4, "a": 0.2}
    path = write(tmp_path / "r.json", "x", "fingerprint of x", theirs)
    comparison = compare({"x": ours}, read_previous(path, [a_set("x")], "NDCG@10"), [a_set("x")])
    (row,) = comparison["rows"]
    assert (row["wins"], row["ties"], row["losses"], row["queries"]) == (3, 1, 1, 5)
    assert [change["query"] for change in row["greatest_gains"]] == ["a", "b", "d"]
    assert row["greatest_losses"] == [{"query": "c", "difference": -0.5, "ours": 0.1, "earlier": 0.6}]
    assert (row["ours"], row["earlier"]) == (pytest.approx(0.44), pytest.approx(0.36))
    expected = paired_bootstrap(list(ours.values()), [theirs[q] for q in ours])
    assert {key: row[key] for key in expected._fields} == pytest.approx(expected._asdict())
    assert (comparison["metric"], comparison["resamples"], comparison["seed"]) == ("NDCG@10", 10_000, 0)
    shown = section(comparison)
    assert shown.title == f"NDCG@10 against {path}" and shown.cells[0][:4] == [
        "x",
        row["ours"],
        row["earlier"],
        "+0.0800",
    ]
    assert shown.notes[0] == "x, greatest gains: a +0.7000, b +0.1000, d +0.1000"
    (row,) = compare({"x": theirs}, read_previous(path, [a_set("x")], "NDCG@10"), [a_set("x")])["rows"]
    assert (row["difference"], row["p_value"], row["ties"], row["greatest_gains"]) == (0.0, 1.0, 5, [])


def test_cqadupstack_is_compared_as_the_mean_over_its_parts(tmp_path):
    # Parts of unequal size: the mean over queries would be another number.
    sets = [a_set(f"cqadupstack/{forum}", "cqadupstack") for forum in CQADUPSTACK_FORUMS]
    ours = {one.label: some_scores(3 + 2 * i, i) for i, one in enumerate(sets)}
    theirs = {one.label: some_scores(3 + 2 * i, i + 50) for i, one in enumerate(sets)}
    for one in sets:
        forum = one.label.split("/")[1]
        write(tmp_path / f"{forum}.json", forum, one.fingerprint, theirs[one.label])
    parts = [{"file": f"{forum}.json"} for forum in CQADUPSTACK_FORUMS]
    summary = tmp_path / "s.json"
    summary.write_text(json.dumps({"sets": [{"name": "cqadupstack", "parts": parts}]}))
    (row,) = compare(ours, read_previous(summary, sets, "NDCG@10"), sets)["rows"]
    macro = [np.mean([np.mean(list(scores.values())) for scores in side.values()]) for side in (ours, theirs)]
    assert (row["data"], row["queries"]) == ("cqadupstack", sum(map(len, ours.values())))
    assert (row["ours"], row["earlier"]) == (pytest.approx(macro[0]), pytest.approx(macro[1]))
    assert row["difference"] == pytest.approx(macro[0] - macro[1])
    assert row["greatest_gains"][0]["query"].split("/")[0] in CQADUPSTACK_FORUMS
    # With parts missing there is no such mean, and those that are there are compared one by one.
    summary.write_text(json.dumps({"sets": [{"name": "cqadupstack", "parts": parts[:2]}]}))
    rows = compare(ours, read_previous(summary, sets, "NDCG@10"), sets)["rows"]
    assert [row["data"] for row in rows] == ["cqadupstack/android", "cqadupstack/english"]
    assert [row["p_holm"] for row in rows] == holm([row["p_value"] for row in rows])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("x", r"is on other data: x test \(fingerprint another\).* x test \(fingerprint fingerprint \)"),
        ("y", "is on other data: y test .*; here: x test"),
    ],
)
def test_results_of_other_data_are_refused_in_one_line(tmp_path, name, words):
    path = write(tmp_path / "r.json", name, "another", {"q": 0.5})
    with pytest.raises(DataError, match=words) as caught:
        read_previous(path, [a_set("x")], "NDCG@10")
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_what_only_one_of_the_two_has_is_said_or_refused(tmp_path):
    for name in ("x", "old"):
        write(tmp_path / f"s.{name}.json", name, f"fingerprint of {name}", {"q": 0.5})
    (tmp_path / "s.json").write_text(json.dumps({"sets": [{"file": "s.x.json"}, {"file": "s.old.json"}]}))
    previous = read_previous(tmp_path / "s.json", [a_set("x")], "NDCG@10")
    assert list(previous.scores) == ["x"]
    notes = section(compare({"x": {"q": 0.25}}, previous, [a_set("x")])).notes
    assert notes[0] == "x, greatest losses: q -0.2500" and "only the earlier has it: old test" in notes[1]
    with pytest.raises(DataError, match="scores of other queries on x"):
        compare({"x": {"other": 0.5}}, previous, [a_set("x")])
    with pytest.raises(DataError, match=r"has no MRR@10 of every query"):
        read_previous(tmp_path / "s.x.json", [a_set("x")], "MRR@10")
