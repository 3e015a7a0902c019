"""Fields of a training record: their names, the choice of them, and the parsing of their values.

A field holds a text, a passage object, or a list of these. Files are read in `readers`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from contaccum.data.records import (
    Fault,
    get_first_value,
    parse_nullable_text,
    parse_number,
    parse_text,
    parse_title,
    passage_text,
    quoted,
)
from contaccum.errors import ConfigError, check_choice

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
    # Similarity score of query and positive; it is a match if the score is at least `min_score`.
    "score": ("score", "label"),
}
"""{role: usual names of the field}. The first name that a record has is used.

The fields `negative_1`, `negative_2` ... hold negatives too. The names include those of
FlagEmbedding, Tevatron (src/tevatron/retriever/dataset.py), and sentence-transformers' scored
pairs.
"""

TEACHER_SCORES_REMEDY = "contaccum mine --cross_encoder writes scores"

_WORDS_FOR_NUMBERS = {"true": 1, "yes": 1, "false": 0, "no": 0}
"""Words that files have in place of the labels 1 and 0."""

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
        odd_roles: {role: its first text} of the roles in which all texts so far are numbers or
            lists. They are ids, labels or scores instead of queries and passages.
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
        self._names: dict[str, list[str]] = {}
        for role, usual_names in FIELDS.items():
            if role in columns:
                self._names[role] = [columns[role]]
            else:
                self._names[role] = [name for name in usual_names if name not in assigned_names]

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
            is_score = role == "score" and self._min_score is None
            if role not in ("query", "positive") and not is_score:
                used_names.update(names)
        if _replace_word(record.get("label")) in (1, "1", "1.0"):
            used_names.add("label")  # `_is_match` refuses a label of 0
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
            if all(_NUMBER.fullmatch(text) or _LIST.fullmatch(text) for text in texts):
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
            Fault: with `min_score`, for a pair whose score is missing or not a number. Without it,
                for a pair with the label 0, and for every score of a pair with a field `sentence1`.
        """
        score = get_first_value(record, self._names["score"])
        if self._min_score is not None:
            if record.keys().isdisjoint(self._names["score"]):
                raise _make_missing_field_fault("score", record)
            return parse_number(_replace_word(score)) >= self._min_score
        # `sentence1` is a field of sentence-transformers' scored pairs, in which a low score marks
        # a pair without match.
        if score is not None and "sentence1" in chosen:
            raise Fault("a pair with a score", _MIN_SCORE_REMEDY)
        label = record.get("label")
        if "label" in self._names["score"] and label is not None and _is_no_match(label):
            raise Fault("a pair with label 0", _MIN_SCORE_REMEDY)
        return True

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


def _replace_word(label: object) -> object:
    """Return the number for which a label such as "True" stands, or else the label itself."""
    return _WORDS_FOR_NUMBERS.get(str(label).strip().lower(), label)


def _is_no_match(label: object) -> bool:
    """Return True for a label that is a number up to 0, or a word such as "False"."""
    try:
        return float(_replace_word(label)) <= 0  # type: ignore[arg-type]  # may raise TypeError
    except (TypeError, ValueError):
        return False
