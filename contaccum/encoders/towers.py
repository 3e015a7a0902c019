"""The query tower and the passage tower of a SentenceTransformer."""

from __future__ import annotations

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Router
from torch import nn


def tower(model: SentenceTransformer, task: str) -> nn.Module:
    """Return the module that encodes ``task``, which is "query" or "document".

    It is the task's route, with the modules that follow, if the model starts with a Router; else it
    is the whole model.
    """
    first = model[0]
    if not isinstance(first, Router):
        return model
    # Private, but the only way to get the route that forward takes. The route depends on mappings,
    # modalities and a default.
    route_name = first._resolve_route(task=task, modality="text")
    route = first.sub_modules[str(route_name)]
    following = list(model.children())[1:]
    if not following:
        return route
    return nn.Sequential(*route.children(), *following)


def is_tied(model: SentenceTransformer) -> bool:
    """Return whether the two towers share every weight."""
    query_weights = {id(weight) for weight in tower(model, "query").parameters()}
    passage_weights = {id(weight) for weight in tower(model, "document").parameters()}
    return query_weights == passage_weights
