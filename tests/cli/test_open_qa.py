"""`contaccum open_qa`: the same figures from a model and from its run, and what is refused."""

import json

import pytest
from small_data import write_open_qa

from contaccum.cli import main
from contaccum.evaluation.results import read_result, read_trec_run


@pytest.fixture
def files(tmp_path):
    questions, passages = write_open_qa(tmp_path)
    return ["--questions", questions, "--passages", passages, "--no_progress"]


def test_a_model_and_the_run_that_it_wrote_score_the_same(tiny_model_path, files, tmp_path):
    common = [*files, "--k_values", "2", "4"]
    assert main(["open_qa", tiny_model_path, *common, "--output", str(tmp_path / "a.json")]) == 0
    assert (
        main(
            [
                "open_qa",
                "--run",
                str(tmp_path / "a.trec"),
                *common,
                "--output",
                str(tmp_path / "b.json"),
            ]
        )
        == 0
    )
    first, second = read_result(tmp_path / "a.json"), read_result(tmp_path / "b.json")
    assert first["metrics"] == second["metrics"] and first["per_query"] == second["per_query"]
    run = read_trec_run(tmp_path / "a.trec")
    assert run == read_trec_run(tmp_path / "b.trec") and {len(hits) for hits in run.values()} == {4}
    about = {
        "name": "test.qa.csv",
        "questions": 3,
        "passages": 4,
        "match": "string",
        "passages_path": files[3],
    }
    assert (
        about.items() <= first["data"].items() and len(first["data"]["passages_fingerprint"]) == 64
    )
    assert first["model"]["similarity"] == "cos" and second["model"] == {"name": "run a.trec"}


def test_regex_answers_are_for_curated_trec_and_mistakes_are_one_line(files, tmp_path, capsys):
    run, output = tmp_path / "run.trec", str(tmp_path / "out.json")
    for line, words in (
        ("q7 Q0 1 1 0.5 x\n", "'q7' is not the id of a question"),
        ("question-1 Q0 77 1 0.5 x\n", "no passages of the run left to use"),
    ):
        run.write_text(line)
        assert main(["open_qa", "--run", str(run), *files, "--output", output]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1 and not (tmp_path / "out.json").exists()
    (tmp_path / "test.qa.csv").write_text(
        json.dumps({"question": "who", "answer": ["(b", "c[au]t"]}) + "\n"
    )
    run.write_text("question-1 Q0 2 1 0.5 x\n")
    assert main(["open_qa", "--run", str(run), *files, "--match", "regex", "--output", output]) == 0
    assert read_result(output)["metrics"]["Accuracy@1"] == 1.0
