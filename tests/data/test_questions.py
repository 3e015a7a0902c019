"""Questions with answers: the forms in which they are published, and lines that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data_files import put

from contaccum.data.questions import load_questions
from contaccum.errors import DataError

EXPECTED = [("who was it", ["Ann", 'the "b"']), ("when", ["1947"])]
FORMS = {
    "a.qa.csv": "who was it\t\"['Ann', 'the \"\"b\"\"']\"\nwhen\t['1947']\n",
    "b.csv": "who was it\t['Ann', 'the \"b\"']\n\nwhen\t[\"1947\"]\n",
    "c.jsonl": "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in EXPECTED),
    "d.jsonl.gz": "".join(json.dumps({"query": q, "answers": a}) + "\n" for q, a in EXPECTED),
    "e.json": json.dumps([{"question": q, "answers": a, "positive_ctxs": []} for q, a in EXPECTED], indent=1),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_questions(name: str, tmp_path: Path) -> None:
    questions = load_questions(put(tmp_path / name, FORMS[name]))
    assert list(questions.texts) == list(questions.answers) == ["question-1", "question-2"]
    assert list(zip(questions.texts.values(), questions.answers.values(), strict=True)) == EXPECTED
    assert questions.fingerprint == load_questions(put(tmp_path / "a.csv", FORMS["a.qa.csv"])).fingerprint


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("no answers here", "not two columns: found 1"),
        ("a\tb\tc", "not two columns: found 3"),
        ("a\tPetra", "answers are not a list: found 'Petra'"),
        ("a\t__import__('os').system('true')", "answers are not a list"),
        ("a\t{'x': 1}", "no answers"),
        ("a\t[]", "no answers: the list is empty"),
        ("a\t['']", "empty answer"),
        ("a\t[7]", "answer"),
        (" \t['x']", "empty question"),
        ("a\t" + "[" * 4000, "answers are not a list"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_or_skipped(line: str, reason: str, tmp_path: Path) -> None:
    path = put(tmp_path / "q.csv", f"when\t['1947']\n{line}\n")
    with pytest.raises(DataError, match=rf"q\.csv:2: {reason}"):
        load_questions(path)
    questions = load_questions(path, "skip")
    assert questions.report.seen == 2 and questions.report.reported == 1 and list(questions.texts.values()) == ["when"]


def test_broken_json_and_empty_files_are_refused(tmp_path: Path) -> None:
    for name, content in (
        ("a.jsonl", '{"question": "a"}\n'),
        ("b.jsonl", '{"question": 1, "answer": "x"}\n'),
        ("c", ""),
    ):
        with pytest.raises(DataError) as caught:
            load_questions(put(tmp_path / name, content))
        assert "\n" not in str(caught.value)
