"""Reading one large JSON array record by record: DPR's format.

Unlike `json.load` it knows the line of every record, holds the records one at a time, and can leave out a bad
one. It does not know what a record means (`pairs`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contaccum.data.records import (
    BYTE_ORDER_MARK,
    STRICT_JSON,
    UNREADABLE,
    Fault,
    RecordReport,
    broken_off_fault,
    object_of,
    one_line,
    open_data_file,
    refuse_empty,
)
from contaccum.errors import DataError

# Finds where a refused value ends, so that the rest of an array can be read: takes what STRICT_JSON refuses.
_LENIENT = json.JSONDecoder(parse_int=float)
_NOT_SPACE = re.compile(r"[^ \t\r\n]")
# What the "surrogateescape" error handler writes for a byte that is not UTF-8.
_UNDECODED = re.compile("[\udc80-\udcff]")


def read_json_array(path: str | Path, report: RecordReport) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line on which it starts, object) of a file that is one JSON array of objects.

    The text is held in memory, its records are not. After broken JSON nothing can be told apart any more: the
    break is one bad record, and under "skip" what stood before it is used.

    Raises:
        DataError: the file is missing, a directory, empty, or no array; or a bad record under "stop".
    """
    data, broken_off = _read_all(path)
    data = data.removeprefix(BYTE_ORDER_MARK)
    if not data.strip() and broken_off is None:
        refuse_empty(path)
    try:
        text, undecodable = data.decode("utf-8"), False
    except UnicodeDecodeError:
        text, undecodable = data.decode("utf-8", errors="surrogateescape"), True
    del data

    position, counted, line = 0, 0, 1

    def line_at(index: int) -> int:
        nonlocal counted, line
        line += text.count("\n", counted, index)
        counted = index
        return line

    def after_space(index: int) -> int:
        found = _NOT_SPACE.search(text, index)
        return found.start() if found else len(text)

    def reject_rest(index: int, what: str) -> None:
        fault = Fault("broken JSON", f"{what}; nothing after it is read")
        report.see()
        report.reject(path, line_at(index), broken_off_fault(broken_off) if broken_off else fault)

    position = after_space(0)
    if not text.startswith("[", position):
        if broken_off is None:
            raise DataError(one_line(f"{path}:{line_at(position)}: not a JSON array (write [...] around it)"))
        reject_rest(position, "")
        return
    position = after_space(position + 1)
    number = 0
    while not text.startswith("]", position):
        start, number = position, number + 1
        begins = line_at(start)
        try:
            value, position, refused = _decode_at(text, start)
        except json.JSONDecodeError as error:
            reject_rest(max(start, error.pos), f"{error.msg}, in record {number}")
            return
        except RecursionError:
            reject_rest(start, f"nested too deeply, in record {number}")
            return
        report.see()
        try:
            if refused:
                raise Fault("broken JSON", f"{refused}, in record {number}")
            if undecodable and _UNDECODED.search(text, start, position):
                raise Fault("not UTF-8 text", f"in record {number}", "save the file as UTF-8")
            record = object_of(value)
        except Fault as fault:
            report.reject(path, begins, fault)
        else:
            yield begins, record
        position = after_space(position)
        if text.startswith(",", position):
            position = after_space(position + 1)
            if text.startswith("]", position):
                reject_rest(position, f"no record after the ',' that follows record {number}")
                return
        elif not text.startswith("]", position):
            reject_rest(position, f"expected ',' or ']' after record {number}")
            return
    position = after_space(position + 1)
    if position < len(text) or broken_off is not None:
        reject_rest(position, "text after the end of the array")


def _decode_at(text: str, start: int) -> tuple[object, int, str]:
    """The JSON value that starts at `start`, where it ends, and why it is refused ("" if it is not)."""
    try:
        return *STRICT_JSON.raw_decode(text, start), ""
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        return *_LENIENT.raw_decode(text, start), str(error)


def _read_all(path: str | Path) -> tuple[bytes, BaseException | None]:
    """The bytes of `path` up to its end or, with the error, up to where it breaks off."""
    pieces = []
    with open_data_file(path) as file:
        try:
            # read() would throw away what it already has when the file breaks off; read1() hands it over first.
            while piece := file.read1(1 << 20):
                pieces.append(piece)
        except UNREADABLE as error:
            return b"".join(pieces), error
    return b"".join(pieces), None
