"""Notices that an optimizer has moved an encoder, whatever loop, wrapper or engine steps it.

A hook of torch's on every optimizer tells, since parameters do not show it: fused optimizers leave their version
counters as they were. Which steps count, goes by the parameters that embeddings depend on.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from contaccum.distributed import world_size

_WATCHES: weakref.WeakSet[StepWatch] = weakref.WeakSet()


class StepWatch:
    """Whether the encoder behind some embeddings has been moved since they came.

    A step counts of an optimizer that holds any of the encoder's parameters (all, adapters, one tower). Engines that
    step copies of them (ZeRO's float32 copies) hold none: until some optimizer holds one, steps count that together
    move as many numbers, of all ranks, as the encoder trains. ZeRO steps each of its groups by itself.
    """

    def __init__(self, stepped: bool = False) -> None:
        self.stepped = stepped
        self._parameters: list[Tensor] = []
        self._trained = self._held = False  # embeddings have come since the last step; any was ever held
        self._copies: dict[int, int] = {}  # numbers of each copy that has stepped since embeddings came
        _WATCHES.add(self)

    def __reduce__(self) -> Any:  # a copy of a loss has embeddings of its own to come, and holds no model
        return StepWatch, (self.stepped,)

    def follow(self, *embeddings: Tensor) -> None:
        """Embeddings with their graphs, of a micro-step that trains."""
        self._trained, self._copies = True, {}
        if not self._parameters:
            self._parameters = _parameters_of(embeddings)

    def after_step(self, held: list[Tensor]) -> None:
        """An optimizer that holds these has stepped."""
        own, ids = {id(p) for p in self._parameters}, [id(p) for p in held]
        if own.intersection(ids):
            self.stepped = self._held = True
        elif self._trained and not self._held:
            self._copies |= {id(p): p.numel() for p in held if p.requires_grad or p.grad is not None}
            # ZeRO-3 leaves a parameter empty outside of its module's forward and backward, with its size beside it.
            trained = sum(getattr(p, "ds_numel", p.numel()) for p in self._parameters)
            self.stepped |= sum(self._copies.values()) * world_size() >= trained
        self._trained &= not self.stepped


def _parameters_of(embeddings: tuple[Tensor, ...]) -> list[Tensor]:
    """The leaves of their graphs; none where embeddings are leaves themselves, as between GradCache's two passes."""
    seen: set[Any] = set()
    found, nodes = [], [x.grad_fn for x in embeddings]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found += [node.variable] if hasattr(node, "variable") else []
            nodes += [following for following, _ in node.next_functions]
    return found


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for watch in list(_WATCHES):
        watch.after_step(held)


register_optimizer_step_post_hook(_after_step)
