"""A cross-encoder's opinion on candidates: it reads query and passage together."""

from __future__ import annotations

from typing import Any

import numpy as np

from contaccum.errors import UserError
from contaccum.mining.data import MiningData


def load_cross_encoder(name: str, device: str | None = None, trust_remote_code: bool = False) -> Any:
    """A CrossEncoder from a folder or a hub name.

    Raises:
        UserError: there is no such model, it cannot be loaded, or it was not trained to give one score for a pair.
    """
    from sentence_transformers import CrossEncoder

    from contaccum.encoders import loading

    with loading(name, trust_remote_code) as path:
        cross_encoder = CrossEncoder(path, device=device, trust_remote_code=trust_remote_code)
    config = cross_encoder.model.config
    if config.num_labels != 1:
        raise UserError(f"{name}: has {config.num_labels} outputs; mining needs a cross-encoder that gives one score")
    # sentence-transformers puts a fresh head on an encoder that has none, and its scores are noise.
    names = getattr(config, "architectures", None) or []
    if names and not any("For" in architecture for architecture in names):
        raise UserError(f"{name}: is {', '.join(names)}, not a cross-encoder that was trained to score pairs")
    return cross_encoder


def second_opinion(
    data: MiningData,
    rows: np.ndarray,
    places: np.ndarray,
    cross_encoder: Any,
    num_negatives: int,
    margin: float,
    seed: int | None,
    batch_size: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Of places (Q, m) those whose passage a cross-encoder scores low enough, and its scores: (Q, num_negatives) both.

    It reads candidates in the order in which they would be taken, and no more than it takes to fill up. Scores are
    logits: "3 points below the positive" has no meaning between 0 and 1.

    Args:
        rows: (Q, k), of the candidates.
        places: (Q, m), among these, best first, -1 for none.
        margin: how far below the lowest of a query's positives.
        seed: take candidates in random order, by this; None: the best first.

    Raises:
        UserError: the cross-encoder gives NaN or infinity.
    """
    import torch

    def read(numbers: np.ndarray, documents: np.ndarray) -> np.ndarray:
        pairs = [(data.queries[n], data.documents[row].passage) for n, row in zip(numbers, documents, strict=True)]
        identity = torch.nn.Identity()
        scores = cross_encoder.predict(pairs, batch_size=batch_size, activation_fn=identity, show_progress_bar=False)
        if not np.isfinite(scores).all():
            raise UserError("the cross-encoder gives NaN or infinity for some pair of query and passage")
        return np.asarray(scores, dtype=np.float64)

    counts = [len(of_query) for of_query in data.positives]
    of_positives = read(np.repeat(np.arange(len(places)), counts), np.concatenate(data.positives))
    bound = np.minimum.reduceat(of_positives, np.cumsum([0, *counts[:-1]])) - margin
    if seed is not None:
        for number, of_query in enumerate(places):
            left = of_query >= 0
            of_query[left] = np.random.default_rng((seed, number)).permutation(of_query[left])
    h, passed, second = num_negatives, np.zeros(places.shape, dtype=bool), np.full(places.shape, np.nan)
    # Rounds of as many as are wanted: most queries are full after one or two, and the rest is never read.
    for start in range(0, places.shape[1], h):
        line, column = np.nonzero((places[:, start : start + h] >= 0) & (passed.sum(axis=1) < h)[:, None])
        if len(line):
            column += start
            second[line, column] = read(line, rows[line, places[line, column]])
            passed[line, column] = second[line, column] <= bound[line]
    passed &= np.cumsum(passed, axis=1) <= h
    best = np.argsort(np.where(passed, places, rows.shape[1]), axis=1)[:, :h]  # places are in order of score
    passed, places, second = (np.take_along_axis(array, best, axis=1) for array in (passed, places, second))
    return np.where(passed, places, -1), np.where(passed, second, np.nan)
