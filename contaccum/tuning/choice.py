"""The choice of the best value or trial by noisy scores on dev data.

The highest of many noisy scores is often high by chance. Therefore a score with at least three
neighbouring values is smoothed with their scores, and the value with the highest score is chosen
after that. In this way, a learning rate whose neighbours also score well is preferred to one with a
single high score. Of up to three learning rates, the one with the highest score is chosen.
`contaccum tune` and `contaccum fit` choose in this way.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from contaccum.errors import ConfigError
from contaccum.evaluation.metrics import sign_flip_test
from contaccum.tuning.trial import QueryScores

NEIGHBOUR_FACTOR = 10.0
"""Two values are neighbours and smooth each other if they differ by less than this factor."""

_MORE_DEV_QUERIES = (
    "take more dev queries, about other passages (--dev of contaccum fit or contaccum split)"
)
_MIN_POINTS = 4  # with fewer points, a parabola passes through all of them and smooths nothing

Settings = dict[str, Any]
"""{key of `contaccum train`: value}, as in the JSON records."""


def smooth(scores: Mapping[float, float]) -> dict[float, float]:
    """Replace each score by the height of a curve fitted to the score and its neighbours.

    The curve is a parabola in the logarithm of the value, fitted by weighted least squares. The
    weight of a neighbour falls linearly with the logarithm of the factor between the two values,
    from 1 at the value itself to 0 at a factor of `NEIGHBOUR_FACTOR`. A score with fewer than three
    neighbours is not changed.

    Args:
        scores: {value: its score}; values are positive.

    Returns:
        {value: height of the curve at the value}, in the order of ``scores``.
    """
    log_values = np.log(list(scores))
    heights = np.array(list(scores.values()))
    smoothed = {}
    for value, score in scores.items():
        offsets = log_values - np.log(value)
        weights = np.clip(1.0 - np.abs(offsets) / np.log(NEIGHBOUR_FACTOR), 0.0, None)
        is_neighbour = weights > 0.0
        if is_neighbour.sum() < _MIN_POINTS:
            smoothed[value] = score
            continue
        # polyfit multiplies the residuals by its weights before it squares them.
        coefficients = np.polyfit(
            offsets[is_neighbour], heights[is_neighbour], deg=2, w=np.sqrt(weights[is_neighbour])
        )
        # polyfit returns the constant term last. It is the height at offset 0, where the value is.
        height_at_value = coefficients[-1]
        smoothed[value] = float(height_at_value)
    return smoothed


def find_best_value(scores: Mapping[float, float]) -> float:
    """Return the value with the highest smoothed score.

    Of values with equal smoothed scores, a value that is neither the smallest nor the largest of
    ``scores`` is preferred, then the smaller value.
    """
    smoothed = smooth(scores)
    ends = (min(scores), max(scores))

    def get_rank(value: float) -> tuple[float, bool]:
        rounded_score = round(smoothed[value], 12)  # differences below are rounding errors
        return rounded_score, value not in ends

    return max(sorted(scores), key=get_rank)  # of equal ranks, `max` returns the first


class FinishedTrial(NamedTuple):
    """A trial that was scored, was stopped, or failed.

    Attributes:
        number: the number of the trial in the journal.
        settings: {key: value} of the settings that were searched.
        score: the mean score on dev; None if the trial was stopped halfway or failed.
        query_scores: {query id: score}.
        seconds: the time of the whole trial.
        updates: the number of updates.
        note: the reason if there is no score.
        rung: the learning rate as a multiple of the start rate of the method, as text; None for a
            trial that is not part of the ladder of learning rates.
        seconds_per_update: the time of an update near the end of the trial.
    """

    number: int
    settings: Settings
    score: float | None
    query_scores: QueryScores
    seconds: float
    updates: int
    note: str
    rung: str | None = None
    seconds_per_update: float = 0.0

    @property
    def settings_except_rate(self) -> tuple[tuple[str, str], ...]:
        """All settings except the learning rate, which are equal for the trials of one curve."""
        settings = dict(self.settings)
        settings.pop("learning_rate", None)
        return tuple(sorted((key, str(value)) for key, value in settings.items()))


class Choice(NamedTuple):
    """The settings that were chosen.

    Attributes:
        settings: {key: value}.
        trial: the number of the trial with these settings.
        score: its mean score on dev.
        against_base: the comparison with the base model, as `sign_flip_test` returns it.
        warnings: lines for the user about weak evidence for the choice.
    """

    settings: Settings
    trial: int
    score: float
    against_base: dict[str, float]
    warnings: list[str]


def choose_trial(
    trials: Sequence[FinishedTrial], base_scores: QueryScores, groups: Mapping[str, int]
) -> Choice:
    """Choose the settings of the best trial.

    Trials that differ only by the learning rate form a curve, score against learning rate, and
    `find_best_value` chooses the best trial of each curve. Of these candidates, the highest one
    from the ladders of learning rates is preferred. Another candidate, such as one of the joint
    search, which tries many settings, replaces it only if the 95% interval of the difference
    between the two lies above 0 (`sign_flip_test`). With fewer than six groups of queries, no
    interval does.

    Args:
        base_scores: {query id: score of the base model}.
        groups: {query id: its group}; queries about the same passage are in one group.

    Raises:
        ConfigError: if no trial has a score.
    """
    scored_trials = [trial for trial in trials if trial.score is not None]
    if not scored_trials:
        raise ConfigError(
            "no trial has a score: give a larger --budget, or see above why the trials failed"
        )
    candidates = _find_best_of_curves(scored_trials)
    chosen = candidates[0]
    for candidate in candidates[1:]:
        difference = sign_flip_test(candidate.trial.query_scores, chosen.trial.query_scores, groups)
        is_significantly_better = difference["low"] > 0.0
        if is_significantly_better:
            chosen = candidate

    trial = chosen.trial
    against_base = sign_flip_test(trial.query_scores, base_scores, groups)
    return Choice(
        settings=dict(trial.settings),
        trial=trial.number,
        score=float(trial.score or 0.0),
        against_base=against_base,
        warnings=_collect_warnings(trial, scored_trials, against_base, groups),
    )


class _BestOfCurve(NamedTuple):
    """The best trial of a curve.

    Attributes:
        trial: the trial.
        height: the smoothed score at the trial.
    """

    trial: FinishedTrial
    height: float


def _find_best_of_curves(trials: Sequence[FinishedTrial]) -> list[_BestOfCurve]:
    """Return the best trial of each curve: those of ladders first, then the highest ones."""
    curves: dict[tuple[tuple[str, str], ...], list[FinishedTrial]] = {}
    for trial in trials:
        curves.setdefault(trial.settings_except_rate, []).append(trial)
    best_of_curves = [_find_best_of_curve(curve) for curve in curves.values()]
    best_of_curves.sort(key=lambda best: (best.trial.rung is None, -best.height))
    return best_of_curves


def _find_best_of_curve(curve: Sequence[FinishedTrial]) -> _BestOfCurve:
    """Return the best of the trials that differ only by the learning rate.

    All trials have a score; ``or 0.0`` is only for the type checker.
    """
    if "learning_rate" not in curve[0].settings:
        # The user gave the rate, so the trials have the same settings.
        mean = statistics.fmean(trial.score or 0.0 for trial in curve)
        return _BestOfCurve(curve[0], mean)
    trials_by_rate = {}
    scores_by_rate = {}
    for trial in curve:
        rate = float(trial.settings["learning_rate"])
        trials_by_rate[rate] = trial
        scores_by_rate[rate] = trial.score or 0.0
    best_rate = find_best_value(scores_by_rate)
    height = smooth(scores_by_rate)[best_rate]
    return _BestOfCurve(trials_by_rate[best_rate], height)


def _collect_warnings(
    trial: FinishedTrial,
    scored_trials: Sequence[FinishedTrial],
    against_base: Mapping[str, float],
    groups: Mapping[str, int],
) -> list[str]:
    """Return warnings if the chosen trial is not significantly better than base or worst trial."""
    warnings = []
    interval = (
        f"({against_base['difference']:+.3f}, 95% {against_base['low']:+.3f} to "
        f"{against_base['high']:+.3f})"
    )
    if against_base["high"] < 0.0:
        warnings.append(
            "on the dev data the chosen settings are significantly worse than the base model "
            f"{interval}; try smaller learning rates, or keep the base model"
        )
    elif against_base["low"] <= 0.0:
        warnings.append(
            "on the dev data the chosen settings are not significantly better than the base model "
            f"{interval}; {_MORE_DEV_QUERIES}"
        )
    other_trials = [other for other in scored_trials if other is not trial]
    if other_trials:
        worst = min(other_trials, key=lambda other: other.score or 0.0)
        difference = sign_flip_test(trial.query_scores, worst.query_scores, groups)
        if difference["low"] <= 0.0:
            warnings.append(
                "on the dev data the chosen settings are not significantly better than the worst "
                "ones that were trained to the end, so the choice says little; "
                f"{_MORE_DEV_QUERIES}"
            )
    return warnings
