"""Records of data files: reading lines and JSON, checking fields, counting bad records.

Text files may be plain or gzip, in UTF-8 with or without a byte-order mark. A record that cannot be
used is a `Fault`. It either stops the run with one error line that names file and line, or it is
left out and counted in a `RecordReport`. No record is lost without being counted. Tables are read
in `contaccum.data.records`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import math
import os
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

from contaccum.errors import ConfigError, DataError, check_choice
from contaccum.files import AnyPath

# Fields of a training record: their names, the choice of them, and the parsing of their values ----

# A field holds a text, a passage object, or a list of these. Files are read in `readers`.


FIELDS: dict[str, tuple[str, ...]] = {
    "query": ("query", "anchor", "question", "query_text", "sentence1"),
    "positive": (
        "positive",
        "positives",
        "positive_passages",
        "positive_ctxs",
        "passage",
        "answer",
        "text",
        "document",
        "pos",
        "sentence2",
    ),
    "negatives": (
        "negatives",
        "negative",
        "negative_passages",
        "hard_negatives",
        "hard_negative_ctxs",
        "neg",
        # Random negatives of DPR, which its own trainer uses where a record has no hard ones.
        "negative_ctxs",
    ),
    # Title of the positives that are plain texts. A passage object has its own "title".
    "title": ("title",),
    # Teacher scores, in one list for all positives and then all negatives, or in one list for the
    # positives and another for the negatives. A passage object may have its own "score" instead.
    "scores": ("scores",),
    "positive_scores": ("positive_scores", "positive_score", "pos_scores"),
    "negative_scores": ("negative_scores", "neg_scores"),
    # Score or label of a pair; it is a match if the score is at least `min_score`. These names are
    # compared without case, blanks and underscores.
    "score": (
        "score",
        "label",
        "labels",
        "relevance",
        "relevant",
        "is_relevant",
        "relevancy",
        "rel",
        "relevance_label",
        "relevance_score",
        "match",
        "matches",
        "matched",
        "is_match",
        "matching",
        "similar",
        "is_similar",
        "similarity",
        "similarity_score",
        "is_positive",
        "is_duplicate",
        "duplicate",
        "is_correct",
        "judgement",
        "judgment",
        "grade",
        "rating",
    ),
}
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


class _ScoredText(NamedTuple):
    """The text of a passage, and the unparsed value of its field "score", or None."""

    text: str
    score: Any


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
        self.unused_fields: list[str] = []
        self.odd_roles: dict[str, str] = {}
        self._roles_with_text: set[str] = set()
        self._min_score = min_score
        self._needs_scores = needs_scores
        self._has_negatives_column = "negatives" in columns
        self.unseen_columns = set(columns.values())
        self._chosen: tuple[str, str] | None = None  # names of the query's and positive's fields
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
        negatives = self._parse_negatives(record)
        scores = self._parse_teacher_scores(record, positives, negatives)
        if scores is None and self._needs_scores:
            raise Fault(
                "no teacher scores",
                f"distill needs a number for each of its passages; {TEACHER_SCORES_REMEDY}",
            )
        if self._chosen is None:
            self._chosen = chosen  # the first usable record decides for all others
            self.unused_fields = self._list_unused_fields(record, chosen)
        parsed_record = Record(
            query,
            positives=[positive.text for positive in positives],
            negatives=[negative.text for negative in negatives],
            scores=scores,
        )
        self._find_odd_roles(parsed_record)
        return _remove_repeated_negatives(parsed_record)

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

    def _choose_field(self, role: str, record: Mapping[str, Any]) -> str:
        present_names = [name for name in self._names[role] if name in record]
        for name in present_names:
            if record[name] is not None:
                return name
        if present_names:
            return present_names[0]
        raise _make_missing_field_fault(role, record)

    def _is_match(self, record: Mapping[str, Any], chosen: tuple[str, str]) -> bool:
        """Return False for a pair whose score is below `min_score`.

        Raises:
            Fault: for a pair with the label 0 in a field that is not compared with `min_score`.
                With `min_score`, for a pair whose score is missing or not a number. Without it, for
                every score of a pair with a field `sentence1`.
        """
        fields = self._find_score_fields(record)
        is_match = True
        if self._min_score is not None:
            if not fields:
                raise _make_missing_field_fault("score", record)
            is_match = parse_number(_replace_word(record[fields[0]])) >= self._min_score
            fields = fields[1:]
        # `sentence1` is a field of sentence-transformers' scored pairs, in which a low score marks
        # a pair without match.
        elif "sentence1" in chosen and any(record[name] is not None for name in fields):
            raise Fault("a pair with a score", _MIN_SCORE_REMEDY)
        for name in fields:
            if is_match and _is_no_match(record[name]):
                remedy = _MIN_SCORE_REMEDY
                if self._min_score is not None:
                    remedy = f"name the field that min_score reads: --data_columns score={name}"
                raise Fault(f"a pair with {name} 0", remedy)
        return is_match

    def _find_score_fields(self, record: Mapping[str, Any]) -> list[str]:
        """Return the fields that may hold a score of the pair: first those with a value."""
        names = [
            name
            for name in record
            if _fold_name(name) in self._score_ranks and name not in self._columns_of_other_roles
        ]
        return sorted(
            names, key=lambda name: (record[name] is None, self._score_ranks[_fold_name(name)])
        )

    def _parse_negatives(self, record: Mapping[str, Any]) -> list[_ScoredText]:
        """Return the negatives in `negative_1`, `negative_2` ..., else in the first usual field.

        Fields without any passage are skipped.
        """
        field_groups = [self._find_numbered_fields(record)]
        field_groups += [[name] for name in self._names["negatives"]]
        for fields in field_groups:
            negatives: list[_ScoredText] = []
            for name in fields:
                if record.get(name) is not None:
                    negatives += _parse_passages(self._get_value(record, name), name)
            if negatives:
                return negatives
        return []

    def _find_numbered_fields(self, record: Mapping[str, Any]) -> list[str]:
        """Return the names of `negative_1`, `negative_2` ..., ordered by number."""
        if self._has_negatives_column:
            return []
        names = [name for name in record if re.fullmatch("negative_[0-9]+", name)]
        # By length first, so that negative_10 comes after negative_9.
        return sorted(names, key=lambda name: (len(name), name))

    def _parse_teacher_scores(
        self,
        record: Mapping[str, Any],
        positives: list[_ScoredText],
        negatives: list[_ScoredText],
    ) -> list[float] | None:
        """Return the scores of positives and then negatives; None unless all are numbers."""
        values = get_first_value(record, self._names["scores"])
        if not isinstance(values, list) or len(values) != len(positives) + len(negatives):
            values = [
                *self._get_scores_of_role(record, "positive_scores", positives),
                *self._get_scores_of_role(record, "negative_scores", negatives),
            ]
        try:
            return [parse_number(value) for value in values]
        except Fault:
            return None

    def _get_scores_of_role(
        self, record: Mapping[str, Any], role: str, passages: list[_ScoredText]
    ) -> list[Any]:
        """Return the values in the score field of a role, else in the passage objects.

        A field with a wrong number of values gives [None], so that the record has no scores.
        """
        values = get_first_value(record, self._names[role])
        if values is None:
            return [passage.score for passage in passages]
        if not isinstance(values, list):
            values = [values]
        return values if len(values) == len(passages) else [None]


def _make_missing_field_fault(role: str, record: Mapping[str, Any]) -> Fault:
    fields = quoted(", ".join(record), 200)
    return Fault(f"missing {role}", f"its fields are {fields}; set --data_columns {role}=NAME")


def _remove_repeated_negatives(record: Record) -> Record:
    """Return a record with each negative once, with its first score."""
    first_positions: dict[str, int] = {}
    for position, negative in enumerate(record.negatives, start=len(record.positives)):
        first_positions.setdefault(negative, position)
    scores = record.scores
    if scores is not None:
        negative_scores = [scores[position] for position in first_positions.values()]
        scores = scores[: len(record.positives)] + negative_scores
    return record._replace(negatives=list(first_positions), scores=scores)


def _parse_passages(value: Any, field_name: str, title: str = "") -> list[_ScoredText]:
    """Return the passages of one field.

    Args:
        value: a text, an object {"title", "text"}, or a list of these.
        field_name: name of the field.
        title: title of a passage that is a text.

    Raises:
        Fault: for a value of another form.
    """
    items = value if isinstance(value, list) else [value]
    return [_parse_passage(item, field_name, title) for item in items]


def _parse_passage(item: Any, field_name: str, title: str) -> _ScoredText:
    if not isinstance(item, dict):
        return _ScoredText(passage_text(title, parse_text(item, field_name)), None)
    text = parse_nullable_text(item, ["text"], f"{field_name} text")
    text = passage_text(parse_title(item), text)
    if not text:
        raise Fault(f"empty {field_name} text")
    return _ScoredText(text, item.get("score"))


@lru_cache(maxsize=4096)
def _fold_name(name: str) -> str:
    """Return a name in lower case, without blanks, underscores and hyphens."""
    return re.sub(r"[\s_-]+", "", name).casefold()


def _is_odd(text: str) -> bool:
    """Return True for a number, a list or a label such as "relevant" in place of a text."""
    is_label = 1 < len(text) < _LONGEST_LABEL and _fold_name(text) in _WORDS_FOR_NUMBERS
    return is_label or bool(_NUMBER.fullmatch(text) or _LIST.fullmatch(text))


def _replace_word(label: object) -> object:
    """Return the number for which a label such as "True" stands, or else the label itself."""
    if isinstance(label, (str, bool)) and len(str(label)) < _LONGEST_LABEL:
        return _WORDS_FOR_NUMBERS.get(_fold_name(str(label)), label)
    return label


def _is_no_match(label: object) -> bool:
    """Return True for a whole number up to 0, or a word such as "False".

    Other negative numbers are scores, such as a cross-encoder's.
    """
    try:
        number = float(_replace_word(label))  # type: ignore[arg-type]  # may raise TypeError
    except (TypeError, ValueError):
        return False
    return number <= 0 and number.is_integer()


# Rows of tables: csv files with a header, lines of DPR's question files, and Arrow tables ---------


_DELIMITERS = ("\t", ",", ";")
_QUOTED_CELL = re.compile(r'(^|[\t,;]) *"(?:[^"]|"")*"')
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?[ \r]*\n', re.IGNORECASE)
"""The line before the header in files that Excel writes or reads."""
_CELL_SIZE_LIMIT = 2**31 - 1


class Header(NamedTuple):
    """The header of a table.

    Attributes:
        delimiter: the text between two cells.
        names: names of the columns.
        has_blanks_before_quotes: True if blanks stand before quoted cells. The rows are then
            expected to have them too.
    """

    delimiter: str
    names: list[str]
    has_blanks_before_quotes: bool


def read_csv(path: AnyPath) -> Rows:
    """Yield the rows of a table with a header, as {column name: cell}; a blank cell is None.

    The delimiter is comma, semicolon or tab: the one that is most frequent in the header outside of
    quotes. A line such as `sep=;` before the header names another one.

    Raises:
        DataError: for a broken quote, because the rows after it cannot be separated, for a header
            that is not UTF-8, and for a column name that occurs twice.
    """
    # The csv module's own limit of 128 KB per cell would refuse long documents.
    csv.field_size_limit(_CELL_SIZE_LIMIT)
    header = parse_header(read_head(path))
    names: list[str] = []
    line = 1
    with open_data_file(path) as file:
        # Bytes that are not UTF-8 become surrogates, which `parse_text` refuses in their row.
        text_file = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
        try:
            reader = csv.reader(
                text_file,
                delimiter=header.delimiter,
                strict=True,
                skipinitialspace=header.has_blanks_before_quotes,
            )
            for cells in reader:
                is_blank = not any(cell.strip() for cell in cells)
                if not names:
                    is_separator_line = not is_blank and cells[0].lower().startswith("sep=")
                    if not is_blank and not is_separator_line:
                        names = _parse_column_names(cells)
                    _check_column_names(path, line, names)
                elif is_blank:
                    pass
                elif len(cells) == len(names):
                    yield line, _make_row(names, cells)
                else:
                    detail = f"found {len(cells)} where the header has {len(names)}"
                    yield line, Fault("wrong number of columns", detail)
                line = reader.line_num + 1
        except csv.Error as error:
            remedy = 'write a " inside a quoted cell twice'
            fault = Fault("broken quoting", str(error), remedy)
            raise make_data_error(path, line, fault) from error
        except UNREADABLE as error:
            yield line, Fault("the file breaks off", str(error))


def _make_row(names: list[str], cells: list[str]) -> dict[str, str | None]:
    row: dict[str, str | None] = {}
    for name, cell in zip(names, cells, strict=True):
        row[name] = cell if cell.strip() else None
    return row


def parse_header(head: bytes) -> Header:
    """Parse the header of a table.

    Args:
        head: the first bytes of the file. The header is their first row; if they are not a table,
            the names are empty.
    """
    text = head.decode("utf-8", "replace")
    separator_line = _SEPARATOR_LINE.match(text)
    if separator_line:
        text = text[separator_line.end() :]
    text_outside_quotes = _QUOTED_CELL.sub(r"\1", text)
    first_line = text_outside_quotes.partition("\n")[0]
    delimiter = max(_DELIMITERS, key=first_line.count)
    if separator_line:
        delimiter = separator_line[1]
    try:
        cells = next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), [])
    except csv.Error:
        cells = []
    has_blanks_before_quotes = any(re.match(' +"', cell) for cell in cells)
    return Header(delimiter, _parse_column_names(cells), has_blanks_before_quotes)


def _parse_column_names(cells: list[str]) -> list[str]:
    # `parse_header` leaves quotes in a cell that begins with a blank, as the csv module does.
    return [cell.strip().strip('"') for cell in cells]


def _check_column_names(path: AnyPath, line: int, names: list[str]) -> None:
    """Raise `DataError` for a name that is not UTF-8, and for a name of two columns.

    A row can hold only one of two columns with the same name. Several columns may have no name:
    nothing is read from them.
    """
    for name in names:
        try:
            parse_text(name, "name", may_be_blank=True)
        except Fault as fault:
            raise make_data_error(path, line, fault) from None
    for name, count in Counter(names).items():
        if name and count > 1:
            reason = "two columns have the same name"
            repeated = Fault(reason, quoted(name), "rename or remove one")
            raise make_data_error(path, line, repeated)


def parse_question_line(line: str) -> list[str]:
    """Return the question and the list of answers, as text, of a line of DPR's `.qa.csv` files.

    Raises:
        Fault: for a line with another number of cells, or broken quoting.
    """
    try:
        cells = next(csv.reader([line], delimiter="\t"), [])
    except csv.Error as error:
        raise Fault("broken quoting", str(error)) from None
    if len(cells) != 2:
        raise Fault("not 2 columns", f"found {len(cells)}; a line is QUESTION<tab>['one', 'two']")
    return cells


def read_arrow(source: AnyPath, tables: Iterable[Any]) -> Rows:
    """Yield the rows of Arrow tables, with their numbers.

    Args:
        source: file or data set, for messages.
        tables: `pyarrow.Table` objects.

    Raises:
        DataError: if a table cannot be read.
    """
    number = 0
    try:
        for table in tables:
            # Arrow trusts the offsets in a file. Wrong offsets would crash the whole process.
            table.validate(full=True)
            for row in table.to_pylist():
                number += 1
                yield number, row
    except Exception as error:  # Arrow, the hub and the network have no common exception class
        fault = Fault("damaged, or of another format", str(error)[:300], "get it again")
        raise make_data_error(source, number + 1, fault) from error


logger = logging.getLogger(__name__)

OnBadRecord = Literal["stop", "skip"]
Rows = Iterator[tuple[int, Any]]
"""Rows of a file, each with its line number.

In an Arrow table it is the number of the row. In a JSON array, and in a file of JSON objects over
several lines, it is the number of the object.

A row is a text, a mapping, or the `Fault` that prevents it from being read.
"""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UNREADABLE = (OSError, EOFError, zlib.error)
"""Exceptions that reading a damaged gzip file raises."""

_UTF_16 = "UTF-16 or UTF-32 text (save it as UTF-8, for example with iconv -f utf-16 -t utf-8)"
_NO_MARK = "{0} text without a byte-order mark (save it as UTF-8: iconv -f {0} -t utf-8)"
_PICKLE = "a pickle, not text (load it in Python, and write JSON lines)"
_OTHER_FORMATS = {
    b"\xff\xfe": _UTF_16,
    b"\xfe\xff": _UTF_16,
    b"PK\x03\x04": "a zip archive (unpack it) or an Excel workbook (save the sheet as UTF-8 CSV)",
    b"\xd0\xcf\x11\xe0": "an Excel workbook (save the sheet as UTF-8 CSV)",
    b"\x1f\x8b": "gzip-compressed twice (unpack it once)",
    b"BZh": "a bzip2 file (unpack it with bunzip2; gzip can be read as it is)",
    b"\xfd7zXZ": "an xz file (unpack it with unxz; gzip can be read as it is)",
    b"\x28\xb5\x2f\xfd": "a zstd file (unpack it with unzstd; gzip can be read as it is)",
    b"7z\xbc\xaf": "a 7z archive (unpack it)",
    **{bytes([0x80, protocol]): _PICKLE for protocol in range(2, 6)},
}
"""{first bytes of a file that is not text: what it is, and what to do}."""
_TAR_MAGIC = slice(257, 262)

_ASCII = r"\t-\r -~"
# Letters of Western Europe stand alone or in pairs of small letters. In another encoding, such as
# that of Russian or Chinese, longer runs of bytes are no ASCII.
_CP1252_TEXT = re.compile(
    rf"(?!.*[À-ÿ]{{3}})(?!.*[À-Þ][À-ÿ])[{_ASCII}À-ÖØ-öø-ÿŒœŠšŽžŸ‘’“”„–—…•€£¥°§«»¿¡·®©™²³½ºª\u00a0]*",
    re.DOTALL,
)
_JAPANESE_TEXT = re.compile(
    rf"(?=.*[ぁ-んァ-ヶ])[{_ASCII}\u3000-\u30ff\u4e00-\u9fff\uff01-\uff5e]*", re.DOTALL
)
_LIKELY_ENCODINGS = {"cp1252": _CP1252_TEXT, "cp932": _JAPANESE_TEXT, "euc_jp": _JAPANESE_TEXT}
"""{encoding: pattern of a text that makes it likely}."""

_OBJECT_OVER_LINES = re.compile(rb'\{([^\n]*[,{])?[ \t\r]*\n\s*"|\{[^\n]*\[[ \t\r]*\n')
"""The start of a JSON object that goes on in the next line."""

_HEAD_SIZE = 1 << 16
_FLOAT32_MAX = 3.4028235e38
_LONGEST_QUOTE = 60

T = TypeVar("T")


class Fault(Exception):
    """The reason why one record cannot be used.

    Args:
        reason: the kind of fault; reports count records by it.
        detail: details of this record.
        remedy: the advice of the error message. The default is for a fault of single records.
    """

    def __init__(
        self,
        reason: str,
        detail: str = "",
        remedy: str = "correct the record, or leave such records out with --on_bad_record skip",
    ) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.remedy = remedy


class NotUtf8(Fault):
    """Bytes that are not UTF-8. Leaving such records out would lose every text with an accent.

    Args:
        data: the bytes of the line or the cell.
    """

    def __init__(self, data: bytes) -> None:
        start = 0
        try:
            data.decode()
        except UnicodeDecodeError as error:
            start = error.start
        text_before = data[:start].decode()[-20:]
        detail = f"byte 0x{data[start]:02x} after {quoted(text_before)}"
        remedy = "its encoding is not known, or it is not text: save it as UTF-8 text"
        for encoding, is_likely in _LIKELY_ENCODINGS.items():
            with suppress(UnicodeDecodeError):
                if is_likely.fullmatch(data.decode(encoding)):
                    detail += f"; the encoding may be {encoding}"
                    remedy = (
                        f"save the file as UTF-8, for example with iconv -f {encoding} -t utf-8"
                    )
                    break
        super().__init__("not UTF-8 text", detail, remedy)


@dataclass
class RecordReport:
    """Counts of used, bad and left-out records: seen = used + reported.

    Blank lines and the header of a table are not counted as records.

    Attributes:
        on_bad_record: "stop" raises `DataError` at the first bad record; "skip" leaves it out and
            counts it.
        seen: number of all records that were read.
        reported: number of records that were bad, or that a setting left out.
        by_reason: number of reported records for each reason.
        first: file and line of the first reported record; None if there is none.
    """

    on_bad_record: OnBadRecord = "stop"
    seen: int = 0
    reported: int = 0
    by_reason: Counter[str] = field(default_factory=Counter)
    first: str | None = None

    def __post_init__(self) -> None:
        check_choice("on_bad_record", self.on_bad_record, ("stop", "skip"))

    @property
    def used(self) -> int:
        """Number of records that were neither bad nor left out."""
        return self.seen - self.reported

    def leave_out(self, where: AnyPath, reason: str, count: int = 1) -> None:
        """Count records, which `seen` includes already, as left out.

        Args:
            where: file and, if known, line of the first of them.
            reason: the reason to count them by.
            count: number of records.
        """
        if count:
            self.reported += count
            self.by_reason[reason] += count
            self.first = self.first or str(where)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the counts to those of another report, given as its `vars` (from JSON)."""
        self.seen = state["seen"]
        self.reported = state["reported"]
        self.by_reason = Counter(state["by_reason"])
        self.first = state["first"]

    def summary(self) -> str:
        """Return one line: how many records were seen, used and left out, and why."""
        text = f"{self.seen} records: {self.used} used, {self.reported} left out"
        if self.reported:
            counts = [f"{count} {reason}" for reason, count in self.by_reason.most_common()]
            text += f" ({', '.join(counts)}; first: {self.first})"
        return one_line(text)

    def refuse_if_nothing_left(self, where: AnyPath, left: int, what: str) -> None:
        """Raise `DataError` if nothing usable is left, so that no run starts without data.

        Args:
            where: the file.
            left: number of usable items.
            what: plural noun for the items, such as "records".
        """
        if left == 0:
            raise DataError(
                one_line(f"{where}: no {what} left to use; {self.summary()} (correct the data)")
            )


def parse_rows(
    path: AnyPath, rows: Rows, parse: Callable[[Any], T], report: RecordReport
) -> Iterator[T]:
    """Yield the parsed rows of a file, without bad records.

    Args:
        path: the file, for messages.
        rows: its rows.
        parse: a function that parses a row, or raises `Fault`.
        report: counts go here; its `on_bad_record` decides about bad records.

    Raises:
        DataError: at a bad record under "stop", or if no record can be used.
    """
    num_used = 0
    for line, row in rows:
        report.seen += 1
        try:
            if isinstance(row, Fault):
                raise row
            value = parse(row)
        except Fault as fault:
            if report.on_bad_record == "stop":
                raise make_data_error(path, line, fault) from None
            report.leave_out(f"{path}:{line}", fault.reason)
        else:
            num_used += 1
            yield value
    report.refuse_if_nothing_left(path, num_used, "records")


def make_data_error(file: AnyPath, line: int, fault: Fault) -> DataError:
    """Return an error with the message `FILE:LINE: FAULT (REMEDY)`."""
    return DataError(one_line(f"{file}:{line}: {fault} ({fault.remedy})"))


def one_line(text: str) -> str:
    """Return a text in one line: unprintable characters and repeated blanks become one space."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(printable.split())


@cache
def warn_once(message: str) -> None:
    """Log a warning, unless the same one was logged before."""
    logger.warning(message)


def quoted(value: object, longest: int = _LONGEST_QUOTE) -> str:
    """Return the `repr` of a value for a message, cut to `longest` characters."""
    if isinstance(value, str):
        value = value[: longest + 1]  # the repr of a whole document would be slow
    shown = repr(value)
    if len(shown) <= longest:
        return shown
    return shown[: longest - 3] + "..."


def fold_case(text: str) -> str:
    """Return a text in lower case, with normal character widths and single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def passage_text(title: str, text: str) -> str:
    """Return title, space, text, as BEIR's encoders join them; no space beside an empty part."""
    if title.strip() and text.strip():
        return f"{title} {text}".strip()
    return (title + text).strip()


def parse_text(value: object, field_name: str, may_be_blank: bool = False) -> str:
    """Return `value` if it is a text.

    Args:
        value: the content of a field; None for a missing field.
        field_name: name of the field, for messages.
        may_be_blank: True to allow texts without a visible character.

    Raises:
        Fault: if the value is missing, not a string, blank, or not valid Unicode.
    """
    if value is None:
        raise Fault(f"missing {field_name}")
    if not isinstance(value, str):
        raise Fault(f"{field_name} is not text", f"found {quoted(value)}")
    if not may_be_blank and not value.strip():
        raise Fault(f"empty {field_name}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        # `read_csv` reads bytes that are not UTF-8 as these characters.
        if re.search("[\udc80-\udcff]", value):
            with suppress(UnicodeEncodeError):
                raise NotUtf8(value.encode("utf-8", "surrogateescape")) from None
        # JSON ("\ud800") can hold half of a surrogate pair. Arrow fails on it much later, and does
        # not name the line.
        raise Fault(f"{field_name} is not valid Unicode", f"found {quoted(value)}") from None
    return value


def get_first_value(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the value of the first of some fields that is present and not null, else None."""
    for name in names:
        if record.get(name) is not None:
            return record[name]
    return None


def parse_title(record: Mapping[str, Any], field_name: str = "title") -> str:
    """Return the title of a record, "" if it has none; raises `Fault` if it is not a text."""
    if record.get(field_name) is None:
        return ""
    return parse_text(record[field_name], field_name, may_be_blank=True)


def parse_nullable_text(record: Mapping[str, Any], names: Sequence[str], field_name: str) -> str:
    """Return the text in the first of some fields that is not null; "" if all of them are null.

    A blank cell of a table is null.

    Args:
        record: the record.
        names: names of the fields.
        field_name: name of the text, for messages.

    Raises:
        Fault: if the record has none of the fields, or for a value that is not a text.
    """
    value = get_first_value(record, names)
    is_null = value is None and any(name in record for name in names)
    if is_null:
        return ""
    return parse_text(value, field_name, may_be_blank=True)


def parse_id(value: object, field_name: str) -> str:
    """Return an id, which is a text or an integer, as a text; raises `Fault` for other values."""
    if type(value) is int:  # a bool is an int too, but no id
        return str(value)
    return parse_text(value, field_name)


def parse_number(value: object) -> float:
    """Return a number, or a text that holds one; raises `Fault` unless float32 can hold it."""
    try:
        number = float(value)  # type: ignore[arg-type]  # other types raise TypeError
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    is_finite_float32 = abs(number) <= _FLOAT32_MAX  # False for NaN
    if not is_finite_float32:
        raise Fault("score is not a number", f"found {quoted(value)}")
    return number


def split_cells(line: str, num_cells: int, separator: str | None = "\t") -> list[str]:
    """Return the cells of a line; raises `Fault` if their number differs from `num_cells`.

    Args:
        line: a line without its end.
        num_cells: number of expected cells.
        separator: text between cells; None: any white space.
    """
    cells = line.split(separator)
    if len(cells) != num_cells:
        raise Fault(f"not {num_cells} columns", f"found {len(cells)}")
    return cells


def open_data_file(path: AnyPath) -> gzip.GzipFile | io.BufferedReader:
    """Open a file for reading bytes, and unpack gzip, which is detected by its first bytes.

    Raises:
        DataError: if the file does not exist or cannot be read, or is neither gzip nor text in
            UTF-8 or a similar encoding, such as UTF-16, a zip archive or an Excel workbook.
    """
    if not os.path.isfile(path) or not os.access(path, os.R_OK):
        raise DataError(one_line(f"{path}: no such file, or it may not be read (check the path)"))
    with open(path, "rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    start = b""
    with suppress(*UNREADABLE), gzip.open(path) if is_gzip else open(path, "rb") as file:
        start = file.read(_TAR_MAGIC.stop)  # damage is reported later, with its line
    other_formats = [text for magic, text in _OTHER_FORMATS.items() if start.startswith(magic)]
    for encoding, zeros, others in (("UTF-16LE", 1, 0), ("UTF-16BE", 0, 1)):
        # Characters of ASCII have a zero beside them.
        has_zeros = start[zeros::2].count(0) > len(start) // 4 or start[zeros : zeros + 1] == b"\0"
        if has_zeros and not start[others::2].count(0):
            other_formats.append(_NO_MARK.format(encoding))
    if start[:4].count(0) == 3:
        other_formats.append(_UTF_16)
    if b"\0" in start[:4]:
        other_formats.append("not text: there is a zero among its first bytes (give a text file)")
    if start[_TAR_MAGIC] == b"ustar":
        other_formats.append("a tar archive (unpack it)")
    if other_formats:
        raise DataError(one_line(f"{path}: is {other_formats[0]}"))
    if is_gzip:
        return gzip.open(path, "rb")
    return open(path, "rb")


def read_head(path: AnyPath) -> bytes:
    """Return up to 64 KB from the start of a file, unpacked, without leading white space.

    The result is empty for a file that is damaged there. Reading its rows reports the damage with
    its line.
    """
    with open_data_file(path) as file, suppress(*UNREADABLE):
        return file.read1(_HEAD_SIZE).removeprefix(BYTE_ORDER_MARK).lstrip()
    return b""


def read_lines(path: AnyPath) -> Rows:
    """Yield every line that is not blank, without its end; a truncated file ends with a `Fault`."""
    number = 0
    with open_data_file(path) as file:
        try:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    text = line.decode("utf-8-sig")
                except UnicodeDecodeError:
                    yield number, NotUtf8(line)
                else:
                    yield number, text.rstrip("\r\n")
        except UNREADABLE as error:
            yield number + 1, Fault("the file breaks off", str(error))


def read_json_lines(path: AnyPath) -> Rows:
    """Yield the JSON object of every line, or objects that are written over several lines."""
    if _OBJECT_OVER_LINES.match(read_head(path)):
        for number, value in read_json_items(path, "", multiple_values=True):
            yield number, _require_object(value)
        return
    for number, line in read_lines(path):
        if isinstance(line, Fault):
            yield number, line
            continue
        try:
            value = json.loads(line)
        # json raises ValueError for broken JSON and for integers that are too long to parse, and
        # RecursionError for very deep nesting.
        except (ValueError, RecursionError) as error:
            yield number, Fault("broken JSON", str(error))
        else:
            yield number, _require_object(value)


def _require_object(value: object) -> object:
    """Return a JSON object, or a `Fault` for any other JSON value."""
    if isinstance(value, dict):
        return value
    return Fault("not a JSON object", f"found {quoted(value)}")


def read_json_array(path: AnyPath) -> Rows:
    """Yield the objects of a JSON array with their numbers."""
    for number, value in read_json_items(path, "item"):
        yield number, _require_object(value)


def read_json_items(path: AnyPath, prefix: str, function: str = "items", **options: Any) -> Rows:
    """Yield numbered parts of a JSON file, one in memory at a time.

    Args:
        prefix: place of the parts, as in ijson.
        function: name of the function of ijson that reads them.
        options: further arguments of this function.

    Raises:
        DataError: for broken JSON, because the parts after it cannot be separated.
    """
    import ijson

    number = 0
    with open_data_file(path) as file:
        try:
            if file.peek(3).startswith(BYTE_ORDER_MARK):
                file.read(3)
            parts = getattr(ijson, function)(file, prefix, use_float=True, **options)
            for number, part in enumerate(parts, start=1):
                yield number, part
        except (ijson.JSONError, *UNREADABLE) as error:
            if "UTF8" in str(error):
                for line_number, line in read_lines(path):
                    if isinstance(line, NotUtf8):
                        raise make_data_error(path, line_number, line) from error
            reason = "broken JSON, or the file breaks off"
            fault = Fault(reason, str(error), "correct the JSON, or get the file again")
            raise make_data_error(path, number + 1, fault) from error
