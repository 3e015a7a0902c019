"""Readers of training records and corpus passages, and the detection of their format.

Reading has two steps. `Source.rows` yields the rows of a file as mappings: JSON objects, or table
rows by column name. A parser then makes a `Record` or a `Passage` of each row, or raises a
`Fault` for a bad row, which is reported.

The names and values of fields are in `fields`, the counting of bad records in `records`. Which
positives and negatives an epoch trains on is decided in `sampling`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

from contaccum.data.beir import (
    is_beir_folder,
    is_llama_index_file,
    read_beir_texts,
    read_judged_pairs,
)
from contaccum.data.records import (
    FIELDS,
    TEACHER_SCORES_REMEDY,
    Fault,
    NotUtf8,
    Record,
    RecordParser,
    RecordReport,
    Rows,
    get_first_value,
    make_data_error,
    one_line,
    parse_columns,
    parse_header,
    parse_id,
    parse_nullable_text,
    parse_rows,
    parse_title,
    passage_text,
    quoted,
    read_arrow,
    read_csv,
    read_head,
    read_json_array,
    read_json_lines,
)
from contaccum.errors import ConfigError, DataError, check_choice
from contaccum.files import AnyPath, fingerprint

DataFormat = Literal["beir", "dpr", "tevatron", "pairs", "triplets", "csv", "parquet", "hub"]
DATA_FORMATS: tuple[DataFormat, ...] = get_args(DataFormat)

SPLIT_RECORD = "split.json"
"""The file that marks a folder of `contaccum split`, and has its counts."""

_SAVED_DATASET_FILES = ("state.json", "dataset_dict.json")
"""Files that `save_to_disk` of `datasets` writes, for a dataset and for a dict of splits."""

_HUB_NAME = r"([\w.-]+/)?[\w-]+(\.[0-9][\w.-]*)?(:[\w.-]+)?"
_PARQUET_MAGIC = b"PAR1"
"""The first bytes of every parquet file."""

_CACHE_VERSION = 13
"""Version of the readers and the cache. Increase it when either changes, so that cached records of
an older version are not used."""

_TABLE_FORMATS: tuple[DataFormat, ...] = ("csv", "parquet", "hub")
"""Formats in which every row has all columns."""

# Field names of a corpus, the usual one first.
_CORPUS_ID_FIELDS = ("_id", "id", "docid", "doc_id", "pid", "passage_id")
_CORPUS_TEXT_FIELDS = ("text", "passage", "contents")


def sniff_format(source: AnyPath, columns: Mapping[str, str] | None = None) -> DataFormat:
    """Detect the format of training data from their content.

    "pairs" is returned for "triplets" too, as both are read in the same way. A table is recognised
    by the usual names of its columns.

    Args:
        source: a file, a folder, or the name of a dataset on the hub.
        columns: names of columns by role, which a table may have instead of the usual names.

    Raises:
        DataError: if the format is unknown, or the file does not exist or is empty.
    """
    path = Path(source)
    if path.is_dir():
        if (path / SPLIT_RECORD).is_file():
            raise DataError(
                one_line(f"{path}: a folder of contaccum split (give {path}/train.jsonl)")
            )
        if is_beir_folder(path):
            return "beir"
        if _is_saved_dataset(path):
            return "hub"
        expected = ", ".join(("corpus.jsonl", *_SAVED_DATASET_FILES))
        raise DataError(one_line(f"{path}: a folder without any of {expected} (see docs/data.md)"))
    if is_hub_name(source):
        return "hub"
    head = read_head(path)
    if not head:
        raise DataError(one_line(f"{path}: is empty, or damaged at its start"))
    if head.startswith(_PARQUET_MAGIC):
        return "parquet"
    if is_llama_index_file(path):
        return "beir"
    if head.startswith(b"["):
        return "dpr"
    if head.startswith(b"{"):
        return "tevatron" if b'"positive_passages"' in head else "pairs"
    first_line = head.partition(b"\n")[0]
    try:
        first_line.decode()
    except UnicodeDecodeError:
        raise make_data_error(path, 1, NotUtf8(first_line)) from None
    known_names = set(columns.values()) if columns else set()
    known_names.update(*FIELDS.values())
    if not known_names.isdisjoint(parse_header(head).names):
        return "csv"
    message = (
        "neither JSON nor a table with a header of known column names; "
        f"it starts with {quoted(head[:20])}"
    )
    remedy = "give it a header, such as query,positive, or name its columns with --data_columns"
    raise DataError(one_line(f"{path}: {message} ({remedy})"))


def is_hub_name(source: AnyPath) -> bool:
    """Return True for the name of a dataset on the hub that is not the path of an existing file."""
    is_name = re.fullmatch(_HUB_NAME, str(source)) is not None
    return is_name and not Path(source).exists()


def _is_saved_dataset(path: Path) -> bool:
    return any((path / name).exists() for name in _SAVED_DATASET_FILES)


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
    min_score: float | None = None,
) -> Iterator[Record]:
    """Yield training records in the file's order: queries with their positives and negatives.

    Args:
        path: a file, plain or gzip (parquet: plain), a folder, or the name of a Hugging Face
            dataset; see docs/data.md.
        data_format: one of `DATA_FORMATS`; None: detected from the content.
        split: split of a BEIR folder, or of a Hugging Face dataset; ignored for a file.
        columns: {role: column name} for columns with unusual names, such as
            {"query": "user_text"}; the roles and their usual names are in `FIELDS`.
        report: receives the counts of used and bad records; None: a new report, which raises an
            error at the first bad record.
        min_score: for scored pairs, the least similarity score (or label) of a positive pair; pairs
            below it are left out and counted. None: scores of pairs are not read.

    Raises:
        ConfigError: before reading, for an unknown format, or settings that the format does not
            have.
        DataError: before reading, if the format cannot be detected; during reading, for a source or
            a record that cannot be used.
    """
    source = Source(path, data_format, split, columns, min_score=min_score)
    return source.records(report or RecordReport())


class Source:
    """A file, folder or dataset of training records, whose format is known.

    Args:
        path, data_format, split, columns, min_score: see `read_records`.
        is_corpus: True if the rows are passages. If a Hugging Face dataset has only one split, its
            name does not matter then.
        needs_scores: True for distillation: a record in which a passage lacks a teacher score (the
            relevance score of a stronger model, such as a cross-encoder) is a bad record.

    Attributes:
        first_record: the first record that `records` has yielded, or None.
        unused_fields: the fields of the first record of the file that are not read.

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
        needs_scores: bool = False,
        min_score: float | None = None,
        is_corpus: bool = False,
    ) -> None:
        check_choice("data_format", data_format, (None, *DATA_FORMATS))
        self.path = Path(os.path.expanduser(path))
        self.columns = parse_columns(columns)
        if data_format:
            self.data_format = cast(DataFormat, data_format)
        else:
            self.data_format = sniff_format(self.path, self.columns)
        self.split = split
        self._is_corpus = is_corpus
        self.needs_scores = needs_scores
        self.min_score = min_score
        self.first_record: Record | None = None
        self.unused_fields: list[str] = []
        if self.data_format == "beir" and (self.columns or min_score is not None):
            raise ConfigError(
                f"{self.path}: data_format=beir has no fields for data_columns or min_score"
            )
        if self.data_format == "beir" and needs_scores:
            raise ConfigError(
                f"{self.path}: BEIR data have no teacher scores for distill "
                f"({TEACHER_SCORES_REMEDY})"
            )

    def records(self, report: RecordReport) -> Iterator[Record]:
        """Yield every record that can be used, and count the others in the report."""
        for record in self._parse_records(report):
            self.first_record = self.first_record or record
            yield record

    def describe_first_record(self) -> str:
        """Return one line for the user: the first record as it was read, and its unused fields."""
        assert self.first_record is not None, "no record has been read"
        line = f"the first record is {self.first_record.describe()}"
        if self.unused_fields:
            line += f"; not used: {one_line(', '.join(self.unused_fields))}"
        return line

    def _parse_records(self, report: RecordReport) -> Iterator[Record]:
        if self.data_format == "beir":
            for query, positives in read_judged_pairs(self.path, self.split, report):
                yield Record(query, positives, [])
            return
        has_cells = self.data_format == "csv"
        parser = RecordParser(self.columns, self.min_score, self.needs_scores, has_cells)
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
                self.unused_fields = parser.unused_fields
                yield record
        self._refuse_unseen_columns(parser)
        if num_matches > 1 and parser.odd_roles:
            role, text = next(iter(parser.odd_roles.items()))
            message = f"every {role} is a number, a list or a label, such as {quoted(text)}"
            remedy = (
                "name the columns of the texts with --data_columns, leave out a column of ids, "
                "labels or scores, and write a list as JSON"
            )
            raise DataError(one_line(f"{self.path}: {message} ({remedy})"))
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
        """Return the unparsed rows, which are mappings, of a file or dataset."""
        if self.data_format in ("hub", "parquet"):
            tables = self._load_dataset().with_format("arrow").iter(1000)
            return read_arrow(self.path, tables)
        if self.data_format == "dpr":
            return read_json_array(self.path)
        if self.data_format == "csv":
            return read_csv(self.path)
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
                # The default batch is a row group, which has size 0 in a file without rows.
                return datasets.load_dataset(
                    "parquet", data_files=source, split="train", streaming=True, batch_size=1000
                )
            if _is_saved_dataset(self.path):
                loaded = datasets.load_from_disk(source)
            else:
                name, _, config = source.partition(":")
                split = None if self._is_corpus else self.split
                loaded = datasets.load_dataset(name, config or None, split=split)
        except Exception as error:  # the hub, the network and Arrow have no common exception class
            if isinstance(error, IndexError):  # from a saved dataset without any row
                error = ValueError("it has no rows")
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
            (path_without_files, self.data_format, self.split, self.columns),
            *settings,
            self.needs_scores,
            self.min_score,
        )


def read_passages(
    path: AnyPath,
    report: RecordReport,
    may_be_blank: bool = False,
    part: Literal["corpus", "queries"] = "corpus",
) -> Iterator[Passage]:
    """Yield every passage of a corpus, in the order of the file. Repeated ids are not refused.

    Args:
        path: one of these:
            - a BEIR folder, or a file of LlamaIndex;
            - a jsonl file, plain or gzip, with the fields `_id` (or `id`, `docid`), `title`,
              `text`;
            - a table, plain or gzip, whose header has these names, as DPR publishes it;
            - a parquet file or a Hugging Face dataset with these columns.
        report: receives the counts of used and bad records.
        may_be_blank: True to yield passages without title and text, which published sets have;
            False: they are bad records.
        part: the part of a BEIR folder or of a file of LlamaIndex to read.

    Raises:
        DataError: for a corpus that cannot be read, or a bad record under "stop".
    """
    path = Path(os.path.expanduser(path))
    parse = partial(_parse_passage_line, may_be_blank=may_be_blank)
    if is_beir_folder(path) or is_llama_index_file(path):
        file, rows = read_beir_texts(path, part)
        return parse_rows(file, rows, parse, report)
    if path.is_dir() or is_hub_name(path):
        source = Source(path, "hub", is_corpus=True)
    else:
        # `Source.rows` reads rows of three kinds, which have the names of formats of training data.
        head = read_head(path)
        data_format: DataFormat = "csv"
        if head.startswith(_PARQUET_MAGIC):
            data_format = "parquet"
        elif head.startswith(b"{"):
            data_format = "pairs"
        source = Source(path, data_format)
    return parse_rows(source.path, source.rows(), parse, report)


def _parse_passage_line(row: Mapping[str, Any], may_be_blank: bool) -> Passage:
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
