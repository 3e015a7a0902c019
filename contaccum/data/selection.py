"""What a record gives to training: which of its positives, how many of its negatives, and what is drawn from.

Settings and rows only. Where rows are kept is the affair of `row_files`, the drawing that of `draws`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from contaccum.data.formats import JUDGED, DataFormat
from contaccum.data.record import Record
from contaccum.errors import ConfigError

PositivesUsed = Literal["draw", "first", "all"]
MissingNegatives = Literal["fill", "drop", "stop"]
POSITIVES_USED: tuple[PositivesUsed, ...] = ("draw", "first", "all")
MISSING_NEGATIVES: tuple[MissingNegatives, ...] = ("fill", "drop", "stop")

DROPPED = "too few hard negatives, dropped"

TRIPLES_TAKEN = 30
"""Negatives of an MS MARCO query to draw from, unless said otherwise: its triples list hundreds."""


class Row(NamedTuple):
    """A row of training data.

    Attributes:
        query, positive: texts; the positive is the record's first, or the row's own.
        negatives: h texts, the first that are listed; None for each that is missing.
        topic: where topics were asked for.
        known: positives of the query that this row tells of, its own among them.
        positives: to draw from; None where there is nothing to draw.
        pool: negatives to draw from, more than h; None where there is nothing to draw.
    """

    query: str
    positive: str
    negatives: list[str | None]
    topic: str | None
    known: list[str]
    positives: list[str] | None
    pool: list[str] | None


@dataclass(frozen=True)
class Selection:
    """How rows are made of records.

    Attributes:
        num_hard_negatives: h, of each row.
        positives: "draw": a row for each record, with one of its positives, drawn anew in each epoch. "first": always
            the first. "all": a row for each positive. None: "all" for judgements (BEIR, MS MARCO), each of which is a
            pair, and "draw" for others.
        negatives_from: draw from the first so many that are listed; None: from all (of an MS MARCO folder, 30).
        draw_negatives: False: always the first h.
        missing_negatives: what to do with a record of fewer than h. "fill": passages of other records take their
            place. "drop": leave it out. "stop": it is a bad record.

    Raises:
        ConfigError: for values that cannot work, or not together.
    """

    num_hard_negatives: int = 0
    positives: PositivesUsed | None = None
    negatives_from: int | None = None
    draw_negatives: bool = True
    missing_negatives: MissingNegatives = "fill"

    def __post_init__(self) -> None:
        h = self.num_hard_negatives
        if isinstance(h, bool) or not isinstance(h, int) or h < 0:
            raise ConfigError(f"num_hard_negatives={h!r} is not a number of texts (use 0 or more)")
        for name, allowed in (("positives", (None, *POSITIVES_USED)), ("missing_negatives", MISSING_NEGATIVES)):
            if getattr(self, name) not in allowed:
                shown = ", ".join(str(value) for value in allowed if value is not None)
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown (use one of {shown})")
        if self.negatives_from is None:
            return
        if h == 0:
            raise ConfigError(
                f"negatives_from={self.negatives_from} with num_hard_negatives=0: no negative is used. Set "
                "num_hard_negatives, or drop negatives_from"
            )
        if not self.draw_negatives:
            raise ConfigError(
                f"negatives_from={self.negatives_from} with draw_negatives=false: nothing is drawn. Drop one of them"
            )
        if self.negatives_from < h:
            raise ConfigError(
                f"negatives_from={self.negatives_from} with num_hard_negatives={h}: draw from at least as many. Raise "
                "negatives_from"
            )

    def resolved(self, data_format: DataFormat, folder: bool) -> Selection:
        """The same, with the defaults of a format in place of None; ``folder``: whether the source is one."""
        positives = self.positives or ("all" if data_format in JUDGED else "draw")
        triples = data_format == "msmarco" and folder and self.num_hard_negatives > 0 and self.draw_negatives
        most = max(TRIPLES_TAKEN, self.num_hard_negatives) if triples else None
        return replace(self, positives=positives, negatives_from=self.negatives_from or most)

    @property
    def negatives_read(self) -> int | None:
        """How many negatives of a record are needed; None: all."""
        return self.negatives_from if self.draw_negatives and self.num_hard_negatives else self.num_hard_negatives

    @property
    def negatives_required(self) -> int:
        """With fewer, a record is a bad one."""
        return self.num_hard_negatives if self.missing_negatives == "stop" else 0

    def rows(self, record: Record) -> Iterator[Row]:
        """The rows of a record: none where it is dropped."""
        h, listed = self.num_hard_negatives, record.negatives
        if self.draw_negatives and len(listed) > h:
            # So that no text is drawn twice; unless then there were too few of them.
            distinct = list(dict.fromkeys(listed))
            listed = distinct if len(distinct) >= h else listed
        if len(listed) < h and self.missing_negatives == "drop":
            return
        negatives: list[str | None] = [*listed[:h], *[None] * (h - len(listed))]
        pool = listed if self.draw_negatives and len(listed) > h else None
        if self.positives == "all":
            for positive in record.positives:
                yield Row(record.query, positive, negatives, record.topic, [positive], None, pool)
            return
        positives = record.positives
        if len(positives) > 1:
            positives = list(dict.fromkeys(positives))
        drawn = positives if len(positives) > 1 and self.positives == "draw" else None
        yield Row(record.query, positives[0], negatives, record.topic, positives, drawn, pool)
