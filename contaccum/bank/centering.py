"""Centring of gradients, so that no update moves a tower's embeddings as a whole.

In a full batch the gradients of all documents sum to zero, because the softmax pulls as much as it
pushes. In a micro-batch against a bank they do not, because banked documents get no gradient. Their
sum, called the remainder, drives new embeddings away from old ones.

`GradientCentering` removes the remainder of the whole update, although it gets the micro-batches
one after another. The loss of a micro-batch is a mean over its n pairs, and has the weight n in the
update. Let R be the weighted sum of the centred gradients of the update's earlier micro-batches,
g_1 ... g_r the gradients of the tower's rows in the current micro-batch (r is n for queries, and
n (1 + h) for documents with h hard negatives), S = R + n (g_1 + ... + g_r), and f = n / (number of
pairs in this micro-batch and in those that follow in the update). Then

    centred g_i = g_i - f S / (n r),    R <- (1 - f) S.

The last micro-batch of an update has f = 1, so the weighted sum of the centred gradients of the
update is zero. The state is one vector R per tower. docs/study.md has the measurements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contaccum.settings import CenterGradients

_TOWERS_OF_SETTING: dict[str, tuple[str, ...]] = {
    "both": ("queries", "passages"),
    "passages": ("passages",),  # the tower of passages and hard negatives
    "queries": ("queries",),
    "none": (),
    "auto": (),  # until drift is expected, see `GradientCentering.__call__`
}


class GradientCentering:
    """Function that subtracts the remainder from the gradients of a tower's embeddings."""

    def __init__(self, setting: CenterGradients, pairs_per_update: int | None) -> None:
        self.setting = setting
        self.start_update(pairs_per_update)

    def start_update(self, num_pairs: int | None) -> None:
        """Reset the remainder, and set the number of pairs of the update that starts.

        None centres each micro-batch by itself.
        """
        self.num_pairs = num_pairs
        self._num_remaining_pairs = num_pairs or 0
        self._remainders: dict[str, Tensor] = {}  # (d,) each

    def restart(self) -> None:
        """Start an update with as many pairs as the last update."""
        self.start_update(self.num_pairs)

    def __call__(self, gradient: Tensor, is_drift_expected: bool, not_finite: Tensor) -> None:
        """Centre the gradient of a micro-batch in place.

        An update of a single row is not centred, because its gradient would become zero. The
        gradient of a micro-batch that is not finite is not centred either, and the next micro-batch
        gets the remainder of the micro-batches before it.

        Args:
            gradient: (n, 2 + h, d), of each pair's query, then of its documents.
            is_drift_expected: True if ``drift_compensation`` is ``"auto"`` and the bank uses pairs
                of an older encoder. The setting ``"auto"`` begins to centre passages only then, and
                goes on to the end of the update.
            not_finite: bool scalar, True for a micro-batch that is not finite.
        """
        n = len(gradient)
        if self._num_remaining_pairs < n:
            # The next update starts. If num_pairs is None (or too small), it ends with this
            # micro-batch.
            self.restart()
            self._num_remaining_pairs = max(self._num_remaining_pairs, n)
        fraction = n / self._num_remaining_pairs
        towers = _TOWERS_OF_SETTING[self.setting]
        if self.setting == "auto" and (is_drift_expected or "passages" in self._remainders):
            # Centring that has begun goes on to the end of the update, even if no aged entry is in
            # use any more: the remainder so far is spread over the micro-batches that follow.
            towers = ("passages",)
        for tower in towers:
            rows = gradient[:, :1] if tower == "queries" else gradient[:, 1:]  # (n, 1 or 1 + h, d)
            num_rows = n * rows.shape[1]
            if tower not in self._remainders:
                if num_rows == 1 and self._num_remaining_pairs == 1:
                    continue  # the only row of the update
                self._remainders[tower] = gradient.new_zeros(gradient.shape[2])
            old_remainder = self._remainders[tower]
            remainder = old_remainder.add(rows.sum((0, 1)), alpha=n)  # (d,), S
            correction = remainder * (fraction / (n * num_rows))
            rows -= correction.masked_fill(not_finite, 0)
            new_remainder = remainder * (1 - fraction)
            self._remainders[tower] = torch.where(not_finite, old_remainder, new_remainder)
        self._num_remaining_pairs -= n
