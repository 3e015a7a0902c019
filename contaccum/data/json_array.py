"""Reading one large JSON array record by record: DPR's format, whose files have many gigabytes.

The file is read as a stream: memory holds one record and one piece of the file, whatever the file's size. Unlike
`json.load` it knows the line of every record and can leave out a bad one. It does not know what a record means
(`json_records`).
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contaccum.data.records import (
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

CHUNK_BYTES = 1 << 20
# A bracket that is never closed would otherwise draw the rest of the file into memory.
LONGEST_RECORD = 1 << 26

# A decoder that fails, or ends, this close to the end of what was read may only lack the rest: no token that it
# reads at once (an escaped surrogate pair, -Infinity) is longer.
_MARGIN = 16
# Finds where a refused value ends, so that the rest of an array can be read: takes what STRICT_JSON refuses.
_LENIENT = json.JSONDecoder(parse_int=float)
_NOT_SPACE = re.compile(r"[^ \t\r\n]")
# What the "surrogateescape" error handler writes for a byte that is not UTF-8.
_UNDECODED = re.compile("[\udc80-\udcff]")


def read_json_array(
    path: str | Path, report: RecordReport, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line on which it starts, object) of a file that is one JSON array of objects.

    After broken JSON nothing can be told apart any more: the break is one bad record, and under "skip" what stood
    before it is used.

    Args:
        chunk_bytes: how much to read at a time; the records do not depend on it.

    Raises:
        DataError: the file is missing, a directory, empty, or no array; or a bad record under "stop".
    """
    with open_data_file(path) as file:
        text = _Stream(file, chunk_bytes)

        def reject_rest(index: int, what: str) -> None:
            fault = Fault("broken JSON", f"{what}; nothing after it is read")
            report.see()
            report.reject(path, text.line_at(index), broken_off_fault(text.broken_off) if text.broken_off else fault)

        first = text.next_character()
        if first != "[":
            if text.broken_off is not None:
                reject_rest(text.position, "")
                return
            if not first:
                refuse_empty(path)
            raise DataError(one_line(f"{path}:{text.line_at(text.position)}: not a JSON array (write [...] around it)"))
        text.position += 1
        number = 0
        while text.next_character() != "]":
            number += 1
            try:
                value, end, refused = text.decode()
            except json.JSONDecodeError as error:
                reject_rest(max(text.position, error.pos), f"{error.msg}, in record {number}")
                return
            except RecursionError:
                reject_rest(text.position, f"nested too deeply, in record {number}")
                return
            begins = text.line_at(text.position)
            report.see()
            try:
                if refused:
                    raise Fault("broken JSON", f"{refused}, in record {number}")
                if text.undecodable and _UNDECODED.search(text.text, text.position, end):
                    raise Fault("not UTF-8 text", f"in record {number}", "save the file as UTF-8")
                record = object_of(value)
            except Fault as fault:
                report.reject(path, begins, fault)
            else:
                yield begins, record
            text.position = end
            if text.next_character() == ",":
                text.position += 1
                if text.next_character() == "]":
                    reject_rest(text.position, f"no record after the ',' that follows record {number}")
                    return
            elif text.next_character() != "]":
                reject_rest(text.position, f"expected ',' or ']' after record {number}")
                return
        text.position += 1
        if text.next_character() or text.broken_off is not None:
            reject_rest(text.position, "text after the end of the array")


class _Stream:
    """A window onto the text of a file, which moves on as it is read.

    Attributes:
        text: what is in memory. `position` is an index into it; what lies before it is dropped by the next read.
        undecodable: bytes that are not UTF-8 were met.
        broken_off: why the file ends too early, or None.
    """

    def __init__(self, file: gzip.GzipFile | io.BufferedReader, chunk_bytes: int) -> None:
        self.text = ""
        self.position = 0
        self.undecodable = False
        self.broken_off: BaseException | None = None
        self._file = file
        self._chunk_bytes = chunk_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._ended = False
        self._started = False
        self._line, self._counted = 1, 0

    def line_at(self, index: int) -> int:
        """The line of `text[index]`; calls must not go backwards."""
        self._line += self.text.count("\n", self._counted, index)
        self._counted = index
        return self._line

    def next_character(self) -> str:
        """The first character that is not white space; `position` moves to it. "" at the end."""
        while True:
            found = _NOT_SPACE.search(self.text, self.position)
            self.position = found.start() if found else len(self.text)
            if found or self._ended:
                return found.group() if found else ""
            self._read_on()

    def decode(self) -> tuple[object, int, str]:
        """The JSON value at `position`, where it ends, and why it is refused ("" if it is not)."""
        while True:
            enough = len(self.text) - _MARGIN
            try:
                value, end, refused = _decode_at(self.text, self.position)
                if self._ended or end < enough:
                    return value, end, refused
            except json.JSONDecodeError as error:
                if self._ended or (error.pos < enough and not error.msg.startswith("Unterminated string")):
                    raise
                if len(self.text) - self.position > LONGEST_RECORD:
                    what = f"No end within {LONGEST_RECORD >> 20} million characters"
                    raise json.JSONDecodeError(what, self.text, self.position) from None
            self._read_on()

    def _read_on(self) -> None:
        self.line_at(self.position)
        kept = self.text[self.position :]
        # As much again as is unread: a record that needs many reads would otherwise be decoded as often.
        wanted = max(self._chunk_bytes, len(kept))
        pieces: list[bytes] = []
        try:
            # read() would throw away what it already has when the file breaks off; read1() hands it over first.
            while wanted > 0 and (piece := self._file.read1(wanted)):
                pieces.append(piece)
                wanted -= len(piece)
            self._ended = wanted > 0
        except UNREADABLE as error:
            self.broken_off, self._ended = error, True
        added = self._decode_bytes(b"".join(pieces))
        if not self._started and added:
            self._started = True
            added = added.removeprefix("\ufeff")
        self.text, self.position, self._counted = kept + added, 0, 0

    def _decode_bytes(self, data: bytes) -> str:
        try:
            return self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError:
            # The decoder keeps its state when it refuses, so the same bytes can be given to it again.
            self.undecodable = True
            self._decoder.errors = "surrogateescape"
            return self._decoder.decode(data, final=self._ended)


def _decode_at(text: str, start: int) -> tuple[object, int, str]:
    """The JSON value that starts at `start`, where it ends, and why it is refused ("" if it is not)."""
    try:
        return *STRICT_JSON.raw_decode(text, start), ""
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        return *_LENIENT.raw_decode(text, start), str(error)
