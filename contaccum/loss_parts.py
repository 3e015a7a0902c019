"""Parts of the banked loss that know no bank: softmax weights, gradients known in forward, a micro-batch on its way."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Entry(NamedTuple):
    """A micro-batch on its way into the bank."""

    queries: Tensor  # (n, d)
    passages: Tensor  # (n, d), as stored: without the running mean
    negatives: Tensor | None  # (n, h, d)
    slots: Tensor  # passage slots it will take, in order of the bank
    evicted: Tensor  # slots of entries in use that go: overwritten, or past the age limit
    new_rows: Tensor  # query slots it will take
    columns: list[Tensor]  # its passages, and its hard negatives, as the bank will give them back: (c, d)
    removed: list[Tensor]  # scores of the banked rows against what goes, (mq', c) by block
    added: list[Tensor]  # and against what comes


def softmax(scores: Tensor, log_sum: Tensor) -> Tensor:
    """exp(scores - log_sum) by rows: (r, c) and float64 (r,) to (r, c) in the dtype of the scores."""
    return (scores - log_sum[:, None]).exp_().to(scores.dtype)  # the difference is float64, as log_sum is


def without_mean(gradient: Tensor) -> Tensor:
    """The gradients of a tower's embeddings (r, d) less what pushes all of them the same way; r = 1 has no other part.

    The passage gradients of a whole batch sum to zero. Those of a micro-batch against a bank do not: the bank's columns
    take none. What is left over is the direction in which new embeddings flee old ones.
    """
    return gradient - gradient.mean(0) if len(gradient) > 1 else gradient


class LossWithGradients(torch.autograd.Function):
    """A loss whose gradients are known already.

    They are computed before the micro-batch enters the bank, because the bank is written in place: autograd would
    find other numbers in the rows that it saved. It also keeps nothing of the bank alive until backward.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *((g * grad_output).to(g.dtype) for g in ctx.saved_tensors)
