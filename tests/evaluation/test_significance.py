"""The sign-flip test equals its definition, and finds a difference by chance in 5% of all cases."""

import itertools
import math

import numpy as np
import pytest

from contaccum.errors import DataError
from contaccum.evaluation.metrics import BETTER, LEVEL, WORSE, add_holm, sign_flip_test
from contaccum.experiments.verdict import Verdict, compute_verdict


def name_queries(values) -> dict[str, float]:
    """Return {"0": first value, "1": second value, ...}."""
    return {str(number): float(value) for number, value in enumerate(values)}


def make_clustered_differences(generator, num_groups: int, queries_per_group: int):
    """Return differences (n,) without a mean, and their groups (n,), of uneven sizes.

    Half of the queries do not change, and queries of one group are correlated.
    """
    sizes = generator.integers(1, 2 * queries_per_group, num_groups)
    groups = np.repeat(np.arange(num_groups), sizes)
    differences = 0.15 * generator.standard_normal(num_groups)[groups]
    differences += 0.2 * generator.standard_normal(len(groups))
    differences[generator.random(len(groups)) < 0.5] = 0.0
    return np.clip(differences, -0.5, 0.5), groups


def make_verdict(differences, groups) -> Verdict:
    """Return the verdict on a search whose rival has a score of 0.5 for each query."""
    ours = name_queries(0.5 + differences)
    base = dict.fromkeys(ours, 0.5)
    scores = {"base": base, "ours": ours, "bm25": base, "group": name_queries(groups)}
    return compute_verdict(scores, ("base", "ours"), ("base", "ours"), list(ours))


def test_the_p_value_is_the_share_of_all_sign_vectors_that_are_as_far_from_0():
    differences, groups = make_clustered_differences(np.random.default_rng(3), 8, 4)
    ours = name_queries(0.5 + differences)
    sums = [differences[groups == group].sum() for group in range(8)]
    num_as_far = 0
    for signs in itertools.product((1, -1), repeat=8):
        total = sum(sign * value for sign, value in zip(signs, sums, strict=True))
        num_as_far += abs(total) >= abs(sum(sums)) - 1e-9
    result = sign_flip_test(ours, dict.fromkeys(ours, 0.5), name_queries(groups))
    assert result["p_value"] == pytest.approx(num_as_far / 2**8)
    assert result["difference"] == pytest.approx(differences.mean())
    assert result["groups"] == 8


@pytest.mark.parametrize("num_groups", [9, 60])
def test_the_interval_holds_the_differences_that_are_not_rejected(num_groups):
    differences, groups = make_clustered_differences(np.random.default_rng(1), num_groups, 5)
    ours = name_queries(0.5 + differences)
    named_groups = name_queries(groups)
    result = sign_flip_test(ours, dict.fromkeys(ours, 0.5), named_groups)
    width = result["high"] - result["low"]
    for limit, outwards in (("low", -1), ("high", 1)):
        for offset, is_rejected in ((0.02, True), (-0.02, False)):
            supposed = result[limit] + outwards * offset * width
            test = sign_flip_test(ours, dict.fromkeys(ours, 0.5 + supposed), named_groups)
            assert (test["p_value"] <= 0.05) == is_rejected


def test_a_large_difference_of_many_groups_is_better_and_its_reverse_is_worse():
    differences, groups = make_clustered_differences(np.random.default_rng(2), 40, 3)
    assert make_verdict(differences + 0.2, groups).word == BETTER
    assert make_verdict(-differences - 0.2, groups).word == WORSE
    assert make_verdict(differences - differences.mean(), groups).word == LEVEL


@pytest.mark.parametrize("num_changed", [0, 1, 5, 6])
@pytest.mark.parametrize("num_groups", [6, 40])
def test_fewer_than_six_groups_that_changed_are_never_better_and_have_no_interval(
    num_changed, num_groups
):
    """Ties alone would make the interval 0 to 0, as if no loss were possible."""
    groups = np.repeat(np.arange(num_groups), 10)
    differences = np.where(groups < num_changed, 0.3 + 0.02 * groups, 0.0)
    verdict = make_verdict(differences, groups)
    if num_changed == 6:
        assert verdict.word == BETTER
        assert 0 < verdict.low < verdict.difference < verdict.high < 1
        assert f"95% {verdict.low:+.3f} to {verdict.high:+.3f}, p = 0.031" in str(verdict)
    else:
        assert verdict.word == LEVEL
        assert (verdict.low, verdict.high) == (-1, 1)
        reason = f"no interval: scores changed on {num_changed} of {num_groups} passages"
        assert f"({verdict.difference:+.3f}, {reason}, and the test needs 6)" in str(verdict)


def get_share_of_false_verdicts(num_samples: int, num_groups: int, queries_per_group: int) -> float:
    """Return the share of made-up samples without a difference whose verdict is not LEVEL."""
    generator = np.random.default_rng(num_groups + queries_per_group)
    num_false = 0
    for _ in range(num_samples):
        sample = make_clustered_differences(generator, num_groups, queries_per_group)
        num_false += make_verdict(*sample).word != LEVEL
    return num_false / num_samples


def test_models_without_a_difference_are_told_apart_in_5_percent_of_all_samples():
    # 5% of 150 samples, with a standard deviation of 1.8%.
    assert 0.01 <= get_share_of_false_verdicts(150, 20, 10) <= 0.1


@pytest.mark.long  # 2,000 samples each: the standard deviation of a share of 5% is 0.5%
@pytest.mark.parametrize("queries_per_group", [1, 20])
@pytest.mark.parametrize("num_groups", [5, 12, 20, 50, 200])
def test_models_without_a_difference_are_told_apart_in_3_to_6_percent_of_many_samples(
    num_groups, queries_per_group
):
    share = get_share_of_false_verdicts(2_000, num_groups, queries_per_group)
    assert share <= 0.06
    if num_groups == 5:
        assert share == 0.0
    elif (num_groups, queries_per_group) != (12, 1):  # where six of twelve queries have changed
        assert share >= 0.03


@pytest.mark.parametrize("theirs", [{"a": 0.5}, {"a": 0.5, "c": 0.5}, {"a": 0.5, "b": math.nan}])
def test_scores_of_other_queries_or_nan_are_refused(theirs):
    with pytest.raises(DataError, match="same queries"):
        sign_flip_test({"a": 0.1, "b": 0.2}, theirs, {"a": 0, "b": 1})


@pytest.mark.parametrize(
    ("p_values", "adjusted"),
    [([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]), ([0.9, 0.8], [1.0, 1.0])],
)
def test_holm_is_the_textbook_procedure(p_values, adjusted):
    tests = [{"p_value": p_value} for p_value in p_values]
    add_holm(tests)
    assert [test["p_holm"] for test in tests] == pytest.approx(adjusted)
