"""Tuning of one setting: the best value for each group, on dev data.

Every group starts with the same values. While the best value of a group is the smallest or the
largest one that was tried, one more value beyond it is tried. The values to try next depend only on
the scores, so a search that was killed and started again tries the same values. The data on which
the final runs are scored are not used here.

The highest of many noisy scores is often high by chance. Therefore a score with at least three
neighbouring values is smoothed with their scores, and the value with the highest score is chosen
after that. In this way, a learning rate whose neighbours also score well is preferred to one with a
single high score. Of up to three values, the one with the highest score is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from comparison.plan import Group, add_setting, is_tunable, refuse_reserved_keys
from comparison.report import MAIN_METRIC
from comparison.run import Results
from contaccum.errors import ConfigError

NEIGHBOUR_FACTOR = 10.0
"""Two values are neighbours and smooth each other if they differ by less than this factor."""

_MIN_POINTS = 4  # with fewer points, a parabola passes through all of them and smooths nothing


class Ladder(NamedTuple):
    """The setting that is tuned, and the values to try.

    Attributes:
        key: the name of the setting.
        values: the values that every group tries.
        factor: the ratio between the smallest or largest value and a value beyond it.
        max_values: the largest number of values that a group tries.
        seed: the seed of the runs.
    """

    key: str
    values: Sequence[float]
    factor: float
    max_values: int
    seed: int


def read_ladder(text: str, factor: float, max_values: int, seed: int) -> Ladder:
    """Parse ``key=value,value`` to a ladder; raise `ConfigError` for fewer than two values."""
    key, _, value_text = text.partition("=")
    values = list(dict.fromkeys(float(value) for value in value_text.split(",")))
    if len(values) < 2 or min(values) <= 0 or factor < 1.1:
        raise ConfigError(f"--tune {text}: write key=value,value with two positive numbers or more")
    refuse_reserved_keys([key])
    return Ladder(key, values, factor, max_values, seed)


def tune_groups(
    groups: Sequence[Group],
    ladder: Ladder,
    train: Callable[[Sequence[Group]], tuple[Results, dict[str, str]]],
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Tune all groups that use the setting, in rounds.

    A round has the runs that every group needs next, so that they can run at the same time.

    Args:
        train: a function that does the missing runs of groups, with the seed of the ladder. It
            returns {name of the run: result} and {name of the run: why it failed}.

    Returns:
        {name of the group: its tuning}, and {name of the run: why it failed}. A tuning has the
        ``entry``, the ``scores`` {value: its score on dev, None if the run failed}, the ``chosen``
        value, None if all failed, and ``at_end``.
    """
    tunable = {group.name: group for group in groups if is_tunable(group, ladder.key)}
    scores: dict[str, dict[float, float | None]] = {name: {} for name in tunable}
    all_failed: dict[str, str] = {}
    while True:
        candidates = []
        for name, tried in scores.items():
            for value in next_values(ladder, tried):
                tried[value] = None
                try:
                    candidate = add_setting(tunable[name], ladder.key, value)
                except ConfigError:
                    if value in ladder.values:
                        raise
                    # A value beyond those of the user may be impossible, such as half a hard
                    # negative. Without a score it ends the ladder.
                    continue
                candidates.append((name, value, candidate))
        if not candidates:
            break
        results, failed = train([candidate for _, _, candidate in candidates])
        all_failed |= {f"tune/{run_name}": reason for run_name, reason in failed.items()}
        for name, value, candidate in candidates:
            result = results.get(candidate.run_name(ladder.seed))
            if result is not None:
                evaluations = result["evaluations"].values()
                scores[name][value] = fmean(data["metrics"][MAIN_METRIC] for data in evaluations)
    tunings = {}
    for name, tried in scores.items():
        chosen = find_best_value(tried)
        tunings[name] = {
            "entry": tunable[name].entry,
            "scores": dict(sorted(tried.items())),
            "chosen": chosen,
            "at_end": chosen in (min(tried), max(tried)),
        }
    return tunings, all_failed


def next_values(ladder: Ladder, scores: Mapping[float, float | None]) -> list[float]:
    """Return the values to try next; empty if the ladder is complete.

    First all values of the ladder are tried. Then, while the value with the highest score is the
    smallest or the largest one, one value beyond it is tried, rounded to two significant digits.
    A value without a score still counts as an end of the ladder, so no value beyond it is tried.

    Args:
        scores: {value: its score on dev} of the values that were tried; the score is None if the
            run failed.
    """
    untried_values = [value for value in ladder.values if value not in scores]
    if untried_values:
        return untried_values
    scored = {value: score for value, score in scores.items() if score is not None}
    if not scored or len(scores) >= ladder.max_values:
        return []
    lowest, highest = min(scores), max(scores)
    # Of values with equal scores, a value that is not at an end is preferred, then the smaller one.
    best = max(sorted(scored), key=lambda value: (scored[value], value not in (lowest, highest)))
    if best not in (lowest, highest):
        return []
    beyond = best / ladder.factor if best == lowest else best * ladder.factor
    return [float(f"{beyond:.1e}")]


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
        smoothed[value] = float(coefficients[-1])  # the height at offset 0, where the value is
    return smoothed


def find_best_value(scores: Mapping[float, float | None]) -> float | None:
    """Return the value with the highest smoothed score; None if no value has a score.

    Of values with equal smoothed scores, a value that is neither the smallest nor the largest is
    preferred, then the smaller value.
    """
    scored = {value: score for value, score in scores.items() if score is not None}
    if not scored:
        return None
    smoothed = smooth(scored)
    ends = (min(scored), max(scored))

    def get_rank(value: float) -> tuple[float, bool]:
        rounded_score = round(smoothed[value], 12)  # differences below are rounding errors
        return rounded_score, value not in ends

    return max(sorted(scored), key=get_rank)  # of equal ranks, `max` returns the first


def apply_chosen_values(
    groups: Sequence[Group], key: str, tunings: Mapping[str, Mapping[str, Any]]
) -> list[Group]:
    """Return the groups with their chosen values, without those whose tuning runs all failed."""
    tuned = []
    for group in groups:
        if group.name not in tunings:
            tuned.append(group)
        elif (chosen := tunings[group.name]["chosen"]) is not None:
            tuned.append(add_setting(group, key, chosen))
    return tuned
