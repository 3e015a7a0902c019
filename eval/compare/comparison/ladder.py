"""A ladder of values of one setting: the values to try, and the choice among their noisy scores.

A ladder is a series of values in steps of a constant factor, such as 1e-5, 3e-5 and 9e-5. If 9e-5
scores best, 2.7e-4 is tried next. The values to try next depend only on the scores, so a search
that was killed and started again tries the same values.

The highest of many noisy scores is often high by chance. Therefore a score with at least three
neighbouring values is smoothed with their scores, and the value with the highest score is chosen
after that. In this way, a learning rate whose neighbours also score well is preferred to one with a
single high score. Of up to three values, the one with the highest score is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

NEIGHBOUR_FACTOR = 10.0
"""Two values are neighbours and smooth each other if they differ by less than this factor."""

_MIN_POINTS = 4  # with fewer points, a parabola passes through all of them and smooths nothing


def round_value(value: float) -> float:
    """Return a number rounded to two significant digits."""
    return float(f"{value:.1e}")


def next_values(
    values: Sequence[float], factor: float, max_values: int, scores: Mapping[float, float | None]
) -> list[float]:
    """Return the values to try next; empty if the ladder is complete.

    First all ``values`` are tried. Then, while the value with the highest score is the smallest or
    the largest value on the ladder, one value beyond it is tried. A value without a score still
    counts as an end of the ladder, so no value beyond it is tried.

    Args:
        values: the values to start with.
        factor: the ratio between the value at an end and the value beyond it, which is rounded to
            two significant digits.
        max_values: the largest number of values on the ladder.
        scores: {value: its score on dev} of the values that were tried; the score is None if the
            run failed or was stopped.
    """
    untried_values = [value for value in values if value not in scores]
    if untried_values:
        return untried_values
    scored = {value: score for value, score in scores.items() if score is not None}
    if not scored or len(scores) >= max_values:
        return []
    lowest = min(scores)
    highest = max(scores)
    # Of values with equal scores, a value that is not at an end is preferred, then the smaller one.
    best = max(sorted(scored), key=lambda value: (scored[value], value not in (lowest, highest)))
    if best == lowest:
        return [round_value(best / factor)]
    if best == highest:
        return [round_value(best * factor)]
    return []


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
