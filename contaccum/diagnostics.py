"""What a micro-step tells about itself, in tensors that nobody has to read: numbers for logs, and none for training."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from contaccum.directions import Direction
from contaccum.memory_bank import MemoryBank


def facts(found: Sequence[Direction], bank: MemoryBank | None, passages: Tensor) -> dict[str, Tensor | int]:
    """Of rows and columns, and of the local ``passages`` (n, d); ``masked`` is that of ``query_to_doc``, the first."""
    n = len(passages)
    in_use = passages.new_zeros(0, dtype=torch.bool) if bank is None else bank.absent[: bank.span].flatten() == 0
    spread = passages.var(0, correction=0).sum() / passages.square().sum() * n
    width = sum(x.pairs.columns.shape[1] for x in found)
    banked_width = sum(x.scores.of_columns.shape[1] for x in found) // max(0 if bank is None else bank.span, 1)
    return {
        "columns": n * width + (0 if bank is None else bank.in_use * banked_width),
        "masked": found[0].scores.masked(in_use),
        "bank_rows": bank.in_use if bank is not None and len(bank.queries) else 0,
        "embedding_spread": spread if n > 1 else spread * math.nan,
    }


@torch.no_grad()
def masses(base: Direction, log_sum: Tensor, bank: MemoryBank, weights: Tensor) -> dict[str, Tensor]:
    """Where the local rows' softmax lies, of which ``weights`` (m (1 + h),) are on the bank's columns.

    Fresh columns are the in-batch negatives and entries of the same update; the positives do not count.
    """
    n, oldest_first = len(log_sum), torch.arange(bank.first, bank.pairs, device=weights.device)
    on_passages = weights.view(bank.span, -1)[oldest_first % bank.slots, 0]
    aged, fresh = on_passages[: bank.aged].sum(), on_passages[bank.aged :].sum()
    local = (base.scores.own[:, :, 0] - log_sum[:, None]).exp()
    in_batch = local.sum() - local.diagonal().sum()
    of_fresh = (in_batch + fresh) / (n - 1 + bank.in_use - bank.aged)
    return {
        "bank_mass": (aged + fresh) / n,
        "bank_mass_aged": aged / bank.aged / of_fresh,
        "in_batch_mass": in_batch / n,
    }
