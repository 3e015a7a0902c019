"""The rule that chooses a weight, on made-up scores of queries."""

from __future__ import annotations

from functools import partial

import pytest

from contaccum.errors import ConfigError
from contaccum.evaluation.metrics import paired_bootstrap
from contaccum.merging import choice
from contaccum.merging.choice import SetScores, check_guard_loss, check_weights, choose_weight

NUM_QUERIES = 20


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute intervals from few resamples, which is faster."""
    monkeypatch.setattr(choice, "paired_bootstrap", partial(paired_bootstrap, resamples=200))


def make_set(role: str, means: dict[float, float], name: str = "a") -> SetScores:
    """Return scores with these means; the queries of a weight all have the same score."""
    scores = {}
    for weight, mean in means.items():
        scores[weight] = {f"q{number}": mean for number in range(NUM_QUERIES)}
    return SetScores(role, {"name": name}, scores)  # type: ignore[arg-type]  # a literal


OWN = make_set("own", {0.0: 0.5, 0.3: 0.6, 0.7: 0.7, 1.0: 0.8})


@pytest.mark.parametrize(
    ("guard_scores", "expected"),
    [
        ((0.5, 0.5, 0.5, 0.5), 1.0),  # nothing is lost
        ((0.5, 0.5, 0.495, 0.4), 0.7),  # a loss of 0.005 is allowed
        ((0.5, 0.49, 0.489, 0.4), 0.3),  # a loss of exactly 0.01 is allowed
        ((0.5, 0.48, 0.47, 0.4), 0.0),  # every weight loses too much
        ((0.5, 0.4, 0.5, 0.4), 0.7),  # the loss need not grow with the weight
    ],
)
def test_best_weight_that_keeps_the_guard_score_is_chosen(guard_scores, expected):
    guard = make_set("guard", dict(zip((0.0, 0.3, 0.7, 1.0), guard_scores, strict=True)))
    assert choose_weight([OWN, guard], 0.01).weight == expected


def test_every_guard_set_must_keep_its_score():
    first = make_set("guard", {0.0: 0.5, 0.3: 0.5, 0.7: 0.5, 1.0: 0.4}, "first")
    second = make_set("guard", {0.0: 0.5, 0.3: 0.5, 0.7: 0.4, 1.0: 0.5}, "second")
    result = choose_weight([OWN, first, second], 0.01)
    assert result.weight == 0.3
    assert result.failed_guards == {
        0.0: [],
        0.3: [],
        0.7: ["guard: second"],
        1.0: ["guard: first"],
    }


def test_of_equal_weights_the_smaller_one_is_chosen():
    own = make_set("own", {0.0: 0.5, 0.3: 0.7, 0.7: 0.1 + 0.6, 1.0: 0.7 + 1e-12})
    assert choose_weight([own], 0.0).weight == 0.3


def test_base_model_is_chosen_if_training_has_not_helped():
    own = make_set("own", {0.0: 0.5, 0.3: 0.5, 0.7: 0.4, 1.0: 0.4})
    assert choose_weight([own], 1.0).weight == 0.0


def test_larger_allowed_loss_allows_a_larger_weight():
    guard = make_set("guard", {0.0: 0.5, 0.3: 0.48, 0.7: 0.45, 1.0: 0.2})
    weights = [choose_weight([OWN, guard], loss).weight for loss in (0.0, 0.02, 0.05, 0.3)]
    assert weights == [0.0, 0.3, 0.7, 1.0]


def test_several_own_sets_have_the_same_importance():
    """The second set has fewer queries, and decides."""
    first = make_set("own", {0.0: 0.5, 1.0: 0.4})
    second = SetScores("own", {"name": "b"}, {0.0: {"q": 0.1}, 1.0: {"q": 0.3}})
    assert choose_weight([first, second], 0.01).weight == 1.0


def test_undecided_neighbour_gives_a_warning():
    own = make_set("own", {0.0: 0.2, 0.3: 0.5, 0.7: 0.5, 1.0: 0.3})
    # Weight 0.7 is better by 0.1 on half of the queries, and worse by 0.08 on the other half.
    for number in range(NUM_QUERIES):
        own.scores[0.7][f"q{number}"] += 0.1 if number % 2 == 0 else -0.08  # type: ignore[index]
    result = choose_weight([own], 0.01)
    assert result.weight == 0.7
    assert len(result.warnings) == 1
    assert "do not decide between weight 0.7 and 0.3:" in result.warnings[0]


def test_own_sets_that_disagree_give_a_warning():
    """Weight 1 is better on the first set and worse on the second, both significantly."""
    first = make_set("own", {0.0: 0.2, 1.0: 0.6})
    second = make_set("own", {0.0: 0.5, 1.0: 0.4})
    result = choose_weight([first, second], 0.01)
    assert result.weight == 1.0
    assert "do not decide between weight 1 and 0:" in result.warnings[0]


def test_decided_neighbours_give_no_warning():
    assert choose_weight([OWN], 0.01).warnings == []


def test_neighbour_that_fails_the_guard_gives_no_warning():
    """The guard excludes weight 1, so the own data need not separate it."""
    own = make_set("own", {0.0: 0.5, 0.7: 0.6, 1.0: 0.6})
    guard = make_set("guard", {0.0: 0.5, 0.7: 0.5, 1.0: 0.1})
    assert choose_weight([own, guard], 0.01).warnings == []


def test_table_has_scores_differences_and_notes():
    guard = make_set("guard", {0.0: 0.5, 0.3: 0.5, 0.7: 0.45, 1.0: 0.4}, "other")
    lines = choose_weight([OWN, guard], 0.01).table().splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[1:4]] == [
        "weight",
        "own: a",
        "guard: other",
    ]
    assert "0.6000 (+0.1000, 95% +0.1000 to +0.1000)" in lines[3]
    assert "**chosen**" in lines[3]
    assert "loses too much on other" in lines[4]
    assert "base model" in lines[2]


def test_weights_are_sorted_and_have_both_ends():
    assert check_weights([0.7, 0.3, 0.3]) == [0.0, 0.3, 0.7, 1.0]
    with pytest.raises(ConfigError, match=r"weight 2: .* between 0 and 1"):
        check_weights([2])
    with pytest.raises(ConfigError, match="between 0 and 1"):
        check_guard_loss(float("nan"))
