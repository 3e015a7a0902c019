"""Texts that occur in several rows, and batches that hold one twice: found, and mended by exchanging rows.

To a loss with in-batch negatives such a text is its own negative. This module knows rows by number and texts by
hash; which rows meet in a batch to begin with is ``batch_plan``'s affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from contaccum.data.text_columns import NO_TEXT

_PATIENCE = 16
"""Rounds of random exchanges over which a twentieth of what is left must have been mended, or they end."""

_SEARCHED, _SEARCH_PATIENCE = 1 << 24, 256
"""Rows looked at, in all, by the exhaustive search for what random exchanges left; and steps of it without gain."""


@dataclass(frozen=True)
class SharedTexts:
    """Which of N rows have texts in common.

    Attributes:
        keys: int32 (N + 1, c): for each of a row's c texts its number if other rows have it too, else -1. Row N stands
            for an empty place in a batch, and has none.
        counts: int64 (t,): in how many rows each of the t shared texts occurs.
        commonest: int32 (N + 1,): of each row's shared texts that of most rows, or -1.
    """

    keys: np.ndarray
    counts: np.ndarray
    commonest: np.ndarray

    @classmethod
    def from_hashes(cls, hashes: np.ndarray) -> SharedTexts:
        """Number the texts that occur in several rows, whatever their columns: hashes int64 (N, c)."""
        n, c = hashes.shape
        present = hashes != NO_TEXT
        for column in range(1, c):  # a row that has a text twice has it once for this purpose
            for earlier in range(column):
                present[:, column] &= hashes[:, column] != hashes[:, earlier]
        places = np.flatnonzero(present)
        values = hashes.reshape(-1)[places]
        order = np.argsort(values)
        values = values[order]
        run = np.cumsum(np.concatenate([[False], values[1:] != values[:-1]])) if len(values) else places
        lengths = np.bincount(run)
        shared = lengths > 1
        keys = np.full((n + 1, c), -1, dtype=np.int32)
        of_shared = shared[run]
        number = np.cumsum(shared, dtype=np.int64) - 1
        keys.reshape(-1)[places[order[of_shared]]] = number[run[of_shared]]
        counts = lengths[shared]
        commonest = keys[:, 0].copy() if c else np.full(n + 1, -1, dtype=np.int32)
        padded = np.append(counts, 0)  # so that -1 counts as 0
        for column in range(1, c):
            more = padded[keys[:, column]] > padded[commonest]
            commonest[more] = keys[more, column]
        return cls(keys, counts, commonest)


@dataclass(frozen=True)
class Stage:
    """Between which batches rows may be exchanged: those numbered ``low[b]`` up to ``high[b]``, for each batch b."""

    low: np.ndarray
    high: np.ndarray


def count_repeats(slots: np.ndarray, texts: SharedTexts) -> int:
    """How often a text occurs again in a batch that has it: the sum of (occurrences - 1) over batches and texts.

    Args:
        slots: int64 (b, n): the rows of each batch, N for an empty place.
    """
    keys = np.sort(texts.keys[slots].reshape(len(slots), -1), axis=1)
    return int(((keys[:, 1:] == keys[:, :-1]) & (keys[:, 1:] >= 0)).sum())


def remove_repeats(
    slots: np.ndarray, sizes: np.ndarray, texts: SharedTexts, stages: Sequence[Stage], rng: np.random.Generator
) -> int:
    """Exchange rows between batches, in place, until no batch holds a text twice; returns the repeats that are left.

    Each exchange has fewer repeats after it than before. Partners are drawn at random, within the first stage while
    that leads on, then within the next; in the end every possible exchange of the few rows left over is looked at.

    Args:
        slots: int64 (b, n): the rows of each batch, N for an empty place (at the end).
        sizes: int64 (b,): rows in each batch.
        stages: where partners may come from; the last should allow all batches.
    """
    batches = len(slots)
    if batches == 0 or not len(texts.counts):
        return 0
    # A text in more rows than there are batches must repeat: no batch is expected to hold it less often than this.
    limits = -(-texts.counts // batches)
    crowded = np.zeros(slots.shape, dtype=bool)
    several = np.flatnonzero((texts.commonest[slots] >= 0).sum(axis=1) > 1)
    crowded[several] = _crowded(texts.keys[slots[several]], limits)
    for stage in stages:
        _exchange_at_random(slots, sizes, texts, limits, stage, crowded, rng)
    _exchange_by_search(slots, texts, limits, crowded, rng)
    return 0 if limits.max() == 1 and not crowded.any() else count_repeats(slots, texts)


def _crowded(keys: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Bool (b, n): rows with a text that as many other rows of the batch have, before them, as ``limits`` allows.

    Args:
        keys: int32 (b, n, c), the texts of each batch's rows.
    """
    b, n, c = keys.shape
    flat = keys.reshape(b, n * c)
    order = np.argsort(flat, axis=1, kind="stable")
    ordered = np.take_along_axis(flat, order, axis=1)
    place = np.broadcast_to(np.arange(n * c), ordered.shape)
    begins = np.ones(ordered.shape, dtype=bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    earlier = place - np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    over = (ordered >= 0) & (earlier >= limits[ordered])
    found = np.empty_like(over)
    np.put_along_axis(found, order, over, axis=1)
    return found.reshape(b, n, c).any(axis=2)


def _exchange_at_random(
    slots: np.ndarray,
    sizes: np.ndarray,
    texts: SharedTexts,
    limits: np.ndarray,
    stage: Stage,
    crowded: np.ndarray,
    rng: np.random.Generator,
) -> None:
    """In every round each batch that holds a repeat offers one row for a random one of another batch."""
    left: list[int] = []
    while True:
        givers = np.flatnonzero(crowded.any(axis=1))
        left.append(int(crowded.sum()))
        if not len(givers):
            return
        if len(left) > _PATIENCE and left[-1 - _PATIENCE] - left[-1] < max(1, left[-1] // 20):
            return
        rng.shuffle(givers)
        takers = rng.integers(stage.low[givers], stage.high[givers])
        # A batch takes part in one exchange a round, so that each is judged by what its batches then hold.
        number = np.arange(len(givers))
        first = np.full(len(slots), len(givers))
        np.minimum.at(first, givers, number)
        np.minimum.at(first, takers, number)
        alone = (first[givers] == number) & (first[takers] == number) & (givers != takers)
        givers, takers = givers[alone], takers[alone]
        if not len(givers):
            continue
        given = np.argmax(rng.random((len(givers), slots.shape[1])) * crowded[givers], axis=1)
        taken = rng.integers(0, sizes[takers])
        better = _change(slots, texts.keys, givers, given, takers, taken) < 0
        givers, given, takers, taken = givers[better], given[better], takers[better], taken[better]
        slots[givers, given], slots[takers, taken] = slots[takers, taken], slots[givers, given]
        touched = np.concatenate([givers, takers])
        crowded[touched] = _crowded(texts.keys[slots[touched]], limits)


def _change(
    slots: np.ndarray, keys: np.ndarray, givers: np.ndarray, given: np.ndarray, takers: np.ndarray, taken: np.ndarray
) -> np.ndarray:
    """By how much repeats change when ``slots[givers, given]`` and ``slots[takers, taken]`` are exchanged: (p,)."""
    number = np.arange(len(givers))
    row, other = keys[slots[givers, given]], keys[slots[takers, taken]]
    home, away = keys[slots[givers]], keys[slots[takers]]
    home[number, given] = -1
    away[number, taken] = -1

    def held(texts: np.ndarray, batch: np.ndarray) -> np.ndarray:
        count = np.zeros(len(texts), dtype=np.int64)
        for column in range(texts.shape[1]):
            text = texts[:, column]
            count += (batch == text[:, None, None]).any(axis=(1, 2)) & (text >= 0)
        return count

    return held(row, away) + held(other, home) - held(row, home) - held(other, away)


def _exchange_by_search(
    slots: np.ndarray, texts: SharedTexts, limits: np.ndarray, crowded: np.ndarray, rng: np.random.Generator
) -> None:
    """Look at every exchange of a row that repeats a text, one row after the other, for as long as the work allows.

    An exchange that changes nothing is made as well: it is how a row gets past one that has to move first.
    """
    n = slots.shape[1]
    steps = _SEARCHED // slots.size + 1
    fewest, patience = int(crowded.sum()), _SEARCH_PATIENCE
    if fewest > steps:  # too many to be worth the time: most of them cannot be helped
        return
    for _ in range(steps):
        offered = np.argwhere(crowded)
        patience = _SEARCH_PATIENCE if len(offered) < fewest else patience - 1
        fewest = min(fewest, len(offered))
        if not len(offered) or not patience:
            return
        batch, place = offered[rng.integers(len(offered))]
        row = texts.keys[slots[batch, place]]
        row = row[row >= 0]
        rest = np.delete(texts.keys[slots[batch]], place, axis=0)
        rest = np.unique(rest[rest >= 0])
        keys = texts.keys[slots]
        change = np.isin(keys, rest).sum(axis=2)  # what each row would repeat in this batch
        for text in row:
            has = (keys == text).any(axis=2)
            change += (has.sum(axis=1, keepdims=True) - has) > 0  # and this one in the other's
        change -= np.isin(row, rest).sum()
        change[slots == len(texts.keys) - 1] = n  # an empty place has nothing to give
        change[batch] = n
        least = change.min()
        if least > 0:
            continue
        candidates = np.flatnonzero(change == least)
        taker, taken = divmod(int(candidates[rng.integers(len(candidates))]), n)
        slots[batch, place], slots[taker, taken] = slots[taker, taken], slots[batch, place]
        touched = np.array([batch, taker])
        crowded[touched] = _crowded(texts.keys[slots[touched]], limits)
