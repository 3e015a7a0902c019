"""Evaluation while training: an evaluator for sentence-transformers' trainers, and a fixed part of a data set for it.

It encodes, searches exactly and scores as ``contaccum evaluate`` does, on data that is in memory. When to evaluate, and
what becomes of the figures, is the trainer's business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

import numpy as np
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator

from contaccum.data import BeirDataset, passage_text
from contaccum.errors import check_choice
from contaccum.evaluation.beir import about_data
from contaccum.evaluation.metrics import DEFAULT_METRICS, check_metric, score_run

SAMPLES = ("random", "bm25")

_SPARE = 3  # candidates of BM25 for each place to fill: queries share some of theirs


class RetrievalEvaluator(SentenceEvaluator):
    """Scores a model on a BEIR data set, in memory, by exact search.

    Args:
        dataset: what to score on; :func:`sample` makes smaller ones.
        metrics: `kind@k` in lower case, of the kinds ndcg, map, recall, p, mrr, accuracy.
        batch_size: texts encoded at once.
        similarity: "cos" or "dot"; None is the model's own.
        primary_metric: the one that a model card shows; None: the first.
        about: what a record is to say of the data beside its counts, such as how it was sampled.

    The scores are those of the model in the precision that it runs in: under the trainer's bf16 or fp16, of that.

    Raises:
        ConfigError: an unknown metric.

    Example::

        evaluator = RetrievalEvaluator(sample(load_beir_folder("scifact", "dev"), corpus=10_000))
        trainer = ContAccumTrainer(model=model, args=args, train_dataset=train_dataset, evaluator=evaluator)
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
        self.dataset = dataset
        self.metrics = tuple(dict.fromkeys(map(check_metric, metrics)))
        self.batch_size = batch_size
        self.similarity = similarity
        self.primary_metric: Any = primary_metric or self.metrics[0]  # the base class says that it is None
        self.about = about or {}

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: float = -1, steps: int = -1
    ) -> dict[str, float]:
        """{"ndcg@10": ...}, means over the judged queries; nothing is written to ``output_path``."""
        from contaccum.retrieval.searcher import FaissSearcher

        searcher = FaissSearcher(model, self.batch_size, show_progress_bar=False)
        cuts = sorted({int(name.partition("@")[2]) for name in self.metrics})
        data = self.dataset
        run = searcher.search(data.corpus, data.queries, cuts[-1], searcher.metric(self.similarity))
        means = {name.lower(): value for name, value in score_run(data.qrels, run, cuts)[0].items()}
        scores = {name: means[name] for name in self.metrics}
        self.store_metrics_in_model_card_data(model, scores, epoch, steps)  # type: ignore[arg-type]  # epochs are floats
        return scores

    def describe(self) -> dict[str, Any]:
        """Which data, and how much of it; for records."""
        return {**about_data(self.dataset), **self.about}

    @property
    def description(self) -> str:
        return "Retrieval"

    def get_config_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self.describe().items() if key != "path"}


def sample(
    dataset: BeirDataset,
    queries: int | None = None,
    corpus: int | None = None,
    how: Literal["random", "bm25"] = "random",
) -> BeirDataset:
    """The same part of a data set every time, for figures that compare with those of the same part alone.

    Args:
        queries: judged queries to keep, those with the smallest hashes of their ids; None: all.
        corpus: documents to keep; every relevant document of a kept query is among them, even where these are more.
            Judgements of documents that are left out go as well.
        how: which other documents: "random", those with the smallest hashes; "bm25", judged ones and then the best by
            BM25 (each query's first, each query's second, and so on), which are harder to tell apart.

    Raises:
        ConfigError: an unknown ``how``, or bm25s is not installed.
        DataError: no document has a word for BM25.
    """
    check_choice("how", how, SAMPLES)
    if (queries is None or queries >= len(dataset.queries)) and (corpus is None or corpus >= len(dataset.corpus)):
        return dataset
    chosen = set(sorted(dataset.queries, key=_order)[:queries])
    part = replace(
        dataset,
        queries={query: text for query, text in dataset.queries.items() if query in chosen},
        qrels={query: judged for query, judged in dataset.qrels.items() if query in chosen},
    )
    settings = f"queries={queries} corpus={corpus}"
    if corpus is not None and corpus < len(dataset.corpus):
        relevant = {d for judged in part.qrels.values() for d, grade in judged.items() if grade > 0}
        hardest = dict.fromkeys(d for d in (_hardest(part, corpus) if how == "bm25" else ()) if d not in relevant)
        others = sorted((d for d in dataset.corpus if d not in relevant and d not in hardest), key=_order)
        added = list(islice((*hardest, *others), max(0, corpus - len(relevant))))
        settings += f" hardest={','.join(sorted(added))}" if hardest else ""
        kept = relevant | set(added)
        part = replace(
            part,
            corpus={document: text for document, text in dataset.corpus.items() if document in kept},
            qrels={q: {d: grade for d, grade in judged.items() if d in kept} for q, judged in part.qrels.items()},
        )
    digest = hashlib.sha256(f"{dataset.fingerprint} {settings}".encode())
    return replace(part, fingerprint=digest.hexdigest())


def _hardest(part: BeirDataset, corpus: int) -> Iterable[str]:
    """Documents judged and not relevant, then the best of each query by BM25, best first."""
    from contaccum.retrieval.searcher import BM25Index, best_rows

    ids = list(part.corpus)
    texts = [passage_text(document["title"], document["text"]) for document in part.corpus.values()]
    index = BM25Index(texts, str(part.path))
    depth = min(len(ids), max(10, _SPARE * corpus // len(part.queries)))
    best = np.full((depth, len(part.queries)), -1)
    for column, text in enumerate(part.queries.values()):
        rows = best_rows(index.scores(text), depth)
        best[: len(rows), column] = rows
    judged = [document for grades in part.qrels.values() for document, grade in grades.items() if grade <= 0]
    return [*judged, *(ids[row] for row in best.flat if row >= 0)]


def _order(identifier: str) -> bytes:
    return hashlib.sha256(identifier.encode()).digest()
