"""One call for every format of training data: from a path or a name to `Record`s, one at a time.

The format is told from the content. What a record holds is decided here and in `columns`; how files are opened and bad
records counted, in `records` and `tables`; which positives and negatives an epoch trains on, above.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from contaccum.data.beir import is_beir_folder, read_judged_pairs
from contaccum.data.columns import (
    NEGATIVE_FIELDS,
    POSITIVE_FIELDS,
    QUERY_FIELDS,
    Fields,
    Record,
    RecordRules,
    parse_columns,
)
from contaccum.data.msmarco import is_msmarco_folder, read_msmarco
from contaccum.data.records import (
    Fault,
    RecordReport,
    filled_text_of,
    first_bytes,
    one_line,
    quoted,
    read_json_array,
    read_json_lines,
    read_lines,
    take,
)
from contaccum.data.tables import (
    DELIMITERS,
    csv_rows,
    has_known_columns,
    hub_rows,
    load_hub,
    parquet_rows,
    split_header,
)
from contaccum.errors import ConfigError, DataError, check_choice
from contaccum.files import AnyPath, fingerprint

DataFormat = Literal["beir", "dpr", "tevatron", "msmarco", "pairs", "triplets", "csv", "parquet", "hub"]
DATA_FORMATS: tuple[DataFormat, ...] = (
    *("beir", "dpr", "tevatron", "msmarco"),
    *("pairs", "triplets", "csv", "parquet", "hub"),
)
# Those whose fields a column mapping can name.
NAMED_COLUMNS: tuple[DataFormat, ...] = ("pairs", "triplets", "csv", "parquet", "hub")
# A record of these is a query with all its judgements, each of which is a pair. There is no place for a topic.
JUDGED: tuple[DataFormat, ...] = ("beir", "msmarco")

_FORMAT = 1  # to be raised when the readers or the cache change, so that older files are not taken for new


def read_records(
    path: AnyPath,
    data_format: DataFormat | None = None,
    split: str = "train",
    columns: Mapping[str, str] | None = None,
    report: RecordReport | None = None,
    title_separator: str = " ",
    num_negatives: int | None = None,
    topic_column: str | None = None,
    streaming: bool = False,
) -> Iterator[Record]:
    """Yield the records of `path`, each a query with its positives and negatives in the order of the file.

    The formats are described in docs/data.md.

    Args:
        path: a file, plain or gzip (parquet: plain), a folder, or the name of a Hugging Face dataset.
        data_format: one of `DATA_FORMATS`; None: told from the content.
        split: of a BEIR or MS MARCO folder, or of a dataset; a file has no splits, and there it does nothing.
        columns: {"query": name, "positive": name, "negatives": name, "title": name}, or some of them, for records
            with named fields; the others are found by their usual names.
        report: counts go here; when the records are read to their end, seen = used + reported. None: a new report,
            which stops at the first bad record.
        title_separator: between a title and its text.
        num_negatives: the first so many of each record; None: all; 0: none, and none is checked.
        topic_column: a field with a text or number in every record of a file: its topic.
        streaming: do not store a dataset of the hub on disk, but fetch it as it is read.

    Raises:
        ConfigError: at once: an unknown format, or `columns` that cannot be used.
        DataError: at once where the format cannot be told; while reading, where the source or, under "stop", a
            record cannot be used.
    """
    source = source_of(path, data_format, split, columns, RecordRules(title_separator, num_negatives, topic_column))
    return (record for _, record in source.records(RecordReport() if report is None else report, streaming))


def source_of(
    path: AnyPath,
    data_format: DataFormat | None = None,
    split: str = "train",
    columns: Mapping[str, str] | None = None,
    rules: RecordRules = RecordRules(),  # noqa: B008  # frozen
) -> Source:
    """Where records come from; arguments and what is raised at once as of `read_records`."""
    mapping = parse_columns(columns)
    check_choice("data_format", data_format, (None, *DATA_FORMATS))
    found = data_format or sniff_format(path, mapping)
    if mapping and found not in NAMED_COLUMNS:
        mend = f"drop data_columns, or set data_format to one of {', '.join(NAMED_COLUMNS)}"
        raise ConfigError(f"data_columns is set, but data_format={found} has names of its own: {path} ({mend})")
    if rules.topic_column is not None and found in JUDGED:
        raise ConfigError(
            f"topic_column={rules.topic_column}, but data_format={found} has no topics: {path} (write it as pairs)"
        )
    return Source(Path(path), found, split, mapping, rules)


@dataclass(frozen=True)
class Source:
    """A file, folder or data set of a known format, and how its records are read."""

    path: Path
    data_format: DataFormat
    split: str
    columns: Mapping[str, str]
    rules: RecordRules

    def records(self, report: RecordReport, streaming: bool = False) -> Iterator[tuple[int, Record]]:
        """Records, each with the line (row, number) at which it starts; 0 where that is not known."""
        path, rules, fields = self.path, self.rules, Fields(self.columns)
        if self.data_format == "beir":
            for query, positives in read_judged_pairs(path, self.split, report, rules.title_separator):
                yield 0, Record(query, positives, [])
            return
        if self.data_format == "msmarco" and not path.is_file():
            for line, query, positives, negatives in read_msmarco(path, self.split, rules.num_negatives, report):
                yield line, Record(query, positives, negatives)
            return
        needed = partial(fields.needed, topic_column=rules.topic_column)
        parse: Callable[[Any], Record] = partial(fields.read, rules=rules)
        if self.data_format == "dpr":
            rows, parse = read_json_array(path), partial(_dpr_record, rules=rules, report=report)
        elif self.data_format == "tevatron":
            rows, parse = read_json_lines(path), partial(_tevatron_record, rules=rules)
        elif self.data_format == "msmarco":
            rows, parse = read_lines(path), partial(_text_triple, rules=rules)
        elif self.data_format == "csv":
            rows = csv_rows(path, fields, needed)
        elif self.data_format == "parquet":
            rows = parquet_rows(path, needed)
        elif self.data_format == "hub":
            rows = hub_rows(str(path), self.split, needed, streaming)
        else:
            rows = read_json_lines(path)
        yield from take(path, rows, parse, report)
        fields.refuse_unseen(path)

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
        settings = (self.data_format, self.split, dict(self.columns), astuple(self.rules))
        return fingerprint(_FORMAT, str(self.path) if not facts else "", facts, settings, *about)


def _dpr_record(record: dict[str, Any], rules: RecordRules, report: RecordReport) -> Record:
    """A record without hard negatives falls back on its others (passages of other questions), as DPR's trainer does."""
    if "question" not in record and "positive_ctxs" not in record:
        mend = "other records than DPR's go one a line, as jsonl, without [ and ]"
        raise Fault("missing question", f"its fields are {quoted(', '.join(record), 200)}", mend)
    query = filled_text_of(record.get("question"), "question")
    positives = rules.positives(_list_of(record, "positive_ctxs", required=True), "positive_ctxs")
    field, listed = "hard_negative_ctxs", _list_of(record, "hard_negative_ctxs")
    fallen_back = not listed and rules.num_negatives != 0 and bool(_list_of(record, "negative_ctxs"))
    if fallen_back:
        field, listed = "negative_ctxs", _list_of(record, "negative_ctxs")
    found = Record(query, positives, rules.negatives(listed, field), rules.topic(record))
    report.note("records without hard_negative_ctxs, their negative_ctxs taken", int(fallen_back))
    return found


def _tevatron_record(record: dict[str, Any], rules: RecordRules) -> Record:
    positives = rules.positives(_list_of(record, "positive_passages", required=True), "positive_passages")
    negatives = rules.negatives(_list_of(record, "negative_passages"), "negative_passages")
    return Record(filled_text_of(record.get("query"), "query"), positives, negatives, rules.topic(record))


def _list_of(record: dict[str, Any], what: str, required: bool = False) -> list[Any]:
    value = record.get(what)
    if value is None and required:
        raise Fault(f"missing {what}")
    if not isinstance(value, list | None):
        raise Fault(f"{what} is not a list", f"found {quoted(value)}")
    return value or []


def _text_triple(line: str, rules: RecordRules) -> Record:
    cells = line.split("\t")
    if len(cells) != 3:
        mend = "write query, positive and negative, separated by tabs"
        raise Fault("not three columns", f"found {len(cells)}", mend)
    if all(cell.strip().isdecimal() for cell in cells):
        mend = "name the folder that holds it beside collection.tsv, queries.SPLIT.tsv and qrels.SPLIT.tsv"
        raise Fault("ids where texts are expected", mend=mend)
    query = filled_text_of(cells[0], "query")
    return Record(query, rules.positives(cells[1:2], "positive"), rules.negatives(cells[2:], "negative"))


# Telling formats apart ------------------------------------------------------------------------------------------------

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.-]+)?")
_FILE_SUFFIXES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".gz", ".zip", ".yaml"}
_TEVATRON = re.compile(rb'(?<!\\)"positive_passages"\s*:')
_FOREIGN = (
    (b"PK\x03\x04", "a zip archive (unpack it first)"),
    (b"BZh", "a bzip2 file (unpack it first)"),
    (b"\xfd7zXZ", "an xz file (unpack it first)"),
    (b"(\xb5/\xfd", "a zstandard file (unpack it first)"),
    (b"\xff\xfe", "UTF-16 text (save it as UTF-8)"),
    (b"\xfe\xff", "UTF-16 text (save it as UTF-8)"),
)


def sniff_format(source: AnyPath, columns: Mapping[str, str] | None = None) -> DataFormat:
    """The format of a file, a folder or a dataset of the hub; "pairs" stands for "triplets" too.

    Args:
        columns: {role: name}, by which a table is known whose columns have other than the usual names.

    Raises:
        DataError: nothing is there, or it is in none of the formats.
    """
    path = Path(source)
    suffixes = set(path.suffixes)
    if os.path.isdir(path):
        return _sniff_folder(path)
    if not os.path.exists(path) and _HUB_NAME.fullmatch(str(source)) and not _FILE_SUFFIXES & suffixes:
        return "hub"
    head = first_bytes(path)
    if head.startswith(b"PAR1") or ".parquet" in suffixes:
        return "parquet"
    foreign = next((what for magic, what in _FOREIGN if head.startswith(magic)), None)
    if head[257:262] == b"ustar":
        foreign = "a tar archive (unpack it first)"
    if foreign:
        raise DataError(one_line(f"{path}: is {foreign}"))
    # "[" may also begin a bad line of a jsonl file; an array of records goes on with an object or a new line.
    if re.match(rb"\[[ \t]*([{\r\n]|$)", head):
        return "dpr"
    if head.startswith(b"{"):
        return "pairs" if columns or not _TEVATRON.search(head) else "tevatron"
    if {".jsonl", ".ndjson"} & suffixes:
        return "pairs"
    if head.startswith(b"[") or (not head and ".json" in suffixes):
        return "dpr"
    return _sniff_text(path, head.decode("utf-8", errors="replace"), columns or {})


def _sniff_folder(path: Path) -> DataFormat:
    if is_beir_folder(path):
        return "beir"
    if is_msmarco_folder(path):
        return "msmarco"
    if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return "hub"
    raise DataError(
        one_line(
            f"{path}: a folder without corpus.jsonl (BEIR), collection.tsv (MS MARCO) or a dataset that save_to_disk "
            "wrote (name such a folder, or a file of training pairs)"
        )
    )


def _sniff_text(path: Path, start: str, columns: Mapping[str, str]) -> DataFormat:
    line = start.split("\n", 1)[0].rstrip("\r")
    cells = {cell.strip().lower() for cell in re.split("[,;\t]", line)}
    known = bool(cells & {*QUERY_FIELDS, *POSITIVE_FIELDS, *NEGATIVE_FIELDS, *columns.values()})
    try:
        if has_known_columns(split_header(line, columns)[1], columns):
            return "csv"
    except Fault:
        pass
    # Three texts, none of which is a name of ours, are no header.
    if line.count("\t") == 2 and not known:
        return "msmarco"
    if {".csv", ".tsv"} & set(path.suffixes) or (known and any(delimiter in line for delimiter in DELIMITERS)):
        return "csv"
    if not start:
        return "pairs"  # its reader refuses an empty file, in the same words for every format
    raise DataError(
        one_line(
            f"{path}:1: neither JSON lines nor a JSON array; it starts with {quoted(start[:20])}, which is no header "
            f"of a table either (convert it, or set --data_format to one of {', '.join(DATA_FORMATS)})"
        )
    )
