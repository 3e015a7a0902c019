"""Whatever the bytes, in every format: `DataError` with one line, or records in = records used + records reported."""

import gzip
import json
import tempfile
from pathlib import Path

import pytest
from data_files import delimited, dpr_records, lines, rows, tevatron_records, text_triples
from hypothesis import given, settings
from hypothesis import strategies as st

from contaccum.data import RecordReport, read_records
from contaccum.errors import DataError

pytestmark = pytest.mark.long
FUZZ = settings(max_examples=150, deadline=None)

FILES = {
    "tevatron": lines(tevatron_records()).encode(),
    "pairs": lines(rows()).encode(),
    "msmarco": text_triples().encode(),
    "csv": delimited(",", end="\n").encode(),
    "dpr": json.dumps(dpr_records(), indent=1, ensure_ascii=False).encode(),
}
# Pieces that are half right hurt more than noise does.
PIECES = b'{ } [ ] , " \n \r\n \t \xff \xef\xbb\xbf NaN null \\ \\ud800 1e999 {} [] \x00 \x85 q1\td1\t1\n'.split(b" ")


@st.composite
def mutated(draw: st.DrawFn, original: bytes) -> bytes:
    data = original
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = draw(st.integers(at, min(len(data), at + 12)))
        data = data[:at] + draw(st.sampled_from(PIECES) | st.binary(max_size=3)) + data[end:]
    return data


def contents(original: bytes) -> st.SearchStrategy[bytes]:
    return st.binary(max_size=200) | mutated(original) | mutated(gzip.compress(original, mtime=0))


def check(source: Path, mode: str, data_format: str | None) -> None:
    report = RecordReport(mode)  # type: ignore[arg-type]  # one of the two
    try:
        records = list(read_records(source, data_format, report=report))  # type: ignore[arg-type]  # as above
    except DataError as error:
        assert len(str(error).splitlines()) == 1 and str(error).isprintable()
        return
    assert mode == "skip" or not report.reported
    assert len(records) <= report.used
    for record in records:
        assert record.query.strip() and record.positives
        assert all(text == text.strip() != "" for text in record.positives)


@pytest.mark.parametrize("data_format", FILES)
@FUZZ
@given(data=st.data(), mode=st.sampled_from(["stop", "skip"]), told=st.booleans())
def test_every_record_of_a_file_is_used_or_reported(data_format, data, mode, told):
    with tempfile.TemporaryDirectory() as folder:
        name = data.draw(st.sampled_from(["a", "a.jsonl", "a.json", "a.csv", "a.tsv"]))
        (Path(folder) / name).write_bytes(data.draw(contents(FILES[data_format])))
        check(Path(folder) / name, mode, data_format if told else None)
