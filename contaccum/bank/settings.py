"""Settings of the loss: declared and checked here, for losses, arguments and command line."""

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
COMPENSATED = ("auto", "mean")
"""The values of ``drift_compensation`` that move banked entries with the mean of their tower."""


@dataclass
class LossOptions:
    """Settings of the loss that are options of a training run under the same name.

    `BankedInfoNCE` says what each of them does.
    """

    normalize_by: NormalizeBy = option(
        "local",
        "local: mean over the local rows. all: over bank rows too, as in the paper.",
        get_args(NormalizeBy),
    )
    mask_duplicates: bool = option(True, "Known positives of a query are not its negatives.")
    bank_hard_negatives: bool = option(True, "Store hard negatives in the bank.")
    bank_weight: float = option(
        1.0, "How often a banked pair counts; above 1: pairs the bank counts as."
    )
    drift_compensation: DriftCompensationMode = option(
        "auto", "How entries that age are corrected.", get_args(DriftCompensationMode)
    )
    center_gradients: CenterGradients = option(
        "auto", "The towers that no update moves as a whole.", get_args(CenterGradients)
    )
    false_negative_margin: float | None = option(
        None, "Leave out what scores above a positive by more than this."
    )
    guide_margin: float = option(
        0.0, "Leave out what a guide scores above its score of the positive less this."
    )
    guide_margin_strategy: GuideMarginStrategy = option(
        "absolute", "relative: a share of that score.", get_args(GuideMarginStrategy)
    )
    hardness_mode: HardnessMode | None = option(
        None, "The negatives that count more.", get_args(HardnessMode)
    )
    hardness_strength: float = option(0.0, "Times their similarity, added to their logits.")
    directions: list[str] = option(
        ["query_to_doc"], "And doc_to_query, query_to_query, doc_to_doc, or some of them."
    )
    partition_mode: PartitionMode = option(
        "joint", "joint: one softmax over the directions.", get_args(PartitionMode)
    )


@dataclass
class LossSettings(LossOptions):
    """All settings of `BankedInfoNCE`, checked when they are made.

    Raises:
        ConfigError (a ValueError): for values out of range, or that exclude each other.
    """

    bank_size: int = 1024
    query_bank_size: int | None = None
    temperature: float = 1.0
    similarity: Similarity = option("dot", "", get_args(Similarity))
    gather_across_devices: bool = False
    pairs_per_update: int | None = None

    def __post_init__(self) -> None:
        self.directions = _ordered_directions(self.directions)
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
        """True if banked entries move along with the mean of their tower."""
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


def _ordered_directions(directions: str | Iterable[str]) -> list[str]:
    """Return the directions in the order of ``DIRECTIONS``, without repeats."""
    names = [directions] if isinstance(directions, str) else list(directions)
    for name in names:
        check_choice("directions", name, DIRECTIONS)
    if "query_to_doc" not in names:
        raise ConfigError(
            f"directions={','.join(names)}: add query_to_doc, which has the positives"
        )
    return [name for name in DIRECTIONS if name in names]
