"""Losses of the compared methods, and what an update needs: a filled bank and an optimizer."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)

from contaccum import CachedContAccumLoss, ContAccumLoss, DualEncoder

BANK_METHODS = ("contaccum", "pre_batch", "contaccum_cached")
METHODS = ("in_batch", "grad_accum", "grad_cache", "contaccum_cached", "contaccum", "pre_batch")
CACHED_METHODS = ("grad_cache", "contaccum_cached", "mnrl_cached")
_PAIRS_PER_FILL_STEP = 1024  # pairs that are enqueued at once to fill a bank


def make_loss(method: str, model: DualEncoder, local: int, bank_size: int) -> torch.nn.Module:
    """Create the loss of a method.

    The methods without a bank use the same loss with a bank of size 0.

    Args:
        method: one of `METHODS`, or "mnrl" and "mnrl_cached" for the losses of
            sentence-transformers.
        model: the encoder.
        local: pairs per micro-batch; a gradient cache encodes so many at once.
        bank_size: rows of the bank, for a method that has one.
    """
    if method == "mnrl":
        return MultipleNegativesRankingLoss(model)
    if method == "mnrl_cached":
        return CachedMultipleNegativesRankingLoss(model, mini_batch_size=local)
    if method not in BANK_METHODS:
        bank_size = 0
    if method in CACHED_METHODS:
        return CachedContAccumLoss(model, bank_size=bank_size, mini_batch_size=local)
    query_bank_size = 0 if method == "pre_batch" else None
    return ContAccumLoss(model, bank_size=bank_size, query_bank_size=query_bank_size)


def fill_bank(loss: torch.nn.Module, features: list[dict[str, Any]], dimension: int) -> None:
    """Fill the bank of a loss with random embeddings, because most updates have a full bank.

    Args:
        loss: a loss in train mode; nothing happens if it has no bank.
        features: tokenised queries and passages of one micro-batch.
        dimension: dimension of the embeddings.
    """
    if not isinstance(loss, ContAccumLoss) or loss.settings.bank_size == 0:
        return
    loss(features, None)  # creates the bank and the probe
    device = features[0]["input_ids"].device
    num_steps = -(-loss.settings.bank_size // _PAIRS_PER_FILL_STEP)  # rounded up
    for _ in range(num_steps):
        queries = torch.randn(_PAIRS_PER_FILL_STEP, dimension, device=device)
        passages = torch.randn(_PAIRS_PER_FILL_STEP, dimension, device=device)
        loss.info_nce(queries, passages)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Create AdamW with a learning rate of 0: the usual cost, but weights do not change."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0)
