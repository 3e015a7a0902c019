"""Files of results: written results are read back; broken files are refused with their line."""

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_data import contents

from contaccum.errors import DataError
from contaccum.evaluation.metrics import add_holm, sign_flip_test
from contaccum.evaluation.results import (
    EvaluationResult,
    check_requirement,
    compare,
    comparison_table,
    read_previous,
    read_result,
    read_trec_run,
    trec_lines,
    write_result,
)

RUN = {"q 1": {"a%41": 0.5, "b c": 0.1}, "q2": {"100%": -1.5, "a b": -1.5}}
SCORES = {"NDCG@10": 0.1 + 0.2}
RESULT = EvaluationResult(
    metrics=SCORES,
    per_query={"q 1": SCORES},
    run=RUN,
    data={"name": "x", "fingerprint": "f" * 64},
    model={"name": "some/model", "fingerprint": "m"},
    search={"k": 10},
    tokenisation="t",
)


class InterruptedHits(dict[str, float]):
    """Results of a query, at which writing is interrupted."""

    def values(self) -> Any:
        raise KeyboardInterrupt


def test_an_earlier_result_stays_until_the_new_one_is_complete(tmp_path, monkeypatch):
    """And a kill between the two renames leaves no older record beside the new run."""
    write_result(RESULT, tmp_path / "out.json")
    earlier = contents(tmp_path)
    later_run = {"q": {"d": 1.0}}
    interrupted = dataclasses.replace(RESULT, run={**later_run, "r": InterruptedHits()})
    with pytest.raises(KeyboardInterrupt):
        write_result(interrupted, tmp_path / "out.json")
    assert contents(tmp_path) == earlier
    replace = os.replace

    def kill_after_first_rename(source: Path, target: Path) -> None:
        replace(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", kill_after_first_rename)
    with pytest.raises(KeyboardInterrupt):
        write_result(dataclasses.replace(RESULT, run=later_run), tmp_path / "out.json")
    assert [path.name for path in tmp_path.iterdir()] == ["out.trec"]
    assert read_trec_run(tmp_path / "out.trec") == later_run


def test_record_and_run_round_trip_without_credentials(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_the_user")
    data = {**RESULT.data, "path": "/data/hf_secret_of_the_user"}
    result = dataclasses.replace(RESULT, data=data)
    write_result(result, tmp_path / "out.json")
    record = read_result(tmp_path / "out.json")
    assert record == {**result.record(), "data": {**data, "path": "/data/<HF_TOKEN>"}}
    assert read_trec_run(tmp_path / "out.trec") == RUN
    # Documents with equal scores are ordered by id, descending.
    assert (tmp_path / "out.trec").read_text().splitlines()[2:] == [
        "q2 Q0 percent-encoded:a%20b 1 -1.5 model",
        "q2 Q0 100% 2 -1.5 model",
    ]


WHITE_SPACE = " \t\n\v\f\r\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2003\u2028\u2029\u202f\u205f\u3000"
UNUSUAL_IDS = ["", "%", "100%", "a%20b", "\ufeffa", "percent-encoded:", "percent-encoded:a%20b"]
UNUSUAL_IDS += [text for character in WHITE_SPACE for text in (character, f"a{character}b")]


def test_any_id_survives_a_run_file(tmp_path):
    """Every id is the id of a query and, with a different score, of a document."""
    hits = {document_id: float(number) for number, document_id in enumerate(UNUSUAL_IDS)}
    run = dict.fromkeys(UNUSUAL_IDS, hits)
    path = tmp_path / "run.trec"
    path.write_text("".join(trec_lines(run.items(), "tag")), encoding="utf-8", newline="")
    assert read_trec_run(path) == run


def test_ids_of_other_systems_and_all_digits_of_float32_scores_stay(tmp_path):
    score = float(np.float32(2 / 3))
    ids = ["https://example.org/a%20b?c=d&e#f", "100%", "doc:1", "東京"]
    run = {text_id: {text_id: score} for text_id in ids}
    lines = list(trec_lines(run.items(), "tag"))
    assert lines == [f"{text_id} Q0 {text_id} 1 {score:.9g} tag\n" for text_id in ids]
    (tmp_path / "run.trec").write_text("".join(lines), encoding="utf-8")
    read = read_trec_run(tmp_path / "run.trec")
    assert read.keys() == run.keys()
    for text_id in ids:
        assert np.float32(read[text_id][text_id]) == np.float32(score)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("q Q0 d 1 0.5", "not 6 columns: found 5"),
        ("q Q0 d 1 high t", "score is not a number: found 'high'"),
        ("q Q0 d 1 nan t", "score is not a number"),
        ("q Q0 a 1 0.1 t", "duplicate document: 'a' of query 'q'"),
    ],
)
def test_a_bad_line_of_a_run_is_refused_with_its_number_or_skipped(tmp_path, line, reason):
    path = tmp_path / "run.trec"
    path.write_text(f"q Q0 a 1 0.9 t\n{line}\n")
    with pytest.raises(DataError, match=rf"run\.trec:2: {reason}"):
        read_trec_run(path)
    assert read_trec_run(path, "skip") == {"q": {"a": 0.9}}


def test_a_comparison_counts_wins_ties_and_losses():
    ours = {"a": 0.9, "b": 0.5, "c": 0.1, "d": 0.2, "e": 0.5}
    theirs = {"e": 0.5 + 1e-12, "d": 0.1, "c": 0.6, "b": 0.4, "a": 0.2}
    groups = {"a": 0, "b": 0, "c": 1, "d": 2, "e": 3}
    row = compare("x", ours, theirs, groups)
    counts = {"queries": 5, "groups": 4, "wins": 3, "ties": 1, "losses": 1}
    assert counts.items() <= row.items()
    assert row["ours"] == pytest.approx(0.44)
    assert row["earlier"] == pytest.approx(0.36)
    for key, expected in sign_flip_test(ours, theirs, groups).items():
        assert row[key] == pytest.approx(expected), key
    add_holm([row])
    table = comparison_table([row])
    assert "| 0.4400 | 0.3600  | +0.0800    |" in table
    assert "- the queries of x are about only 4 different passages" in table


def write_record(folder: Path, name: str) -> None:
    """Write a result, s.NAME.json, on a data set that has the fingerprint "of NAME"."""
    record = {
        "metrics": {"NDCG@10": 0.5},
        "per_query": {"q": {"NDCG@10": 0.5}, "r": {"NDCG@10": 0.5}},
        "data": {"fingerprint": f"of {name}"},
        "search": {},
    }
    (folder / f"s.{name}.json").write_text(json.dumps(record))


def test_sets_of_an_earlier_table_are_read_from_the_files_beside_it(tmp_path):
    for name in ("x", "y", "old"):
        write_record(tmp_path, name)
    parts = [{"file": "/s.y.json"}, {"file": "../s.old.json"}]
    sets = [{"file": "s.x.json"}, {"parts": parts}]
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"sets": sets}))
    previous = read_previous(path, "NDCG@10")
    # Only the names of the files are read.
    assert previous == {key: {"q": 0.5, "r": 0.5} for key in ("of x", "of y", "of old")}


NO_FILES = "its sets name no files"
NO_NUMBER = "NDCG@10 of query 'r' is no number between 0 and 1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            ({"per_query": {"q": {"NDCG@10": 0.5}, "r": {"NDCG@10": score}}}, NO_NUMBER)
            for score in ("0.5", None, {}, -7, 10**400, math.nan, math.inf, True)
        ),
        ({"per_query": {"q": {"NDCG@10": 0.5}, "r": {"MRR@10": 0.5}}}, NO_NUMBER),
        ({"per_query": {"q": {"NDCG@10": 0.5}, "r": None}}, NO_NUMBER),
        ({"metrics": {"NDCG@10": None}}, "of query '.mean.' is no number"),
        ({"metrics": {}}, "has no NDCG@10"),
        ({"per_query": None}, "not a results file"),
        ({"data": "x"}, "not a results file"),
        *(({"sets": value}, NO_FILES) for value in (5, None, ["x"], [{}], [{"parts": 5}])),
        ({"sets": [{"file": 5}]}, NO_FILES),
        ({"sets": [{"file": ".."}]}, "not a JSON file"),
    ],
)
def test_a_damaged_earlier_result_is_refused(tmp_path, change, message):
    write_record(tmp_path, "x")
    path = tmp_path / "s.x.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=message):
        read_previous(path, "NDCG@10")


@pytest.mark.parametrize(
    ("gains", "not_worse", "better"),
    [
        ([-0.9] * 5, "CANNOT TELL", "CANNOT TELL"),
        ([0.1] * 5 + [0.0] * 95, "CANNOT TELL", "CANNOT TELL"),
        ([-0.1] + [0.0] * 99, "CANNOT TELL", "CANNOT TELL"),
        ([0.0] * 3, "NOT WORSE", "NOT BETTER"),  # equal on every query
        ([-0.9] * 6, "WORSE", "NOT BETTER"),
        ([0.1] * 6, "NOT WORSE", "BETTER"),
        ([0.1, -0.1] * 3, "NOT WORSE", "NOT BETTER"),
    ],
)
def test_a_requirement_is_missed_if_too_few_groups_have_changed_to_tell(gains, not_worse, better):
    """Each gain is that of ten queries about one passage."""
    theirs = {f"q{number}": 0.9 for number in range(10 * len(gains))}
    ours = {query: 0.9 + gains[int(query[1:]) // 10] for query in theirs}
    groups = {query: int(query[1:]) // 10 for query in theirs}
    row = compare("x", ours, theirs, groups)
    for requirement, title in (("not-worse", not_worse), ("better", better)):
        is_met, line = check_requirement(requirement, "NDCG@10", row)
        assert line.startswith(f"{title}: nDCG@10 0.900 -> ")
        assert is_met == (title in ("NOT WORSE", "BETTER"))
        num_changed = sum(gain != 0 for gain in gains)
        reason = f"scores changed on {num_changed} of {len(gains)} passages, and the test needs 6"
        assert (reason in line) == (num_changed < 6)
        assert line.endswith("; no score has changed") == (num_changed == 0)


def test_a_change_that_cancels_out_within_its_passage_is_no_equal_result():
    theirs = {"a": 0.5, "b": 0.5}
    ours = {"a": 0.2, "b": 0.8}
    row = compare("x", ours, theirs, {"a": 0, "b": 0})
    assert check_requirement("not-worse", "NDCG@10", row)[1].startswith("CANNOT TELL")
