"""The two towers of a SentenceTransformer: the encoder of queries and the encoder of passages.

The towers are tied if they share every weight. Untied towers are two routes of a Router, the module
of sentence-transformers that chooses a route by the task, "query" or "document".
"""

from __future__ import annotations

from typing import Literal

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Router
from torch import nn

Kind = Literal["query", "document"]
"""Kind of texts, and name of the tower that encodes them: a task in sentence-transformers."""


def get_tower(model: SentenceTransformer, task: str) -> nn.Module:
    """Return the module that encodes the texts of a task.

    If the model starts with a Router, the tower consists of the modules of the task's route and the
    modules after the Router. Otherwise the tower is the whole model.

    Args:
        task: "query" or "document".
    """
    first_module = model[0]
    if not isinstance(first_module, Router):
        return model
    # This method is private, but the only way to get the route that `Router.forward` uses: a task
    # without a route of its own gets the route that the Router's config maps it to, or the default.
    route_name = first_module._resolve_route(task=task, modality="text")
    route = first_module.sub_modules[str(route_name)]
    modules_after_router = list(model.children())[1:]
    if not modules_after_router:
        return route
    return nn.Sequential(*route.children(), *modules_after_router)


def is_tied(model: SentenceTransformer) -> bool:
    """Return whether the two towers share every weight."""
    query_weights = {id(weight) for weight in get_tower(model, "query").parameters()}
    passage_weights = {id(weight) for weight in get_tower(model, "document").parameters()}
    return query_weights == passage_weights
