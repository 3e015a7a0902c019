"""Whatever the bytes, in every format: `DataError` with one line, or records in = records used + records reported."""

from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
import tempfile
from pathlib import Path

import pytest
from data_files import (
    WRITERS,
    delimited,
    dpr_records,
    lines,
    put,
    put_msmarco,
    put_parquet,
    put_saved,
    tevatron_records,
    text_triples,
)
from hypothesis import given
from hypothesis import strategies as st
from test_no_record_is_lost import FUZZ, check, contents, lines_with_content, mutated

from contaccum.data import RecordReport, load_training_data, read_records
from contaccum.data.json_array import read_json_array
from contaccum.data.records import Fault
from contaccum.errors import DataError

MODES = st.sampled_from(["stop", "skip"])
TEVATRON = lines(tevatron_records()).encode()
TRIPLES = text_triples().encode()
CSV = delimited(",", end="\n").encode()
DPR = json.dumps(dpr_records(), indent=1, ensure_ascii=False).encode()


def read(source: Path, mode: str, **options) -> tuple[list, RecordReport] | None:
    """The records and their report, or None where the source is refused in one line."""
    report = RecordReport(mode)
    try:
        records = list(read_records(source, report=report, **options))
    except DataError as error:
        check(error)
        return None
    assert report.seen == report.used + report.reported
    assert mode == "skip" or report.reported == 0
    for record in records:
        assert (
            record.query.strip() and record.positives and all(text.strip() == text != "" for text in record.positives)
        )
        assert "\0" not in "".join([record.query, *record.positives, *record.negatives])
    return records, report


@FUZZ
@given(contents(TEVATRON), MODES)
def test_every_tevatron_line_is_a_record_or_reported(data, mode):
    with tempfile.TemporaryDirectory() as folder:
        found = read(put(Path(folder) / "a.jsonl", data), mode, data_format="tevatron")
    if found and not data.startswith(b"\x1f\x8b"):
        assert len(found[0]) == found[1].used and found[1].seen == lines_with_content(data)


@FUZZ
@given(contents(TRIPLES), MODES)
def test_every_line_of_text_triples_is_a_record_or_reported(data, mode):
    with tempfile.TemporaryDirectory() as folder:
        found = read(put(Path(folder) / "a.tsv", data), mode, data_format="msmarco")
    if found and not data.startswith(b"\x1f\x8b"):
        assert len(found[0]) == found[1].used and found[1].seen == lines_with_content(data)


@FUZZ
@given(contents(CSV), MODES)
def test_every_row_of_a_table_is_a_record_or_reported(data, mode):
    with tempfile.TemporaryDirectory() as folder:
        found = read(put(Path(folder) / "a.csv", data), mode, data_format="csv")
    if found:
        assert len(found[0]) == found[1].used
        # A row may have several lines, and no line is part of no row: the first is the header.
        assert found[1].seen <= lines_with_content(data) - 1 or data.startswith(b"\x1f\x8b")


TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)


@FUZZ
@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS), min_size=1, max_size=8), st.sampled_from(",;\t"))
def test_what_python_writes_as_csv_comes_back_as_it_was(rows, delimiter):
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow(["query", "positive", "negative"])
    writer.writerows(rows)
    with tempfile.TemporaryDirectory() as folder:
        report = RecordReport("skip")
        records = list(read_records(put(Path(folder) / "a.csv", text.getvalue()), report=report))
    sound = [row for row in rows if row[0].strip() and row[1].strip() and "\0" not in "".join(row)]
    assert (report.seen, report.used) == (len(rows), len(sound))
    for record, (query, positive, negative) in zip(records, sound, strict=True):
        # Lines are told by LF alone, and a CR before it is part of the line's end.
        assert record.query.replace("\r", "") == query.replace("\r", "")
        assert record.positives[0].replace("\r", "").strip() == positive.replace("\r", "").strip()
        assert bool(record.negatives) == bool(negative.strip())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("text"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["title", "text", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
OBJECTS = st.fixed_dictionaries(
    {"query": VALUES | st.just("q"), "positive": VALUES | st.just("p")},
    optional={"title": VALUES, "negatives": VALUES, "negative_1": VALUES, "negative_2": VALUES},
)


@FUZZ
@given(st.lists(OBJECTS, min_size=1, max_size=6), MODES, st.sampled_from([None, 0, 1, 2]))
def test_json_of_any_shape_is_a_record_or_reported(objects, mode, negatives):
    with tempfile.TemporaryDirectory() as folder:
        path = put(Path(folder) / "a.jsonl", "".join(json.dumps(o) + "\n" for o in objects))
        found = read(path, mode, data_format="pairs", num_negatives=negatives)
    if found:
        assert len(found[0]) == found[1].used and found[1].seen == len(objects)
        assert negatives is None or all(len(record.negatives) == negatives for record in found[0])


CELLS = [
    st.none() | st.text(max_size=5),
    st.none() | st.binary(max_size=5),
    st.none() | st.integers(0, 9),
    st.none() | st.lists(st.none() | st.text(max_size=5), max_size=3),
    st.none()
    | st.fixed_dictionaries({"title": st.none() | st.text(max_size=3), "text": st.none() | st.text(max_size=3)}),
    st.none() | st.fixed_dictionaries({"text": st.lists(st.text(max_size=3), max_size=2)}),
]
COLUMNS = st.sampled_from(CELLS).flatmap(lambda cells: st.lists(cells, min_size=6, max_size=6))


@FUZZ
@given(COLUMNS, COLUMNS, COLUMNS, MODES, st.integers(1, 4))
def test_every_row_of_a_parquet_file_is_a_record_or_reported(queries, positives, negatives, mode, group):
    rows = [{"query": q, "positive": p, "negatives": n} for q, p, n in zip(queries, positives, negatives, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        found = read(put_parquet(Path(folder) / "a.parquet", rows, row_group_size=group), mode)
    if found:
        assert len(found[0]) == found[1].used and found[1].seen == len(rows)


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return put_parquet(tmp_path_factory.mktemp("fuzz") / "a.parquet", row_group_size=1).read_bytes()


@FUZZ
@given(st.data(), MODES)
def test_damaged_parquet_is_refused_or_reported(parquet, data, mode):
    damaged = data.draw(mutated(parquet))
    with tempfile.TemporaryDirectory() as folder:
        found = read(put(Path(folder) / "a.parquet", damaged), mode, data_format="parquet")
    if found:
        assert len(found[0]) == found[1].used


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return put_saved(tmp_path_factory.mktemp("fuzz") / "saved")


@FUZZ
@given(st.data(), MODES)
def test_damaged_dataset_on_disk_is_refused_or_reported(saved, data, mode):
    (shard,) = saved.glob("*.arrow")
    content = shard.read_bytes()
    changed = bytearray(content)
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=3)):
        changed[at] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        # Arrow maps the file into memory, so that every example needs files of its own.
        copied = Path(shutil.copytree(saved, Path(folder) / "saved"))
        (copied / shard.name).write_bytes(changed)
        found = read(copied, mode)
    if found:
        assert len(found[0]) == found[1].used


MSMARCO = ["collection.tsv", "queries.train.tsv", "qrels.train.tsv", "qidpidtriples.train.full.2.tsv"]


@FUZZ
@given(st.data(), st.sampled_from(MSMARCO), MODES, st.sampled_from([None, 0, 1]), st.booleans())
def test_every_line_of_an_msmarco_folder_is_used_or_reported(data, part, mode, negatives, packed):
    with tempfile.TemporaryDirectory() as name:
        folder = put_msmarco(Path(name))
        content = data.draw(contents((folder / part).read_bytes()))
        (folder / part).write_bytes(content)
        if packed:
            (folder / part).unlink()
            put(folder / f"{part}.gz", content)
        found = read(folder, mode, num_negatives=negatives)
        parts = MSMARCO if negatives != 0 else MSMARCO[:3]
        total = sum(lines_with_content(content if p == part else (folder / p).read_bytes()) for p in parts)
    if found and not content.startswith(b"\x1f\x8b"):
        records, report = found
        # The first line of the collection and of the queries may be a header, which is no record.
        assert total - 1 <= report.seen <= total
        assert negatives is None or all(len(record.negatives) == negatives for record in records)


@FUZZ
@given(st.one_of(*(mutated(gzip.compress(data, mtime=0)) for data in (TEVATRON, DPR, CSV, TRIPLES))))
def test_damaged_gzip_of_any_format_is_refused_or_reported(data):
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a.jsonl.gz", "a.json.gz", "a.csv.gz", "triples.tsv.gz", "a"):
            (Path(folder) / name).write_bytes(data)
            read(Path(folder) / name, "skip")


@FUZZ
@given(st.one_of(*(contents(data) for data in (TEVATRON, DPR, CSV, TRIPLES))), MODES)
def test_whatever_a_file_is_taken_for_it_is_refused_or_accounted_for(data, mode):
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a", "a.jsonl", "a.json", "a.csv", "a.tsv"):
            try:
                loaded = load_training_data(put(Path(folder) / name, data), on_bad_record=mode)
            except DataError as error:
                check(error)
            else:
                assert loaded.report.seen == loaded.report.used + loaded.report.reported
                assert len(loaded.dataset) == loaded.report.used


@FUZZ
@given(contents(DPR), st.integers(1, 60))
def test_an_array_does_not_depend_on_how_much_of_it_is_read_at_once(data, chunk_bytes):
    with tempfile.TemporaryDirectory() as folder:
        path = put(Path(folder) / "a.json", data)
        results = []
        for size in (chunk_bytes, 1 << 20):
            report = RecordReport("skip")
            records = []
            try:
                for line, record in read_json_array(path, report, size):
                    records.append((line, record))
                    report.accept()
            except DataError as error:
                check(error)
                records.append((0, {"error": str(error)}))
            results.append((records, report.entries, report.seen, report.reported))
        assert repr(results[0]) == repr(results[1])


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in ("beir", "msmarco")])
def test_a_consumer_that_stops_early_leaves_no_more_counted_than_it_saw(tmp_path, name):
    report = RecordReport()
    records = read_records(WRITERS[name](tmp_path), report=report)
    next(records)
    records.close()
    assert report.seen == report.used == 1


def test_a_fault_counts_as_many_records_as_it_takes():
    report = RecordReport("skip")
    report.see(5)
    report.accept(2)
    report.reject("a", 3, Fault("x"), 3)
    assert report.seen == report.used + report.reported and report.by_file == {"a": 3} and len(report.entries) == 1
