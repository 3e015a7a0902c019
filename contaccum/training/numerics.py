"""Losses and gradients that are not finite: found before the optimizer steps, told, counted against a budget.

An update is applied as a whole or not at all. A loss that is not finite makes the gradient so (``poisoned``), whatever
else the update summed up and on whichever rank it was, and then the norm of the update's gradient, which is known on
every rank, tells. Nothing is read from the device for it but that one number.
"""

from __future__ import annotations

import logging
import math
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from contaccum.data.samplers import EpochBatchSampler, PlannedBatchSampler
from contaccum.errors import UserError

logger = logging.getLogger(__name__)

_ROWS_SHOWN = 16


def poisoned(loss: Tensor) -> Tensor:
    """The loss; one that is not finite gets a gradient that is not finite either."""
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)


def nothing_but_nan(model: nn.Module) -> Tensor:
    """A loss in place of one that could not be computed; it reaches every parameter, as reductions over ranks need."""
    return sum((p.sum() * math.nan for p in model.parameters() if p.requires_grad), start=torch.tensor(math.nan))


class SkippedUpdates:
    """What was skipped in a run, and what its losses are without it.

    Args:
        budget: updates that may be skipped in the whole run.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.count = 0
        self.present: dict[str, Any] = {}
        """What is wrong with the present update, for its log line; empty when nothing is."""
        self._since_log = [0.0, 0, 0]  # sum of losses, updates applied, updates skipped
        self._in_all = [0.0, 0, 0]

    def begin(self) -> None:
        """Another update."""
        self.present = {}

    def judge(self, update: int, norm: Any, losses: list[Tensor], scale: float) -> list[int] | None:
        """Look at a complete update.

        Args:
            update: its number.
            norm: of its gradient, over all ranks, before clipping; None if unknown.
            losses: of its micro-steps, () each.
            scale: of a gradient scaler, 1 without.

        Returns:
            None when it may be applied, else the micro-steps to blame, from 0: those whose loss is not finite, or all.
        """
        if norm is None or math.isfinite(float(norm)):
            return None
        finite = torch.isfinite(torch.stack(losses)).tolist() if losses else []
        blamed = [index for index, fine in enumerate(finite) if not fine]
        if blamed:
            kind = "loss"
        elif scale > 1:
            # What a scaler is there for: it skips the step and halves its scale.
            self.present = {"skipped": "overflow", "scale": scale}
            logger.info(f"update {update}: gradients overflow at scale {scale:g}; the scaler lowers it")
            return None
        else:
            kind, blamed = "gradient", list(range(len(finite)))
        self.present = {"skipped": kind, "scale": scale}
        self.count += 1
        return blamed

    def report(self, update: int, micro_steps: list[int], rows: list[int] | None) -> None:
        """Say which update is skipped, and for which texts.

        Args:
            rows: of the training data, in the micro-steps to blame; None: unknown.

        Raises:
            UserError: when the budget is used up.
        """
        self.present |= {"micro_steps": micro_steps, **({} if rows is None else {"rows": rows})}
        kind, scale = self.present["skipped"], self.present["scale"]
        shown = "unknown" if rows is None else ", ".join(map(str, rows[:_ROWS_SHOWN]))
        if rows is not None and len(rows) > _ROWS_SHOWN:
            shown += f" and {len(rows) - _ROWS_SHOWN} more (train_log.jsonl)"
        text = f"update {update}: the {kind} is not finite (rows {shown} of the training data, scale {scale:g})"
        if self.count > self.budget:
            raise UserError(
                f"{text}, and max_skipped_updates={self.budget} are skipped already. Look at these rows, lower "
                "learning_rate, or train in bf16 or float32; the weights are those before this update"
            )
        logger.warning(f"{text}: skipped, {self.count} of max_skipped_updates={self.budget}")

    def observe(self, loss: float) -> None:
        """The loss of an update that has ended."""
        for sums in (self._since_log, self._in_all):
            applied = not self.present and math.isfinite(loss)
            sums[0] += loss if applied else 0.0
            sums[1] += applied
            sums[2] += not applied

    def correct(self, logs: dict[str, float]) -> dict[str, float]:
        """A log without the losses of skipped updates in its means, and with their number."""
        for key, sums in (("loss", self._since_log), ("train_loss", self._in_all)):
            if key in logs:
                if sums[2]:
                    mean = sums[0] / sums[1] if sums[1] else math.nan
                    logs = {**logs, key: mean, "skipped_updates": sums[2]}
                sums[:] = [0.0, 0, 0]
        return logs


def rows_of_batches(loader: Any, batches: list[int], rank: int, ranks: int) -> list[int] | None:
    """Rows of the training data in some batches of the present epoch; None where the sampler cannot tell.

    Args:
        loader: whose batches ranks take in turn.
        batches: their numbers on this rank, from 0.
    """
    sampler = getattr(loader, "batch_sampler", None)
    while sampler is not None and not isinstance(sampler, (EpochBatchSampler, PlannedBatchSampler)):
        sampler = getattr(sampler, "batch_sampler", None)
    if sampler is None:
        return None
    wanted = sorted(number * ranks + rank for number in batches)
    if not wanted:
        return None
    # Both make an epoch's batches from the seed and the epoch alone, so that they can be made again.
    found = {number: rows for number, rows in enumerate(islice(iter(sampler), wanted[-1] + 1)) if number in wanted}
    return [int(row) for number in wanted for row in found.get(number, [])]
