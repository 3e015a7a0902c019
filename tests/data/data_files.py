"""The same small training set in every format, for tests of the readers."""

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset
from small_data import write_beir

from contaccum.data import Record, RecordReport, read_records
from contaccum.data.sampling import text_ids

# Every format can hold these: one positive each, two hard negatives each.
RECORDS = [
    Record("first query", ["Title one text"], ["negative a", "negative b"]),
    Record("zweite Frage, ä", ['two; "quoted", text'], ["negative c", "negative d"]),
    Record("third\u2028query", ["three"], ["negative e", "negative f"]),
]
TITLES = ["Title", "", None]
TEXTS = ["one text", *(record.positives[0] for record in RECORDS[1:])]


def put(path: Path, content: str | bytes) -> Path:
    """Write text or bytes, compressed if the name ends in .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    if path.suffix == ".gz":
        # Without a time, equal contents give equal files.
        data = gzip.compress(data, mtime=0)
    path.write_bytes(data)
    return path


def lines(records: list[Any]) -> str:
    """Return the text of a file of JSON lines."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def put_lines(path: Path, *records: Any, end: str = "") -> Path:
    """Write a file of JSON lines, and ``end`` after the last line."""
    return put(path, lines(list(records)) + end)


def passage(title: str | None, text: str) -> dict[str, Any]:
    """Return a passage object of a DPR or Tevatron file."""
    return {"docid": "7", "title": title, "text": text}


def dpr_records() -> list[dict[str, Any]]:
    """Return RECORDS as the objects of a DPR file."""
    return [
        {
            "question": record.query,
            "answers": ["an answer"],
            "positive_ctxs": [passage(title, text)],
            "negative_ctxs": [passage("", "random")],
            "hard_negative_ctxs": [passage("", negative) for negative in record.negatives],
        }
        for record, title, text in zip(RECORDS, TITLES, TEXTS, strict=True)
    ]


def tevatron_records() -> list[dict[str, Any]]:
    """Return RECORDS as the objects of a Tevatron file."""
    names = {
        "query": "question",
        "positive_passages": "positive_ctxs",
        "negative_passages": "hard_negative_ctxs",
    }
    return [{name: record[names[name]] for name in names} for record in dpr_records()]


def rows() -> list[dict[str, Any]]:
    """Return RECORDS as the rows of a table."""
    table = []
    for record, title, text in zip(RECORDS, TITLES, TEXTS, strict=True):
        row = {"query": record.query, "title": title, "positive": text}
        row["negative_1"], row["negative_2"] = record.negatives
        table.append(row)
    return table


def delimited(delimiter: str, end: str = "\r\n") -> str:
    """Return the text of a delimited file, such as CSV, with a header and the rows of RECORDS."""
    text = io.StringIO()
    table = rows()
    writer = csv.DictWriter(text, list(table[0]), delimiter=delimiter, lineterminator=end)
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def put_parquet(path: Path, records: list[dict[str, Any]] | None = None, **options: Any) -> Path:
    """Write records, or the rows of RECORDS, as a Parquet file."""
    pq.write_table(pa.Table.from_pylist(records or rows()), path, **options)
    return path


def put_saved(path: Path) -> Path:
    """Write the rows of RECORDS as a saved data set of Hugging Face datasets."""
    Dataset.from_list(rows()).save_to_disk(str(path))
    return path


def put_beir(folder: Path) -> Path:
    """Write RECORDS as a BEIR folder, without the negatives, for which BEIR has no place."""
    pairs = enumerate(zip(TITLES, TEXTS, strict=True))
    documents = {f"d{i}": (title or "", text) for i, (title, text) in pairs}
    queries = {f"q{i}": record.query for i, record in enumerate(RECORDS)}
    return write_beir(folder, documents, queries, [(f"q{i}", f"d{i}", 1) for i in range(3)])


# {format: function that writes RECORDS into a folder and returns the source}
WRITERS: dict[str, Callable[[Path], Path]] = {
    "beir": lambda folder: put_beir(folder / "beir"),
    "dpr": lambda folder: put(folder / "dpr.json", json.dumps(dpr_records(), indent=1)),
    "tevatron": lambda folder: put(folder / "tevatron.jsonl", lines(tevatron_records())),
    "pairs": lambda folder: put(folder / "pairs.jsonl", lines(rows())),
    "csv": lambda folder: put(folder / "table.csv", delimited(";")),
    "parquet": lambda folder: put_parquet(folder / "table.parquet"),
    "hub": lambda folder: put_saved(folder / "saved"),
}


def ids(*texts: str) -> list[int]:
    """Return the ids of texts, as they are in labels."""
    return text_ids(texts).tolist()


def read(source: str | Path, **options: Any) -> tuple[list[Record], RecordReport]:
    """Read all records of a source that has no bad record; return them and the report."""
    report = RecordReport()
    records = list(read_records(source, report=report, **options))
    assert report.reported == report.by_reason.total()
    return records, report
