"""A loss whose gradients are computed in forward; backward only passes them on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class PrecomputedGradient(torch.autograd.Function):
    """A loss with gradients that are already known when it is returned.

    `BankedInfoNCE` changes its bank in forward, so autograd could not use the bank in backward.
    `compute_full_softmax_loss` gets the gradient from sums that it needs for the loss anyway.

    The gradients keep the dtype in which they were computed (float32 at least) until they are
    multiplied by the incoming gradient, which contains the factor of a gradient scaler. If they
    were cast to float16 earlier, small values would underflow.

    Use: ``PrecomputedGradient.apply(loss, gradients, *inputs)``.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        """Store the gradients of the inputs, and return the loss.

        Args:
            loss: scalar.
            gradients: one tensor of the shape of each input, in the order of ``inputs``.
            inputs: the tensors that get the gradients.
        """
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
        return None, None, *input_gradients  # loss and gradients get no gradient
