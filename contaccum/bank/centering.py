"""Centring of gradients: no update moves a tower's embeddings as a whole.

Of a whole batch the gradients of all passages sum to zero: the softmax pulls as much as it pushes. Those of a
micro-batch against a bank do not, because the bank's columns take none, and what is left over drives new embeddings
away from old ones. It is taken out over the update, in one pass: what the micro-steps so far have left over is spread
over the rows that are still to come. A tower needs one vector for it. docs/drift.md tells what it is worth.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from contaccum.errors import check_choice

_TOWERS = {"both": (0, 1), "passages": (1,), "queries": (0,), "none": ()}


class GradientCentering:
    """Takes the mean out of a tower's gradients; holds what those of the update under way sum to, as corrected.

    Args:
        setting: ``center_gradients`` of `BankedInfoNCE`.
        pairs_per_update: pairs of all micro-batches of an update; None: every micro-batch is centred by itself.
    """

    def __init__(self, setting: str, pairs_per_update: int | None) -> None:
        check_choice("center_gradients", setting, ("auto", *_TOWERS))
        self.setting = setting
        self.begin_update(pairs_per_update)

    def begin_update(self, pairs: int | None) -> None:
        """Forget what is left over; the update that begins has that many pairs."""
        self.pairs, self._to_come = pairs, pairs or 0
        self._left_over: dict[int, Tensor] = {}

    def __call__(self, gradients: Sequence[Tensor], aged: bool) -> list[Tensor]:
        """Centre the gradients of a micro-batch's queries and columns, (n, ..., d) each.

        With the last pair of an update, its gradients have summed to zero. An update of a single row stays as it is:
        it would take itself out. A micro-batch whose gradients are not finite returns them as they are, and what was
        left over before it is spread over the micro-batches after it.

        Args:
            aged: whether entries of an older encoder are in use; ``"auto"`` centres passages then.
        """
        n = len(gradients[0])
        if self._to_come < n:  # the next update begins, or no number of pairs was set
            self.begin_update(self.pairs)
            self._to_come = max(self._to_come, n)
        share = n / self._to_come  # of what is left over; the last micro-batch of an update takes all
        centred = list(gradients)
        for tower in _TOWERS.get(self.setting, (1,) if aged else ()):
            rows = gradients[tower].flatten(0, -2)
            if len(rows) == self._to_come == 1 and tower not in self._left_over:
                continue
            before = self._left_over.get(tower, torch.zeros_like(rows[0]))
            left_over = rows.sum(0) + before
            is_finite = left_over.isfinite().all()
            correction = torch.where(is_finite, left_over * (share / len(rows)), 0.0)
            centred[tower] = gradients[tower] - correction
            self._left_over[tower] = torch.where(is_finite, left_over * (1 - share), before)
        self._to_come -= n
        return centred
