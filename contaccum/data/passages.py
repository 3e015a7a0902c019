"""Passages of a corpus one by one, whatever its size: DPR's psgs_w100.tsv, MS MARCO's collection.tsv, BEIR, parquet.

Memory holds a record. Nothing is encoded, joined or remembered; whether an id occurs twice is for those to find out who
hold the ids.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from contaccum.data.beir_folder import beir_file, passage_text
from contaccum.data.records import (
    Fault,
    RecordReport,
    one_line,
    open_data_file,
    quoted,
    read_json_lines,
    read_lines,
    text_of,
)
from contaccum.errors import DataError

_IDS, _TEXTS = ("_id", "id", "docid", "doc_id", "pid", "passage_id"), ("text", "passage", "contents")
_HEADER_WORDS = {*_IDS, *_TEXTS, "title"}
_ROWS_READ = 4096


class Passage(NamedTuple):
    """A passage and what it is called; `title` is empty where there is none, or where the data came as one text."""

    id: str
    title: str
    text: str

    @property
    def passage(self) -> str:
        """Title, space, text: what is encoded, and what training reads."""
        return passage_text(self.title, self.text)


def read_passages(path: str | Path, report: RecordReport) -> Iterator[Passage]:
    """Every passage of a corpus, in its order; each record is counted in ``report``.

    Args:
        path: a BEIR folder, or a file, plain or gzip: jsonl (`_id` or `id`, `title`, `text`), tab-separated `id text
            title` (DPR's, cells quoted as in csv, a header or none) or `id text` (MS MARCO's, no quoting), parquet with
            columns called as in jsonl.
        report: bad are: broken lines, a wrong number of columns, a missing id, a missing or empty text.

    Raises:
        DataError: the source cannot be used, or a bad record under "stop".
    """
    path = beir_file(Path(path), "corpus.jsonl") if os.path.isdir(path) else Path(path)
    if _starts_with(path, b"PAR1"):
        records = _parquet(path, report)
    elif _starts_with(path, b"{"):
        records = read_json_lines(path, report)
    else:
        records = _tab_separated(path, report)
    for line, record in records:
        try:
            passage = _passage(record)
        except Fault as fault:
            report.reject(path, line, fault)
            continue
        report.accept()
        yield passage


def count_roughly(path: str | Path) -> int:
    """How many passages there are, for a bar of progress: rows of a parquet file, lines of another; nothing is checked.

    Raises:
        DataError: the source cannot be opened.
        OSError, EOFError, zlib.error: it cannot be read to its end.
    """
    path = beir_file(Path(path), "corpus.jsonl") if os.path.isdir(path) else Path(path)
    if _starts_with(path, b"PAR1"):
        import pyarrow.parquet as pq

        return pq.read_metadata(path).num_rows
    with open_data_file(path) as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _passage(record: dict[str, Any]) -> Passage:
    identifier = next((record[name] for name in _IDS if record.get(name) is not None), None)
    if isinstance(identifier, int) and not isinstance(identifier, bool):
        identifier = str(identifier)
    identifier = text_of(identifier, "id")
    if not identifier.strip():
        raise Fault("missing id", "it is blank")
    title = record.get("title")
    title = "" if title is None else text_of(title, "title")
    text = text_of(next((record[name] for name in _TEXTS if record.get(name) is not None), None), "text")
    if not passage_text(title, text):
        raise Fault("empty passage", quoted(identifier))
    return Passage(identifier, title, text)


def _tab_separated(path: Path, report: RecordReport) -> Iterator[tuple[int, dict[str, Any]]]:
    names: list[str] | None = None
    for line, text in read_lines(path, report):
        cells = text.split("\t")
        if names is None:
            given = [cell.strip().lower() for cell in cells]
            is_header = len(given) in (2, 3) and set(given) <= _HEADER_WORDS
            names = given if is_header else ["id", "text", "title"][: max(2, min(3, len(cells)))]
            if is_header:
                continue
        report.see()
        try:
            # DPR's file is csv with tabs; MS MARCO's is not, and a quote there is a quote.
            if len(names) == 3 and '"' in text:
                cells = next(csv.reader([text], delimiter="\t"), [])
            if len(cells) != len(names):
                wanted = ", ".join(names)
                raise Fault("wrong number of columns", f"found {len(cells)}", f"write {wanted}, separated by tabs")
        except Fault as fault:
            report.reject(path, line, fault)
            continue
        yield line, dict(zip(names, cells, strict=True))


def _parquet(path: Path, report: RecordReport) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if name in _HEADER_WORDS]
            if not set(names) & set(_IDS) or not set(names) & set(_TEXTS):
                raise DataError(
                    one_line(
                        f"{path}: has the columns {', '.join(file.schema_arrow.names)} (name them id, title, text)"
                    )
                )
            for batch in file.iter_batches(batch_size=_ROWS_READ, columns=names):
                for record in batch.to_pylist():
                    row += 1
                    report.see()
                    yield row, record
    except (pa.ArrowException, OSError) as error:
        raise DataError(one_line(f"{path}: cannot be read after row {row}: {error} (get it again)")) from error


def _starts_with(path: Path, start: bytes) -> bool:
    with open_data_file(path) as file:
        try:
            return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(start)
        except (OSError, EOFError):
            return False  # reading it says what is wrong
