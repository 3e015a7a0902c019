"""Comparisons with earlier results: the same data or none, and every query accounted for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contaccum.data.beir_names import CQADUPSTACK_FORUMS
from contaccum.errors import DataError
from contaccum.evaluation import earlier
from contaccum.evaluation.earlier import DataIdentity, compare, read_earlier
from contaccum.evaluation.significance import holm, paired_bootstrap


def write(path: Path, name: str, fingerprint: str, scores: dict[str, float], metric: str = "NDCG@10") -> Path:
    record = {
        "metrics": {metric: float(np.mean(list(scores.values())))},
        "per_query": {query: {metric: score} for query, score in scores.items()},
        "data": {"name": name, "split": "test", "fingerprint": fingerprint},
    }
    path.write_text(json.dumps(record))
    return path


def identity(name: str, row: str | None = None) -> DataIdentity:
    return DataIdentity(name, row or name, "test", f"fingerprint of {name}")


def some_scores(n: int, seed: int) -> dict[str, float]:
    return {f"q{i}": float(v) for i, v in enumerate(np.random.default_rng(seed).uniform(size=n))}


def test_wins_ties_losses_and_the_extreme_queries_are_exact(tmp_path):
    ours = {"a": 0.9, "b": 0.5, "c": 0.1, "d": 0.2, "e": 0.5}
    theirs = {"e": 0.5, "d": 0.1, "c": 0.6, "b": 0.4, "a": 0.2}
    before = read_earlier(write(tmp_path / "r.json", "x", "fingerprint of x", theirs), [identity("x")], "NDCG@10")
    (row,) = compare({"x": ours}, before, [identity("x")])["rows"]
    assert (row["wins"], row["ties"], row["losses"], row["queries"]) == (3, 1, 1, 5)
    assert [change["query"] for change in row["greatest_gains"]] == ["a", "b", "d"]
    assert row["greatest_losses"] == [{"query": "c", "difference": -0.5, "ours": 0.1, "earlier": 0.6}]
    assert (row["ours"], row["earlier"]) == (pytest.approx(0.44), pytest.approx(0.36))
    expected = paired_bootstrap(list(ours.values()), [theirs[q] for q in ours])
    assert {key: row[key] for key in expected._fields} == pytest.approx(expected._asdict())


def test_p_values_are_corrected_over_the_rows_by_holm(tmp_path):
    names = ["x", "y", "z"]
    ours = {name: some_scores(40, seed) for seed, name in enumerate(names)}
    for seed, name in enumerate(names):
        write(tmp_path / f"s.{name}.json", name, f"fingerprint of {name}", some_scores(40, seed + 9))
    summary = tmp_path / "s.json"
    summary.write_text(json.dumps({"sets": [{"name": n, "file": f"s.{n}.json"} for n in names]}))
    sets = [identity(name) for name in names]
    rows = compare(ours, read_earlier(summary, sets, "NDCG@10"), sets)["rows"]
    assert [row["data"] for row in rows] == names
    assert [row["p_holm"] for row in rows] == holm([row["p_value"] for row in rows])


def test_a_set_against_itself_is_all_ties(tmp_path):
    scores = some_scores(30, 1)
    before = read_earlier(write(tmp_path / "r.json", "x", "fingerprint of x", scores), [identity("x")], "NDCG@10")
    (row,) = compare({"x": scores}, before, [identity("x")])["rows"]
    assert (row["difference"], row["p_value"], row["ties"]) == (0.0, 1.0, 30)
    assert row["greatest_gains"] == row["greatest_losses"] == []


def test_cqadupstack_is_compared_as_the_mean_over_its_parts(tmp_path):
    # Parts of unequal size: the mean over queries would be another number.
    sizes = {forum: 3 + 2 * number for number, forum in enumerate(CQADUPSTACK_FORUMS)}
    sets = [identity(f"cqadupstack/{forum}", "cqadupstack") for forum in sizes]
    ours = {s.name: some_scores(n, i) for i, (s, n) in enumerate(zip(sets, sizes.values(), strict=True))}
    theirs = {s.name: some_scores(n, i + 50) for i, (s, n) in enumerate(zip(sets, sizes.values(), strict=True))}
    parts = []
    for one in sets:
        forum = one.name.split("/")[1]
        write(tmp_path / f"{forum}.json", forum, one.fingerprint, theirs[one.name])
        parts.append({"file": f"{forum}.json"})
    summary = tmp_path / "s.json"
    summary.write_text(json.dumps({"sets": [{"name": "cqadupstack", "parts": parts}]}))
    (row,) = compare(ours, read_earlier(summary, sets, "NDCG@10"), sets)["rows"]
    macro = [np.mean([np.mean(list(scores.values())) for scores in side.values()]) for side in (ours, theirs)]
    assert (row["data"], row["queries"]) == ("cqadupstack", sum(sizes.values()))
    assert (row["ours"], row["earlier"]) == (pytest.approx(macro[0]), pytest.approx(macro[1]))
    assert row["difference"] == pytest.approx(macro[0] - macro[1])
    assert row["greatest_gains"][0]["query"].split("/")[0] in CQADUPSTACK_FORUMS
    # With parts missing there is no such mean, and those that are there are compared one by one.
    summary.write_text(json.dumps({"sets": [{"name": "cqadupstack", "parts": parts[:2]}]}))
    rows = compare(ours, read_earlier(summary, sets, "NDCG@10"), sets)["rows"]
    assert [row["data"] for row in rows] == ["cqadupstack/android", "cqadupstack/english"]


@pytest.mark.parametrize(
    ("name", "fingerprint", "words"),
    [
        ("x", "another", r"is on other data: x test \(fingerprint another\).* x test \(fingerprint fingerprint \)"),
        ("y", "another", r"is on other data: y test .*; here: x test"),
    ],
)
def test_results_of_other_data_are_refused_in_one_line(tmp_path, name, fingerprint, words):
    path = write(tmp_path / "r.json", name, fingerprint, {"q": 0.5})
    with pytest.raises(DataError, match=words) as caught:
        read_earlier(path, [identity("x")], "NDCG@10")
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_sets_that_only_the_earlier_has_are_told_and_left_out(tmp_path):
    for name in ("x", "old"):
        write(tmp_path / f"s.{name}.json", name, f"fingerprint of {name}", {"q": 0.5})
    (tmp_path / "s.json").write_text(json.dumps({"sets": [{"file": "s.x.json"}, {"file": "/etc/../s.old.json"}]}))
    before = read_earlier(tmp_path / "s.json", [identity("x")], "NDCG@10")
    assert list(before.scores) == ["x"] and "old test" in before.left_out[0]
    comparison = compare({"x": {"q": 0.25}}, before, [identity("x")])
    assert "not compared" in earlier.as_text(comparison)
    assert any("q -0.2500" in line for line in earlier.as_markdown(comparison))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{broken", "not a results file"),
        ("[]", "not a results file"),
        ('{"metrics": {}}', "not a results file"),
        ('{"sets": [{}]}', "not a summary"),
        ('{"sets": 7}', "not a summary"),
        ('{"sets": [{"file": "gone.json"}]}', r"gone\.json: not a results file"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path, content, words):
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(DataError, match=words) as caught:
        read_earlier(tmp_path / "r.json", [identity("x")], "NDCG@10")
    assert "\n" not in str(caught.value)


def test_a_metric_or_queries_that_the_earlier_lacks_are_refused(tmp_path):
    path = write(tmp_path / "r.json", "x", "fingerprint of x", {"q": 0.5})
    with pytest.raises(DataError, match="has no MRR@10 of every query"):
        read_earlier(path, [identity("x")], "MRR@10")
    before: Any = read_earlier(path, [identity("x")], "NDCG@10")
    with pytest.raises(DataError, match="scores of other queries on x"):
        compare({"x": {"other": 0.5}}, before, [identity("x")])
