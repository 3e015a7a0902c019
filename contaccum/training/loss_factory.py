"""From ``args.method`` to a loss, and what it asks of columns and parameters. Nothing here trains."""

from __future__ import annotations

import logging
from typing import Any

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

from contaccum.data.sampling import LABELS
from contaccum.encoders.dual_encoder import is_tied
from contaccum.errors import ConfigError
from contaccum.losses.cached import CachedContAccumLoss
from contaccum.losses.contaccum import ContAccumLoss
from contaccum.losses.probe import without_dropout
from contaccum.training.arguments import ContAccumTrainingArguments

logger = logging.getLogger(__name__)

Columns = dict[str | None, list[str]]
"""Text columns in order, by the name of the set; None for a single one."""


def make_loss(
    model: SentenceTransformer, args: ContAccumTrainingArguments, guide: SentenceTransformer | None = None
) -> ContAccumLoss | MatryoshkaLoss:
    """The loss that ``args.method`` names. A baseline's is the same without a bank, and so it has every other setting.

    It is then MultipleNegativesRankingLoss, or the cached one, to the last digits, but for masks and centring. With
    ``args.matryoshka_dims`` it is the sum over these sizes; raises `ConfigError` where the model has not so many.
    """
    dims, dimension = args.matryoshka_dims, model.get_embedding_dimension()
    if dims and dimension and max(dims) > dimension:
        raise ConfigError(f"matryoshka_dims={dims}: the model's embeddings have {dimension} dimensions; name no more")
    own = "dot" if str(getattr(model, "similarity_fn_name", "cosine")).endswith("dot") else "cos"
    settings = args.loss_settings(own)
    settings["guide"] = guide
    settings["scale"] = 1.0 / settings.pop("temperature")
    settings["similarity_fct"] = cos_sim if settings.pop("similarity") == "cos" else dot_score
    if args.caches:
        loss: ContAccumLoss = CachedContAccumLoss(model, mini_batch_size=args.pairs_per_micro_batch, **settings)
    else:
        loss = ContAccumLoss(model, **settings)
    return MatryoshkaLoss(model, loss, dims) if dims else loss


def innermost(loss: Any) -> Any:
    """What a MatryoshkaLoss calls for each size, or the loss itself."""
    return loss.loss if isinstance(loss, MatryoshkaLoss) else loss


def columns_by_set(dataset: Any) -> Columns:
    """The text columns of a data set, or of each of several."""
    parts = dict(dataset) if isinstance(dataset, dict) else {None: dataset}
    found = {name: list(getattr(part, "column_names", None) or []) for name, part in parts.items()}
    texts = {name: [column for column in columns if column not in LABELS] for name, columns in found.items()}
    return {name: columns for name, columns in texts.items() if columns}


def take_roles(args: ContAccumTrainingArguments, model: SentenceTransformer, columns: Columns) -> None:
    """First column: query; the others: documents; with the model's own prompts. By set, where names mean two things."""
    by_set: dict[Any, Any] = {
        name: {column: "document" if place else "query" for place, column in enumerate(names)}
        for name, names in columns.items()
    }
    flat = {column: role for roles in by_set.values() for column, role in roles.items()}
    agree = all(roles.items() <= flat.items() for roles in by_set.values())
    if not args.router_mapping:
        args.router_mapping = flat if agree else by_set
    if args.prompts is None:
        roles = {None: flat} if agree else by_set
        prompts: dict[Any, Any] = {
            name: {column: model.prompts[role] for column, role in of_set.items() if model.prompts.get(role)}
            for name, of_set in roles.items()
        }
        args.prompts = (prompts[None] if agree else prompts) or None


def check_columns(args: ContAccumTrainingArguments, loss: Any, columns: Columns) -> None:
    """Refuse data that has no positives, or nothing that could be a negative; raises `ConfigError` naming the set."""
    loss = innermost(loss)
    in_batch = isinstance(loss, ContAccumLoss) and not loss.settings.bank_size
    alone = args.per_device_train_batch_size == 1 and not (args.gathers or args.finds_micro_batch)
    for name, names in columns.items():
        of = "the training data" if name is None else f"training set {name!r}"
        if len(names) < 2:
            raise ConfigError(f"{of} has only the column {names[0]!r}: it needs a query and a positive")
        if args.distill and len(names) == 2:
            raise ConfigError(f"distill={args.distill} with no hard negatives in {of}: add some, or drop distill")
        if in_batch and len(names) == 2 and alone:
            raise ConfigError(
                f"method={args.method} with per_device_train_batch_size=1 and no hard negatives in {of}: a query has "
                "no negative. Raise the batch size, or set method=contaccum"
            )


def reads_embeddings_alone(loss: Any) -> bool:
    """Return whether a loss is known to read sentence embeddings and nothing else of the model."""
    known = (ContAccumLoss, MultipleNegativesRankingLoss, CachedMultipleNegativesRankingLoss)
    return isinstance(innermost(loss), known)


def settle_search_of_unused_parameters(args: ContAccumTrainingArguments, model: SentenceTransformer, loss: Any) -> None:
    """Make DDP wait for the gradients that come, and for no others. The accelerator reads it when it is made.

    DDP looks for unused parameters after every column, and takes the query tower to be unused by the last. For losses
    that read sentence embeddings and nothing else, `freeze_unused` does that work, on any number of ranks. Losses
    with a gradient cache call the model once per backward pass, where DDP's search is right, and needed.
    """
    if not uses_gradient_cache(innermost(loss)) and (reads_embeddings_alone(loss) or not is_tied(model)):
        args.ddp_find_unused_parameters = False


def freeze_unused(model: SentenceTransformer, features: list[dict[str, Any]], freezes_unreached: bool = False) -> None:
    """Freeze parameters that take part in forward passes but in no sentence embedding, such as BERT's pooler.

    Parameters of modules that do not run for these ``features`` stay as they are, because other rows may reach them: a
    tower for pictures, a route of a Router. DDP cannot wait for such parameters; with ``freezes_unreached`` they are
    frozen too, and a warning names them.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    ran, used = _find_used_parameters(model, features, parameters)
    unused = [name for name in parameters if name not in used]
    unreached = []
    for name in unused:
        module = model.get_submodule(name.rpartition(".")[0])
        if module not in ran:
            unreached.append(name)
    if unreached and freezes_unreached:
        shown = ", ".join(unreached[:3]) + (", ..." if len(unreached) > 3 else "")
        logger.warning(
            f"{len(unreached)} parameters are frozen ({shown}): the first row of the training data does not reach "
            "them, and with several processes every update would have to. Train in one process if later rows do"
        )
        unreached = []
    for name in set(unused) - set(unreached):
        parameters[name].requires_grad_(False)


def _find_used_parameters(
    model: SentenceTransformer, features: list[dict[str, Any]], parameters: dict[str, nn.Parameter]
) -> tuple[set[nn.Module], set[str]]:
    """Encode each column without dropout: the modules that ran, and the parameters that embeddings depend on."""
    ran: set[nn.Module] = set()
    used: set[str] = set()
    hooks = [module.register_forward_pre_hook(lambda module, _: ran.add(module)) for module in model.modules()]
    try:
        for column in features:
            on_device = {key: x.to(model.device) if isinstance(x, Tensor) else x for key, x in column.items()}
            with torch.enable_grad(), without_dropout(model):
                embedding = model(on_device)["sentence_embedding"]
            gradients = torch.autograd.grad(embedding.sum(), list(parameters.values()), allow_unused=True)
            used |= {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}
    finally:
        for hook in hooks:
            hook.remove()
    return ran, used
