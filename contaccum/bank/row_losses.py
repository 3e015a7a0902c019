"""Losses of the rows of the score matrix, and their gradients without autograd.

A row is a query with its logits. The bank changes in the forward pass of the loss, so autograd
could not use it in the backward pass: the gradients are computed in the forward pass, from sums
that the losses need anyway, and `PrecomputedGradient` passes them on.

Letters in shapes: r rows, n local pairs, h hard negatives per query, b of them in the bank, m
filled slots of the bank, d the embedding size.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus, threshold

from contaccum.bank.logits import Pairs
from contaccum.bank.memory_bank import LogitQuadrants

SOFTPLUS_THRESHOLD = 40.0
"""Argument above which softplus(x) = log(1 + exp(x)) is x, which is exact in float64 too."""


class RowLosses(NamedTuple):
    """The losses of r rows, and what their gradients need."""

    losses: Tensor  # (r,)
    differences: Tensor  # (r,), D: logsumexp of the logits of negatives, minus the positive's
    log_normalizers: Tensor  # (r,), logsumexp of the logits of negatives and positive


def compute_row_losses(negative_log_sums: Tensor, positive_logits: Tensor) -> RowLosses:
    """Compute the losses log(1 + exp(D_i)) of r rows, with the differences D.

    The arguments are (r,): the logsumexp of the logits of each row's negatives, and the logit of
    its positive.
    """
    # The difference is taken before the exponential: the softmax probability of a positive, minus
    # 1, would be nothing but rounding error once its row is almost solved.
    differences = negative_log_sums - positive_logits
    # Make the loss NaN if the logit of the positive is infinite: it would pass for a solved row.
    # `threshold` replaces all values that are not above its first number.
    differences = threshold(differences, torch.finfo(differences.dtype).min, math.nan)
    losses = softplus(differences, threshold=SOFTPLUS_THRESHOLD)
    return RowLosses(losses, differences, torch.logaddexp(negative_log_sums, positive_logits))


def compute_row_gradients(
    local: Pairs,
    quadrants: LogitQuadrants,
    local_rows: RowLosses,
    banked_rows: RowLosses | None,
    query_drift: Tensor | None,
) -> Tensor:
    """Compute the gradient of the sum of row losses, times the temperature, (n, 2 + h, d).

    The caller divides it by the temperature and by the divisor of the loss at once.

    The derivative of a row's loss with respect to the logit of a negative is the softmax
    probability of the negative. With respect to the logit of the positive it is minus the sum of
    these probabilities, which is sigmoid(D) and stays exact in a row that is almost solved.

    Args:
        query_drift: (groups, d), movement of the query tower's mean since the queries of each group
            of m / groups banked rows were stored; None for no movement. The gradient of local
            documents is computed with stored query + drift. The logits are those of the stored
            queries, so that they agree with the log-sums of the bank.
    """
    n = len(local.queries)
    # The softmax probabilities of the negatives, (n, n, 1 + h).
    in_batch_weights = (quadrants.in_batch - local_rows.log_normalizers[:, None, None]).exp()
    # A row's own positive is masked, so its place in the matrix is free.
    in_batch_weights[:, :, 0].diagonal().sub_(local_rows.differences.sigmoid())
    in_batch_weights = in_batch_weights.flatten(1)  # (n, n * (1 + h))
    query_gradient = in_batch_weights @ local.documents.flatten(0, 1)  # (n, d)
    document_gradient = in_batch_weights.T @ local.queries  # (n * (1 + h), d)
    if quadrants.banked is not None:
        normalizers = local_rows.log_normalizers[:, None, None]
        against_bank_weights = (quadrants.against_bank - normalizers).exp()  # (n, m, 1 + b)
        documents = quadrants.banked.documents.flatten(0, 1)  # (m * (1 + b), d)
        query_gradient.addmm_(against_bank_weights.flatten(1), documents)
    if quadrants.banked is not None and banked_rows is not None:
        normalizers = banked_rows.log_normalizers[:, None, None]
        from_bank_weights = (quadrants.from_bank - normalizers).exp().flatten(1)
        document_gradient.addmm_(from_bank_weights.T, quadrants.banked.queries)
        if query_drift is not None:
            # (groups, rows of a group, n * (1 + h)), summed over the rows
            sums_of_groups = from_bank_weights.unflatten(0, (len(query_drift), -1)).sum(1)
            document_gradient.addmm_(sums_of_groups.T, query_drift)
    gradients = [query_gradient[:, None], document_gradient.unflatten(0, (n, -1))]
    return torch.cat(gradients, dim=1)


class PrecomputedGradient(torch.autograd.Function):
    """A loss with gradients that are already known when it is returned.

    The gradients keep the dtype in which they were computed (float32 at least) until they are
    multiplied by the incoming gradient, which contains the factor of a gradient scaler. If they
    were cast to float16 earlier, small values would underflow. (`BankedInfoNCE` passes embeddings
    in float32 already; query-side training passes those of the encoder.)

    Use: ``PrecomputedGradient.apply(loss, gradient, embeddings)``, with a scalar loss and a
    gradient of the shape of the embeddings.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradient: Tensor, embeddings: Tensor) -> Tensor:
        """Store the gradient of the embeddings, and return the loss."""
        ctx.save_for_backward(gradient)
        ctx.dtype = embeddings.dtype
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, None, Tensor]:
        """Return the stored gradient times the incoming gradient."""
        [gradient] = ctx.saved_tensors
        return None, None, (gradient * grad_output).to(ctx.dtype)
