"""Training of the query tower alone, with a frozen document tower.

The document tower does not change, so an index of its embeddings can still be used after training.
A tied model has one tower for queries and documents; `untie` makes a query tower by copying it.
Either all weights of the query tower are trained, or an adapter that is added to the weights that
it shares with the document tower.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Router
from torch import nn

from contaccum.encoders import adapters
from contaccum.encoders.towers import get_tower, is_tied
from contaccum.errors import ConfigError


def train_query_tower_alone(model: SentenceTransformer) -> None:
    """Freeze the document tower of a model, in place.

    A tied model first gets a separate query tower, a copy of its only tower. Without an adapter,
    and if it shares no weight with the document tower, the weights of the query tower become
    float32, because in bfloat16 or float16 most of an update would be lost to rounding. The
    document tower keeps its dtype, which a store may depend on.
    """
    if is_tied(model):
        untie(model)
    query_tower = get_tower(model, "query")
    document_tower = get_tower(model, "document")
    document_tower.requires_grad_(False)
    document_weights = {id(weight) for weight in document_tower.parameters()}
    shares_weights = any(id(weight) in document_weights for weight in query_tower.parameters())
    if not shares_weights and not adapters.has_adapter(query_tower):
        query_tower.float()


def add_query_adapter(
    model: SentenceTransformer,
    r: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    target_modules: Sequence[str] | None = None,
) -> None:
    """Add an adapter to the query tower of a model, over the weights of the document tower.

    The model is changed in place. For arguments and errors see
    `contaccum.encoders.adapters.add_adapter`.
    """
    if is_tied(model):
        untie(model)
    document_tower = get_tower(model, "document")
    document_tower.requires_grad_(False)
    query_tower = get_tower(model, "query")
    adapters.add_adapter(query_tower, r, alpha, dropout, target_modules)
    adapters.share_equal_frozen_weights(adapters.get_backbones(model))


def untie(model: SentenceTransformer) -> None:
    """Replace the modules of a tied model by a Router, in place.

    The Router has the modules as its document route and a copy of them as its query route.

    Raises:
        ConfigError: if the model has a Router already.
    """
    if isinstance(model[0], Router):
        raise ConfigError(
            "both routes of this model's Router are the same tower: "
            "use a model without a Router, or with two separate towers"
        )
    document_modules: list[nn.Module] = list(model.children())
    query_modules = copy.deepcopy(document_modules)
    for _ in document_modules:
        del model[0]
    # The type is ignored because children() declares nn.Module, and Router a subclass of it.
    router = Router.for_query_document(query_modules, document_modules)  # type: ignore[arg-type]
    model.append(router)
