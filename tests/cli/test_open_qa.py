"""`contaccum open_qa`: the same figures from a model and from its run, and what is refused or said."""

from __future__ import annotations

import json

import pytest

from contaccum.cli import main
from contaccum.evaluation.results import read_result, read_trec_run


@pytest.fixture
def files(tmp_path):
    (tmp_path / "test.qa.csv").write_text("who sat\t['the cat', 'cats']\nwhere was it\t['the mat']\nwhen\t['1947']\n")
    rows = ["1\tone dog sat\tCats", "2\tthe cat said\t", "3\ta bird on the tree\tthe mat", "4\tin 1947 , on the mat\t"]
    (tmp_path / "psgs.tsv").write_text("id\ttext\ttitle\n" + "\n".join(rows) + "\n")
    return str(tmp_path / "test.qa.csv"), str(tmp_path / "psgs.tsv")


def test_a_model_and_the_run_that_it_wrote_score_the_same(tiny_model_path, files, tmp_path, capsys):
    common = ["--questions", files[0], "--passages", files[1], "--k_values", "2", "4", "--no_progress"]
    assert main(["open_qa", tiny_model_path, *common, "--output", str(tmp_path / "a.json")]) == 0
    assert main(["open_qa", "--run", str(tmp_path / "a.trec"), *common, "--output", str(tmp_path / "b.json")]) == 0
    first, second = read_result(tmp_path / "a.json"), read_result(tmp_path / "b.json")
    assert first["metrics"] == second["metrics"] and first["per_query"] == second["per_query"]
    run = read_trec_run(tmp_path / "a.trec")
    # The id of a passage may be that of a question: nothing is dropped for it.
    assert run == read_trec_run(tmp_path / "b.trec") and {len(hits) for hits in run.values()} == {4}
    assert first["metrics"]["Accuracy@4"] == 1.0 and "Accuracy@2" in capsys.readouterr().out
    about = {"name": "test.qa.csv", "questions": 3, "passages": 4, "match": "string", "passages_path": files[1]}
    assert about.items() <= first["data"].items() and len(first["data"]["passages_fingerprint"]) == 64
    assert first["model"]["similarity"] == "cos" and second["model"] == {"name": "run a.trec"}


def test_mistakes_are_one_line_and_answers_that_nothing_can_match_are_said(tiny_model_path, files, tmp_path, capsys):
    given, run = ("--questions", files[0], "--passages", files[1]), tmp_path / "run.trec"
    for argv, words, line in (
        (given, "name a MODEL to search with, or a --run to score", None),
        ((tiny_model_path, *given, "--k_values", "0"), "at least 1", None),
        ((tiny_model_path, "--questions", files[0], "--passages", "none.tsv"), "no such file", None),
        (("--run", str(run), *given), "'q7' is no question", "q7 Q0 1 1 0.5 x\n"),
        (("--run", str(run), *given), "no passages of the run left to use", "question-1 Q0 77 1 0.5 x\n"),
    ):
        run.write_text(line or "")
        assert main(["open_qa", *argv, "--output", str(tmp_path / "out.json"), "--no_progress"]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1 and not (tmp_path / "out.json").exists()
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": "who", "answer": ["(b", "c[au]t"]}) + "\n")
    run.write_text("question-1 Q0 2 1 0.5 x\n")
    argv = ["--run", str(run), "--questions", str(tmp_path / "q.jsonl"), "--passages", files[1], "--match", "regex"]
    assert main(["open_qa", *argv, "--output", str(tmp_path / "out.json"), "--no_progress"]) == 0
    assert "never found, because it is no regular expression: '(b' (1 such answers)" in capsys.readouterr().out
    assert read_result(tmp_path / "out.json")["metrics"]["Accuracy@1"] == 1.0
