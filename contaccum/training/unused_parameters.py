"""Parameters without a gradient, for which DDP would wait in every update of several processes."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import uses_gradient_cache
from sentence_transformers.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.util import batch_to_device
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from contaccum.encoders.settings import is_tied, without_dropout
from contaccum.errors import ConfigError
from contaccum.losses.contaccum import ContAccumLoss
from contaccum.losses.query_side import QuerySideLoss
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.losses import unwrap_matryoshka

logger = logging.getLogger(__name__)


def reads_only_embeddings(loss: Any) -> bool:
    """Return whether only parameters on which an embedding depends get a gradient by this loss."""
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
    with a loss that may read more than embeddings. Call this before the Accelerator is created.
    """
    has_cache = uses_gradient_cache(unwrap_matryoshka(loss))
    if not has_cache and (reads_only_embeddings(loss) or not is_tied(model)):
        args.ddp_find_unused_parameters = False


def freeze_unused_parameters(
    args: ContAccumTrainingArguments, model: SentenceTransformer, features: list[dict[str, Any]]
) -> None:
    """Freeze the parameters of modules that run but change no embedding, such as BERT's pooler.

    Other rows may reach a parameter whose module does not run for these features, such as an
    expert. It stays trainable, but not with several processes, where DDP would wait for its
    gradient in every update. ``features`` are those of each column of some rows; without them,
    nothing is frozen.

    Raises:
        ConfigError: if the model has no parameter to train.
    """
    if not features:
        return
    freezes_unreached = args.world_size > 1 and args.ddp_find_unused_parameters is False
    parameters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if not parameters:
        raise ConfigError("every weight of the model is frozen (requires_grad=False): train some")
    modules_run: set[nn.Module] = set()
    used: set[str] = set()  # parameters that the embeddings depend on
    hook = register_module_forward_pre_hook(lambda module, _: modules_run.add(module))
    try:
        for column in features:
            with torch.enable_grad(), without_dropout(model):
                on_device = batch_to_device(dict(column), model.device)
                embedding = model(on_device)["sentence_embedding"]
            gradients = torch.autograd.grad(
                embedding.sum(), list(parameters.values()), allow_unused=True
            )
            used |= {name for name, x in zip(parameters, gradients, strict=True) if x is not None}
    finally:
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
