"""Settings of the loss: one dataclass, checked once, for losses, arguments and command line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from contaccum.errors import ConfigError, check_choice

Similarity = Literal["dot", "cos"]
NormalizeBy = Literal["local", "all"]
DriftCompensationMode = Literal["auto", "mean", "fresh", "none"]
CenterGradients = Literal["auto", "both", "passages", "queries", "none"]
GuideMarginStrategy = Literal["absolute", "relative"]
HardnessMode = Literal["in_batch_negatives", "hard_negatives", "all_negatives"]
PartitionMode = Literal["joint", "per_direction"]

DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
COMPENSATED = ("auto", "mean")
"""The values of ``drift_compensation`` that move banked entries with the mean of their tower."""


@dataclass(frozen=True)
class LossSettings:
    """Settings of `BankedInfoNCE`, whose docstring says what each of them does.

    Raises:
        ConfigError (a ValueError): for values out of range, or that exclude each other.
    """

    bank_size: int = 1024
    query_bank_size: int | None = None
    temperature: float = 1.0
    similarity: Similarity = "dot"
    normalize_by: NormalizeBy = "local"
    mask_duplicates: bool = True
    bank_hard_negatives: bool = True
    drift_compensation: DriftCompensationMode = "auto"
    gather_across_devices: bool = False
    center_gradients: CenterGradients = "auto"
    pairs_per_update: int | None = None
    bank_weight: float = 1.0
    false_negative_margin: float | None = None
    guide_margin: float = 0.0
    guide_margin_strategy: GuideMarginStrategy = "absolute"
    hardness_mode: HardnessMode | None = None
    hardness_strength: float = 0.0
    directions: tuple[str, ...] = ("query_to_doc",)
    partition_mode: PartitionMode = "joint"

    def __post_init__(self) -> None:
        object.__setattr__(self, "directions", _ordered_directions(self.directions))
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
        check_choice("similarity", self.similarity, ("dot", "cos"))
        check_choice("normalize_by", self.normalize_by, ("local", "all"))
        check_choice(
            "drift_compensation", self.drift_compensation, ("auto", "mean", "fresh", "none")
        )
        center_gradients = ("auto", "both", "passages", "queries", "none")
        check_choice("center_gradients", self.center_gradients, center_gradients)
        check_choice("guide_margin_strategy", self.guide_margin_strategy, ("absolute", "relative"))
        modes = (None, "in_batch_negatives", "hard_negatives", "all_negatives")
        check_choice("hardness_mode", self.hardness_mode, modes)
        check_choice("partition_mode", self.partition_mode, ("joint", "per_direction"))

    def _check_combinations(self) -> None:
        is_strength = 0 <= self.hardness_strength < math.inf
        is_missing = self.hardness_mode is not None and self.hardness_strength == 0
        if not is_strength or is_missing:
            raise ConfigError(
                "hardness_strength must be above 0 with a hardness_mode, "
                f"got {self.hardness_strength!r}"
            )
        without_positives = {"query_to_query", "doc_to_doc"} & set(self.directions)
        if self.partition_mode == "per_direction" and without_positives:
            direction = sorted(without_positives)[0]
            raise ConfigError(
                f"partition_mode=per_direction with {direction}, which has no positives: set joint"
            )

    @property
    def moves_entries(self) -> bool:
        """Whether banked entries move along with the mean of their tower."""
        return self.drift_compensation in COMPENSATED


def check_bank_sizes(bank_size: int, query_bank_size: int | None, least: int = 0) -> None:
    """Raise `ConfigError` for sizes that no bank can have."""
    if not isinstance(bank_size, int) or bank_size < least:
        raise ConfigError(
            f"bank_size must be a whole number of at least {least}, got {bank_size!r}"
        )
    if query_bank_size not in (None, 0, bank_size):
        raise ConfigError(
            f"query_bank_size must be 0 (no query bank) or {bank_size}, got {query_bank_size!r}"
        )


def _ordered_directions(directions: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the directions in the order of ``DIRECTIONS``, without repeats."""
    named = (directions,) if isinstance(directions, str) else tuple(directions)
    for name in named:
        check_choice("directions", name, DIRECTIONS)
    if "query_to_doc" not in named:
        raise ConfigError(
            f"directions={','.join(named)}: add query_to_doc, which has the positives"
        )
    return tuple(name for name in DIRECTIONS if name in named)
