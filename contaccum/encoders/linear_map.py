"""A linear map of query vectors: the cheapest training, in closed form and without gradients.

The map moves the vector of each training query towards that of its passage. Document vectors stay
as they are, so an index stays valid.
"""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Router
from torch import Tensor

from contaccum.encoders.settings import get_tower


def solve_linear_map(queries: Tensor, targets: Tensor, ridge: float) -> Tensor:
    """Return W (d, e) in float64, by ridge regression from queries to targets.

    W = (X'X + ridge I)^-1 X'T minimises the sum of |x W - t|^2 over the pairs plus ridge |W|^2.
    For the map q -> q + q W, the targets are the differences of passages and queries.

    Args:
        queries: X, vectors of the queries of n pairs, (n, d).
        targets: T, (n, e).
        ridge: above 0; the larger it is, the smaller W.
    """
    queries = queries.double()
    moments = queries.T @ queries + ridge * torch.eye(queries.shape[1], dtype=torch.float64)
    return torch.linalg.solve(moments, queries.T @ targets.double())


def append_linear_map(model: SentenceTransformer, matrix: Tensor) -> None:
    """Add the map q -> q M, with M (d, e), to the query route of a model, in place.

    It is a Router that has a Dense layer for queries and nothing for documents. Queries are
    L2-normalised after the map if they were before.
    """
    width, dimension = matrix.shape
    dense = Dense(width, dimension, bias=False, activation_function=torch.nn.Identity())
    with torch.no_grad():
        # A linear layer multiplies by the transpose of its weights.
        dense.linear.weight.copy_(matrix.T)
    modules: list[Any] = [dense]
    if isinstance(list(get_tower(model, "query").children())[-1], Normalize):
        modules.append(Normalize())
    model.append(Router.for_query_document(modules, []).to(model.device))
