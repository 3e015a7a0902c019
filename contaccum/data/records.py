"""Records of data files, one at a time, and none lost without a word.

Lines, JSON, csv and Arrow; text plain or gzip, UTF-8 with or without a byte-order mark. A bad record, of which readers
raise a `Fault`, is either the one line that stops the run or counted in the report: seen = used + reported.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
import re
import sqlite3
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from contaccum.errors import DataError, check_choice
from contaccum.files import AnyPath

OnBadRecord = Literal["stop", "skip"]
Rows = Iterator[tuple[int, Any]]
"""The line (of a table in Arrow, the number) of each row, and the row, or the `Fault` that it is."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UNREADABLE = (OSError, EOFError, zlib.error)  # what a damaged gzip file raises

T = TypeVar("T")


class Fault(Exception):
    """What is wrong with one record: the reason, by which reports count, and what is particular to this record."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass
class RecordReport:
    """What became of every record: seen = used + reported. A blank line and the header of a table are no records."""

    on_bad_record: OnBadRecord = (
        "stop"  # raises `DataError` at the first bad one; "skip" leaves it out and counts it
    )
    seen: int = 0
    reported: int = 0
    by_reason: Counter[str] = field(
        default_factory=Counter
    )  # how many were reported for each reason
    first: str | None = None  # where the first of these is

    def __post_init__(self) -> None:
        check_choice("on_bad_record", self.on_bad_record, ("stop", "skip"))

    @property
    def used(self) -> int:
        """The number of records that were neither bad nor left out."""
        return self.seen - self.reported

    def leave_out(self, where: AnyPath, reason: str, count: int = 1) -> None:
        """Count records that were seen as reported."""
        if count:
            self.reported += count
            self.by_reason[reason] += count
            self.first = self.first or str(where)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the counts of another report, its `vars`, which JSON can hold."""
        vars(self).update(
            state, by_reason=Counter(state["by_reason"]), on_bad_record=self.on_bad_record
        )

    def summary(self) -> str:
        """One line: how many records were seen, used and left out, why, and where the first one is."""
        text = f"{self.seen} records: {self.used} used, {self.reported} left out"
        if self.reported:
            reasons = ", ".join(
                f"{count} {reason}" for reason, count in self.by_reason.most_common()
            )
            text += f" ({reasons}; first: {self.first})"
        return one_line(text)

    def refuse_if_nothing_left(self, where: AnyPath, left: int, what: str) -> None:
        """Raise `DataError` when `left`, the number of usable `what`, is 0: an empty run helps nobody."""
        if left == 0:
            raise DataError(
                one_line(f"{where}: no {what} left to use; {self.summary()} (correct the data)")
            )


def take(path: AnyPath, rows: Rows, parse: Callable[[Any], T], report: RecordReport) -> Iterator[T]:
    """`parse` of every row that can be used. One that is a `Fault`, or of which `parse` raises one, is a bad record.

    Raises `DataError` at a bad record under "stop", and where no record can be used.
    """
    used = 0
    for line, row in rows:
        report.seen += 1
        try:
            if isinstance(row, Fault):
                raise row
            value = parse(row)
        except Fault as fault:
            if report.on_bad_record == "stop":
                mend = "correct the record, or leave such records out with --on_bad_record skip"
                raise broken(path, line, fault, mend) from None
            report.leave_out(f"{path}:{line}", fault.reason)
        else:
            used += 1
            yield value
    report.refuse_if_nothing_left(path, used, "records")


def broken(file: AnyPath, line: int, fault: Fault, mend: str) -> DataError:
    """The error that stops a run: `FILE:LINE: what is wrong (the mend)`."""
    return DataError(one_line(f"{file}:{line}: {fault} ({mend})"))


def one_line(text: str) -> str:
    """`text` with every line break and unprintable character folded to one space."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def quoted(value: object, longest: int = 60) -> str:
    """`value` as Python writes it, cut to `longest` characters: data may be long and hold any character."""
    shown = repr(value[: longest + 1] if isinstance(value, str) else value)
    return shown if len(shown) <= longest else shown[: longest - 3] + "..."


def passage_text(title: str, text: str) -> str:
    """Title, space, text, as BEIR's encoders join them; no space beside an empty half."""
    return f"{title} {text}".strip() if title.strip() and text.strip() else (title + text).strip()


def text_of(value: object, what: str, may_be_blank: bool = False) -> str:
    """`value`; raises `Fault`, which names the field `what`, if it is missing (None), no string, blank or no UTF-8."""
    if value is None:
        raise Fault(f"missing {what}")
    if not isinstance(value, str):
        raise Fault(f"{what} is not text", f"found {quoted(value)}")
    if not (may_be_blank or value.strip()):
        raise Fault(f"empty {what}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        # JSON can spell such a string ("\ud800"), and so can bytes of a table; Arrow fails on it much later.
        raise Fault(f"{what} is not valid Unicode", f"found {quoted(value)}") from None
    return value


def first_of(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    """What the first of some fields holds that is there and not null, else None."""
    return next((record[name] for name in names if record.get(name) is not None), None)


def title_of(record: Mapping[str, Any], name: str = "title") -> str:
    """The title of a record, "" where it has none; raises `Fault`."""
    return "" if record.get(name) is None else text_of(record[name], name, may_be_blank=True)


def identifier_of(value: object, what: str) -> str:
    """An id, a text that is not blank or a whole number; raises `Fault`."""
    return str(value) if type(value) is int else text_of(value, what)


def number_of(value: object) -> float:
    """A score, a number that float32 holds, or a text that is one; raises `Fault`."""
    try:
        number = float(value)  # type: ignore[arg-type]  # what is none is refused
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= 3.4028235e38:
        raise Fault("score is not a number", f"found {quoted(value)}")
    return number


def cells_of(line: str, wanted: int, separator: str | None = "\t") -> list[str]:
    """The cells of a line, so many as are wanted; raises `Fault`. A separator of None is any white space."""
    cells = line.split(separator)
    if len(cells) != wanted:
        raise Fault(f"not {wanted} columns", f"found {len(cells)}")
    return cells


def open_data_file(path: AnyPath) -> gzip.GzipFile | io.BufferedReader:
    """Open `path` for reading bytes, unpacking gzip (known by its first bytes); raises `DataError`."""
    if not os.path.isfile(path) or not os.access(path, os.R_OK):
        raise DataError(one_line(f"{path}: no such file, or it may not be read (check the path)"))
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if packed else open(path, "rb")


def first_bytes(path: AnyPath) -> bytes:
    """Up to 64 KB of a file, unpacked, from its first character that is not blank; none where it breaks off there."""
    with (
        open_data_file(path) as file,
        suppress(*_UNREADABLE),
    ):  # the reader meets the same damage and names its line
        return file.read1(1 << 16).removeprefix(_BYTE_ORDER_MARK).lstrip()
    return b""


def read_lines(path: AnyPath) -> Rows:
    """Every line that is not blank, without its end; a file that breaks off is one `Fault`."""
    number = 0
    with open_data_file(path) as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        yield number, line.decode("utf-8-sig").rstrip("\r\n")
                    except UnicodeDecodeError:
                        yield number, Fault("not UTF-8 text")
        except _UNREADABLE as error:
            yield number + 1, Fault("the file breaks off", str(error))


def read_json_lines(path: AnyPath) -> Rows:
    """The object of every line."""
    for number, line in read_lines(path):
        if not isinstance(line, Fault):
            try:
                line = _object(json.loads(line))
            # ValueError is broken JSON, or an integer too long to read; RecursionError is very deep nesting.
            except (ValueError, RecursionError) as error:
                line = Fault("broken JSON", str(error))
        yield number, line


def _object(value: object) -> object:
    return (
        value if isinstance(value, dict) else Fault("not a JSON object", f"found {quoted(value)}")
    )


def read_json_array(path: AnyPath, where: str = "item") -> Rows:
    """The objects of a file that is one JSON array, by their number, one in memory at a time; ``where`` is how ijson
    calls them. Raises `DataError` for broken JSON: what comes after it cannot be told apart."""
    import ijson

    number = 0
    with open_data_file(path) as file:
        try:
            if file.peek(3).startswith(_BYTE_ORDER_MARK):
                file.read(3)
            for number, value in enumerate(ijson.items(file, where, use_float=True), start=1):
                yield number, _object(value)
        except (ijson.JSONError, *_UNREADABLE) as error:
            fault = Fault("broken JSON, or the file breaks off")
            raise broken(path, number + 1, fault, "get the file again") from error


def csv_rows(path: AnyPath) -> Rows:
    """Yield the rows of a table with a header, as {column name: cell}; a blank cell is None.

    The delimiter is the one of comma, semicolon and tab that the header has most of outside of
    quotes. Raises `DataError` for a broken quote, because what comes after it cannot be told apart,
    and for a column name that occurs twice.
    """
    csv.field_size_limit(
        2**31 - 1
    )  # Python's own limit of 128 KB a cell guards against nothing here
    delimiter, _ = read_header(first_bytes(path))
    names: list[str] = []
    start = 1
    with open_data_file(path) as file:
        lines = io.TextIOWrapper(
            file, "utf-8-sig", "surrogateescape", newline=""
        )  # `text_of` refuses what is no UTF-8
        try:
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
            for row in reader:
                is_blank = not any(cell.strip() for cell in row)
                if not names:
                    names = [] if is_blank else _column_names(row)
                    _refuse_repeated_name(path, start, names)
                elif len(row) == len(names):
                    yield (
                        start,
                        {
                            name: cell if cell.strip() else None
                            for name, cell in zip(names, row, strict=True)
                        },
                    )
                elif not is_blank:
                    what = f"found {len(row)} where the header has {len(names)}"
                    yield start, Fault("wrong number of columns", what)
                start = reader.line_num + 1
        except csv.Error as error:
            raise broken(
                path, start, Fault("broken quoting", str(error)), "double quotes inside of cells"
            ) from error
        except _UNREADABLE as error:
            yield start, Fault("the file breaks off", str(error))


_DELIMITERS = ("\t", ",", ";")
_QUOTED_CELL = re.compile(r'(^|[\t,;]) *"(?:[^"]|"")*"')


def read_header(head: bytes) -> tuple[str, list[str]]:
    """Return the delimiter and the column names of a table that begins with the bytes ``head``."""
    text = head.decode("utf-8", "replace")
    first_line = _QUOTED_CELL.sub(r"\1", text).partition("\n")[0]
    delimiter = max(_DELIMITERS, key=first_line.count)
    try:
        row = next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), [])
    except csv.Error:  # not a table
        row = []
    return delimiter, _column_names(row)


def _column_names(row: list[str]) -> list[str]:
    # The csv module keeps the quotes of a cell that begins with a blank.
    return [cell.strip().strip('"') for cell in row]


def _refuse_repeated_name(path: AnyPath, line: int, names: list[str]) -> None:
    """Raise `DataError` for a name of two columns, because a row would hold one of them alone.

    Several columns may be without a name: nothing is read from them.
    """
    for name, count in Counter(names).items():
        if name and count > 1:
            fault = Fault("two columns have the same name", quoted(name))
            raise broken(path, line, fault, "rename or remove one")


def arrow_rows(source: AnyPath, batches: Iterable[Any]) -> Rows:
    """The rows of Arrow tables; raises `DataError` where they cannot be read."""
    number = 0
    try:
        for table in batches:
            # Arrow believes what a file says of itself, and ends the whole process where that is wrong.
            table.validate(full=True)
            for row in table.to_pylist():
                number += 1
                yield number, row
    except Exception as error:  # Arrow's, the hub's and the network's have no common ancestor
        fault = Fault("damaged, or of another format", str(error)[:300])
        raise broken(source, number + 1, fault, "get it again") from error


class TextsById:
    """Texts that are looked up by their ids, in a temporary file of SQLite's, not in memory; `DataError` for an id that
    occurs again."""

    def __init__(self, path: AnyPath, texts: Iterable[tuple[str, str]]) -> None:
        self._name, self._table = (
            os.path.basename(path),
            sqlite3.connect(""),
        )  # in TMPDIR, and gone when it is closed
        self._table.execute(
            "CREATE TABLE texts (place INTEGER PRIMARY KEY, id TEXT UNIQUE, text TEXT)"
        )
        for identifier, text in texts:
            try:
                self._table.execute(
                    "INSERT INTO texts (id, text) VALUES (?, ?)", (identifier, text)
                )
            except sqlite3.Error as error:
                what = f"{path}: id {quoted(identifier)}: {error} (keep one of an id, and room in TMPDIR)"
                raise DataError(one_line(what)) from error

    def place(self, identifier: Any) -> int:
        """What an id is called here; raises `Fault` where it is not there."""
        found = self._table.execute(
            "SELECT place FROM texts WHERE id = ?", (str(identifier),)
        ).fetchone()
        if found is None:
            raise Fault(f"unknown id in {self._name}", quoted(identifier))
        return int(found[0])

    def __getitem__(self, place: int) -> str:
        return str(
            self._table.execute("SELECT text FROM texts WHERE place = ?", (place,)).fetchone()[0]
        )
