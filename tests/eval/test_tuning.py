"""Ladders: values beyond an end are tried while it is the best; noisy scores are smoothed."""

import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from programs import ROOT

sys.path.insert(0, str(ROOT / "eval" / "compare"))

from comparison.tuning import Ladder, find_best_value, next_values, smooth

VALUES = (1e-4, 1.8e-4, 3.2e-4)


def try_values(
    score_value: Callable[[float], float | None],
    values: Sequence[float] = VALUES,
    factor: float = 1.8,
) -> list[float]:
    """Return the values that are tried, at most six."""
    ladder = Ladder("learning_rate", values, factor, 6, 0)
    scores: dict[float, float | None] = {}
    while next_ones := next_values(ladder, scores):
        for value in next_ones:
            scores[value] = score_value(value)
    return list(scores)


@pytest.mark.parametrize(
    ("score_value", "further_values"),
    [
        (lambda x: -abs(x - 1.8e-4), []),  # the best value is inside at once
        (lambda x: -abs(x - 6e-4), [5.8e-4, 1e-3]),
        (lambda x: -abs(x - 3e-5), [5.6e-5, 3.1e-5, 1.7e-5]),
        (lambda x: x, [5.8e-4, 1e-3, 1.8e-3]),  # ends at six values
        (lambda x: 0.0, []),  # of equal values, an inner one is the best
        (lambda x: None if x > 2e-4 else x, []),  # nothing is tried beyond a failure
        (lambda x: None, []),
    ],
)
def test_values_are_tried_beyond_an_end_while_the_best_is_there(score_value, further_values):
    assert try_values(score_value) == [*VALUES, *further_values]


def test_a_value_below_the_smaller_of_two_equal_ones_is_tried():
    assert try_values(lambda x: min(x, 1.0), [2.0, 1.0], 2.0) == [2.0, 1.0, 0.5]


RATES = [3e-5 * 1.8**i for i in range(8)]


def compute_true_score(rate: float) -> float:
    """Return a score like nDCG@10: a hill over the log of the rate, steeper at large rates."""
    best_rate = 3e-4
    offset = np.log(rate / best_rate)
    steepness = 3.0 if rate > best_rate else 1.0
    return 80.0 - steepness * offset**2


def test_smoothing_keeps_a_parabola_without_noise():
    scores = {rate: 3.0 - np.log(rate / 2e-4) ** 2 for rate in RATES}
    assert smooth(scores) == pytest.approx(scores, abs=1e-9)


def test_curve_loses_less_than_the_highest_score():
    """The loss is in points of true score, as a mean over 400 made-up dev sets.

    The standard error of a score on such a dev set is 2 points.
    """
    generator = np.random.default_rng(0)
    true_scores = {rate: compute_true_score(rate) for rate in RATES}
    best_true_score = max(true_scores.values())
    losses_of_highest = []
    losses_of_curve = []
    for _ in range(400):
        scores = {rate: true_scores[rate] + generator.normal(0.0, 2.0) for rate in RATES}
        rate_of_highest = max(scores, key=scores.get)
        rate_of_curve = find_best_value(scores)
        losses_of_highest.append(best_true_score - true_scores[rate_of_highest])
        losses_of_curve.append(best_true_score - true_scores[rate_of_curve])
    assert np.mean(losses_of_curve) < 0.75 * np.mean(losses_of_highest)


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


def test_single_high_score_is_not_chosen():
    scores = dict(zip(RATES, (70.0, 84.0, 71.0, 79.0, 80.5, 80.0, 78.0, 70.0), strict=True))
    assert max(scores, key=scores.get) == RATES[1]
    assert find_best_value(scores) in RATES[3:6]


def test_smoothing_keeps_scores_with_fewer_than_three_neighbours():
    few_scores = {1e-5: 1.0, 3e-5: 3.0, 9e-5: 2.0}
    assert smooth(few_scores) == few_scores
    distant_scores = {1e-6: 1.0, 1e-4: 3.0, 1e-2: 2.0, 1.0: 0.0}
    assert smooth(distant_scores) == distant_scores
