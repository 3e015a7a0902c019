"""Reading data files line by line, so that no record is lost without a word.

Every reader of this package goes through here: files open the same way (plain or gzip, UTF-8, with or without
a byte-order mark), a bad record is either the one-line error that stops the run or a counted entry of the
report, and records seen = records used + records reported. What a record must hold is not decided here: the
readers raise `Fault`, and this module turns it into one or the other.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NoReturn

from contaccum.errors import ConfigError, DataError

if TYPE_CHECKING:
    from hashlib import _Hash

OnBadRecord = Literal["stop", "skip"]

# A file of nothing but bad records must not fill the memory with its own report; the counts stay exact.
ENTRIES_KEPT = 10_000

# A file without line ends (a binary, a giant array) must not be drawn into memory as one line.
LONGEST_LINE = 1 << 26

UNREADABLE = (OSError, EOFError, zlib.error)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def one_line(text: str) -> str:
    """`text` with every line break and unprintable character folded to one space."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def quoted(value: object, longest: int = 60) -> str:
    """`value` as Python writes it, cut to `longest` characters: data may be long and hold any character."""
    # The slice comes first: the repr of a whole book only to keep 60 characters is wasted.
    shown = repr(value[: longest + 1] if isinstance(value, str) else value)
    return shown if len(shown) <= longest else shown[: longest - 3] + "..."


class Fault(Exception):
    """What is wrong with one record.

    Args:
        reason: the kind of fault, the same words for every record that has it (the report counts by it).
        detail: what is particular to this record.
        mend: what the user can do, besides leaving the record out.
    """

    def __init__(self, reason: str, detail: str = "", mend: str = "correct the record") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail
        self.mend = mend


@dataclass(frozen=True)
class BadRecord:
    """One record that was left out: the file, its 1-based line, and the kind of fault."""

    file: str
    line: int
    reason: str


class RecordReport:
    """What became of every record: seen = used + reported.

    Args:
        on_bad_record: "stop" raises `DataError` at the first bad record; "skip" leaves bad records out and
            counts them here.

    Attributes:
        seen, used, reported: numbers of records. A blank line and the header of a table are not records.
        entries: the first `ENTRIES_KEPT` bad records as `BadRecord`.
        by_reason, by_file: number of bad records for each reason and for each file; these are complete.
        notes: number of records for each remark that is no fault (a pair that occurs twice, for example).

    Raises:
        ConfigError: `on_bad_record` is neither "stop" nor "skip".
    """

    def __init__(self, on_bad_record: OnBadRecord = "stop") -> None:
        if on_bad_record not in ("stop", "skip"):
            raise ConfigError(f"on_bad_record={on_bad_record!r} is unknown (use 'stop' or 'skip')")
        self.on_bad_record = on_bad_record
        self.seen = 0
        self.used = 0
        self.reported = 0
        self.entries: list[BadRecord] = []
        self.by_reason: Counter[str] = Counter()
        self.by_file: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()

    def see(self, count: int = 1) -> None:
        """Count records of the input; each must then be accepted or rejected."""
        self.seen += count

    def accept(self, count: int = 1) -> None:
        """Count records as used."""
        self.used += count

    def note(self, remark: str, count: int = 1) -> None:
        """Count records that were used but deserve a remark."""
        if count:
            self.notes[remark] += count

    def reject(self, file: str | Path, line: int, fault: Fault, count: int = 1) -> None:
        """Stop at a bad record, or leave it out and count it; `count` of them where one fault takes several.

        Raises:
            DataError: under "stop"; one line, `FILE:LINE: what is wrong (mend)`.
        """
        if self.on_bad_record == "stop":
            what = f"{fault.reason}: {fault.detail}" if fault.detail else fault.reason
            mend = f"{fault.mend}, or leave such records out with --on_bad_record skip"
            raise DataError(one_line(f"{file}:{line}: {what} ({mend})")) from None
        self.reported += count
        self.by_reason[fault.reason] += count
        self.by_file[str(file)] += count
        if len(self.entries) < ENTRIES_KEPT:
            self.entries.append(BadRecord(str(file), line, fault.reason))

    def leave_out(self, file: str | Path, reason: str, count: int = 1) -> None:
        """Count records as left out that were counted as used: nothing is wrong with them, they are not wanted."""
        self.used -= count
        self.reported += count
        self.by_reason[reason] += count
        self.by_file[str(file)] += count

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold, for `restore`."""
        counts = {name: dict(getattr(self, name)) for name in ("by_reason", "by_file", "notes")}
        entries = [[entry.file, entry.line, entry.reason] for entry in self.entries]
        return {"seen": self.seen, "used": self.used, "reported": self.reported, "entries": entries, **counts}

    def restore(self, told: Mapping[str, Any]) -> None:
        """Become what `to_dict` told."""
        self.seen, self.used, self.reported = told["seen"], told["used"], told["reported"]
        self.entries = [BadRecord(*entry) for entry in told["entries"]]
        self.by_reason, self.by_file, self.notes = (Counter(told[name]) for name in ("by_reason", "by_file", "notes"))

    def summary(self) -> str:
        """One line: how many records were seen, used and left out, why, and where the first one is."""
        parts = [f"{self.seen} records: {self.used} used, {self.reported} left out"]
        if self.reported:
            parts[0] += f" ({', '.join(f'{n} {reason}' for reason, n in self.by_reason.most_common())})"
            if len(self.by_file) > 1:
                parts.append("by file: " + ", ".join(f"{name} {n}" for name, n in self.by_file.items()))
            parts += [f"first: {entry.file}:{entry.line}" for entry in self.entries[:1]]
        parts += [f"{remark}: {n}" for remark, n in self.notes.items()]
        return one_line("; ".join(parts))

    def refuse_if_nothing_left(self, where: str | Path, left: int, what: str) -> None:
        """Raise `DataError` when `left`, the number of usable `what`, is 0: an empty run helps nobody."""
        if left == 0:
            raise DataError(one_line(f"{where}: no {what} left to use; {self.summary()} (correct the data)"))


def open_data_file(path: str | Path) -> gzip.GzipFile | io.BufferedReader:
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


def broken_off_fault(error: BaseException) -> Fault:
    """The fault of a file that cannot be read to its end."""
    return Fault("the file breaks off", str(error), "get the file again: it is damaged or incomplete")


def refuse_empty(path: str | Path) -> NoReturn:
    """Raise `DataError`: an empty file is never what was meant, whatever `on_bad_record` says."""
    raise DataError(one_line(f"{path}: the file is empty (get it again, or name another)"))


def read_raw_lines(
    file: gzip.GzipFile | IO[bytes], path: str | Path, report: RecordReport, broken_off: BaseException | None = None
) -> Iterator[tuple[int, int, bytes]]:
    """Yield (1-based line number, byte at which it starts, its bytes) for every line of an open file, blank ones too.

    A byte-order mark is left out. A file that breaks off is one bad record, and so is a line of more than
    `LONGEST_LINE` bytes; both are counted here.

    Args:
        broken_off: why `file` ends too early, where whoever unpacked it knows.

    Raises:
        DataError: the file has nothing but blank lines; or such a bad record under "stop".
    """
    line, start = 0, 0
    anything = False
    while True:
        try:
            raw = file.readline(LONGEST_LINE)
            beyond = _skip_rest_of_line(file) if len(raw) >= LONGEST_LINE and not raw.endswith(b"\n") else 0
        except UNREADABLE as error:
            broken_off, raw = error, b""
        if not raw:
            break
        line += 1
        here, start = start, start + len(raw) + beyond
        if beyond:
            anything = True
            report.see()
            report.reject(path, line, Fault("line too long", f"{len(raw) + beyond} bytes", "write one record a line"))
            continue
        if line == 1 and raw.startswith(BYTE_ORDER_MARK):
            here, raw = len(BYTE_ORDER_MARK), raw[len(BYTE_ORDER_MARK) :]
        anything = anything or bool(raw.strip())
        yield line, here, raw
    if broken_off is not None:
        report.see()
        report.reject(path, line + 1, broken_off_fault(broken_off))
    elif not anything:
        refuse_empty(path)


def _skip_rest_of_line(file: gzip.GzipFile | IO[bytes]) -> int:
    skipped = 0
    while piece := file.readline(1 << 20):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


def text_line(raw: bytes) -> str:
    """The text of one line without its line end.

    Raises:
        Fault: the bytes are not UTF-8, or one of them is NUL.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Fault("not UTF-8 text", error.reason, "save the file as UTF-8") from None
    if "\0" in text:
        raise Fault("NUL byte", "text does not hold any", "save the file as UTF-8 text")
    return text.rstrip("\r\n")


def read_lines(path: str | Path, report: RecordReport) -> Iterator[tuple[int, str]]:
    """Yield (1-based line number, text without its line end) for every line that is not blank.

    A line that is not UTF-8 or holds a NUL byte, and a compressed file that breaks off, are bad records and are
    counted here. The caller counts the lines that it is given: a header, for example, is no record.

    Raises:
        DataError: the file is missing, a directory or empty; or a bad record under "stop".
    """
    with open_data_file(path) as file:
        for line, _, raw in read_raw_lines(file, path, report):
            if not raw.strip():
                continue
            try:
                text = text_line(raw)
            except Fault as fault:
                report.see()
                report.reject(path, line, fault)
                continue
            yield line, text


class _NotJson(ValueError):
    """NaN and the infinities, which Python's parser lets through and JSON does not have."""


def _refuse_constant(name: str) -> NoReturn:
    raise _NotJson(f"{name} is not JSON")


STRICT_JSON = json.JSONDecoder(parse_constant=_refuse_constant)


def object_of(value: object) -> dict[str, Any]:
    """`value` if it is a JSON object; `Fault` otherwise."""
    if not isinstance(value, dict):
        raise Fault("not a JSON object", f"found {quoted(value)}", "write one {...} for each record")
    return value


def read_json_lines(path: str | Path, report: RecordReport) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a file with one JSON object a line; each one is counted as seen.

    Raises:
        DataError: as `read_lines`.
    """
    for line, text in read_lines(path, report):
        report.see()
        try:
            record = object_of(STRICT_JSON.decode(text))
        except Fault as fault:
            report.reject(path, line, fault)
        # ValueError is broken JSON, NaN, or an integer too long to read; RecursionError is very deep nesting.
        except (ValueError, RecursionError) as error:
            report.reject(path, line, Fault("broken JSON", str(error)))
        else:
            yield line, record


def text_of(value: object, what: str) -> str:
    """`value` if it is text that can be written as UTF-8; `what` names the field in the fault.

    Raises:
        Fault: the value is missing (None), no string, or holds half a surrogate pair.
    """
    if value is None:
        raise Fault(f"missing {what}")
    if not isinstance(value, str):
        raise Fault(f"{what} is not text", f"found {quoted(value)}")
    if value.isascii():  # known without a look at the text, and most texts are
        return value
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        # JSON can spell such a string ("\ud800"); tokenizers and Arrow fail on it much later.
        raise Fault(f"{what} is not valid Unicode", f"found {quoted(value)}") from None
    return value


def filled_text_of(value: object, what: str) -> str:
    """`text_of`, and not blank either.

    Raises:
        Fault: as `text_of`, or the text is empty or white space alone.
    """
    text = text_of(value, what)
    if not text.strip():
        raise Fault(f"empty {what}")
    return text


def add_to_fingerprint(digest: _Hash, *texts: str) -> None:
    """Add `texts` to a running sha256; lengths go in too, so that ("ab", "c") and ("a", "bc") differ."""
    for text in texts:
        encoded = text.encode("utf-8")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
