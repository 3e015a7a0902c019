"""Evaluators for the trainers of sentence-transformers, and samples of data sets."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator

from contaccum.data import BeirDataset
from contaccum.data.corpus import get_passage_texts
from contaccum.data.sampling import text_ids
from contaccum.encoders.settings import Kind
from contaccum.evaluation.beir import describe_data
from contaccum.evaluation.metrics import (
    DEFAULT_METRICS,
    check_metric,
    score_run,
    warn_of_ignored_judgements,
)
from contaccum.evaluation.results import Run
from contaccum.retrieval.bm25 import bm25_run
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.encode import check_store_fits, encode_texts
from contaccum.retrieval.exact_search import Embeddings

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")


class RetrievalEvaluator(SentenceEvaluator):
    """Evaluator of a model on a BEIR data set, in memory, by exact search.

    The model runs in the precision that is in force, such as a trainer's bf16. A metric that does
    not exist raises `ConfigError`.

    Args:
        dataset: data set to score on; `sample` returns smaller ones.
        metrics: metrics as ``name@k``. Names are ndcg, map, recall, p, mrr, accuracy.
        batch_size: texts per forward pass.
        similarity: "cos" or "dot"; None: the model's own.
        primary_metric: metric that a model card shows; None: the first of ``metrics``.
        notes: further entries for the record of the data.

    Attributes:
        documents: documents whose stored embeddings are used, if the model has encoded the store.
            None (the default): the model encodes the documents in each call.
        query_scores: {query id: score by the primary metric} of the last scoring.

    Example:
        ```python
        evaluator = RetrievalEvaluator(sample(load_beir_folder("scifact", "dev"), corpus=10_000))
        trainer = ContAccumTrainer(
            model=model, args=args, train_dataset=train_dataset, evaluator=evaluator
        )
        ```
    """

    def __init__(
        self,
        dataset: BeirDataset,
        metrics: Sequence[str] = DEFAULT_METRICS,
        batch_size: int = 32,
        similarity: Literal["cos", "dot"] | None = None,
        primary_metric: str | None = None,
        notes: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        warn_of_ignored_judgements(dataset.qrels, dataset.name)
        self.dataset = dataset
        names = list(metrics) if primary_metric is None else [*metrics, primary_metric]
        self.metrics = tuple(dict.fromkeys(map(check_metric, names)))
        self._k_values = sorted({int(name.partition("@")[2]) for name in self.metrics})
        self.batch_size = batch_size
        self.similarity = similarity
        # Typed as Any, because the base class declares it as None.
        self.primary_metric: Any = check_metric(primary_metric or self.metrics[0])
        self.notes = notes or {}
        self.documents: StoreDocuments | None = None
        self._fixed_embeddings: tuple[StoreDocuments, Embeddings] | None = None
        self.query_scores: dict[str, float] = {}

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: float = -1, steps: int = -1
    ) -> dict[str, float]:
        """Return {"ndcg@10": ...}, means over the judged queries, also for the model card."""
        scores = self.score(model)
        self.store_metrics_in_model_card_data(
            model,
            scores,
            epoch,  # type: ignore[arg-type]  # trainers pass fractions of an epoch
            steps,
        )
        return scores

    def score(self, model: SentenceTransformer) -> dict[str, float]:
        """Return the model's ``metrics``, means over the judged queries."""
        return self.score_run(self.search(model))

    def search(self, model: SentenceTransformer, show_progress: bool = False) -> Run:
        """Find the best documents of every query, as many as the largest cut-off, with a model.

        Raises `ConfigError` if another model encoded the store of `documents`.
        """
        from contaccum.retrieval.search import FaissSearcher

        embeddings: dict[Kind, Embeddings] = {}
        if self.documents is not None:
            embeddings["document"] = self._get_document_embeddings(model, self.documents)
        searcher = FaissSearcher(
            model, self.batch_size, show_progress_bar=show_progress, embeddings=embeddings
        )
        max_k = self._k_values[-1]
        return searcher.search(self.dataset.corpus, self.dataset.queries, max_k, self.similarity)

    def search_bm25(self) -> Run:
        """Find as many documents by BM25; none without texts. Warn if it finds no relevant one."""
        if self.documents is not None and not self.documents.has_texts:
            return {query: {} for query in self.dataset.queries}
        run = bm25_run(self.dataset.corpus, self.dataset.queries, self._k_values[-1])
        for query, grades in self.dataset.qrels.items():
            if any(grade > 0 and document in run[query] for document, grade in grades.items()):
                return run
        logger.warning(
            f"{self.dataset.name}: BM25 finds no relevant document for any query, so its scores "
            "are 0.0 and are no baseline: queries and documents hardly share words (are they in "
            "different languages?)"
        )
        return run

    def score_run(self, run: Run) -> dict[str, float]:
        """Return the ``metrics`` of a run on these data, and set `query_scores`."""
        means, per_query = score_run(self.dataset.qrels, run, self._k_values)
        beir_names = {name.lower(): name for name in means}  # {"ndcg@10": "NDCG@10", ...}
        primary_name = beir_names[self.primary_metric]
        self.query_scores = {query: scores[primary_name] for query, scores in per_query.items()}
        return {name: means[beir_names[name]] for name in self.metrics}

    def _get_document_embeddings(
        self, model: SentenceTransformer, documents: StoreDocuments
    ) -> Embeddings:
        """Return the corpus's embeddings, float32 (N, d), from a store: itself if it is the corpus.

        Texts that the store lacks are encoded in the first call.
        """
        check_store_fits(model, documents.store)
        if self._fixed_embeddings is not None and self._fixed_embeddings[0] is documents:
            return self._fixed_embeddings[1]
        texts = get_passage_texts(self.dataset.corpus)
        embeddings: Embeddings = documents.store
        if not np.array_equal(text_ids(texts), documents.store.text_ids()):
            embeddings = np.empty((len(texts), documents.dimension), dtype=np.float32)
            found, found_embeddings = documents.find_embeddings(texts)
            embeddings[found] = found_embeddings
            missing = np.setdiff1d(np.arange(len(texts)), found)
            missing_texts = [texts[index] for index in missing]
            embeddings[missing] = encode_texts(model, missing_texts, batch_size=self.batch_size)
        self._fixed_embeddings = (documents, embeddings)
        return embeddings

    def describe(self) -> dict[str, Any]:
        """Return name, split, path and counts of the data set, and ``notes``, for records."""
        return {**describe_data(self.dataset), **self.notes}

    def get_config_dict(self) -> dict[str, Any]:
        """Return the description of the data for the model card, without its path."""
        description = self.describe()
        del description["path"]
        return description


def sample(
    dataset: BeirDataset, queries: int | None = None, corpus: int | None = None
) -> BeirDataset:
    """Return a part of a data set: those whose ids have the smallest hashes, so always the same.

    Args:
        queries: number of judged queries to keep; None: all.
        corpus: number of documents to keep; None: all. All relevant documents of the kept queries
            are among them, even if they are more. Judgements of documents that are left out are
            left out too.
    """
    has_all_queries = queries is None or queries >= len(dataset.queries)
    has_all_documents = corpus is None or corpus >= len(dataset.corpus)
    if has_all_queries and has_all_documents:
        return dataset
    query_ids = set(sorted(dataset.queries, key=_hash_id)[:queries])
    kept_judgements = _select_keys(dataset.qrels, query_ids)
    document_ids: set[str] = set()
    for grades in kept_judgements.values():
        relevant = {document for document, grade in grades.items() if grade > 0}
        # Of a query without relevant documents, one that was judged is kept: the query has the
        # score 0, and without judgements it would not count.
        document_ids.update(relevant or sorted(grades, key=_hash_id)[:1])
    other_ids = sorted(dataset.corpus.keys() - document_ids, key=_hash_id)
    num_relevant = len(dataset.corpus) - len(other_ids)
    document_ids.update(other_ids if corpus is None else other_ids[: max(0, corpus - num_relevant)])
    qrels = {query: _select_keys(grades, document_ids) for query, grades in kept_judgements.items()}
    description = f"{dataset.fingerprint} queries={queries} corpus={corpus}"
    return replace(
        dataset,
        queries=_select_keys(dataset.queries, query_ids),
        qrels=qrels,
        corpus=_select_keys(dataset.corpus, document_ids),
        fingerprint=hashlib.sha256(description.encode()).hexdigest(),
    )


def _select_keys(mapping: dict[str, _Value], keys: set[str]) -> dict[str, _Value]:
    return {key: value for key, value in mapping.items() if key in keys}


def _hash_id(identifier: str) -> bytes:
    return hashlib.sha256(identifier.encode()).digest()
