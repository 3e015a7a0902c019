"""Skipping of updates whose loss or gradient is not finite, that is infinite or NaN.

Such an update changes no weight, and its line in the log names the cause and the rows of the
training data. A run ends when more than ``max_skipped_updates`` updates were skipped. A gradient
scaler (fp16) multiplies the gradient, so an overflow is normal and not counted: the scaler itself
skips the step and lowers its scale.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from contaccum.distributed import over_ranks, rank, world_size
from contaccum.errors import UserError
from contaccum.training.updates import (
    HasParameterGroups,
    Update,
    drop_gradients,
    get_gradient_scale,
    iter_parameters,
)

logger = logging.getLogger(__name__)

_MAX_ROWS_SHOWN = 16  # row numbers in a message

FindRows = Callable[[list[int]], list[int] | None]
"""Function from indices of micro-batches in an update to rows of the training data."""


def add_nan_gradient_hook(loss: nn.Module) -> None:
    """Add a hook to a loss: if its value is not finite, its gradient becomes NaN.

    A loss can be infinite while its gradient is finite. With the hook, the trainer has to check
    only the norm of the gradient over all ranks, and also detects a loss that is not finite on
    another rank.
    """
    loss.register_forward_hook(_multiply_by_nan_if_nonfinite)


def _multiply_by_nan_if_nonfinite(module: nn.Module, arguments: Any, loss: Any) -> Any:
    if not isinstance(loss, Tensor):
        return loss
    factor = torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)
    return loss * factor


def are_loss_gradients_finite(
    model: nn.Module, optimizer: HasParameterGroups, device: torch.device
) -> bool:
    """Return whether the gradients of the loss's own parameters are finite on all ranks.

    These are the trained parameters outside of the model. The norm that transformers computes
    covers only the model.
    """
    model_parameters = {id(parameter) for parameter in model.parameters()}
    has_loss_parameters = False
    is_finite = True
    for parameter in iter_parameters(optimizer):
        if id(parameter) in model_parameters:
            continue
        has_loss_parameters = True
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            is_finite = False
    if not has_loss_parameters:
        return True
    return bool(over_ranks("MIN", torch.tensor(int(is_finite), device=device)))


class NonFiniteUpdates:
    """Check that skips updates that are not finite, and counts them.

    Args:
        max_skipped: number of updates that may be skipped before the run ends.
        accelerator: the trainer's Accelerator.
        checks_loss_parameters: whether to check the gradients of the loss's own parameters too,
            which the norm does not cover. FSDP and DeepSpeed do not train such parameters.

    Attributes:
        num_skipped: number of updates that were skipped so far.
    """

    def __init__(
        self, max_skipped: int, accelerator: Accelerator, checks_loss_parameters: bool
    ) -> None:
        self.num_skipped = 0
        self._max_skipped = max_skipped
        self._accelerator = accelerator
        self._checks_loss_parameters = checks_loss_parameters

    def skip_if_nonfinite(
        self,
        update: Update,
        norm: float,
        model: nn.Module,
        optimizer: HasParameterGroups,
        find_rows: FindRows,
    ) -> None:
        """Skip an update whose gradient is not finite.

        Args:
            update: the update, after its last micro-step.
            norm: norm of the model's gradient over all ranks.
            model: the model in its wrappers, such as DDP.
            optimizer: the optimizer, before its step.
            find_rows: function from indices of micro-batches in the update to their rows in the
                training data; it returns None if the rows are unknown.

        Raises:
            UserError: if ``max_skipped`` updates were skipped before this one.
        """
        is_finite = math.isfinite(norm)
        if is_finite and self._checks_loss_parameters:
            is_finite = are_loss_gradients_finite(model, optimizer, self._accelerator.device)
        if is_finite:
            return
        is_counted = self._record_skip(update, find_rows)
        has_scaler = getattr(self._accelerator, "scaler", None) is not None
        # An optimizer step without gradients changes nothing. A gradient scaler skips the step
        # itself, and needs the gradients to detect the overflow.
        if is_counted and not has_scaler:
            drop_gradients(model, optimizer)

    def _record_skip(self, update: Update, find_rows: FindRows) -> bool:
        """Record why an update is skipped.

        Returns:
            Whether the update counts as skipped; an overflow of a gradient scaler does not.
        """
        scale = get_gradient_scale(self._accelerator)
        losses = zip(update.micro_batch_of_loss, update.losses, strict=True)
        micro_batches = sorted({index for index, loss in losses if not torch.isfinite(loss)})
        # Ranks may have different losses, but all ranks skip the update, for the same cause.
        num_on_this_rank = torch.tensor(len(micro_batches), device=self._accelerator.device)
        is_loss = bool(over_ranks("MAX", num_on_this_rank) > 0)
        if not is_loss and scale > 1:
            # All losses are finite, so the scale was too large for the gradient.
            update.log_entries["skipped"] = "overflow"
            update.log_entries["scale"] = scale
            return False
        cause = "loss"
        if not is_loss:
            # All losses are finite, so it is unknown which micro-batch caused the gradient.
            cause = "gradient"
            micro_batches = list(range(len(update.micro_batches)))
        rows = find_rows(micro_batches) if micro_batches else []
        update.log_entries["skipped"] = cause
        update.log_entries["scale"] = scale
        update.log_entries["micro_steps"] = micro_batches
        update.log_entries["rows"] = rows
        self.num_skipped += 1
        place = "on another rank"
        if micro_batches:
            shown = "unknown"
            if rows is not None:
                shown = ", ".join(map(str, rows[:_MAX_ROWS_SHOWN]))
                shown += ", ..." if len(rows) > _MAX_ROWS_SHOWN else ""
            place = f"rows {shown} of the training data"
        message = f"update {update.number}: the {cause} is not finite ({place})"
        if world_size() > 1:
            message = f"rank {rank()}: {message}"
        if self.num_skipped > self._max_skipped:
            raise UserError(
                f"{message}, and max_skipped_updates={self._max_skipped} updates were skipped "
                "before it. The weights are those before this update. Check these rows, or lower "
                "learning_rate"
            )
        logger.warning(
            f"{message}: skipped, {self.num_skipped} of max_skipped_updates={self._max_skipped}. "
            "The weights do not change. If more updates are skipped, check these rows or lower "
            "learning_rate"
        )
        return True
