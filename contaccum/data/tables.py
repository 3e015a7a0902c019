"""Rows of tables: csv files with a header, lines of DPR's question files, and Arrow tables."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from contaccum.data.records import (
    UNREADABLE,
    Fault,
    Rows,
    make_data_error,
    open_data_file,
    parse_text,
    quoted,
    read_head,
)
from contaccum.files import AnyPath

_DELIMITERS = ("\t", ",", ";")
_QUOTED_CELL = re.compile(r'(^|[\t,;]) *"(?:[^"]|"")*"')
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?[ \r]*\n', re.IGNORECASE)
"""The line before the header in files that Excel writes or reads."""
_CELL_SIZE_LIMIT = 2**31 - 1


class Header(NamedTuple):
    """The header of a table.

    Attributes:
        delimiter: the text between two cells.
        names: names of the columns.
        has_blanks_before_quotes: True if blanks stand before quoted cells. The rows are then
            expected to have them too.
    """

    delimiter: str
    names: list[str]
    has_blanks_before_quotes: bool


def read_csv(path: AnyPath) -> Rows:
    """Yield the rows of a table with a header, as {column name: cell}; a blank cell is None.

    The delimiter is comma, semicolon or tab: the one that is most frequent in the header outside of
    quotes. A line such as `sep=;` before the header names another one.

    Raises:
        DataError: for a broken quote, because the rows after it cannot be separated, for a header
            that is not UTF-8, and for a column name that occurs twice.
    """
    # The csv module's own limit of 128 KB per cell would refuse long documents.
    csv.field_size_limit(_CELL_SIZE_LIMIT)
    header = parse_header(read_head(path))
    names: list[str] = []
    line = 1
    with open_data_file(path) as file:
        # Bytes that are not UTF-8 become surrogates, which `parse_text` refuses in their row.
        text_file = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
        try:
            reader = csv.reader(
                text_file,
                delimiter=header.delimiter,
                strict=True,
                skipinitialspace=header.has_blanks_before_quotes,
            )
            for cells in reader:
                is_blank = not any(cell.strip() for cell in cells)
                if not names:
                    is_separator_line = not is_blank and cells[0].lower().startswith("sep=")
                    if not is_blank and not is_separator_line:
                        names = _parse_column_names(cells)
                    _check_column_names(path, line, names)
                elif is_blank:
                    pass
                elif len(cells) == len(names):
                    yield line, _make_row(names, cells)
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


def _make_row(names: list[str], cells: list[str]) -> dict[str, str | None]:
    row: dict[str, str | None] = {}
    for name, cell in zip(names, cells, strict=True):
        row[name] = cell if cell.strip() else None
    return row


def parse_header(head: bytes) -> Header:
    """Parse the header of a table.

    Args:
        head: the first bytes of the file. The header is their first row; if they are not a table,
            the names are empty.
    """
    text = head.decode("utf-8", "replace")
    separator_line = _SEPARATOR_LINE.match(text)
    if separator_line:
        text = text[separator_line.end() :]
    text_outside_quotes = _QUOTED_CELL.sub(r"\1", text)
    first_line = text_outside_quotes.partition("\n")[0]
    delimiter = max(_DELIMITERS, key=first_line.count)
    if separator_line:
        delimiter = separator_line[1]
    try:
        cells = next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), [])
    except csv.Error:
        cells = []
    has_blanks_before_quotes = any(re.match(' +"', cell) for cell in cells)
    return Header(delimiter, _parse_column_names(cells), has_blanks_before_quotes)


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
    """Yield the rows of Arrow tables, with their numbers.

    Args:
        source: file or data set, for messages.
        tables: `pyarrow.Table` objects.

    Raises:
        DataError: if a table cannot be read.
    """
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
