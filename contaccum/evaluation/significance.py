"""Significance tests between two systems that answered the same queries.

Queries about the same passage have similar differences. So the unit of a test is a group of linked
queries (`contaccum.data.grouping.group_queries`), not a query: many queries about few passages are
little evidence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from contaccum.errors import DataError

ALPHA = 0.05
"""Level of the tests: the intervals hold 95%."""

MIN_CHANGED_GROUPS = 6
"""Fewer groups than this cannot show a difference: the smallest two-sided p-value of k groups is
2 / 2^k, which is 0.0625 for five groups."""

FEW_GROUPS = 30
"""Fewer groups than this are little evidence, and the user is told so."""

_MAX_EXACT_GROUPS = 13  # 2^13 = 8,192 sign vectors are about as many as are drawn otherwise
_NUM_FLIPS = 10_000
_MAX_SIGNS = 2_000_000  # signs that are in memory at once
_TOLERANCE = 1e-12  # sums in another order differ in the last bits
_BISECTIONS = 40


def sign_flip_test(
    ours: Mapping[str, float],
    theirs: Mapping[str, float],
    groups: Mapping[str, Any],
    seed: int = 0,
) -> dict[str, float]:
    """Compare two systems by their scores on the same queries, which are in groups.

    If the systems do not differ, the differences of a group are as likely with the other sign. The
    p-value is the share of sign vectors, one sign for each group, with which the mean difference
    over the queries is at least as far from 0 as it is. All sign vectors are used for up to 13
    groups with a difference, else 10,000 random ones and the observed one. The 95% interval holds
    the differences that this test does not reject (Lehmann and Romano 2005, sections 5.8 to 5.12).
    So it excludes 0 if the p-value is at most 0.05, apart from chance in the random signs.

    Args:
        ours, theirs: {query id: score between 0 and 1} with the same queries.
        groups: {query id: its group}.
        seed: seed of the random signs.

    Returns:
        ``difference``: mean of ours minus mean of theirs. ``low`` and ``high``: its 95% interval,
        at most from -1 to 1. ``p_value``: two-sided. ``groups``: number of groups.
        ``changed_groups``: number of groups whose total is not the same for both systems.

    Raises:
        DataError: the queries differ, there are none, or a score is NaN or infinite.
    """
    differences = np.array([ours[query] - theirs.get(query, np.nan) for query in ours])
    if len(ours) != len(theirs) or not len(ours) or not np.isfinite(differences).all():
        raise DataError(
            "two systems can only be compared by finite scores of the same queries; got "
            f"{len(ours)} and {len(theirs)} queries"
        )
    numbers: dict[Any, int] = {}
    group_of_query = [numbers.setdefault(groups[query], len(numbers)) for query in ours]
    sums = np.bincount(group_of_query, differences)  # (g,)
    sizes = np.bincount(group_of_query).astype(float)  # (g,)
    has_changed = np.abs(sums) > _TOLERANCE
    num_changed = int(has_changed.sum())
    flipped = _flip_all(sums, sizes, seed)
    if num_changed <= _MAX_EXACT_GROUPS:
        # A group without a difference has none with another sign either: its sign is not needed.
        p_value = _compute_p_value(_flip_all(sums[has_changed], sizes[has_changed], seed), 0.0)
    else:
        p_value = _compute_p_value(flipped, 0.0)
    difference = float(differences.mean())
    low, high = -1.0, 1.0
    if len(sums) >= MIN_CHANGED_GROUPS:
        is_rejected = p_value <= ALPHA
        # Each limit lies between a difference that is rejected and one that is not.
        inner_low, inner_high = difference, difference
        outer_low, outer_high = -1.0, 1.0
        if is_rejected and difference > 0:
            outer_low = 0.0
        elif is_rejected:
            outer_high = 0.0
        else:
            inner_low, inner_high = min(difference, 0.0), max(difference, 0.0)
        low = _find_limit(flipped, inner_low, outer_low)
        high = _find_limit(flipped, inner_high, outer_high)
    return {
        "difference": difference,
        "low": low,
        "high": high,
        "p_value": p_value,
        "groups": len(sums),
        "changed_groups": num_changed,
    }


def warn_of_few_groups(queries: str, num_groups: int) -> list[str]:
    """Return a warning if queries are in few groups, else nothing.

    Args:
        queries: words for the queries, such as "the test queries".
    """
    if num_groups >= FEW_GROUPS:
        return []
    return [
        f"{queries} are about only {num_groups} different passages: only a large difference can be "
        "told from chance, whatever the number of queries"
    ]


def add_holm(tests: Sequence[dict[str, Any]]) -> None:
    """Add ``p_holm`` to each test of a family: its ``p_value``, adjusted by Holm's procedure.

    Of m tests, the smallest p-value is multiplied by m, the next one by m - 1, and so on, and no
    adjusted value is smaller than the one before it. If the tests with ``p_holm`` of at most alpha
    are rejected, the probability of any false rejection is at most alpha (Holm 1979).
    """
    adjusted = 0.0
    by_p_value = sorted(tests, key=lambda test: test["p_value"])
    for rank, test in enumerate(by_p_value):
        num_remaining = len(tests) - rank
        corrected = min(1.0, test["p_value"] * num_remaining)
        adjusted = max(adjusted, corrected)
        test["p_holm"] = adjusted


def _iter_signs(num_groups: int, seed: int) -> Iterator[np.ndarray]:
    """Yield blocks (b, g) of sign vectors; the first vector of the first block has only ones."""
    if num_groups <= _MAX_EXACT_GROUPS:
        bits = np.arange(2**num_groups)[:, None] >> np.arange(num_groups)
        yield 1.0 - 2.0 * (bits & 1)
        return
    yield np.ones((1, num_groups))
    generator = np.random.default_rng(seed)
    block_size = max(1, _MAX_SIGNS // num_groups)
    for start in range(0, _NUM_FLIPS, block_size):
        num_drawn = min(block_size, _NUM_FLIPS - start)
        yield 1.0 - 2.0 * generator.integers(0, 2, (num_drawn, num_groups), dtype=np.int8)


def _flip_all(sums: np.ndarray, sizes: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the totals (f,) of sums and of sizes with each of f sign vectors, the observed first.

    With a supposed difference s, the sums of the groups are ``sums - s * sizes``. So the totals for
    any s follow from these two.
    """
    columns = np.stack([sums, sizes], axis=1)  # (g, 2)
    totals = np.concatenate([signs @ columns for signs in _iter_signs(len(sums), seed)])  # (f, 2)
    return totals[:, 0], totals[:, 1]


def _compute_p_value(flipped: tuple[np.ndarray, np.ndarray], supposed: float) -> float:
    """Return the p-value of the hypothesis that the difference is the supposed one."""
    flipped_sums, flipped_sizes = flipped
    distances = np.abs(flipped_sums - supposed * flipped_sizes)
    return float(np.mean(distances >= distances[0] - _TOLERANCE * max(1.0, distances[0])))


def _find_limit(flipped: tuple[np.ndarray, np.ndarray], inner: float, outer: float) -> float:
    """Return the limit of the interval between a difference inside of it and one outside."""
    if _compute_p_value(flipped, outer) > ALPHA:
        return outer
    for _ in range(_BISECTIONS):
        middle = (inner + outer) / 2
        if _compute_p_value(flipped, middle) > ALPHA:
            inner = middle
        else:
            outer = middle
    return inner
