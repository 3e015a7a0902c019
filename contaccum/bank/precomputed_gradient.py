"""A loss whose gradients are computed in forward, because the bank changes before backward runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class PrecomputedGradient(torch.autograd.Function):
    """A loss whose gradients were computed in forward: before backward, the bank is overwritten.

    The gradients stay in the dtype they were computed in (float32 at least) until the incoming
    gradient has multiplied them. In float16 they would underflow before a gradient scaler's factor
    could prevent that.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        """Store the gradients of the inputs."""
        ctx.save_for_backward(*gradients)
        ctx.input_dtypes = [x.dtype for x in inputs]
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the stored gradients times the incoming one."""
        scaled = []
        for gradient, dtype in zip(ctx.saved_tensors, ctx.input_dtypes, strict=True):
            scaled.append((gradient * grad_output).to(dtype))
        return None, None, *scaled
