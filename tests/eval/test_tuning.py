"""Tuning: values beyond an end are tried while it is the best."""

import sys
from collections.abc import Callable, Sequence

import pytest
from programs import ROOT

sys.path.insert(0, str(ROOT / "eval" / "compare"))

from comparison.tuning import find_best_value, next_values

VALUES = (1e-4, 1.8e-4, 3.2e-4)


def try_values(
    score_value: Callable[[float], float | None], values: Sequence[float] = VALUES
) -> list[float]:
    """Return the values that are tried."""
    scores: dict[float, float | None] = {}
    while next_ones := next_values(values, scores):
        for value in next_ones:
            scores[value] = score_value(value)
    return list(scores)


@pytest.mark.parametrize(
    ("score_value", "further_values"),
    [
        (lambda x: -abs(x - 1.8e-4), []),  # the best value is inside at once
        (lambda x: -abs(x - 6e-4), [5.8e-4, 1e-3]),
        (lambda x: -abs(x - 3e-5), [5.6e-5, 3.1e-5, 1.7e-5]),
        (lambda x: 0.0, []),  # of equal values, an inner one is the best
        (lambda x: None if x > 2e-4 else x, []),  # nothing is tried beyond a failure
        (lambda x: None, []),
    ],
)
def test_values_are_tried_beyond_an_end_while_the_best_is_there(score_value, further_values):
    assert try_values(score_value) == [*VALUES, *further_values]


def test_a_ladder_ends_at_twelve_values():
    assert len(try_values(lambda x: x)) == 12


def test_a_value_below_the_smaller_of_two_equal_ones_is_tried():
    assert try_values(lambda x: min(x, 1.0), [2.0, 1.0]) == [2.0, 1.0, 0.56]


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ({1e-5: 1.0, 3e-5: None, 9e-5: 2.0}, 9e-5),
        ({1e-5: 1.0, 3e-5: 1.0, 9e-5: 1.0}, 3e-5),  # an inner one of equal values
        ({2.0: 1.0, 1.0: 1.0}, 1.0),  # the smaller one of equal values
        ({1e-5: None}, None),
    ],
)
def test_value_of_the_best_score_is_chosen(scores, best):
    assert find_best_value(scores) == best
