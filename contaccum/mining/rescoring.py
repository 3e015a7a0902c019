"""A cross-encoder's opinion on candidates: it reads query and passage together.

Scores are logits, whatever the model's own last step: "3 points below the positive" has no meaning between 0 and 1.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from contaccum.errors import ConfigError, UserError
from contaccum.mining.pool import MiningData


class CrossEncoderScores:
    """A `filters.Rescorer` with sentence-transformers' CrossEncoder.

    Args:
        cross_encoder: a CrossEncoder with one output.
        batch_size: pairs at a time.

    Raises:
        ConfigError: a model with several outputs, which is a classifier and gives no score.
    """

    def __init__(self, cross_encoder: Any, data: MiningData, batch_size: int = 32, show_progress: bool = True) -> None:
        check_cross_encoder(cross_encoder)
        self.cross_encoder, self.data = cross_encoder, data
        self.batch_size, self.show_progress = batch_size, show_progress
        self.seconds = 0.0

    def positive_scores(self, queries: np.ndarray) -> np.ndarray:
        """The lowest score of each query's positives: (q,) -> (q,)."""
        if not len(queries):
            return np.empty(0)
        counts = [len(self.data.positives[number]) for number in queries]
        rows = [row for number in queries for row in self.data.positives[number]]
        scores = self.scores(np.repeat(queries, counts), np.array(rows, dtype=np.int64))
        return np.minimum.reduceat(scores, np.cumsum([0, *counts[:-1]]))

    def scores(self, queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Logits of pairs of a query's number and a passage's row: (n,), (n,) -> float64 (n,).

        Raises:
            UserError: the model gives NaN or infinity.
        """
        import torch

        started = time.perf_counter()
        pairs = [
            (self.data.queries[number], self.data.documents[row].passage)
            for number, row in zip(queries.tolist(), rows.tolist(), strict=True)
        ]
        scores = self.cross_encoder.predict(
            pairs, batch_size=self.batch_size, show_progress_bar=self.show_progress, activation_fn=torch.nn.Identity()
        )
        self.seconds += time.perf_counter() - started
        if not np.isfinite(scores).all():
            raise UserError("the cross-encoder gives NaN or infinity for some pair of query and passage")
        return np.asarray(scores, dtype=np.float64)


def check_cross_encoder(cross_encoder: Any) -> None:
    """Raise `ConfigError` for a model that gives other than one number for a pair."""
    outputs = getattr(cross_encoder, "num_labels", 1)
    if outputs != 1:
        raise ConfigError(f"the cross-encoder has {outputs} outputs; mining needs one that gives one score for a pair")


def load_cross_encoder(name: str | os.PathLike[str], device: str | None = None, trust_remote_code: bool = False) -> Any:
    """A CrossEncoder from a folder or a hub name.

    Raises:
        UserError: there is no such model, or it cannot be loaded.
        ConfigError: see `check_cross_encoder`.
    """
    from sentence_transformers import CrossEncoder

    from contaccum.encoders import require_model
    from contaccum.untrusted import check_model_folder, refusing_code

    path = os.path.expanduser(os.fspath(name))
    require_model(path)
    check_model_folder(path, trust_remote_code)
    try:
        with refusing_code(path):
            cross_encoder = CrossEncoder(path, device=device, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: not a cross-encoder that can be loaded ({reason})") from error
    check_cross_encoder(cross_encoder)
    config = getattr(getattr(cross_encoder, "model", None), "config", None)
    architectures = getattr(config, "architectures", None) or []
    # sentence-transformers puts a fresh head on an encoder that has none, and its scores are noise.
    if architectures and not any("For" in name for name in architectures):
        raise UserError(f"{path}: is {', '.join(architectures)}, not a cross-encoder that was trained to score pairs")
    return cross_encoder
