"""Records of data files: opened one way, read one at a time, and none lost without a word.

Rows of text, JSON, csv and parquet; text plain or gzip, UTF-8 with or without a byte-order mark, LF or CRLF. A bad
record is either the one line that stops the run or counted in the report: records seen = used + reported. What a record
must hold is for readers to say: they raise `Fault`, and this module makes one or the other of it.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NoReturn, TypeVar

from contaccum.errors import DataError, check_choice
from contaccum.files import AnyPath

OnBadRecord = Literal["stop", "skip"]
ON_BAD_RECORD: tuple[OnBadRecord, ...] = ("stop", "skip")

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UNREADABLE = (OSError, EOFError, zlib.error)
_BATCH = 1000  # rows of Arrow in memory at a time

T = TypeVar("T")


class Fault(Exception):
    """What is wrong with one record.

    Args:
        reason: the kind of fault, the same words for every record that has it (the report counts by it).
        detail: what is particular to this record.
        mend: what the user can do, besides leaving the record out.
    """

    def __init__(self, reason: str, detail: str = "", mend: str = "correct the record") -> None:
        super().__init__(reason)
        self.reason, self.detail, self.mend = reason, detail, mend


@dataclass
class RecordReport:
    """What became of every record: seen = used + reported.

    Attributes:
        on_bad_record: "stop" raises `DataError` at the first bad record; "skip" leaves bad records out and counts them.
        seen, used, reported: numbers of records. A blank line and the header of a table are no records.
        by_reason: how many were reported for each reason.
        first: where the first of these is.

    Raises:
        ConfigError: `on_bad_record` is neither.
    """

    on_bad_record: OnBadRecord = "stop"
    seen: int = 0
    used: int = 0
    reported: int = 0
    by_reason: Counter[str] = field(default_factory=Counter)
    first: str | None = None

    def __post_init__(self) -> None:
        check_choice("on_bad_record", self.on_bad_record, ON_BAD_RECORD)

    def reject(self, file: AnyPath, line: int, fault: Fault) -> None:
        """Stop at a bad record, or leave it out and count it.

        Raises:
            DataError: under "stop"; one line, `FILE:LINE: what is wrong (the mend)`.
        """
        if self.on_bad_record == "stop":
            mend = f"{fault.mend}, or leave such records out with --on_bad_record skip"
            raise broken(file, line, Fault(fault.reason, fault.detail, mend)) from None
        self.leave_out(f"{file}:{line}", fault.reason)

    def leave_out(self, where: AnyPath, reason: str, count: int = 1) -> None:
        """Count records as reported that nothing may be wrong with."""
        self.reported += count
        self.by_reason[reason] += count
        self.first = self.first or str(where)

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold, for `restore`."""
        return dict(vars(self))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the counts of what `to_dict` gave."""
        self.seen, self.used, self.reported = state["seen"], state["used"], state["reported"]
        self.by_reason, self.first = Counter(state["by_reason"]), state["first"]

    def summary(self) -> str:
        """One line: how many records were seen, used and left out, why, and where the first one is."""
        text = f"{self.seen} records: {self.used} used, {self.reported} left out"
        if self.reported:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.by_reason.most_common())
            text += f" ({reasons}; first: {self.first})"
        return one_line(text)

    def refuse_if_nothing_left(self, where: AnyPath, left: int, what: str) -> None:
        """Raise `DataError` when `left`, the number of usable `what`, is 0: an empty run helps nobody."""
        if left == 0:
            raise DataError(one_line(f"{where}: no {what} left to use; {self.summary()} (correct the data)"))


# Values --------------------------------------------------------------------------------------------------------------


def one_line(text: str) -> str:
    """`text` with every line break and unprintable character folded to one space."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def quoted(value: object, longest: int = 60) -> str:
    """`value` as Python writes it, cut to `longest` characters: data may be long and hold any character."""
    # The slice comes first: the repr of a whole book only to keep 60 characters is wasted.
    shown = repr(value[: longest + 1] if isinstance(value, str) else value)
    return shown if len(shown) <= longest else shown[: longest - 3] + "..."


def broken(file: AnyPath, line: int, fault: Fault) -> DataError:
    """The error that stops a run: `FILE:LINE: what is wrong (the mend)`."""
    what = f"{fault.reason}: {fault.detail}" if fault.detail else fault.reason
    return DataError(one_line(f"{file}:{line}: {what} ({fault.mend})"))


def name_of(path: AnyPath) -> str:
    """The name of a file without its extension, of a folder, or of a dataset of the hub."""
    # resolve(), so that "." has a name too.
    return re.sub(r"(\.(jsonl|ndjson|json|csv|tsv|parquet))?(\.gz)?$", "", Path(path).resolve().name)


def passage_text(title: str, text: str) -> str:
    """Title, space, text, as BEIR's encoders join them; no space beside an empty half."""
    return f"{title} {text}".strip() if title.strip() and text.strip() else (title + text).strip()


def text_of(value: object, what: str) -> str:
    """`value` if it is text that can be written as UTF-8; `what` names the field in the fault.

    Raises:
        Fault: the value is missing (None), no string, or holds NUL or half a surrogate pair.
    """
    if value is None:
        raise Fault(f"missing {what}")
    if not isinstance(value, str):
        raise Fault(f"{what} is not text", f"found {quoted(value)}")
    if "\0" in value:
        raise Fault(f"NUL character in {what}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        # JSON can spell such a string ("\ud800"); tokenizers and Arrow fail on it much later.
        raise Fault(f"{what} is not valid Unicode", f"found {quoted(value)}") from None
    return value


def filled_text_of(value: object, what: str) -> str:
    """`text_of`, which is not blank either; raises `Fault`."""
    text = text_of(value, what)
    if not text.strip():
        raise Fault(f"empty {what}")
    return text


def identifier_of(value: object, what: str) -> str:
    """An id, a text that is not blank or a whole number; raises `Fault`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not text_of(value, what).strip():
        raise Fault(f"missing {what}", "it is blank")
    return str(value)


# Rows of files: (line or number from 1, what is there, or the `Fault` of it) ------------------------------------------


def take(
    path: AnyPath, rows: Iterable[tuple[int, Any]], parse: Callable[[Any], T], report: RecordReport
) -> Iterator[tuple[int, T]]:
    """(line, `parse` of the row) of every row that can be used; all are counted in the report, the others rejected.

    Raises:
        DataError: a bad record under "stop".
    """
    for line, row in rows:
        report.seen += 1
        try:
            if isinstance(row, Fault):
                raise row
            value = parse(row)
        except Fault as fault:
            report.reject(path, line, fault)
            continue
        report.used += 1
        yield line, value


def open_data_file(path: AnyPath) -> gzip.GzipFile | io.BufferedReader:
    """Open `path` for reading bytes, unpacking gzip (known by its name or by its first bytes).

    Raises:
        DataError: there is no such file, it is a directory, or it may not be read.
    """
    if os.path.isdir(path):
        raise DataError(one_line(f"{path}: is a directory, a file is expected (name the file inside it)"))
    if not os.path.exists(path):
        raise DataError(one_line(f"{path}: no such file (check the path)"))
    try:
        with open(path, "rb") as file:
            packed = str(path).endswith(".gz") or file.read(2) == b"\x1f\x8b"
        return gzip.open(path, "rb") if packed else open(path, "rb")
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(one_line(f"{path}: cannot be read: {reason} (check its permissions)")) from error


def first_bytes(path: AnyPath) -> bytes:
    """Up to 64 KB of a file, unpacked, from its first character that is not blank; none where it breaks off there."""
    with open_data_file(path) as file, suppress(*UNREADABLE):  # the reader meets the same damage and can name its line
        return file.read1(1 << 16).removeprefix(BYTE_ORDER_MARK).lstrip()
    return b""


def refuse_empty(path: AnyPath) -> NoReturn:
    """Raise `DataError`: an empty file is never what was meant, whatever `on_bad_record` says."""
    raise DataError(one_line(f"{path}: the file is empty (get it again, or name another)"))


def _open_text(file: gzip.GzipFile | IO[bytes]) -> io.TextIOWrapper:
    # Bytes that are not UTF-8 become characters that `checked_line` refuses.
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="\n")


_NOT_TEXT = re.compile("[\0\udc80-\udcff]")


def checked_line(text: str) -> str:
    """A line without its line end; raises `Fault` when its bytes are not UTF-8, or one of them is NUL."""
    found = _NOT_TEXT.search(text)
    if found:
        raise Fault("NUL byte" if found.group() == "\0" else "not UTF-8 text", mend="save the file as UTF-8 text")
    return text.rstrip("\r\n")


def _breaks_off(error: BaseException) -> Fault:
    return Fault("the file breaks off", str(error), "get the file again: it is damaged or incomplete")


def _or_fault(parse: Callable[[Any], Any], value: Any) -> Any:
    try:
        return parse(value)
    except Fault as fault:
        return fault


def read_lines(path: AnyPath) -> Iterator[tuple[int, Any]]:
    """(line number, text without its line end) of every line that is not blank; a file that breaks off is one `Fault`.

    Raises:
        DataError: the file is missing, a directory or empty.
    """
    line, anything = 0, False
    with open_data_file(path) as file:
        try:
            for line, text in enumerate(_open_text(file), start=1):
                if text.strip():
                    anything = True
                    yield line, _or_fault(checked_line, text)
        except UNREADABLE as error:
            yield line + 1, _breaks_off(error)
            return
    if not anything:
        refuse_empty(path)


def read_json_lines(path: AnyPath) -> Iterator[tuple[int, Any]]:
    """(line number, object) of a file with one JSON object a line; raises as `read_lines`."""
    for line, text in read_lines(path):
        yield line, text if isinstance(text, Fault) else _or_fault(_json_object, text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        return _object(_STRICT_JSON.decode(text))
    # ValueError is broken JSON, NaN, or an integer too long to read; RecursionError is very deep nesting.
    except (ValueError, RecursionError) as error:
        raise Fault("broken JSON", str(error)) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")  # NaN and the infinities, which Python's parser lets through


_STRICT_JSON = json.JSONDecoder(parse_constant=_refuse_constant)


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Fault("not a JSON object", f"found {quoted(value)}", "write one {...} for each record")
    return value


def read_json_array(path: AnyPath) -> Iterator[tuple[int, Any]]:
    """(number of the record, object) of a file that is one JSON array of objects; one is in memory at a time.

    Raises:
        DataError: the file is missing, a directory, empty, or no array; or broken JSON: what comes after it cannot be
            told apart.
    """
    import ijson

    number = 0
    with open_data_file(path) as file:
        try:
            if file.peek(3).startswith(BYTE_ORDER_MARK):
                file.read(3)
            for number, value in enumerate(ijson.items(file, "item", use_float=True), start=1):
                yield number, _or_fault(_object, value)
        except (ijson.JSONError, *UNREADABLE) as error:
            if not first_bytes(path):
                refuse_empty(path)
            what = error.args[0] if error.args else ""
            what = (what.decode("utf-8", "replace") if isinstance(what, bytes) else str(error)).split("\n")[0]
            mend = "get the file again: nothing after the break can be read"
            raise broken(path, number + 1, Fault("broken JSON, or the file breaks off", what, mend)) from error


def csv_rows(path: AnyPath) -> Iterator[tuple[int, Any]]:
    """(line on which it starts, row) of a table with a header, split at comma, semicolon or tab; a blank cell is None.

    Raises:
        DataError: the file is missing, a directory or empty, its header cannot be read, or a quote without an end takes
            other lines along: which records they were, nobody can tell.
    """
    csv.field_size_limit(2**31 - 1)  # Python's own limit of 128 KB a cell guards against nothing here
    mend = f"write {quoted(chr(34) * 2)} for a quote inside a quoted cell"
    if not first_bytes(path):
        refuse_empty(path)
    start = 1
    with open_data_file(path) as file:
        lines = _open_text(file)
        try:
            delimiter, names = split_header(next(lines))
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
            while True:
                start = reader.line_num + 2
                try:
                    row = next(reader)
                except csv.Error as error:
                    if reader.line_num + 1 > start:
                        which = f"lines {start} to {reader.line_num + 1} cannot be told apart"
                        raise broken(path, start, Fault("broken quoting", which, mend)) from error
                    yield start, Fault("broken quoting", str(error), mend)
                    continue
                if len(row) == len(names):
                    yield start, _or_fault(lambda row: dict(zip(names, map(_cell, row), strict=True)), row)
                elif any(cell.strip() for cell in row):
                    detail = f"found {len(row)} where the header has {len(names)}"
                    yield start, Fault("wrong number of columns", detail, "quote a cell that holds the delimiter")
        except StopIteration:
            return
        except Fault as fault:
            raise broken(path, 1, fault) from None
        except UNREADABLE as error:
            yield start, _breaks_off(error)


def _cell(text: str) -> str | None:
    return checked_line(text) if text.strip() else None


def split_header(line: str) -> tuple[str, list[str]]:
    """The delimiter of a header, and its names; raises `Fault` where it cannot be read."""
    delimiter = max((",", ";", "\t"), key=line.count)
    try:
        names = [cell.strip() for cell in next(csv.reader([checked_line(line)], delimiter=delimiter, strict=True), [])]
    except csv.Error as error:
        raise Fault("the header cannot be read", str(error), "save it as csv, with LF or CRLF") from None
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Fault(f"two columns are called {quoted(twice)}", mend="rename one")
    return delimiter, names


def parquet_rows(path: AnyPath, wanted: Callable[[list[str]], list[str]]) -> Iterator[tuple[int, Any]]:
    """(number from 1, row) of a parquet file; of its columns, those that `wanted` chooses.

    Raises:
        DataError: the file is missing, a directory or empty, no parquet file, or a damaged one.
    """
    import pyarrow.parquet as pq

    if not first_bytes(path):
        refuse_empty(path)

    def batches() -> Iterator[Any]:
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(_BATCH, columns=wanted(list(file.schema_arrow.names)))

    return arrow_rows(path, batches())


def arrow_rows(source: AnyPath, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """(number from 1, row) of Arrow tables; raises `DataError` where they cannot be read."""
    number = 0
    try:
        for table in batches:
            # Arrow believes what a file says of itself, and ends the whole process where that is wrong.
            table.validate(full=True)
            for row in table.to_pylist():
                number += 1
                yield number, row
    except Exception as error:  # Arrow's, the hub's and the network's have no common ancestor
        mend = "get it again, or name its format with --data_format"
        fault = Fault("damaged, or of another format", one_line(str(error))[:300] or type(error).__name__, mend)
        raise broken(source, number + 1, fault) from error
