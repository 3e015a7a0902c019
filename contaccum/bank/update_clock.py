"""The update clock: it counts training pairs and updates, and stores where updates ended.

An update is all micro-steps (calls of the loss in training) before one optimizer step. The encoder
changes between updates, so the clock shows which banked pairs an older encoder encoded.

An update ends with a call of `UpdateClock.end_update`, or with an optimizer step, which is detected
without a call: torch runs a hook after every optimizer step of the process. A step counts if a
training forward pass came since the last step that counted. So gradient caches, adapters and
engines that step copies of the weights need no special case, and the steps of ZeRO for each group
of parameters count once. But an optimizer of another model that steps between two micro-steps of
one update counts as well (docs/loops.md).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class UpdateClock:
    """Counter of pairs and updates, with the ends of the updates whose pairs the bank still uses.

    Attributes:
        num_pairs: number of pairs of all training micro-steps; the loss adds to it.
        num_updates: number of updates that have ended.
        update_start: number of the first pair that is not aged, counted from the start of training:
            the first of the current update, or the first since `age_entries`. Entries of earlier
            pairs are aged: an older encoder encoded them.
        update_ends: for each past update whose pairs the bank still uses, the value of
            ``num_pairs`` at its end, oldest first.
    """

    def __init__(self) -> None:
        self.num_pairs = 0
        self.num_updates = 0
        self.update_start = 0
        self.update_ends: list[int] = []
        self._has_forward_since_step = False
        self._has_pending_step = False
        _CLOCKS.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and unpickled clocks must be added to _CLOCKS as well, which only __init__ does.
        return _restore_clock, (self.get_state(),)

    @property
    def is_at_update_start(self) -> bool:
        """True if the current update has no pairs yet, or none since `age_entries`."""
        return self.num_pairs == self.update_start

    def record_forward(self) -> None:
        """Record a training forward pass: the next optimizer step ends an update."""
        self._has_forward_since_step = True

    def record_step(self) -> None:
        """Record an optimizer step, which is pending until the next call of `pop_pending_step`."""
        if self._has_forward_since_step:
            self._has_pending_step = True
        self._has_forward_since_step = False

    def pop_pending_step(self) -> bool:
        """Return True if an optimizer step is pending, and reset the pending step."""
        is_pending = self._has_pending_step
        self._has_pending_step = False
        return is_pending

    def end_update(self) -> None:
        """End the current update.

        An optimizer step before the next training forward pass does not end another update.
        """
        self._has_pending_step = False
        self._has_forward_since_step = False
        self.num_updates += 1
        latest_end = 0
        if self.update_ends:
            latest_end = self.update_ends[-1]
        if self.num_pairs > latest_end:
            self.update_ends.append(self.num_pairs)
        self.update_start = self.num_pairs

    def age_entries(self) -> None:
        """Treat all entries so far as aged, without ending the update."""
        self.update_start = self.num_pairs

    def drop_ends_before(self, first_pair: int) -> None:
        """Drop the ends of updates whose pairs all have numbers below ``first_pair``."""
        self.update_ends = [end for end in self.update_ends if end > first_pair]

    def get_state(self) -> Tensor:
        """Return the state as int64 (5 + past updates,) on the CPU: flags, counts, update ends.

        Reading it never waits for a device.
        """
        flags = [int(self._has_forward_since_step), int(self._has_pending_step)]
        counts = [self.num_pairs, self.num_updates, self.update_start]
        return torch.tensor(flags + counts + self.update_ends)

    def load_state(self, state: Tensor) -> None:
        """Restore what `get_state` returned."""
        values = state.tolist()
        self._has_forward_since_step = bool(values[0])
        self._has_pending_step = bool(values[1])
        self.num_pairs = values[2]
        self.num_updates = values[3]
        self.update_start = values[4]
        self.update_ends = values[5:]


_CLOCKS: weakref.WeakSet[UpdateClock] = weakref.WeakSet()
"""All clocks of the process, for the hook below."""


def _restore_clock(state: Tensor) -> UpdateClock:
    clock = UpdateClock()
    clock.load_state(state)
    return clock


def _record_step_in_all_clocks(optimizer: Optimizer, *_: object) -> None:
    for clock in list(_CLOCKS):
        clock.record_step()


register_optimizer_step_post_hook(_record_step_in_all_clocks)
