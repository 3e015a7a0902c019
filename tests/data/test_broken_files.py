"""Broken data: one error line with file and line, or a count under "skip"; never a traceback."""

import bz2
import gzip
import json
import lzma
import pickle
import random
import tempfile
from functools import partial
from pathlib import Path

import hypothesis
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import delimited, dpr_records, lines, put, put_beir, rows, tevatron_records
from hypothesis import strategies as st

from contaccum.data import RecordReport, load_training_data, read_records
from contaccum.errors import DataError

JSONL = lines(rows()).encode()
FIRST, REST = JSONL.split(b"\n", 1)
CSV = delimited(",", end="\n")
DPR = json.dumps(dpr_records())
NOISE = random.Random(0)  # cannot be compressed
MANY = b"".join(
    FIRST.replace(b"first", NOISE.randbytes(12).hex().encode()) + b"\n" for _ in range(50)
)

# A bad second line among three good records, and the reason that is given.
LATIN_1_LINE = '{"query": "Käse", "positive": "p"}'.encode("latin-1")
BAD_LINES = [
    (LATIN_1_LINE, "not UTF-8 text"),
    (b'{"query": "q", "positive": "\\ud800"}', "not UTF-8 text: positive "),
    (b'{"query": "%s\xe4"}' % ("ä" * 30).encode(), "not UTF-8 text: 'ä{20}\ufffd"),
    (b'{"query": "q"', "broken JSON"),
    (b'{"query": " ", "positive": "p"}', "empty query"),
    (b'{"query": "q", "text": "another field than in the record before"}', "missing positive"),
    (b'{"query": "q", "positive": "p", "title": 3}', "title is not text"),
]
NO_POSITIVE = lines([*tevatron_records(), {**tevatron_records()[0], "positive_passages": []}])
LATIN_1_TABLE = CSV.encode() + b"K\xe4se,,b,c,d\n"
compress = partial(gzip.compress, mtime=0)  # equal in all processes, whose tests have one name
HALF = compress(MANY)
HALF = HALF[: len(HALF) // 2]
NO_TEXT = "is not text in UTF-8"

# The name and the content of a file; a pattern of the error under "stop", or None if no record is
# bad; and the numbers of rows and reported records under "skip" (-1 rows: at least one), or None
# for an error.
CASES: list[tuple[str, bytes, str | None, tuple[int, int] | None]] = [
    ("a.jsonl.gz", compress(b""), r"a\.jsonl\.gz: is empty", None),
    ("dpr.json", b"[]", r"dpr\.json: no records left to use; 0 records", None),
    ("a.jsonl.gz", HALF, r"gz:\d+: the file breaks off", (-1, 1)),
    ("a.jsonl.gz", JSONL, None, (3, 0)),  # not compressed
    ("a.jsonl", b'{"q": "x", "p": "y"}\n', r":1: missing query: .*'q, p'.*--data_columns", None),
    ("a.jsonl", NO_POSITIVE.encode(), r"a\.jsonl:4: empty positive_passages", (3, 1)),
    ("dpr.json", DPR[:-90].encode(), r"dpr\.json:3: broken JSON", None),
    ("dpr.json", b"[" + LATIN_1_LINE + b"]", r"dpr\.json:1: broken JSON.*UTF8", None),
    ("a.csv", LATIN_1_TABLE, r"a\.csv:5: not UTF-8 text", (3, 1)),
    ("a.csv", "gefäß,antwort\nq,p\n".encode("latin-1"), ":2: missing query", None),
    (
        "a.csv",
        "fräge,antwort\nq,p\n".encode(),
        ":2: missing query: .*'fräge, .*--data_columns",
        None,
    ),
    ("a.csv", (CSV + "q,,one, two,,\n").encode(), ":5: wrong number of columns: found 6", (3, 1)),
    ("a.csv", b'query,positive\nq,"open\nr,p\n', r":2: broken quoting", None),
    *(("a.csv.gz", compress(CSV.encode(f"utf-{end}")), NO_TEXT, None) for end in ("16", "32")),
    ("a.csv.gz", compress(CSV.encode("utf-16-le")), NO_TEXT, None),
    ("a.jsonl.gz", compress(compress(JSONL)), NO_TEXT, None),
    ("a.jsonl", lzma.compress(JSONL), NO_TEXT, None),
    ("a.jsonl", bz2.compress(JSONL), NO_TEXT, None),
    ("a.jsonl", pickle.dumps({"query": "q"}), NO_TEXT, None),
    ("a.csv", b"PK\x03\x04\x14\x00", NO_TEXT + ".*unpack an archive", None),  # also of Excel
]
for bad_line, reason in BAD_LINES:
    content = FIRST + b"\n" + bad_line + b"\n" + REST
    CASES.append(("a.jsonl", content, rf"a\.jsonl:2: {reason}", (3, 1)))


@pytest.mark.parametrize(("name", "content", "stop", "skip"), CASES)
def test_a_bad_record_is_named_or_counted(tmp_path, name, content, stop, skip):
    """Under "stop", one line names file, line and reason; under "skip", good records are used."""
    source = tmp_path / name
    source.write_bytes(content)
    check_training(source, stop, skip)


def check_training(source: Path, stop: str | None, skip: tuple[int, int] | None) -> None:
    if stop is not None:
        with pytest.raises(DataError, match=stop) as caught:
            load_training_data(source)
        message = str(caught.value)
        assert message.isprintable() and message.startswith(str(source))
        assert len(message) < 800 + 2 * len(str(source))
    if skip is None:
        with pytest.raises(DataError):
            load_training_data(source, on_bad_record="skip")
        return
    data = load_training_data(source, on_bad_record="stop" if stop is None else "skip")
    rows, reported = skip
    assert rows < 0 < len(data.dataset) or len(data.dataset) == rows
    assert data.report.reported == reported == sum(data.report.by_reason.values())


def test_what_holds_no_data_is_named(tmp_path):
    check_training(tmp_path / "none.jsonl", r"none\.jsonl: no such file", None)
    check_training(tmp_path, r": cannot be loaded as a Hugging Face dataset: ", None)
    empty = tmp_path / "a.parquet"
    pq.write_table(pa.table({"query": [], "positive": []}), empty)
    check_training(empty, r"a\.parquet: no records left to use", None)
    folder = put_beir(tmp_path / "f")
    put(folder / "qrels" / "train.tsv", "q0\td0\t1\nq1\td1\t-1\n")
    check_training(folder, None, (1, 0))
    put(folder / "qrels" / "train.tsv", "q0\td0\t0\n")
    check_training(folder, r"f: no training pairs left to use", None)


@pytest.mark.parametrize("content", [LATIN_1_LINE, LATIN_1_TABLE])
def test_no_advice_to_skip_every_text_with_an_accent(tmp_path, content):
    with pytest.raises(DataError, match="iconv") as caught:
        load_training_data(put(tmp_path / "a", content))
    assert "--on_bad_record" not in str(caught.value)


# For arbitrary bytes in every format: one error line, or all records are used or reported.

FILES = {
    "tevatron": lines(tevatron_records()).encode(),
    "pairs": lines(rows()).encode(),
    "csv": delimited(",", end="\n").encode(),
    "dpr": json.dumps(dpr_records(), indent=1, ensure_ascii=False).encode(),
}
# Fragments of valid files reach more code than random bytes.
PIECES = b'{ } [ ] , " \n \r\n \t \xff \xef\xbb\xbf NaN null \\ \\ud800 1e999 {} []'.split(b" ")
PIECES += [b"\x00", b"\x85", b"q1\td1\t1\n"]


@st.composite
def mutated(draw: st.DrawFn, original: bytes) -> bytes:
    data = original
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = draw(st.integers(at, min(len(data), at + 12)))
        data = data[:at] + draw(st.sampled_from(PIECES) | st.binary(max_size=3)) + data[end:]
    return data


@pytest.mark.long
@pytest.mark.parametrize("data_format", FILES)
@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(data=st.data(), mode=st.sampled_from(["stop", "skip"]))
def test_every_record_of_a_file_is_used_or_reported(data_format, data, mode):
    original = FILES[data_format]
    contents = st.binary(max_size=200) | mutated(original) | mutated(compress(original))
    name = data.draw(st.sampled_from(["a", "a.jsonl", "a.json", "a.csv", "a.tsv"]))
    report = RecordReport(mode)
    with tempfile.TemporaryDirectory() as folder:
        source = put(Path(folder) / name, data.draw(contents))
        try:
            records = list(read_records(source, report=report))
        except DataError as error:
            assert len(str(error).splitlines()) == 1 and str(error).isprintable()
            return
    assert mode == "skip" or not report.reported
    assert len(records) <= report.used
    for record in records:
        assert record.query.strip() and record.positives
        assert all(text == text.strip() != "" for text in record.positives)
