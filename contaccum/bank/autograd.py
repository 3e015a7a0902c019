"""Two functions whose gradients are not what autograd would find: of stored rows, and of a bank that changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from contaccum.bank.logits import low

_ROWS_AT_ONCE = 4096  # stored rows that one product takes: bounds what a conversion or a matrix library copies


class Product(torch.autograd.Function):
    """Scores (k, r) of ``x`` (k, d) against stored rows (r, d) of any dtype, which take no gradient.

    ``absent`` (r,) is added, and what ``mask`` (k, r) hides or is above ``ceiling`` (k, 1) or (r,) is vanishingly low:
    its softmax is 0, and so is its gradient. For the gradient of ``x`` alone, every so many rows have ``moved`` by one
    of these vectors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        stored: Tensor,
        absent: Tensor,
        mask: Tensor | None,
        ceiling: Tensor | None,
        moved: Tensor | None,
    ) -> Tensor:
        ctx.stored, ctx.moved = stored, moved
        scores = x.new_empty(len(x), len(stored))
        parts = [y.split(_ROWS_AT_ONCE, dim=-1) for y in (stored.T, absent.expand(len(stored)), scores)]
        for part, bias, place in zip(*parts, strict=True):
            torch.addmm(bias, x, part.to(x.dtype), out=place)
        if ceiling is not None:
            mask = scores > ceiling if mask is None else mask | (scores > ceiling)
        return scores if mask is None else scores.masked_fill_(mask, low(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor | None, ...]:
        total = weights.new_zeros(len(weights), ctx.stored.shape[1])
        for part, share in zip(ctx.stored.split(_ROWS_AT_ONCE), weights.split(_ROWS_AT_ONCE, dim=1), strict=True):
            total.addmm_(share, part.to(weights.dtype))
        if ctx.moved is not None:
            total.addmm_(weights.view(len(weights), len(ctx.moved), -1).sum(2), ctx.moved)
        return total, None, None, None, None, None


class HandOver(torch.autograd.Function):
    """A loss whose gradients were computed in forward: the bank is written in place before backward runs.

    The gradients stay in the dtype they were computed in (float32 at least) until the incoming gradient has multiplied
    them. In float16 they would underflow before a gradient scaler's factor could prevent that.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.input_dtypes = [x.dtype for x in inputs]
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        scaled = []
        for gradient, dtype in zip(ctx.saved_tensors, ctx.input_dtypes, strict=True):
            scaled.append((gradient * grad_output).to(dtype))
        return None, None, *scaled
