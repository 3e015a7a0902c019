"""The selection rules against a plain loop that spells them out."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contaccum.errors import ConfigError
from contaccum.mining import SelectionRules, select_negatives


class Lookup:
    """A rescorer whose scores are written in a table (query, row); positives at 4."""

    def __init__(self, table: np.ndarray) -> None:
        self.table, self.read = table, []

    def positive_scores(self, queries: np.ndarray) -> np.ndarray:
        return np.full(len(queries), 4.0)

    def scores(self, queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
        self.read += list(zip(queries.tolist(), rows.tolist(), strict=True))
        return self.table[queries, rows]


def by_hand(scores, rows, positive, rules, excluded):
    """One query: columns left for sampling, {rule: drops}, number of candidates."""
    ranked, kept, dropped, candidates = 0, [], Counter(), 0
    for column, (score, row) in enumerate(zip(scores, rows, strict=True)):
        if row < 0 or ranked == rules.depth:
            continue
        candidates += 1
        if excluded[column]:
            dropped["known_positive"] += 1
            continue
        ranked += 1
        if rules.absolute_margin is not None and not score <= positive - rules.absolute_margin:
            dropped["absolute_margin"] += 1
        elif rules.relative_margin is not None and not score <= positive - rules.relative_margin * abs(positive):
            dropped["relative_margin"] += 1
        elif rules.max_score is not None and score > rules.max_score:
            dropped["max_score"] += 1
        elif rules.min_score is not None and score < rules.min_score:
            dropped["min_score"] += 1
        else:
            kept.append(column)
    dropped["range_min"] += len(kept[: rules.range_min])
    kept = kept[rules.range_min :]
    return kept, +dropped, candidates


def problem(seed, q=5, k=12):
    rng = np.random.default_rng(seed)
    scores = -np.sort(-rng.normal(size=(q, k)).round(2), axis=1)
    rows = np.stack([rng.permutation(40)[:k] for _ in range(q)])
    rows[:, k - int(rng.integers(4)) :] = -1
    scores[rows < 0] = -np.inf
    excluded = (rng.random((q, k)) < 0.2) & (rows >= 0)
    return scores, rows, rng.normal(size=q).round(2), excluded, rng.normal(3, 4, size=(q, 40))


margins = st.none() | st.sampled_from([0.0, 0.1, 0.5])
rules = st.builds(
    SelectionRules,
    num_negatives=st.integers(1, 4),
    range_min=st.integers(0, 3),
    range_max=st.none() | st.integers(7, 14),
    absolute_margin=margins,
    relative_margin=margins,
    max_score=st.none() | st.sampled_from([0.3, 1.0]),
    min_score=st.none() | st.sampled_from([-1.0, 0.0]),
    cross_encoder_margin=st.none() | st.sampled_from([0.0, 3.0]),
    sampling=st.sampled_from(["top", "random"]),
    seed=st.integers(0, 3),
)


@settings(max_examples=300, deadline=None)
@given(rules=rules, seed=st.integers(0, 10_000))
def test_selection_equals_a_loop_over_candidates_and_every_drop_is_counted(rules, seed):
    scores, rows, positives, excluded, table = problem(seed)
    rescorer = None if rules.cross_encoder_margin is None else Lookup(table)
    got = select_negatives(scores, rows, positives, rules, {"known_positive": excluded}, rescorer=rescorer)
    dropped, candidates, kept_in_all = Counter(), 0, 0
    for i in range(len(rows)):
        left, by_rule, considered = by_hand(scores[i], rows[i], positives[i], rules, excluded[i])
        dropped, candidates = dropped + by_rule, candidates + considered
        passed = [c for c in left if rescorer is None or table[i, rows[i, c]] <= 4.0 - rules.cross_encoder_margin]
        taken = got.rows[i][got.rows[i] >= 0].tolist()
        kept_in_all += len(taken)
        assert len(taken) == len(set(taken)) == min(rules.num_negatives, len(passed))
        assert set(taken) <= {rows[i, c] for c in passed}
        if rules.sampling == "top":
            assert taken == [rows[i, c] for c in passed[: rules.num_negatives]]
        of_row = dict(zip(rows[i].tolist(), scores[i].tolist(), strict=True))
        assert got.scores[i][: len(taken)].tolist() == [of_row[row] for row in taken]
        assert (np.diff(got.scores[i][: len(taken)]) <= 0).all() and (got.scores[i][len(taken) :] == -np.inf).all()
        if rescorer is not None:
            assert got.rescores[i][: len(taken)].tolist() == [table[i, row] for row in taken]
            assert np.isnan(got.rescores[i][len(taken) :]).all()
    assert got.candidates == candidates == sum(got.dropped.values()) + kept_in_all
    for name in dropped:
        assert got.dropped[name] == dropped[name], name
    if rescorer is not None:
        assert got.rescored == len(rescorer.read) == len(set(rescorer.read))


def test_the_cross_encoder_reads_no_more_than_it_takes_to_fill_up():
    scores, rows = -np.arange(20.0)[None], np.arange(20)[None]
    table = np.array([[9, 0, 9, 0, *[0.0] * 16]])
    rescorer = Lookup(table)
    rules = SelectionRules(num_negatives=2, range_max=20, cross_encoder_margin=3.0)
    got = select_negatives(scores, rows, np.array([1.0]), rules, rescorer=rescorer)
    assert got.rows.tolist() == [[1, 3]] and rescorer.read == [(0, row) for row in range(4)]
    assert got.dropped == {"cross_encoder": 2, "not_needed": 16}


@pytest.mark.parametrize(
    ("positive", "expected"),
    # 95 % of 0.8 is 0.76; below 0 the threshold is still below the positive: -0.2 - 0.01.
    [(0.8, [0.75, 0.5]), (-0.2, [-0.22, -0.9])],
)
def test_relative_margin_asks_for_less_than_the_positive_on_either_side_of_zero(positive, expected):
    scores = np.array([[0.77, 0.75, 0.5, -0.195, -0.205, -0.22, -0.9]])
    rules = SelectionRules(num_negatives=2, range_max=7, relative_margin=0.05)
    got = select_negatives(scores, np.arange(7)[None], np.array([positive]), rules)
    assert got.scores.tolist() == [expected]


def draw(seed=0, queries=range(6)):
    scores, rows, positives, excluded, _ = problem(1, q=6, k=12)
    i = np.array(queries)
    rules = SelectionRules(num_negatives=2, range_max=8, sampling="random", seed=seed)
    return select_negatives(scores[i], rows[i], positives[i], rules, {"known_positive": excluded[i]}, i).rows.tolist()


def test_random_sampling_depends_on_the_seed_and_on_nothing_but_the_query_itself():
    assert draw() == draw() != draw(seed=1)
    assert draw(queries=[5, 0, 3]) == [draw()[i] for i in (5, 0, 3)]


def test_random_sampling_reaches_the_whole_window_evenly():
    rules = SelectionRules(num_negatives=1, range_min=2, range_max=7, sampling="random")
    scores, rows = np.tile(-np.arange(10.0), (2000, 1)), np.tile(np.arange(10), (2000, 1))
    counts = Counter(select_negatives(scores, rows, np.ones(2000), rules).rows[:, 0].tolist())
    assert set(counts) == {2, 3, 4, 5, 6}
    assert all(330 < count < 470 for count in counts.values())  # 400, and four deviations of 18


def test_without_candidates_there_are_no_negatives():
    got = select_negatives(np.empty((2, 0)), np.empty((2, 0), dtype=np.int64), np.ones(2), SelectionRules())
    assert got.rows.tolist() == [[-1] * 3] * 2 and got.candidates == 0 and not got.dropped


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"num_negatives": 0}, "num_negatives"),
        ({"range_min": -1}, "range_min"),
        ({"range_min": 5, "range_max": 7}, "raise it to 8"),
        ({"relative_margin": 1.5}, "relative_margin"),
        ({"relative_margin": -0.1}, "relative_margin"),
        ({"max_score": float("nan")}, "max_score"),
        ({"max_score": 0.1, "min_score": 0.2}, "nothing could be kept"),
        ({"sampling": "best"}, "sampling"),
        ({"cross_encoder_margin": 3.0}, "need each other"),
    ],
)
def test_rules_that_cannot_work_are_refused(rules, message):
    with pytest.raises(ConfigError, match=message):
        select_negatives(np.zeros((1, 1)), np.zeros((1, 1), np.int64), np.zeros(1), SelectionRules(**rules))


def test_more_candidates_are_considered_only_where_a_rule_may_drop_some():
    assert SelectionRules(num_negatives=4, range_min=10).depth == 14
    assert SelectionRules(num_negatives=4, range_min=10, relative_margin=0.05).depth == 50
    assert SelectionRules(num_negatives=4, sampling="random").depth == 40
    assert SelectionRules(num_negatives=4, range_max=9, max_score=0.5).depth == 9
