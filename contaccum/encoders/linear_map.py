"""A linear map of query vectors: the cheapest training, in closed form or by gradients.

The map moves the vector of each training query towards that of its passage. Document vectors stay
as they are, so an index stays valid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Router
from torch import Tensor
from torch.nn.functional import normalize

from contaccum.bank.full_softmax import DocumentBlock, compute_full_softmax_loss
from contaccum.encoders.settings import get_tower

_MAX_ITERATIONS = 25  # of L-BFGS; more of them gain nothing on dev
_QUERIES_PER_PASS = 1024  # limits the memory for their scores


def solve_linear_map(
    queries: Tensor, passages: Tensor, ridge: float, start: Tensor | None = None
) -> Tensor:
    """Return W (d, e) in float64 for the map q -> q S + q W, by ridge regression.

    W = (X'X + ridge I)^-1 X'(P - X S) minimises the sum of |x S + x W - p|^2 over the pairs plus
    ridge |W|^2.

    Args:
        queries: X, vectors of the queries of n pairs, (n, d).
        passages: P, vectors of their passages, (n, e).
        ridge: above 0; the larger it is, the less the vectors move.
        start: S, (d, e); None: the identity, if queries and passages have one model.
    """
    queries = queries.double()
    moments = queries.T @ queries + ridge * torch.eye(queries.shape[1], dtype=torch.float64)
    started = queries if start is None else queries @ start
    return torch.linalg.solve(moments, queries.T @ (passages.double() - started))


def train_linear_map(
    queries: Tensor,
    positives: Tensor,
    labels: Tensor,
    read_documents: Callable[[], Iterable[DocumentBlock]],
    penalty: float,
    temperature: float,
    has_time: Callable[[], bool],
    start: Tensor | None = None,
) -> Tensor:
    """Return W (d, e) in float64 for the map q -> q S + q W, by the exact softmax over documents.

    L-BFGS minimises the mean loss of the mapped, L2-normalised queries (see
    `contaccum.bank.full_softmax`) plus penalty |W|^2, from W = 0 on.

    Args:
        queries, positives: L2-normalised vectors of the n pairs, (n, d) and (n, e).
        labels: int64 (n, p), numbers of the documents that are no negatives of a query, padded.
        read_documents: returns all documents, L2-normalised, in blocks.
        has_time: is called before each pass over the documents. False ends the training.
        start: S, see `solve_linear_map`.
    """
    started = queries if start is None else queries @ start.to(queries)
    weights = torch.zeros(queries.shape[1], positives.shape[1], requires_grad=True)
    best = weights.detach().clone()
    best_loss = math.inf
    optimizer = torch.optim.LBFGS(
        [weights], max_iter=_MAX_ITERATIONS, history_size=8, line_search_fn="strong_wolfe"
    )

    def compute_loss() -> Tensor:
        nonlocal best, best_loss
        optimizer.zero_grad()
        loss = penalty * weights.square().sum()
        loss.backward()
        for rows in torch.arange(len(queries)).split(_QUERIES_PER_PASS):
            if not has_time():
                raise TimeoutError
            mapped = normalize(started[rows] + queries[rows] @ weights)
            part = compute_full_softmax_loss(
                mapped, positives[rows], labels[rows], read_documents(), temperature
            )
            part = part * len(rows) / len(queries)
            part.backward()
            loss = loss.detach() + part.detach()
        if loss < best_loss:
            best = weights.detach().clone()
            best_loss = float(loss)
        return loss

    with suppress(TimeoutError):
        optimizer.step(compute_loss)
    return best.double()


def append_linear_map(model: SentenceTransformer, matrix: Tensor) -> None:
    """Add the map q -> q M to the query route of a model, in place.

    The model gets one more module, a Router that has a Dense layer for queries and nothing for
    documents. sentence-transformers loads the saved model as any other. Queries are L2-normalised
    after the map if they were before.

    Args:
        model: a model with the embedding dimension d.
        matrix: M, (d, e).
    """
    num_inputs, num_outputs = matrix.shape
    dense = Dense(num_inputs, num_outputs, bias=False, activation_function=torch.nn.Identity())
    with torch.no_grad():
        # A linear layer multiplies by the transpose of its weights.
        dense.linear.weight.copy_(matrix.T)
    modules: list[Any] = [dense]
    if isinstance(list(get_tower(model, "query").children())[-1], Normalize):
        modules.append(Normalize())
    model.append(Router.for_query_document(modules, []).to(model.device))
