"""Values of one setting, tried as on a ladder, which is climbed until the best is inside it.

What is tried next follows from the scores alone, so that the same scores lead to the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from contaccum.tuning.choice import best_value

Scores = Mapping[str, float | None]
"""{value as text: its score on dev}, None where its run failed or was stopped."""


def best_of(scores: Scores) -> str | None:
    """Return the value to choose, by `best_value`; None if all have failed."""
    by_value = {float(value): score for value, score in scores.items() if score is not None}
    if not by_value:
        return None
    best = best_value(by_value)
    return next(value for value in scores if float(value) == best)


def next_values(values: Sequence[str], factor: float, most: int, scores: Scores) -> list[str]:
    """Return the values to try next; none when the highest score lies inside those tried.

    These are the ``values`` that were not tried, or one beyond the highest score where it is at an end. A
    value that failed is an end: nothing is tried beyond it.

    Args:
        factor: between the last value and one beyond it, which has two significant digits.
        most: values that are tried in all.
        scores: of the values that were tried.
    """
    missing = [value for value in values if value not in scores]
    by_value = {float(value): score for value, score in scores.items() if score is not None}
    if missing or not by_value or len(scores) >= most:
        return missing
    tried = sorted(float(value) for value in scores)
    ends = (tried[0], tried[-1])
    highest = max(sorted(by_value), key=lambda value: (by_value[value], value not in ends))
    if highest == tried[0]:
        return [as_text(highest / factor)]
    if highest == tried[-1]:
        return [as_text(highest * factor)]
    return []


def as_text(value: float) -> str:
    """Return a number with two significant digits: "1.6e-4"."""
    return f"{float(f'{value:.1e}'):.6g}".replace("e-0", "e-")
