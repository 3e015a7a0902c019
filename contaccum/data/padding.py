"""What padding costs, and what saving it does to the negatives: every text of a batch is padded to the longest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from contaccum.data.batch_plan import BatchPlan


@dataclass(frozen=True)
class Padding:
    """What a plan's batches take, in tokens or characters, and how lengths lie in them.

    Attributes:
        real: without padding.
        padded: with padding.
        batch_spread: variance of the positives' lengths (column 1) within a batch, over that among all rows: 1 for
            random batches, 0 where a batch's negatives are all as long as its positives.
        update_spread: variance of an update's mean length, over that of random updates: 1 where an update is a
            random sample of lengths, n where each of its batches is of one length.
    """

    real: int
    padded: int
    batch_spread: float
    update_spread: float

    def saved_against(self, other: Padding) -> float:
        """The share of the other's padded tokens, per real token, that is not there."""
        return 1.0 - (self.padded / max(self.real, 1)) / (other.padded / max(other.real, 1))


def padding_of(plan: BatchPlan, lengths: np.ndarray, update: int = 16) -> Padding:
    """What a plan costs.

    Args:
        lengths: int64 (N, c), the length of each of a row's c texts.
        update: micro-batches per update.
    """
    n = plan.slots.shape[1]
    table = np.concatenate([lengths, np.zeros((1, lengths.shape[1]), dtype=lengths.dtype)])  # an empty place is row N
    in_batches = table[plan.slots]
    padded = int((in_batches.max(axis=1).sum(axis=1) * plan.sizes).sum())
    positives = in_batches[plan.sizes == n][:, :, min(1, lengths.shape[1] - 1)].astype(np.float64)
    whole = float(positives.var()) if positives.size else 0.0
    if not whole or n < 2:
        return Padding(int(in_batches.sum()), padded, 1.0, 1.0)
    updates = positives[: len(positives) // update * update].reshape(-1, update * n).mean(axis=1)
    return Padding(
        real=int(in_batches.sum()),
        padded=padded,
        batch_spread=float(positives.var(axis=1, ddof=1).mean()) / whole,
        update_spread=float(updates.var(ddof=1)) * update * n / whole if len(updates) > 1 else 1.0,
    )
