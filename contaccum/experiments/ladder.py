"""A ladder of values of one setting, extended until the best value is not at an end.

A ladder is a series of values in steps of a constant factor, such as 1e-5, 3e-5 and 9e-5. If 9e-5
scores best, 2.7e-4 is tried next. The values to try next depend only on the scores, so a search
that was killed and started again tries the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Scores = Mapping[str, float | None]
"""{value as text: its score on dev}; the score is None if the run failed or was stopped."""


def next_values(values: Sequence[str], factor: float, max_values: int, scores: Scores) -> list[str]:
    """Return the values to try next; empty if the ladder is complete.

    First all ``values`` are tried. Then, while the value with the highest score is the smallest or
    the largest value on the ladder, one value beyond it is tried. A value without a score still
    counts as an end of the ladder, so no value beyond it is tried.

    Args:
        values: the values to start with.
        factor: the ratio between the value at an end and the value beyond it, which is rounded to
            two significant digits.
        max_values: the largest number of values on the ladder.
        scores: the scores of the values that were tried.
    """
    untried_values = [value for value in values if value not in scores]
    if untried_values:
        return untried_values
    scored = {float(value): score for value, score in scores.items() if score is not None}
    if not scored or len(scores) >= max_values:
        return []
    tried_values = sorted(float(value) for value in scores)
    lowest = tried_values[0]
    highest = tried_values[-1]
    # Of values with equal scores, a value that is not at an end is preferred, then the smaller one.
    best = max(sorted(scored), key=lambda value: (scored[value], value not in (lowest, highest)))
    if best == lowest:
        return [format_value(best / factor)]
    if best == highest:
        return [format_value(best * factor)]
    return []


def format_value(value: float) -> str:
    """Return a number as text with two significant digits, such as "1.6e-5"."""
    rounded = float(f"{value:.1e}")
    return f"{rounded:.6g}".replace("e-0", "e-")  # "1.6e-05" becomes "1.6e-5"
