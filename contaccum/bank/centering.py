"""Centring of gradients: no update moves a tower's embeddings as a whole.

In a whole batch the gradients of all passages sum to zero: the softmax pulls as much as it pushes.
In a micro-batch against a bank they do not, because banked documents take no gradient, and the
remainder drives new embeddings away from old ones. `GradientCentering` takes it out over the
update, in one pass: the remainder of the micro-steps so far is spread over the rows that are still
to come. It holds one vector for each tower. docs/drift.md shows what this is worth.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from contaccum.bank.settings import CenterGradients

QUERIES = 0
PASSAGES = 1
_TOWERS: dict[str, tuple[int, ...]] = {
    "both": (QUERIES, PASSAGES),
    "passages": (PASSAGES,),
    "queries": (QUERIES,),
    "none": (),
}


class GradientCentering:
    """Takes the mean out of the gradients of a tower's embeddings.

    Args:
        setting: ``center_gradients`` of `BankedInfoNCE`.
        pairs_per_update: pairs of all micro-batches of an update; None centres each by itself.
    """

    def __init__(self, setting: CenterGradients, pairs_per_update: int | None) -> None:
        self.setting = setting
        self.begin_update(pairs_per_update)

    def begin_update(self, num_pairs: int | None) -> None:
        """Drop the remainder, and expect an update of that many pairs."""
        self.num_pairs = num_pairs
        self._pairs_to_come = num_pairs or 0
        self._remainders: dict[int, Tensor] = {}

    def restart(self) -> None:
        """Drop the remainder, and expect an update of as many pairs as the last one."""
        self.begin_update(self.num_pairs)

    def __call__(self, gradients: Sequence[Tensor], has_aged_entries: bool) -> list[Tensor]:
        """Centre the gradients of a micro-batch's queries and documents, (n, ..., d) each.

        With the last pair of an update, its gradients have summed to zero. An update of a single
        row stays as it is: it would take itself out. The gradients of a micro-batch
        stay as they are if they are not finite; the remainder before it is spread over the
        micro-batches after it.

        Args:
            has_aged_entries: whether entries of an older encoder are in use; ``"auto"`` centres
                passages then.
        """
        n = len(gradients[QUERIES])
        if self._pairs_to_come < n:  # the next update begins, or no number of pairs was set
            self.restart()
            self._pairs_to_come = max(self._pairs_to_come, n)
        share = n / self._pairs_to_come  # the last micro-batch of an update takes all
        centred = list(gradients)
        for tower in self._centred_towers(has_aged_entries):
            rows = gradients[tower].flatten(0, -2)
            is_only_row = len(rows) == self._pairs_to_come == 1
            if is_only_row and tower not in self._remainders:
                continue
            before = self._remainders.get(tower, torch.zeros_like(rows[0]))
            remainder = rows.sum(0) + before
            is_finite = remainder.isfinite().all()
            correction = torch.where(is_finite, remainder * (share / len(rows)), 0.0)
            centred[tower] = gradients[tower] - correction
            self._remainders[tower] = torch.where(is_finite, remainder * (1 - share), before)
        self._pairs_to_come -= n
        return centred

    def _centred_towers(self, has_aged_entries: bool) -> tuple[int, ...]:
        if self.setting != "auto":
            return _TOWERS[self.setting]
        return (PASSAGES,) if has_aged_entries else ()
