"""Selection rules: which candidates of a query become its hard negatives.

The rules and their names are those of sentence-transformers' `mine_hard_negatives`, with a margin
for a cross-encoder besides. docs/mining.md explains them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from contaccum.errors import ConfigError, check_choice

SAMPLING = ("top", "random")

_CANDIDATES_PER_NEGATIVE = 10
"""Number of candidates per negative that are ranked if a rule may drop some of them. It is the
number of sentence-transformers."""


def _define_rule(
    default: Any, help_text: str, value_type: type = float, choices: Sequence[str] | None = None
) -> Any:
    """Return a dataclass field whose metadata are the keyword arguments of its CLI option."""
    metadata = {"type": value_type, "help": help_text}
    if choices is not None:
        return field(default=default, metadata={**metadata, "choices": choices})
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class SelectionRules:
    """Rules that a candidate must pass to become a hard negative of its query.

    In the help texts, p is the lowest score of the query's positives. A candidate with a score
    close to p may be relevant although nobody judged it, and the margins drop such candidates.

    If `range_max` is None, it is `range_min` + `num_negatives`; with a rule that may drop
    candidates, or with random sampling, it is `range_min` + 10 `num_negatives`.
    """

    num_negatives: int = _define_rule(3, "number of negatives per query", int)
    range_min: int = _define_rule(
        0, "number of the best candidates to skip, after the score rules", int
    )
    range_max: int | None = _define_rule(
        None, "rank of the last candidate; known positives are not counted in the rank", int
    )
    absolute_margin: float | None = _define_rule(
        None,
        "keep candidates with a score of at most p - margin; p is the lowest score of the query's "
        "positives",
    )
    relative_margin: float | None = _define_rule(
        None, "keep candidates with a score of at most p - margin * abs(p)"
    )
    max_score: float | None = _define_rule(None, "keep candidates with at most this score")
    min_score: float | None = _define_rule(None, "keep candidates with at least this score")
    cross_encoder_margin: float | None = _define_rule(
        None,
        "keep candidates whose cross-encoder logit is at least this far below p; "
        "3.0 with --cross_encoder",
    )
    sampling: Literal["top", "random"] = _define_rule(
        "top", "use the best candidates, or a random choice of them", str, choices=SAMPLING
    )
    seed: int = _define_rule(0, "seed of the random sampling", int)

    def check(self, has_cross_encoder: bool) -> None:
        """Raise `ConfigError` for settings that cannot work together.

        The check is cheap. Call it before data or models are loaded.
        """
        check_choice("sampling", self.sampling, SAMPLING)
        least_range_max = self.range_min + self.num_negatives
        if self.range_max is not None and self.range_max < least_range_max:
            raise ConfigError(
                f"range_max={self.range_max} leaves too few candidates: "
                f"raise it to {least_range_max} or more"
            )
        if self.relative_margin is not None and not 0 <= self.relative_margin <= 1:
            raise ConfigError(f"relative_margin={self.relative_margin} must be between 0 and 1")
        if self.cross_encoder_margin is not None and not has_cross_encoder:
            raise ConfigError(
                "cross_encoder_margin needs a cross_encoder: give both, or leave it out"
            )

    @property
    def depth(self) -> int:
        """Number of candidates per query that the rules are applied to, the best of the ranking.

        Known positives are not counted.
        """
        if self.range_max is not None:
            return self.range_max
        rules_that_drop_none = SelectionRules(self.num_negatives, self.range_min, seed=self.seed)
        if self == rules_that_drop_none:
            return self.range_min + self.num_negatives
        return self.range_min + _CANDIDATES_PER_NEGATIVE * self.num_negatives


def select_candidates(
    scores: np.ndarray,
    lowest_positive_score: np.float32,
    rules: SelectionRules,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return the positions of the candidates that pass the rules, those to use first at the start.

    Args:
        scores: the candidates' scores, float32 (c,), in descending order.
        lowest_positive_score: the lowest score of the query's positives.
        rules: the rules; the rule for a cross-encoder is not applied here.
        rng: a random generator, for random sampling.
    """
    highest: float | np.floating = np.inf if rules.max_score is None else rules.max_score
    if rules.absolute_margin is not None:
        highest = min(highest, lowest_positive_score - np.float32(rules.absolute_margin))
    if rules.relative_margin is not None:
        margin = np.abs(lowest_positive_score) * np.float32(rules.relative_margin)
        highest = min(highest, lowest_positive_score - margin)
    has_allowed_score = scores <= highest
    if rules.min_score is not None:
        has_allowed_score &= scores >= rules.min_score
    positions = np.flatnonzero(has_allowed_score)[rules.range_min :]
    if rules.sampling == "random":
        return rng.permutation(positions)
    return positions
