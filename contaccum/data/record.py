"""What every reader yields: a query with all its positives and negatives, and the rules by which texts are formed.

Which field or column holds what is the readers' business (`fields` and the modules of the formats); which positive
and which negatives an epoch trains on is decided above them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from contaccum.data.beir_folder import passage_text
from contaccum.data.records import Fault, RecordReport, filled_text_of, quoted, text_of

NEGATIVES_NOT_USED = "negatives not used, num_hard_negatives is 0"
NOT_A_PAIR = "judgements of 0 or less, not a pair"


class Record(NamedTuple):
    """A query and its passages, in the order of the file; a passage is (title + separator + text).strip()."""

    query: str
    positives: list[str]
    negatives: list[str]
    topic: str | None = None  # where topics were asked for


@dataclass(frozen=True)
class RecordRules:
    """How passages are formed, and how many of a record are.

    Attributes:
        title_separator: between a title and its text.
        max_positives: the first so many; None: all. Those that are not formed are not checked either.
        num_negatives: the first so many; None: all.
        least_negatives: a record with fewer is a bad one; None: `num_negatives`, or none where that is None.
        topic_column: the field with a record's topic; None: it has none.
    """

    title_separator: str = " "
    max_positives: int | None = None
    num_negatives: int | None = None
    topic_column: str | None = None
    least_negatives: int | None = None

    def positives(self, listed: list[Any], what: str, title: object = None) -> list[str]:
        """The passages of `listed`, each a text (whose title is `title`) or an object {"title", "text"}.

        Raises:
            Fault: there is none, or one that is used is not text; `what` names the field.
        """
        if not listed:
            raise Fault(f"empty {what}")
        return [passage_of(value, title, what, self.title_separator) for value in listed[: self.max_positives]]

    def negatives(self, listed: list[Any], what: str) -> list[str]:
        """As `positives`; there may be none.

        Raises:
            Fault: fewer than `least_negatives`, or one that is used is not text.
        """
        self.require_negatives(len(listed))
        return [passage_of(value, None, what, self.title_separator) for value in listed[: self.num_negatives]]

    def require_negatives(self, count: int) -> None:
        """Raise `Fault` when a record has fewer negatives than `least_negatives`."""
        least = self.num_negatives if self.least_negatives is None else self.least_negatives
        if least is not None and count < least:
            detail = f"{count} where num_hard_negatives is {least}"
            raise Fault("too few hard negatives", detail, "lower num_hard_negatives, or set missing_negatives to fill")

    def topic(self, record: Mapping[str, Any]) -> str | None:
        """The topic of a record, a text or a number.

        Raises:
            Fault: it is missing, or something else.
        """
        if self.topic_column is None:
            return None
        value = record.get(self.topic_column)
        return str(value) if isinstance(value, int) else text_of(value, self.topic_column)

    def note_unused(self, report: RecordReport, negatives: bool) -> None:
        """Say in the report that a record has negatives and nobody asked for them."""
        if negatives and self.num_negatives == 0:
            report.note(NEGATIVES_NOT_USED)


def training_text(value: object, what: str) -> str:
    """`value` if it is text to train on; `what` names the field in the fault.

    Raises:
        Fault: it is missing, no string, blank, or holds a NUL character or half a surrogate pair.
    """
    text = filled_text_of(value, what)
    if "\0" in text:
        raise Fault(f"NUL character in {what}")
    return text


def passage_of(value: object, title: object, what: str, title_separator: str) -> str:
    """A passage that is a text (with its title beside it) or an object {"title", "text"}.

    Raises:
        Fault: as `training_text`, of the text or the title; a title may be blank or None.
    """
    if isinstance(value, dict):
        title, value, what = value.get("title"), value.get("text"), f"{what} text"
    text = training_text(value, what)
    heading = "" if title is None else text_of(title, "title")
    if "\0" in heading:
        raise Fault("NUL character in title")
    return passage_text(heading, text, title_separator)


def list_of(value: object, what: str) -> list[Any]:
    """`value` if it is a list.

    Raises:
        Fault: it is missing (None) or something else.
    """
    if value is None:
        raise Fault(f"missing {what}")
    if not isinstance(value, list):
        raise Fault(f"{what} is not a list", f"found {quoted(value)}")
    return value
