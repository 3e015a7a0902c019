"""The paired bootstrap and Holm's correction against exact and simulated references."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from contaccum.errors import DataError
from contaccum.evaluation import significance
from contaccum.evaluation.significance import holm, paired_bootstrap


def scores(n: int, shift: float = 0.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    b = generator.normal(size=n)
    return b + generator.normal(shift, 1.0, size=n), b


def test_a_system_does_not_differ_from_itself():
    a, _ = scores(50)
    assert paired_bootstrap(a, a) == (0.0, 0.0, 0.0, 1.0)


def test_exchanging_the_systems_mirrors_the_difference():
    a, b = scores(80, 0.2)
    one, other = paired_bootstrap(a, b), paired_bootstrap(b, a)
    assert one.difference == pytest.approx(a.mean() - b.mean())
    assert (one.difference, one.p_value) == (-other.difference, other.p_value)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))


def test_p_value_and_interval_agree_with_all_resamples_of_a_small_sample():
    differences = np.array([0.5, 0.25, -0.125, 1.0, 0.375])
    means = np.array([np.mean(draw) for draw in itertools.product(differences, repeat=5)])
    exact = float((np.abs(means - differences.mean()) >= differences.mean() - 1e-12).mean())
    found = paired_bootstrap(differences, np.zeros(5), resamples=50_000)
    assert found.p_value == pytest.approx(exact, abs=0.005)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.01)


@pytest.mark.parametrize("shift", [0.0, 0.05, 0.1, 0.2])
def test_p_value_agrees_with_the_t_test_on_a_sample_of_normal_scores(shift: float):
    stats = pytest.importorskip("scipy.stats")
    a, b = scores(400, shift, seed=3)
    assert paired_bootstrap(a, b).p_value == pytest.approx(stats.ttest_rel(a, b).pvalue, abs=0.015)


def test_interval_covers_the_truth_and_the_null_is_rejected_as_often_as_promised():
    covered, rejected, times = 0, 0, 400
    for seed in range(times):
        a, b = scores(100, 0.3, seed)
        found = paired_bootstrap(a, b, resamples=400)
        covered += found.low <= 0.3 <= found.high
        rejected += paired_bootstrap(a - 0.3, b, resamples=400).p_value <= 0.05
    # 95% and 5%, by three standard errors and what a percentile interval of 100 queries loses.
    assert 0.905 <= covered / times <= 0.985
    assert 0.015 <= rejected / times <= 0.095


def test_memory_is_bounded_without_changing_the_result(monkeypatch: pytest.MonkeyPatch):
    a, b = scores(37, 0.1)
    whole = paired_bootstrap(a, b, resamples=1000)
    monkeypatch.setattr(significance, "_CHUNK_DRAWS", 37 * 8)
    assert paired_bootstrap(a, b, resamples=1000) == pytest.approx(whole)


def test_a_seed_decides_the_resamples():
    a, b = scores(60, 0.1)
    assert paired_bootstrap(a, b, seed=1) == paired_bootstrap(a, b, seed=1) != paired_bootstrap(a, b, seed=2)


@pytest.mark.parametrize(("a", "b"), [([1.0], [1.0, 2.0]), ([], []), ([float("nan")], [1.0]), ([[1.0]], [[1.0]])])
def test_scores_that_are_not_pairs_are_refused(a: list, b: list):
    with pytest.raises(DataError, match="paired scores"):
        paired_bootstrap(a, b)


def test_holm_is_the_textbook_procedure():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02] and holm([]) == []
