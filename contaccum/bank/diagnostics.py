"""Diagnostics of a micro-step, the values of `BankedInfoNCE.last`.

They are computed when they are read, from a `MicroStep`, whose tensors the loss computes anyway.
They stay tensors on the device, so a reader waits for the device only if it needs their numbers.
`contaccum.bank.info_nce` explains the score matrix, its rows, columns and blocks.

Letters in shapes: n pairs in the micro-batch, h hard negatives per query, m bank rows, d the
embedding size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from contaccum.bank.logits import MASKED

MASKED_THRESHOLD = MASKED / 2
"""Logits up to this value are masked: no score of two texts is as low."""


class RowLosses(NamedTuple):
    """Losses of r rows of the score matrix, local or banked."""

    losses: Tensor  # (r,)
    differences: Tensor  # (r,), logsumexp of the negatives' logits minus the positive's logit
    log_sums: Tensor  # (r,), logsumexp of the logits of the negatives and the positive


class LossTerms(NamedTuple):
    """A loss, and the terms that it is computed from; see `contaccum.bank.info_nce`."""

    loss: Tensor  # scalar
    local_rows: RowLosses
    banked_rows: RowLosses | None  # None without banked queries
    bank_weight: float  # of a banked pair
    divisor: Tensor | int  # of the sum of the losses


class MicroStep(NamedTuple):
    """Values of a micro-step that its diagnostics are computed from.

    Those of the bank are from before the micro-batch was enqueued. Without a bank, m is 0.
    """

    passages: Tensor  # (n, d)
    in_batch: Tensor  # (n, n, 1 + h), logits of the micro-batch, own positives masked
    against_bank: Tensor  # (n, m, 1 + h), logits of local queries and banked documents
    invalid: Tensor | None  # bool (m, 1 + h), see `contaccum.bank.logits.Pairs`
    pairs_in_use: range  # numbers of the banked pairs, see `MemoryBank`
    num_aged: int  # aged pairs in use, which an older encoder encoded; they are the oldest ones
    terms: LossTerms
    not_finite: Tensor  # bool scalar, True for a micro-batch that is not finite
    bank_fill: int | None = None  # pairs in use afterwards; None if no pair was to be stored


@torch.no_grad()
def describe_micro_step(step: MicroStep) -> dict[str, Tensor | int]:
    """Describe the rows, columns and losses of a micro-step.

    Returns:
        A dict with

        - ``local_loss``: mean loss of the local rows,
        - ``bank_loss``: mean loss of the bank rows in use,
        - ``columns``: number of columns per local row, before masks,
        - ``masked``: fraction of these columns, without the row's positive, that are masked,
        - ``bank_rows``: number of bank rows in use,
        - ``embedding_spread``: mean squared distance of the local passages from their mean, divided
          by their mean squared length,

        with a bank those of `_measure_softmax_masses`, and in training

        - ``enqueued``: number of pairs that were stored in the bank as valid,
        - ``bank_fill``: number of pairs in use afterwards.
    """
    n, _, num_documents = step.in_batch.shape
    columns = n * num_documents
    num_bank_rows = 0
    bank_loss = step.terms.loss.new_zeros(())
    num_masked = (step.in_batch <= MASKED_THRESHOLD).sum() - n  # without the n own positives
    num_negatives = torch.full_like(num_masked, columns - 1)
    others: dict[str, Tensor | int] = {}
    if step.invalid is not None:
        is_valid = ~step.invalid
        columns += len(step.pairs_in_use) * is_valid.shape[1]
        is_masked = (step.against_bank <= MASKED_THRESHOLD) & is_valid
        num_masked = num_masked + is_masked.sum()
        num_negatives = num_negatives + is_valid.sum()
        if step.terms.banked_rows is not None:
            num_bank_rows = len(step.pairs_in_use)
            # The loss of a row that is not valid is zero.
            bank_loss = step.terms.banked_rows.losses.sum() / is_valid[:, 0].sum().clamp_min(1)
        others = _measure_softmax_masses(step)
    if step.bank_fill is not None:
        others["enqueued"] = 0 if step.invalid is None else n * ~step.not_finite
        others["bank_fill"] = step.bank_fill
    return {
        "local_loss": step.terms.local_rows.losses.mean(),
        "bank_loss": bank_loss,
        "columns": columns,
        "masked": num_masked / (n * num_negatives).clamp_min(1),
        "bank_rows": num_bank_rows,
        "embedding_spread": _compute_embedding_spread(step.passages),
        **others,
    }


def _compute_embedding_spread(passages: Tensor) -> Tensor:
    """Compute the spread of passages (n, d); near 0, the embeddings have collapsed to a point."""
    n = len(passages)
    variance = passages.var(0, correction=0).sum()
    spread = variance / passages.square().sum() * n
    if n == 1:  # one passage has no spread
        return spread * math.nan
    return spread


def _measure_softmax_masses(step: MicroStep) -> dict[str, Tensor | int]:
    """Measure how the softmax of the local rows is distributed over their negative passages.

    The softmax mass of a passage is its softmax probability, summed over the local rows of which it
    is a negative. Hard negatives are not counted. A fresh passage is one of the micro-batch or of
    the current update; the others are aged.

    Returns:
        A dict with

        - ``in_batch_mass``: mass of all passages of the micro-batch for the rows of other pairs,
          divided by n,
        - ``bank_mass``: mass of all banked passages, divided by n,
        - ``bank_mass_aged``: mean mass of an aged passage, divided by that of a fresh passage.
          1: age makes no difference. Near 0: the encoder has moved away from the bank.
    """
    n = len(step.passages)
    log_sums = step.terms.local_rows.log_sums[:, None]
    in_batch_mass = (step.in_batch[:, :, 0] - log_sums).exp().sum()
    mass_by_slot = (step.against_bank[:, :, 0] - log_sums).exp().sum(0) * step.terms.bank_weight
    numbers = torch.arange(step.pairs_in_use.start, step.pairs_in_use.stop, device=log_sums.device)
    # While the bank is filled, numbers are below the number of slots.
    mass_by_pair = mass_by_slot[numbers % len(mass_by_slot)]  # oldest first
    aged_mass = mass_by_pair[: step.num_aged].sum()
    fresh_bank_mass = mass_by_pair[step.num_aged :].sum()
    num_fresh = n - 1 + len(step.pairs_in_use) - step.num_aged
    mean_fresh_mass = (in_batch_mass + fresh_bank_mass) / num_fresh
    return {
        "in_batch_mass": in_batch_mass / n,
        "bank_mass": (aged_mass + fresh_bank_mass) / n,
        "bank_mass_aged": aged_mass / step.num_aged / mean_fresh_mass,
    }
