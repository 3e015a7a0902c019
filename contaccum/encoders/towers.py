"""The query tower and the passage tower of a SentenceTransformer."""

from __future__ import annotations

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Router
from torch import nn


def get_tower(model: SentenceTransformer, task: str) -> nn.Module:
    """Return the module that encodes the texts of a task.

    If the model starts with a Router, the tower is the task's route and the modules after the
    Router. Otherwise the tower is the whole model.

    Args:
        task: "query" or "document".
    """
    first = model[0]
    if not isinstance(first, Router):
        return model
    # This method is private, but the only way to get the route that forward uses. The route
    # depends on mappings, modalities and a default.
    route_name = first._resolve_route(task=task, modality="text")
    route = first.sub_modules[str(route_name)]
    following = list(model.children())[1:]
    if not following:
        return route
    return nn.Sequential(*route.children(), *following)


def is_tied(model: SentenceTransformer) -> bool:
    """Return whether the two towers share every weight."""
    query_weights = {id(weight) for weight in get_tower(model, "query").parameters()}
    passage_weights = {id(weight) for weight in get_tower(model, "document").parameters()}
    return query_weights == passage_weights
