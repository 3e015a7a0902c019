"""Training data as a `datasets.Dataset`: a query, its positive passage, and hard negatives if asked for.

It reads BEIR folders, DPR's json and pairs or triplets in jsonl, whatever they call their fields, and gives
text columns in the order that sentence-transformers' losses expect. It does not tokenize, shuffle, split or
mine, and it writes nothing to a cache.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from contaccum.data.beir_folder import is_beir_folder, load_beir_folder, passage_text
from contaccum.data.json_array import read_json_array
from contaccum.data.records import (
    BYTE_ORDER_MARK,
    UNREADABLE,
    Fault,
    OnBadRecord,
    RecordReport,
    add_to_fingerprint,
    filled_text_of,
    one_line,
    open_data_file,
    quoted,
    read_json_lines,
    text_of,
)
from contaccum.errors import ConfigError, DataError

if TYPE_CHECKING:
    from datasets import Dataset

DataFormat = Literal["beir", "dpr", "pairs", "triplets"]
DATA_FORMATS: tuple[DataFormat, ...] = ("beir", "dpr", "pairs", "triplets")

# In order of preference; the first file record that has one of each settles it for the whole file.
QUERY_FIELDS = ("query", "anchor", "question")
POSITIVE_FIELDS = ("positive", "passage", "answer", "text", "document", "pos")
NEGATIVE_FIELDS = ("negatives", "negative", "neg")

# (query, positive, negatives, positives beyond the first)
Row = tuple[str, str, list[str], list[str]]

_REPEATED = "pairs that occur again, kept"
_UNREADABLE_FURTHER = "positives beyond the first that are no text, passed over"


@dataclass(frozen=True)
class TrainingData:
    """Training pairs, and where they came from.

    Attributes:
        dataset: text columns "query", "positive", "negative_1" .. "negative_h", in this order.
        report: what became of every record that was read.
        fingerprint: sha256, in hex, of the texts in order, whatever format they were in.
        data_format: "beir", "dpr", "pairs" or "triplets".
        path: the file or folder.
        name: its name without the extension.
        further_positives: {query: positives that its records list beyond the first}, where they were asked for.
    """

    dataset: Dataset
    report: RecordReport = field(repr=False, compare=False)
    fingerprint: str
    data_format: DataFormat
    path: Path
    name: str
    further_positives: dict[str, list[str]] = field(default_factory=dict, repr=False, compare=False)


def load_training_data(
    path: str | Path,
    data_format: DataFormat | None = None,
    split: str = "train",
    num_hard_negatives: int = 0,
    on_bad_record: OnBadRecord = "stop",
    title_separator: str = " ",
    keep_further_positives: bool = False,
) -> TrainingData:
    """Read training pairs with `num_hard_negatives` (h) hard negatives each.

    - "beir": a folder; one row for each judgement above 0 of the split. It has no hard negatives.
    - "dpr": a JSON array of {"question", "positive_ctxs", "hard_negative_ctxs"}; the first positive and the
      first h hard negatives.
    - "pairs", "triplets": one JSON object a line, with one of `QUERY_FIELDS`, one of `POSITIVE_FIELDS`,
      perhaps "title", and negatives in "negative_1", "negative_2" .. or in one of `NEGATIVE_FIELDS` (text or
      a list). Other fields are ignored. Of a list of positives, the first is used.

    A passage is (title + separator + text).strip(). Pairs that occur twice are kept, and noted in the report.

    Args:
        path: a file, plain or gzip, or a BEIR folder.
        data_format: one of `DATA_FORMATS`; None: told from the content.
        split: which qrels of a BEIR folder; a file has no splits, and there it does nothing.
        num_hard_negatives: h. A record with fewer is a bad record; with 0, negatives are not used.
        on_bad_record: "stop" or "skip".
        title_separator: between a title and its text.
        keep_further_positives: also keep the positives that make no row, for who must not take them for negatives.

    Raises:
        ConfigError: an unknown format, or hard negatives from a format that has none.
        DataError: the file or folder cannot be used, a bad record under "stop", or no row is left.
    """
    source = Path(path)
    if data_format is not None and data_format not in DATA_FORMATS:
        raise ConfigError(f"data_format={data_format!r} is unknown (use one of {', '.join(DATA_FORMATS)})")
    if isinstance(num_hard_negatives, bool) or not isinstance(num_hard_negatives, int) or num_hard_negatives < 0:
        raise ConfigError(f"num_hard_negatives={num_hard_negatives!r} is not a number of texts (use 0 or more)")
    report = RecordReport(on_bad_record)
    fields = _Fields()
    found = data_format or sniff_format(source)
    if num_hard_negatives and (found == "beir" or data_format == "pairs"):
        raise ConfigError(
            one_line(
                f"num_hard_negatives={num_hard_negatives}, but data_format={found} has no hard negatives: "
                f"{source} (mine them first, or set num_hard_negatives to 0)"
            )
        )

    if found == "beir":
        rows = _beir_rows(source, split, report, title_separator)
    elif found == "dpr":
        rows = _dpr_rows(source, num_hard_negatives, report, title_separator, keep_further_positives)
    else:
        rows = _jsonl_rows(source, fields, num_hard_negatives, report, title_separator, keep_further_positives)

    names = ["query", "positive", *(f"negative_{i + 1}" for i in range(num_hard_negatives))]
    columns: list[list[str]] = [[] for _ in names]
    digest = hashlib.sha256()
    pairs: set[int] = set()
    further_positives: dict[str, list[str]] = {}
    for query, positive, negatives, further in rows:
        texts = (query, positive, *negatives)
        add_to_fingerprint(digest, *texts)
        for column, text in zip(columns, texts, strict=True):
            column.append(text)
        # A hash is enough to count by, and keeps the texts from being held twice.
        pairs.add(hash((query, positive)))
        if further:
            further_positives.setdefault(query, []).extend(further)
    report.note(_REPEATED, len(columns[0]) - len(pairs))
    report.refuse_if_nothing_left(source, len(columns[0]), "training pairs")
    if data_format is None and found == "pairs" and fields.has_negatives:
        found = "triplets"

    from datasets import Dataset

    return TrainingData(
        dataset=Dataset.from_dict(dict(zip(names, columns, strict=True))),
        report=report,
        fingerprint=digest.hexdigest(),
        data_format=found,
        path=source,
        # resolve(), so that "." has a name too.
        name=re.sub(r"(\.(jsonl|ndjson|json))?(\.gz)?$", "", source.resolve().name),
        further_positives=further_positives,
    )


def sniff_format(path: Path) -> DataFormat:
    """The format of a file or folder from its first line; "pairs" stands for "triplets" too.

    Raises:
        DataError: nothing is there, or it is in none of the formats.
    """
    if os.path.isdir(path):
        if is_beir_folder(path):
            return "beir"
        raise DataError(
            one_line(f"{path}: a folder without corpus.jsonl (name a BEIR folder, or a file of training pairs)")
        )
    head = b""
    with open_data_file(path) as file:
        try:
            while not head.strip() and (piece := file.read1(4096)):
                head = piece.removeprefix(BYTE_ORDER_MARK)
        # The reader meets the same damage and can name its line.
        except UNREADABLE:
            return "dpr" if ".json" in path.suffixes else "pairs"
    start = head.decode("utf-8", errors="replace").strip()
    # "[" may also begin a bad line of a jsonl file; an array of records goes on with an object or a new line.
    if re.match(r"\[[ \t]*([{\r\n]|$)", start):
        return "dpr"
    # A blank file is refused by the reader, in the same words for every format.
    if not start or start.startswith("{") or {".jsonl", ".ndjson"} & set(path.suffixes):
        return "pairs"
    if start.startswith("["):
        return "dpr"
    raise DataError(
        one_line(
            f"{path}:1: neither JSON lines nor a JSON array; it starts with {quoted(start[:20])} (convert it, "
            f"or set --data_format to one of {', '.join(DATA_FORMATS)})"
        )
    )


def _beir_rows(path: Path, split: str, report: RecordReport, title_separator: str) -> Iterator[Row]:
    data = load_beir_folder(path, split, report=report, allow_empty_documents=False)
    for query_id, judged in data.qrels.items():
        for document_id, score in judged.items():
            if score > 0:
                document = data.corpus[document_id]
                passage = passage_text(document["title"], document["text"], title_separator)
                yield data.queries[query_id], passage, [], []
            else:
                report.note("judgements of 0 or less, not a pair")


def _dpr_rows(path: Path, h: int, report: RecordReport, title_separator: str, keep_further: bool) -> Iterator[Row]:
    for line, record in read_json_array(path, report):
        try:
            query = filled_text_of(record.get("question"), "question")
            positives = _list_of(record.get("positive_ctxs"), "positive_ctxs")
            if not positives:
                raise Fault("empty positive_ctxs")
            positive = _passage(positives[0], None, "positive_ctxs", title_separator)
            listed = record.get("hard_negative_ctxs")
            hard = [] if listed is None else _list_of(listed, "hard_negative_ctxs")
            negatives = _first_negatives(hard, h, "hard_negative_ctxs", title_separator)
        except Fault as fault:
            report.reject(path, line, fault)
            continue
        report.accept()
        further = positives[1:] if keep_further else []
        yield query, positive, negatives, _readable(further, None, title_separator, report)


@dataclass
class _Fields:
    """What a jsonl file calls its fields, once a record has told."""

    query: str | None = None
    positive: str | None = None
    has_negatives: bool = False

    def settle(self, record: dict[str, Any]) -> tuple[str, str]:
        """The names of the query and the positive; the first record that has both decides for the file.

        Were each record read by itself, one without "positive" would silently pass for one with "text".
        """
        if self.query is None or self.positive is None:
            query = next((name for name in QUERY_FIELDS if name in record), None)
            positive = next((name for name in POSITIVE_FIELDS if name in record), None)
            found = f"its fields are {quoted(', '.join(record), 200)}"
            if query is None:
                raise Fault("missing query", found, f"name it one of {', '.join(QUERY_FIELDS)}")
            if positive is None:
                raise Fault("missing positive", found, f"name it one of {', '.join(POSITIVE_FIELDS)}")
            self.query, self.positive = query, positive
            self.has_negatives = bool(_listed_negatives(record))
        return self.query, self.positive


def _jsonl_rows(
    path: Path, fields: _Fields, h: int, report: RecordReport, title_separator: str, keep_further: bool
) -> Iterator[Row]:
    for line, record in read_json_lines(path, report):
        try:
            query_field, positive_field = fields.settle(record)
            query = filled_text_of(record.get(query_field), query_field)
            value = record.get(positive_field)
            further: list[Any] = []
            if isinstance(value, list):
                if not value:
                    raise Fault(f"empty {positive_field}")
                value, further = value[0], value[1:] if keep_further else []
            positive = _passage(value, record.get("title"), positive_field, title_separator)
            listed = _listed_negatives(record)
            negatives = _first_negatives(listed, h, "negatives", title_separator)
        except Fault as fault:
            report.reject(path, line, fault)
            continue
        report.accept()
        if listed and not h:
            report.note("negatives not used, num_hard_negatives is 0")
        yield query, positive, negatives, _readable(further, record.get("title"), title_separator, report)


def _list_of(value: object, what: str) -> list[Any]:
    if value is None:
        raise Fault(f"missing {what}")
    if not isinstance(value, list):
        raise Fault(f"{what} is not a list", f"found {quoted(value)}")
    return value


def _listed_negatives(record: dict[str, Any]) -> list[Any]:
    """The negatives of a jsonl record as they stand, checked by whoever uses them; null means none."""
    numbered: list[Any] = []
    while (value := record.get(f"negative_{len(numbered) + 1}")) is not None:
        numbered.append(value)
    if numbered:
        return numbered
    value = next((record[name] for name in NEGATIVE_FIELDS if record.get(name) is not None), [])
    return value if isinstance(value, list) else [value]


def _first_negatives(listed: list[Any], h: int, what: str, title_separator: str) -> list[str]:
    if len(listed) < h:
        mend = "lower num_hard_negatives"
        raise Fault("too few hard negatives", f"{len(listed)} where num_hard_negatives is {h}", mend)
    return [_passage(value, None, what, title_separator) for value in listed[:h]]


def _readable(listed: list[Any], title: object, title_separator: str, report: RecordReport) -> list[str]:
    """The passages among `listed`; the others are noted. Training does not use these, so they spoil no record."""
    passages = []
    for value in listed:
        try:
            passages.append(_passage(value, title, "positive", title_separator))
        except Fault:
            report.note(_UNREADABLE_FURTHER)
    return passages


def _passage(value: object, title: object, what: str, title_separator: str) -> str:
    """A passage that is a text (with its title beside it) or an object {"title", "text"}."""
    if isinstance(value, dict):
        title, value, what = value.get("title"), value.get("text"), f"{what} text"
    text = filled_text_of(value, what)
    return passage_text("" if title is None else text_of(title, "title"), text, title_separator)
