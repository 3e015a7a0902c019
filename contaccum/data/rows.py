"""Rows of data files, and reports of records that cannot be used.

A record that cannot be used is a `Fault`. It either stops the run with one line that names file and
line, or is left out and counted in a `RecordReport`. Text files may be plain or gzip, in UTF-8 with
or without a byte-order mark.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
import re
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from contaccum.errors import DataError, check_choice, one_line, quoted
from contaccum.files import AnyPath

OnBadRecord = Literal["stop", "skip"]
Rows = Iterator[tuple[int, Any]]
"""Texts, mappings, or the `Fault` of an unreadable row, with their line numbers (JSON array, Arrow
table: the numbers of the rows)."""

PARQUET_MAGIC = b"PAR1"
"""The first bytes of every parquet file."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UNREADABLE = (OSError, EOFError, zlib.error)  # what reading a damaged gzip file raises
_BINARY_START = 256  # bytes that are searched for a zero
_NOT_UTF_8 = "not UTF-8 text"
_SAVE_AS_UTF_8 = "save the file as UTF-8, for example with iconv -f cp1252 -t utf-8"

T = TypeVar("T")


class Fault(Exception):
    """The reason why one record cannot be used.

    Reports count records by ``reason``. The default ``remedy`` is for a fault of single records.
    """

    def __init__(
        self,
        reason: str,
        detail: str = "",
        remedy: str = "correct the record, or leave such records out with --on_bad_record skip",
    ) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.remedy = remedy


@dataclass
class RecordReport:
    """Counts of used, bad and left-out records, without blank lines: seen = used + reported.

    Attributes:
        on_bad_record: "stop" raises `DataError` at the first bad record; "skip" leaves it out.
        by_file: number of all records of each file.
        repeated: number of records of each file that equal an earlier one. They are used.
        reported: number of records that were bad, or that a setting left out.
        by_reason: their number for each reason.
        first: file and line of the first of them.
    """

    on_bad_record: OnBadRecord = "stop"
    by_file: Counter[str] = field(default_factory=Counter)
    repeated: Counter[str] = field(default_factory=Counter)
    reported: int = 0
    by_reason: Counter[str] = field(default_factory=Counter)
    first: str | None = None

    def __post_init__(self) -> None:
        check_choice("on_bad_record", self.on_bad_record, ("stop", "skip"))

    @property
    def seen(self) -> int:
        """Number of all records that were read."""
        return self.by_file.total()

    @property
    def used(self) -> int:
        """Number of records that were neither bad nor left out."""
        return self.seen - self.reported

    def leave_out(self, where: AnyPath, reason: str, count: int = 1) -> None:
        """Count records, which `seen` includes, as left out; the first of them is at `where`."""
        if count:
            self.reported += count
            self.by_reason[reason] += count
            self.first = self.first or str(where)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the counts to those of another report, given as its `vars` (from JSON)."""
        for name, value in state.items():
            setattr(self, name, Counter(value) if isinstance(value, dict) else value)

    def summary(self) -> str:
        """Return one line: the records of each file, and how many were used, left out, and why."""
        files = []
        for file, num_records in self.by_file.items():
            repeated = f" ({self.repeated[file]} repeated)" if self.repeated[file] else ""
            files.append(f"{num_records} records in {file}{repeated}")
        text = f"{', '.join(files) or '0 records'}: {self.used} used, {self.reported} left out"
        if self.reported:
            counts = [f"{count} {reason}" for reason, count in self.by_reason.most_common()]
            text += f" ({', '.join(counts)}; first: {self.first})"
        return one_line(text)

    def refuse_if_nothing_left(self, where: AnyPath, left: int, what: str) -> None:
        """Raise `DataError` if the number of usable items is 0; ``what`` is their plural noun."""
        if left == 0:
            raise DataError(f"{where}: no {what} left to use; {self.summary()} (correct the data)")


def parse_rows(
    path: AnyPath, rows: Rows, parse: Callable[[Any], T], report: RecordReport
) -> Iterator[T]:
    """Yield the parsed rows of a file, without bad records, but at least one.

    A hash of 8 bytes for each counts repeated records. ``parse`` returns None for a row that a
    setting leaves out. ``report`` receives the counts, unless it has counted the file before.
    """
    if str(path) in report.by_file:
        report = RecordReport(report.on_bad_record)
    hashes = array("q")
    for line, row in rows:
        report.by_file[str(path)] += 1
        try:
            if isinstance(row, Fault):
                raise row
            value = parse(row)
        except Fault as fault:
            if report.on_bad_record == "stop":
                raise _make_data_error(path, line, fault) from None
            report.leave_out(f"{path}:{line}", fault.reason)
        else:
            if value is not None:
                hashes.append(hash(str(value)))
            yield value
    report.repeated[str(path)] += len(hashes) - len(np.unique(hashes))
    report.refuse_if_nothing_left(path, len(hashes), "records")


def _make_data_error(file: AnyPath, line: int, fault: Fault) -> DataError:
    return DataError(f"{file}:{line}: {fault} ({fault.remedy})")


def passage_text(title: str, text: str) -> str:
    """Return title, space, text, as BEIR's encoders join them; no space beside an empty part."""
    return " ".join(part for part in (title, text) if part.strip()).strip()


def parse_text(value: object, field_name: str, may_be_blank: bool = False) -> str:
    """Return the content of a field if it is a text; "" for None if it may be blank.

    Raises `Fault` for other types, invalid Unicode, and blanks that must not be.
    """
    if value is None and may_be_blank:
        return ""
    if value is None:
        raise Fault(f"missing {field_name}")
    if not isinstance(value, str):
        raise Fault(f"{field_name} is not text", f"found {quoted(value)}")
    if not may_be_blank and not value.strip():
        raise Fault(f"empty {field_name}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        # A cell that is not UTF-8 (`read_csv`), or half of a surrogate pair ("\ud800") in JSON.
        # Arrow fails on it much later, and does not name the line.
        raise Fault(_NOT_UTF_8, f"{field_name} {quoted(value)}", _SAVE_AS_UTF_8) from None
    return value


def get_first_value(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the value of the first of some fields that is present and not null, else None."""
    return next((record[name] for name in names if record.get(name) is not None), None)


def parse_id(value: object, field_name: str) -> str:
    """Return an id, which is a text or an integer, as a text; raises `Fault` for other values."""
    if type(value) is int:  # a bool is an int too, but no id
        return str(value)
    return parse_text(value, field_name)


def parse_number(value: object) -> float:
    """Return a finite number, or a text that holds one; raises `Fault` for other values."""
    try:
        number = float(value)  # type: ignore[arg-type]  # other types raise TypeError
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise Fault("score is not a number", f"found {quoted(value)}")
    return number


def split_cells(line: str, num_cells: int, separator: str | None = "\t") -> list[str]:
    """Return the cells of a line; raises `Fault` if their number differs from `num_cells`."""
    cells = line.split(separator)
    if len(cells) != num_cells:
        raise Fault(f"not {num_cells} columns", f"found {len(cells)}")
    return cells


def parse_question_line(line: str) -> list[str]:
    """Return the question and the list of answers, as text, of a line of DPR's `.qa.csv` files."""
    try:
        cells = next(csv.reader([line], delimiter="\t"), [])
    except csv.Error as error:
        raise Fault("broken quoting", str(error)) from None
    if len(cells) != 2:
        raise Fault("not 2 columns", f"found {len(cells)}; a line is QUESTION<tab>['one', 'two']")
    return cells


@contextmanager
def _open(path: AnyPath) -> Iterator[gzip.GzipFile | io.BufferedReader]:
    """Open a file for reading bytes after a byte-order mark, and unpack gzip.

    Raises `DataError` if it cannot be read, or has a zero byte at its start, as UTF-16, archives
    and Excel workbooks have.
    """
    if not os.path.isfile(path) or not os.access(path, os.R_OK):
        raise DataError(f"{path}: no such file, or it may not be read (check the path)")
    with open(path, "rb") as plain_file:
        is_gzip = plain_file.peek(2).startswith(b"\x1f\x8b")
        file = gzip.GzipFile(fileobj=plain_file) if is_gzip else plain_file
        start = b""
        with suppress(*_UNREADABLE):  # damage is reported later, with its line
            start = file.peek(_BINARY_START)[:_BINARY_START]
        if b"\0" in start and not start.startswith(PARQUET_MAGIC):
            message = f"{path}: is not text in UTF-8"
            remedy = "save text as UTF-8 and a workbook as CSV; unpack an archive other than gzip"
            raise DataError(f"{message} ({remedy})")
        if start.startswith(_BYTE_ORDER_MARK):
            file.read(len(_BYTE_ORDER_MARK))
        yield file


def read_head(path: AnyPath) -> bytes:
    """Return up to 64 KB of a file, unpacked, without leading white space; none if damaged."""
    with _open(path) as file, suppress(*_UNREADABLE):
        return file.read1(1 << 16).lstrip()
    return b""


def read_lines(path: AnyPath) -> Rows:
    """Yield every line that is not blank, without its end; a truncated file ends with a `Fault`."""
    number = 0
    with _open(path) as file:
        try:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    text = line.decode("utf-8")
                except UnicodeDecodeError as error:
                    start = len(line[: error.start].decode("utf-8"))  # in characters
                    text = line.decode("utf-8", "replace")
                    detail = quoted(text[max(0, start - 20) : start + 20])
                    yield number, Fault(_NOT_UTF_8, detail, _SAVE_AS_UTF_8)
                else:
                    yield number, text.rstrip("\r\n")
        except _UNREADABLE as error:
            yield number + 1, Fault("the file breaks off", str(error))


def read_json_lines(path: AnyPath) -> Rows:
    """Yield the JSON object of every line."""
    for number, line in read_lines(path):
        if isinstance(line, Fault):
            yield number, line
            continue
        try:
            value = json.loads(line)
        # json raises ValueError for broken JSON and for integers that are too long to parse, and
        # RecursionError for very deep nesting.
        except (ValueError, RecursionError) as error:
            yield number, Fault("broken JSON", str(error))
        else:
            yield number, _require_object(value)


def _require_object(value: object) -> object:
    if isinstance(value, dict):
        return value
    return Fault("not a JSON object", f"found {quoted(value)}")


def read_json_array(path: AnyPath) -> Rows:
    """Yield the objects of a JSON array with their numbers, one in memory at a time.

    Raises `DataError` for broken JSON, because the objects after it cannot be separated.
    """
    import ijson

    number = 0
    with _open(path) as file:
        try:
            for number, value in enumerate(ijson.items(file, "item", use_float=True), start=1):
                yield number, _require_object(value)
        except (ijson.JSONError, *_UNREADABLE) as error:
            reason = "broken JSON, or the file breaks off"
            fault = Fault(reason, str(error), "correct the JSON, or get the file again")
            raise _make_data_error(path, number + 1, fault) from error


def read_csv(path: AnyPath) -> Rows:
    """Yield the rows of a table with a header, as {column name: cell}; a blank cell is None.

    The delimiter is the header's most frequent comma, semicolon or tab outside of quotes. Raises
    `DataError` for a column name that occurs twice, and for a broken quote, because the rows after
    it cannot be separated.
    """
    # The csv module's own limit of 128 KB per cell would refuse long documents.
    csv.field_size_limit(2**31 - 1)
    header = read_head(path).decode("utf-8", "replace").partition("\n")[0]
    delimiter = max("\t,;", key=re.sub('"[^"]*"', "", header).count)
    has_blanks_before_quotes = f'{delimiter} "' in header
    names: list[str] = []
    line = 1
    with _open(path) as file:
        # Bytes that are not UTF-8 become surrogates, which `parse_text` refuses in their row.
        text_file = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
        try:
            reader = csv.reader(
                text_file,
                delimiter=delimiter,
                skipinitialspace=has_blanks_before_quotes,
                strict=True,
            )
            for cells in reader:
                if not any(cell.strip() for cell in cells):
                    pass  # a blank line
                elif not names:
                    names = [cell.strip() for cell in cells]
                    repeated_names = {name for name in names if name and names.count(name) > 1}
                    if repeated_names:
                        reason = "two columns have the same name"
                        fault = Fault(reason, quoted(min(repeated_names)), "rename or remove one")
                        raise _make_data_error(path, line, fault)
                elif len(cells) == len(names):
                    cells_or_none = [cell if cell.strip() else None for cell in cells]
                    yield line, dict(zip(names, cells_or_none, strict=True))
                else:
                    detail = f"found {len(cells)} where the header has {len(names)}"
                    yield line, Fault("wrong number of columns", detail)
                line = reader.line_num + 1
        except csv.Error as error:
            fault = Fault("broken quoting", str(error), 'write a " inside a quoted cell twice')
            raise _make_data_error(path, line, fault) from error
        except _UNREADABLE as error:
            yield line, Fault("the file breaks off", str(error))


def read_arrow(source: AnyPath, tables: Iterable[Any]) -> Rows:
    """Yield the rows of `pyarrow.Table` objects; raises `DataError` for a table that is damaged."""
    number = 0
    try:
        for table in tables:
            # Arrow trusts the offsets in a file. Wrong offsets would crash the whole process.
            table.validate(full=True)
            for row in table.to_pylist():
                number += 1
                yield number, row
    except Exception as error:  # Arrow, the hub and the network have no common exception class
        fault = Fault("damaged, or of another format", str(error)[:300], "get it again")
        raise _make_data_error(source, number + 1, fault) from error
