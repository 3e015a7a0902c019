"""A learning rate that is written down for each update, or that falls as the time runs out.

A training whose time is limited cannot know how many updates it will have. `RatesByClock` decays
its learning rate by the clock, so that the training is finished whenever the time ends. The rates
that it had are in its log. As ``learning_rates`` of another training, they repeat it exactly.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from contaccum.distributed import broadcast

_WARMUP_SHARE = 0.1  # of the updates, in which the rate rises
_SECONDS_PER_CHECKPOINT = 600.0


class ListedRates(LRScheduler):
    """The learning rate of each update, from a list; 0 after its end."""

    def __init__(self, optimizer: Optimizer, rates: Sequence[float]) -> None:
        self._listed_rates = list(rates)
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Any]:
        """Return the rate of the next update for each group of parameters."""
        rate = 0.0
        if self.last_epoch < len(self._listed_rates):
            rate = self._listed_rates[self.last_epoch]
        return [rate for _ in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates so far, for a checkpoint."""
        return {"last_epoch": self.last_epoch, "_last_lr": self._last_lr}


class RatesByClock(LRScheduler):
    """A learning rate that rises, and falls to 0 with the updates, or sooner with the time.

    All ranks have the rate of the first one.

    Args:
        optimizer: its learning rates are the highest ones.
        num_updates: the number of updates if the time is long enough.
        seconds: the time for the updates.
    """

    def __init__(self, optimizer: Optimizer, num_updates: int, seconds: float) -> None:
        self._num_updates = num_updates
        self._seconds = seconds
        self._started = time.monotonic()
        super().__init__(optimizer)

    @property
    def has_ended(self) -> bool:
        """True if no update should follow, because its rate is 0."""
        return all(float(rate) == 0.0 for rate in self._last_lr)

    def get_lr(self) -> list[float | Any]:
        """Return the rate of the next update for each group of parameters."""
        used_share = broadcast((time.monotonic() - self._started) / self._seconds)
        num_warmup = max(1, round(_WARMUP_SHARE * self._num_updates))
        # With the first update, the rate is above 0 already.
        rise = (self.last_epoch + 1) / num_warmup
        fall = 1.0 - max(self.last_epoch / self._num_updates, used_share)
        return [max(0.0, min(rise, fall, 1.0)) * rate for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates so far, for a checkpoint; a resumed run has its own time."""
        return {"last_epoch": self.last_epoch, "_last_lr": self._last_lr}


class ClockCallback(TrainerCallback):
    """Stop a training whose rate has fallen to 0, and save a checkpoint every ten minutes."""

    def __init__(self) -> None:
        self._saved = time.monotonic()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop or save after an update; all ranks do the same."""
        if kwargs["lr_scheduler"].has_ended:
            control.should_training_stop = True
        elif broadcast(time.monotonic() - self._saved > _SECONDS_PER_CHECKPOINT):
            control.should_save = True
            self._saved = time.monotonic()
