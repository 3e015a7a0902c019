"""One call for every format: training records, passages of a corpus, questions with answers, one at a time.

The format is told from the content, and the fields of a record by their usual names or by a mapping. How files are
opened and bad records counted, is for `records`; which positives and negatives an epoch trains on, for `sampling`.
"""

from __future__ import annotations

import ast
import csv
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from contaccum.data import records
from contaccum.data.beir import beir_file, read_judged_pairs
from contaccum.data.msmarco import read_msmarco
from contaccum.data.records import Fault, OnBadRecord, RecordReport, Rows, one_line, passage_text, quoted, take, text_of
from contaccum.errors import ConfigError, DataError, check_choice
from contaccum.files import AnyPath, Fingerprint, fingerprint

DataFormat = Literal["beir", "dpr", "tevatron", "msmarco", "pairs", "triplets", "csv", "parquet", "hub"]
DATA_FORMATS: tuple[DataFormat, ...] = get_args(DataFormat)
# A record of these is a query with all its judgements, each of which is a pair; nor have they names of fields.
JUDGED: tuple[DataFormat, ...] = ("beir", "msmarco")

FIELDS = {
    "query": ("query", "anchor", "question"),
    "positive": (
        *("positive", "positives", "positive_passages", "positive_ctxs"),
        *("passage", "answer", "text", "document", "pos"),
    ),
    "negatives": (
        *("negatives", "negative", "negative_passages", "hard_negatives", "hard_negative_ctxs", "neg"),
        "negative_ctxs",  # DPR's, of other questions: what its own trainer falls back on
    ),
    "title": ("title",),
    # A teacher's, of all positives and then all negatives; or of each apart, or as the `score` of a passage object.
    "scores": ("scores",),
    "positive_scores": ("positive_scores", "positive_score", "pos_scores"),
    "negative_scores": ("negative_scores", "neg_scores"),
}
"""The usual names of fields by role, the first that is there; `negative_1`, `negative_2` ... are known too."""

_MEND = "contaccum mine --cross_encoder writes some"
_FOLDERS: dict[str, DataFormat] = {"corpus.jsonl": "beir", "collection.tsv": "msmarco"}
_FOLDERS |= {"state.json": "hub", "dataset_dict.json": "hub"}  # of `save_to_disk`
_CACHED = 4  # to be raised when the readers or the cache change, so that older files are not taken for new


class Record(NamedTuple):
    """A query and its passages, each title, space, text, in the order of the file."""

    query: str
    positives: list[str]
    negatives: list[str]
    scores: list[float] | None = None  # a teacher's, of positives and then negatives; None unless each has one


def read_records(
    path: AnyPath,
    data_format: DataFormat | None = None,
    split: str = "train",
    columns: Mapping[str, str] | None = None,
    report: RecordReport | None = None,
    num_negatives: int | None = None,
) -> Iterator[Record]:
    """Yield the records of `path`, each a query with its positives and negatives in the order of the file.

    Args:
        path: a file, plain or gzip (parquet: plain), a folder, or the name of a Hugging Face dataset; see docs/data.md.
        data_format: one of `DATA_FORMATS`; None: told from the content.
        split: of a BEIR or MS MARCO folder, or of a dataset; a file has no splits, and there it does nothing.
        columns: {role: name}, for roles of `FIELDS`; those left out are found by their usual names.
        report: counts go here; None: a new report, which stops at the first bad record.
        num_negatives: the first so many of each query's triples in an MS MARCO folder; None: all.

    Raises:
        ConfigError: at once: an unknown format, or `columns` that cannot be used.
        DataError: at once where the format cannot be told; while reading, where source or record cannot be used.
    """
    return Source(path, data_format, split, columns, num_negatives).records(report or RecordReport())


@dataclass
class Source:
    """A file, folder or data set of a known format; arguments, and what is raised at once, as of `read_records`."""

    path: Any
    data_format: Any = None
    split: str = "train"
    columns: Any = None
    num_negatives: int | None = None
    needs_scores: bool = False  # a record without a teacher's score of each passage cannot be used

    def __post_init__(self) -> None:
        check_choice("data_format", self.data_format, (None, *DATA_FORMATS))
        self.path, self.columns = Path(self.path), parse_columns(self.columns)
        self.data_format = self.data_format or sniff_format(self.path, self.columns)
        if self.columns and self.data_format in JUDGED:
            raise ConfigError(f"data_columns is set, but data_format={self.data_format} has no fields: {self.path}")
        if self.needs_scores and self.data_format in JUDGED:
            raise ConfigError(f"{self.path}: {self.data_format} data have no teacher scores for distill ({_MEND})")

    def records(self, report: RecordReport) -> Iterator[Record]:
        """Every record that can be used."""
        if self.data_format == "beir":
            judged = read_judged_pairs(self.path, self.split, report)
            yield from (Record(query, positives, []) for query, positives in judged)
        elif self.data_format == "msmarco" and self.path.is_dir():
            yield from starmap(Record, read_msmarco(self.path, self.split, self.num_negatives, report))
        elif self.data_format == "msmarco":
            yield from take(self.path, records.read_lines(self.path), _text_triple, report)
        else:
            yield from take(self.path, self._rows(), Fields(self.columns, self.needs_scores).read, report)

    def _rows(self) -> Rows:
        if self.data_format in ("hub", "parquet"):
            return records.arrow_rows(self.path, self._dataset().with_format("arrow").iter(1000))
        readers = {"dpr": records.read_json_array, "csv": records.csv_rows}
        return readers.get(self.data_format, records.read_json_lines)(self.path)

    def _dataset(self) -> Any:
        """What `datasets` reads: `NAME` or `NAME:CONFIG` on the hub, a folder of `save_to_disk`, a parquet file."""
        import datasets

        source = str(self.path)
        try:
            if self.data_format == "parquet":
                records.open_data_file(source).close()
                return datasets.load_dataset("parquet", data_files=source, split="train", streaming=True)
            if not self.path.is_dir():
                name, _, config = source.partition(":")
                return datasets.load_dataset(name, config or None, split=self.split)
            found = datasets.load_from_disk(source)
            return found[self.split] if isinstance(found, dict) else found
        except Exception as error:  # the hub's, the network's, the builders' and Arrow's own have no common ancestor
            what = "" if self.path.exists() else "no such file or folder, and "
            what += f"as a Hugging Face dataset with split {quoted(self.split)} it cannot be loaded: {str(error)[:300]}"
            raise DataError(one_line(f"{source}: {what}")) from error

    def key(self, *about: Any) -> str:
        """Another one when a file's path, size or time changes, or a setting. sha256, in hex."""
        files = [self.path]
        if self.path.is_dir():
            files = sorted(path for path in self.path.rglob("*") if path.is_file())
        elif self.data_format == "hub":
            # What datasets has fetched: other files when it changes on the hub.
            files = [Path(file["filename"]) for file in self._dataset().cache_files]
        facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.exists()]
        settings = ("" if facts else str(self.path), self.data_format, self.split, self.columns, self.num_negatives)
        about = (*about, self.needs_scores)
        return fingerprint(_CACHED, facts, settings, *about)


def sniff_format(source: AnyPath, columns: Mapping[str, str] | None = None) -> DataFormat:
    """The format of a file, a folder or a dataset of the hub, by its content. "pairs" stands for "triplets" too.

    A table is known by the usual names of its columns, or by those of `columns`. Raises `DataError` for no format.
    """
    path = Path(source)
    if path.is_dir():
        for name, found in _FOLDERS.items():
            if any(path.glob(f"{name}*")):
                return found
        raise DataError(one_line(f"{path}: a folder without any of {', '.join(_FOLDERS)} (see docs/data.md)"))
    if not path.exists() and re.fullmatch(r"([\w.-]+/)?[\w-]+(\.[0-9][\w.-]*)?(:[\w.-]+)?", str(source)):
        return "hub"
    head = records.first_bytes(path)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"["):
        return "dpr"
    if head.startswith(b"{"):
        return "tevatron" if b'"positive_passages"' in head else "pairs"
    line = head.split(b"\n")[0].decode("utf-8", "replace")
    if {*(columns or {}).values()}.union(*FIELDS.values()).intersection(records.split_header(line)[1]):
        return "csv"
    if line.count("\t") == 2:
        return "msmarco"
    what = f"neither JSON nor a table with a header that is known; it starts with {quoted(head[:20])}"
    raise DataError(one_line(f"{path}: {what} (set --data_columns or --data_format)"))


def parse_columns(given: Mapping[str, str] | Sequence[str] | None) -> dict[str, str]:
    """{role: name of the column}, from a mapping, from ``ROLE=NAME`` words or from one word that is a JSON object;
    raises `ConfigError` for a role that `FIELDS` does not have, or words that are neither."""
    words: Any = given or ()
    try:
        if not isinstance(words, Mapping) and len(words) == 1 and words[0].startswith("{"):
            words = json.loads(words[0])
        columns = dict(words if isinstance(words, Mapping) else (word.split("=", 1) for word in words))
    except ValueError as error:
        raise ConfigError(f"data_columns: neither ROLE=NAME nor a JSON object: {quoted(given)}") from error
    for role in columns:
        check_choice("data_columns: a role", role, FIELDS)
    return columns


class Fields:
    """Finds the parts of the records of one file by the names of their fields; the first record decides for all.

    Were each record read by itself, one without "positive" would silently pass for one with "text".
    """

    def __init__(self, columns: Mapping[str, str], needs_scores: bool = False) -> None:
        taken = set(columns.values())
        self._names = {role: [name for name in names if name not in taken] for role, names in FIELDS.items()}
        self._names |= {role: [name] for role, name in columns.items()}
        self._numbered = "negatives" not in columns
        self._needs_scores = needs_scores
        self._chosen: tuple[str, str] | None = None

    def read(self, record: Mapping[str, Any]) -> Record:
        """The record of these fields; raises `Fault` for what is missing, empty or no text."""
        if self._chosen is None:
            self._chosen = self._choose("query", record), self._choose("positive", record)
        query_field, positive_field = self._chosen
        query = text_of(record.get(query_field), query_field)
        title = "".join(records.title_of(record, name) for name in self._names["title"])
        positives = _passages(record.get(positive_field), positive_field, title)
        if not positives:
            raise Fault(f"empty {positive_field}")
        negatives = self._negatives(record)
        scores = self._scores(record, positives, negatives)
        if self._needs_scores and scores is None:
            raise Fault("no teacher scores", f"distill needs a number for each of its passages; {_MEND}")
        return Record(query, [text for text, _ in positives], [text for text, _ in negatives], scores)

    def _choose(self, role: str, record: Mapping[str, Any]) -> str:
        for name in self._names[role]:
            if name in record:
                return name
        fields = quoted(", ".join(record), 200)
        raise Fault(f"missing {role}", f"its fields are {fields}; set --data_columns {role}=NAME")

    def _scores(self, record: Mapping[str, Any], *passages: list[tuple[str, Any]]) -> list[float] | None:
        """The teacher's scores of positives and then negatives; None unless each is a finite number."""
        found: list[Any] = []
        for role, listed in zip(("positive_scores", "negative_scores"), passages, strict=True):
            given = _first(record, self._names[role])
            scores = [score for _, score in listed] if given is None else given if isinstance(given, list) else [given]
            found += scores if len(scores) == len(listed) else [None]
        whole = _first(record, self._names["scores"])
        found = whole if isinstance(whole, list) and len(whole) == sum(map(len, passages)) else found
        try:
            found = [float(score) for score in found]
        except (TypeError, ValueError, OverflowError):
            return None
        return found if all(abs(score) < 3e38 for score in found) else None  # what float32 holds, and no NaN

    def _negatives(self, record: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """All numbered ones or, where there are none, those of the first field that has any; null is none."""
        numbered = [name for name in record if self._numbered and re.fullmatch("negative_[1-9][0-9]*", name)]
        numbered = sorted(numbered, key=lambda name: (len(name), name))  # by number, not by place
        found = [one for name in numbered if record[name] is not None for one in _passages(record[name], name)]
        for name in self._names["negatives"]:
            if not found and record.get(name) is not None:
                found = _passages(record[name], name)
        return found


def _passages(value: Any, what: str, title: str = "") -> list[tuple[str, Any]]:
    """The passages of one field: a text (whose title is `title`), an object {"title", "text"}, or a list of these;
    each with its "score", None where it has none."""
    if isinstance(value, dict) and isinstance(value.get("text"), list):  # how Arrow keeps some lists
        value = value["text"]
    found = []
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, dict):
            text = passage_text(records.title_of(one), text_of(one.get("text"), f"{what} text"))
            found.append((text, one.get("score")))
        else:
            found.append((passage_text(title, text_of(one, what)), None))
    return found


def _text_triple(line: str) -> Record:
    cells = records.cells_of(line, 3)
    if all(cell.strip().isdecimal() for cell in cells):
        raise Fault("ids where texts are expected", "name the folder that holds it beside collection.tsv")
    query, positive, negative = (text_of(*pair) for pair in zip(cells, FIELDS, strict=False))
    return Record(query, [positive.strip()], [negative.strip()])


_IDS, _TEXTS = ("_id", "id", "docid", "doc_id", "pid", "passage_id"), ("text", "passage", "contents")


class Passage(NamedTuple):
    """A passage and what it is called."""

    id: str
    title: str  # empty where there is none, or where the data came as one text
    text: str

    @property
    def passage(self) -> str:
        """Title, space, text: what is encoded, and what training reads."""
        return passage_text(self.title, self.text)


def read_passages(path: AnyPath, report: RecordReport) -> Iterator[Passage]:
    """Every passage of a corpus, in its order; each record is counted in ``report``. An id may occur twice.

    `path` is a BEIR folder, or a file, plain or gzip: jsonl (`_id` or `id`, `title`, `text`), a table with a header of
    these (DPR's), or lines of `id<TAB>text` (MS MARCO's, no quoting). Raises `DataError`.
    """
    path = beir_file(Path(path), "corpus.jsonl") if os.path.isdir(path) else Path(path)
    start = records.first_bytes(path)
    header = records.split_header(start.split(b"\n")[0].decode("utf-8", "replace"))[1]
    read = records.csv_rows if {*header} & {*_TEXTS} else records.read_lines
    if start.startswith(b"{"):
        read = records.read_json_lines
    return take(path, read(path), _passage, report)


def _passage(record: str | Mapping[str, Any]) -> Passage:
    if isinstance(record, str):
        record = dict(zip(("id", "text"), records.cells_of(record, 2), strict=True))
    text = text_of(_first(record, _TEXTS), "text", may_be_blank=True)
    passage = Passage(records.identifier_of(_first(record, _IDS), "id"), records.title_of(record), text)
    if not passage.passage:
        raise Fault("empty passage", quoted(passage.id))
    return passage


def _first(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


@dataclass(frozen=True)
class Questions:
    """Questions with their answers. Ids are `question-N`, N being the place among those that are used, from 1."""

    texts: dict[str, str]  # by id
    answers: dict[str, list[str]]  # by id, one at least
    fingerprint: str  # sha256, in hex, of texts and answers
    report: RecordReport = field(repr=False, compare=False)


def load_questions(path: AnyPath, on_bad_record: OnBadRecord = "stop") -> Questions:
    """Read a file of questions with answers, plain or gzip.

    DPR's `nq-test.qa.csv` and others (a question, a tab, a Python list of answers; no header), jsonl (as published with
    NQ open). Of a JSON record, `question` (or `query`) is the question and
    `answers` (or `answer`) a text or a list of texts. Raises `DataError`.
    """
    report = RecordReport(on_bad_record)
    rows = records.read_json_lines(path) if records.first_bytes(path).startswith(b"{") else records.read_lines(path)
    texts, answers, content = {}, {}, Fingerprint()
    for number, (text, listed) in enumerate(take(path, rows, _question, report), start=1):
        texts[f"question-{number}"], answers[f"question-{number}"] = text, listed
        content.add(text, *listed, "")
    return Questions(texts, answers, content.hex(), report)


def _question(row: str | dict[str, Any]) -> tuple[str, list[str]]:
    if isinstance(row, str):
        cells = next(csv.reader([row], delimiter="\t"), [])
        if len(cells) != 2:
            raise Fault("not 2 columns", f"found {len(cells)}, not a question, a tab, and ['one', 'two']")
        try:
            # Literals only: nothing of the file is run.
            row = {"question": cells[0], "answers": ast.literal_eval(cells[1].strip())}
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise Fault("answers are not a list", f"found {quoted(cells[1])}") from None
    text, answers = text_of(_first(row, ("question", "query")), "question"), _first(row, ("answers", "answer"))
    listed = [answers] if isinstance(answers, str) else answers
    if not isinstance(listed, (list, tuple)) or not listed:
        raise Fault("no answers", f"found {quoted(answers)}")
    return text, [text_of(answer, "answer") for answer in listed]
