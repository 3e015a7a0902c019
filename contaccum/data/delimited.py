"""Training records in csv and tsv files with a header: quoted as Python's csv writes them, split at , ; or tab.

One record is in memory at a time. A quote that is never closed would swallow the records after it; here it costs
one bad record, and reading goes on with the next line.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from contaccum.data.fields import Fields
from contaccum.data.record import Record, RecordRules
from contaccum.data.records import Fault, RecordReport, one_line, open_data_file, quoted, read_raw_lines, text_line
from contaccum.errors import DataError

DELIMITERS = (",", ";", "\t")
# A record that has not ended by then has a quote too many.
LONGEST_RECORD_LINES = 10_000
LONGEST_RECORD_CHARACTERS = 1 << 26


class _Line(NamedTuple):
    number: int
    text: str
    fault: Fault | None


class _Row(NamedTuple):
    number: int
    cells: list[str]
    fault: Fault | None


def read_delimited(path: Path, fields: Fields, rules: RecordRules, report: RecordReport) -> Iterator[Record]:
    """The records of a csv or tsv file; a cell that is blank is no negative and no title.

    Raises:
        DataError: the file cannot be used, its header lacks a column, or a bad record under "stop". The line is the
            one on which a record starts.
    """
    # Python's own limit of 128 KB a cell guards against nothing here.
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_RECORD_CHARACTERS))
    with open_data_file(path) as file:
        lines = (_decoded(number, raw) for number, _, raw in read_raw_lines(file, path, report))
        header = next((line for line in lines if line.text.strip()), None)
        if header is None:
            return
        if header.fault is not None:
            raise _unreadable(path, header.number, header.fault)
        if "\r" in header.text:
            raise _unreadable(path, header.number, Fault("lines end in CR alone", mend="save it with LF or CRLF"))
        delimiter, names = split_header(header.text, fields.mapped)
        if not names:
            raise _unreadable(path, header.number, Fault("broken quoting"))
        fields.settle_table(names, path, header.number)
        never_none = (fields.query, fields.positive)
        for row in _rows(lines, delimiter):
            report.see()
            try:
                if row.fault is not None:
                    raise row.fault
                if len(row.cells) != len(names):
                    detail = f"found {len(row.cells)} where the header has {len(names)}"
                    raise Fault("wrong number of columns", detail, "quote a cell that holds the delimiter")
                cells = zip(names, row.cells, strict=True)
                record = {name: cell if cell.strip() or name in never_none else None for name, cell in cells}
                result, negatives = fields.read(record, rules)
            except Fault as fault:
                report.reject(path, row.number, fault)
                continue
            report.accept()
            rules.note_unused(report, negatives)
            yield result


def split_header(text: str, columns: Mapping[str, str]) -> tuple[str, list[str]]:
    """The delimiter that splits a header into known columns, or else into the most, and the names; [] if none can."""
    best: tuple[tuple[bool, int], str, list[str]] = ((False, 0), ",", [])
    for delimiter in DELIMITERS:
        try:
            cells = next(csv.reader([text], delimiter=delimiter, strict=True), [])
        except csv.Error:
            continue
        names = [cell.strip() for cell in cells]
        rank = (has_known_columns(names, columns), len(names))
        if rank > best[0]:
            best = (rank, delimiter, names)
    return best[1], best[2]


def has_known_columns(names: list[str], columns: Mapping[str, str]) -> bool:
    """Whether `names` have a query and a positive, by the usual names or by the mapping `columns`."""
    try:
        Fields(columns).settle(names)
    except Fault:
        return False
    return True


def _unreadable(path: Path, line: int, fault: Fault) -> DataError:
    return DataError(one_line(f"{path}:{line}: the header cannot be read: {fault.reason} ({fault.mend})"))


def _decoded(number: int, raw: bytes) -> _Line:
    try:
        return _Line(number, text_line(raw), None)
    except Fault as fault:
        # The text still tells where the record ends.
        text = raw.decode("utf-8", errors="replace").replace("\0", "\ufffd").rstrip("\r\n")
        return _Line(number, text, fault)


def _rows(lines: Iterator[_Line], delimiter: str) -> Iterator[_Row]:
    """Every record, with the line on which it starts, and the fault of one that cannot be told from the next."""
    waiting: deque[_Line] = deque()
    pulled: list[_Line] = []

    def feed() -> Iterator[str]:
        size = 0
        while (line := waiting.popleft() if waiting else next(lines, None)) is not None:
            size = len(line.text) + (size if pulled else 0)
            pulled.append(line)
            if len(pulled) > LONGEST_RECORD_LINES or size > LONGEST_RECORD_CHARACTERS:
                raise csv.Error("a quote without an end")
            yield line.text + "\n"

    reader = csv.reader(feed(), delimiter=delimiter, strict=True)
    while True:
        pulled.clear()
        try:
            cells = next(reader, None)
        except csv.Error as error:
            first, *rest = pulled
            mend = f"write {quoted(chr(34) * 2)} for a quote inside a quoted cell"
            yield _Row(first.number, [], first.fault or Fault("broken quoting", str(error), mend))
            waiting.extendleft(reversed(rest))
            reader = csv.reader(feed(), delimiter=delimiter, strict=True)
            continue
        if cells is None:
            return
        if len(pulled) > 1 or pulled[0].text.strip():
            yield _Row(pulled[0].number, cells, next((line.fault for line in pulled if line.fault is not None), None))
