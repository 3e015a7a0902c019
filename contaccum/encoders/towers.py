"""The towers of a SentenceTransformer, and whether they are one."""

from __future__ import annotations

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Router
from torch import nn


def tower(model: SentenceTransformer, task: str) -> nn.Module:
    """What encodes ``task``, "query" or "document": the route of a leading Router, else the whole model."""
    first = model[0]
    if not isinstance(first, Router):
        return model
    # Private, but the only way to ask for the route that forward takes: mappings, modalities and the default decide.
    route = first.sub_modules[str(first._resolve_route(task=task, modality="text"))]
    rest = list(model.children())[1:]
    return nn.Sequential(*route.children(), *rest) if rest else route


def is_tied(model: SentenceTransformer) -> bool:
    """Whether the two towers share their weights."""
    queries = {id(p) for p in tower(model, "query").parameters()}
    return queries == {id(p) for p in tower(model, "document").parameters()}
