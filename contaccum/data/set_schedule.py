"""Whose turn it is: in which order the micro-batches of several training sets follow each other.

Shares are exact, not drawn: after t turns a set has had its share of them, to less than one, and what is random is the
order within short blocks. It works on numbers of sets and turns; what a turn trains on is the affair of `set_samplers`
and `streams`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import islice

import numpy as np

_LEAST_BLOCK = 16


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Weights as the smallest whole numbers in the same ratio, by their decimal digits: 0.3 and 0.1 are 3 and 1."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(x.denominator for x in exact))
    shares = [int(x * scale) for x in exact]
    return [share // math.gcd(*shares) for share in shares]


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """``total`` turns, divided in the ratio of the weights by largest remainders, but at least one for each.

    Raises:
        ValueError: there are fewer turns than weights.
    """
    if total < len(weights):
        raise ValueError(f"{total} turns for {len(weights)} sets")
    exact = [Fraction(weight) for weight in weights]
    quotas = [weight * total / sum(exact) for weight in exact]
    counts = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: (counts[i] - quotas[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    for i, count in enumerate(counts):
        if count == 0:
            counts[counts.index(max(counts))] -= 1
            counts[i] = 1
    return counts


def turns(counts: Sequence[int]) -> Iterator[int]:
    """The numbers of sets, turn by turn: ``counts[i]`` times i in each sum(counts) turns, without end.

    After any t turns, set i has had ``counts[i] * t / sum(counts)`` of them, to less than one: of those whose next turn
    is not too early for that, the one comes whose next turn would be too late first (Steiner and Yeomans, 1993).
    """
    total = sum(counts)
    while True:
        had = [0] * len(counts)
        for turn in range(1, total + 1):
            allowed = [i for i, c in enumerate(counts) if had[i] < c and had[i] * total // c < turn]
            chosen = min(allowed, key=lambda i: (-(-(had[i] + 1) * total // counts[i]), i))
            had[chosen] += 1
            yield chosen


def block_size(accumulation_steps: int) -> int:
    """Turns whose order is random: the K micro-batches of an update, or of as many updates as make 16."""
    return -(-_LEAST_BLOCK // accumulation_steps) * accumulation_steps if accumulation_steps < 8 else accumulation_steps


def shuffled_turns(counts: Sequence[int], block: int, rng: np.random.Generator, endless: bool = False) -> Iterator[int]:
    """`turns`, each ``block`` of them in random order; sum(counts) in all, unless ``endless``.

    Without the shuffling, ranks that take turns with micro-batches could each get one and the same set every time.
    """
    source = turns(counts) if endless else islice(turns(counts), sum(counts))
    while held := list(islice(source, block)):
        yield from (held[place] for place in rng.permutation(len(held)).tolist())
