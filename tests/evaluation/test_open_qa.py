"""Open-domain QA: Top-k accuracy from a model and from a run file, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.data.passages import Passage
from contaccum.data.questions import load_questions
from contaccum.data.records import RecordReport
from contaccum.errors import DataError
from contaccum.evaluation.open_qa import evaluate_open_qa, load_passages, score_open_qa
from contaccum.evaluation.results import read_result
from contaccum.evaluation.trec_run import read_trec_run

QUESTIONS = "who sat\t['the cat', 'cats']\nwhere was it\t['the mat']\nwhen\t['1947']\n"
PASSAGES = [
    ("1", "Cats", "one dog sat"),
    ("2", "", 'the cat said ""hello"" to all'),
    ("3", "the mat", "a bird on the tree"),
    ("4", "", "in 1947 , on the mat"),
]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "test.qa.csv").write_text(QUESTIONS)
    rows = [f'{i}\t"{text}"\t{title}' for i, title, text in PASSAGES]
    (tmp_path / "psgs.tsv").write_text("id\ttext\ttitle\n" + "\n".join(rows) + "\n")
    return tmp_path / "test.qa.csv", tmp_path / "psgs.tsv"


def test_accuracy_counts_questions_whose_best_k_passages_hold_an_answer(files: tuple[Path, Path]) -> None:
    questions = load_questions(files[0])
    passages = load_passages(files[1], RecordReport())
    assert passages["2"] == Passage("2", "", 'the cat said "hello" to all')
    texts = {name: passage.text for name, passage in passages.items()}
    run = {
        "question-1": {"1": 3.0, "3": 2.0, "2": 1.0},  # third: "Cats" is a title, which is not searched
        "question-2": {"4": 0.5, "3": 0.9},  # second: the title of 3 does not count
        "question-3": {},
    }
    metrics, per_query = score_open_qa(questions, run, texts, (1, 2, 3), show_progress=False)
    assert metrics == {"Accuracy@1": 0.0, "Accuracy@2": pytest.approx(1 / 3), "Accuracy@3": pytest.approx(2 / 3)}
    assert per_query["question-1"] == {"Accuracy@1": 0.0, "Accuracy@2": 0.0, "Accuracy@3": 1.0}
    with pytest.raises(DataError, match="passage '9' of question-1 is not in the corpus"):
        score_open_qa(questions, {"question-1": {"9": 1.0}}, texts, (1,), show_progress=False)


def test_a_model_and_the_run_that_it_wrote_score_the_same(
    tiny_model_path: str, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--questions", str(files[0]), "--passages", str(files[1]), "--k_values", "1", "2", "--no_progress"]
    assert main(["open_qa", tiny_model_path, *common, "--output", str(tmp_path / "a.json")]) == 0
    assert main(["open_qa", "--run", str(tmp_path / "a.trec"), *common, "--output", str(tmp_path / "b.json")]) == 0
    first, second = read_result(tmp_path / "a.json"), read_result(tmp_path / "b.json")
    assert first["metrics"] == second["metrics"] and first["per_query"] == second["per_query"]
    assert read_trec_run(tmp_path / "a.trec") == read_trec_run(tmp_path / "b.trec")
    # The id of a passage may be that of a question: nothing is dropped for it.
    model = DualEncoder.from_pretrained(tiny_model_path, device="cpu")
    questions, passages = load_questions(files[0]), load_passages(files[1], RecordReport())
    result = evaluate_open_qa(model, questions, passages, (1, 4), show_progress=False)
    assert {name: len(hits) for name, hits in result.run.items()} == dict.fromkeys(questions.texts, 4)
    assert result.metrics["Accuracy@4"] == 1.0
    assert first["data"]["match"] == "string" and len(first["data"]["passages_fingerprint"]) == 64
    assert "Accuracy@2" in capsys.readouterr().out


def test_mistakes_are_one_line_and_exit_2(
    tiny_model_path: str, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions, passages = (str(file) for file in files)

    def refuse(expected: str, *argv: str) -> None:
        assert main(["open_qa", *argv, "--output", str(tmp_path / "out.json"), "--no_progress"]) == 2
        line = capsys.readouterr().err
        assert expected in line and line.count("\n") == 1 and not (tmp_path / "out.json").exists()

    given = ("--questions", questions, "--passages", passages)
    refuse("name a MODEL to search with, or a --run to score", *given)
    refuse("name a MODEL to search with, or a --run to score", tiny_model_path, "--run", "x.trec", *given)
    refuse("at least 1", tiny_model_path, *given, "--k_values", "0")
    refuse("no such file", tiny_model_path, "--questions", questions, "--passages", str(tmp_path / "none.tsv"))
    (tmp_path / "run.trec").write_text("q7 Q0 1 1 0.5 x\n")
    refuse("'q7' is no question", "--run", str(tmp_path / "run.trec"), *given)
    (tmp_path / "run.trec").write_text("question-1 Q0 77 1 0.5 x\n")
    refuse("no passages of the run left to use", "--run", str(tmp_path / "run.trec"), *given)
    (tmp_path / "twice.tsv").write_text("1\ta\tb\n1\tc\td\n")
    refuse("id '1' occurs again", tiny_model_path, "--questions", questions, "--passages", str(tmp_path / "twice.tsv"))


def test_answers_that_nothing_can_match_are_told(
    tiny_model_path: str, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": "who", "answer": ["(b", "cat"]}) + "\n")
    argv = [tiny_model_path, "--questions", str(tmp_path / "q.jsonl"), "--passages", str(files[1]), "--match", "regex"]
    assert main(["open_qa", *argv, "--output", str(tmp_path / "a.json"), "--no_progress"]) == 0
    assert "never found, because it is no regular expression: '(b' (1 such answers)" in capsys.readouterr().out
