"""Centring of gradients, so that no update moves a tower's embeddings as a whole.

In a full batch the gradients of all documents sum to zero, because the softmax pulls as much as it
pushes. In a micro-batch against a bank they do not, because banked documents take no gradient. The
remainder, which is their sum, drives new embeddings away from old ones.

`GradientCentering` subtracts the remainder over the whole update, in one pass. Let R be the sum of
the centred gradients of the update's earlier micro-batches, g_1 ... g_r the gradients of the
current one, and f the fraction of the update's remaining pairs that it has. Then

    centred g_i = g_i - f (R + g_1 + ... + g_r) / r,    R <- (1 - f) (R + g_1 + ... + g_r).

The last micro-batch of an update has f = 1, so the centred gradients of the update sum to zero. The
state is one vector R per tower. docs/drift.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from contaccum.bank.settings import CenterGradients

QUERIES = 0
PASSAGES = 1
_TOWERS_OF_SETTING: dict[str, tuple[int, ...]] = {
    "both": (QUERIES, PASSAGES),
    "passages": (PASSAGES,),
    "queries": (QUERIES,),
    "none": (),
}


class GradientCentering:
    """Function that subtracts the mean from the gradients of a tower's embeddings.

    Args:
        setting: ``center_gradients`` of `BankedInfoNCE`.
        pairs_per_update: number of pairs in all micro-batches of an update; None centres each
            micro-batch by itself.
    """

    def __init__(self, setting: CenterGradients, pairs_per_update: int | None) -> None:
        self.setting = setting
        self.start_update(pairs_per_update)

    def start_update(self, num_pairs: int | None) -> None:
        """Reset the remainder, and set the number of pairs of the update that starts."""
        self.num_pairs = num_pairs
        self._num_remaining_pairs = num_pairs or 0
        self._remainders: dict[int, Tensor] = {}

    def restart(self) -> None:
        """Start an update with as many pairs as the last one."""
        self.start_update(self.num_pairs)

    def __call__(self, gradients: Sequence[Tensor], has_aged_entries: bool) -> list[Tensor]:
        """Centre the gradients of a micro-batch.

        An update of a single row is not centred, because its gradient would become zero. The
        gradients of a micro-batch that is not finite are not centred either, and the remainder of
        the micro-batches before it is left to those after it.

        Args:
            gradients: of queries (n, d) and of documents (n, 1 + h, d).
            has_aged_entries: True if the bank uses pairs of an older encoder; ``"auto"`` centres
                the passages then.
        """
        n = len(gradients[QUERIES])
        if self._num_remaining_pairs < n:  # the next update starts, or num_pairs is not set
            self.restart()
            self._num_remaining_pairs = max(self._num_remaining_pairs, n)
        fraction = n / self._num_remaining_pairs
        centred = list(gradients)
        for tower in self._get_centred_towers(has_aged_entries):
            rows = gradients[tower].flatten(0, -2)
            is_only_row = len(rows) == self._num_remaining_pairs == 1
            if is_only_row and tower not in self._remainders:
                continue
            old_remainder = self._remainders.get(tower, torch.zeros_like(rows[0]))
            remainder = old_remainder + rows.sum(0)
            is_finite = remainder.isfinite().all()
            correction = torch.where(is_finite, remainder * (fraction / len(rows)), 0.0)
            centred[tower] = gradients[tower] - correction
            new_remainder = torch.where(is_finite, remainder * (1 - fraction), old_remainder)
            self._remainders[tower] = new_remainder
        self._num_remaining_pairs -= n
        return centred

    def _get_centred_towers(self, has_aged_entries: bool) -> tuple[int, ...]:
        if self.setting != "auto":
            return _TOWERS_OF_SETTING[self.setting]
        if has_aged_entries:
            return (PASSAGES,)
        return ()
