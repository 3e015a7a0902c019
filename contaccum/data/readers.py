"""One call for every format of training data: from a path or a name to `Record`s, one at a time.

The format is told from the content, and the fields of a record by their usual names or by a mapping. How files are
opened and bad records counted, is for `records`; which positives and negatives an epoch trains on, for `sampling`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from contaccum.data.beir import is_beir_folder, read_judged_pairs
from contaccum.data.msmarco import is_msmarco_folder, read_msmarco
from contaccum.data.records import (
    Fault,
    RecordReport,
    arrow_rows,
    csv_rows,
    filled_text_of,
    first_bytes,
    one_line,
    parquet_rows,
    passage_text,
    quoted,
    read_json_array,
    read_json_lines,
    read_lines,
    split_header,
    take,
    text_of,
)
from contaccum.errors import ConfigError, DataError, check_choice, closest
from contaccum.files import AnyPath, fingerprint

DataFormat = Literal["beir", "dpr", "tevatron", "msmarco", "pairs", "triplets", "csv", "parquet", "hub"]
DATA_FORMATS: tuple[DataFormat, ...] = (
    *("beir", "dpr", "tevatron", "msmarco"),
    *("pairs", "triplets", "csv", "parquet", "hub"),
)
# A record of these is a query with all its judgements, each of which is a pair; nor have they names of fields.
JUDGED: tuple[DataFormat, ...] = ("beir", "msmarco")

# Usual names, in order of preference.
QUERY_FIELDS = ("query", "anchor", "question")
POSITIVE_FIELDS = (
    *("positive", "positives", "positive_passages", "positive_ctxs"),
    *("passage", "answer", "text", "document", "pos"),
)
NEGATIVE_FIELDS = (
    *("negatives", "negative", "negative_passages", "hard_negatives", "hard_negative_ctxs", "neg"),
    "negative_ctxs",  # DPR's, of other questions: what its own trainer falls back on
)
_NUMBERED = re.compile(r"negative_[1-9][0-9]*")
ROLES = ("query", "positive", "negatives", "title")

_CACHED = 2  # to be raised when the readers or the cache change, so that older files are not taken for new


class Record(NamedTuple):
    """A query and its passages, each title, space, text, in the order of the file."""

    query: str
    positives: list[str]
    negatives: list[str]


def read_records(
    path: AnyPath,
    data_format: DataFormat | None = None,
    split: str = "train",
    columns: Mapping[str, str] | None = None,
    report: RecordReport | None = None,
    num_negatives: int | None = None,
    streaming: bool = False,
) -> Iterator[Record]:
    """Yield the records of `path`, each a query with its positives and negatives in the order of the file.

    The formats are described in docs/data.md.

    Args:
        path: a file, plain or gzip (parquet: plain), a folder, or the name of a Hugging Face dataset.
        data_format: one of `DATA_FORMATS`; None: told from the content.
        split: of a BEIR or MS MARCO folder, or of a dataset; a file has no splits, and there it does nothing.
        columns: {"query": name, "positive": name, "negatives": name, "title": name}, or some of them; the others are
            found by their usual names.
        report: counts go here; when the records are read to their end, seen = used + reported. None: a new report,
            which stops at the first bad record.
        num_negatives: the first so many of each query's triples in an MS MARCO folder; None: all.
        streaming: do not store a dataset of the hub on disk, but fetch it as it is read.

    Raises:
        ConfigError: at once: an unknown format, or `columns` that cannot be used.
        DataError: at once where the format cannot be told; while reading, where the source or, under "stop", a
            record cannot be used.
    """
    source = source_of(path, data_format, split, columns, num_negatives)
    return (record for _, record in source.records(RecordReport() if report is None else report, streaming))


def source_of(
    path: AnyPath,
    data_format: DataFormat | None = None,
    split: str = "train",
    columns: Mapping[str, str] | None = None,
    num_negatives: int | None = None,
) -> Source:
    """Where records come from; arguments and what is raised at once as of `read_records`."""
    mapping = parse_columns(columns)
    check_choice("data_format", data_format, (None, *DATA_FORMATS))
    found = data_format or sniff_format(path, mapping)
    if mapping and found in JUDGED:
        raise ConfigError(f"data_columns is set, but data_format={found} has no fields: {path} (drop data_columns)")
    return Source(Path(path), found, split, mapping, num_negatives)


@dataclass(frozen=True)
class Source:
    """A file, folder or data set of a known format, and how its records are read."""

    path: Path
    data_format: DataFormat
    split: str
    columns: Mapping[str, str]
    num_negatives: int | None = None

    def records(self, report: RecordReport, streaming: bool = False) -> Iterator[tuple[int, Record]]:
        """Records, each with the line (row, number) at which it starts; 0 where that is not known."""
        if self.data_format == "beir":
            for query, positives in read_judged_pairs(self.path, self.split, report):
                yield 0, Record(query, positives, [])
        elif self.data_format == "msmarco" and self.path.is_dir():
            for line, query, positives, negatives in read_msmarco(self.path, self.split, self.num_negatives, report):
                yield line, Record(query, positives, negatives)
        elif self.data_format == "msmarco":
            yield from take(self.path, read_lines(self.path), _text_triple, report)
        else:
            fields = Fields(self.columns)
            yield from take(self.path, self._rows(fields, streaming), fields.read, report)
            fields.refuse_unseen(self.path)

    def _rows(self, fields: Fields, streaming: bool) -> Iterator[tuple[int, Any]]:
        if self.data_format == "parquet":
            return parquet_rows(self.path, fields.wanted)
        if self.data_format == "hub":
            dataset = load_hub(str(self.path), self.split, streaming)
            # Of a stream they may be known only when something has been read.
            names = fields.wanted(list(dataset.column_names or next(iter(dataset), ())))
            return arrow_rows(self.path, dataset.select_columns(names).with_format("arrow").iter(batch_size=1000))
        readers = {"dpr": read_json_array, "csv": csv_rows}
        return readers.get(self.data_format, read_json_lines)(self.path)

    def key(self, *about: Any) -> str:
        """Another one when a file's path, size or time changes, or a setting. sha256, in hex."""
        files = [self.path]
        if self.path.is_dir():
            files = sorted(path for path in self.path.rglob("*") if path.is_file())
        elif self.data_format == "hub" and "stream" not in about:
            # What datasets has fetched: other files when it changes on the hub.
            files = [Path(file["filename"]) for file in load_hub(str(self.path), self.split).cache_files]
        stats = [(str(path.resolve()), path.stat()) for path in files if path.exists()]
        facts = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats]
        settings = (self.data_format, self.split, dict(self.columns), self.num_negatives)
        return fingerprint(_CACHED, str(self.path) if not facts else "", facts, settings, *about)


def load_hub(source: str, split: str, streaming: bool = False) -> Any:
    """A Hugging Face dataset: `NAME` or `NAME:CONFIG` on the hub, or a folder that `save_to_disk` wrote.

    Raises:
        DataError: it cannot be loaded, or has no such split. Code that comes with a dataset is never run.
    """
    import datasets

    try:
        if not os.path.isdir(source):
            name, _, config = source.partition(":")
            return datasets.load_dataset(name, config or None, split=split, streaming=streaming)
        found = datasets.load_from_disk(source)
        return found[split] if isinstance(found, dict) else found
    except Exception as error:  # the hub's, the network's, the builders' and Arrow's own have no common ancestor
        what = f"as a Hugging Face dataset with split {quoted(split)} it cannot be loaded: {one_line(str(error))[:300]}"
        what = what if os.path.isdir(source) else f"no such file or folder, and {what}"
        mend = "check the path, or the name as NAME or NAME:CONFIG, and the split"
        raise DataError(one_line(f"{source}: {what} ({mend})")) from error


def _text_triple(line: str) -> Record:
    cells = line.split("\t")
    if len(cells) != 3:
        mend = "write query, positive and negative, separated by tabs"
        raise Fault("not three columns", f"found {len(cells)}", mend)
    if all(cell.strip().isdecimal() for cell in cells):
        mend = "name the folder that holds it beside collection.tsv, queries.SPLIT.tsv and qrels.SPLIT.tsv"
        raise Fault("ids where texts are expected", mend=mend)
    query, positive, negative = (filled_text_of(*pair) for pair in zip(cells, ROLES, strict=False))
    return Record(query, [positive.strip()], [negative.strip()])


# Records of named fields ---------------------------------------------------------------------------------------------


def parse_columns(given: Mapping[str, Any] | Sequence[str] | None) -> dict[str, str]:
    """A column mapping, from a mapping, or from ``ROLE=NAME`` words or one word that is a JSON object.

    Returns:
        {role: name of the column}; roles are query, positive, negatives and title. Empty for None.

    Raises:
        ConfigError: an unknown role, or a name that is no text.
    """
    words = [given] if isinstance(given, str) else given or ()
    if not isinstance(words, Mapping) and len(words) == 1 and words[0].startswith("{"):
        try:
            words = json.loads(words[0])
        except ValueError as error:
            raise ConfigError(f"data_columns: {quoted(words[0])} is not a JSON object ({error})") from error
    columns = dict(words if isinstance(words, Mapping) else (word.partition("=")[::2] for word in words))
    for role, name in columns.items():
        if role not in ROLES:
            raise ConfigError(f"data_columns: {quoted(role)} is unknown (use {', '.join(ROLES)}){closest(role, ROLES)}")
        if not isinstance(name, str) or not name:
            raise ConfigError(f"data_columns: {role} must name a column, as {role}=NAME, got {quoted(name)}")
    return columns


class Fields:
    """Finds the parts of the records of one file by the names of their fields.

    The first record that has a query and a positive decides which they are for its whole file. Were each record read by
    itself, one without "positive" would silently pass for one with "text".

    Args:
        columns: {role: name} as `parse_columns` gives it; roles that it leaves out are found by the usual names.
    """

    def __init__(self, columns: Mapping[str, str] | None = None) -> None:
        self._mapped = dict(columns or {})
        self._title = self._mapped.get("title", "title")
        self._found: tuple[str, str] | None = None
        # A mapped name that no record has is a mistake, but one record without negatives or title is not.
        self._unseen = {role: name for role, name in self._mapped.items() if role in ("negatives", "title")}

    def settle(self, names: Collection[str]) -> tuple[str, str]:
        """The fields of query and positive, chosen among `names` unless that was done.

        Raises:
            Fault: one of the two is not there.
        """
        if self._found is None:
            query = self._choose("query", QUERY_FIELDS, names)
            self._found = query, self._choose("positive", POSITIVE_FIELDS, names, query)
        return self._found

    def wanted(self, names: list[str]) -> list[str]:
        """Those of a table's columns that are read; all where query or positive are missing, for records to say so."""
        try:
            read = {*self.settle(names), self._title, *self._negative_fields(names)}
        except Fault:
            return names
        return [name for name in names if name in read]

    def read(self, record: Mapping[str, Any]) -> Record:
        """The record of these fields.

        Raises:
            Fault: what is missing, empty or no text.
        """
        query_field, positive_field = self.settle(record)
        self._unseen = {role: name for role, name in self._unseen.items() if name not in record}
        query = filled_text_of(record.get(query_field), query_field)
        title = None if self._title in (query_field, positive_field) else record.get(self._title)
        positives = [_passage(value, positive_field, title) for value in _listed(record.get(positive_field))]
        if not positives:
            raise Fault(f"empty {positive_field}")
        negatives: list[str] = []
        for name in self._negative_fields(record):
            # All numbered negatives or, where there are none, those of the first field that has any; null is none.
            if record[name] is not None and (not negatives or _NUMBERED.fullmatch(name)):
                negatives += [_passage(value, name) for value in _listed(record[name])]
        return Record(query, positives, negatives)

    def refuse_unseen(self, where: AnyPath) -> None:
        """Raise `DataError` for a mapped name that no record had."""
        for role, name in self._unseen.items() if self._found else ():
            mend = f"correct --data_columns {role}={name}"
            raise DataError(one_line(f"{where}: no record has a field {quoted(name)} ({mend})"))

    def _choose(self, role: str, known: Sequence[str], names: Collection[str], taken: str = "") -> str:
        mapped, others = self._mapped.get(role), {taken, *self._mapped.values()}
        free = [name for name in known if name not in others] if mapped is None else [mapped]
        found = next((name for name in free if name in names), None)
        if found is not None:
            return found
        mend = f"name it one of {', '.join(free)}, or say which it is with --data_columns {role}=NAME"
        mend = mend if mapped is None else f"correct --data_columns {role}={mapped}{closest(mapped, names)}"
        raise Fault(f"missing {role}", f"its fields are {quoted(', '.join(names), 200)}", mend)

    def _negative_fields(self, names: Collection[str]) -> list[str]:
        if "negatives" in self._mapped:
            return [name for name in names if name == self._mapped["negatives"]]
        free = {*names} - {*(self._found or ()), *self._mapped.values()}
        # By number, not by place; a gap (a record without its negative_1) hides none after it.
        numbered = sorted((name for name in free if _NUMBERED.fullmatch(name)), key=lambda name: (len(name), name))
        return [*numbered, *(name for name in NEGATIVE_FIELDS if name in free)]


def _listed(value: object) -> list[Any]:
    """The passages of one field: a list, one passage, or an object of lists, which is how Arrow keeps some lists."""
    if isinstance(value, dict) and isinstance(value.get("text"), list):
        return value["text"]
    return value if isinstance(value, list) else [value]


def _passage(value: object, what: str, title: object = None) -> str:
    """The passage of a text (whose title is `title`), or of an object {"title", "text"}; raises `Fault`."""
    if isinstance(value, dict):
        title, value, what = value.get("title"), value.get("text"), f"{what} text"
    text = filled_text_of(value, what)
    return passage_text("" if title is None else text_of(title, "title"), text)


# Telling formats apart ------------------------------------------------------------------------------------------------

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.-]+)?")
_OF_FOLDERS: tuple[tuple[DataFormat, Callable[[Path], bool]], ...] = (
    ("beir", is_beir_folder),
    ("msmarco", is_msmarco_folder),
    ("hub", lambda path: any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))),
)
# By the first bytes of a file, the names of its header if it has one, and whether a usual or mapped name is among them.
_OF_FILES: tuple[tuple[DataFormat, Callable[[bytes, list[str], bool], object]], ...] = (
    ("parquet", lambda head, names, known: head.startswith(b"PAR1")),
    ("dpr", lambda head, names, known: re.match(rb"\[\s*([{\]]|$)", head)),
    ("tevatron", lambda head, names, known: head.startswith(b"{") and b'"positive_passages"' in head),
    ("pairs", lambda head, names, known: head.startswith(b"{")),
    ("msmarco", lambda head, names, known: not known and head.split(b"\n")[0].count(b"\t") == 2),
    ("csv", lambda head, names, known: known and len(names) > 1),
)
_OF_ENDINGS: dict[str, DataFormat] = {".json": "dpr", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
_OF_ENDINGS |= {".jsonl": "pairs", ".ndjson": "pairs"}


def sniff_format(source: AnyPath, columns: Mapping[str, str] | None = None) -> DataFormat:
    """The format of a file, a folder or a dataset of the hub: by its content, else by the ending of its name.

    "pairs" stands for "triplets" too.

    Args:
        columns: {role: name}, by which a table is known whose columns have other than the usual names.

    Raises:
        DataError: nothing is there, or it is in none of the formats.
    """
    path = Path(source)
    ending = next((suffix for suffix in reversed(path.suffixes) if suffix in _OF_ENDINGS), None)
    if path.is_dir():
        found = next((name for name, matches in _OF_FOLDERS if matches(path)), None)
        what = "a folder without corpus.jsonl (BEIR), collection.tsv (MS MARCO) or a dataset that save_to_disk wrote"
    elif not os.path.exists(path) and ending is None and path.suffix != ".gz" and _HUB_NAME.fullmatch(str(source)):
        return "hub"
    else:
        head = first_bytes(path)
        try:
            names = split_header(head.split(b"\n")[0].decode("utf-8", "replace"))[1]
        except Fault:
            names = []
        usual = {*QUERY_FIELDS, *POSITIVE_FIELDS, *NEGATIVE_FIELDS, *(columns or {}).values()}
        known = not usual.isdisjoint(names)
        found = next((name for name, matches in _OF_FILES if matches(head, names, known)), None)
        found = found or _OF_ENDINGS.get(ending or "") or (None if head else "pairs")  # whose reader refuses nothing
        what = f"neither JSON nor a table with a header that is known; it starts with {quoted(head[:20])}"
    if found is None:
        choices = ", ".join(DATA_FORMATS)
        raise DataError(one_line(f"{path}: {what} (name other data, or set --data_format to one of {choices})"))
    return found
