"""The training loss, its parts and its known positives.

A training loss is a single loss, or a dictionary with one loss for each data set. A data set is
likewise a single set, or a dictionary of sets by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from sentence_transformers.losses import MatryoshkaLoss

from contaccum.data.sampling import get_samplings
from contaccum.losses.contaccum import ContAccumLoss
from contaccum.losses.query_side import QuerySideLoss
from contaccum.retrieval.documents import StoreDocuments

Row = dict[str, Any]
"""A row of a training set: texts by column, and a label if the set has labels."""
Batch = dict[str, Any]
"""A collated batch: the features of all columns by name, and the labels."""


def list_parts(value: Any) -> list[Any]:
    """Return the values of a dictionary by data set, or a single value as a list."""
    if isinstance(value, dict):
        return list(value.values())
    return [value]


def unwrap_matryoshka(loss: Any) -> Any:
    """Return the loss inside a MatryoshkaLoss; any other loss is returned unchanged."""
    return loss.loss if isinstance(loss, MatryoshkaLoss) else loss


def list_losses(loss: Any) -> list[Any]:
    """Return the losses of all data sets, without a MatryoshkaLoss around them."""
    return [unwrap_matryoshka(loss_of_set) for loss_of_set in list_parts(loss)]


def get_batch_loss(loss: Any, batch: Batch) -> Any:
    """Return the loss that a batch is trained with, without a MatryoshkaLoss around it."""
    if isinstance(loss, dict):
        loss = loss[batch["dataset_name"]]
    return unwrap_matryoshka(loss)


def iter_bank_losses(loss: Any) -> Iterator[ContAccumLoss]:
    """Yield every ContAccumLoss in a training loss once, including one inside a MatryoshkaLoss."""
    bank_losses: list[ContAccumLoss] = []
    for loss_of_set in list_losses(loss):
        for module in loss_of_set.modules():
            # Several data sets may share a loss.
            if isinstance(module, ContAccumLoss) and module not in bank_losses:
                bank_losses.append(module)
    yield from bank_losses


def get_store_documents(loss: Any) -> StoreDocuments | None:
    """Return the stored document embeddings of a query-side loss; None for any other loss."""
    return loss.documents if isinstance(loss, QuerySideLoss) else None


def pass_known_positives(loss: Any, datasets: Iterable[Any]) -> None:
    """Pass the known positives of all data sets to every ContAccumLoss in a training loss.

    Known positives are pairs of a query and a positive, as ids of the texts. The loss does not use
    such a positive as a negative of its query.
    """
    tables = []  # each int64 (r, 2)
    for dataset in datasets:
        for sampling in get_samplings(dataset):
            if sampling.known_positives is not None:
                tables.append(sampling.known_positives)
    if tables:
        query_ids, positive_ids = torch.from_numpy(np.concatenate(tables)).T.contiguous()
        for bank_loss in iter_bank_losses(loss):
            bank_loss.set_known_positives(query_ids, positive_ids)
