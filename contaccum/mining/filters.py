"""Which candidates of a query become its negatives: rules on arrays of scores, and nothing else.

`select_negatives` is a pure function (a cross-encoder, where there is one, is a callable that it is given). It knows no
texts, models or files. Every rule counts what it drops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from contaccum.errors import ConfigError

# Candidates per wanted negative when a rule may drop some, as in sentence-transformers.
_SPARE = 10


@dataclass(frozen=True)
class SelectionRules:
    """What a negative must be like. With s the score of a candidate and p the lowest score of its query's positives:

    Attributes:
        num_negatives: negatives per query.
        range_min: skip the closest `range_min` of the candidates that the score rules leave.
        range_max: consider no candidate beyond this rank; known positives have no rank. None: 10 `num_negatives` +
            `range_min` where a rule may drop candidates or sampling may choose, else `num_negatives` + `range_min`.
        absolute_margin: keep s <= p - margin.
        relative_margin: keep s <= p - margin * abs(p). For p > 0 that is s <= (1 - margin) p, NV-Retriever's
            TopK-PercPos (0.05 is its 95 %); below 0 it still asks for less than p.
        max_score, min_score: keep min_score <= s <= max_score.
        cross_encoder_margin: keep candidates that a cross-encoder scores at least this far below the lowest of the
            query's positives; needs a cross-encoder.
        sampling: "top" takes the best, "random" draws.
        seed: of the draw, which depends on nothing else but the query's number and its surviving candidates.
    """

    num_negatives: int = 3
    range_min: int = 0
    range_max: int | None = None
    absolute_margin: float | None = None
    relative_margin: float | None = None
    max_score: float | None = None
    min_score: float | None = None
    cross_encoder_margin: float | None = None
    sampling: Literal["top", "random"] = "top"
    seed: int = 0

    def check(self) -> None:
        """Raise `ConfigError` for rules that are out of range or leave no room for the negatives."""
        for name, least in (("num_negatives", 1), ("range_min", 0), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if self.range_max is not None and self.range_max < self.range_min + self.num_negatives:
            raise ConfigError(
                f"range_max={self.range_max} leaves no room for num_negatives={self.num_negatives} after "
                f"range_min={self.range_min}; raise it to {self.range_min + self.num_negatives} or more"
            )
        for name in ("absolute_margin", "relative_margin", "max_score", "min_score", "cross_encoder_margin"):
            value = getattr(self, name)
            if value is not None and not np.isfinite(value):
                raise ConfigError(f"{name} must be a finite number, got {value!r}")
        if self.relative_margin is not None and not 0 <= self.relative_margin <= 1:
            raise ConfigError(
                f"relative_margin={self.relative_margin} must be between 0 and 1: 0.05 keeps what scores up to 95 % of "
                "the positive's score"
            )
        if self.max_score is not None and self.min_score is not None and self.max_score < self.min_score:
            raise ConfigError(f"max_score={self.max_score} is below min_score={self.min_score}: nothing could be kept")
        if self.sampling not in ("top", "random"):
            raise ConfigError(f"sampling must be top or random, got {self.sampling!r}")

    @property
    def depth(self) -> int:
        """How many candidates of a query, known positives apart, are considered."""
        if self.range_max is not None:
            return self.range_max
        rules = (
            self.absolute_margin,
            self.relative_margin,
            self.max_score,
            self.min_score,
            self.cross_encoder_margin,
        )
        choosy = self.sampling == "random" or any(rule is not None for rule in rules)
        return self.range_min + self.num_negatives * (_SPARE if choosy else 1)


class Rescorer(Protocol):
    """A second opinion on candidates, dearer and better than the scores that found them."""

    def positive_scores(self, queries: np.ndarray) -> np.ndarray:
        """The lowest score of each query's positives: queries (q,) -> float (q,)."""

    def scores(self, queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Scores of pairs of a query and a candidate: (n,), (n,) -> float (n,)."""


@dataclass
class Selection:
    """The negatives of q queries, best first.

    Attributes:
        rows: (q, num_negatives) int64, -1 where there are fewer.
        scores: the same shape, -inf where there are fewer.
        rescores: the cross-encoder's scores, NaN where there are none; None without a cross-encoder.
        candidates: how many were considered.
        dropped: {rule: candidates}, each counted by the first rule that drops it. `candidates` is their sum and the
            number kept.
        rescored: candidates that the cross-encoder read.
    """

    rows: np.ndarray
    scores: np.ndarray
    rescores: np.ndarray | None = None
    candidates: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    rescored: int = 0


def select_negatives(
    scores: np.ndarray,
    rows: np.ndarray,
    positive_scores: np.ndarray,
    rules: SelectionRules,
    excluded: Mapping[str, np.ndarray] | None = None,
    numbers: np.ndarray | None = None,
    rescorer: Rescorer | None = None,
) -> Selection:
    """Choose the negatives of q queries among their k candidates each.

    In this order: exclusions, `range_max`, margins and score bounds, `range_min`, sampling, cross-encoder. The
    cross-encoder reads candidates in the order in which they would be taken, and no more than it takes to fill up.

    Args:
        scores, rows: (q, k), best first; a row of -1 is no candidate.
        positive_scores: (q,), the lowest score of each query's positives.
        excluded: {name of the rule: bool (q, k)}: known positives and the like. They take no rank.
        numbers: (q,), what the queries are called towards the seed and the rescorer; None: 0 to q - 1.
        rescorer: a cross-encoder; with it `rules.cross_encoder_margin` holds.

    Raises:
        ConfigError: rules that cannot work, or a cross-encoder without its margin, or the other way around.
    """
    rules.check()
    if (rescorer is None) != (rules.cross_encoder_margin is None):
        raise ConfigError("cross_encoder and cross_encoder_margin need each other: give both or neither")
    numbers = np.arange(len(rows)) if numbers is None else numbers
    dropped: Counter[str] = Counter()

    real = rows >= 0
    out = np.zeros_like(real)
    for mask in (excluded or {}).values():
        out |= mask
    ranked = np.cumsum(real & ~out, axis=1)
    # An excluded candidate was considered if it stands before the last one within range.
    considered = real & np.where(out, ranked < rules.depth, ranked <= rules.depth)
    alive = considered.copy()
    for name, mask in (excluded or {}).items():
        _drop(alive, mask, name, dropped)
    for name, broken in _broken_rules(scores, positive_scores, rules):
        _drop(alive, broken, name, dropped)
    if rules.range_min:
        _drop(alive, np.cumsum(alive, axis=1) <= rules.range_min, "range_min", dropped)

    order = _order_of_preference(alive, numbers, rules)
    left = alive.sum(axis=1)
    columns = np.arange(rows.shape[1])
    wanted = columns < np.minimum(left, rules.num_negatives)[:, None]
    selection = Selection(rows=rows, scores=scores, candidates=int(considered.sum()), dropped=dropped)
    rescores = None
    if rescorer is not None:
        wanted, rescores = _rescore(np.take_along_axis(rows, order, axis=1), left, rules, numbers, rescorer, selection)
    # Both samplings hand over their choice best first; `order` holds columns, which are in order of score.
    chosen = np.sort(_first_columns(np.where(wanted, order, len(columns)), rules.num_negatives, len(columns)), axis=1)
    none = chosen == len(columns)
    taken = np.where(none, 0, chosen)
    if rescores is not None:
        by_column = np.full(rows.shape, np.nan)
        np.put_along_axis(by_column, order, rescores, axis=1)
        selection.rescores = np.where(none, np.nan, _take(by_column, taken))
    selection.rows = np.where(none, -1, _take(rows, taken))
    selection.scores = np.where(none, -np.inf, _take(scores, taken))
    unused = selection.candidates - sum(dropped.values()) - int((~none).sum())
    if unused:
        dropped["not_needed"] += unused
    return selection


def _drop(alive: np.ndarray, broken: np.ndarray, name: str, dropped: Counter[str]) -> None:
    """Take candidates out of `alive`, in place, and count them."""
    broken = broken & alive
    count = int(broken.sum())
    if count:
        dropped[name] += count
        alive &= ~broken


def _broken_rules(
    scores: np.ndarray, positive_scores: np.ndarray, rules: SelectionRules
) -> Iterator[tuple[str, np.ndarray]]:
    # float64, so that a threshold is what the user wrote and not its float32 neighbour.
    s, p = scores.astype(np.float64), np.asarray(positive_scores, dtype=np.float64)[:, None]
    if rules.absolute_margin is not None:
        yield "absolute_margin", s > p - rules.absolute_margin
    if rules.relative_margin is not None:
        yield "relative_margin", s > p - rules.relative_margin * np.abs(p)
    if rules.max_score is not None:
        yield "max_score", s > rules.max_score
    if rules.min_score is not None:
        yield "min_score", s < rules.min_score


def _order_of_preference(alive: np.ndarray, numbers: np.ndarray, rules: SelectionRules) -> np.ndarray:
    """Columns (q, k) in the order in which they would be taken; those that are not alive come last."""
    if rules.sampling == "top":
        return np.argsort(~alive, axis=1, kind="stable")
    order = np.argsort(~alive, axis=1, kind="stable")
    for row, (number, left) in enumerate(zip(numbers.tolist(), alive.sum(axis=1).tolist(), strict=True)):
        # A generator for each query: the draw does not depend on how queries are batched.
        order[row, :left] = np.random.default_rng((rules.seed, number)).permutation(order[row, :left])
    return order


def _rescore(
    rows: np.ndarray,
    left: np.ndarray,
    rules: SelectionRules,
    numbers: np.ndarray,
    rescorer: Rescorer,
    selection: Selection,
) -> tuple[np.ndarray, np.ndarray]:
    """Which candidates, in order of preference, are taken; and the scores (q, k) of those that were read."""
    q, k = rows.shape
    margin = rules.cross_encoder_margin or 0.0
    read = np.full((q, k), np.nan)
    thresholds = np.full(q, np.nan)
    some = np.flatnonzero(left)
    thresholds[some] = rescorer.positive_scores(numbers[some])
    found = np.zeros(q, dtype=np.int64)
    for start in range(0, k, rules.num_negatives):
        stop = min(start + rules.num_negatives, k)
        # Rounds of as many as are wanted: most queries are full after one or two, and the rest is never read.
        pending = np.flatnonzero((found < rules.num_negatives) & (left > start))
        if not len(pending):
            break
        line, column = np.nonzero(np.arange(start, stop) < left[pending, None])
        line, column = pending[line], column + start
        read[line, column] = rescorer.scores(numbers[line], rows[line, column])
        selection.rescored += len(line)
        found[pending] += (read[pending, start:stop] <= thresholds[pending, None] - margin).sum(axis=1)
    passed = read <= thresholds[:, None] - margin
    failed = int((~np.isnan(read)).sum() - passed.sum())
    if failed:
        selection.dropped["cross_encoder"] += failed
    return passed & (np.cumsum(passed, axis=1) <= rules.num_negatives), read


def _first_columns(columns: np.ndarray, count: int, nothing: int) -> np.ndarray:
    """The `count` smallest entries of each line, filled up with `nothing`."""
    short = count - columns.shape[1]
    if short > 0:
        columns = np.pad(columns, ((0, 0), (0, short)), constant_values=nothing)
    return np.sort(columns, axis=1)[:, :count]


def _take(values: np.ndarray, columns: np.ndarray) -> np.ndarray:
    # Without candidates at all there is nothing to index, and every entry is masked by the caller.
    if not values.shape[1]:
        return np.zeros(columns.shape, dtype=values.dtype)
    return np.take_along_axis(values, columns, axis=1)
