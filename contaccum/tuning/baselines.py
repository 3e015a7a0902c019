"""The scores on dev before training: the scores of BM25 and of the base model."""

from __future__ import annotations

from typing import NamedTuple

from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.loading import model_name
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.files import AnyPath
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.store import EmbeddingStore
from contaccum.training.query_side import USELESS_SHARE_OF_BM25
from contaccum.tuning.trial import QueryScores

TRIAL_METRIC = "ndcg@10"
"""The metric by which a search scores its trials, the base model and BM25."""


class Baselines(NamedTuple):
    """The scores on dev before training, nDCG@10.

    Attributes:
        base: the mean score of the base model, which is the model before training.
        query_scores: {query id: score of the base model}.
        bm25: the mean score of BM25.
    """

    base: float
    query_scores: QueryScores
    bm25: float

    def format_line(self, model: str) -> str:
        """Return the scores as a line for the user; ``model`` is a folder or hub name."""
        return f"BM25 {self.bm25:.3f}   {model_name(model)} {self.base:.3f}   (nDCG@10 on dev)"

    @property
    def is_base_too_weak(self) -> bool:
        """True if the base model's document embeddings are too bad to train a query encoder."""
        return self.base < USELESS_SHARE_OF_BM25 * self.bm25


def score_baselines(
    encoder: DualEncoder, evaluator: RetrievalEvaluator, store: AnyPath | None
) -> Baselines:
    """Score the base model and BM25 on dev.

    Args:
        encoder: the base model.
        evaluator: the evaluator of the dev data; its primary metric is `TRIAL_METRIC`.
        store: a folder of document embeddings by the base model; None: the documents are encoded.
    """
    if store is not None:
        evaluator.documents = StoreDocuments(EmbeddingStore.open(store))
    metric = evaluator.primary_metric
    base = evaluator.score(encoder)[metric]
    query_scores = evaluator.query_scores
    bm25 = evaluator.score_bm25()[metric]
    return Baselines(base, query_scores, bm25)
