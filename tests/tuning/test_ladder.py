"""Values are tried beyond an end of the ladder while the best one is there."""

from collections.abc import Callable, Sequence

import pytest

from contaccum.tuning.ladder import next_values

VALUES = ("1e-4", "1.8e-4", "3.2e-4")


def try_values(
    score_value: Callable[[float], float | None],
    values: Sequence[str] = VALUES,
    factor: float = 1.8,
) -> list[str]:
    """Return the values that are tried, at most six."""
    scores: dict[str, float | None] = {}
    while next_ones := next_values(values, factor, 6, scores):
        for value in next_ones:
            scores[value] = score_value(float(value))
    return list(scores)


@pytest.mark.parametrize(
    ("score_value", "further_values"),
    [
        (lambda x: -abs(x - 1.8e-4), []),  # the best value is inside at once
        (lambda x: -abs(x - 6e-4), ["0.00058", "0.001"]),
        (lambda x: -abs(x - 3e-5), ["5.6e-5", "3.1e-5", "1.7e-5"]),
        (lambda x: x, ["0.00058", "0.001", "0.0018"]),  # ends at six values
        (lambda x: 0.0, []),  # of equal values, an inner one is the best
        (lambda x: None if x > 2e-4 else x, []),  # nothing is tried beyond a failure
        (lambda x: None, []),
    ],
)
def test_values_are_tried_beyond_an_end_while_the_best_is_there(score_value, further_values):
    assert try_values(score_value) == [*VALUES, *further_values]


def test_a_value_below_the_smaller_of_two_equal_ones_is_tried():
    assert try_values(lambda x: min(x, 1.0), ["2", "1"], 2.0) == ["2", "1", "0.5"]
