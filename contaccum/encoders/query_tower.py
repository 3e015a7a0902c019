"""A query tower of its own for a model whose documents are encoded already and stand still.

The document tower stays bit for bit as it is, so an index of its embeddings goes on serving. The
query tower is a copy of it, trained in full or by an adapter over the same weights.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Router
from torch import nn

from contaccum.encoders import adapters
from contaccum.encoders.towers import is_tied, tower
from contaccum.errors import ConfigError


def train_query_tower_alone(model: SentenceTransformer) -> None:
    """Freeze the document tower of a model; a tied model gets a copy of it for queries, in place.

    Raises:
        ConfigError: for a model whose towers share some weights and not others.
    """
    if is_tied(model):
        untie(model)
    query_tower = tower(model, "query")
    document_tower = tower(model, "document")
    document_tower.requires_grad_(False)
    if not any(weight.requires_grad for weight in query_tower.parameters()):
        raise ConfigError(
            "no weight of the query tower can be trained: its towers share all that is trained"
        )


def add_query_adapter(
    model: SentenceTransformer,
    r: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    target_modules: Sequence[str] | None = None,
) -> None:
    """Give the query tower of a model an adapter over the weights of the document tower, in place.

    Arguments and errors are those of `contaccum.encoders.adapters.add_adapter`.
    """
    if is_tied(model):
        untie(model)
    document_tower = tower(model, "document")
    document_tower.requires_grad_(False)
    query_tower = tower(model, "query")
    adapters.add_adapter(query_tower, r, alpha, dropout, target_modules)
    adapters.share_equal_frozen_weights(adapters.backbones(model))


def untie(model: SentenceTransformer) -> None:
    """Replace the modules of a tied model by a Router with a copy of them for queries, in place."""
    if isinstance(model[0], Router):
        raise ConfigError("this model has a Router whose routes are one tower: load it untied")
    document_modules: list[nn.Module] = list(model.children())
    query_modules = copy.deepcopy(document_modules)
    for _ in document_modules:
        del model[0]
    model.append(Router.for_query_document(query_modules, document_modules))  # type: ignore[arg-type]  # Modules
