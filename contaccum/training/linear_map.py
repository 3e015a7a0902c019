"""Training of linear maps of query vectors, in closed form and by gradients.

Document vectors stay as they are, so an index stays valid. `contaccum.encoders.linear_map` has the
equation of the closed form, and adds a map to a model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn.functional import normalize

from contaccum.bank.full_softmax import NO_ROW, DocumentBlock, compute_full_softmax_loss
from contaccum.data.records import read_passages, read_records
from contaccum.data.rows import RecordReport
from contaccum.data.sampling import text_ids
from contaccum.data.split import CORPUS_FILE
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.linear_map import solve_linear_map
from contaccum.retrieval.documents import PositiveRows, StoreDocuments
from contaccum.retrieval.encode import encode_texts
from contaccum.settings import DEFAULT_TEMPERATURE

MAP_FILE = "map.safetensors"
RIDGES = (1.0, 10.0, 100.0)  # of the maps in closed form
MAX_MAP_PAIRS = 20_000  # training pairs from which maps are learned
MAP_PENALTY = 0.01  # of the map by gradients

_MAP_ITERATIONS = 25  # of L-BFGS; more gain nothing on dev
_DOCUMENTS_PER_BLOCK = 8192
_QUERIES_PER_PASS = 1024  # limits the memory for the scores of all documents


def get_map_key(ridge: float | None) -> str:
    """Return the name of a map in `MAP_FILE`; None is the ridge of the map by gradients."""
    return "gradient" if ridge is None else f"{ridge:g}"


def write_linear_maps(
    base: DualEncoder,
    train_file: Path,
    documents: StoreDocuments,
    batch_size: int,
    folder: Path,
    ridges: Sequence[float] = RIDGES,
    seconds: float = 0.0,
    aligned: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Write the matrices of linear maps of query vectors to `MAP_FILE`, by `get_map_key`.

    There is one in closed form for each ridge, and one by gradients if there are seconds for it: q
    becomes q M with M = I + W. They are learned from the first training pairs, about
    `MAX_MAP_PAIRS`, without those whose passage has no vector. Vectors are L2-normalised if
    documents are compared by cosine.

    Args:
        train_file: the training pairs; beside it are the training documents.
        documents: the passages' vectors by the base model.
        aligned: vectors of the same documents by a new model and as given, (n, d) and (n, e). They
            are further pairs, and M = W in closed form; the map by gradients starts there.
    """
    pairs: list[tuple[str, str]] = []
    for record in read_records(train_file):
        pairs += [(record.query, passage) for passage in record.positives]
        if len(pairs) >= MAX_MAP_PAIRS:
            break
    has_vector = documents.contains(text_ids(passage for _, passage in pairs))
    pairs = [pair for pair, is_found in zip(pairs, has_vector, strict=True) if is_found]
    queries, passages = [query for query, _ in pairs], [passage for _, passage in pairs]
    vectors = torch.from_numpy(encode_texts(base, queries, "query", batch_size))
    x, p = vectors.double(), torch.from_numpy(documents.find_embeddings(passages)[1]).double()
    if documents.similarity == "cos":
        x, p = normalize(x), normalize(p)
    all_x, all_p = x, p
    origin = torch.eye(x.shape[1], dtype=torch.float64)
    if aligned is not None:
        all_x, all_p = torch.cat([x, aligned[0]]), torch.cat([p, aligned[1]])
        origin = torch.zeros(x.shape[1], p.shape[1], dtype=torch.float64)

    def solve(ridge: float) -> torch.Tensor:
        return origin + solve_linear_map(all_x, all_p - all_x @ origin, ridge)

    maps = {get_map_key(ridge): solve(ridge) for ridge in ridges}
    if seconds > 0:
        start = origin if aligned is None else solve(RIDGES[0])
        corpus = train_file.with_name(CORPUS_FILE)
        maps[get_map_key(None)] = train_map(
            x.float(), queries, passages, documents, corpus, start, seconds
        )
    save_file(maps, folder / MAP_FILE)


def train_map(
    vectors: torch.Tensor,
    queries: Sequence[str],
    passages: Sequence[str],
    documents: StoreDocuments,
    corpus: Path,
    start: torch.Tensor,
    seconds: float,
) -> torch.Tensor:
    """Return start + W, (d, e), for the W that minimises the exact softmax over documents.

    L-BFGS minimises the mean loss of the mapped queries (see `contaccum.bank.full_softmax`) plus
    `MAP_PENALTY` |W|^2, from W = 0 on, until the seconds are over.

    Args:
        vectors: the vectors of the queries of n pairs, (n, d).
        queries, passages: the texts of the pairs.
        corpus: the training documents. Only these are negatives: documents of held-out queries
            would be pushed away.
        start: (d, e).
    """
    ends_at = time.monotonic() + seconds
    positives = PositiveRows(documents, text_ids(queries), text_ids(passages))
    rows_of_pairs = positives.label_batch(list(queries), list(passages))
    corpus_ids = text_ids(
        passage.passage for passage in read_passages(corpus, RecordReport(), may_be_blank=True)
    )
    corpus_rows = torch.from_numpy(np.unique(documents.match_text_ids(corpus_ids)[1]))
    numbers = torch.full((len(documents) + 1,), NO_ROW)  # the last one is that of `NO_ROW`, -1
    numbers[corpus_rows] = torch.arange(len(corpus_rows))
    labels = numbers[rows_of_pairs]
    started = vectors @ start.float()
    weights = torch.zeros_like(start, dtype=torch.float32, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights], max_iter=_MAP_ITERATIONS, history_size=8, line_search_fn="strong_wolfe"
    )
    best: tuple[float, torch.Tensor] = (math.inf, weights.detach().clone())

    def read_corpus() -> Iterator[DocumentBlock]:
        for first in range(0, len(corpus_rows), _DOCUMENTS_PER_BLOCK):
            rows = corpus_rows[first : first + _DOCUMENTS_PER_BLOCK]
            yield DocumentBlock(first, documents.get_embeddings(rows))

    def compute_loss() -> torch.Tensor:
        nonlocal best
        optimizer.zero_grad()
        loss = MAP_PENALTY * weights.square().sum()
        loss.backward()
        for rows in torch.arange(len(vectors)).split(_QUERIES_PER_PASS):
            if time.monotonic() > ends_at:
                raise TimeoutError
            mapped = started[rows] + vectors[rows] @ weights
            part = compute_full_softmax_loss(
                normalize(mapped) if documents.similarity == "cos" else mapped,
                documents.get_embeddings(rows_of_pairs[rows, 0]),
                labels[rows],
                read_corpus(),
                DEFAULT_TEMPERATURE[documents.similarity],
            )
            part = part * len(rows) / len(vectors)
            part.backward()
            loss = loss.detach() + part.detach()
        best = min(best, (float(loss), weights.detach().clone()), key=lambda each: each[0])
        return loss

    with suppress(TimeoutError):
        optimizer.step(compute_loss)
    return start + best[1]
