"""Learning rates that are written down for each update, or that fall as the time runs out.

A training whose time is limited cannot know how many updates it will have. The rates that the clock
gave it are in its log. As ``learning_rates`` of another training, they repeat it exactly.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

from contaccum.distributed import broadcast

_WARMUP_SHARE = 0.1  # of the updates, in which the rate rises
_SECONDS_PER_CHECKPOINT = 600.0
_LEAST_SECONDS = 1.0  # for the updates, so that a late training has one at least


class ListedRates(TrainerCallback):
    """Give each update its learning rate from a list."""

    def __init__(self, rates: Sequence[float]) -> None:
        self._rates = rates

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for group in kwargs["optimizer"].param_groups:
            group["lr"] = self._rates[state.global_step]


class RatesByClock(TrainerCallback):
    """Let the learning rate rise, and then fall to 0 with the updates, or sooner with the time.

    The training stops when the rate is 0, or when the time that is left is shorter than an update.
    A checkpoint is saved every ten minutes. All ranks go by the clock of the first one.

    Args:
        seconds: the time until the training ends. It counts from here, so that it includes the
            loading of model and data.
    """

    def __init__(self, seconds: float) -> None:
        self._ends_at = time.monotonic() + seconds
        self._started = self._saved = 0.0
        self._seconds = 0.0  # from the first update of this start to the end
        self._first_update = 0
        self._rate = 0.0  # of the next update

    def _set_next_rate(self, args: Any, state: Any) -> None:
        used_seconds = broadcast(time.monotonic() - self._started)
        num_updates = state.global_step - self._first_update
        if num_updates and self._seconds - used_seconds < used_seconds / num_updates:
            self._rate = 0.0
            return
        num_warmup = max(1, round(_WARMUP_SHARE * state.max_steps))
        # With the first update, the rate is above 0 already.
        rise = (state.global_step + 1) / num_warmup
        fall = 1.0 - max(state.global_step / state.max_steps, used_seconds / self._seconds)
        self._rate = args.learning_rate * max(0.0, min(rise, fall, 1.0))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = self._saved = time.monotonic()
        self._seconds = broadcast(max(_LEAST_SECONDS, self._ends_at - self._started))
        self._first_update = state.global_step
        self._set_next_rate(args, state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for group in kwargs["optimizer"].param_groups:
            group["lr"] = self._rate

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._set_next_rate(args, state)
        if self._rate == 0.0:
            control.should_training_stop = True
        elif broadcast(time.monotonic() - self._saved > _SECONDS_PER_CHECKPOINT):
            control.should_save = True
            self._saved = time.monotonic()
