"""What DDP and FSDP ask of a model that is called once per column: nothing here knows the loss or the bank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import CachedMultipleNegativesRankingLoss, MultipleNegativesRankingLoss
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from contaccum.encoders import is_tied
from contaccum.errors import ConfigError
from contaccum.losses import ContAccumLoss

if TYPE_CHECKING:
    from contaccum.training.arguments import ContAccumTrainingArguments

_OF_EMBEDDINGS = (ContAccumLoss, MultipleNegativesRankingLoss, CachedMultipleNegativesRankingLoss)


def reads_embeddings(loss: Any) -> bool:
    """Whether a loss is known to read sentence embeddings and nothing else of the model."""
    return isinstance(loss, _OF_EMBEDDINGS)


def settle_unused_parameters(args: ContAccumTrainingArguments, model: SentenceTransformer, loss: Any) -> None:
    """Tell DDP not to look for unused parameters: it looks after every column, and at one column a time.

    A parameter of the query tower is unused by the last column, and DDP would take its gradient to be ready before it
    is. For losses that read sentence embeddings and nothing else, :func:`freeze_unused` does that work. Losses with a
    gradient cache call the model once per backward pass, where DDP's search is right, and needed.

    Raises:
        ConfigError: the arguments ask DDP to look, and the model has two towers.
    """
    cached = isinstance(loss, CachedMultipleNegativesRankingLoss) or getattr(loss, "uses_gradient_cache", False)
    if args.world_size == 1 or cached:
        return
    if args.ddp_find_unused_parameters and not is_tied(model):
        raise ConfigError(
            "ddp_find_unused_parameters=true with two towers: DDP looks after each column, and takes the other tower "
            "for unused. Drop it"
        )
    if args.ddp_find_unused_parameters is None and (reads_embeddings(loss) or not is_tied(model)):
        args.ddp_find_unused_parameters = False


def freeze_unused(model: SentenceTransformer) -> list[str]:
    """Stop asking for gradients of parameters that no sentence embedding depends on, such as BERT's pooler.

    They would never move anyway, and without them DDP waits for no gradient that does not come. One text is encoded for
    each task, without dropout.

    Returns:
        their names.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        used: set[str] = set()
        for task in ("query", "document"):
            features = model.preprocess(["a"], task=task)
            features = {k: v.to(model.device) if isinstance(v, Tensor) else v for k, v in features.items()}
            with torch.enable_grad():
                embedding = model(features)["sentence_embedding"]
            gradients = torch.autograd.grad(embedding.sum(), list(parameters.values()), allow_unused=True)
            used |= {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}
    finally:
        for module, training in modes:
            module.training = training
    unused = [name for name in parameters if name not in used]
    for name in unused:
        parameters[name].requires_grad_(False)
    return unused


@contextmanager
def whole_parameters(model: nn.Module, state: dict[str, Tensor] | None) -> Iterator[None]:
    """For a while, the parameters of a model that FSDP shards are those of ``state``, whole, to be saved.

    Args:
        state: the full state of the model, by name; None: it is not sharded, and nothing is done.
    """
    places = [
        (module, key, name)
        for prefix, module in model.named_modules()
        for key, parameter in module._parameters.items()
        if isinstance(parameter, DTensor) and (name := f"{prefix}.{key}" if prefix else key) in (state or {})
    ]
    sharded = [(module, key, module._parameters[key]) for module, key, _ in places]
    try:
        for module, key, name in places:
            assert state is not None
            module._parameters[key] = nn.Parameter(state[name], requires_grad=False)
        yield
    finally:
        for module, key, parameter in sharded:
            module._parameters[key] = parameter


def load_whole(model: nn.Module, state: dict[str, Any]) -> None:
    """Load a full state, the same on all ranks, into a model that FSDP shards."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))


def whole_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer over shards, whole, by parameters' names; all ranks call it, the first gets it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    # A forward pass without a backward, a probe's, leaves the outermost layers whole: strangers to the optimizer.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(get_optimizer_state_dict(model, _bare(optimizer), options=options))


def load_whole_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what :func:`whole_optimizer_state` gave, the same on all ranks."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    set_optimizer_state_dict(model, _bare(optimizer), state, options=StateDictOptions(full_state_dict=True))


def _bare(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
