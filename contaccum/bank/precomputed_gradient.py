"""A loss whose gradients are computed in forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class PrecomputedGradient(torch.autograd.Function):
    """A loss whose gradients were computed in forward, because the bank changes before backward.

    The gradients keep the dtype in which they were computed (float32 at least) until they are
    multiplied by the incoming gradient, which holds the factor of a gradient scaler. Cast to
    float16 before that, they would underflow.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        """Store the gradients of the inputs, and return the loss."""
        ctx.save_for_backward(*gradients)
        ctx.input_dtypes = [x.dtype for x in inputs]
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the stored gradients times the incoming gradient."""
        input_gradients = []
        for gradient, dtype in zip(ctx.saved_tensors, ctx.input_dtypes, strict=True):
            input_gradients.append((gradient * grad_output).to(dtype))
        return None, None, *input_gradients
