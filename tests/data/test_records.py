"""Invariants of reading lines: one clear error, exact line numbers, and no record lost without a word."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from pathlib import Path

import pytest

from contaccum.data.json_array import read_json_array
from contaccum.data.records import (
    ENTRIES_KEPT,
    BadRecord,
    Fault,
    RecordReport,
    add_to_fingerprint,
    quoted,
    read_json_lines,
    read_lines,
)
from contaccum.errors import ConfigError, DataError

READERS = [read_json_lines, read_json_array]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def read(path: Path, mode: str = "skip", reader=read_json_lines):
    report = RecordReport(mode)
    records = []
    for line, record in reader(path, report):
        report.accept()
        records.append((line, record))
    assert report.seen == report.used + report.reported
    return records, report


BAD_LINES = [
    (b'{"a": 1', "broken JSON"),
    (b'{"a": NaN}', "broken JSON"),
    (b'{"a": -Infinity}', "broken JSON"),
    (b'{"a": 1} {"a": 2}', "broken JSON"),
    (b'{"a": ' + b"1" * 5000 + b"}", "broken JSON"),
    (b"[" * 100_000, "broken JSON"),
    (b"[1, 2]", "not a JSON object"),
    (b'"text"', "not a JSON object"),
    (b"null", "not a JSON object"),
    (b'{"a": "\xff"}', "not UTF-8 text"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_bad_line_stops_with_one_line_that_names_file_and_line(tmp_path, bad, reason):
    path = write(tmp_path / "a.jsonl", b'{"a": 1}\n\n' + bad + b'\n{"a": 2}\n')
    with pytest.raises(DataError) as caught:
        read(path, "stop")
    message = str(caught.value)
    assert message.startswith(f"{path}:3: {reason}")
    assert "--on_bad_record skip" in message
    assert "\n" not in message and len(message) < 400 + len(str(path))


@pytest.mark.parametrize(("bad", "reason"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_bad_line_is_left_out_and_counted_under_skip(tmp_path, bad, reason):
    path = write(tmp_path / "a.jsonl", b'{"a": 1}\n\n' + bad + b'\n{"a": 2}\n')
    records, report = read(path)
    assert records == [(1, {"a": 1}), (4, {"a": 2})]
    assert (report.seen, report.used, report.reported) == (3, 2, 1)
    assert report.entries == [BadRecord(str(path), 3, reason)]
    assert report.by_reason == {reason: 1} and report.by_file == {str(path): 1}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_compression_byte_order_mark_and_line_ends_do_not_change_the_records(tmp_path, name, mark, end):
    lines = ['{"a": "é"}'.encode(), b"", b"  \t", b'{"a": 2}']
    path = write(tmp_path / name, mark + end.join(lines))
    records, report = read(path, "stop")
    assert records == [(1, {"a": "é"}), (4, {"a": 2})]
    assert (report.seen, report.reported) == (2, 0)


def test_gzip_is_known_by_its_content_too(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(gzip.compress(b'{"a": 1}\n'))
    assert read(path)[0] == [(1, {"a": 1})]


def test_cut_gzip_is_one_error_that_names_the_file_and_keeps_what_came_before(tmp_path):
    lines = b"".join(b'{"a": "%s"}\n' % hashlib.sha256(bytes([i])).hexdigest().encode() for i in range(200))
    packed = gzip.compress(lines)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(packed[: len(packed) // 2])
    whole = zlib.decompressobj(wbits=31).decompress(packed[: len(packed) // 2]).count(b"\n")
    with pytest.raises(DataError, match=r"a\.jsonl\.gz:\d+: the file breaks off: .*get the file again"):
        read(path, "stop")
    records, report = read(path)
    assert 0 < len(records) == whole < 200
    assert [line for line, _ in records] == list(range(1, len(records) + 1))
    assert report.entries == [BadRecord(str(path), len(records) + 1, "the file breaks off")]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "content",
    [b"not gzip", gzip.compress(b"x" * 999, mtime=0)[:-6], gzip.compress(b"", mtime=0)[:5]],
    ids=["no gzip", "cut at its end", "cut in its header"],
)
def test_damaged_gzip_is_a_data_error_and_never_a_traceback(tmp_path, content, reader):
    path = tmp_path / "a.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.gz:1"):
        read(path, "stop", reader)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("mode", ["stop", "skip"])
@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_empty_file_is_an_error_that_says_so(tmp_path, content, mode, reader):
    for name in ("a.jsonl", "a.jsonl.gz"):
        path = write(tmp_path / name, content)
        with pytest.raises(DataError, match="the file is empty") as caught:
            read(path, mode, reader)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("reader", READERS)
def test_missing_file_and_directory_are_told_apart(tmp_path, reader):
    with pytest.raises(DataError, match=r"nothing\.jsonl: no such file"):
        read(tmp_path / "nothing.jsonl", reader=reader)
    with pytest.raises(DataError, match="is a directory, a file is expected"):
        read(tmp_path, reader=reader)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_forbidden_file_is_a_data_error(tmp_path):
    path = write(tmp_path / "a.jsonl", b"{}")
    path.chmod(0)
    with pytest.raises(DataError, match="cannot be read"):
        read(path)


def test_bad_bytes_have_their_line_number_in_plain_lines_too(tmp_path):
    path = write(tmp_path / "a.tsv", b"a\tb\n\xc3\x28\nc\td\r\n")
    report = RecordReport("skip")
    assert list(read_lines(path, report)) == [(1, "a\tb"), (3, "c\td")]
    assert report.entries == [BadRecord(str(path), 2, "not UTF-8 text")]


def test_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="'ignore' is unknown"):
        RecordReport("ignore")  # type: ignore[arg-type]  # the mistake that is tested


def test_summary_is_one_line_with_every_count():
    report = RecordReport("skip")
    for _ in range(5):
        report.see()
    report.accept()
    report.accept()
    report.reject("a\nb.jsonl", 7, Fault("missing _id"))
    report.reject("a\nb.jsonl", 9, Fault("missing _id", "detail"))
    report.reject("c.tsv", 2, Fault("broken JSON"))
    report.note("empty documents kept", 4)
    report.note("nothing", 0)
    assert report.summary() == (
        "5 records: 2 used, 3 left out (2 missing _id, 1 broken JSON); by file: a b.jsonl 2, c.tsv 1; "
        "first: a b.jsonl:7; empty documents kept: 4"
    )


def test_counts_stay_exact_when_entries_are_no_longer_kept():
    report = RecordReport("skip")
    for line in range(ENTRIES_KEPT + 5):
        report.see()
        report.reject("a", line, Fault("x"))
    assert len(report.entries) == ENTRIES_KEPT
    assert report.reported == report.by_reason["x"] == report.by_file["a"] == ENTRIES_KEPT + 5


def test_array_gives_the_line_on_which_each_record_starts(tmp_path):
    path = write(tmp_path / "a.json", b'\n[{"a": 1},\n\n {"a":\n 2}, {"a": 3}\n,{}]\n')
    records, report = read(path, "stop", read_json_array)
    assert records == [(2, {"a": 1}), (4, {"a": 2}), (5, {"a": 3}), (6, {})]
    assert report.seen == 4


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b'{"a": NaN}', "broken JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "broken JSON"),
        (b'{"a": "\xff"}', "not UTF-8 text"),
        (b"[3]", "not a JSON object"),
        (b"7", "not a JSON object"),
    ],
)
def test_bad_record_of_an_array_is_left_out_and_those_after_it_are_read(tmp_path, bad, reason):
    path = write(tmp_path / "a.json.gz", b'[\n{"a": 1},\n' + bad + b',\n{"a": 2}]')
    records, report = read(path, "skip", read_json_array)
    assert records == [(2, {"a": 1}), (4, {"a": 2})]
    assert report.entries == [BadRecord(str(path), 3, reason)]
    with pytest.raises(DataError, match=rf"a\.json\.gz:3: {reason}"):
        read(path, "stop", read_json_array)


@pytest.mark.parametrize(
    ("tail", "line"),
    [
        (b',\n{"a": 2\n', 4),
        (b"", 2),
        (b"\n{}]", 3),
        (b",\n" + b"[" * 100_000, 3),
        (b"]\n{}", 3),
        (b",\n]", 3),
        (b",\n\xff]", 3),
        (b',\n{"a": NaN, oops}]', 3),
    ],
)
def test_broken_array_is_reported_where_it_breaks_and_what_came_before_is_used(tmp_path, tail, line):
    path = write(tmp_path / "a.json", b'[\n{"a": 1}' + tail)
    records, report = read(path, "skip", read_json_array)
    assert records == [(2, {"a": 1})]
    assert report.entries == [BadRecord(str(path), line, "broken JSON")]
    with pytest.raises(DataError, match=rf"a\.json:{line}: broken JSON.*nothing after it is read"):
        read(path, "stop", read_json_array)


@pytest.mark.parametrize("mode", ["stop", "skip"])
def test_a_file_that_is_no_array_is_refused(tmp_path, mode):
    path = write(tmp_path / "a.json", b'\n{"data": []}')
    with pytest.raises(DataError, match=r"a\.json:2: not a JSON array"):
        read(path, mode, read_json_array)


def test_cut_gzip_array_keeps_the_whole_records_before_the_cut(tmp_path):
    items = [b'{"a": "%s"}' % hashlib.sha256(bytes([i])).hexdigest().encode() for i in range(200)]
    packed = gzip.compress(b"[" + b",\n".join(items) + b"]")
    path = tmp_path / "a.json.gz"
    path.write_bytes(packed[: len(packed) // 2])
    whole = zlib.decompressobj(wbits=31).decompress(packed[: len(packed) // 2]).count(b"}")
    records, report = read(path, "skip", read_json_array)
    assert 0 < len(records) == whole < 200
    assert report.by_reason == {"the file breaks off": 1}


def test_fingerprint_depends_on_where_one_text_ends_and_the_next_begins():
    first, second = hashlib.sha256(), hashlib.sha256()
    add_to_fingerprint(first, "ab", "c")
    add_to_fingerprint(second, "a", "bc")
    assert first.hexdigest() != second.hexdigest()


def test_quoted_values_are_short_and_printable():
    assert quoted("a\nb") == r"'a\nb'"
    assert quoted("\ud800") == r"'\ud800'"
    assert len(quoted("x" * 10_000)) == 60


@pytest.mark.parametrize("chunk_bytes", range(1, 80))
def test_array_may_be_cut_anywhere_while_it_is_read(tmp_path, chunk_bytes):
    text = (
        '[{"a": null, "b": [-12.5e+3, 1E5, true, false, {}]},\n '
        '{"\\u00e9\\ud83d\\ude00é": "\\\\\\"x"}, {"n": 123456789012}]'
    )
    path = write(tmp_path / "a.json", text.encode())
    report = RecordReport("stop")
    assert [record for _, record in read_json_array(path, report, chunk_bytes)] == json.loads(text)
    path = write(tmp_path / "b.json", text.replace("true", "-Infinity").encode())
    with pytest.raises(DataError, match=r"b\.json:1: broken JSON: -Infinity is not JSON, in record 1"):
        list(read_json_array(path, report, chunk_bytes))


def test_array_with_a_bracket_left_open_does_not_draw_the_rest_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("contaccum.data.json_array.LONGEST_RECORD", 1000)
    path = write(tmp_path / "a.json", b'[{"a": 1},\n{"b": [' + b'{"a": 1},\n' * 1000 + b"]")
    records, report = read(path, "skip", lambda path, report: read_json_array(path, report, 100))
    assert records == [(1, {"a": 1})] and report.entries == [BadRecord(str(path), 2, "broken JSON")]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_line_without_end_is_one_bad_record_and_is_not_held(tmp_path, monkeypatch, end, name):
    monkeypatch.setattr("contaccum.data.records.LONGEST_LINE", 1000)
    content = b'{"a": 1}\n' + b"x" * 3_000_000 + end + (b'{"b": 2}\n' if end else b"")
    path = write(tmp_path / name, content)
    records, report = read(path, "skip", read_json_lines)
    assert records == [(1, {"a": 1}), *([(3, {"b": 2})] if end else [])]
    assert report.entries == [BadRecord(str(path), 2, "line too long")]
    assert report.seen == len(records) + 1
    with pytest.raises(DataError, match=r":2: line too long: 300000\d bytes \(write one record a line, or leave"):
        list(read_json_lines(path, RecordReport()))
