"""Corpus passages: every format is read alike, and bad records are counted."""

import json
from pathlib import Path
from typing import Literal

import pytest
from data_files import put, put_lines

from contaccum.data import Passage, RecordReport, parse_columns, read_passages
from contaccum.data.corpus import read_texts
from contaccum.errors import ConfigError, DataError

PASSAGES = [
    Passage("1", "Title", 'one "quoted" text'),
    Passage("2", "", "ä second"),
    Passage("x3", "t", "third"),
]


def read(path: Path, on_bad_record: Literal["stop", "skip"] = "stop") -> list[Passage]:
    """Return all passages of a file, and check the counts of the report."""
    report = RecordReport(on_bad_record)
    passages = list(read_passages(path, report))
    assert report.seen == report.used + report.reported
    assert report.used == len(passages)
    return passages


ROWS = [{"_id": passage.id, "title": passage.title, "text": passage.text} for passage in PASSAGES]
# The form of DPR's psgs_w100.tsv, with texts in quotes
TABLE = """id\ttext\ttitle
1\t"one ""quoted"" text"\tTitle
2\t"ä second"\t
x3\t"third"\tt
"""


def test_every_form_gives_the_same_passages(tmp_path):
    put_lines(tmp_path / "beir" / "corpus.jsonl.gz", *ROWS)
    for path in (
        tmp_path / "beir",
        put_lines(tmp_path / "a.jsonl", *ROWS),
        put(tmp_path / "a.json", json.dumps(ROWS)),
        put(tmp_path / "indented.json.gz", json.dumps(ROWS, indent=2)),
        put(tmp_path / "psgs.tsv", TABLE),
        put(tmp_path / "psgs.tsv.gz", TABLE),
    ):
        assert read(path) == PASSAGES
    assert PASSAGES[0].passage == 'Title one "quoted" text'


def test_a_table_without_a_column_of_ids_is_refused(tmp_path):
    path = put(tmp_path / "a.tsv", "docno\ttext\nd1\tfirst\n")
    message = r"a\.tsv:2: missing id: its fields are 'docno, text', .* docid.*--corpus_columns id="
    with pytest.raises(DataError, match=message):
        read(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
@pytest.mark.parametrize(
    "columns", [["id=chunk", "text=title", "title=name"], {"id": "text", "text": "body"}]
)
def test_columns_of_a_corpus_may_have_other_names(tmp_path, name, columns):
    """A column with a role is not used for another one."""
    rows = [
        {"chunk": "c1", "title": "one", "name": "N", "text": "i1", "body": "long"},
        {"chunk": "c2", "title": "two", "name": None, "text": "i2", "body": "text"},
    ]
    path = tmp_path / name
    if name == "a.jsonl":
        del rows[1]["name"]  # no record but the first must have a title
        put_lines(path, *rows)
    else:
        put(path, "chunk;title;name;text;body\nc1;one;N;i1;long\nc2;two;;i2;text\n")
    expected = [Passage("c1", "N", "one"), Passage("c2", "", "two")]
    if isinstance(columns, dict):
        expected = [Passage("i1", "one", "long"), Passage("i2", "two", "text")]
    assert list(read_passages(path, RecordReport(), columns=columns)) == expected
    assert list(read_texts(path, "document", RecordReport(), columns)) == expected
    wrong = {**parse_columns(columns, "corpus_columns"), "title": "heading"}
    message = "no record has the field 'heading', only 'chunk, title, name, text, body' "
    with pytest.raises(DataError, match=message):
        list(read_passages(path, RecordReport(), columns=wrong))
    with pytest.raises(ConfigError, match="corpus_columns: a role must be one of id, text, title"):
        read_passages(path, RecordReport(), columns=["txet=body"])


@pytest.mark.parametrize(
    ("name", "line", "reason"),
    [
        ("a.jsonl", '{"_id": "1"}', "missing text"),
        ("a.jsonl", '{"_id": " ", "text": "a"}', "empty id"),
        ("a.jsonl", '{"_id": "1", "text": " "}', "empty passage: '1'"),
        ("a.jsonl", "{", "broken JSON"),
        ("a.tsv", "1\ta\tb", "wrong number of columns"),
        ("a.tsv", "1\t\ud800", "not UTF-8 text"),
    ],
)
def test_a_passage_that_cannot_be_used_is_named_or_skipped(name, line, reason, tmp_path):
    good_lines = ['{"_id": "0", "text": "good"}']
    if name.endswith("tsv"):
        good_lines = ["id\ttext", "0\tgood"]
    # The surrogate of one case is written as it is, which is not UTF-8.
    content = "\n".join([*good_lines, line, ""]).encode("utf-8", "surrogatepass")
    path = put(tmp_path / name, content)
    with pytest.raises(DataError, match=rf"{name}:{len(good_lines) + 1}: {reason}"):
        read(path)
    assert read(path, "skip") == [Passage("0", "", "good")]
