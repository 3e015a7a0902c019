"""Rows of csv, parquet and Hugging Face datasets, as dictionaries. What their columns mean is for `columns` to say.

In memory are a csv record, or a thousand rows of the columns that are needed.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from contaccum.data.columns import Fields
from contaccum.data.records import (
    LONGEST_LINE,
    UNREADABLE,
    Fault,
    breaks_off,
    broken,
    checked_line,
    first_bytes,
    one_line,
    open_data_file,
    open_text,
    quoted,
    refuse_empty,
)
from contaccum.errors import DataError
from contaccum.files import AnyPath

DELIMITERS = (",", ";", "\t")
_ROWS = 1000  # of Arrow, in memory at a time

# From the names of all columns to those that are read; raises `DataError` where one is missing.
Needed = Callable[[list[str], str], list[str]]


def csv_rows(path: Path, fields: Fields, needed: Needed) -> Iterator[tuple[int, Any]]:
    """(line on which it starts, row) of a csv or tsv file with a header; a cell that is blank is None.

    Raises:
        DataError: the file cannot be used, or its header lacks a column; or a quote without an end takes other lines
            along: which records they were, nobody can tell.
    """
    csv.field_size_limit(LONGEST_LINE)  # Python's own limit of 128 KB a cell guards against nothing here
    mend = f"write {quoted(chr(34) * 2)} for a quote inside a quoted cell"
    with open_data_file(path) as file:
        lines = open_text(file)
        line = start = 0
        try:
            line, header = next(((n, text) for n, text in enumerate(lines, start=1) if text.strip()), (1, ""))
            if not header:
                refuse_empty(path)
            if "\r" in header.rstrip("\r\n"):
                raise Fault("lines end in CR alone", mend="save it with LF or CRLF")
            delimiter, names = split_header(checked_line(header), fields.mapped)
            needed(names, f"{path}:{line}")
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
            while True:
                start = line + reader.line_num + 1
                try:
                    row = next(reader, None)
                except csv.Error as error:
                    if line + reader.line_num > start:
                        which = f"lines {start} to {line + reader.line_num} cannot be told apart"
                        raise broken(path, start, Fault("broken quoting", which, mend)) from error
                    yield start, Fault("broken quoting", str(error), mend)
                    continue
                if row is None:
                    return
                if len(row) == len(names):
                    yield start, _cells(names, row)
                elif any(cell.strip() for cell in row):
                    detail = f"found {len(row)} where the header has {len(names)}"
                    yield start, Fault("wrong number of columns", detail, "quote a cell that holds the delimiter")
        except Fault as fault:
            raise broken(path, line, Fault(f"the header cannot be read: {fault.reason}", "", fault.mend)) from None
        except UNREADABLE as error:
            yield start or 1, breaks_off(error)


def _cells(names: list[str], row: list[str]) -> dict[str, Any] | Fault:
    try:
        return {name: checked_line(cell) if cell.strip() else None for name, cell in zip(names, row, strict=True)}
    except Fault as fault:
        return fault


def split_header(text: str, columns: Mapping[str, str]) -> tuple[str, list[str]]:
    """The delimiter that splits a header into known columns, or else into the most, and the names; raises `Fault`."""
    found = []
    for delimiter in DELIMITERS:
        try:
            names = [cell.strip() for cell in next(csv.reader([text], delimiter=delimiter, strict=True), [])]
        except csv.Error:
            continue
        found.append((has_known_columns(names, columns), len(names), delimiter, names))
    if not found:
        raise Fault("broken quoting")
    return max(found, key=lambda one: one[:2])[2:]


def has_known_columns(names: list[str], columns: Mapping[str, str]) -> bool:
    """Whether `names` have a query and a positive, by the usual names or by the mapping `columns`."""
    try:
        Fields(columns).settle(names)
    except Fault:
        return False
    return True


def parquet_rows(path: Path, needed: Needed) -> Iterator[tuple[int, Any]]:
    """(number from 1, row) of a parquet file.

    Raises:
        DataError: no parquet file, a damaged one, or a column is missing.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not first_bytes(path):
        refuse_empty(path)
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        mend = "get it again, or name its format with --data_format"
        raise DataError(one_line(f"{path}: not a parquet file, or a damaged one: {_short(error)} ({mend})")) from error
    with file:
        names = needed([str(name) for name in file.schema_arrow.names], str(path))
        yield from _arrow_rows(file.iter_batches(_ROWS, columns=names), path)


def hub_rows(source: str, split: str, needed: Needed, streaming: bool) -> Iterator[tuple[int, Any]]:
    """(number from 1, row) of a Hugging Face dataset; raises as `load_hub`, or where a column is missing."""
    dataset = load_hub(source, split, streaming)
    # Of a stream they may be known only when something has been read.
    names = needed(list(dataset.column_names or next(iter(dataset), ())), source)
    yield from _arrow_rows(dataset.select_columns(names).with_format("arrow").iter(batch_size=_ROWS), source)


def load_hub(source: str, split: str, streaming: bool = False) -> Any:
    """A Hugging Face dataset: `NAME` or `NAME:CONFIG` on the hub, or a folder that `save_to_disk` wrote.

    Raises:
        DataError: it cannot be loaded, or has no such split. Code that comes with a dataset is never run.
    """
    import datasets

    try:
        if not os.path.isdir(source):
            name, _, config = source.partition(":")
            return datasets.load_dataset(name, config or None, split=split, streaming=streaming)
        found = datasets.load_from_disk(source)
    except Exception as error:  # the hub's, the network's, the builders' and Arrow's own have no common ancestor
        what = f"no such file or folder, and as a Hugging Face dataset with split {quoted(split)}"
        what = "as a dataset that save_to_disk wrote" if os.path.isdir(source) else what
        mend = "check the path, or the name as NAME or NAME:CONFIG"
        raise DataError(one_line(f"{source}: {what}, it cannot be loaded: {_short(error)} ({mend})")) from error
    if not isinstance(found, dict):
        return found
    if split not in found:
        there = ", ".join(map(str, found)) or "none"
        raise DataError(one_line(f"{source}: no split {quoted(split)}; it has: {there} (choose one with --split)"))
    return found[split]


def _arrow_rows(batches: Iterable[Any], source: AnyPath) -> Iterator[tuple[int, Any]]:
    number, tables = 0, iter(batches)
    while True:
        try:
            table = next(tables, None)
        except Exception as error:  # as above
            fault = Fault("cannot be read from here on", _short(error), "get it again")
            raise broken(source, number + 1, fault) from error
        if table is None:
            return
        for number, row in enumerate(_rows_of(table), start=number + 1):  # noqa: B020  # goes on counting
            yield number, row


def _rows_of(table: Any) -> list[Any]:
    try:
        # Arrow believes what a file says of itself, and ends the whole process where that is wrong.
        table.validate(full=True)
        return table.to_pylist()
    except Exception as error:  # one bad value (bytes that are no UTF-8, a date before Christ) costs its own row alone
        if table.num_rows > 1:
            return [value for row in range(table.num_rows) for value in _rows_of(table.slice(row, 1))]
        return [Fault("not UTF-8 text" if "utf" in str(error).lower() else "a value cannot be read", _short(error))]


def _short(error: BaseException) -> str:
    return one_line(str(error))[:300] or type(error).__name__
