"""Settings of the loss, with their checks.

Losses, training arguments and the command line use this one declaration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal, get_args

from contaccum.errors import ConfigError, check_choice
from contaccum.options import option

Similarity = Literal["dot", "cos"]
NormalizeBy = Literal["local", "all"]
DriftCompensationMode = Literal["auto", "mean", "fresh", "none"]
CenterGradients = Literal["auto", "both", "passages", "queries", "none"]
GuideMarginStrategy = Literal["absolute", "relative"]
HardnessMode = Literal["in_batch_negatives", "hard_negatives", "all_negatives"]
PartitionMode = Literal["joint", "per_direction"]

DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
"""Similarity directions of the loss: rows_to_columns, as in MultipleNegativesRankingLoss."""

MODES_THAT_MOVE_ENTRIES = ("auto", "mean")
"""Values of ``drift_compensation`` that move bank entries with the mean of their tower."""


@dataclass
class LossOptions:
    """Settings of the loss that are also options of a training run, under the same names.

    `BankedInfoNCE` documents them.
    """

    normalize_by: NormalizeBy = option(
        "local",
        "Divisor of the summed row losses. local: local rows; all: bank rows too (the paper).",
        get_args(NormalizeBy),
    )
    mask_duplicates: bool = option(
        True, "Exclude known positives of a query from its negatives, by text ids."
    )
    bank_hard_negatives: bool = option(True, "Store hard negatives in the bank.")
    bank_weight: float = option(
        1.0, "Weight of a banked pair, up to 1. Above 1: weight of the whole bank, in pairs."
    )
    drift_compensation: DriftCompensationMode = option(
        "auto",
        "Correction of old bank entries; see docs/drift.md.",
        get_args(DriftCompensationMode),
    )
    center_gradients: CenterGradients = option(
        "auto",
        "Towers whose mean gradient is subtracted over each update.",
        get_args(CenterGradients),
    )
    false_negative_margin: float | None = option(
        None, "Exclude documents that score above the row's positive by more than this margin."
    )
    guide_margin: float = option(
        0.0, "Exclude documents that the guide scores above its score of the positive - margin."
    )
    guide_margin_strategy: GuideMarginStrategy = option(
        "absolute",
        "absolute: subtract guide_margin. relative: multiply it with the positive's score first.",
        get_args(GuideMarginStrategy),
    )
    hardness_mode: HardnessMode | None = option(
        None, "Negatives whose logits are raised by their similarity.", get_args(HardnessMode)
    )
    hardness_strength: float = option(
        0.0, "Factor of the similarity that hardness_mode adds to a logit."
    )
    directions: list[str] = option(
        ["query_to_doc"],
        "Similarity directions: query_to_doc, and any of doc_to_query, query_to_query, doc_to_doc.",
    )
    partition_mode: PartitionMode = option(
        "joint",
        "joint: one softmax over all directions. per_direction: mean of one loss per direction.",
        get_args(PartitionMode),
    )


@dataclass
class LossSettings(LossOptions):
    """All settings of `BankedInfoNCE`, checked on construction.

    Raises:
        ConfigError (a ValueError): for values out of range, and for settings that exclude each
            other.
    """

    bank_size: int = 1024
    query_bank_size: int | None = None
    temperature: float = 1.0
    similarity: Similarity = option("dot", "", get_args(Similarity))
    gather_across_devices: bool = False
    pairs_per_update: int | None = None

    def __post_init__(self) -> None:
        self.directions = _sort_directions(self.directions)
        check_bank_sizes(self.bank_size, self.query_bank_size)
        self._check_numbers()
        self._check_choices()
        self._check_combinations()

    def _check_numbers(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"temperature must be a positive number, got {self.temperature!r}")
        is_number = isinstance(self.bank_weight, (int, float))
        if not is_number or not 0 < self.bank_weight < math.inf:
            raise ConfigError(f"bank_weight must be a positive number, got {self.bank_weight!r}")
        margin = self.false_negative_margin
        if margin is not None and not margin >= 0:
            raise ConfigError(f"false_negative_margin must be at least 0, got {margin!r}")

    def _check_choices(self) -> None:
        for setting in fields(self):
            choices = setting.metadata.get("choices")
            if choices is None:
                continue
            if setting.default is None:
                choices = (None, *choices)
            check_choice(setting.name, getattr(self, setting.name), choices)

    def _check_combinations(self) -> None:
        is_in_range = 0 <= self.hardness_strength < math.inf
        is_missing = self.hardness_mode is not None and self.hardness_strength == 0
        if not is_in_range or is_missing:
            raise ConfigError(
                "hardness_strength must be above 0 with a hardness_mode, "
                f"got {self.hardness_strength!r}"
            )
        if self.partition_mode != "per_direction":
            return
        for direction in ("doc_to_doc", "query_to_query"):
            if direction in self.directions:
                raise ConfigError(
                    f"partition_mode=per_direction with {direction}: that direction has no "
                    "positives, so it has no loss of its own; set partition_mode=joint"
                )

    @property
    def moves_entries(self) -> bool:
        """True if bank entries move along with the mean of their tower."""
        return self.drift_compensation in MODES_THAT_MOVE_ENTRIES


def check_bank_sizes(bank_size: int, query_bank_size: int | None, minimum: int = 0) -> None:
    """Raise `ConfigError` if the sizes are out of range.

    Args:
        minimum: smallest valid ``bank_size``.
    """
    if not isinstance(bank_size, int) or bank_size < minimum:
        raise ConfigError(
            f"bank_size must be a whole number of at least {minimum}, got {bank_size!r}"
        )
    if query_bank_size not in (None, 0, bank_size):
        raise ConfigError(
            f"query_bank_size must be 0 (no query bank) or equal to bank_size ({bank_size}), "
            f"got {query_bank_size!r}"
        )


def _sort_directions(directions: str | Iterable[str]) -> list[str]:
    """Return the directions in the order of `DIRECTIONS`, without duplicates.

    Raises:
        ConfigError: for an unknown direction, or without ``query_to_doc``.
    """
    if isinstance(directions, str):
        directions = [directions]
    names = list(directions)
    for name in names:
        check_choice("directions", name, DIRECTIONS)
    if "query_to_doc" not in names:
        raise ConfigError(
            f"directions={','.join(names)}: add query_to_doc, the direction from queries to their "
            "positives"
        )
    return [name for name in DIRECTIONS if name in names]
