"""Files of results: what is written comes back, what is no result or no run is refused by line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from contaccum.errors import DataError
from contaccum.evaluation.results import (
    EvaluationResult,
    finished_result,
    read_result,
    read_trec_run,
    result_files,
    trec_lines,
    write_result,
)

RUN = {"q 1": {"a%41": 0.5, "b\u00a0c": 0.1}, "q2": {"100%": -1.5, "a\tb": -1.5}}


def a_result() -> EvaluationResult:
    data = {"name": "x", "split": "test", "fingerprint": "f" * 64}
    model = {"name": "some/model", "fingerprint": "m", "similarity": "cos"}
    search = {"index": "Flat", "index_parameters": None, "k": 10}
    scores = {"NDCG@10": 0.1 + 0.2}
    return EvaluationResult(scores, {"q 1": scores}, RUN, data, model, search, {"query_max_length": 9}, {}, "float32")


def test_record_and_run_round_trip_and_nothing_of_the_environment_is_in_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_the_user")
    result = a_result()
    result.data["path"] = "/data/hf_secret_of_the_user"
    write_result(result, tmp_path / "out.json")
    record = read_result(tmp_path / "out.json")
    assert record.pop("data") == {**result.data, "path": "/data/<HF_TOKEN>"}
    assert record == {key: value for key, value in result.record().items() if key != "data"}
    assert read_trec_run(tmp_path / "out.trec") == RUN
    lines = [line.split() for line in (tmp_path / "out.trec").read_text().splitlines()]
    assert all(len(line) == 6 and line[1] == "Q0" and line[5] == "model" for line in lines)
    assert [line[3] for line in lines] == ["1", "2"] * 2
    score = np.float32(2 / 3)
    (line,) = trec_lines({"q": {"d": float(score)}}, "tag")
    assert np.float32(line.split()[4]) == score  # all of it
    assert [line[2] for line in lines[2:]] == ["a%09b", "100%"]  # ties by id, descending, as trec_eval has it


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("q Q0 d 1 0.5", "not six columns: found 5"),
        ("q Q0 d 1 high t", "score is not a number: found 'high'"),
        ("q Q0 d 1 nan t", "score is not a number"),
        ("q Q0 a 1 0.1 t", "duplicate document: 'a' of query 'q'"),
    ],
)
def test_a_bad_line_of_a_run_is_named_or_skipped(tmp_path, line, reason):
    path = tmp_path / "run.trec"
    path.write_text(f"q Q0 a 1 0.9 t\n{line}\n")
    with pytest.raises(DataError, match=rf"run\.trec:2: {reason}"):
        read_trec_run(path)
    assert read_trec_run(path, "skip") == {"q": {"a": 0.9}}
    path.write_text("x\n")
    with pytest.raises(DataError, match="no records left to use"):
        read_trec_run(path, "skip")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{broken", r"r\.json"),
        ('{"metrics": {}}', "not a results file"),
        ('{"sets": [{}]}', "not a table"),
        ('{"sets": [{"file": "gone.json"}]}', r"gone\.json"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path, content, words):
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(DataError, match=words) as caught:
        for path in result_files(tmp_path / "r.json"):
            read_result(path)
    assert "\n" not in str(caught.value)
    table = {"sets": [{"file": "a.json"}, {"parts": [{"file": "/etc/b.json"}, {"file": "../c.json"}]}]}
    (tmp_path / "r.json").write_text(json.dumps(table))  # of a table, what lies beside it
    assert result_files(tmp_path / "r.json") == [tmp_path / name for name in ("a.json", "b.json", "c.json")]


def test_a_finished_result_is_known_by_all_that_decides_its_scores(tmp_path):
    path = tmp_path / "out.json"
    plan = a_result().record() | {"metrics": ["NDCG@10"]}
    assert finished_result(path, plan) == (None, "")
    write_result(a_result(), path)
    record, why = finished_result(path, plan)
    assert record == read_result(path) and why.startswith("same model, data and settings, of 20")
    for what, change in {
        "model fingerprint": {"model": {"fingerprint": "n", "similarity": "cos"}},
        "model similarity": {"model": {"similarity": "dot"}},
        "tokenisation query_max_length": {"tokenisation": {"query_max_length": 8}},
        "data fingerprint": {"data": {"fingerprint": "g", "split": "test"}},
        "search index, search index_parameters": {"search": {"index": "IVF", "index_parameters": "nprobe=1", "k": 10}},
        "search k": {"search": {"index": "Flat", "k": 100}},
        "precision": {"precision": "bfloat16"},
        "metrics": {"metrics": ["NDCG@10", "P@1"]},
    }.items():
        assert finished_result(path, plan | change) == (None, f"it had other {what}")
    (tmp_path / "out.trec").unlink()
    assert finished_result(path, plan) == (None, "its run was gone")
