"""The clock of training: how many pairs the loss has seen, and where updates ended.

An update ends with `UpdateClock.end_update`, or by itself with an optimizer step. torch calls a
hook after every optimizer step of the process; a step counts if a training forward came since the
last step that counted. The parameters that a step changed do not matter, so gradient caches,
adapters and engines that step copies of the weights need no special case. ZeRO steps once for each
group of parameters; that counts once.

One case is counted wrongly: an optimizer of another model, in the same process, that steps between
two micro-steps of one update. Its step counts as the end of the update (docs/loops.md).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class UpdateClock:
    """Number of pairs and updates, with the boundaries of the updates that the bank still needs.

    Attributes:
        num_pairs: pairs of all micro-steps that trained.
        num_updates: updates that have ended.
        update_start: the first pair of the present update, counted from the start of training.
        update_ends: for each past update, the number of pairs seen when it ended, oldest first.
    """

    def __init__(self) -> None:
        self.num_pairs = 0
        self.num_updates = 0
        self.update_start = 0
        self.update_ends: list[int] = []
        self._forward_since_step = False
        self._has_pending_step = False
        _CLOCKS.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy must be added to _CLOCKS, which only __init__ does.
        return _restored_clock, (self.state(),)

    @property
    def is_at_update_start(self) -> bool:
        """True if no pair of the present update has been seen."""
        return self.num_pairs == self.update_start

    def record_forward(self) -> None:
        """Record a training forward: the next optimizer step ends an update."""
        self._forward_since_step = True

    def record_step(self) -> None:
        """Record an optimizer step. It is pending until the next `take_pending_step`."""
        if self._forward_since_step:
            self._has_pending_step = True
        self._forward_since_step = False

    def take_pending_step(self) -> bool:
        """Return whether an optimizer step ended an update that `end_update` has not ended yet."""
        is_pending = self._has_pending_step
        self._has_pending_step = False
        return is_pending

    def add_pairs(self, count: int) -> None:
        """Count the pairs of a micro-step."""
        self.num_pairs += count

    def end_update(self) -> None:
        """End the present update; an optimizer step before the next forward ends no other."""
        self._has_pending_step = False
        self._forward_since_step = False
        self.num_updates += 1
        latest_end = self.update_ends[-1] if self.update_ends else 0
        if self.num_pairs > latest_end:
            self.update_ends.append(self.num_pairs)
        self.update_start = self.num_pairs

    def age_entries(self) -> None:
        """Begin a new span of pairs without ending an update: entries before it count as aged."""
        self.update_start = self.num_pairs

    def drop_ends_before(self, first_pair: int) -> None:
        """Drop the boundaries of updates whose pairs are all before ``first_pair``."""
        self.update_ends = [end for end in self.update_ends if end > first_pair]

    def state(self) -> Tensor:
        """Return the state as int64 on the CPU; reading it never waits for a device."""
        flags = [int(self._forward_since_step), int(self._has_pending_step)]
        counts = [self.num_pairs, self.num_updates, self.update_start]
        return torch.tensor(flags + counts + self.update_ends)

    def load_state(self, state: Tensor) -> None:
        """Restore what `state` returned."""
        values = state.tolist()
        self._forward_since_step = bool(values[0])
        self._has_pending_step = bool(values[1])
        self.num_pairs = values[2]
        self.num_updates = values[3]
        self.update_start = values[4]
        self.update_ends = values[5:]


_CLOCKS: weakref.WeakSet[UpdateClock] = weakref.WeakSet()


def _restored_clock(state: Tensor) -> UpdateClock:
    clock = UpdateClock()
    clock.load_state(state)
    return clock


def _record_step_everywhere(optimizer: Optimizer, *_: object) -> None:
    for clock in list(_CLOCKS):
        clock.record_step()


register_optimizer_step_post_hook(_record_step_everywhere)
