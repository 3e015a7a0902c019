"""What a record is, and what a file calls its parts: found by the usual names, or said by a mapping.

It serves every format whose records have named fields: JSON lines, csv, parquet and Hugging Face datasets. Reading
those files is not its business.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from contaccum.data.records import Fault, filled_text_of, one_line, passage_text, quoted, text_of
from contaccum.errors import ConfigError, DataError, closest
from contaccum.files import AnyPath

# In order of preference.
QUERY_FIELDS = ("query", "anchor", "question")
POSITIVE_FIELDS = (
    *("positive", "positives", "positive_passages", "positive_ctxs"),
    *("passage", "answer", "text", "document", "pos"),
)
NEGATIVE_FIELDS = ("negatives", "negative", "negative_passages", "hard_negatives", "hard_negative_ctxs", "neg")
_NUMBERED = re.compile(r"negative_[1-9][0-9]*")

ROLES = ("query", "positive", "negatives", "title")
_ALIASES = {"positives": "positive", "negative": "negatives"}


class Record(NamedTuple):
    """A query and its passages, in the order of the file; a passage is (title + separator + text).strip()."""

    query: str
    positives: list[str]
    negatives: list[str]
    topic: str | None = None  # where topics were asked for


@dataclass(frozen=True)
class RecordRules:
    """How the passages of a record are formed.

    Attributes:
        title_separator: between a title and its text.
        num_negatives: the first so many are formed and checked; None: all.
        topic_column: the field with a record's topic; None: it has none.
    """

    title_separator: str = " "
    num_negatives: int | None = None
    topic_column: str | None = None

    def positives(self, listed: list[Any], what: str, title: object = None) -> list[str]:
        """The passages of `listed`, each a text (whose title is `title`) or an object {"title", "text"}.

        Raises:
            Fault: there is none, or one is not text; `what` names the field.
        """
        if not listed:
            raise Fault(f"empty {what}")
        return [self._passage(value, title, what) for value in listed]

    def negatives(self, listed: list[Any], what: str) -> list[str]:
        """As `positives`; there may be none."""
        return [self._passage(value, None, what) for value in listed[: self.num_negatives]]

    def topic(self, record: Mapping[str, Any]) -> str | None:
        """The topic of a record, a text or a number; raises `Fault` where it is missing or something else."""
        if self.topic_column is None:
            return None
        value = record.get(self.topic_column)
        return str(value) if isinstance(value, int) else text_of(value, self.topic_column)

    def _passage(self, value: object, title: object, what: str) -> str:
        if isinstance(value, dict):
            title, value, what = value.get("title"), value.get("text"), f"{what} text"
        text = filled_text_of(value, what)
        return passage_text("" if title is None else text_of(title, "title"), text, self.title_separator)


def parse_columns(given: Mapping[str, Any] | Sequence[str] | None) -> dict[str, str]:
    """A column mapping, from a mapping, from ``ROLE=NAME`` words, or from one word that is a JSON object.

    Returns:
        {role: name of the column}; roles are query, positive, negatives and title. Empty for None.

    Raises:
        ConfigError: an unknown role, a role twice, or a name that is no text.
    """
    words = [given] if isinstance(given, str) else list(given or ())
    pairs = list(given.items()) if isinstance(given, Mapping) else [pair for word in words for pair in _pairs_of(word)]
    columns: dict[str, str] = {}
    for key, name in pairs:
        role = _ALIASES.get(key, key)
        if role not in ROLES:
            raise ConfigError(f"data_columns: {quoted(key)} is unknown (use {', '.join(ROLES)}){closest(key, ROLES)}")
        if not isinstance(name, str) or not name:
            raise ConfigError(f"data_columns: {key} must name a column, got {quoted(name)}")
        if role in columns:
            raise ConfigError(f"data_columns: {role} is given twice ({quoted(columns[role])} and {quoted(name)})")
        columns[role] = name
    return columns


def _pairs_of(word: str) -> list[tuple[str, Any]]:
    if word.startswith("{"):
        try:
            return list(json.loads(word).items())
        except ValueError as error:
            raise ConfigError(f"data_columns: {quoted(word)} is not a JSON object ({error})") from error
    role, equals, name = word.partition("=")
    if not equals:
        raise ConfigError(f"data_columns: {quoted(word)} is not ROLE=NAME (for example query=question)")
    return [(role, name)]


class Fields:
    """Finds the parts of the records of one file by the names of their fields.

    The first record that has a query and a positive decides which they are for its whole file. Were each record read by
    itself, one without "positive" would silently pass for one with "text".

    Args:
        columns: {role: name} as `parse_columns` gives it; roles that it leaves out are found by the usual names.
    """

    def __init__(self, columns: Mapping[str, str] | None = None) -> None:
        self.mapped = dict(columns or {})
        self._found: tuple[str, str] | None = None
        # A mapped name that no record has is a mistake, but one record without negatives or title is not.
        self._unseen = {role: name for role, name in self.mapped.items() if role in ("negatives", "title")}
        self._names: Collection[str] = ()

    def settle(self, names: Collection[str]) -> tuple[str, str]:
        """The fields of query and positive, chosen among `names` unless that was done.

        Raises:
            Fault: one of the two is not there.
        """
        if self._found is None:
            query = self._choose("query", QUERY_FIELDS, names)
            self._found = query, self._choose("positive", POSITIVE_FIELDS, names, query)
        return self._found

    def needed(self, names: Sequence[str], where: str, topic_column: str | None = None) -> list[str]:
        """Those of a table's columns that are read: query, positive, title, negatives, topic.

        Raises:
            DataError: one is missing or there twice; it names those that there are, and the closest.
        """
        try:
            found = self.settle(names)
        except Fault as fault:
            raise DataError(one_line(f"{where}: {fault.reason}: {fault.detail} ({fault.mend})")) from None
        self._saw(names)
        self.refuse_unseen(where)
        if topic_column is not None and topic_column not in names:
            columns = quoted(", ".join(names), 200) + closest(topic_column, names)
            raise DataError(one_line(f"{where}: no column for topic_column={topic_column}: its columns are {columns}"))
        read = {*found, self._title, topic_column, *self._negative_fields(names)}
        twice = next((name for name in read if list(names).count(name or "") > 1), None)
        if twice is not None:
            raise DataError(one_line(f"{where}: two columns are called {quoted(twice)} (rename one)"))
        return [name for name in names if name in read]

    def read(self, record: Mapping[str, Any], rules: RecordRules) -> Record:
        """The record of these fields.

        Raises:
            Fault: what is missing, empty or no text.
        """
        query_field, positive_field = self.settle(record)
        self._saw(record)
        query = filled_text_of(record.get(query_field), query_field)
        value, title = record.get(positive_field), self._title
        heading = None if title in (query_field, positive_field) else record.get(title)
        # None goes on as a passage, so that the fault says "missing".
        positives = rules.positives([None] if value is None else _listed(value), positive_field, heading)
        return Record(query, positives, rules.negatives(self._negatives(record), "negatives"), rules.topic(record))

    def refuse_unseen(self, where: AnyPath) -> None:
        """Raise `DataError` for a mapped name that no record had, once there was one that could be read."""
        for role, name in self._unseen.items() if self._found else ():
            there = f"there are {quoted(', '.join(self._names), 200)}{closest(name, self._names)}"
            mend = f"correct --data_columns {role}={name}"
            raise DataError(one_line(f"{where}: no record has a field {quoted(name)}; {there} ({mend})"))

    def _saw(self, names: Collection[str]) -> None:
        if self._unseen:
            self._unseen = {role: name for role, name in self._unseen.items() if name not in names}
            self._names = names

    @property
    def _title(self) -> str:
        return self.mapped.get("title", "title")

    def _choose(self, role: str, known: Sequence[str], names: Collection[str], taken: str = "") -> str:
        mapped, others = self.mapped.get(role), {taken, *self.mapped.values()}
        free = [name for name in known if name not in others] if mapped is None else [mapped]
        found = next((name for name in free if name in names), None)
        if found is not None:
            return found
        there = f"its fields are {quoted(', '.join(names), 200)}"
        if mapped is not None:
            mend = f"correct --data_columns {role}={mapped}{closest(mapped, names)}"
            raise Fault(f"missing {role}", f"no field {quoted(mapped)}; {there}", mend)
        mend = f"name it one of {', '.join(known)}, or say which it is with --data_columns {role}=NAME"
        raise Fault(f"missing {role}", there, mend)

    def _negative_fields(self, names: Iterable[str]) -> list[str]:
        if "negatives" in self.mapped:
            return [name for name in names if name == self.mapped["negatives"]]
        free = {*names} - {*(self._found or ()), *self.mapped.values()}
        # By number, not by place; a gap (a record without its negative_1) hides none after it.
        numbered = sorted((name for name in free if _NUMBERED.fullmatch(name)), key=lambda name: (len(name), name))
        return [*numbered, *(name for name in NEGATIVE_FIELDS if name in free)]

    def _negatives(self, record: Mapping[str, Any]) -> list[Any]:
        """All numbered negatives or, where there are none, those of the first field that has any; null is none."""
        found: list[Any] = []
        for name in self._negative_fields(record):
            if record[name] is not None and (not found or _NUMBERED.fullmatch(name)):
                found += _listed(record[name])
        return found


def _listed(value: object) -> list[Any]:
    """The passages of one field: a list, one passage, or an object of lists, which is how Arrow keeps some lists."""
    if isinstance(value, list):
        return value
    if isinstance(value, dict) and isinstance(value.get("text"), list):
        texts, titles = value["text"], value.get("title")
        if not isinstance(titles, list) or len(titles) != len(texts):
            titles = [None] * len(texts)
        return [{"title": title, "text": text} for title, text in zip(titles, texts, strict=True)]
    return [value]
