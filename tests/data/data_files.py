"""The same small training set in every format, for tests of the readers."""

import csv
import gzip
import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def lines(records: list[Any]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def put_lines(path: Path, *records: Any, end: str = "") -> Path:
    """Write a file of JSON lines."""
    return put(path, lines(list(records)) + end)


def passage(title: str | None, text: str) -> dict[str, Any]:
    return {"docid": "7", "title": title, "text": text}


def dpr_records() -> list[dict[str, Any]]:
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
    names = {
        "question": "query",
        "positive_ctxs": "positive_passages",
        "hard_negative_ctxs": "negative_passages",
    }
    return [
        {names[name]: value for name, value in record.items() if name in names}
        for record in dpr_records()
    ]


def rows() -> list[dict[str, Any]]:
    return [
        {
            "query": r.query,
            "title": title,
            "positive": text,
            "negative_1": r.negatives[0],
            "negative_2": r.negatives[1],
        }
        for r, title, text in zip(RECORDS, TITLES, TEXTS, strict=True)
    ]


def delimited(delimiter: str, end: str = "\r\n") -> str:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator=end)
    header = list(rows()[0])
    writer.writerow(header)
    writer.writerows([row[name] for name in header] for row in rows())
    return text.getvalue()


def put_parquet(path: Path, records: list[dict[str, Any]] | None = None, **options: Any) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(records or rows()), path, **options)
    return path


def put_saved(path: Path, records: list[dict[str, Any]] | None = None) -> Path:
    from datasets import Dataset

    Dataset.from_list(records or rows()).save_to_disk(str(path))
    return path


def put_beir(folder: Path) -> Path:
    documents = {
        f"d{i}": (title or "", text)
        for i, (title, text) in enumerate(zip(TITLES, TEXTS, strict=True))
    }
    queries = {f"q{i}": record.query for i, record in enumerate(RECORDS)}
    return write_beir(folder, documents, queries, [(f"q{i}", f"d{i}", 1) for i in range(3)])


def put_msmarco(folder: Path) -> Path:
    """Write a folder: passages 0-2 are positives of queries 100-102, passages 10-15 negatives."""
    negatives = [negative for record in RECORDS for negative in record.negatives]
    passages = [f"{i}\t{r.positives[0]}" for i, r in enumerate(RECORDS)]
    passages += [f"{10 + i}\t{negative}" for i, negative in enumerate(negatives)]
    # The order of both files differs from that of the judgements.
    put(folder / "collection.tsv", "".join(f"{line}\n" for line in reversed(passages)))
    queries = [f"{100 + i}\t{r.query}\n" for i, r in enumerate(RECORDS)]
    put(folder / "queries.train.tsv", "".join(reversed(queries)) + "103\tnot judged\n")
    put(folder / "qrels.train.tsv", "".join(f"{100 + i}\t0\t{i}\t1\n" for i in range(3)))
    triples = [f"{100 + i // 2}\t{i // 2}\t{10 + i}\n" for i in range(6)]
    put(folder / "qidpidtriples.train.full.2.tsv", "".join(triples))
    return folder


def text_triples() -> str:
    return "".join(f"{r.query}\t{r.positives[0]}\t{r.negatives[0]}\n" for r in RECORDS)


# {format: function that writes RECORDS into a folder and returns the source}
WRITERS: dict[str, Callable[[Path], Path]] = {
    "beir": lambda folder: put_beir(folder / "beir"),
    "dpr": lambda folder: put(folder / "dpr.json", json.dumps(dpr_records(), indent=1)),
    "tevatron": lambda folder: put(folder / "tevatron.jsonl", lines(tevatron_records())),
    "msmarco": lambda folder: put_msmarco(folder / "msmarco"),
    "pairs": lambda folder: put(folder / "pairs.jsonl", lines(rows())),
    "csv": lambda folder: put(folder / "table.csv", delimited(";")),
    "parquet": lambda folder: put_parquet(folder / "table.parquet"),
    "hub": lambda folder: put_saved(folder / "saved"),
}


def peak_of_reading(source: Path) -> tuple[int, int]:
    """Return the number of records, and the peak of memory in bytes while they are read."""
    tracemalloc.start()
    try:
        return sum(1 for _ in read_records(source)), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def ids(*texts: str) -> list[int]:
    return text_ids(texts).tolist()


def read(source: str | Path, **options: Any) -> tuple[list[Record], RecordReport]:
    """Return all records of a source without bad records, and the report."""
    report = RecordReport()
    records = list(read_records(source, report=report, **options))
    assert report.seen == report.used + report.reported
    return records, report
