"""Updates whose loss or gradient is not finite: they are skipped as a whole, and counted.

A run ends when more than ``max_skipped_updates`` were skipped. An overflow under a gradient scaler
is no fault: the scaler skips the step and lowers its scale, and the update is not counted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from contaccum.distributed import over_ranks
from contaccum.errors import UserError
from contaccum.training.updates import (
    HasParameterGroups,
    Update,
    drop_gradients,
    gradient_scale,
    parameters_of,
)

logger = logging.getLogger(__name__)

_MAX_ROWS_SHOWN = 16

FindRows = Callable[[list[int]], list[int] | None]


def make_gradient_nonfinite_too(loss: nn.Module) -> None:
    """Give a loss that is not finite a gradient that is not finite either.

    The norm of the gradient over all ranks then shows it, whichever rank it is on.
    """
    loss.register_forward_hook(_spread_nonfinite)


def _spread_nonfinite(module: nn.Module, arguments: Any, loss: Any) -> Any:
    if not isinstance(loss, Tensor):
        return loss
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)


def loss_gradients_are_finite(
    model: nn.Module, optimizer: HasParameterGroups, device: torch.device
) -> bool:
    """Return whether gradients of trained parameters outside of the model are finite on all ranks.

    The norm that transformers computes covers the model alone.
    """
    model_parameters = {id(parameter) for parameter in model.parameters()}
    has_loss_parameters = False
    is_finite = True
    for parameter in parameters_of(optimizer):
        if id(parameter) in model_parameters:
            continue
        has_loss_parameters = True
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            is_finite = False
    if not has_loss_parameters:
        return True
    return bool(over_ranks("MIN", torch.tensor(int(is_finite), device=device)))


class NonFiniteUpdates:
    """The check of every update, and the number of those that were skipped.

    Args:
        max_skipped: the number of updates that may be skipped.
        accelerator: accelerate's, of the trainer.
        covers_loss: whether to check the gradients of the loss's own parameters too, which the norm
            does not cover. Engines train the model's parameters alone.

    Attributes:
        num_skipped: the number of updates that were skipped.
    """

    def __init__(self, max_skipped: int, accelerator: Accelerator, covers_loss: bool) -> None:
        self.num_skipped = 0
        self._max_skipped = max_skipped
        self._accelerator = accelerator
        self._covers_loss = covers_loss

    def check(
        self,
        update: Update,
        norm: float,
        model: nn.Module,
        optimizer: HasParameterGroups,
        find_rows: FindRows,
    ) -> None:
        """Skip an update whose gradient is not finite.

        Args:
            update: the update whose micro-steps are done.
            norm: of the gradient, over all ranks.
            model: the model in its wrappers.
            optimizer: the optimizer, which has not stepped yet.
            find_rows: returns the rows of the training data in some micro-batches of the update,
                None where the sampler cannot tell.

        Raises:
            UserError: where ``max_skipped`` updates were skipped already.
        """
        is_finite = math.isfinite(norm)
        if is_finite and self._covers_loss:
            is_finite = loss_gradients_are_finite(model, optimizer, self._accelerator.device)
        if is_finite:
            return
        is_counted = self._record(update, find_rows)
        # A gradient scaler skips the step by itself.
        if is_counted and getattr(self._accelerator, "scaler", None) is None:
            drop_gradients(model, optimizer)

    def _record(self, update: Update, find_rows: FindRows) -> bool:
        """Record why an update is skipped; return whether it counts, as an overflow does not."""
        scale = gradient_scale(self._accelerator)
        micro_batches = _nonfinite_micro_batches(update)
        if not micro_batches and scale > 1:
            update.log_entries |= {"skipped": "overflow", "scale": scale}
            return False
        cause = "loss"
        if not micro_batches:
            cause = "gradient"
            micro_batches = list(range(len(update.micro_batches)))
        rows = find_rows(micro_batches)
        update.log_entries |= {"skipped": cause, "scale": scale}
        update.log_entries |= {"micro_steps": micro_batches, "rows": rows}
        self.num_skipped += 1
        message = (
            f"update {update.number}: the {cause} is not finite (rows {_format_rows(rows)} of the "
            "training data)"
        )
        if self.num_skipped > self._max_skipped:
            raise UserError(
                f"{message}, and max_skipped_updates={self._max_skipped} are skipped already: look "
                "at these rows, or lower learning_rate; the weights are those before this update"
            )
        logger.warning(
            f"{message}: skipped, {self.num_skipped} of max_skipped_updates={self._max_skipped}"
        )
        return True


def _nonfinite_micro_batches(update: Update) -> list[int]:
    """Return the micro-batches with a loss that is not finite."""
    indices = set()
    for index, loss in zip(update.micro_batch_of_loss, update.losses, strict=True):
        if not torch.isfinite(loss):
            indices.add(index)
    return sorted(indices)


def _format_rows(rows: list[int] | None) -> str:
    if rows is None:
        return "unknown"
    text = ", ".join(map(str, rows[:_MAX_ROWS_SHOWN]))
    if len(rows) > _MAX_ROWS_SHOWN:
        text += ", ..."
    return text
