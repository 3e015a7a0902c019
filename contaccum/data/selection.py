"""Settings by which records become training rows, and the sampling of one row's texts.

A record is a query with all its positives and negatives. A row is one training example: the query,
one positive and h negatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from contaccum.errors import ConfigError, check_choice

PositivesUsed = Literal["draw", "first", "all"]
MissingNegatives = Literal["fill", "drop"]
POSITIVES_USED: tuple[PositivesUsed, ...] = get_args(PositivesUsed)
MISSING_NEGATIVES: tuple[MissingNegatives, ...] = get_args(MissingNegatives)


@dataclass(frozen=True)
class Selection:
    """Settings that decide which rows are made of a record.

    Attributes:
        num_hard_negatives: h, the number of negatives of each row.
        positives: "draw": a row for each record, with one of its positives, sampled anew in each
            epoch. "first": a row for each record, with its first positive. "all": a row for each
            positive. None: decided by `load_training_data`.
        negatives_from: sample the h negatives from only this many of the record's negatives, the
            first in its list; None: from all. If it is h, each epoch has the first h.
        missing_negatives: for a record with fewer than h negatives, "fill" adds passages of other
            records, and "drop" leaves the record out.

    Raises:
        ConfigError: for a value out of range, or values that cannot work together.
    """

    num_hard_negatives: int = 0
    positives: PositivesUsed | None = None
    negatives_from: int | None = None
    missing_negatives: MissingNegatives = "fill"

    def __post_init__(self) -> None:
        check_choice("positives", self.positives, (None, *POSITIVES_USED))
        check_choice("missing_negatives", self.missing_negatives, MISSING_NEGATIVES)
        h = self.num_hard_negatives
        if self.negatives_from is not None and not 0 < h <= self.negatives_from:
            raise ConfigError(
                f"num_hard_negatives={h} with negatives_from={self.negatives_from}: "
                "num_hard_negatives must be 1 or more, and negatives_from no less than it"
            )

    def assign_rows(self, used_records: np.ndarray, num_positives: np.ndarray) -> np.ndarray | None:
        """Return the record number and the positive's index for each row, int64 (N, 2).

        Row i is one line of the result. For example, with positives="all", two records with 1 and 2
        positives give the rows [[0, 0], [1, 0], [1, 1]]. The result is None, to save memory, if row
        i is simply record i.

        Args:
            used_records: numbers of the records that are not dropped, int64.
            num_positives: number of positives of each of all records.
        """
        rows_per_record = np.ones_like(used_records)
        if self.positives == "all":
            rows_per_record = num_positives[used_records]
        if len(used_records) == len(num_positives) and rows_per_record.max() <= 1:
            return None
        first_row_of_record = np.cumsum(rows_per_record) - rows_per_record
        rows = np.arange(rows_per_record.sum())
        record_numbers = np.repeat(used_records, rows_per_record)
        positive_indices = rows - np.repeat(first_row_of_record, rows_per_record)
        return np.column_stack([record_numbers, positive_indices])

    def sample(
        self,
        rng: np.random.Generator,
        positives: Sequence[str],
        negatives: Sequence[str],
        positive_index: int = 0,
    ) -> tuple[str, list[str]]:
        """Sample the texts of a row.

        Args:
            rng: the random generator of the row.
            positives: all positives of the record.
            negatives: all negatives of the record.
            positive_index: index of the row's positive, unless the positive is drawn.

        Returns:
            The positive, and h negatives, or fewer if the record has fewer.
        """
        positive = positives[positive_index]
        distinct_positives = list(dict.fromkeys(positives))
        if self.positives == "draw" and len(distinct_positives) > 1:
            positive = distinct_positives[int(rng.integers(len(distinct_positives)))]
        distinct_negatives = list(dict.fromkeys(negatives[: self.negatives_from]))
        if len(distinct_negatives) <= self.num_hard_negatives:
            return positive, distinct_negatives
        order = rng.permutation(len(distinct_negatives))[: self.num_hard_negatives]
        return positive, [distinct_negatives[index] for index in order]
