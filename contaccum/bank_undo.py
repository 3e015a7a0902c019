"""Going back to an earlier state of a loss with a bank, after micro-steps that failed.

A bank may be as large as memory allows, so it is not copied: of its embeddings only the rows that the coming pairs
will overwrite are kept. Everything else of a loss is a few numbers per row at most, and is copied whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from contaccum.losses import ContAccumLoss
from contaccum.memory_bank import MemoryBank

_OWN = ("_buffers", "_modules", "_parameters")
_RINGS = ("queries", "passages", "negatives")


class BankUndo:
    """What a :class:`ContAccumLoss` was, its encoder apart.

    Args:
        loss: may have no bank yet; going back then leaves it without one.
        pairs: enqueued until :meth:`restore` is called, at most.
    """

    def __init__(self, loss: ContAccumLoss, pairs: int) -> None:
        self._loss = loss
        self._own = _attributes(loss)
        self._modules = [_ModuleUndo(module, pairs) for module in loss.info_nces.modules()]

    def restore(self) -> None:
        """Go back. May be called again after further micro-steps."""
        _set_attributes(self._loss, self._own)
        for module in self._modules:
            module.restore()


class _ModuleUndo:
    def __init__(self, module: nn.Module, pairs: int) -> None:
        self._module = module
        self._attributes = _attributes(module)
        self._children, self._buffers = dict(module._modules), dict(module._buffers)
        self._rows: dict[str, Tensor] = {}
        if isinstance(module, MemoryBank):
            taken, _, query_rows = module.next_slots(pairs)
            self._rows = {name: query_rows if name == "queries" else taken for name in _RINGS}
        self._values = {
            name: buffer[self._rows[name]] if name in self._rows else buffer.clone()
            for name, buffer in self._buffers.items()
            if buffer is not None
        }

    @torch.no_grad()
    def restore(self) -> None:
        _set_attributes(self._module, self._attributes)
        # The objects too: a bank makes new buffers when it grows.
        self._module._modules = dict(self._children)
        self._module._buffers = dict(self._buffers)
        for name, value in self._values.items():
            buffer = self._buffers[name]
            assert buffer is not None
            if name in self._rows:
                buffer[self._rows[name]] = value
            else:
                buffer.copy_(value)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Plain attributes; lists are copied, since they are changed in place."""
    return {k: list(v) if isinstance(v, list) else v for k, v in module.__dict__.items() if k not in _OWN}


def _set_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    for name in [name for name in module.__dict__ if name not in attributes and name not in _OWN]:
        del module.__dict__[name]
    module.__dict__.update({k: list(v) if isinstance(v, list) else v for k, v in attributes.items()})
