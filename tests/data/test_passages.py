"""Passages of a corpus in every form, one record at a time, none lost."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import put
from hypothesis import given, settings
from hypothesis import strategies as st

from contaccum.data.passages import Passage, read_passages
from contaccum.data.records import RecordReport
from contaccum.errors import DataError

PASSAGES = [Passage("1", "Title", 'one "quoted" text'), Passage("2", "", "ä second"), Passage("x3", "t", "third")]


def read(path: Path, on_bad_record: str = "stop") -> tuple[list[Passage], RecordReport]:
    report = RecordReport(on_bad_record)  # type: ignore[arg-type]  # one of the two
    found = list(read_passages(path, report))
    assert report.seen == report.used + report.reported and report.used == len(found)
    return found, report


def test_every_form_gives_the_same_passages(tmp_path: Path) -> None:
    records = [{"_id": p.id, "title": p.title, "text": p.text} for p in PASSAGES]
    jsonl = "".join(json.dumps(record) + "\n" for record in records)
    rows = "".join(f'{p.id}\t"{p.text.replace(chr(34), chr(34) * 2)}"\t{p.title}\n' for p in PASSAGES)
    put(tmp_path / "beir" / "corpus.jsonl.gz", jsonl)
    pq.write_table(pa.Table.from_pylist([{"id": i, **r} for i, r in enumerate(records)]), tmp_path / "p.parquet")
    for path in (
        tmp_path / "beir",
        tmp_path / "p.parquet",
        put(tmp_path / "a.jsonl", jsonl),
        put(tmp_path / "psgs.tsv", "id\ttext\ttitle\n" + rows),
        put(tmp_path / "psgs.tsv.gz", rows),
    ):
        assert read(path)[0] == PASSAGES


def test_two_columns_are_taken_as_they_are_quotes_included(tmp_path: Path) -> None:
    path = put(tmp_path / "collection.tsv", '0\t"The text" and "more\n7\tsecond\n')
    assert read(path)[0] == [Passage("0", "", '"The text" and "more'), Passage("7", "", "second")]
    path = put(tmp_path / "header.tsv", "pid\tpassage\n0\ttext\n")
    assert read(path)[0] == [Passage("0", "", "text")]


@pytest.mark.parametrize(
    ("name", "line", "reason"),
    [
        ("a.jsonl", '{"_id": "1"}', "missing text"),
        ("a.jsonl", '{"text": "a"}', "missing id"),
        ("a.jsonl", '{"_id": " ", "text": "a"}', "missing id: it is blank"),
        ("a.jsonl", '{"_id": "1", "text": " "}', "empty passage: '1'"),
        ("a.jsonl", '{"_id": "1", "text": "a", "title": 3}', "title"),
        ("a.jsonl", "{", "broken JSON"),
        ("a.tsv", "1\ta", "wrong number of columns: found 2"),
        ("a.tsv", '1\t"open\ttitle', "wrong number of columns"),
        ("a.tsv", "\ta\tb", "missing id"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_or_skipped(name: str, line: str, reason: str, tmp_path: Path) -> None:
    good = '{"_id": "0", "text": "good"}' if name.endswith("jsonl") else "0\tgood\t"
    path = put(tmp_path / name, f"{good}\n{line}\n")
    with pytest.raises(DataError, match=rf"{name}:2: {reason}"):
        read(path)
    assert read(path, "skip")[0] == [Passage("0", "", "good")]


def test_a_broken_parquet_file_or_one_of_other_columns_is_one_line(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    put(tmp_path / "broken.parquet", b"PAR1 and nothing more")
    for name in ("other.parquet", "broken.parquet"):
        with pytest.raises(DataError) as caught:
            read(tmp_path / name)
        assert "\n" not in str(caught.value) and name in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "p"
    path.write_bytes(content)
    try:
        read(path, "skip")
    except DataError as error:
        assert "\n" not in str(error)
