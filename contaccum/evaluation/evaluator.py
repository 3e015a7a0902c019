"""Evaluation while training: an evaluator for sentence-transformers' trainers, and a fixed part of a data set for it.

It encodes, searches exactly and scores as ``contaccum evaluate`` does, on data that is in memory. When to evaluate, and
what becomes of the figures, is the trainer's business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from sentence_transformers.sentence_transformer.evaluation import (
    NanoBEIREvaluator,
    SentenceEvaluator,
)
from sentence_transformers.util import cos_sim, dot_score

from contaccum.data import BeirDataset
from contaccum.errors import DataError
from contaccum.evaluation.beir_sets import about_data
from contaccum.evaluation.metrics import (
    DEFAULT_METRICS,
    check_metric,
    score_run,
    warn_of_ignored_judgements,
)
from contaccum.evaluation.results import Run
from contaccum.retrieval.documents import StoreDocuments


class RetrievalEvaluator(SentenceEvaluator):
    """Scores a model on a BEIR data set, in memory, by exact search.

    Args:
        dataset: what to score on; `sample` makes smaller ones.
        metrics: `kind@k` in lower case, of the kinds ndcg, map, recall, p, mrr, accuracy.
        batch_size: texts encoded at once.
        similarity: "cos" or "dot"; None is the model's own.
        primary_metric: the one that a model card shows; None: the first.
        about: what a record is to say of the data beside its counts, such as of how many documents these are a sample.

    The scores are those of the model in the precision that it runs in: under the trainer's bf16 or fp16, of that.

    Raises:
        ConfigError: an unknown metric.

    Example:
        ```python
        evaluator = RetrievalEvaluator(sample(load_beir_folder("scifact", "dev"), corpus=10_000))
        trainer = ContAccumTrainer(model=model, args=args, train_dataset=train_dataset, evaluator=evaluator)
        ```
    """

    def __init__(
        self,
        dataset: BeirDataset,
        metrics: Sequence[str] = DEFAULT_METRICS,
        batch_size: int = 32,
        similarity: Literal["cos", "dot"] | None = None,
        primary_metric: str | None = None,
        about: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        warn_of_ignored_judgements(dataset.qrels, dataset.name)
        self.dataset = dataset
        self.metrics = tuple(dict.fromkeys(map(check_metric, metrics)))
        self.batch_size = batch_size
        self.similarity = similarity
        self.primary_metric: Any = (
            primary_metric or self.metrics[0]
        )  # the base class says that it is None
        self.about = about or {}
        # Documents that stand still while a query tower is trained; None where they move.
        self.documents: StoreDocuments | None = None
        self._standing_embeddings: np.ndarray | None = None
        # Of the last scoring: the score of each query by the primary metric.
        self.query_scores: dict[str, float] = {}

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: float = -1, steps: int = -1
    ) -> dict[str, float]:
        """{"ndcg@10": ...}, means over the judged queries; nothing is written to ``output_path``."""
        scores = self.score(model)
        self.store_metrics_in_model_card_data(model, scores, epoch, steps)  # type: ignore[arg-type]  # epochs are floats
        return scores

    def score(self, model: Any) -> dict[str, float]:
        """Return the model's ``metrics``, means over the judged queries."""
        return self.score_run(self.search(model))

    def score_bm25(self) -> dict[str, float]:
        """Return BM25's ``metrics`` on the same data."""
        return self.score_run(self.search_bm25())

    def search(self, model: Any, show_progress: bool = False) -> Run:
        """Return the documents that the model finds, as many as the deepest of the ``metrics`` needs."""
        from contaccum.retrieval.searcher import FaissSearcher

        encode_documents = None if self.documents is None else self._encode_standing_documents
        searcher = FaissSearcher(
            model,
            self.batch_size,
            show_progress_bar=show_progress,
            encode_documents=encode_documents,
        )
        return searcher.search(
            self.dataset.corpus, self.dataset.queries, self._cuts[-1], self.similarity
        )

    def search_bm25(self) -> Run:
        """Return the documents that BM25 finds."""
        from contaccum.retrieval.searcher import bm25_run

        return bm25_run(self.dataset.corpus, self.dataset.queries, self._cuts[-1])

    @property
    def _cuts(self) -> list[int]:
        return sorted({int(name.partition("@")[2]) for name in self.metrics})

    def score_run(self, run: Run) -> dict[str, float]:
        """Return the ``metrics`` of a run on these data, and keep `query_scores`."""
        means, per_query = score_run(self.dataset.qrels, run, self._cuts)
        names = {name.lower(): name for name in means}
        primary = names[self.primary_metric]
        self.query_scores = {query: scores[primary] for query, scores in per_query.items()}
        return {name: means[names[name]] for name in self.metrics}

    def _encode_standing_documents(self, model: Any, texts: Sequence[str]) -> np.ndarray:
        """Return the embeddings of the corpus: those of the store, and once the others'."""
        from contaccum.retrieval.encode import encode_texts

        if self._standing_embeddings is None:
            assert self.documents is not None
            embeddings = np.empty((len(texts), self.documents.dimension), dtype=np.float32)
            indices, stored = self.documents.find_embeddings(texts)
            embeddings[indices] = stored
            others = np.setdiff1d(np.arange(len(texts)), indices)
            if len(others):
                other_texts = [texts[index] for index in others]
                embeddings[others] = encode_texts(model, other_texts, batch_size=self.batch_size)
            self._standing_embeddings = embeddings
        return self._standing_embeddings

    def describe(self) -> dict[str, Any]:
        """Which data, and how much of it; for records."""
        return {**about_data(self.dataset), **self.about}

    def get_config_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self.describe().items() if key != "path"}


class NanoBEIR(NanoBEIREvaluator):
    """sentence-transformers' own; its means over the sets have the names of `DEFAULT_METRICS` too.

    ``names`` are those of sets, such as "scifact", none for all thirteen; the others are as of RetrievalEvaluator.
    Raises `DataError` where there is no such set, or it cannot be had from the hub.
    """

    metrics = DEFAULT_METRICS

    def __init__(
        self, names: Sequence[str], batch_size: int = 32, similarity: str | None = None
    ) -> None:
        functions: Any = {None: None, "cos": {"cosine": cos_sim}, "dot": {"dot": dot_score}}[
            similarity
        ]
        how: Any = {
            "accuracy_at_k": [1, 20],
            "precision_recall_at_k": [20, 100],
            "score_functions": functions,
        }
        try:
            super().__init__(list(names) or None, batch_size=batch_size, write_csv=False, **how)
        except ValueError as error:
            raise DataError(f"nanobeir: {error} ({error.__cause__ or 'name others'})") from error
        self.primary_metric: Any = self.metrics[0]

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        scores = super().__call__(*args, **kwargs)
        means = {
            key.rpartition("_")[2]: score
            for key, score in scores.items()
            if key.startswith(f"{self.name}_")
        }
        self.primary_metric = self.metrics[0]  # which the library has given a prefix
        return scores | {name: means[name] for name in self.metrics}

    def describe(self) -> dict[str, Any]:
        return {"name": "nanobeir", **self.get_config_dict()}


def sample(
    dataset: BeirDataset, queries: int | None = None, corpus: int | None = None
) -> BeirDataset:
    """The same part of a data set every time, for figures that compare with those of the same part alone.

    Args:
        queries: judged queries to keep, those with the smallest hashes of their ids; None: all.
        corpus: documents to keep, likewise; every relevant document of a kept query is among them, even where these are
            more. Judgements of documents that are left out go as well. None: all.
    """
    if (queries is None or queries >= len(dataset.queries)) and (
        corpus is None or corpus >= len(dataset.corpus)
    ):
        return dataset
    asked = set(sorted(dataset.queries, key=_hash)[:queries])
    qrels = {query: judged for query, judged in dataset.qrels.items() if query in asked}
    kept = {
        document for judged in qrels.values() for document, grade in judged.items() if grade > 0
    }
    others = sorted(dataset.corpus.keys() - kept, key=_hash)
    kept.update(others if corpus is None else others[: max(0, corpus - len(kept))])
    return replace(
        dataset,
        queries={query: text for query, text in dataset.queries.items() if query in asked},
        qrels={
            query: {d: grade for d, grade in judged.items() if d in kept}
            for query, judged in qrels.items()
        },
        corpus={document: text for document, text in dataset.corpus.items() if document in kept},
        fingerprint=hashlib.sha256(
            f"{dataset.fingerprint} queries={queries} corpus={corpus}".encode()
        ).hexdigest(),
    )


def _hash(identifier: str) -> bytes:
    return hashlib.sha256(identifier.encode()).digest()
