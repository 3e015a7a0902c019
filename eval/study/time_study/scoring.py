"""Scores of a model on the held-out queries of a data set, among all its documents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

from contaccum import DualEncoder
from contaccum.data import load_beir_folder
from contaccum.errors import DataError
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.store import EmbeddingStore

METRIC = "ndcg@10"
SPLITS = ("dev", "test")

QueryScores = dict[str, dict[str, float]]
"""{split: {query id: nDCG@10}}."""


class Scorer:
    """Scorer of models on the dev and test queries of a BEIR folder.

    The documents are encoded once for both splits.

    Args:
        data: a BEIR folder with the splits dev and test, which have no query in common.
        store: embeddings of all documents, if the documents are not trained.
        bf16: compute in bfloat16, if the model is trained in bfloat16.

    Raises:
        DataError: dev and test share a query.
    """

    def __init__(self, data: str | Path, store: str | Path | None = None, *, bf16: bool) -> None:
        self._bf16 = bf16
        parts = [load_beir_folder(data, split) for split in SPLITS]
        self.query_ids = {part.split: list(part.qrels) for part in parts}
        dev, test = parts
        common = set(dev.qrels) & set(test.qrels)
        if common:
            raise DataError(f"{data}: dev and test share queries, such as {min(common)}")
        both = replace(
            dev, queries={**dev.queries, **test.queries}, qrels={**dev.qrels, **test.qrels}
        )
        self._evaluator = RetrievalEvaluator(both, [METRIC])
        if store is not None:
            self._evaluator.documents = StoreDocuments(EmbeddingStore.open(store))

    def score(self, model: DualEncoder) -> QueryScores:
        """Score a model in the precision of its training."""
        was_training = model.training
        model.eval()
        with torch.autocast(model.device.type, torch.bfloat16, enabled=self._bf16):
            self._evaluator.score(model)
        model.train(was_training)
        return self._split_scores()

    def score_bm25(self) -> QueryScores:
        """Score BM25."""
        self._evaluator.score_bm25()
        return self._split_scores()

    def _split_scores(self) -> QueryScores:
        scores = self._evaluator.query_scores
        scores_by_split = {}
        for split, query_ids in self.query_ids.items():
            scores_by_split[split] = {name: round(scores[name], 4) for name in query_ids}
        return scores_by_split


def average(scores: QueryScores) -> dict[str, float]:
    """Return {split: mean over the queries}."""
    return {split: fmean(by_query.values()) for split, by_query in scores.items()}


def drop_query_ids(scores: QueryScores) -> dict[str, list[float]]:
    """Return {split: scores in the order of the judgements' file}, to keep the files small."""
    return {split: list(by_query.values()) for split, by_query in scores.items()}
