"""The choice among noisy scores: by a curve through neighbours, not by the highest score."""

import numpy as np
import pytest

from contaccum.tuning.choice import FinishedTrial, choose_trial, find_best_value, smooth

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


def test_single_high_score_is_not_chosen():
    scores = dict(zip(RATES, (70.0, 84.0, 71.0, 79.0, 80.5, 80.0, 78.0, 70.0), strict=True))
    assert max(scores, key=scores.get) == RATES[1]
    assert find_best_value(scores) in RATES[3:6]


def test_smoothing_keeps_scores_with_fewer_than_three_neighbours():
    few_scores = {1e-5: 1.0, 3e-5: 3.0, 9e-5: 2.0}
    assert smooth(few_scores) == few_scores
    distant_scores = {1e-6: 1.0, 1e-4: 3.0, 1e-2: 2.0, 1.0: 0.0}
    assert smooth(distant_scores) == distant_scores


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        (-0.4, "significantly worse than the base model"),
        (0.0, "not significantly better than the base model"),
        (0.4, None),
    ],
)
def test_warning_compares_the_chosen_settings_with_the_base_model(change, warning):
    base_scores = {f"q{number}": 0.5 for number in range(40)}
    scores = {query: score + change for query, score in base_scores.items()}
    trial = FinishedTrial(
        number=0,
        settings={"learning_rate": 1e-4},
        score=0.5 + change,
        query_scores=scores,
        seconds=1.0,
        updates=10,
        note="",
    )
    choice = choose_trial([trial], base_scores, {query: query for query in scores})
    if warning is None:
        assert choice.warnings == []
    else:
        assert len(choice.warnings) == 1
        assert warning in choice.warnings[0]
