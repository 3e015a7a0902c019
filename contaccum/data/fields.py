"""Fields of a training record: the choice of them, and the parsing of their values.

A field holds a text, a passage object, messages, an id, or a list of these. Files are read in
`contaccum.data.readers`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from contaccum.data.columns import FIELDS
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
from contaccum.data.text_lookup import TextLookup
from contaccum.errors import ConfigError

TEACHER_SCORES_REMEDY = "contaccum mine --cross_encoder writes scores"

_SCORED_PAIR_FIELDS = frozenset({"sentence1", "messages", "response"})
"""Fields of the formats with scored pairs, in which a low score marks a pair without match.

`sentence1` is a field of sentence-transformers' scored pairs, the others are fields of ms-swift's.
"""

_PASSAGE_ID_FIELDS = ("id", "docid")
"""Fields of a passage object that hold its id in the corpus."""

_PASSAGE_FIELDS = (*_PASSAGE_ID_FIELDS, "title", "text", "score")
"""Fields of a passage object that are read."""

_WORDS_FOR_NUMBERS = {"true": 1, "yes": 1, "false": 0, "no": 0}
"""Words that files have in place of the labels 1 and 0."""

_MIN_SCORE_REMEDY = (
    'set the least score of a match: {"path": ..., "min_score": 1}, or with contaccum fit: '
    "--min_score 1"
)


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


class _ScoredText(NamedTuple):
    """The text of a passage, and the unparsed value of its field "score", or None."""

    text: str
    score: Any


class _ChosenFields(NamedTuple):
    """Names of the fields that hold the query and the positives in all records of a file."""

    query: str
    positive: str


def check_min_score(min_score: float | None) -> None:
    """Raise `ConfigError` for a ``min_score`` that is not finite; None is accepted."""
    if min_score is not None and not math.isfinite(min_score):
        raise ConfigError(f"min_score={min_score}: give a number")


class RecordParser:
    """Parser for the records of one file.

    The first record with a query and a positive decides which fields hold them in all records. If
    the fields were chosen for each record, a record that lacks "positive" but has a field "text"
    could silently get a wrong positive.

    Args:
        columns: {role: field name} for roles whose fields have unusual names.
        corpus: texts of the passages that records name by id; None: records hold texts.
        min_score: least score of a pair that is a match; None: scores of pairs are not read.
        needs_scores: True if a record without teacher scores cannot be used.

    Attributes:
        unseen_columns: the field names of `columns` that no record has had so far.
    """

    def __init__(
        self,
        columns: Mapping[str, str],
        corpus: TextLookup | None = None,
        min_score: float | None = None,
        needs_scores: bool = False,
    ) -> None:
        self._corpus = corpus
        self._min_score = min_score
        self._needs_scores = needs_scores
        self._has_negatives_column = "negatives" in columns
        self.unseen_columns = set(columns.values())
        self._chosen: _ChosenFields | None = None
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
        chosen = self._chosen or _ChosenFields(
            self._choose_field("query", record), self._choose_field("positive", record)
        )
        query = _parse_text_or_messages(record.get(chosen.query), chosen.query)
        if not self._is_match(record, chosen):
            return None
        # There is no name if `columns` gives the column "title" another role.
        title_names = self._names["title"]
        title = parse_title(record, title_names[0]) if title_names else ""
        positive_field = chosen.positive
        positives = self._parse_passages(record.get(positive_field), positive_field, title)
        if not positives:
            raise Fault(f"empty {positive_field}")
        negatives = self._parse_negatives(record)
        scores = self._parse_teacher_scores(record, positives, negatives)
        if scores is None and self._needs_scores:
            raise Fault(
                "no teacher scores",
                f"distill needs a number for each of its passages; {TEACHER_SCORES_REMEDY}",
            )
        self._chosen = chosen  # the first usable record decides for all others
        parsed_record = Record(
            query,
            positives=[positive.text for positive in positives],
            negatives=[negative.text for negative in negatives],
            scores=scores,
        )
        return _remove_repeated_negatives(parsed_record)

    def _choose_field(self, role: str, record: Mapping[str, Any]) -> str:
        present_names = [name for name in self._names[role] if name in record]
        for name in present_names:
            if record[name] is not None:
                return name
        if present_names:
            return present_names[0]
        raise _make_missing_field_fault(role, record)

    def _is_match(self, record: Mapping[str, Any], chosen: _ChosenFields) -> bool:
        """Return False for a pair whose score is below `min_score`.

        Raises:
            Fault: with `min_score`, for a pair whose score is missing or not a number. Without it,
                for a pair with the label 0, and in a format with scored pairs for every score.
        """
        score = get_first_value(record, self._names["score"])
        if self._min_score is not None:
            if record.keys().isdisjoint(self._names["score"]):
                raise _make_missing_field_fault("score", record)
            return parse_number(_replace_word(score)) >= self._min_score
        if score is not None and not _SCORED_PAIR_FIELDS.isdisjoint(chosen):
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
                    negatives += self._parse_passages(record[name], name)
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

    def _parse_passages(self, value: Any, field_name: str, title: str = "") -> list[_ScoredText]:
        """Return the passages of one field.

        Args:
            value: a text, an object {"title", "text"}, an id or an object {"id"} of the corpus, or
                a list of these. A passage that consists of messages is always in such a list.
                Objects may also be given as an object of lists: {"title": [...], "text": [...]}.
            field_name: name of the field.
            title: title of a passage that is a text.

        Raises:
            Fault: for a value of another form.
        """
        if _is_object_of_lists(value):
            items = _split_object_of_lists(value, field_name, title)
        else:
            items = value if isinstance(value, list) else [value]
        return [self._parse_passage(item, field_name, title) for item in items]

    def _parse_passage(self, item: Any, field_name: str, title: str) -> _ScoredText:
        passage_id = self._get_passage_id(item, field_name)
        if passage_id is not None:
            text = self._look_up(passage_id)
        elif isinstance(item, dict) and item:
            item_text = parse_nullable_text(item, ["text"], f"{field_name} text")
            text = passage_text(parse_title(item), item_text)
            if not text:
                raise Fault(f"empty {field_name} text")
        else:
            text = passage_text(title, _parse_text_or_messages(item, field_name))
        score = item.get("score") if isinstance(item, dict) else None
        return _ScoredText(text, score)

    def _get_passage_id(self, item: Any, field_name: str) -> Any:
        """Return the id of a passage whose text is in the corpus, or None.

        - An object is such a passage if it has an id and no text. Without a corpus, an object with
          a title is the passage itself, even if it has no text.
        - A text or a number is an id if the records refer to a corpus, or if the name of the field
          ends in "_ids".
        """
        if isinstance(item, dict):
            is_title_only = self._corpus is None and parse_title(item).strip() != ""
            if item.get("text") is not None or is_title_only:
                return None
            return get_first_value(item, _PASSAGE_ID_FIELDS)
        holds_ids = self._corpus is not None or field_name.endswith("_ids")
        if holds_ids and isinstance(item, (str, int)):
            return item
        return None

    def _look_up(self, passage_id: Any) -> str:
        """Return the text of a passage of the corpus; raises `Fault` if there is none."""
        if self._corpus is None:
            raise Fault(
                "ids where texts are expected",
                'name the file that holds the texts: {"path": ..., "corpus": ...} (contaccum split '
                "then writes the texts into its files)",
            )
        return self._corpus.get_text(self._corpus.find_number(passage_id))

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


def _is_object_of_lists(value: Any) -> bool:
    """Return True for {"id": [...], "title": [...], "text": [...]}: the fields of several passages.

    `datasets` stores a feature of the type ``Sequence({...})`` in this way.
    """
    if not isinstance(value, dict):
        return False
    return any(isinstance(value.get(name), list) for name in (*_PASSAGE_ID_FIELDS, "text"))


def _split_object_of_lists(
    passages: Mapping[str, Any], field_name: str, title: str
) -> list[dict[str, Any]]:
    """Return an object for each passage of an object of lists.

    Args:
        passages: {name of a field: list of its values}. A value that is not a list is the value of
            all passages.
        field_name: name of the field that holds the passages, for messages.
        title: title of the passages if they have no field "title".

    Raises:
        Fault: for lists of different lengths.
    """
    lists = {}
    common_fields: dict[str, Any] = {"title": title}
    for name in _PASSAGE_FIELDS:
        value = passages.get(name)
        if isinstance(value, list):
            lists[name] = value
        elif value is not None:
            common_fields[name] = value
    if len({len(values) for values in lists.values()}) > 1:
        raise Fault(f"{field_name} has lists of different lengths", f"found {quoted(passages)}")
    objects = []
    for values in zip(*lists.values(), strict=True):
        objects.append({**common_fields, **dict(zip(lists, values, strict=True))})
    return objects


def _parse_text_or_messages(value: Any, field_name: str) -> str:
    """Return a text, or the contents of messages joined by spaces.

    ms-swift joins the messages of the system and the user in the same way.
    """
    is_messages = (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(message, dict) for message in value)
    )
    if not is_messages:
        return parse_text(value, field_name)
    contents = [parse_text(message.get("content"), f"{field_name} content") for message in value]
    return " ".join(contents)


def _replace_word(label: object) -> object:
    """Return the number for which a label such as "True" stands, or else the label itself."""
    return _WORDS_FOR_NUMBERS.get(str(label).strip().lower(), label)


def _is_no_match(label: object) -> bool:
    """Return True for a label that is a number up to 0, or a word such as "False"."""
    try:
        return float(_replace_word(label)) <= 0  # type: ignore[arg-type]  # may raise TypeError
    except (TypeError, ValueError):
        return False
