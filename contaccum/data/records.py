"""Records of training data and passages of a corpus, and the detection of a file's format.

`RecordSource.rows` yields the rows of a file as mappings (`contaccum.data.rows`), and
`RecordParser` makes a `Record` of each row, or raises a `Fault` for a bad row, which is reported.
Which positives and negatives an epoch trains on is decided in `contaccum.data.sampling`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

from contaccum.data.beir import (
    is_beir_folder,
    is_llama_index_file,
    read_beir_texts,
    read_judged_pairs,
)
from contaccum.data.rows import (
    Fault,
    NotUtf8,
    RecordReport,
    Rows,
    get_first_value,
    make_data_error,
    parse_header,
    parse_id,
    parse_nullable_text,
    parse_number,
    parse_rows,
    parse_text,
    parse_title,
    passage_text,
    read_arrow,
    read_csv,
    read_head,
    read_json_array,
    read_json_lines,
)
from contaccum.errors import ConfigError, DataError, check_choice, one_line, quoted
from contaccum.files import AnyPath, fingerprint
from contaccum.settings import DataFormat

DATA_FORMATS: tuple[DataFormat, ...] = get_args(DataFormat)

_TABLE_FORMATS: tuple[DataFormat, ...] = ("csv", "parquet", "hub")
"""Formats in which every row has all columns."""

SPLIT_RECORD = "split.json"
"""The file that marks a folder of `contaccum split`, and has its counts."""

_SAVED_DATASET_FILES = ("state.json", "dataset_dict.json")
"""Files that `save_to_disk` of `datasets` writes, for a dataset and for a dict of splits."""

_HUB_NAME = r"([\w.-]+/)?[\w-]+(\.[0-9][\w.-]*)?(:[\w.-]+)?"
_PARQUET_MAGIC = b"PAR1"
"""The first bytes of every parquet file."""

_CACHE_VERSION = 14
"""Version of the readers and the stored records. Increase it when either changes, so that records
of an older version are not used."""

_USUAL_NAMES = {
    "query": "query anchor question query_text sentence1",
    "positive": "positive positives positive_passages positive_ctxs passage answer text document "
    "pos sentence2",
    # DPR's own trainer uses `negative_ctxs`, random negatives, where a record has no hard ones.
    "negatives": "negatives negative negative_passages hard_negatives hard_negative_ctxs neg "
    "negative_ctxs",
    # Title of the positives that are plain texts. A passage object has its own "title".
    "title": "title",
    # Teacher scores, in one list for all positives and then all negatives, or in one list for the
    # positives and another for the negatives. A passage object may have its own "score" instead.
    "scores": "scores",
    "positive_scores": "positive_scores positive_score pos_scores",
    "negative_scores": "negative_scores neg_scores",
    # Score or label of a pair; it is a match if the score is at least `min_score`. These names are
    # compared without case, blanks and underscores.
    "score": "score label labels relevance relevant is_relevant relevancy rel relevance_label "
    "relevance_score match matches matched is_match matching similar is_similar similarity "
    "similarity_score is_positive is_duplicate duplicate is_correct judgement judgment grade "
    "rating",
}
FIELDS = {role: tuple(names.split()) for role, names in _USUAL_NAMES.items()}
"""{role: usual names of the field}. The first name that a record has is used.

The fields `negative_1`, `negative_2` ... hold negatives too. The names include those of
FlagEmbedding, Tevatron (src/tevatron/retriever/dataset.py), and sentence-transformers' scored
pairs.
"""

TEACHER_SCORES_REMEDY = "contaccum mine --cross_encoder writes scores"

_MATCH = "true yes t y relevant positive pos match similar duplicate related correct entailment"
_NO_MATCH = (
    "false no f n irrelevant notrelevant nonrelevant unrelevant negative neg nomatch notamatch "
    "nonmatch mismatch notmatch dissimilar notsimilar notduplicate nonduplicate unrelated "
    "notrelated incorrect wrong neutral contradiction"
)
_WORDS_FOR_NUMBERS = {**dict.fromkeys(_MATCH.split(), 1), **dict.fromkeys(_NO_MATCH.split(), 0)}
"""Words that files have in place of the labels 1 and 0, after `_fold_name`."""

_LONGEST_LABEL = 30

_NUMBER = re.compile(r"[-+]?[\d.,]*\d[\d.,]*(e[-+]?\d+)?%?", re.IGNORECASE)
_LIST = re.compile(
    r"""(array\()?\[\s*(['"{\[].*(['"}\]]|None|null|nan)\s*)?\](,\ dtype=\w+)?\)?"""
    r"""|\{\s*['"].*\}|\(['"].*['"],\s*(['"].*['"])?\)""",
    re.DOTALL,
)
"""A list, a tuple or an object as Python, JSON and numpy write it."""

_MIN_SCORE_REMEDY = (
    'set the least score of a match: {"path": ..., "min_score": 1}, or with contaccum fit: '
    "--min_score 1"
)

# Field names of a corpus, the usual one first.
_CORPUS_ID_FIELDS = ("_id", "id", "docid", "doc_id", "pid", "passage_id")
_CORPUS_TEXT_FIELDS = ("text", "passage", "contents")


class Record(NamedTuple):
    """A query and its passages, in the order of the file.

    Attributes:
        query: text of the query.
        positives: texts of the positives, each "title text".
        negatives: texts of the negatives, each "title text".
        scores: teacher scores of the positives and then the negatives; None unless each passage
            has a score.
    """

    query: str
    positives: list[str]
    negatives: list[str]
    scores: list[float] | None = None

    def describe(self) -> str:
        """Return one line with the beginnings of the query, a positive and a negative."""
        parts = [f"query={quoted(self.query)}"]
        for name, texts in (("positive", self.positives), ("negative", self.negatives)):
            more = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
            parts.append(f"{name}={quoted(texts[0])}{more}" if texts else f"no {name}")
        return ", ".join(parts)


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
    _, names, _ = parse_header(head)
    if not known_names.isdisjoint(names):
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
    source = RecordSource(path, data_format, split, columns, min_score=min_score)
    return source.records(report or RecordReport())


class RecordSource:
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
        splits = list(loaded)
        if self._is_corpus and len(splits) == 1:
            return loaded[splits[0]]
        if self.split in splits:
            return loaded[self.split]
        remedy = "save the split of the passages by itself" if self._is_corpus else "set split"
        message = f"no split {quoted(self.split)}; it has {', '.join(splits)}"
        raise DataError(one_line(f"{self.path}: {message} ({remedy})"))

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


ScoredText = tuple[str, Any]
"""The text of a passage, and the unparsed value of its field "score", or None."""


class RecordParser:
    """Parser for the records of one file.

    The first record with a query and a positive decides which fields hold them in all records. If
    the fields were chosen for each record, a record that lacks "positive" but has a field "text"
    could silently get a wrong positive.

    Args:
        columns: {role: field name} for roles whose fields have unusual names.
        min_score: least score of a pair that is a match; None: scores of pairs are not read.
        needs_scores: True if a record without teacher scores cannot be used.
        has_cells: True for a table whose cells are texts, in which a list can only be a text that
            looks like one.

    Attributes:
        unseen_columns: the field names of `columns` that no record has had so far.
        unused_fields: the fields of the first record that are not read.
        odd_roles: {role: its first text} of the roles in which all texts so far are numbers, lists
            or labels such as "relevant", instead of queries and passages.
    """

    def __init__(
        self,
        columns: Mapping[str, str],
        min_score: float | None = None,
        needs_scores: bool = False,
        has_cells: bool = False,
    ) -> None:
        self._has_cells = has_cells
        self._min_score = min_score
        self._needs_scores = needs_scores
        self._has_negatives_column = "negatives" in columns
        self._chosen: tuple[str, str] | None = None  # names of the query's and positive's fields
        self._roles_with_text: set[str] = set()
        self.unused_fields: list[str] = []
        self.odd_roles: dict[str, str] = {}
        self.unseen_columns = set(columns.values())
        # A column that `columns` gives a role is not used for another role, even if its name is a
        # usual name there.
        assigned_names = set(columns.values())
        self._columns_of_other_roles = assigned_names - {columns.get("score")}
        self._names: dict[str, list[str]] = {}
        for role, usual_names in FIELDS.items():
            if role in columns:
                self._names[role] = [columns[role]]
            else:
                self._names[role] = [name for name in usual_names if name not in assigned_names]
        score_names = [_fold_name(name) for name in self._names["score"]]
        self._score_ranks = {name: rank for rank, name in enumerate(score_names)}

    def parse(self, record: Mapping[str, Any]) -> Record | None:
        """Return the texts and scores of a record; None for a pair below `min_score`.

        Raises:
            Fault: for a field that is missing, empty or of another type.
        """
        if self.unseen_columns:
            self.unseen_columns.difference_update(record)
        chosen = self._chosen or (
            self._choose_field("query", record),
            self._choose_field("positive", record),
        )
        query_field, positive_field = chosen
        query = parse_text(self._get_value(record, query_field), query_field)
        if not self._is_match(record, chosen):
            return None
        # There is no name if `columns` gives the column "title" another role.
        title_names = self._names["title"]
        title = parse_title(record, title_names[0]) if title_names else ""
        positives = _parse_passages(self._get_value(record, positive_field), positive_field, title)
        if not positives:
            raise Fault(f"empty {positive_field}")

        # Negatives are in `negative_1`, `negative_2` ..., or else in the first usual field that has
        # any passage.
        negatives: list[ScoredText] = []
        numbered_fields = self._find_numbered_fields(record)
        for fields in (numbered_fields, *([name] for name in self._names["negatives"])):
            for name in fields:
                if record.get(name) is not None:
                    negatives += _parse_passages(self._get_value(record, name), name)
            if negatives:
                break

        scores = self._parse_teacher_scores(record, positives, negatives)
        if scores is None and self._needs_scores:
            raise Fault(
                "no teacher scores",
                f"distill needs a number for each of its passages; {TEACHER_SCORES_REMEDY}",
            )
        # A negative that is listed twice counts once, with its first score.
        first_positions: dict[str, int] = {}
        for position, (text, _) in enumerate(negatives, start=len(positives)):
            first_positions.setdefault(text, position)
        if scores is not None:
            negative_scores = [scores[position] for position in first_positions.values()]
            scores = scores[: len(positives)] + negative_scores
        texts = [text for text, _ in positives]
        parsed = Record(query, texts, list(first_positions), scores)
        self._find_odd_roles(parsed)
        if self._chosen is None:
            self._chosen = chosen  # the first usable record decides for all others
            self.unused_fields = self._list_unused_fields(record, chosen)
        return parsed

    def _choose_field(self, role: str, record: Mapping[str, Any]) -> str:
        present_names = [name for name in self._names[role] if name in record]
        if not present_names:
            raise _make_missing_field_fault(role, record)
        names_with_value = [name for name in present_names if record[name] is not None]
        return (names_with_value or present_names)[0]

    def _get_value(self, record: Mapping[str, Any], field_name: str) -> Any:
        """Return the value of a field of passages; raises `Fault` for a list in a cell."""
        value = record.get(field_name)
        if self._has_cells and value is not None and _LIST.fullmatch(value.strip()):
            raise Fault(
                f"a list in the cell of {field_name}",
                f"found {quoted(value)}",
                "write a row for each positive and the columns negative_1, negative_2, ..., or "
                f'JSON lines with lists: {{"{field_name}": ["one", "two"], ...}}',
            )
        return value

    def _is_match(self, record: Mapping[str, Any], chosen: tuple[str, str]) -> bool:
        """Return False for a pair whose score is below `min_score`.

        Raises:
            Fault: for a pair with the label 0 in a field that is not compared with `min_score`.
                With `min_score`, for a pair whose score is missing or not a number. Without it, for
                every score of a pair with a field `sentence1`.
        """
        fields = self._find_score_fields(record)
        if self._min_score is not None:
            if not fields:
                raise _make_missing_field_fault("score", record)
            if parse_number(_replace_word(record[fields[0]])) < self._min_score:
                return False
            fields = fields[1:]
        # `sentence1` is a field of sentence-transformers' scored pairs, in which a low score marks
        # a pair without match.
        elif "sentence1" in chosen and any(record[name] is not None for name in fields):
            raise Fault("a pair with a score", _MIN_SCORE_REMEDY)
        for name in fields:
            try:
                label = float(_replace_word(record[name]))  # type: ignore[arg-type]
            except (TypeError, ValueError):
                continue
            # Other negative numbers are scores, such as a cross-encoder's.
            if label <= 0 and label.is_integer():
                remedy = _MIN_SCORE_REMEDY
                if self._min_score is not None:
                    remedy = f"name the field that min_score reads: --data_columns score={name}"
                raise Fault(f"a pair with {name} 0", remedy)
        return True

    def _find_score_fields(self, record: Mapping[str, Any]) -> list[str]:
        """Return the fields that may hold a score of the pair: first those with a value."""
        names = []
        for name in record:
            if _fold_name(name) in self._score_ranks and name not in self._columns_of_other_roles:
                names.append(name)
        ranks = self._score_ranks
        return sorted(names, key=lambda name: (record[name] is None, ranks[_fold_name(name)]))

    def _find_numbered_fields(self, record: Mapping[str, Any]) -> list[str]:
        """Return the names of `negative_1`, `negative_2` ..., ordered by number."""
        if self._has_negatives_column:
            return []
        names = [name for name in record if re.fullmatch("negative_[0-9]+", name)]
        # By length first, so that negative_10 comes after negative_9.
        return sorted(names, key=lambda name: (len(name), name))

    def _parse_teacher_scores(
        self, record: Mapping[str, Any], positives: list[ScoredText], negatives: list[ScoredText]
    ) -> list[float] | None:
        """Return the scores of positives and then negatives; None unless all are numbers."""
        values = get_first_value(record, self._names["scores"])
        if not isinstance(values, list) or len(values) != len(positives) + len(negatives):
            values = []
            for role, passages in (("positive_scores", positives), ("negative_scores", negatives)):
                scores = get_first_value(record, self._names[role])
                if scores is None:  # the passages may be objects with a score
                    scores = [score for _, score in passages]
                elif not isinstance(scores, list):
                    scores = [scores]
                if len(scores) != len(passages):
                    return None
                values += scores
        try:
            return [parse_number(value) for value in values]
        except Fault:
            return None

    def _find_odd_roles(self, record: Record) -> None:
        """Update `odd_roles`."""
        texts_by_role = {
            "query": [record.query],
            "positive": record.positives,
            "negatives": record.negatives,
        }
        for role, texts in texts_by_role.items():
            if role in self._roles_with_text or not texts:
                continue
            if all(_is_odd(text) for text in texts):
                self.odd_roles.setdefault(role, texts[0])
            else:
                self._roles_with_text.add(role)
                self.odd_roles.pop(role, None)

    def _list_unused_fields(self, record: Mapping[str, Any], chosen: tuple[str, str]) -> list[str]:
        used_names = {"", *chosen, *self._find_numbered_fields(record)}
        for role, names in self._names.items():
            if role not in ("query", "positive", "score"):
                used_names.update(names)
        score_fields = self._find_score_fields(record)
        if self._min_score is not None:
            used_names.update(score_fields[:1])
        for name in score_fields:
            if _replace_word(record[name]) in (1, "1", "1.0"):
                used_names.add(name)  # `_is_match` refuses a label of 0
        return [name for name in record if name not in used_names]


def _make_missing_field_fault(role: str, record: Mapping[str, Any]) -> Fault:
    fields = quoted(", ".join(record), 200)
    return Fault(f"missing {role}", f"its fields are {fields}; set --data_columns {role}=NAME")


def _parse_passages(value: Any, field_name: str, title: str = "") -> list[ScoredText]:
    """Return the passages of a field: a text, an object {"title", "text"}, or a list of these.

    ``title`` is the title of the passages that are texts. Raises `Fault` for other values.
    """
    passages: list[ScoredText] = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict):
            passages.append((passage_text(title, parse_text(item, field_name)), None))
            continue
        text = parse_nullable_text(item, ["text"], f"{field_name} text")
        text = passage_text(parse_title(item), text)
        if not text:
            raise Fault(f"empty {field_name} text")
        passages.append((text, item.get("score")))
    return passages


@lru_cache(maxsize=4096)
def _fold_name(name: str) -> str:
    """Return a name in lower case, without blanks, underscores and hyphens."""
    return re.sub(r"[\s_-]+", "", name).casefold()


def _replace_word(label: object) -> object:
    """Return the number for which a label such as "True" stands, or else the label itself."""
    if isinstance(label, (str, bool)) and len(str(label)) < _LONGEST_LABEL:
        return _WORDS_FOR_NUMBERS.get(_fold_name(str(label)), label)
    return label


def _is_odd(text: str) -> bool:
    """Return True for a number, a list or a label such as "relevant" in place of a text."""
    is_label = 1 < len(text) < _LONGEST_LABEL and _fold_name(text) in _WORDS_FOR_NUMBERS
    return is_label or bool(_NUMBER.fullmatch(text) or _LIST.fullmatch(text))


def parse_columns(columns: Mapping[str, str] | Sequence[str] | str | None) -> dict[str, str]:
    """Return column names by role.

    Args:
        columns: a mapping, a word ``ROLE=NAME``, a JSON object such as
            ``'{"query": "user_text"}'``, or a list of words or of one JSON object; None: no
            columns.

    Raises:
        ConfigError: for a role that `FIELDS` does not have, a role with several columns, or words
            of another form.
    """
    if columns is None:
        return {}
    if isinstance(columns, str):
        columns = [columns]
    pairs: list[Any]
    try:
        if isinstance(columns, Mapping):
            pairs = list(columns.items())
        elif len(columns) == 1 and columns[0].startswith("{"):
            pairs = json.loads(columns[0], object_pairs_hook=list)
        else:
            pairs = [word.split("=", 1) for word in columns]
        name_by_role = dict(pairs)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"data_columns: neither ROLE=NAME nor one JSON object: {quoted(columns)} "
            '(for example query=user_text, or {"query": "user_text"})'
        ) from error
    for role in name_by_role:
        check_choice("data_columns: a role", role, FIELDS)
    has_names_only = all(isinstance(name, str) for name in name_by_role.values())
    if len(pairs) > len(name_by_role) or not has_names_only:
        raise ConfigError(
            f"data_columns: {quoted(columns)}: a role has the name of one column (rename several "
            "columns of negatives to negative_1, negative_2, ...)"
        )
    return name_by_role


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
        source = RecordSource(path, "hub", is_corpus=True)
    else:
        head = read_head(path)
        data_format: DataFormat = "csv"
        if head.startswith(_PARQUET_MAGIC):
            data_format = "parquet"
        elif head.startswith(b"{"):
            data_format = "pairs"
        source = RecordSource(path, data_format)
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
