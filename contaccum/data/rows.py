"""Rows of data files, and reports of records that cannot be used.

Text files may be plain or gzip, in UTF-8 with or without a byte-order mark. A record that cannot be
used is a `Fault`. It either stops the run with one error line that names file and line, or it is
left out and counted in a `RecordReport`. No record is lost without being counted.

First come faults and reports, then the parsing of single values, then the readers of files: lines,
JSON, tables and Arrow.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from contaccum.errors import DataError, check_choice, one_line, quoted
from contaccum.files import AnyPath

OnBadRecord = Literal["stop", "skip"]
Rows = Iterator[tuple[int, Any]]
"""Rows of a file, each with its line number.

In an Arrow table it is the number of the row. In a JSON array, and in a file of JSON objects over
several lines, it is the number of the object.

A row is a text, a mapping, or the `Fault` that prevents it from being read.
"""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UNREADABLE = (OSError, EOFError, zlib.error)
"""Exceptions that reading a damaged gzip file raises."""

_UTF_16 = "UTF-16 or UTF-32 text (save it as UTF-8, for example with iconv -f utf-16 -t utf-8)"
_NO_MARK = "{0} text without a byte-order mark (save it as UTF-8: iconv -f {0} -t utf-8)"
_PICKLE = "a pickle, not text (load it in Python, and write JSON lines)"
_OTHER_FORMATS = {
    b"\xff\xfe": _UTF_16,
    b"\xfe\xff": _UTF_16,
    b"PK\x03\x04": "a zip archive (unpack it) or an Excel workbook (save the sheet as UTF-8 CSV)",
    b"\xd0\xcf\x11\xe0": "an Excel workbook (save the sheet as UTF-8 CSV)",
    b"\x1f\x8b": "gzip-compressed twice (unpack it once)",
    b"BZh": "a bzip2 file (unpack it with bunzip2; gzip can be read as it is)",
    b"\xfd7zXZ": "an xz file (unpack it with unxz; gzip can be read as it is)",
    b"\x28\xb5\x2f\xfd": "a zstd file (unpack it with unzstd; gzip can be read as it is)",
    b"7z\xbc\xaf": "a 7z archive (unpack it)",
    **{bytes([0x80, protocol]): _PICKLE for protocol in range(2, 6)},
}
"""{first bytes of a file that is not text: what it is, and what to do}."""
_TAR_MAGIC = slice(257, 262)

_ASCII = r"\t-\r -~"
# Letters of Western Europe stand alone or in pairs of small letters. In another encoding, such as
# that of Russian or Chinese, longer runs of bytes are no ASCII.
_CP1252_TEXT = re.compile(
    rf"(?!.*[À-ÿ]{{3}})(?!.*[À-Þ][À-ÿ])[{_ASCII}À-ÖØ-öø-ÿŒœŠšŽžŸ‘’“”„–—…•€£¥°§«»¿¡·®©™²³½ºª\u00a0]*",
    re.DOTALL,
)
_JAPANESE_TEXT = re.compile(
    rf"(?=.*[ぁ-んァ-ヶ])[{_ASCII}\u3000-\u30ff\u4e00-\u9fff\uff01-\uff5e]*", re.DOTALL
)
_LIKELY_ENCODINGS = {"cp1252": _CP1252_TEXT, "cp932": _JAPANESE_TEXT, "euc_jp": _JAPANESE_TEXT}
"""{encoding: pattern of a text that makes it likely}."""

_OBJECT_OVER_LINES = re.compile(rb'\{([^\n]*[,{])?[ \t\r]*\n\s*"|\{[^\n]*\[[ \t\r]*\n')
"""The start of a JSON object that goes on in the next line."""

_DELIMITERS = ("\t", ",", ";")
_QUOTED_CELL = re.compile(r'(^|[\t,;]) *"(?:[^"]|"")*"')
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?[ \r]*\n', re.IGNORECASE)
"""The line before the header in files that Excel writes or reads."""

_HEAD_SIZE = 1 << 16
_FLOAT32_MAX = 3.4028235e38

T = TypeVar("T")


class Fault(Exception):
    """The reason why one record cannot be used.

    Args:
        reason: the kind of fault; reports count records by it.
        detail: details of this record.
        remedy: the advice of the error message. The default is for a fault of single records.
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


class NotUtf8(Fault):
    """Bytes of a line or a cell that are not UTF-8.

    Leaving such records out would lose every text with an accent.
    """

    def __init__(self, data: bytes) -> None:
        start = 0
        try:
            data.decode()
        except UnicodeDecodeError as error:
            start = error.start
        text_before = data[:start].decode()[-20:]
        detail = f"byte 0x{data[start]:02x} after {quoted(text_before)}"
        remedy = "its encoding is not known, or it is not text: save it as UTF-8 text"
        for encoding, is_likely in _LIKELY_ENCODINGS.items():
            with suppress(UnicodeDecodeError):
                if is_likely.fullmatch(data.decode(encoding)):
                    detail += f"; the encoding may be {encoding}"
                    remedy = (
                        f"save the file as UTF-8, for example with iconv -f {encoding} -t utf-8"
                    )
                    break
        super().__init__("not UTF-8 text", detail, remedy)


@dataclass
class RecordReport:
    """Counts of used, bad and left-out records: seen = used + reported.

    Blank lines and the header of a table are not counted as records.

    Attributes:
        on_bad_record: "stop" raises `DataError` at the first bad record; "skip" leaves it out and
            counts it.
        seen: number of all records that were read.
        reported: number of records that were bad, or that a setting left out.
        by_reason: number of reported records for each reason.
        first: file and line of the first reported record; None if there is none.
    """

    on_bad_record: OnBadRecord = "stop"
    seen: int = 0
    reported: int = 0
    by_reason: Counter[str] = field(default_factory=Counter)
    first: str | None = None

    def __post_init__(self) -> None:
        check_choice("on_bad_record", self.on_bad_record, ("stop", "skip"))

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
        self.seen = state["seen"]
        self.reported = state["reported"]
        self.by_reason = Counter(state["by_reason"])
        self.first = state["first"]

    def summary(self) -> str:
        """Return one line: how many records were seen, used and left out, and why."""
        text = f"{self.seen} records: {self.used} used, {self.reported} left out"
        if self.reported:
            counts = [f"{count} {reason}" for reason, count in self.by_reason.most_common()]
            text += f" ({', '.join(counts)}; first: {self.first})"
        return one_line(text)

    def refuse_if_nothing_left(self, where: AnyPath, left: int, what: str) -> None:
        """Raise `DataError` if the number of usable items is 0, so that no run starts without data.

        ``what`` is the plural noun for the items, such as "records".
        """
        if left == 0:
            raise DataError(
                one_line(f"{where}: no {what} left to use; {self.summary()} (correct the data)")
            )


def parse_rows(
    path: AnyPath, rows: Rows, parse: Callable[[Any], T], report: RecordReport
) -> Iterator[T]:
    """Yield the parsed rows of a file, without bad records.

    Args:
        path: the file, for messages.
        rows: its rows.
        parse: a function that parses a row, or raises `Fault`.
        report: counts go here; its `on_bad_record` decides about bad records.

    Raises:
        DataError: at a bad record under "stop", or if no record can be used.
    """
    num_used = 0
    for line, row in rows:
        report.seen += 1
        try:
            if isinstance(row, Fault):
                raise row
            value = parse(row)
        except Fault as fault:
            if report.on_bad_record == "stop":
                raise make_data_error(path, line, fault) from None
            report.leave_out(f"{path}:{line}", fault.reason)
        else:
            num_used += 1
            yield value
    report.refuse_if_nothing_left(path, num_used, "records")


def make_data_error(file: AnyPath, line: int, fault: Fault) -> DataError:
    """Return an error with the message `FILE:LINE: FAULT (REMEDY)`."""
    return DataError(one_line(f"{file}:{line}: {fault} ({fault.remedy})"))


def fold_case(text: str) -> str:
    """Return a text in lower case, with normal character widths and single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def passage_text(title: str, text: str) -> str:
    """Return title, space, text, as BEIR's encoders join them; no space beside an empty part."""
    if title.strip() and text.strip():
        return f"{title} {text}".strip()
    return (title + text).strip()


def parse_text(value: object, field_name: str, may_be_blank: bool = False) -> str:
    """Return the content of a field if it is a text.

    Raises:
        Fault: if the value is missing (None), not a string, blank, or not valid Unicode.
    """
    if value is None:
        raise Fault(f"missing {field_name}")
    if not isinstance(value, str):
        raise Fault(f"{field_name} is not text", f"found {quoted(value)}")
    if not may_be_blank and not value.strip():
        raise Fault(f"empty {field_name}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        # `read_csv` reads bytes that are not UTF-8 as these characters.
        if re.search("[\udc80-\udcff]", value):
            with suppress(UnicodeEncodeError):
                raise NotUtf8(value.encode("utf-8", "surrogateescape")) from None
        # JSON ("\ud800") can hold half of a surrogate pair. Arrow fails on it much later, and does
        # not name the line.
        raise Fault(f"{field_name} is not valid Unicode", f"found {quoted(value)}") from None
    return value


def get_first_value(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the value of the first of some fields that is present and not null, else None."""
    for name in names:
        if record.get(name) is not None:
            return record[name]
    return None


def parse_title(record: Mapping[str, Any], field_name: str = "title") -> str:
    """Return the title of a record, "" if it has none; raises `Fault` if it is not a text."""
    if record.get(field_name) is None:
        return ""
    return parse_text(record[field_name], field_name, may_be_blank=True)


def parse_nullable_text(record: Mapping[str, Any], names: Sequence[str], field_name: str) -> str:
    """Return the text in the first of some fields that is not null; "" if all of them are null.

    A blank cell of a table is null. Messages call the text `field_name`.

    Raises:
        Fault: if the record has none of the fields, or for a value that is not a text.
    """
    value = get_first_value(record, names)
    is_null = value is None and any(name in record for name in names)
    if is_null:
        return ""
    return parse_text(value, field_name, may_be_blank=True)


def parse_id(value: object, field_name: str) -> str:
    """Return an id, which is a text or an integer, as a text; raises `Fault` for other values."""
    if type(value) is int:  # a bool is an int too, but no id
        return str(value)
    return parse_text(value, field_name)


def parse_number(value: object) -> float:
    """Return a number, or a text that holds one; raises `Fault` unless float32 can hold it."""
    try:
        number = float(value)  # type: ignore[arg-type]  # other types raise TypeError
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    is_finite_float32 = abs(number) <= _FLOAT32_MAX  # False for NaN
    if not is_finite_float32:
        raise Fault("score is not a number", f"found {quoted(value)}")
    return number


def split_cells(line: str, num_cells: int, separator: str | None = "\t") -> list[str]:
    """Return the cells of a line; raises `Fault` if their number differs from `num_cells`.

    Cells are separated by `separator`, or by any white space if it is None.
    """
    cells = line.split(separator)
    if len(cells) != num_cells:
        raise Fault(f"not {num_cells} columns", f"found {len(cells)}")
    return cells


def open_data_file(path: AnyPath) -> gzip.GzipFile | io.BufferedReader:
    """Open a file for reading bytes, and unpack gzip, which is detected by its first bytes.

    Raises:
        DataError: if the file does not exist or cannot be read, or is neither gzip nor text in
            UTF-8 or a similar encoding, such as UTF-16, a zip archive or an Excel workbook.
    """
    if not os.path.isfile(path) or not os.access(path, os.R_OK):
        raise DataError(one_line(f"{path}: no such file, or it may not be read (check the path)"))
    with open(path, "rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    start = b""
    with suppress(*UNREADABLE), gzip.open(path) if is_gzip else open(path, "rb") as file:
        start = file.read(_TAR_MAGIC.stop)  # damage is reported later, with its line
    other_formats = [text for magic, text in _OTHER_FORMATS.items() if start.startswith(magic)]
    for encoding, zeros, others in (("UTF-16LE", 1, 0), ("UTF-16BE", 0, 1)):
        # Characters of ASCII have a zero beside them.
        has_zeros = start[zeros::2].count(0) > len(start) // 4 or start[zeros : zeros + 1] == b"\0"
        if has_zeros and not start[others::2].count(0):
            other_formats.append(_NO_MARK.format(encoding))
    if start[:4].count(0) == 3:
        other_formats.append(_UTF_16)
    if b"\0" in start[:4]:
        other_formats.append("not text: there is a zero among its first bytes (give a text file)")
    if start[_TAR_MAGIC] == b"ustar":
        other_formats.append("a tar archive (unpack it)")
    if other_formats:
        raise DataError(one_line(f"{path}: is {other_formats[0]}"))
    if is_gzip:
        return gzip.open(path, "rb")
    return open(path, "rb")


def read_head(path: AnyPath) -> bytes:
    """Return up to 64 KB from the start of a file, unpacked, without leading white space.

    The result is empty for a file that is damaged there. Reading its rows reports the damage with
    its line.
    """
    with open_data_file(path) as file, suppress(*UNREADABLE):
        return file.read1(_HEAD_SIZE).removeprefix(BYTE_ORDER_MARK).lstrip()
    return b""


def read_lines(path: AnyPath) -> Rows:
    """Yield every line that is not blank, without its end; a truncated file ends with a `Fault`."""
    number = 0
    with open_data_file(path) as file:
        try:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    text = line.decode("utf-8-sig")
                except UnicodeDecodeError:
                    yield number, NotUtf8(line)
                else:
                    yield number, text.rstrip("\r\n")
        except UNREADABLE as error:
            yield number + 1, Fault("the file breaks off", str(error))


def read_json_lines(path: AnyPath) -> Rows:
    """Yield the JSON object of every line, or objects that are written over several lines."""
    if _OBJECT_OVER_LINES.match(read_head(path)):
        for number, value in read_json_items(path, "", multiple_values=True):
            yield number, _require_object(value)
        return
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
    """Return a JSON object, or a `Fault` for any other JSON value."""
    if isinstance(value, dict):
        return value
    return Fault("not a JSON object", f"found {quoted(value)}")


def read_json_array(path: AnyPath) -> Rows:
    """Yield the objects of a JSON array with their numbers."""
    for number, value in read_json_items(path, "item"):
        yield number, _require_object(value)


def read_json_items(path: AnyPath, prefix: str, function: str = "items", **options: Any) -> Rows:
    """Yield numbered parts of a JSON file, one in memory at a time.

    Args:
        prefix: place of the parts, as in ijson.
        function: name of the function of ijson that reads them.
        options: further arguments of this function.

    Raises:
        DataError: for broken JSON, because the parts after it cannot be separated.
    """
    import ijson

    number = 0
    with open_data_file(path) as file:
        try:
            if file.peek(3).startswith(BYTE_ORDER_MARK):
                file.read(3)
            parts = getattr(ijson, function)(file, prefix, use_float=True, **options)
            for number, part in enumerate(parts, start=1):
                yield number, part
        except (ijson.JSONError, *UNREADABLE) as error:
            if "UTF8" in str(error):
                for line_number, line in read_lines(path):
                    if isinstance(line, NotUtf8):
                        raise make_data_error(path, line_number, line) from error
            reason = "broken JSON, or the file breaks off"
            fault = Fault(reason, str(error), "correct the JSON, or get the file again")
            raise make_data_error(path, number + 1, fault) from error


def read_csv(path: AnyPath) -> Rows:
    """Yield the rows of a table with a header, as {column name: cell}; a blank cell is None.

    The delimiter is comma, semicolon or tab: the one that is most frequent in the header outside of
    quotes. A line such as `sep=;` before the header names another one.

    Raises:
        DataError: for a broken quote, because the rows after it cannot be separated, for a header
            that is not UTF-8, and for a column name that occurs twice.
    """
    # The csv module's own limit of 128 KB per cell would refuse long documents.
    csv.field_size_limit(2**31 - 1)
    delimiter, _, has_blanks_before_quotes = parse_header(read_head(path))
    names: list[str] = []
    line = 1
    with open_data_file(path) as file:
        # Bytes that are not UTF-8 become surrogates, which `parse_text` refuses in their row.
        text_file = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
        try:
            reader = csv.reader(
                text_file,
                delimiter=delimiter,
                strict=True,
                skipinitialspace=has_blanks_before_quotes,
            )
            for cells in reader:
                is_blank = not any(cell.strip() for cell in cells)
                if is_blank:
                    pass
                elif not names:
                    if not cells[0].lower().startswith("sep="):
                        names = _parse_column_names(cells)
                        _check_column_names(path, line, names)
                elif len(cells) == len(names):
                    cells_or_none = [cell if cell.strip() else None for cell in cells]
                    yield line, dict(zip(names, cells_or_none, strict=True))
                else:
                    detail = f"found {len(cells)} where the header has {len(names)}"
                    yield line, Fault("wrong number of columns", detail)
                line = reader.line_num + 1
        except csv.Error as error:
            remedy = 'write a " inside a quoted cell twice'
            fault = Fault("broken quoting", str(error), remedy)
            raise make_data_error(path, line, fault) from error
        except UNREADABLE as error:
            yield line, Fault("the file breaks off", str(error))


def parse_header(head: bytes) -> tuple[str, list[str], bool]:
    """Parse the header of a table.

    Args:
        head: the first bytes of the file. The header is their first row.

    Returns:
        The delimiter, the names of the columns (none if the bytes are not a table), and whether
        blanks stand before quoted cells. The rows are then expected to have them too.
    """
    text = head.decode("utf-8", "replace")
    separator_line = _SEPARATOR_LINE.match(text)
    if separator_line:
        text = text[separator_line.end() :]
        delimiter = separator_line[1]
    else:
        first_line = _QUOTED_CELL.sub(r"\1", text).partition("\n")[0]
        delimiter = max(_DELIMITERS, key=first_line.count)
    try:
        cells = next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), [])
    except csv.Error:
        cells = []
    has_blanks_before_quotes = any(re.match(' +"', cell) for cell in cells)
    return delimiter, _parse_column_names(cells), has_blanks_before_quotes


def _parse_column_names(cells: list[str]) -> list[str]:
    # `parse_header` leaves quotes in a cell that begins with a blank, as the csv module does.
    return [cell.strip().strip('"') for cell in cells]


def _check_column_names(path: AnyPath, line: int, names: list[str]) -> None:
    """Raise `DataError` for a name that is not UTF-8, and for a name of two columns.

    A row can hold only one of two columns with the same name. Several columns may have no name:
    nothing is read from them.
    """
    for name in names:
        try:
            parse_text(name, "name", may_be_blank=True)
        except Fault as fault:
            raise make_data_error(path, line, fault) from None
    for name, count in Counter(names).items():
        if name and count > 1:
            reason = "two columns have the same name"
            repeated = Fault(reason, quoted(name), "rename or remove one")
            raise make_data_error(path, line, repeated)


def parse_question_line(line: str) -> list[str]:
    """Return the question and the list of answers, as text, of a line of DPR's `.qa.csv` files.

    Raises:
        Fault: for a line with another number of cells, or broken quoting.
    """
    try:
        cells = next(csv.reader([line], delimiter="\t"), [])
    except csv.Error as error:
        raise Fault("broken quoting", str(error)) from None
    if len(cells) != 2:
        raise Fault("not 2 columns", f"found {len(cells)}; a line is QUESTION<tab>['one', 'two']")
    return cells


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
        raise make_data_error(source, number + 1, fault) from error
