"""The training loss: that of a method, its parts, and the known positives that it needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import MatryoshkaLoss
from sentence_transformers.util import cos_sim, dot_score
from torch import nn

from contaccum.data.sampling import get_samplings
from contaccum.encoders.dual_encoder import SIMILARITY_NAMES
from contaccum.losses.contaccum import CachedContAccumLoss, ContAccumLoss, LossKeywords
from contaccum.settings import select
from contaccum.training.arguments import ContAccumTrainingArguments

Batch = dict[str, Any]
"""A collated batch: the features of all columns by name, and the labels."""


def make_loss(
    model: SentenceTransformer, args: ContAccumTrainingArguments
) -> ContAccumLoss | MatryoshkaLoss:
    """Return the loss for ``args.method``, one with a bank or without.

    Without a bank, it equals MultipleNegativesRankingLoss (or its cached version) up to rounding,
    except for masked false negatives. With ``args.matryoshka_dims``, it is the sum of the losses of
    embeddings truncated to each of these sizes.
    """
    model_similarity = "cos"
    if str(getattr(model, "similarity_fn_name", "cosine")).endswith("dot"):
        model_similarity = "dot"
    similarity = args.similarity or model_similarity
    if args.similarity is not None:
        # The saved model must be searched with the similarity that it was trained with.
        model.similarity_fn_name = SIMILARITY_NAMES[similarity]
    settings = {
        **select(args, LossKeywords),
        "bank_size": args.bank_size or 0,
        "scale": 1.0 / args.get_temperature(similarity),
        "similarity_fct": cos_sim if similarity == "cos" else dot_score,
        "gather_across_devices": args.is_gathered,
    }
    loss: ContAccumLoss
    if args.has_gradient_cache:
        mini_batch_size = args.pairs_per_micro_batch
        loss = CachedContAccumLoss(model, mini_batch_size=mini_batch_size, **settings)
    else:
        loss = ContAccumLoss(model, **settings)
    if args.matryoshka_dims:
        return MatryoshkaLoss(model, loss, args.matryoshka_dims)
    return loss


def list_parts(dataset: Any) -> list[Any]:
    """Return the data sets of a dictionary of sets by name, or a single set as a list."""
    return list(dataset.values()) if isinstance(dataset, dict) else [dataset]


def count_rows(dataset: Any) -> int:
    """Return the number of rows in all parts of a training set."""
    return sum(map(len, list_parts(dataset)))


def unwrap_matryoshka(loss: Any) -> Any:
    """Return the loss inside a MatryoshkaLoss; any other loss is returned unchanged."""
    return loss.loss if isinstance(loss, MatryoshkaLoss) else loss


def list_bank_losses(loss: nn.Module) -> list[ContAccumLoss]:
    """Return every ContAccumLoss in a training loss, including one inside a MatryoshkaLoss."""
    return [module for module in loss.modules() if isinstance(module, ContAccumLoss)]


def pass_known_positives(loss: Any, datasets: Iterable[Any]) -> None:
    """Pass the known positives of all data sets to every ContAccumLoss in a training loss.

    Known positives are pairs of a query and a positive, as ids of the texts. The loss does not use
    such a positive as a negative of its query.
    """
    samplings = [sampling for dataset in datasets for sampling in get_samplings(dataset)]
    # int64 (r, 2) each
    tables = [each.known_positives for each in samplings if each.known_positives is not None]
    if tables:
        query_ids, positive_ids = torch.from_numpy(np.concatenate(tables)).T.contiguous()
        for bank_loss in list_bank_losses(loss):
            bank_loss.set_known_positives(query_ids, positive_ids)
