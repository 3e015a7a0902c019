"""Cross-encoders: a second score for candidates that have passed the other selection rules.

A cross-encoder reads query and passage together. Its scores are better than those of the search,
and show more often that a candidate is a relevant passage which was not judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from contaccum.errors import UserError


class Reranking(NamedTuple):
    """The candidates of a query whose cross-encoder scores are low enough for negatives.

    Attributes:
        positions: positions of these candidates among all candidates, int64 (c,).
        scores: their logits, float32 (c,).
        positive_scores: logits of the query's positives, float32 (p,).
    """

    positions: np.ndarray
    scores: np.ndarray
    positive_scores: np.ndarray


@dataclass(frozen=True)
class CandidateFilter:
    """A filter that drops candidates which a cross-encoder scores too close to the positives.

    Scores are logits, because a distance such as 3 has no meaning for scores between 0 and 1.

    Attributes:
        cross_encoder: a sentence-transformers CrossEncoder.
        margin: a candidate is kept if its logit is at least this much below the lowest logit of the
            query's positives.
        num_negatives: number of candidates that are needed. When so many are kept, the next
            candidates are not scored.
        batch_size: largest number of text pairs that the cross-encoder scores at once. They are
            pairs of one query, with at most ``num_negatives`` candidates.
    """

    cross_encoder: Any
    margin: float
    num_negatives: int
    batch_size: int

    def apply(self, query: str, positives: list[str], candidates: list[str]) -> Reranking:
        """Score candidates in their order, in groups, until at least `num_negatives` are kept.

        Args:
            query: text of the query.
            positives: texts of its known positives.
            candidates: texts of the candidates, in the order of preference.
        """
        positive_scores = self._score(query, positives)
        highest = positive_scores.min() - self.margin
        positions: list[int] = []
        kept_scores: list[float] = []
        for start in range(0, len(candidates), self.num_negatives):
            if len(positions) >= self.num_negatives:
                break
            scores = self._score(query, candidates[start : start + self.num_negatives])
            for offset in np.flatnonzero(scores <= highest).tolist():
                positions.append(start + offset)
                kept_scores.append(float(scores[offset]))
        return Reranking(
            np.array(positions, dtype=np.int64),
            np.array(kept_scores, dtype=np.float32),
            positive_scores,
        )

    def _score(self, query: str, passages: list[str]) -> np.ndarray:
        """Return the logits of a query with some passages."""
        return self.cross_encoder.predict(
            [(query, passage) for passage in passages],
            batch_size=self.batch_size,
            activation_fn=torch.nn.Identity(),
            show_progress_bar=False,
        )


def load_cross_encoder(
    name: str, device: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Load a sentence-transformers CrossEncoder.

    Args:
        name: a folder, or a name on the model hub.
        device: where the model runs, such as "cuda:1"; None: a GPU if there is one.
        trust_remote_code: True to run code that comes with the model.

    Raises:
        UserError: for a model that cannot be loaded, or was not trained to give one score.
    """
    from sentence_transformers import CrossEncoder

    from contaccum.encoders.loading import loading

    with loading(name, trust_remote_code) as path:
        cross_encoder = CrossEncoder(path, device=device, trust_remote_code=trust_remote_code)
    config = cross_encoder.model.config
    # sentence-transformers adds a random head to an encoder without a classification head, and its
    # scores are noise. The architecture of a model with a head has this name.
    has_trained_head = any(
        architecture.endswith("ForSequenceClassification")
        for architecture in config.architectures or []
    )
    if config.num_labels != 1 or not has_trained_head:
        raise UserError(
            f"{name}: is not a cross-encoder that was trained to give a pair of texts one score "
            "(name a reranker, such as cross-encoder/ms-marco-MiniLM-L6-v2)"
        )
    return cross_encoder
