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


def solve_linear_map(queries: Tensor, passages: Tensor, ridge: float) -> Tensor:
    """Return W (d, d) in float64 for the map q -> q + q W, by ridge regression.

    W = (X'X + ridge I)^-1 X'(P - X) minimises the sum of |x + x W - p|^2 over the pairs plus
    ridge |W|^2.

    Args:
        queries: X, vectors of the queries of n pairs, (n, d).
        passages: P, vectors of their passages, (n, d).
        ridge: above 0; the larger it is, the less the vectors move.
    """
    queries = queries.double()
    moments = queries.T @ queries + ridge * torch.eye(queries.shape[1], dtype=torch.float64)
    return torch.linalg.solve(moments, queries.T @ (passages.double() - queries))


def append_linear_map(model: SentenceTransformer, weights: Tensor) -> None:
    """Add the map q -> q + q W to the query route of a model, in place.

    The model gets one more module, a Router that has a Dense layer for queries and nothing for
    documents. sentence-transformers loads the saved model as any other. Queries are L2-normalised
    after the map if they were before.

    Args:
        model: a model with the embedding dimension d.
        weights: W, (d, d).
    """
    dimension = len(weights)
    dense = Dense(dimension, dimension, bias=False, activation_function=torch.nn.Identity())
    with torch.no_grad():
        # A linear layer multiplies by the transpose of its weights.
        matrix = torch.eye(dimension, dtype=torch.float64) + weights.double()
        dense.linear.weight.copy_(matrix.T)
    modules: list[Any] = [dense]
    if isinstance(list(get_tower(model, "query").children())[-1], Normalize):
        modules.append(Normalize())
    model.append(Router.for_query_document(modules, []).to(model.device))
