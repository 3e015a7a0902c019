"""What a file calls its query, positive, negatives and title: found by the usual names, or said by a mapping.

It serves every format whose records have named fields: JSON lines, csv, parquet and Hugging Face datasets. Reading
those files is not its business.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from contaccum.data.record import Record, RecordRules, training_text
from contaccum.data.records import Fault, one_line, quoted
from contaccum.errors import ConfigError, DataError

# In order of preference.
QUERY_FIELDS = ("query", "anchor", "question")
POSITIVE_FIELDS = (
    "positive",
    "positives",
    "positive_passages",
    "positive_ctxs",
    "passage",
    "answer",
    "text",
    "document",
    "pos",
)
NEGATIVE_FIELDS = ("negatives", "negative", "negative_passages", "hard_negatives", "hard_negative_ctxs", "neg")
TITLE_FIELD = "title"
_NUMBERED = re.compile(r"negative_[1-9][0-9]*")

_ROLES = ("query", "positive", "negatives", "title")
_ALIASES = {"positives": "positive", "negative": "negatives"}


def parse_columns(given: Mapping[str, Any] | Sequence[str] | None) -> dict[str, str]:
    """A column mapping, from a mapping, from ``ROLE=NAME`` words, or from one word that is a JSON object.

    Returns:
        {role: name of the column}; roles are query, positive, negatives and title. Empty for None.

    Raises:
        ConfigError: an unknown role, a role twice, or a name that is no text.
    """
    pairs: list[tuple[str, Any]] = []
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif isinstance(given, str):
        pairs = _pairs_of(given)
    else:
        for word in given or ():
            pairs += _pairs_of(word)
    columns: dict[str, str] = {}
    for key, name in pairs:
        role = _ALIASES.get(key, key)
        if role not in _ROLES:
            raise ConfigError(
                f"data_columns: {quoted(key)} is unknown (use {', '.join(_ROLES)}){_closest(key, _ROLES)}"
            )
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
    """Finds the parts of a record by the names of its fields.

    Args:
        columns: {role: name} as `parse_columns` gives it; roles that it leaves out are found by the usual names.
        topic_column: one more column that a table must have.

    Attributes:
        query, positive: names of the fields, None until `settle`.
    """

    def __init__(self, columns: Mapping[str, str] | None = None, topic_column: str | None = None) -> None:
        self.mapped = dict(columns or {})
        self.topic_column = topic_column
        self.query: str | None = None
        self.positive: str | None = None
        # A mapped name that no record has is a mistake, but one record without negatives or title is not.
        self._never_seen = {role: self.mapped[role] for role in ("negatives", "title") if role in self.mapped}
        self._last: tuple[tuple[str, ...], _Layout] | None = None

    def settle(self, names: Collection[str], kind: str = "fields") -> None:
        """Choose the query and the positive among `names`; what is chosen stays.

        The first record that has both decides for its whole file. Were each record read by itself, one without
        "positive" would silently pass for one with "text".

        Raises:
            Fault: one of the two is not there; `kind` says what the names are ("fields", "columns").
        """
        if self.query is None or self.positive is None:
            query = self._choose("query", QUERY_FIELDS, names, kind)
            self.query, self.positive = query, self._choose("positive", POSITIVE_FIELDS, names, kind, query)

    def settle_table(self, names: Sequence[str], path: str | Path, line: int | None = None) -> list[str]:
        """Choose for a table, whose columns are the same for every record.

        Returns:
            The columns that are needed: query, positive, title, negatives.

        Raises:
            DataError: a column is missing or there twice; it names those that there are, and the closest.
        """
        where = str(path) if line is None else f"{path}:{line}"
        try:
            self.settle(names, "columns")
            for role, name in self._never_seen.items():
                if name not in names:
                    raise _no_such(role, name, names, "columns")
        except Fault as fault:
            raise DataError(one_line(f"{where}: {fault.reason}: {fault.detail} ({fault.mend})")) from None
        assert self.query is not None and self.positive is not None
        layout = self._layout_of(names)
        titles = [] if layout.title is None else [layout.title]
        needed = [self.query, self.positive, *titles, *layout.negative_fields]
        if self.topic_column is not None:
            if self.topic_column not in names:
                found = f"its columns are {quoted(', '.join(names), 200)}"
                close = _closest(self.topic_column, names)
                raise DataError(one_line(f"{where}: no column for topic_column={self.topic_column}: {found}{close}"))
            needed.append(self.topic_column)
        for name in needed:
            if list(names).count(name) > 1:
                raise DataError(one_line(f"{where}: two columns are called {quoted(name)} (rename one)"))
        return list(dict.fromkeys(needed))

    def read(self, record: Mapping[str, Any], rules: RecordRules) -> tuple[Record, bool]:
        """The record, and whether it lists negatives, used or not. `settle` comes first.

        Raises:
            Fault: what is missing, empty or no text.
        """
        assert self.query is not None and self.positive is not None
        layout = self._layout_of(record)
        query = training_text(record.get(self.query), self.query)
        value = record.get(self.positive)
        title = None if layout.title is None else record[layout.title]
        # None goes on as a passage, so that the fault says "missing".
        positives = rules.positives([None] if value is None else _listed(value), self.positive, title)
        negatives = layout.negatives_of(record)
        return Record(query, positives, rules.negatives(negatives, "negatives"), rules.topic(record)), bool(negatives)

    def refuse_never_seen(self, path: str | Path, names: Iterable[str]) -> None:
        """Raise `DataError` for a mapped name that no record of the file had; `names` are the last record's."""
        for role, name in self._never_seen.items():
            fault = _no_such(role, name, list(names), "fields")
            raise DataError(one_line(f"{path}: no record has it: {fault.detail} ({fault.mend})"))

    def _choose(self, role: str, known: Sequence[str], names: Collection[str], kind: str, taken: str = "") -> str:
        if role in self.mapped:
            if self.mapped[role] not in names:
                raise _no_such(role, self.mapped[role], names, kind)
            return self.mapped[role]
        others = {taken, *self.mapped.values()}
        found = next((name for name in known if name in names and name not in others), None)
        if found is None:
            mend = f"name it one of {', '.join(known)}, or say which it is with --data_columns {role}=NAME"
            raise Fault(f"missing {role}", f"its {kind} are {quoted(', '.join(names), 200)}", mend)
        return found

    def _layout_of(self, names: Iterable[str]) -> _Layout:
        """What the fields `names` are for. Most records have the fields of the one before, so that one is kept."""
        key = tuple(names)
        if self._last is None or self._last[0] != key:
            for role, name in list(self._never_seen.items()):
                if name in key:
                    del self._never_seen[role]
            self._last = key, self._new_layout(key)
        return self._last[1]

    def _new_layout(self, names: tuple[str, ...]) -> _Layout:
        title = self.mapped.get("title", TITLE_FIELD)
        taken = {self.query, self.positive}
        found = title if title in names and title not in taken else None
        if "negatives" in self.mapped:
            return _Layout(found, [], [name for name in names if name == self.mapped["negatives"]])
        others = {*taken, *self.mapped.values()}
        free = [name for name in names if name not in others]
        # By number, not by place; a gap (a record without its negative_1) hides none after it.
        numbered = sorted((name for name in free if _NUMBERED.fullmatch(name)), key=lambda name: (len(name), name))
        return _Layout(found, numbered, [name for name in NEGATIVE_FIELDS if name in free])


class _Layout(NamedTuple):
    """The fields of a record beside its query and positive."""

    title: str | None
    numbered: list[str]
    other_negatives: list[str]

    @property
    def negative_fields(self) -> list[str]:
        return [*self.numbered, *self.other_negatives]

    def negatives_of(self, record: Mapping[str, Any]) -> list[Any]:
        """All numbered negatives or, where there are none, those of the first field that has any; null is none."""
        listed = [item for name in self.numbered if record[name] is not None for item in _listed(record[name])]
        for name in self.other_negatives:
            if listed:
                break
            if record[name] is not None:
                listed = _listed(record[name])
        return listed


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


def _no_such(role: str, name: str, names: Collection[str], kind: str) -> Fault:
    found = f"no {kind[:-1]} {quoted(name)}; its {kind} are {quoted(', '.join(names), 200)}"
    return Fault(f"missing {role}", found, f"correct --data_columns {role}={name}{_closest(name, names)}")


def _closest(name: object, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f"; did you mean {quoted(close[0])}?" if close else ""
