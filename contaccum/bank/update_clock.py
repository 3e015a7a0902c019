"""Notice optimizer steps, so that no training loop has to report its updates.

torch calls a hook after every optimizer step of the process. A step ends an update if a training forward came since
the last update. The parameters that the step changed do not matter. So gradient caches, adapters and engines that step
copies of the weights (ZeRO) need no special case. ZeRO steps several times in an update, once for each group; that
counts once.

This is wrong in one case: a second optimizer in the same process, of another model, that steps between two
micro-batches of one update. That step counts as the end of the update. docs/loops.md says what to do.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_WATCHES: weakref.WeakSet[StepWatch] = weakref.WeakSet()


class StepWatch:
    """A flag that an optimizer step raises, once after each training forward.

    Attributes:
        stepped: True from the first optimizer step after a training forward until the owner resets it.
    """

    def __init__(self, stepped: bool = False) -> None:
        self.stepped = stepped
        self._forward_since_step = False
        _WATCHES.add(self)

    def __reduce__(self) -> Any:
        # A copy must register itself in _WATCHES; the default copy would not call __init__.
        return StepWatch, (self.stepped,)

    def record_forward(self) -> None:
        """Record a training forward: the next optimizer step ends an update."""
        self._forward_since_step = True

    def record_step(self) -> None:
        """Record an optimizer step; it counts only if a training forward came before it."""
        if self._forward_since_step:
            self.stepped = True
        self._forward_since_step = False


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for watch in list(_WATCHES):
        watch.record_step()


register_optimizer_step_post_hook(_after_step)
