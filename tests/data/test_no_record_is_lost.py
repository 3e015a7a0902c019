"""Whatever the bytes: a reader raises `DataError` or accounts for every record, and nothing else happens."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from contaccum.data import load_beir_folder, load_training_data
from contaccum.data.json_array import read_json_array
from contaccum.data.records import RecordReport, read_json_lines
from contaccum.errors import DataError

FUZZ = settings(max_examples=120, deadline=None)

CORPUS = b'{"_id": "d1", "title": "T", "text": "x"}\n{"_id": "d2", "text": "y"}\n'
QUERIES = b'{"_id": "q1", "text": "a"}\n{"_id": "q2", "text": "b"}\n'
QRELS = b"query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td2\t1\n"
PAIRS = (
    b'{"query": "q1", "positive": "p1", "negative": "n"}\n'
    b'{"query": "q\\u00e9", "positive": "p2", "negative": "\xc3\xa9"}\n'
    b'{"query": "q3", "positive": "p3", "negative": "n"}\n'
)
DPR = json.dumps(
    [{"question": f"q{i}", "positive_ctxs": [{"title": "T", "text": f"p{i}"}]} for i in range(3)], indent=1
).encode()

# Pieces that are half right hurt more than noise does.
PIECES = st.sampled_from(
    [
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b'"',
        b"\n",
        b"\r\n",
        b"\t",
        b"\xff",
        b"\xef\xbb\xbf",
        b"NaN",
        b"null",
        b"\\",
        b"\\ud800",
        b"1e999",
        b"{}",
        b"[]",
        b"\x00",
        b"\x85",
        b"\xc2\xa0",
        b"q1\td1\t1\n",
        b"9" * 4400,
    ]
)


@st.composite
def mutated(draw: st.DrawFn, original: bytes) -> bytes:
    data = original
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = draw(st.integers(at, min(len(data), at + 12)))
        data = data[:at] + draw(st.one_of(PIECES, st.binary(max_size=3), st.just(b""))) + data[end:]
    return data


def contents(original: bytes) -> st.SearchStrategy[bytes]:
    return st.one_of(st.binary(max_size=200), mutated(original))


def lines_with_content(data: bytes) -> int:
    """Counted apart from the reader."""
    return sum(1 for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip())


def check(error: DataError) -> None:
    assert len(str(error).splitlines()) == 1 and str(error).isprintable()


@FUZZ
@given(contents(PAIRS))
def test_every_line_is_used_or_reported(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.write_bytes(data)
        report = RecordReport("skip")
        try:
            for _ in read_json_lines(path, report):
                report.accept()
        except DataError as error:
            check(error)
            assert lines_with_content(data) == 0 or data.startswith(b"\x1f\x8b")
        else:
            assert report.seen == report.used + report.reported
            assert report.seen == lines_with_content(data) or data.startswith(b"\x1f\x8b")


@FUZZ
@given(contents(PAIRS), st.sampled_from(["stop", "skip"]), st.integers(0, 1))
def test_training_pairs_are_rows_or_reported(data, mode, negatives):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.write_bytes(data)
        try:
            read = load_training_data(path, num_hard_negatives=negatives, on_bad_record=mode, data_format="triplets")
        except DataError as error:
            check(error)
        else:
            assert len(read.dataset) == read.report.used > 0
            assert read.report.used + read.report.reported == lines_with_content(data)
            assert mode == "skip" or read.report.reported == 0


@FUZZ
@given(contents(DPR), st.sampled_from(["stop", "skip"]))
def test_array_records_are_rows_or_reported(data, mode):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.json"
        path.write_bytes(data)
        try:
            read = load_training_data(path, data_format="dpr", on_bad_record=mode)
        except DataError as error:
            check(error)
        else:
            assert len(read.dataset) == read.report.used > 0
            assert read.report.seen == read.report.used + read.report.reported
            if read.report.reported == 0:
                assert len(read.dataset) == len(json.loads(data.decode("utf-8-sig")))


@FUZZ
@given(st.lists(st.sampled_from([b'{"a": 1}', b"7", b'{"a": NaN}', b'"\xff"', b"[]", b"{\n}"]), min_size=1))
def test_array_elements_are_counted_one_by_one(elements):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.json"
        path.write_bytes(b"[" + b" ,\n".join(elements) + b"]")
        report = RecordReport("skip")
        for _ in read_json_array(path, report):
            report.accept()
        assert report.seen == len(elements)
        assert report.used == sum(e in (b'{"a": 1}', b"{\n}") for e in elements)
        assert report.reported == len(elements) - report.used


@FUZZ
@given(
    st.one_of(
        st.tuples(contents(CORPUS), st.just(QUERIES), st.just(QRELS)),
        st.tuples(st.just(CORPUS), contents(QUERIES), st.just(QRELS)),
        st.tuples(st.just(CORPUS), st.just(QUERIES), contents(QRELS)),
    ),
    st.sampled_from(["stop", "skip"]),
)
def test_beir_records_are_read_or_reported(files, mode):
    corpus, queries, qrels = files
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "qrels").mkdir()
        (folder / "corpus.jsonl").write_bytes(corpus)
        (folder / "queries.jsonl").write_bytes(queries)
        (folder / "qrels" / "test.tsv").write_bytes(qrels)
        try:
            data = load_beir_folder(folder, on_bad_record=mode)
        except DataError as error:
            check(error)
        else:
            report = data.report
            assert report.seen == report.used + report.reported
            lines = sum(lines_with_content(part) for part in files)
            # One line may be the header, which is no record.
            assert report.seen in (lines, lines - 1)
            assert mode == "skip" or report.reported == 0
            judged = sum(len(documents) for documents in data.qrels.values())
            assert 0 < judged <= report.used - len(data.corpus)
            assert set(data.queries) == set(data.qrels)


@FUZZ
@given(st.one_of(mutated(gzip.compress(PAIRS, mtime=0)), st.binary(max_size=100)))
def test_damaged_gzip_is_reported_or_a_data_error(data):
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a.jsonl.gz", "a.json.gz"):
            path = Path(folder) / name
            path.write_bytes(data)
            try:
                read = load_training_data(path, on_bad_record="skip")
            except DataError as error:
                check(error)
            else:
                assert read.report.seen == read.report.used + read.report.reported
                assert read.report.used == len(read.dataset)
                assert len(read.dataset) == 3 or read.report.reported > 0
