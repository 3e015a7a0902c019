"""The update clock: it counts training pairs and updates, and stores where updates ended.

An update is all micro-steps (calls of the loss in training) before one optimizer step. The encoder
changes between updates, so the clock shows which banked pairs an older encoder encoded.

An update ends with a call of `UpdateClock.end_update`, or with the step of any torch optimizer,
after which torch runs a hook. An end without new pairs before it changes nothing. So a call beside
a step, and the steps of ZeRO for each group of parameters, end one update. But an optimizer of
another model that steps between two micro-steps of an update ends it as well (docs/loops.md).

Why a hook of all optimizers: ContAccumLoss replaces a loss in any SentenceTransformerTrainer, and a
loss knows neither the trainer's callbacks nor its optimizer. Without the hook, all entries would
pass for fresh there, and drift would do its harm without an error. The parameters of the model do
not show a step reliably either, because engines such as DeepSpeed step copies of them. The hook is
installed by the first micro-step of a training, never by an import.
"""

from __future__ import annotations

import functools
import weakref

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook


class UpdateClock:
    """Counter of pairs and updates, with the ends of the updates whose pairs the bank still uses.

    Attributes:
        num_pairs: number of pairs of all training micro-steps.
        num_updates: number of updates that have ended.
        update_start: number of the first pair that is not aged: of the current update, or since
            `age_entries`. An older encoder encoded the entries of earlier pairs.
        update_ends: ``num_pairs`` at the end of each past update whose pairs the bank still uses,
            oldest first.
    """

    def __init__(self) -> None:
        self.num_pairs = 0
        self.num_updates = 0
        self.update_start = 0
        self.update_ends: list[int] = []
        self._latest_end = 0  # stays when `update_ends` has dropped it

    @property
    def is_at_update_start(self) -> bool:
        """True if the current update has no pairs yet, or none since `age_entries`."""
        return self.num_pairs == self.update_start

    def add_pairs(self, num_pairs: int, oldest_in_use: int) -> None:
        """Count the pairs of a training micro-step; the next optimizer step ends their update.

        ``oldest_in_use`` is the number of the oldest pair that the bank uses from now on.
        """
        self.num_pairs += num_pairs
        self.update_ends = [end for end in self.update_ends if end > oldest_in_use]
        _install_hook()
        _CLOCKS.add(self)

    def end_update(self) -> None:
        """End the current update, if it has any pairs."""
        if self.num_pairs == self._latest_end:
            return
        self.num_updates += 1
        self.update_ends.append(self.num_pairs)
        self.update_start = self._latest_end = self.num_pairs

    def age_entries(self) -> None:
        """Treat all entries so far as aged, without ending the update."""
        self.update_start = self.num_pairs

    def get_state(self) -> Tensor:
        """Return the state as int64 (4 + past updates,) on the CPU."""
        counts = [self.num_pairs, self.num_updates, self.update_start, self._latest_end]
        return torch.tensor(counts + self.update_ends)

    def load_state(self, state: Tensor) -> None:
        """Restore what `get_state` returned."""
        counts = state.tolist()
        self.num_pairs, self.num_updates, self.update_start, self._latest_end = counts[:4]
        self.update_ends = counts[4:]


_CLOCKS: weakref.WeakSet[UpdateClock] = weakref.WeakSet()
"""All clocks with pairs, for the hook below."""


@functools.cache
def _install_hook() -> None:
    register_optimizer_step_post_hook(_end_updates)


def _end_updates(*_: object) -> None:
    for clock in list(_CLOCKS):
        clock.end_update()
