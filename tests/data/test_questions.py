"""Corpus passages and questions: every format is read alike, and bad records are counted."""

import json
from pathlib import Path

import pytest
from data_files import put

from contaccum.data import Passage, RecordReport, load_questions, read_passages
from contaccum.errors import DataError

PASSAGES = [
    Passage("1", "Title", 'one "quoted" text'),
    Passage("2", "", "ä second"),
    Passage("x3", "t", "third"),
]


def read(path: Path, on_bad_record: str = "stop") -> list[Passage]:
    report = RecordReport(on_bad_record)  # type: ignore[arg-type]  # one of the two
    passages = list(read_passages(path, report))
    assert report.seen == report.used + report.reported and report.used == len(passages)
    return passages


def test_every_form_gives_the_same_passages(tmp_path):
    records = [{"_id": p.id, "title": p.title, "text": p.text} for p in PASSAGES]
    jsonl = "".join(json.dumps(record) + "\n" for record in records)
    rows = "".join(
        f'{p.id}\t"{p.text.replace(chr(34), chr(34) * 2)}"\t{p.title}\n' for p in PASSAGES
    )
    put(tmp_path / "beir" / "corpus.jsonl.gz", jsonl)
    for path in (
        tmp_path / "beir",
        put(tmp_path / "a.jsonl", jsonl),
        put(tmp_path / "psgs.tsv", "id\ttext\ttitle\n" + rows),
        put(tmp_path / "psgs.tsv.gz", "id\ttext\ttitle\n" + rows),
    ):
        assert read(path) == PASSAGES
    assert PASSAGES[0].passage == 'Title one "quoted" text'


def test_two_columns_are_taken_as_they_are_quotes_included(tmp_path):
    path = put(tmp_path / "collection.tsv", '0\t"The text" and "more\n7\tsecond\n')
    assert read(path) == [Passage("0", "", '"The text" and "more'), Passage("7", "", "second")]
    assert read(put(tmp_path / "header.tsv", "pid\tpassage\n0\ttext\n")) == [
        Passage("0", "", "text")
    ]


@pytest.mark.parametrize(
    ("name", "identifier", "text"),
    [
        ("collection.tsv", "0", "text"),
        ("collection.tsv.gz", "d0", "passage"),
        ("queries.dev.tsv", "0", "contents"),
        ("queries.dev.tsv", "0", "words, text"),
    ],
)
def test_a_first_passage_that_reads_like_a_header_is_a_passage(tmp_path, name, identifier, text):
    path = put(tmp_path / name, f"{identifier}\t{text}\n7\tsecond\n")
    assert read(path) == [Passage(identifier, "", text), Passage("7", "", "second")]


def test_a_table_without_a_column_of_ids_is_refused(tmp_path):
    path = put(tmp_path / "a.tsv", "docno\ttext\nd1\tfirst\n")
    message = r"a\.tsv:2: missing id: its fields are 'docno, text'; .*docid"
    with pytest.raises(DataError, match=message):
        read(path)


@pytest.mark.parametrize(
    ("name", "line", "reason"),
    [
        ("a.jsonl", '{"_id": "1"}', "missing text"),
        ("a.jsonl", '{"_id": " ", "text": "a"}', "empty id"),
        ("a.jsonl", '{"_id": "1", "text": " "}', "empty passage: '1'"),
        ("a.jsonl", "{", "broken JSON"),
        ("a.tsv", "1\ta\tb", "not 2 columns: found 3"),
        ("a.tsv", "1\t\ud800", "not UTF-8 text"),
    ],
)
def test_a_passage_that_cannot_be_used_is_named_or_skipped(name, line, reason, tmp_path):
    good = '{"_id": "0", "text": "good"}' if name.endswith("jsonl") else "0\tgood"
    path = put(tmp_path / name, f"{good}\n{line}\n".encode("utf-8", "surrogatepass"))
    with pytest.raises(DataError, match=rf"{name}:2: {reason}"):
        read(path)
    assert read(path, "skip") == [Passage("0", "", "good")]


EXPECTED = [("who?", ["Ann", 'the "b"']), ("when", ["1947"])]
FORMS = {
    "a.qa.csv": "who?\t['Ann', 'the \"b\"']\n\nwhen\t[\"1947\"]\n",
    "c.jsonl": "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in EXPECTED),
    "d.jsonl.gz": "".join(json.dumps({"query": q, "answers": a}) + "\n" for q, a in EXPECTED),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_questions(name, tmp_path):
    questions = load_questions(put(tmp_path / name, FORMS[name]))
    assert list(questions.texts) == list(questions.answers) == ["question-1", "question-2"]
    assert list(zip(questions.texts.values(), questions.answers.values(), strict=True)) == EXPECTED
    assert (
        questions.fingerprint
        == load_questions(put(tmp_path / "a.csv", FORMS["a.qa.csv"])).fingerprint
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("no answers here", "not 2 columns: found 1"),
        ("a\t__import__('os').system('true')", "answers are not a list"),
        ("a\t['']", "empty answer"),
        ("a\rb\t['x']", "broken quoting"),
        ("a\t" + "[" * 4000, "answers are not a list"),
    ],
)
def test_a_question_that_cannot_be_used_is_named_or_skipped(line, reason, tmp_path):
    path = put(tmp_path / "q.csv", f"when\t['1947']\n{line}\n")
    with pytest.raises(DataError, match=rf"q\.csv:2: {reason}"):
        load_questions(path)
    questions = load_questions(path, "skip")
    assert questions.report.reported == 1 and list(questions.texts.values()) == ["when"]
