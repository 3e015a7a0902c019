"""Contrasts within the micro-batch alone: other similarity directions, and hardness weights.

Both are as in MultipleNegativesRankingLoss of sentence-transformers. The bank serves
``query_to_doc`` without hardness weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from contaccum.bank.logits import (
    MASKED,
    FalseNegativeRule,
    GuideEmbeddings,
    Pairs,
    masked_logits,
)
from contaccum.bank.settings import HardnessMode


def direction_logits(
    direction: str, local: Pairs, temperature: float, rules: Sequence[FalseNegativeRule]
) -> Tensor:
    """Score a micro-batch in another direction than ``query_to_doc``.

    If rows and columns are of the same tower, a row is not contrasted with the texts of its own
    pair.

    Args:
        direction: ``"query_to_query"``, ``"doc_to_query"`` or ``"doc_to_doc"``.
        local: the micro-batch, with documents that no mean was subtracted from.
        rules: for ``"doc_to_query"``, with a table of positives whose columns are swapped.

    Returns:
        (n, n, 1), or (n, n, 1 + h) with documents as columns.
    """
    pairs = _DIRECTION_VIEWS[direction](local)
    logits = masked_logits(pairs, pairs, temperature, rules)
    if direction == "doc_to_query":
        return logits
    is_own_pair = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
    return logits.masked_fill(is_own_pair[:, :, None], MASKED)


def _query_to_query(local: Pairs) -> Pairs:
    """View the queries as documents too; they keep the ids of their passages."""
    guide = local.guide
    if guide is not None:
        guide = guide._replace(documents=guide.queries[:, None])
    return local._replace(
        documents=local.queries[:, None],
        document_ids=local.document_ids[:, :, :1],
        valid=local.valid[:, :1],
        guide=guide,
    )


def _doc_to_query(local: Pairs) -> Pairs:
    """Swap queries and passages, ids included."""
    guide = local.guide
    if guide is not None:
        swapped_queries = guide.documents[:, 0]
        guide = GuideEmbeddings(swapped_queries, guide.queries[:, None], guide.ceilings)
    return local._replace(
        queries=local.documents[:, 0],
        documents=local.queries[:, None],
        query_ids=local.document_ids[:, :, 0],
        document_ids=local.query_ids[:, :, None],
        valid=local.valid[:, :1],
        guide=guide,
    )


def _doc_to_doc(local: Pairs) -> Pairs:
    """View the passages as queries; they keep the ids of their queries."""
    guide = local.guide
    if guide is not None:
        guide = guide._replace(queries=guide.documents[:, 0])
    return local._replace(queries=local.documents[:, 0], guide=guide)


_DIRECTION_VIEWS = {
    "query_to_query": _query_to_query,
    "doc_to_query": _doc_to_query,
    "doc_to_doc": _doc_to_doc,
}


def add_hardness(
    logits: Tensor, similarities: Tensor, mode: HardnessMode, strength: float
) -> Tensor:
    """Add ``strength`` times their similarity, without its gradient, to the logits of negatives.

    Sources: arXiv 2503.04812, equation 9; arXiv 2509.20354, equation 5.

    Args:
        logits: (n, n, 1 + h), local queries against local documents.
        similarities: the same before temperature and masks.
        mode: ``"in_batch_negatives"`` (documents of other pairs), ``"hard_negatives"`` (a row's
            own) or ``"all_negatives"``.
    """
    n = len(logits)
    is_own_pair = torch.eye(n, dtype=torch.bool, device=logits.device)[:, :, None]
    if mode == "in_batch_negatives":
        is_weighted = ~is_own_pair.expand(logits.shape)
    else:
        is_weighted = torch.ones_like(logits, dtype=torch.bool)
        is_weighted[:, :, 0] = ~is_own_pair[:, :, 0]
        if mode == "hard_negatives":
            is_weighted = is_weighted & is_own_pair
    penalties = strength * similarities.detach()
    return logits + torch.where(is_weighted, penalties, 0.0)
