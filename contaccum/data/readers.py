"""Readers of training records and corpus passages: one function each for every file format.

Reading has two steps. `Source.rows` yields the rows of a file: JSON objects, table rows as mappings
from column name to cell, or, for files without column names, plain lines. A parser then makes a
`Record` or a `Passage` of each row, or raises a `Fault` for a bad row, which is reported.

The formats and their detection are in `formats`, field names in `columns`, their values in
`fields`, and the counting of bad records in `records`. Which positives and negatives an epoch
trains on is decided in `sampling`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from contaccum.data.beir import find_beir_file, is_beir_folder, read_judged_pairs
from contaccum.data.columns import parse_columns
from contaccum.data.fields import (
    TEACHER_SCORES_REMEDY,
    Record,
    RecordParser,
    check_min_score,
)
from contaccum.data.formats import (
    DATA_FORMATS,
    JUDGED_FORMATS,
    DataFormat,
    is_hub_name,
    is_saved_dataset,
    sniff_format,
)
from contaccum.data.msmarco import read_msmarco
from contaccum.data.records import (
    Fault,
    RecordReport,
    Rows,
    get_first_value,
    one_line,
    parse_id,
    parse_nullable_text,
    parse_rows,
    parse_text,
    parse_title,
    passage_text,
    quoted,
    read_head,
    read_json_array,
    read_json_lines,
    read_lines,
    split_cells,
)
from contaccum.data.tables import parse_header, read_arrow, read_csv
from contaccum.data.text_lookup import TextLookup
from contaccum.errors import ConfigError, DataError, check_choice
from contaccum.files import AnyPath, fingerprint

_CACHE_VERSION = 10
"""Version of the readers and the cache. Increase it when either changes, so that cached records of
an older version are not used."""

_TABLE_FORMATS: tuple[DataFormat, ...] = ("csv", "parquet", "hub")
"""Formats in which every row has all columns."""

# Field names of a corpus, the usual one first.
_CORPUS_ID_FIELDS = ("_id", "id", "docid", "doc_id", "pid", "passage_id")
_CORPUS_TEXT_FIELDS = ("text", "passage", "contents")


class Passage(NamedTuple):
    """A passage of a corpus.

    Attributes:
        id: its id.
        title: its title; empty if it has none, or if title and text are one text in the data.
        text: its text.
    """

    id: str
    title: str
    text: str

    @property
    def passage(self) -> str:
        """The title, a space and the text in one string, which the model encodes."""
        return passage_text(self.title, self.text)


def read_records(
    path: AnyPath,
    data_format: DataFormat | None = None,
    split: str = "train",
    columns: Mapping[str, str] | None = None,
    report: RecordReport | None = None,
    num_negatives: int | None = None,
    corpus: AnyPath | None = None,
    min_score: float | None = None,
) -> Iterator[Record]:
    """Yield training records in the file's order: queries with their positives and negatives.

    Args:
        path: a file, plain or gzip (parquet: plain), a folder, or the name of a Hugging Face
            dataset; see docs/data.md.
        data_format: one of `DATA_FORMATS`; None: detected from the content.
        split: split of a BEIR or MS MARCO folder, or of a Hugging Face dataset; ignored for a file.
        columns: {role: column name} for columns with unusual names, such as
            {"query": "user_text"}; the roles and their usual names are in `FIELDS`.
        report: receives the counts of used and bad records; None: a new report, which raises an
            error at the first bad record.
        num_negatives: for an MS MARCO folder only, the number of negatives to read per query;
            None: all.
        corpus: a corpus that `read_passages` can read, if the records hold ids of its passages in
            place of texts.
        min_score: for scored pairs, the least similarity score (or label) of a positive pair; pairs
            below it are left out and counted. None: scores of pairs are not read.

    Raises:
        ConfigError: before reading, for an unknown format, or settings that the format does not
            have.
        DataError: before reading, if the format cannot be detected; during reading, for a source or
            a record that cannot be used.
    """
    source = Source(
        path, data_format, split, columns, num_negatives, corpus=corpus, min_score=min_score
    )
    return source.records(report or RecordReport())


class Source:
    """A file, folder or dataset of training records, whose format is known.

    Args:
        path, data_format, split, columns, num_negatives, corpus, min_score: see `read_records`.
        is_corpus: True if the rows are passages. If a Hugging Face dataset has only one split, its
            name does not matter then.
        needs_scores: True for distillation: a record in which a passage lacks a teacher score (the
            relevance score of a stronger model, such as a cross-encoder) is a bad record.

    Raises:
        ConfigError: for an unknown format, or settings that the format does not have.
        DataError: if the format cannot be detected.
    """

    def __init__(
        self,
        path: AnyPath,
        data_format: str | None = None,
        split: str = "train",
        columns: Mapping[str, str] | Sequence[str] | None = None,
        num_negatives: int | None = None,
        needs_scores: bool = False,
        corpus: AnyPath | None = None,
        min_score: float | None = None,
        is_corpus: bool = False,
    ) -> None:
        check_choice("data_format", data_format, (None, *DATA_FORMATS))
        check_min_score(min_score)
        self.path = Path(os.path.expanduser(path))
        self.columns = parse_columns(columns)
        if data_format:
            self.data_format = cast(DataFormat, data_format)
        else:
            self.data_format = sniff_format(self.path, self.columns)
        self.split = split
        self._is_corpus = is_corpus
        self.num_negatives = num_negatives
        self.needs_scores = needs_scores
        self.corpus = corpus
        self.min_score = min_score
        if self.data_format in JUDGED_FORMATS:
            self._refuse_field_settings()

    def _refuse_field_settings(self) -> None:
        """Raise `ConfigError` for settings that need named fields.

        The formats with relevance judgements (`JUDGED_FORMATS`) have no named fields.
        """
        is_set = {
            "data_columns": bool(self.columns),
            "corpus": bool(self.corpus),
            "min_score": self.min_score is not None,
        }
        for name, has_value in is_set.items():
            if has_value:
                raise ConfigError(
                    f"{name} is set, but data_format={self.data_format} has no fields: {self.path}"
                )
        if self.needs_scores:
            raise ConfigError(
                f"{self.path}: {self.data_format} data have no teacher scores for distill "
                f"({TEACHER_SCORES_REMEDY})"
            )

    def records(self, report: RecordReport) -> Iterator[Record]:
        """Yield every record that can be used, and count the others in the report."""
        if self.data_format == "beir":
            for query, positives in read_judged_pairs(self.path, self.split, report):
                yield Record(query, positives, [])
        elif self.data_format == "msmarco" and self.path.is_dir():
            for query_texts in read_msmarco(self.path, self.split, self.num_negatives, report):
                yield Record(*query_texts)
        elif self.data_format == "msmarco":
            yield from parse_rows(self.path, self.rows(), _parse_text_triple, report)
        else:
            corpus = None
            if self.corpus is not None:
                passages = read_passages(self.corpus, report)
                texts = ((passage.id, passage.passage) for passage in passages)
                corpus = TextLookup(self.corpus, texts)
            parser = RecordParser(self.columns, corpus, self.min_score, self.needs_scores)
            is_table = self.data_format in _TABLE_FORMATS
            num_matches = 0
            for record in parse_rows(self.path, self.rows(), parser.parse, report):
                # The first row of a table has all columns, so a wrong name is refused at once.
                if is_table and parser.unseen_columns:
                    self._refuse_unseen_columns(parser)
                if record is None:
                    report.leave_out(self.path, "score below min_score")
                else:
                    num_matches += 1
                    yield record
            self._refuse_unseen_columns(parser)
            report.refuse_if_nothing_left(self.path, num_matches, "records")

    def _refuse_unseen_columns(self, parser: RecordParser) -> None:
        """Raise `DataError` if a name in `columns` is not a field of any record read so far."""
        for role, name in self.columns.items():
            if name in parser.unseen_columns:
                message = f"no record has the field {quoted(name)}"
                remedy = (
                    f"correct {role}={name} in data_columns, or leave it out; one of several sets "
                    "can have columns of its own"
                )
                raise DataError(one_line(f"{self.path}: {message} ({remedy})"))

    def rows(self) -> Rows:
        """Return the unparsed rows of a file or dataset.

        A row is a mapping, or a line in a file of the format "msmarco", which has no column names.
        """
        if self.data_format in ("hub", "parquet"):
            tables = self._load_dataset().with_format("arrow").iter(1000)
            return read_arrow(self.path, tables)
        if self.data_format == "dpr":
            return read_json_array(self.path)
        if self.data_format == "nemo":  # one object, whose array "data" holds the records
            return read_json_array(self.path, "data.item")
        if self.data_format == "csv":
            return read_csv(self.path)
        if self.data_format == "msmarco":
            return read_lines(self.path)
        return read_json_lines(self.path)

    def _load_dataset(self) -> Any:
        """Load the source with the library `datasets`.

        The source is a parquet file, a folder that `save_to_disk` wrote, or a dataset of the
        Hugging Face hub, named `NAME` or `NAME:CONFIG`.
        """
        import datasets

        source = str(self.path)
        try:
            if self.data_format == "parquet":
                return datasets.load_dataset(
                    "parquet", data_files=source, split="train", streaming=True
                )
            if is_saved_dataset(self.path):
                loaded = datasets.load_from_disk(source)
            else:
                name, _, config = source.partition(":")
                split = None if self._is_corpus else self.split
                loaded = datasets.load_dataset(name, config or None, split=split)
        except Exception as error:  # the hub, the network and Arrow have no common exception class
            message = (
                f"as a Hugging Face dataset with split {quoted(self.split)} it cannot be loaded: "
                f"{str(error)[:300]}"
            )
            if not self.path.exists():
                message = f"no such file or folder, and {message}"
            raise DataError(one_line(f"{source}: {message}")) from error
        if not isinstance(loaded, dict):
            return loaded
        return loaded[self._choose_split(list(loaded))]

    def _choose_split(self, splits: list[str]) -> str:
        """Return the split to read of a dataset that has several, or a corpus with its only one."""
        if self._is_corpus and len(splits) == 1:
            return splits[0]
        if self.split in splits:
            return self.split
        names = ", ".join(splits)
        remedy = "save the split of the passages by itself" if self._is_corpus else "set split"
        raise DataError(
            one_line(f"{self.path}: no split {quoted(self.split)}; it has {names} ({remedy})")
        )

    def key(self, *settings: Any) -> str:
        """Return the key of the records in the cache: a sha256, in hex.

        The key changes with every setting, and with the path, size or modification time of a file.

        Args:
            settings: further values that change which records are read.
        """
        files = [self.path]
        if self.path.is_dir():
            files = sorted(path for path in self.path.rglob("*") if path.is_file())
        elif self.data_format == "hub":
            # These are the files that `datasets` has downloaded. They change with the dataset.
            files = [Path(file["filename"]) for file in self._load_dataset().cache_files]
        file_states = []
        for file in files:
            if file.exists():
                state = file.stat()
                file_states.append((str(file.resolve()), state.st_size, state.st_mtime_ns))
        # The states contain absolute paths, so the path as given is needed only without files.
        path_without_files = "" if file_states else str(self.path)
        return fingerprint(
            _CACHE_VERSION,
            file_states,
            (
                path_without_files,
                self.data_format,
                self.split,
                self.columns,
                self.num_negatives,
            ),
            *settings,
            self.needs_scores,
            self.min_score,
            None if self.corpus is None else _make_corpus_source(self.corpus).key(),
        )


def _parse_text_triple(line: str) -> Record:
    """Parse a line of an MS MARCO file: the texts of query, positive and negative, tab-separated.

    A file of the same layout may hold ids. It can be read only with its folder, which has the
    texts.
    """
    cells = split_cells(line, 3)
    if all(cell.strip().isdecimal() for cell in cells):
        raise Fault(
            "ids where texts are expected", "name the folder that holds it beside collection.tsv"
        )
    query = parse_text(cells[0], "query")
    positive = parse_text(cells[1], "positive")
    negative = parse_text(cells[2], "negatives")
    return Record(query, [positive.strip()], [negative.strip()])


def read_passages(
    path: AnyPath, report: RecordReport, may_be_blank: bool = False
) -> Iterator[Passage]:
    """Yield every passage of a corpus, in the order of the file. Repeated ids are not refused.

    Args:
        path: one of these:
            - a BEIR folder;
            - a jsonl file, plain or gzip, with the fields `_id` (or `id`, `docid`), `title`,
              `text`;
            - a table, plain or gzip, whose header has these names, as DPR publishes it;
            - lines of `id<TAB>text`, plain or gzip, without quoting, as MS MARCO publishes them;
            - a parquet file or a Hugging Face dataset with these columns.
        report: receives the counts of used and bad records.
        may_be_blank: True to yield passages without title and text, which published sets have;
            False: they are bad records.

    Raises:
        DataError: for a corpus that cannot be read, or a bad record under "stop".
    """
    source = _make_corpus_source(path)
    parse = partial(_parse_passage, may_be_blank=may_be_blank)
    return parse_rows(source.path, source.rows(), parse, report)


def _make_corpus_source(path: AnyPath) -> Source:
    """Return a source whose `rows` are the passages of a corpus.

    `Source` only has names for the formats of training data. A corpus is given the name that makes
    `Source.rows` read the right kind of rows: with "pairs", a row is a JSON object; with "csv", a
    row of a table; with "msmarco", an unparsed line, here `id<TAB>text`.
    """
    path = Path(os.path.expanduser(path))
    if is_beir_folder(path):
        path = find_beir_file(path, "corpus.jsonl")
    if path.is_dir() or is_hub_name(path):
        return Source(path, "hub", is_corpus=True)
    head = read_head(path)
    if head.startswith(b"PAR1"):  # the first bytes of every parquet file
        return Source(path, "parquet")
    if head.startswith(b"{"):
        return Source(path, "pairs")
    return Source(path, "csv" if _has_header(path, head) else "msmarco")


def _has_header(path: Path, head: bytes) -> bool:
    """Return True if the first line of a table of passages names its columns.

    Files in MS MARCO's layout, `id<TAB>text`, have no header, and a passage may consist of a word
    that is also a column name, such as "text". Therefore:

    - A line that begins with a number is a passage.
    - The first line of `collection.tsv`, MS MARCO's own file, is a header only if it names both an
      id column and a text column.
    - The first line of another file is a header if it names a text column. A table without an id
      column then fails with "missing id"; its header is not read as a passage.

    Raises:
        DataError: for a header whose first column is an id column, without a text column.
    """
    if re.match(rb"[0-9]+\t", head):
        return False
    names = parse_header(head).names
    has_id = not set(names).isdisjoint(_CORPUS_ID_FIELDS)
    has_text = not set(names).isdisjoint(_CORPUS_TEXT_FIELDS)
    if names and names[0] in _CORPUS_ID_FIELDS and not has_text:
        expected = ", ".join(_CORPUS_TEXT_FIELDS)
        raise DataError(
            one_line(
                f"{path}:1: unknown text column: the columns are "
                f"{quoted(', '.join(names), 200)} (rename the text column to one of {expected})"
            )
        )
    if path.name.startswith("collection.tsv") and not has_id:
        return False
    return has_text


def _parse_passage(row: str | Mapping[str, Any], may_be_blank: bool) -> Passage:
    """Parse a row of a corpus: a mapping, or a line `id<TAB>text`."""
    if isinstance(row, str):
        passage_id, text = split_cells(row, 2)
        row = {"id": passage_id, "text": text}
    for name, expected_fields in (("text", _CORPUS_TEXT_FIELDS), ("id", _CORPUS_ID_FIELDS)):
        if set(expected_fields).isdisjoint(row):
            fields = quoted(", ".join(row), 200)
            expected = ", ".join(expected_fields)
            raise Fault(f"missing {name}", f"its fields are {fields}; use one of {expected}")
    text = parse_nullable_text(row, _CORPUS_TEXT_FIELDS, "text")
    identifier = get_first_value(row, _CORPUS_ID_FIELDS)
    passage = Passage(parse_id(identifier, "id"), parse_title(row), text)
    if not passage.passage and not may_be_blank:
        raise Fault("empty passage", quoted(passage.id))
    return passage
