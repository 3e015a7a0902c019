"""What a training loss requires of the data and the model: known positives, trained parameters.

A training loss is a single loss, or a dictionary with one loss for each data set. A data set is
likewise a single set, or a dictionary of sets by name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import uses_gradient_cache
from sentence_transformers.losses import (
    CachedMultipleNegativesRankingLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from torch import Tensor, nn

from contaccum.data.sampling import get_samplings
from contaccum.encoders.settings import is_tied, without_dropout
from contaccum.errors import ConfigError
from contaccum.losses.contaccum import ContAccumLoss
from contaccum.losses.query_side import QuerySideLoss
from contaccum.retrieval.documents import StoreDocuments
from contaccum.training.arguments import ContAccumTrainingArguments

logger = logging.getLogger(__name__)

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


def reads_only_embeddings(loss: Any) -> bool:
    """Return whether a loss is of a class that reads nothing but sentence embeddings.

    With such a loss, a parameter on which no embedding depends gets no gradient.
    """
    classes = (
        ContAccumLoss,
        QuerySideLoss,
        MultipleNegativesRankingLoss,
        CachedMultipleNegativesRankingLoss,
    )
    return isinstance(unwrap_matryoshka(loss), classes)


def disable_unused_parameter_search(
    args: ContAccumTrainingArguments, model: SentenceTransformer, loss: Any
) -> None:
    """Disable DDP's search for unused parameters where its result would be wrong.

    DDP searches after every forward pass. Most losses encode one column after the other, so after
    the last column DDP would treat the query tower as unused. The search stays on for losses with a
    gradient cache, which call the model once per backward pass and need it, and for a tied model
    with a loss that may read more than embeddings. For losses that read only embeddings,
    `freeze_unused_parameters` replaces the search.

    The Accelerator reads ``ddp_find_unused_parameters`` when it is created, so this function must
    be called before.
    """
    if any(uses_gradient_cache(loss_of_set) for loss_of_set in list_losses(loss)):
        return
    if reads_only_embeddings(loss) or not is_tied(model):
        args.ddp_find_unused_parameters = False


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


def freeze_unused_parameters(
    args: ContAccumTrainingArguments, model: SentenceTransformer, features: list[dict[str, Any]]
) -> None:
    """Freeze the parameters of modules that run but change no embedding, such as BERT's pooler.

    A parameter whose module does not run for these features stays trainable, because other rows may
    reach it, for example an expert or another route of a Router. But with several processes, DDP
    would wait for its gradient in every update. It is frozen then, with a warning.

    Args:
        args: the arguments of the run.
        model: the encoder.
        features: the collated features of some rows, one dictionary per column. Without features,
            nothing is frozen.

    Raises:
        ConfigError: if the model has no parameter to train.
    """
    if not features:
        return
    freezes_unreached = args.world_size > 1 and args.ddp_find_unused_parameters is False
    parameters = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameters[name] = parameter
    if not parameters:
        raise ConfigError("every weight of the model is frozen (requires_grad=False): train some")
    modules_run: set[nn.Module] = set()
    used: set[str] = set()  # parameters that the embeddings depend on
    hooks = []
    for module in model.modules():
        hook = module.register_forward_pre_hook(lambda module, _: modules_run.add(module))
        hooks.append(hook)
    try:
        for column in features:
            on_device = dict(column)
            for key, value in column.items():
                if isinstance(value, Tensor):
                    on_device[key] = value.to(model.device)
            with torch.enable_grad(), without_dropout(model):
                embedding = model(on_device)["sentence_embedding"]
            gradients = torch.autograd.grad(
                embedding.sum(), list(parameters.values()), allow_unused=True
            )
            for name, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    used.add(name)
    finally:
        for hook in hooks:
            hook.remove()
    unreached = []
    for name, parameter in parameters.items():
        if name in used:
            continue
        is_reached = model.get_submodule(name.rpartition(".")[0]) in modules_run
        if not is_reached:
            unreached.append(name)
        if is_reached or freezes_unreached:
            parameter.requires_grad_(False)
    if unreached and freezes_unreached:
        logger.warning(
            f"{len(unreached)} parameters such as {unreached[0]} are frozen: the first row of the "
            "training data does not use them, and with several processes every update must use all "
            "trained parameters. If other rows use them, train in one process"
        )
