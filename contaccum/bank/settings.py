"""Settings of `BankedInfoNCE`, with their checks.

The loss contrasts the pairs of a micro-batch (local pairs) with pairs of earlier micro-batches,
which it stores in a memory bank (banked pairs, also called entries). Each query is a row of a score
matrix, each document a column. A tower is the encoder in one of its two roles: for queries or for
passages.

Losses, training arguments and the command line use this one declaration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

from contaccum.errors import ConfigError, check_choice
from contaccum.options import option

Similarity = Literal["dot", "cos"]
NormalizeBy = Literal["local", "all"]
DriftCompensationMode = Literal["auto", "mean", "fresh", "none"]
CenterGradients = Literal["auto", "both", "passages", "queries", "none"]
GuideMarginStrategy = Literal["absolute", "relative"]

DEFAULT_TEMPERATURE = {"cos": 0.05, "dot": 1.0}
"""{similarity: temperature} where none is given."""


@dataclass
class LossOptions:
    """Settings of the loss that training arguments and the command line take over unchanged.

    `BankedInfoNCE` documents them; the texts here are for ``--help``. `LossSettings` adds the
    settings that a training run declares with other defaults, or computes.
    """

    normalize_by: NormalizeBy = option(
        "local",
        "local: divide the summed row losses by the local rows. all: by all rows (the paper).",
        get_args(NormalizeBy),
    )
    mask_duplicates: bool = option(
        True, "Exclude known positives of a query from its negatives. Texts are compared by ids."
    )
    bank_hard_negatives: bool = option(True, "Store hard negatives in the bank.")
    bank_weight: float = option(
        1.0,
        "Up to 1: weight of each banked pair. Above 1: weight of the whole bank, in local pairs.",
    )
    drift_compensation: DriftCompensationMode = option(
        "auto",
        "Correction of bank entries that an older encoder encoded; see docs/drift.md.",
        get_args(DriftCompensationMode),
    )
    center_gradients: CenterGradients = option(
        "auto",
        "Towers from whose gradients the mean is subtracted, so that they do not move as a whole.",
        get_args(CenterGradients),
    )
    false_negative_margin: float | None = option(
        None, "Exclude documents that score higher than the row's positive by more than this."
    )
    guide_margin: float = option(
        0.0, "Exclude documents whose guide score exceeds that of the positive, minus this margin."
    )
    guide_margin_strategy: GuideMarginStrategy = option(
        "absolute",
        "absolute: the margin is guide_margin. relative: guide_margin x the positive's score.",
        get_args(GuideMarginStrategy),
    )


@dataclass
class LossSettings(LossOptions):
    """All settings of `BankedInfoNCE`, checked on construction.

    Raises:
        ConfigError (a ValueError): for values out of range.
    """

    bank_size: int = 1024
    query_bank_size: int | None = None
    temperature: float = 1.0
    similarity: Similarity = option("dot", "", get_args(Similarity))
    gather_across_devices: bool = False
    pairs_per_update: int | None = None

    def __post_init__(self) -> None:
        if self.bank_size < 0:
            raise ConfigError(f"bank_size must be at least 0, got {self.bank_size}")
        if self.query_bank_size not in (None, 0, self.bank_size):
            raise ConfigError(
                "query_bank_size must be 0 (no query bank) or equal to bank_size "
                f"({self.bank_size}), got {self.query_bank_size}"
            )
        for name in ("temperature", "bank_weight"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a positive number, got {value}")
        for setting in fields(self):
            choices = setting.metadata.get("choices")
            if choices is not None:
                check_choice(setting.name, getattr(self, setting.name), choices)

    @property
    def moves_entries(self) -> bool:
        """True if bank entries move along with the mean of their tower's embeddings.

        See `contaccum.bank.drift`.
        """
        return self.drift_compensation in ("auto", "mean")
