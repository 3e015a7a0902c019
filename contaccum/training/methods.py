"""From ``args.method`` to a loss, and what it asks of columns and parameters. Nothing here trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import CachedMultipleNegativesRankingLoss, MultipleNegativesRankingLoss
from sentence_transformers.util import cos_sim, dot_score
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from contaccum.data.sampling import LABELS
from contaccum.encoders import is_tied
from contaccum.errors import ConfigError
from contaccum.losses import ContAccumLoss
from contaccum.training.arguments import ContAccumTrainingArguments


def make_loss(model: SentenceTransformer, args: ContAccumTrainingArguments) -> nn.Module:
    """The loss that ``args.method`` names; the baselines are sentence-transformers' own."""
    own = "dot" if str(getattr(model, "similarity_fn_name", "cosine")).endswith("dot") else "cos"
    settings = args.loss_settings(own)
    common = {
        "scale": 1.0 / settings.pop("temperature"),
        "similarity_fct": cos_sim if settings.pop("similarity") == "cos" else dot_score,
        "gather_across_devices": settings.pop("gather_across_devices"),
    }
    if args.keeps_bank:
        return ContAccumLoss(model, **common, **settings)
    if args.method == "grad_cache":
        return CachedMultipleNegativesRankingLoss(model, mini_batch_size=args.pairs_per_micro_batch, **common)
    return MultipleNegativesRankingLoss(model, **common)


# Columns -------------------------------------------------------------------------------------------------------------


def columns_by_set(dataset: Any) -> dict[str | None, list[str]]:
    """Text columns in order, by the name of the set; None for a single one."""
    parts = dict(dataset) if isinstance(dataset, dict) else {None: dataset}
    found = {name: list(getattr(part, "column_names", None) or []) for name, part in parts.items()}
    texts = {name: [column for column in columns if column not in LABELS] for name, columns in found.items()}
    return {name: columns for name, columns in texts.items() if columns}


def take_roles(args: ContAccumTrainingArguments, model: SentenceTransformer, dataset: Any, evaluated: Any) -> None:
    """First column: query; the others: documents; with the model's own prompts. By set, where names mean two things.

    Raises:
        ConfigError: prompts or routes by set, and data for evaluation that is not in sets.
    """
    roles = {
        name: {column: "document" if place else "query" for place, column in enumerate(columns)}
        for name, columns in columns_by_set(dataset).items()
    }
    flat: dict[str, str] = {}
    agree = all(flat.setdefault(column, role) == role for of_set in roles.values() for column, role in of_set.items())
    prompts = {
        name: {column: prompt for column, role in of_set.items() if (prompt := model.prompts.get(role))}
        for name, of_set in roles.items()
    }
    settled: dict[str, Any] = {
        "router_mapping": args.router_mapping or (flat if agree else roles),
        "prompts": {column: prompt for of_set in prompts.values() for column, prompt in of_set.items()}
        if agree
        else prompts,
    }
    settled["prompts"] = (settled["prompts"] or None) if args.prompts is None else args.prompts
    for name, value in settled.items():
        nested = isinstance(value, dict) and any(isinstance(of_set, dict) for of_set in value.values())
        if nested and evaluated is not None and not isinstance(evaluated, dict):
            raise ConfigError(
                f"{name} by training set with one eval_dataset, which is of none of them: give it as a DatasetDict by "
                "the names of the training sets"
            )
        setattr(args, name, value)


def check_columns(args: ContAccumTrainingArguments, loss: Any, dataset: Any) -> None:
    """Refuse data that has no positives, or nothing that could be a negative.

    Raises:
        ConfigError: naming the set, where there are several.
    """
    baseline = isinstance(loss, (MultipleNegativesRankingLoss, CachedMultipleNegativesRankingLoss))
    alone = args.per_device_train_batch_size == 1 and not (args.gathers or args.finds_micro_batch)
    widths = {}
    for name, columns in columns_by_set(dataset).items():
        of = "the training data" if name is None else f"training set {name!r}"
        widths[name] = len(columns) - 2
        if len(columns) < 2:
            raise ConfigError(f"{of} has only the column {columns[0]!r}: it needs a query and a positive")
        if baseline and len(columns) == 2 and alone:
            raise ConfigError(
                f"method={args.method} with per_device_train_batch_size=1 and no hard negatives in {of}: a query has "
                "no negative and the loss is always 0. Raise the batch size, add hard negatives, or set "
                "method=contaccum"
            )
    if args.gathers and args.world_size > 1 and len(set(widths.values())) > 1:
        raise ConfigError(
            f"gather_across_devices=true with training sets of different numbers of hard negatives, {widths}: devices "
            "train on different sets at a time. Give all the same num_hard_negatives, or drop gather_across_devices"
        )


# Parameters ----------------------------------------------------------------------------------------------------------


def settle_parameters(args: ContAccumTrainingArguments, model: SentenceTransformer, loss: Any) -> None:
    """Make DDP wait for the gradients that come, and for no others.

    DDP looks for unused parameters after every column, one at a time, and takes the query tower to be unused by the
    last. For losses that read sentence embeddings and nothing else, :func:`freeze_unused` does that work; on any number
    of ranks, so that the optimizer's groups are the same. Losses with a gradient cache call the model once per backward
    pass, where DDP's search is right, and needed.

    Raises:
        ConfigError: the arguments ask DDP to look, and the model has two towers.
    """
    cached = isinstance(loss, CachedMultipleNegativesRankingLoss)
    known = cached or isinstance(loss, (ContAccumLoss, MultipleNegativesRankingLoss))
    if known:
        freeze_unused(model)
    if args.world_size == 1 or cached:
        return
    if args.ddp_find_unused_parameters and not is_tied(model):
        raise ConfigError(
            "ddp_find_unused_parameters=true with two towers: DDP looks after each column, and takes the other tower "
            "for unused. Drop it"
        )
    if args.ddp_find_unused_parameters is None and (known or not is_tied(model)):
        args.ddp_find_unused_parameters = False


def freeze_unused(model: SentenceTransformer) -> list[str]:
    """Stop asking for gradients of parameters that no sentence embedding depends on, such as BERT's pooler.

    They would never move anyway. One text is encoded for each task, without dropout.

    Returns:
        their names.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    modes = [(module, module.training) for module in model.modules()]
    used: set[str] = set()
    model.eval()
    for task in ("query", "document"):
        features = model.preprocess(["a"], task=task)
        features = {key: x.to(model.device) if isinstance(x, Tensor) else x for key, x in features.items()}
        with torch.enable_grad():
            embedding = model(features)["sentence_embedding"]
        gradients = torch.autograd.grad(embedding.sum(), list(parameters.values()), allow_unused=True)
        used |= {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}
    for module, training in modes:
        module.training = training
    unused = [name for name in parameters if name not in used]
    for name in unused:
        parameters[name].requires_grad_(False)
    return unused


@contextmanager
def whole_parameters(model: nn.Module, state: dict[str, Tensor]) -> Iterator[None]:
    """For a while, the parameters of a model that FSDP shards are those of its full ``state``, to be saved."""
    places = [
        (module, key, name)
        for prefix, module in model.named_modules()
        for key, parameter in module._parameters.items()
        if isinstance(parameter, DTensor) and (name := f"{prefix}.{key}" if prefix else key) in state
    ]
    sharded = [(module, key, module._parameters[key]) for module, key, _ in places]
    try:
        for module, key, name in places:
            module._parameters[key] = nn.Parameter(state[name], requires_grad=False)
        yield
    finally:
        for module, key, parameter in sharded:
            module._parameters[key] = parameter


def load_whole(model: nn.Module, state: dict[str, Any]) -> None:
    """Load a full state, the same on all ranks, into a model that FSDP shards."""
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
