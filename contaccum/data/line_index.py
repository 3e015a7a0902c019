"""The texts of an `id<TAB>text` file by id, without holding them: MS MARCO's collection and queries.

Held are 16 bytes for each line (a hash of the id, and the byte at which the line starts): 141 MB for the 8.8 million
passages of MS MARCO. A text is read from the file when it is asked for.
"""

from __future__ import annotations

import gzip
import tempfile
from array import array
from pathlib import Path
from typing import IO

import numpy as np

from contaccum.data.records import (
    UNREADABLE,
    Fault,
    RecordReport,
    one_line,
    open_data_file,
    quoted,
    read_raw_lines,
    text_line,
)
from contaccum.errors import DataError

_HEADER_WORDS = {"id", "pid", "qid", "docid", "doc_id", "query_id", "passage_id", "text", "passage", "query"}


class LineIndex:
    """Reads a file of `id<TAB>text` lines once, counting every line, and then finds texts by id.

    Args:
        path: the file. A gzip file is unpacked into a temporary file first, since it cannot be entered in the middle.
        report: bad are: a line without exactly two columns, a blank id or text, an id that occurred before.
        what: "passages" or "queries", for messages.

    Raises:
        DataError: the file cannot be used, nothing usable is in it, or a bad record under "stop".
    """

    def __init__(self, path: Path, report: RecordReport, what: str) -> None:
        self.path = path
        self._file, broken_off = open_seekable(path)
        try:
            self._keys, self._starts = self._read(report, broken_off)
            report.refuse_if_nothing_left(path, len(self._keys), what)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> LineIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, identifier: str) -> bool:
        """By hash alone: wrong for one unknown id in 10^12, which `text` then finds out."""
        key = hash(identifier)
        place = int(self._keys.searchsorted(key))
        return place < len(self._keys) and int(self._keys[place]) == key

    def text(self, identifier: str) -> str:
        """The text of an id.

        Raises:
            DataError: the id is not there, or the file has changed since.
        """
        key = hash(identifier)
        place = int(self._keys.searchsorted(key))
        while place < len(self._keys) and int(self._keys[place]) == key:
            found, text = self._line_at(int(self._starts[place]))
            if found == identifier:
                return text
            place += 1
        raise DataError(one_line(f"{self.path}: {quoted(identifier)} is gone (it changed while it was read)"))

    def _line_at(self, start: int) -> tuple[str, str]:
        self._file.seek(start)
        try:
            found, _, text = text_line(self._file.readline()).partition("\t")
        except Fault as fault:
            raise DataError(one_line(f"{self.path}: {fault.reason} (it changed while it was read)")) from None
        return found, text

    def _read(self, report: RecordReport, broken_off: BaseException | None) -> tuple[np.ndarray, np.ndarray]:
        keys, starts, numbers = array("q"), array("q"), array("q")
        first = True
        for line, start, raw in read_raw_lines(self._file, self.path, report, broken_off):
            if not raw.strip():
                continue
            try:
                cells = text_line(raw).split("\t")
                is_header = first and len(cells) == 2 and {cell.strip().lower() for cell in cells} <= _HEADER_WORDS
                first = False
                if is_header:
                    continue
                if len(cells) != 2:
                    raise Fault("not two columns", f"found {len(cells)}", "write id and text, separated by a tab")
                if not cells[0].strip():
                    raise Fault("missing id", "it is blank")
                if not cells[1].strip():
                    raise Fault("empty text", f"of {quoted(cells[0])}")
            except Fault as fault:
                report.see()
                report.reject(self.path, line, fault)
                continue
            report.see()
            keys.append(hash(cells[0]))
            starts.append(start)
            numbers.append(line)
        return self._sorted(keys, starts, numbers, report)

    def _sorted(
        self, keys: array[int], starts: array[int], numbers: array[int], report: RecordReport
    ) -> tuple[np.ndarray, np.ndarray]:
        """Keys in ascending order, with their starts; of equal ids only the first is kept, the others are reported."""
        unsorted = np.frombuffer(keys, dtype=np.int64) if keys else np.empty(0, dtype=np.int64)
        # Stable, so that of equal ids the first in the file comes first.
        order = np.argsort(unsorted, kind="stable")
        ordered = unsorted[order]
        places = np.frombuffer(starts, dtype=np.int64)[order] if keys else ordered
        repeated = []
        for place in np.flatnonzero(ordered[1:] == ordered[:-1]) + 1:
            identifier = self._line_at(int(places[place]))[0]
            back = int(place) - 1
            while back >= 0 and ordered[back] == ordered[place]:
                if self._line_at(int(places[back]))[0] == identifier:
                    repeated.append((numbers[int(order[place])], int(place), identifier))
                    break
                back -= 1
        for line, _, identifier in sorted(repeated):
            report.reject(self.path, line, Fault("duplicate id", quoted(identifier), "keep one line for each id"))
        report.accept(len(ordered) - len(repeated))
        if repeated:
            gone = [place for _, place, _ in repeated]
            ordered, places = np.delete(ordered, gone), np.delete(places, gone)
        return ordered, places


def open_seekable(path: Path) -> tuple[IO[bytes], BaseException | None]:
    """Open `path` for reading at any byte; what is gzip is unpacked into a temporary file that vanishes when closed.

    Returns:
        The file, and why it ends too early, or None. A last line without its end is then left out.

    Raises:
        DataError: the file is missing, a directory, not allowed, or there is no room to unpack it.
    """
    file = open_data_file(path)
    if not isinstance(file, gzip.GzipFile):
        return file, None
    broken_off: BaseException | None = None
    whole = size = 0
    with file:
        unpacked = tempfile.TemporaryFile(prefix="contaccum-")  # noqa: SIM115  # the caller closes it
        while True:
            try:
                piece = file.read1(1 << 20)
            except UNREADABLE as error:
                broken_off, piece = error, b""
            if not piece:
                break
            try:
                unpacked.write(piece)
            except OSError as error:
                unpacked.close()
                where = tempfile.gettempdir()
                mend = "unpack it yourself, or let TMPDIR name a folder with more room"
                raise DataError(
                    one_line(f"{path}: cannot be unpacked into {where}: {error.strerror} ({mend})")
                ) from error
            if b"\n" in piece:
                whole = size + piece.rindex(b"\n") + 1
            size += len(piece)
    if broken_off is not None:
        unpacked.truncate(whole)
    unpacked.seek(0)
    return unpacked, broken_off
