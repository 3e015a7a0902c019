"""Which of several values is best on dev data, when their scores are noisy.

The largest of a few noisy scores is often that of a lucky value. So a curve is laid through each
score and those of its neighbours, and the value is chosen where the curve is highest: a rate among
good ones is preferred to a lonely peak. `contaccum tune`, `fit` and `compare --tune` choose by it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from contaccum.errors import ConfigError
from contaccum.evaluation.metrics import paired_bootstrap
from contaccum.tuning.trial import QueryScores

REACH = 10.0
"""Values that differ by this factor or more do not count for each other."""

_LEAST_VALUES = 4  # of fewer, a parabola runs through every point


def smooth(scores: Mapping[float, float]) -> dict[float, float]:
    """Replace each score by that of a curve through it and its neighbours, on a logarithmic axis.

    The curve is a parabola, fitted by least squares. The weight of a neighbour falls linearly with
    the logarithm of the factor between the two values, from 1 at the value itself to 0 at a factor
    of `REACH`. A score with fewer than three neighbours stays as it is.

    Args:
        scores: {value, positive: its score}.

    Returns:
        {value: height of its curve}, in the order of ``scores``.
    """
    positions = np.log(list(scores))
    heights = np.array(list(scores.values()))
    smoothed = {}
    for value, score in scores.items():
        offsets = positions - np.log(value)
        weights = np.clip(1.0 - np.abs(offsets) / np.log(REACH), 0.0, None)
        is_near = weights > 0.0
        if is_near.sum() < _LEAST_VALUES:
            smoothed[value] = score
            continue
        # polyfit multiplies residuals by its weights, before it squares them.
        curve = np.polyfit(offsets[is_near], heights[is_near], deg=2, w=np.sqrt(weights[is_near]))
        smoothed[value] = float(curve[-1])  # at offset 0
    return smoothed


def best_value(scores: Mapping[float, float]) -> float:
    """Return the value with the largest smoothed score; of equal ones an inner one, then the smallest."""
    smoothed = smooth(scores)
    ends = (min(scores), max(scores))
    return max(sorted(scores), key=lambda value: (round(smoothed[value], 12), value not in ends))


def compare_scores(scores: Mapping[str, float], others: Mapping[str, float]) -> dict[str, Any]:
    """Compare two settings by their scores of the same queries; see `paired_bootstrap`.

    Args:
        scores, others: {query id: score}.
    """
    return paired_bootstrap(list(scores.values()), [others[query] for query in scores])


class Finished(NamedTuple):
    """A trial that was scored, stopped or failed.

    Attributes:
        rung: its rate as a multiple of its method's start, as text; None off the ladder.
    """

    number: int
    settings: dict[str, Any]
    score: float | None  # None: stopped halfway, or failed
    query_scores: QueryScores
    seconds: float
    updates: int
    note: str
    rung: str | None = None

    @property
    def others(self) -> tuple[Any, ...]:
        """All settings but the rate: trials that have them in common lie on one curve."""
        return tuple(
            sorted(
                (key, str(value)) for key, value in self.settings.items() if key != "learning_rate"
            )
        )


class Choice(NamedTuple):
    """The settings that were chosen.

    Attributes:
        settings: by key.
        trial: its number.
        score: on dev.
        against_base: the difference to the model as it is, with its interval.
        warnings: where dev data decide nothing, a line each.
    """

    settings: dict[str, Any]
    trial: int
    score: float
    against_base: dict[str, float]
    warnings: list[str]


def choose_trial(trials: Sequence[Finished], base_scores: QueryScores) -> Choice:
    """Choose the settings of a trial.

    Of trials that differ by the rate alone, the rate is chosen by a curve through their scores
    (`best_value`). Of curves the one with the most trials decides where dev data cannot: another
    one is chosen only if its interval against it lies above 0.

    Raises:
        ConfigError: if no trial was scored.
    """
    scored = [trial for trial in trials if trial.score is not None]
    if not scored:
        raise ConfigError(
            "no trial was scored: give a larger budget, or look at what the trials say"
        )
    curves: dict[tuple[Any, ...], list[Finished]] = {}
    for trial in scored:
        curves.setdefault(trial.others, []).append(trial)
    tops = [_top_of(curve) for curve in curves.values()]
    tops.sort(key=lambda top: (-top.num_trials, -top.height))
    chosen = tops[0]
    for top in tops[1:]:
        difference = compare_scores(top.trial.query_scores, chosen.trial.query_scores)
        same_weight = top.num_trials == chosen.num_trials and top.height > chosen.height
        if difference["low"] > 0.0 or same_weight:
            chosen = top

    trial = chosen.trial
    against_base = compare_scores(trial.query_scores, base_scores)
    notes = []
    if against_base["low"] <= 0.0:
        notes.append(
            f"dev data do not tell the chosen settings from the model as it is ({against_base['difference']:+.3f}, "
            f"95% {against_base['low']:+.3f} to {against_base['high']:+.3f})"
        )
    others = [other for other in scored if other is not trial]
    if others:
        worst = min(others, key=lambda other: other.score or 0.0)
        difference = compare_scores(trial.query_scores, worst.query_scores)
        if difference["low"] <= 0.0:
            notes.append(
                "dev data do not tell the best of the settings tried from the worst: the choice says little"
            )
    return Choice(
        dict(trial.settings), trial.number, float(trial.score or 0.0), against_base, notes
    )


class _Top(NamedTuple):
    """The highest place of a curve through trials that differ by the rate."""

    trial: Finished
    height: float
    num_trials: int


def _top_of(curve: Sequence[Finished]) -> _Top:
    if "learning_rate" not in curve[0].settings:
        mean = statistics.fmean(trial.score or 0.0 for trial in curve)
        return _Top(curve[0], mean, len(curve))
    by_rate = {float(trial.settings["learning_rate"]): trial for trial in curve}
    scores = {rate: trial.score or 0.0 for rate, trial in by_rate.items()}
    rate = best_value(scores)
    return _Top(by_rate[rate], smooth(scores)[rate], len(curve))
