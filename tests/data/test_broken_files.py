"""Broken data: one error line with file and line, or a count under "skip"; never a traceback."""

import bz2
import gzip
import json
import lzma
import pickle
import random
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import (
    delimited,
    dpr_records,
    lines,
    put,
    put_beir,
    rows,
    tevatron_records,
)
from hypothesis import strategies as st

from contaccum.data import (
    RecordReport,
    load_training_data,
    read_passages,
    read_records,
    sniff_format,
)
from contaccum.errors import DataError

JSONL = lines(rows()).encode()
FIRST, REST = JSONL.split(b"\n", 1)
CSV = delimited(",", end="\n")
DPR = json.dumps(dpr_records())
NOISE = random.Random(0)  # cannot be compressed
MANY = b"".join(
    FIRST.replace(b"first", NOISE.randbytes(12).hex().encode()) + b"\n" for _ in range(50)
)

# A case has four parts:
# - a function that writes its files and returns the source;
# - a pattern of the expected error under "stop"; None: no record is bad;
# - the numbers of rows and reported records under "skip" (-1 rows: at least one); None: an error;
# - settings of load_training_data.
Case = tuple[Callable[[Path], Path], str | None, tuple[int, int] | None, dict[str, Any]]
CASES: dict[str, Case] = {}


def case(
    name: str, make: Any, stop: str | None, skip: tuple[int, int] | None, **settings: Any
) -> None:
    assert name not in CASES
    CASES[name] = make, stop, skip, settings


def file(name: str, content: str | bytes) -> Callable[[Path], Path]:
    return lambda folder: put(folder / name, content)


def unpacked(name: str, content: bytes) -> Callable[[Path], Path]:
    """Write the bytes uncompressed, even if the name ends in .gz."""
    return lambda folder: put(folder / "bytes", content).rename(folder / name)


def jsonl(
    name: str, bad: str | bytes, reason: str, skip: tuple[int, int] = (3, 1), **settings: Any
) -> None:
    """Add a case with a bad second line among three good records."""
    line = bad.encode() if isinstance(bad, str) else bad
    content = FIRST + b"\n" + line + b"\n" + REST
    case(name, file("a.jsonl", content), rf"a\.jsonl:2: {reason}", skip, **settings)


def judged(qrels: str) -> Callable[[Path], Path]:
    """Write a BEIR folder with other judgements."""

    def make(folder: Path) -> Path:
        beir_folder = put_beir(folder / "f")
        put(beir_folder / "qrels" / "train.tsv", qrels)
        return beir_folder

    return make


# Missing files, and files without data
case("missing file", lambda folder: folder / "none.jsonl", r"none\.jsonl: no such file", None)
case(
    "directory without data",
    lambda folder: folder,
    r": a folder without any of corpus\.jsonl",
    None,
)
case("empty file", file("a.jsonl.gz", b""), r"a\.jsonl\.gz: is empty", None)
case("empty array", file("dpr.json", b"[]"), r"dpr\.json: no records left to use; 0 records", None)

NO_ROWS = {"query": [], "positive": []}


def parquet_without_rows(folder: Path) -> Path:
    pq.write_table(pa.table(NO_ROWS), folder / "a.parquet")
    return folder / "a.parquet"


case("parquet without rows", parquet_without_rows, r"a\.parquet: no records left to use", None)

# Compression and characters
HALF = gzip.compress(MANY, mtime=0)
case(
    "truncated gz",
    unpacked("a.jsonl.gz", HALF[: len(HALF) // 2]),
    r"gz:\d+: the file breaks off",
    (-1, 1),
)
case("not gz but named so", unpacked("a.jsonl.gz", JSONL), None, (3, 0))
jsonl("latin-1 bytes", '{"query": "Käse", "positive": "p"}'.encode("latin-1"), "not UTF-8 text")
jsonl(
    "half a surrogate pair",
    '{"query": "q", "positive": "\\ud800"}',
    "not UTF-8 text: positive ",
)
case(
    "latin-1 csv",
    file("a.csv", CSV.encode() + b"K\xe4se,,b,c,d\n"),
    r"a\.csv:5: not UTF-8 text",
    (3, 1),
)
case(
    "latin-1 header of unknown columns",
    file("a.csv", "gefäß,antwort\nq,p\n".encode("latin-1")),
    r"a\.csv: neither JSON nor a table in UTF-8",
    None,
)
case(
    "header of unknown columns with characters of two bytes",
    file("a.csv", "frage,übergrößenträger,antwörter\nq,p,r\n"),
    r"it starts with 'frage,übergrößenträger,antwörter'",
    None,
)
jsonl(
    "a bad byte after characters of two bytes",
    b'{"query": "%s\xe4"}' % ("ä" * 30).encode(),
    "not UTF-8 text: 'ä{20}�",
)
case(
    "latin-1 array",
    file("dpr.json", '[{"query": "Käse", "positive": "p"}]'.encode("latin-1")),
    r"dpr\.json:1: broken JSON.*UTF8",
    None,
)
for encoding in ("utf-16", "utf-16-le", "utf-32"):
    case(f"csv in {encoding}", file("a.csv.gz", CSV.encode(encoding)), "is not text in UTF-8", None)
case("gzip twice", file("a.jsonl.gz", gzip.compress(JSONL)), "is not text in UTF-8", None)
case("xz file", file("a.jsonl", lzma.compress(JSONL)), "is not text in UTF-8", None)
case("pickle", file("a.jsonl", pickle.dumps({"query": "q"})), "is not text in UTF-8", None)
case("bzip2 file", file("a.jsonl", bz2.compress(JSONL)), "is not text in UTF-8", None)

# JSON
jsonl("broken JSON", '{"query": "q"', "broken JSON")
case("array cut short", file("dpr.json", DPR[:-90]), r"dpr\.json:3: broken JSON", None)

# Missing and empty fields
jsonl("empty query", '{"query": " ", "positive": "p"}', "empty query")
jsonl(
    "no positive",
    '{"query": "q", "text": "another field than in the record before"}',
    "missing positive",
)
jsonl("number for a title", '{"query": "q", "positive": "p", "title": 3}', "title is not text")
case(
    "unknown fields",
    file("a.jsonl", '{"q": "x", "p": "y"}\n'),
    r":1: missing query: .*'q, p'.*--data_columns",
    None,
)
bad = lines([*tevatron_records(), {**tevatron_records()[0], "positive_passages": []}])
case(
    "no positives in tevatron", file("a.jsonl", bad), r"a\.jsonl:4: empty positive_passages", (3, 1)
)

# Tables
case(
    "csv row too long",
    file("a.csv", CSV + "q,,one, two,,\n"),
    r":5: wrong number of columns: found 6 where",
    (3, 1),
)
case(
    "csv quote left open",
    file("a.csv", 'query,positive\nq,"open\nr,p\n'),
    r":2: broken quoting",
    None,
)
case(
    "csv of unknown columns",
    file("a.csv", "frage,antwort\nq,p\n"),
    r"a\.csv: neither JSON nor a table .*--data_columns",
    None,
)
# Folders whose files refer to each other by ids
case("beir, score", judged("q0\td0\t1\nq1\td1\t-1\n"), None, (1, 0))
case(
    "beir, no match",
    judged("q0\td0\t0\n"),
    r"f: no training pairs left to use",
    None,
)


@pytest.mark.parametrize("mode", ["x", "w:gz"])
def test_an_archive_is_no_text(tmp_path, mode):
    archive = tmp_path / "archive"
    if mode == "x":
        with zipfile.ZipFile(archive, mode) as packed:
            packed.writestr("a.jsonl", JSONL)
    else:
        with tarfile.open(archive, mode) as packed:
            packed.add(put(tmp_path / "a.jsonl", JSONL))
    for read in (sniff_format, lambda path: next(read_passages(path, RecordReport()))):
        with pytest.raises(DataError, match=r"archive: is not text .*unpack an archive"):
            read(archive)


def test_no_advice_to_skip_every_text_with_an_accent(tmp_path):
    for name in ("latin-1 bytes", "latin-1 csv"):
        make, _, _, _ = CASES[name]
        with pytest.raises(DataError, match="iconv") as caught:
            load_training_data(make(tmp_path))
        assert "--on_bad_record" not in str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_a_bad_record_is_named_or_counted(tmp_path, name):
    """Under "stop", one line names file, line and reason; under "skip", good records are used."""
    make, stop, skip, settings = CASES[name]
    source = make(tmp_path)
    if stop is not None:
        with pytest.raises(DataError, match=stop) as caught:
            load_training_data(source, **settings)
        message = str(caught.value)
        assert (
            message.isprintable()
            and len(message) < 800 + 2 * len(str(source))
            and message.startswith(str(source))
        )
    if skip is None:
        with pytest.raises(DataError):
            load_training_data(source, on_bad_record="skip", **settings)
        return
    data = load_training_data(source, on_bad_record="stop" if stop is None else "skip", **settings)
    rows, reported = skip
    assert rows < 0 < len(data.dataset) or len(data.dataset) == rows
    assert data.report.reported == reported == sum(data.report.by_reason.values())


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


@pytest.mark.long
@pytest.mark.parametrize("data_format", FILES)
@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(data=st.data(), mode=st.sampled_from(["stop", "skip"]), is_named=st.booleans())
def test_every_record_of_a_file_is_used_or_reported(data_format, data, mode, is_named):
    with tempfile.TemporaryDirectory() as folder:
        name = data.draw(st.sampled_from(["a", "a.jsonl", "a.json", "a.csv", "a.tsv"]))
        (Path(folder) / name).write_bytes(data.draw(contents(FILES[data_format])))
        check(Path(folder) / name, mode, data_format if is_named else None)
