"""The loss that ``args.method`` names, and what it needs of columns and parameters."""

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
from sentence_transformers.util import cos_sim, dot_score
from torch import Tensor, nn

from contaccum.data.sampling import LABELS, get_samplings
from contaccum.encoders.towers import is_tied
from contaccum.errors import ConfigError
from contaccum.losses.contaccum import CachedContAccumLoss, ContAccumLoss
from contaccum.losses.guide import Guide
from contaccum.losses.probe import without_dropout
from contaccum.losses.query_side import QuerySideLoss
from contaccum.retrieval.documents import StoreDocuments
from contaccum.training.arguments import ContAccumTrainingArguments

logger = logging.getLogger(__name__)

Columns = dict[str | None, list[str]]
"""Text columns in order, by the name of the set; None for a single one."""


def make_loss(
    model: SentenceTransformer,
    args: ContAccumTrainingArguments,
    guide: SentenceTransformer | None = None,
) -> ContAccumLoss | MatryoshkaLoss:
    """Return the loss that ``args.method`` names.

    A baseline has the same loss without a bank, and so every other setting of it. It then equals
    MultipleNegativesRankingLoss, or the cached one, to the last digits, except for masks and
    centring. With ``args.matryoshka_dims``, the loss is the sum over these sizes.

    Raises:
        ConfigError: for a size that the model's embeddings do not have.
    """
    dims = args.matryoshka_dims
    dimension = model.get_embedding_dimension()
    if dims and dimension and max(dims) > dimension:
        raise ConfigError(
            f"matryoshka_dims={dims}: the model's embeddings have {dimension} dimensions; name no "
            "more"
        )
    is_dot = str(getattr(model, "similarity_fn_name", "cosine")).endswith("dot")
    settings = args.loss_settings("dot" if is_dot else "cos")
    settings["guide"] = guide
    settings["scale"] = 1.0 / settings.pop("temperature")
    similarity = settings.pop("similarity")
    settings["similarity_fct"] = cos_sim if similarity == "cos" else dot_score
    loss: ContAccumLoss
    if args.caches:
        mini_batch_size = args.pairs_per_micro_batch
        loss = CachedContAccumLoss(model, mini_batch_size=mini_batch_size, **settings)
    else:
        loss = ContAccumLoss(model, **settings)
    return MatryoshkaLoss(model, loss, dims) if dims else loss


def innermost(loss: Any) -> Any:
    """Return the loss that a MatryoshkaLoss calls for each size, or the loss itself."""
    return loss.loss if isinstance(loss, MatryoshkaLoss) else loss


def bank_losses(loss: Any) -> Iterator[ContAccumLoss]:
    """Yield every ContAccumLoss that trains, also those inside of a MatryoshkaLoss.

    Args:
        loss: the training loss, or a dictionary with one for each data set.
    """
    losses = loss.values() if isinstance(loss, dict) else [loss]
    for loss_of_set in losses:
        for module in loss_of_set.modules():
            if isinstance(module, ContAccumLoss):
                yield module


def guide_of(loss: Any) -> Guide | None:
    """Return the guide of a training loss, the first one's of several."""
    for bank_loss in bank_losses(loss):
        if bank_loss.guide is not None:
            return bank_loss.guide
    return None


def documents_of(loss: Any) -> StoreDocuments | None:
    """Return the documents of query-side training, None for another loss."""
    return loss.documents if isinstance(loss, QuerySideLoss) else None


def columns_by_set(dataset: Any) -> Columns:
    """Return the text columns of each data set that has any."""
    parts = dataset if isinstance(dataset, dict) else {None: dataset}
    columns: Columns = {}
    for name, part in parts.items():
        names = getattr(part, "column_names", None) or []
        texts = [column for column in names if column not in LABELS]
        if texts:
            columns[name] = texts
    return columns


def take_roles(
    args: ContAccumTrainingArguments, model: SentenceTransformer, columns: Columns
) -> None:
    """Set the role and the prompt of each column, unless the user did.

    The first column holds queries, the others documents, and both get the model's own prompts. The
    settings are by data set where a column's name has another role in another set.
    """
    roles_by_set: dict[Any, dict[str, str]] = {}
    roles: dict[str, str] = {}
    for name, names in columns.items():
        roles_by_set[name] = dict.fromkeys(names, "document")
        roles_by_set[name][names[0]] = "query"
        roles |= roles_by_set[name]
    agree = all(of_set.items() <= roles.items() for of_set in roles_by_set.values())
    if not args.router_mapping:
        args.router_mapping = roles if agree else roles_by_set
    if args.prompts is not None:
        return
    if agree:
        args.prompts = _prompts_of(model, roles) or None
    else:
        prompts = {name: _prompts_of(model, of_set) for name, of_set in roles_by_set.items()}
        args.prompts = prompts or None


def _prompts_of(model: SentenceTransformer, roles: dict[str, str]) -> dict[str, str]:
    """Return the model's prompt for each column, by the role of the column."""
    prompts = {}
    for column, role in roles.items():
        prompt = model.prompts.get(role)
        if prompt:
            prompts[column] = prompt
    return prompts


def check_columns(args: ContAccumTrainingArguments, loss: Any, columns: Columns) -> None:
    """Refuse data that has no positives, or nothing that could be a negative.

    Raises:
        ConfigError: with the name of the set.
    """
    loss = innermost(loss)
    has_no_bank = isinstance(loss, ContAccumLoss) and not loss.settings.bank_size
    may_grow = args.gathers or args.finds_micro_batch
    is_single_pair = args.per_device_train_batch_size == 1 and not may_grow
    for name, names in columns.items():
        data = "the training data" if name is None else f"training set {name!r}"
        if len(names) < 2:
            raise ConfigError(
                f"{data} has only the column {names[0]!r}: it needs a query and a positive"
            )
        if len(names) > 2:
            continue
        if args.distill:
            raise ConfigError(
                f"distill={args.distill} with no hard negatives in {data}: add some, or drop "
                "distill"
            )
        if has_no_bank and is_single_pair:
            raise ConfigError(
                f"method={args.method} with per_device_train_batch_size=1 and no hard negatives in "
                f"{data}: a query has no negative. Raise the batch size, or set method=contaccum"
            )


def reads_embeddings_alone(loss: Any) -> bool:
    """Return whether a loss is known to read sentence embeddings and nothing else of the model."""
    classes = (
        ContAccumLoss,
        QuerySideLoss,
        MultipleNegativesRankingLoss,
        CachedMultipleNegativesRankingLoss,
    )
    return isinstance(innermost(loss), classes)


def settle_search_of_unused_parameters(
    args: ContAccumTrainingArguments, model: SentenceTransformer, loss: Any
) -> None:
    """Make DDP wait only for the gradients that come. The accelerator reads it when it is made.

    DDP looks for unused parameters after every column, and takes the query tower to be unused by
    the last. For losses that read sentence embeddings and nothing else, `freeze_unused` does that
    work, on any number of ranks. Losses with a gradient cache call the model once per backward
    pass, where DDP's search is right, and needed.
    """
    if uses_gradient_cache(innermost(loss)):
        return
    if reads_embeddings_alone(loss) or not is_tied(model):
        args.ddp_find_unused_parameters = False


def pass_known_positives(loss: Any, datasets: Iterable[Any]) -> None:
    """Pass the tables of positives of the data sets to every bank of a loss."""
    tables = []
    for dataset in datasets:
        for sampling in get_samplings(dataset):
            if sampling.known_positives is not None:
                tables.append(sampling.known_positives)
    if tables:
        pairs = torch.from_numpy(np.concatenate(tables)).T.contiguous()
        for bank_loss in bank_losses(loss):
            bank_loss.set_known_positives(*pairs)


def smallest_micro_batch(loss: Any, columns: Columns) -> int:
    """Return the smallest micro-batch in which a query has negatives.

    It is 1 where they come from hard negatives, a bank or the batch of a gradient cache, else 2.
    """
    if uses_gradient_cache(loss) or any(len(names) > 2 for names in columns.values()):
        return 1
    if isinstance(loss, QuerySideLoss):
        return 1
    if any(bank_loss.settings.bank_size for bank_loss in bank_losses(loss)):
        return 1
    return 2


def freeze_unused(
    model: SentenceTransformer,
    features: list[dict[str, Any]],
    freezes_unreached: bool = False,
) -> None:
    """Freeze parameters that forward passes use but no embedding depends on, as BERT's pooler.

    Parameters of modules that do not run for these features stay as they are, because other rows
    may reach them: a tower for pictures, a route of a Router. DDP cannot wait for them.

    Args:
        model: the encoder.
        features: of a row's columns, collated.
        freezes_unreached: whether to freeze them too; a warning then names them.
    """
    parameters = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameters[name] = parameter
    modules_run, used = _find_used_parameters(model, features, parameters)
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
        shown = ", ".join(unreached[:3])
        if len(unreached) > 3:
            shown += ", ..."
        logger.warning(
            f"{len(unreached)} parameters are frozen ({shown}): the first row of the training data "
            "does not reach them, and with several processes every update would have to. Train in "
            "one process if later rows do"
        )


def _find_used_parameters(
    model: SentenceTransformer,
    features: list[dict[str, Any]],
    parameters: dict[str, nn.Parameter],
) -> tuple[set[nn.Module], set[str]]:
    """Encode each column without dropout.

    Returns:
        The modules that ran, and the parameters that embeddings depend on.
    """
    modules_run: set[nn.Module] = set()
    used: set[str] = set()
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
    return modules_run, used
