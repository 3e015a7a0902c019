"""Invariants of turns: exact shares at every point, in any block, whatever the weights."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contaccum.data.set_schedule import apportion, block_size, shuffled_turns, turns, whole_shares

COUNTS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(COUNTS)
def test_after_any_turn_each_set_has_had_its_share_to_less_than_one(counts: list[int]) -> None:
    had = [0] * len(counts)
    for turn, number in enumerate(islice(turns(counts), 2 * sum(counts)), start=1):
        had[number] += 1
        assert all(abs(h - c * turn / sum(counts)) < 1 for h, c in zip(had, counts, strict=True))
    assert had == [2 * count for count in counts]


@given(COUNTS, st.integers(1, 20), st.integers(0, 3))
def test_shuffling_moves_no_turn_to_another_block(counts: list[int], block: int, seed: int) -> None:
    plain = list(islice(turns(counts), sum(counts)))
    shuffled = list(shuffled_turns(counts, block, np.random.default_rng(seed)))
    assert len(shuffled) == len(plain)
    for start in range(0, len(plain), block):
        assert sorted(shuffled[start : start + block]) == sorted(plain[start : start + block])


def test_turns_are_random_within_a_block_and_go_on_if_asked() -> None:
    orders = {tuple(islice(shuffled_turns([2, 2], 4, np.random.default_rng(s), endless=True), 8)) for s in range(20)}
    assert len(orders) > 5 and all(Counter(order[4:]) == {0: 2, 1: 2} for order in orders)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(6, 500))
def test_apportioned_turns_are_all_given_out_and_near_the_quota(weights: list[float], total: int) -> None:
    counts = apportion(weights, total)
    assert sum(counts) == total and min(counts) >= 1
    quotas = [total * weight / sum(weights) for weight in weights]
    if min(quotas) >= 1:
        assert all(abs(count - quota) < 1 + 1e-9 for count, quota in zip(counts, quotas, strict=True))
    assert apportion([3, 1], 8) == [6, 2]


def test_weights_are_taken_by_their_digits() -> None:
    assert [whole_shares(x) for x in ([2, 1, 0.5], [0.3, 0.1], [7, 7], [1e-3, 1])] == [
        [4, 2, 1],
        [3, 1],
        [1, 1],
        [1, 1000],
    ]
    with pytest.raises(ValueError, match="1 turns for 2 sets"):
        apportion([1, 1], 1)


@pytest.mark.parametrize(("steps", "block"), [(1, 16), (3, 18), (7, 21), (8, 8), (16, 16), (100, 100)])
def test_blocks_are_whole_updates(steps: int, block: int) -> None:
    assert block_size(steps) == block and block % steps == 0
