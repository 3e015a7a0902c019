"""Similarity directions and hardness weights, as in MultipleNegativesRankingLoss.

A direction defines which texts of the pairs are rows of the score matrix and which are columns:
``doc_to_query`` scores each passage against all queries. Hardness weights raise the logits of
negatives that are similar to the row, so that hard negatives count more in the softmax.

Both apply to the texts of the micro-batch alone. The bank is used in the direction ``query_to_doc``
only, without hardness weights.

Letters in shapes: n pairs in the micro-batch, h hard negatives per query.
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


def score_direction(
    direction: str, local: Pairs, temperature: float, rules: Sequence[FalseNegativeRule]
) -> Tensor:
    """Score a micro-batch in a direction other than ``query_to_doc``.

    `masked_logits` scores queries against documents, so the texts are first moved to these places.
    In ``query_to_query`` and ``doc_to_doc`` the columns of a row's own pair are excluded, because
    the row itself is among them and there is no positive.

    Args:
        direction: ``"query_to_query"``, ``"doc_to_query"`` or ``"doc_to_doc"``.
        local: the micro-batch, with documents from which no mean was subtracted.
        rules: rules that find false negatives; for ``"doc_to_query"`` a table of positives must be
            swapped (`PositivesTable.swap`).

    Returns:
        (n, n, 1), or (n, n, 1 + h) if the columns are documents.
    """
    place_texts = _PLACE_TEXTS[direction]
    pairs = place_texts(local)
    logits = masked_logits(pairs, pairs, temperature, rules)
    if direction == "doc_to_query":
        return logits
    is_own_pair = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
    return logits.masked_fill(is_own_pair[:, :, None], MASKED)


def _use_queries_as_documents(local: Pairs) -> Pairs:
    """Put the queries in the place of the documents.

    As documents they have the ids of their passages: queries with the same passage are false
    negatives of each other.
    """
    guide = local.guide
    if guide is not None:
        guide = guide._replace(documents=guide.queries[:, None])
    return local._replace(
        documents=local.queries[:, None],
        document_ids=local.document_ids[:, :, :1],
        valid=local.valid[:, :1],
        guide=guide,
    )


def _swap_queries_and_passages(local: Pairs) -> Pairs:
    """Swap queries and passages, with their ids; hard negatives are left out."""
    guide = local.guide
    if guide is not None:
        guide = GuideEmbeddings(
            queries=guide.documents[:, 0],
            documents=guide.queries[:, None],
            ceilings=guide.ceilings,
        )
    return local._replace(
        queries=local.documents[:, 0],
        documents=local.queries[:, None],
        query_ids=local.document_ids[:, :, 0],
        document_ids=local.query_ids[:, :, None],
        valid=local.valid[:, :1],
        guide=guide,
    )


def _use_passages_as_queries(local: Pairs) -> Pairs:
    """Put the passages in the place of the queries.

    As queries they have the ids of their queries: other passages of the same query are false
    negatives of a passage.
    """
    guide = local.guide
    if guide is not None:
        guide = guide._replace(queries=guide.documents[:, 0])
    return local._replace(queries=local.documents[:, 0], guide=guide)


_PLACE_TEXTS = {
    "query_to_query": _use_queries_as_documents,
    "doc_to_query": _swap_queries_and_passages,
    "doc_to_doc": _use_passages_as_queries,
}


def add_hardness(
    logits: Tensor, similarities: Tensor, mode: HardnessMode, strength: float
) -> Tensor:
    """Add ``strength`` times the similarity, without gradient, to the logits of negatives.

    Sources: arXiv 2503.04812, equation 9; arXiv 2509.20354, equation 5.

    Args:
        logits: (n, n, 1 + h), local queries against local documents.
        similarities: (n, n, 1 + h), the similarities of the same texts.
        mode: the negatives that are weighted: ``"in_batch_negatives"`` (documents of other pairs),
            ``"hard_negatives"`` (a row's own hard negatives) or ``"all_negatives"``.
    """
    is_own_pair = torch.eye(len(logits), dtype=torch.bool, device=logits.device)[:, :, None]
    is_own_pair = is_own_pair.expand(logits.shape)
    is_positive = is_own_pair.clone()
    is_positive[:, :, 1:] = False
    if mode == "in_batch_negatives":
        is_weighted = ~is_own_pair
    elif mode == "hard_negatives":
        is_weighted = is_own_pair & ~is_positive
    else:
        is_weighted = ~is_positive
    penalties = strength * similarities.detach()
    return logits + torch.where(is_weighted, penalties, 0.0)
