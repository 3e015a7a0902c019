"""Which rows share a micro-batch: a whole epoch's batches at once, from the seed and the epoch alone.

Plain shuffling, or shuffling under conditions: no text twice in a batch, rows of similar length together, rows of one
topic together. It works on numbers (hashes, lengths, labels) in arrays; where they come from is ``text_columns``'
affair, and handing batches to a trainer that of ``samplers``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from contaccum.data.repeats import SharedTexts, Stage, remove_repeats

LENGTH_WINDOW = 16
"""Batches sorted by length together, unless said otherwise. With more, little more padding is saved."""

_LEAST_WINDOWS = 4
"""Were all rows sorted together, the same ones would meet in every epoch."""

_NEAR = 4
"""Within a window, batches this far apart exchange rows that may not meet: their lengths are still similar."""

_FAIR_SHARE, _FAIR_MOST = 64, 8
"""One in 64 batches, at most 8, are drawn from all rows and come first: the bank's probe for drift is made of a rank's
first micro-batch, and must not consist of one topic or length."""

_LISTED = 4096  # batches turned into lists at once


@dataclass(frozen=True)
class BatchPlan:
    """An epoch's batches.

    Attributes:
        slots: int64 (b, n): the rows of each of b batches; only the last may be short, and then ends in N.
        sizes: int64 (b,): rows in each batch.
        repeats: how often, with ``texts``, a batch holds a text again: 0 unless it cannot be helped.
    """

    slots: np.ndarray
    sizes: np.ndarray
    repeats: int = 0

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, len(self.slots), _LISTED):
            sizes = self.sizes[start : start + _LISTED]
            batches = self.slots[start : start + _LISTED].tolist()
            if len(sizes) and sizes[-1] < self.slots.shape[1]:
                batches[-1] = batches[-1][: int(sizes[-1])]
            yield from batches


def plan_batches(
    rows: int,
    batch_size: int,
    seed: int,
    epoch: int,
    *,
    texts: SharedTexts | None = None,
    lengths: np.ndarray | None = None,
    topics: np.ndarray | None = None,
    length_window: int = LENGTH_WINDOW,
    drop_last: bool = False,
) -> BatchPlan:
    """Put N rows into batches of n: every row once, in an order that (seed, epoch) determines.

    N // n batches are full, and the last holds what is left over, a random sample of all rows whatever the conditions,
    unless ``drop_last``. How many ranks share them plays no part.

    - ``texts``: no batch holds a text twice, as long as no row has texts in common with (b - 1) / 2 others or more, b
      being the number of batches: while there is a repeat, exchanging two rows can then remove it. Texts of more rows
      than b / 4 are dealt out, one to a batch, so that it mostly goes well beyond that, up to b rows. What cannot be
      exchanged away, as the repeats of a text in more rows than batches, or is not found within a bound on the work,
      is kept, as few as are found, and counted: ``repeats``. No row is left out.
    - ``lengths``: batches are drawn at random, and the rows of ``length_window`` batches in a row, a window, are sorted
      by length and cut into batches again, in random order. So windows are random samples, and an update of as many
      micro-batches sees what it would see without. At least four windows, so that other rows meet in every epoch.
    - ``topics``: batches of one topic, in random order. What is left over of each topic, n - 1 rows at most, goes into
      mixed batches, next to each other, so that few topics meet there. Windows are of one topic. A row that repeats a
      text moves to another topic if it must.

    With topics or lengths, one batch in 64 (at least one, at most eight) is a random sample, and these come first.

    Args:
        rows: N.
        batch_size: n.
        texts: which rows share texts.
        lengths: (N,) numbers, of tokens or characters for instance.
        topics: int64 (N,), labels from 0.
    """
    rng = np.random.default_rng([seed & (2**64 - 1), epoch])
    order = rng.permutation(rows)
    full, rest = divmod(rows, batch_size)
    fair = min(-(-full // _FAIR_SHARE), _FAIR_MOST) if topics is not None or lengths is not None else 0
    body = order[fair * batch_size : full * batch_size]
    if topics is None:
        batches_of = np.array([full - fair])
    else:
        body, batches_of = _by_topic(body, rng.permutation(int(topics.max(initial=-1)) + 1)[topics], batch_size)
    arranged = _deal_out(body, batches_of, batch_size, texts, rng)
    low, high = _ranges(batches_of)
    window, near_low, near_high = np.zeros(len(low), dtype=np.int64), low, high
    if lengths is not None:
        # The fair batches begin the first window, so that windows stay in step with updates.
        window, near_low, near_high = _windows(low, high, length_window, fair if topics is None else 0)
        arranged = _sort_within(arranged, window, lengths)

    slots = np.full((full + (rest > 0 and not drop_last), batch_size), rows, dtype=np.int64)
    slots[:fair] = order[: fair * batch_size].reshape(-1, batch_size)
    slots[fair:full] = arranged
    if len(slots) > full:
        slots[full, :rest] = order[full * batch_size :]
    sizes = np.full(len(slots), batch_size)
    sizes[full:] = rest
    repeats = 0
    if texts is not None:
        everywhere = Stage(np.zeros(len(slots), dtype=np.int64), np.full(len(slots), len(slots)))
        stages = [everywhere]
        for lower, upper in ((low, high), (near_low, near_high)):
            stage = Stage(everywhere.low.copy(), everywhere.high.copy())
            stage.low[fair:full], stage.high[fair:full] = lower + fair, upper + fair
            stages.insert(0, stage)
        stages = stages if lengths is not None else stages[1:] if topics is not None else stages[2:]
        repeats = remove_repeats(slots, sizes, texts, stages, rng)
    if topics is not None:
        window = np.zeros_like(window)
    slots[fair:full] = slots[fair:full][np.lexsort((rng.random(full - fair), window))]
    return BatchPlan(slots, sizes, repeats)


def _by_topic(rows: np.ndarray, topics: np.ndarray, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows by topic, those that fill no batch at the end; and how many batches each topic has, mixed ones last."""
    codes = topics[rows]
    order = _stable_order(codes)
    rows, codes = rows[order], codes[order]
    counts = np.bincount(codes)
    whole = counts // batch_size * batch_size
    place = np.arange(len(rows)) - (np.cumsum(counts) - counts)[codes]
    fits = place < whole[codes]
    batches_of = np.append(whole, len(rows) - whole.sum()) // batch_size
    return np.concatenate([rows[fits], rows[~fits]]), batches_of


def _deal_out(
    rows: np.ndarray, batches_of: np.ndarray, batch_size: int, texts: SharedTexts | None, rng: np.random.Generator
) -> np.ndarray:
    """Put rows, in the order of their classes (topics), into batches: (b, n).

    Random exchanges find no place for a text that nearly all batches hold. Rows of such a text are dealt out, one to
    a batch, before all others; if it has more rows than there are batches, as evenly as can be.
    """
    in_order = rows.reshape(-1, batch_size)
    if texts is None or not len(texts.counts) or not len(rows):
        return in_order
    text = texts.commonest[rows].astype(np.int64)
    of_class = np.repeat(np.arange(len(batches_of)), batches_of * batch_size)
    if len(batches_of) == 1:
        count = texts.counts[text]
    else:
        _, group, sizes = np.unique(of_class * (len(texts.counts) + 1) + text, return_inverse=True, return_counts=True)
        count = sizes[group]
    common = (text >= 0) & (4 * count > batches_of[of_class])
    if not common.any():
        return in_order
    rank = np.where(common, rng.permutation(len(texts.counts))[text], len(texts.counts))
    rows = rows[_stable_order(of_class * (len(texts.counts) + 1) + rank)]
    before = np.cumsum(batches_of) - batches_of
    round_, batch = np.divmod(np.arange(len(rows)) - before[of_class] * batch_size, batches_of[of_class])
    slots = np.empty_like(in_order)
    slots[before[of_class] + batch, round_] = rows
    # The rows of a text lie in neighbouring batches: windows of neighbours must not.
    return slots[np.lexsort((rng.random(len(slots)), np.repeat(np.arange(len(batches_of)), batches_of)))]


def _ranges(batches_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first batch of each batch's class, and the one after the last: (b,) each."""
    ends = np.cumsum(batches_of)
    return np.repeat(ends - batches_of, batches_of), np.repeat(ends, batches_of)


def _windows(low: np.ndarray, high: np.ndarray, window: int, fair: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each batch's window, numbered through; and the first and after-last batch near it in its window: (b,) each."""
    place = np.arange(len(low))
    sizes = np.clip((high - low + fair) // _LEAST_WINDOWS, 1, window)
    within = (place - low + fair) // sizes
    begins = np.ones(len(low), dtype=bool)
    begins[1:] = (low[1:] != low[:-1]) | (within[1:] != within[:-1])
    number = np.cumsum(begins) - 1
    start, end = _ranges(np.bincount(number)) if len(low) else (low, high)
    return number, np.maximum(start, place - _NEAR), np.minimum(end, place + _NEAR + 1)


def _sort_within(slots: np.ndarray, window: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The rows of each window by length, the order of equal ones as it was."""
    rows = slots.reshape(-1)
    if not len(rows):
        return slots
    key = lengths[rows]
    if not np.issubdtype(key.dtype, np.integer) or key.min() < 0 or key.max() >= 1 << 32:
        key = np.unique(key, return_inverse=True)[1]
    code = np.repeat(window, slots.shape[1]) * (int(key.max()) + 1) + key
    return rows[_stable_order(code)].reshape(slots.shape)


def _stable_order(codes: np.ndarray) -> np.ndarray:
    """``argsort(codes, kind="stable")`` of non-negative int64 numbers, several times as fast where it can be."""
    places = max(len(codes) - 1, 1).bit_length()
    if int(codes.max(initial=0)).bit_length() + places > 62:
        return np.argsort(codes, kind="stable")
    packed = (codes << places) | np.arange(len(codes))
    packed.sort()
    return packed & ((1 << places) - 1)
