"""`contaccum open_qa`: scores of a model and of its run, regex answers, refused runs."""

import json

import pytest
from small_data import write_open_qa

from contaccum.cli import main
from contaccum.evaluation.results import read_result, read_trec_run


@pytest.fixture
def files(tmp_path):
    questions, passages = write_open_qa(tmp_path)
    return ["--questions", questions, "--passages", passages, "--no_progress"]


def test_a_run_has_the_scores_of_the_model_that_made_it(tiny_model_path, files, tmp_path):
    common = [*files, "--k_values", "2", "4"]
    assert main(["open_qa", tiny_model_path, *common, "--output", str(tmp_path / "a.json")]) == 0
    run_argv = ["--run", str(tmp_path / "a.trec"), "--output", str(tmp_path / "b.json")]
    assert main(["open_qa", *run_argv, *common]) == 0
    model_record = read_result(tmp_path / "a.json")
    run_record = read_result(tmp_path / "b.json")
    assert model_record["metrics"] == run_record["metrics"]
    assert model_record["per_query"] == run_record["per_query"]
    run = read_trec_run(tmp_path / "a.trec")
    assert run == read_trec_run(tmp_path / "b.trec")
    assert {len(hits) for hits in run.values()} == {4}
    expected_data = {
        "name": "test.qa.csv",
        "questions": 3,
        "passages": 4,
        "match": "string",
        "passages_path": files[3],
    }
    assert expected_data.items() <= model_record["data"].items()
    assert len(model_record["data"]["passages_fingerprint"]) == 64
    assert model_record["model"]["similarity"] == "cos"
    assert run_record["model"] == {"name": "run a.trec"}


def test_runs_that_do_not_fit_the_data_are_refused_in_one_line(files, tmp_path, capsys):
    run = tmp_path / "run.trec"
    output = tmp_path / "out.json"
    for line, message in (
        ("q7 Q0 1 1 0.5 x\n", "'q7' is not the id of a question"),
        ("question-1 Q0 77 1 0.5 x\n", "no passages of the run left to use"),
    ):
        run.write_text(line)
        assert main(["open_qa", "--run", str(run), *files, "--output", str(output)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert not output.exists()


def test_answers_can_be_regular_expressions(files, tmp_path):
    """The first answer is not a valid regular expression."""
    run = tmp_path / "run.trec"
    output = str(tmp_path / "out.json")
    question = {"question": "who", "answer": ["(b", "c[au]t"]}
    (tmp_path / "test.qa.csv").write_text(json.dumps(question) + "\n")
    run.write_text("question-1 Q0 2 1 0.5 x\n")
    assert main(["open_qa", "--run", str(run), *files, "--match", "regex", "--output", output]) == 0
    assert read_result(output)["metrics"]["Accuracy@1"] == 1.0


def test_a_run_of_a_corpus_with_a_passage_without_text_is_scored(files, tmp_path):
    """`contaccum encode` and `contaccum search` accept such a corpus, too."""
    with (tmp_path / "psgs.tsv").open("a") as passages:
        passages.write("5\t\t\n")
    run = tmp_path / "run.trec"
    run.write_text("question-1 Q0 5 1 0.5 x\nquestion-2 Q0 4 1 0.5 x\n")
    output = tmp_path / "out.json"
    argv = ["open_qa", "--run", str(run), *files, "--k_values", "1", "--output", str(output)]
    assert main(argv) == 0
    assert read_result(output)["metrics"]["Accuracy@1"] == pytest.approx(1 / 3)
