"""Diagnostics of a micro-step, the values of `BankedInfoNCE.last`.

They stay tensors on the device, so a micro-step never waits for them; a log reads them if needed.
`contaccum.bank.info_nce` explains the score matrix, its rows, columns and blocks.

Letters in shapes: n pairs in the micro-batch, h hard negatives per query, m bank rows, d the
embedding size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from contaccum.bank.logits import MASKED, LogitBlocks, Pairs
from contaccum.bank.memory_bank import MemoryBank

MASKED_THRESHOLD = MASKED / 2
"""Logits up to this value are masked: no score of two texts is as low."""


@torch.no_grad()
def describe_micro_step(
    local: Pairs,
    blocks: LogitBlocks,
    bank: MemoryBank | None,
    local_losses: Tensor,
    banked_losses: Tensor,
    banked_row_weights: Tensor,
    passage_mean: Tensor | None,
) -> dict[str, Tensor | int]:
    """Describe the rows, columns and losses of a micro-step.

    Args:
        local: the micro-batch.
        blocks: its logits.
        bank: the bank before the micro-batch is enqueued; None without a bank.
        local_losses: (n,), losses of the local rows.
        banked_losses: (m,), losses of the banked rows.
        banked_row_weights: (m,), weights of the banked rows; 0 for rows that are not in use.
        passage_mean: (d,), the mean that was subtracted from the documents, or None.

    Returns:
        A dict with

        - ``local_loss``: mean loss of the local rows,
        - ``bank_loss``: mean loss of the bank rows in use,
        - ``columns``: number of columns per local row, before masks,
        - ``masked``: fraction of these columns, without the row's positive, that are masked,
        - ``bank_rows``: number of bank rows in use,
        - ``embedding_spread``: mean squared distance of the local passages from their mean, divided
          by their mean squared length.
    """
    n, num_documents = local.valid.shape
    num_banked_columns = 0
    num_bank_rows = 0
    num_masked = (blocks.in_batch <= MASKED_THRESHOLD).sum() - n  # without the n own positives
    num_negatives = local.valid.new_full((), n * num_documents - 1, dtype=torch.int64)
    if bank is not None:
        num_banked_columns = bank.in_use * bank.documents.shape[1]
        if bank.has_queries:
            num_bank_rows = bank.in_use
        is_valid = bank.valid[: bank.num_filled_slots]
        is_masked = (blocks.against_bank <= MASKED_THRESHOLD) & is_valid
        num_masked = num_masked + is_masked.sum()
        num_negatives = num_negatives + is_valid.sum()
    smallest_number = torch.finfo(local_losses.dtype).tiny
    total_weight = banked_row_weights.sum().clamp_min(smallest_number)
    passages = local.documents[:, 0]
    if passage_mean is not None:
        passages = passages + passage_mean
    return {
        "local_loss": local_losses.mean(),
        "bank_loss": (banked_losses * banked_row_weights).sum() / total_weight,
        "columns": n * num_documents + num_banked_columns,
        "masked": num_masked / (n * num_negatives).clamp_min(1),
        "bank_rows": num_bank_rows,
        "embedding_spread": _compute_embedding_spread(passages),
    }


def _compute_embedding_spread(passages: Tensor) -> Tensor:
    """Compute the spread of passages (n, d); near 0, the embeddings have collapsed to a point."""
    n = len(passages)
    variance = passages.var(0, correction=0).sum()
    spread = variance / passages.square().sum() * n
    if n == 1:  # one passage has no spread
        return spread * math.nan
    return spread


@torch.no_grad()
def measure_softmax_masses(
    local: Pairs,
    blocks: LogitBlocks,
    bank: MemoryBank,
    local_losses: Tensor,
    bank_weight: float,
    num_aged: int,
) -> dict[str, Tensor]:
    """Measure how the softmax of the local rows is distributed over their negative passages.

    The softmax mass of a passage is its softmax probability, summed over the local rows of which it
    is a negative. Hard negatives are not counted. An aged entry (banked pair) was encoded by an
    older encoder; a fresh passage is one of the micro-batch or of the current update.

    Args:
        local: the micro-batch.
        blocks: its logits.
        bank: the bank before the micro-batch is enqueued.
        local_losses: (n,), losses of the local rows.
        bank_weight: weight of a banked column.
        num_aged: number of aged entries in use; they are the oldest entries.

    Returns:
        A dict with

        - ``in_batch_mass``: mass of all passages of the micro-batch for the rows of other pairs,
          divided by n,
        - ``bank_mass``: mass of all banked passages, divided by n,
        - ``bank_mass_aged``: mean mass of an aged passage, divided by that of a fresh passage.
          1: age makes no difference. Near 0: the encoder has moved away from the bank.
    """
    n = len(local_losses)
    log_sums = local_losses + local.positive_logits  # a row's loss is log-sum - positive logit
    in_batch_mass = (blocks.in_batch[:, :, 0] - log_sums[:, None]).exp().sum()

    passage_logits = blocks.against_bank[:, :, 0] + math.log(bank_weight)
    mass_by_slot = (passage_logits - log_sums[:, None]).exp().sum(0)
    pairs_in_use = torch.arange(bank.oldest_in_use, bank.total_enqueued, device=mass_by_slot.device)
    mass_by_pair = mass_by_slot[pairs_in_use % bank.num_slots]  # oldest first
    aged_mass = mass_by_pair[:num_aged].sum()
    fresh_bank_mass = mass_by_pair[num_aged:].sum()
    num_fresh = n - 1 + bank.in_use - num_aged
    mean_fresh_mass = (in_batch_mass + fresh_bank_mass) / num_fresh
    return {
        "in_batch_mass": in_batch_mass / n,
        "bank_mass": (aged_mass + fresh_bank_mass) / n,
        "bank_mass_aged": aged_mass / num_aged / mean_fresh_mass,
    }
