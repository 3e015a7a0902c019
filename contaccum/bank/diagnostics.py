"""Diagnostics of a micro-step, as tensors that nobody has to read: `BankedInfoNCE.last`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from contaccum.bank.logits import MASKED, Pairs
from contaccum.bank.memory_bank import LogitBlocks, MemoryBank


@torch.no_grad()
def describe_micro_step(
    local: Pairs,
    blocks: LogitBlocks,
    bank: MemoryBank | None,
    local_losses: Tensor,
    banked_losses: Tensor,
    row_weights: Tensor,
    passages: Tensor,
) -> dict[str, Tensor | int]:
    """Describe rows, columns and losses.

    Args:
        passages: (n, d), local passages that no mean was subtracted from.
        local_losses: (n,).
        banked_losses: (m,), and how often each counts, ``row_weights`` (m,).

    Returns:
        ``local_loss`` and ``bank_loss`` (means over local rows, and over bank rows in use),
        ``columns`` (of ``query_to_doc``, for each local row, before masks), ``masked`` (share of
        them that is left out, the row's positive aside), ``bank_rows``, and ``embedding_spread``
        (squared distance of local passages from their mean, over their squared length).
    """
    n, width = local.valid.shape
    num_banked = 0 if bank is None else bank.in_use * bank.documents.shape[1]
    smallest = torch.finfo(local_losses.dtype).tiny
    num_masked = (blocks.in_batch <= MASKED / 2).sum()
    num_columns = torch.tensor(n * width - 1, device=local.valid.device)
    if bank is not None:
        is_valid = bank.valid[: bank.num_used_slots]
        num_masked = num_masked + ((blocks.against_bank <= MASKED / 2) & is_valid).sum()
        num_columns = num_columns + is_valid.sum()
    return {
        "local_loss": local_losses.mean(),
        "bank_loss": (banked_losses * row_weights).sum() / row_weights.sum().clamp_min(smallest),
        "columns": n * width + num_banked,
        "masked": num_masked / (n * num_columns).clamp_min(1),
        "bank_rows": bank.in_use if bank is not None and bank.has_queries else 0,
        "embedding_spread": _embedding_spread(passages),
    }


def _embedding_spread(passages: Tensor) -> Tensor:
    n = len(passages)
    spread = passages.var(0, correction=0).sum() / passages.square().sum() * n
    return spread if n > 1 else spread * math.nan


@torch.no_grad()
def softmax_masses(
    local: Pairs,
    blocks: LogitBlocks,
    bank: MemoryBank,
    local_losses: Tensor,
    bank_weight: float,
    num_aged: int,
) -> dict[str, Tensor]:
    """Measure where the softmax of the local rows lies among passages, their positives aside.

    Args:
        num_aged: banked pairs of an older encoder than the present one; they are the oldest in use.

    Returns:
        ``in_batch_mass`` and ``bank_mass``, means over the rows, and ``bank_mass_aged``: the mass
        of an aged passage over that of a fresh one, which is in the batch or of the present update.
    """
    n = len(local_losses)
    log_sums = local_losses + local.positive_logits
    in_batch = (blocks.in_batch[:, :, 0] - log_sums[:, None]).exp()
    in_batch_mass = in_batch.sum() - in_batch.diagonal().sum()

    against_passages = blocks.against_bank[:, :, 0] + math.log(bank_weight)
    by_slot = (against_passages - log_sums[:, None]).exp().sum(0)
    oldest_first = torch.arange(bank.oldest_in_use, bank.total_enqueued, device=by_slot.device)
    by_pair = by_slot[oldest_first % bank.num_slots]
    aged_mass = by_pair[:num_aged].sum()
    fresh_mass = by_pair[num_aged:].sum()
    num_fresh = n - 1 + bank.in_use - num_aged
    mean_fresh = (in_batch_mass + fresh_mass) / num_fresh
    return {
        "in_batch_mass": in_batch_mass / n,
        "bank_mass": (aged_mass + fresh_mass) / n,
        "bank_mass_aged": aged_mass / num_aged / mean_fresh,
    }
