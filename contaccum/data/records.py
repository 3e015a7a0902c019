"""Records of data files: opened one way, read one at a time, and none lost without a word.

Plain or gzip, UTF-8 with or without a byte-order mark, LF or CRLF. A bad record is either the one line that stops the
run or a counted entry of the report: records seen = used + reported. What a record must hold is for readers to say:
they raise `Fault`, and this module makes one or the other of it.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, NoReturn, TypeVar

from contaccum.errors import DataError, check_choice
from contaccum.files import AnyPath

OnBadRecord = Literal["stop", "skip"]
ON_BAD_RECORD: tuple[OnBadRecord, ...] = ("stop", "skip")

ENTRIES = 10_000  # a file of nothing but bad records must not fill the memory; the counts stay exact
LONGEST_LINE = 1 << 26  # characters: nor must a file without line ends
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UNREADABLE = (OSError, EOFError, zlib.error)

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


class BadRecord(NamedTuple):
    """One record that was left out: the file, its line (or row, or number) from 1, and the kind of fault."""

    file: str
    line: int
    reason: str


class RecordReport:
    """What became of every record: seen = used + reported.

    Args:
        on_bad_record: "stop" raises `DataError` at the first bad record; "skip" leaves bad records out and counts them.

    Attributes:
        seen, used, reported: numbers of records. A blank line and the header of a table are no records.
        entries: the first `ENTRIES` bad records as `BadRecord`.
        by_reason, by_file: bad records for each reason and each file; these are complete.
        notes: records for each remark that is no fault (a pair that occurs twice, for example).

    Raises:
        ConfigError: `on_bad_record` is neither.
    """

    def __init__(self, on_bad_record: OnBadRecord = "stop") -> None:
        check_choice("on_bad_record", on_bad_record, ON_BAD_RECORD)
        self.on_bad_record = on_bad_record
        self.seen = self.used = self.reported = 0
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

    def reject(self, file: AnyPath, line: int, fault: Fault, count: int = 1) -> None:
        """Stop at a bad record, or leave it out and count it; `count` of them where one fault takes several.

        Raises:
            DataError: under "stop"; one line, `FILE:LINE: what is wrong (the mend)`.
        """
        if self.on_bad_record == "stop":
            mend = f"{fault.mend}, or leave such records out with --on_bad_record skip"
            raise broken(file, line, Fault(fault.reason, fault.detail, mend)) from None
        self.leave_out(file, fault.reason, count)
        if len(self.entries) < ENTRIES:
            self.entries.append(BadRecord(str(file), line, fault.reason))

    def leave_out(self, file: AnyPath, reason: str, count: int = 1) -> None:
        """Count records as reported that nothing may be wrong with."""
        self.reported += count
        self.by_reason[reason] += count
        self.by_file[str(file)] += count

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold, for `restore`."""
        entries = [list(entry) for entry in self.entries]
        return {name: value for name, value in vars(self).items() if name != "on_bad_record"} | {"entries": entries}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Become what `to_dict` gave."""
        self.seen, self.used, self.reported = state["seen"], state["used"], state["reported"]
        self.entries = [BadRecord(*entry) for entry in state["entries"]]
        self.by_reason, self.by_file, self.notes = (Counter(state[name]) for name in ("by_reason", "by_file", "notes"))

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


def passage_text(title: str, text: str, title_separator: str = " ") -> str:
    """(title + separator + text).strip(), as BEIR's encoders join them; no separator beside an empty half."""
    if not title.strip():
        return text.strip()
    return (title + title_separator + text).strip() if text.strip() else title.strip()


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


def object_of(value: object) -> dict[str, Any]:
    """`value` if it is a JSON object; raises `Fault`."""
    if not isinstance(value, dict):
        raise Fault("not a JSON object", f"found {quoted(value)}", "write one {...} for each record")
    return value


# Rows of files: (line or number from 1, what is there, or the `Fault` of it) ------------------------------------------


def take(
    path: AnyPath, rows: Iterable[tuple[int, Any]], parse: Callable[[Any], T], report: RecordReport
) -> Iterator[tuple[int, T]]:
    """(line, `parse` of the row) of every row that can be used; all are counted in the report, the others rejected.

    Raises:
        DataError: a bad record under "stop".
    """
    for line, row in rows:
        report.see()
        try:
            if isinstance(row, Fault):
                raise row
            value = parse(row)
        except Fault as fault:
            report.reject(path, line, fault)
            continue
        report.accept()
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
    """Some 64 KB of a file, unpacked, from its first character that is not blank; less where the file breaks off."""
    head = b""
    with open_data_file(path) as file, suppress(*UNREADABLE):  # the reader meets the same damage and can name its line
        while len(head) < 1 << 16 and (piece := file.read1(1 << 16)):
            head = head + piece if head.strip() else piece.removeprefix(BYTE_ORDER_MARK)
    return head.lstrip()


def open_text(file: gzip.GzipFile | IO[bytes]) -> io.TextIOWrapper:
    """The text of an open file; bytes that are not UTF-8 become characters that `checked_line` refuses."""
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="\n")


def read_lines(path: AnyPath) -> Iterator[tuple[int, Any]]:
    """(line number, text without its line end) of every line that is not blank; a file that breaks off is one `Fault`.

    Raises:
        DataError: the file is missing, a directory or empty, or a line has more than `LONGEST_LINE` characters.
    """
    line, anything = 0, False
    with open_data_file(path) as file:
        text = open_text(file)
        while True:
            try:
                content = text.readline(LONGEST_LINE)
            except UNREADABLE as error:
                yield line + 1, breaks_off(error)
                return
            line += 1
            if len(content) >= LONGEST_LINE:
                what = Fault("line too long", f"{LONGEST_LINE} characters", "write one record a line")
                raise broken(path, line, what)
            if not content:
                break
            if content.strip():
                anything = True
                try:
                    yield line, checked_line(content)
                except Fault as fault:
                    yield line, fault
    if not anything:
        refuse_empty(path)


_NOT_TEXT = re.compile("[\0\udc80-\udcff]")


def checked_line(text: str) -> str:
    """A line without its line end; raises `Fault` when its bytes are not UTF-8, or one of them is NUL."""
    found = _NOT_TEXT.search(text)
    if found:
        raise Fault("NUL byte" if found.group() == "\0" else "not UTF-8 text", mend="save the file as UTF-8 text")
    return text.rstrip("\r\n")


def breaks_off(error: BaseException) -> Fault:
    """The fault of a file that cannot be read to its end."""
    return Fault("the file breaks off", str(error), "get the file again: it is damaged or incomplete")


def refuse_empty(path: AnyPath) -> NoReturn:
    """Raise `DataError`: an empty file is never what was meant, whatever `on_bad_record` says."""
    raise DataError(one_line(f"{path}: the file is empty (get it again, or name another)"))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")  # NaN and the infinities, which Python's parser lets through


_STRICT_JSON = json.JSONDecoder(parse_constant=_refuse_constant)


def read_json_lines(path: AnyPath) -> Iterator[tuple[int, Any]]:
    """(line number, object) of a file with one JSON object a line; raises as `read_lines`."""
    for line, text in read_lines(path):
        try:
            yield line, text if isinstance(text, Fault) else object_of(_STRICT_JSON.decode(text))
        except Fault as fault:
            yield line, fault
        # ValueError is broken JSON, NaN, or an integer too long to read; RecursionError is very deep nesting.
        except (ValueError, RecursionError) as error:
            yield line, Fault("broken JSON", str(error))


def read_json_array(path: AnyPath) -> Iterator[tuple[int, Any]]:
    """(number of the record, object) of a file that is one JSON array of objects; one is in memory at a time.

    Raises:
        DataError: the file is missing, a directory, empty, or no array; or broken JSON: what comes after it cannot be
            told apart.
    """
    import ijson

    start, number = first_bytes(path), 0
    with open_data_file(path) as file:
        try:
            if file.read(len(BYTE_ORDER_MARK)) != BYTE_ORDER_MARK:
                file.seek(0)
            if not start:
                refuse_empty(path)
            if not start.startswith(b"["):
                raise DataError(one_line(f"{path}:1: not a JSON array (write [...] around it)"))
            for number, value in enumerate(ijson.items(file, "item", use_float=True), start=1):
                try:
                    yield number, object_of(value)
                except Fault as fault:
                    yield number, fault
        except (ijson.JSONError, *UNREADABLE) as error:
            reason = "broken JSON" if isinstance(error, ijson.JSONError) else "the file breaks off"
            what = error.args[0] if error.args else ""
            what = (what.decode("utf-8", "replace") if isinstance(what, bytes) else str(error)).split("\n")[0]
            mend = "get the file again: nothing after the break can be read"
            raise broken(path, number + 1, Fault(f"{reason} in record {number + 1}", what, mend)) from error


def name_of(path: AnyPath) -> str:
    """The name of a file without its extension, of a folder, or of a dataset of the hub."""
    # resolve(), so that "." has a name too.
    return re.sub(r"(\.(jsonl|ndjson|json|csv|tsv|parquet))?(\.gz)?$", "", Path(path).resolve().name)
