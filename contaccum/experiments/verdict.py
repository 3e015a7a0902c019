"""The verdict: the test whether the trained model is better than the base model.

The test set is used for the verdict only, and never to choose settings.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from contaccum.data.beir import BeirDataset
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.export import insert_card_section
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.evaluation.metrics import (
    BETTER,
    LEVEL,
    WORSE,
    describe_difference,
    describe_interval,
    judge,
    sign_flip_test,
    warn_of_few_groups,
)
from contaccum.evaluation.results import Run
from contaccum.experiments.tune import Choice
from contaccum.retrieval.bm25 import fuse_runs
from contaccum.retrieval.encode import model_fingerprint

SYSTEMS = ("bm25", "base", "base_with_bm25", "trained", "trained_with_bm25")
"""What is compared on the test set."""
ScoreColumns = dict[str, dict[str, Any]]
"""{column: {test query: value}}: nDCG@10 of each of `SYSTEMS`, whether it is "known", its "texts"
(those of the query and of its relevant documents), and, once folds are pooled, its "group"."""
MAX_SHOWN_QUERIES = 10
"""The record shows so many queries with the largest gains, and as many with the largest losses."""

LEAST_QUERIES_OF_KIND = 10
"""Least number of known, and of new, test queries for a verdict on each kind."""

_MEANINGS = {
    "new": "No training query is about these documents, as if they were added later.",
    "known": "Training had other queries about these documents, as in a search of fixed articles.",
}
_SHOWN_METRICS = ("NDCG@10", "MRR@10", "Recall@100")
_NUM_TOP_DOCUMENTS = 3  # retrieved documents that the record shows for a query

_ADVICE = {
    BETTER: "",
    WORSE: "the trained model is worse than the base model: keep the base model.",
    LEVEL: (
        "the trained model is not significantly better than the base model: keep the base model."
    ),
}


@dataclass(frozen=True)
class Verdict:
    """The comparison of the trained model with the base model on held-out queries.

    Attributes:
        word: "BETTER" or "WORSE" if p is at most 0.05 and at least `MIN_CHANGED_GROUPS` groups of
            queries have changed, else "LEVEL".
        metric: the name of the metric that is compared.
        base, trained, bm25: the mean of the metric over the queries, for each system.
        difference: ``trained`` minus ``base``.
        low, high, p: the limits of its 95% interval, and the p-value of the hypothesis that there
            is no difference; see `sign_flip_test`.
        queries: the number of queries.
        groups: the number of groups of queries; queries about the same passage are in one group.
        changed_groups: the number of groups whose scores differ.
        folds: the number of splits that the queries come from.
        kind: the documents of the queries, "new" or "known", if each has a verdict; else "".
    """

    word: str
    metric: str
    base: float
    trained: float
    bm25: float
    difference: float
    low: float
    high: float
    p: float
    queries: int
    groups: int
    changed_groups: int
    folds: int = 1
    kind: str = ""

    @property
    def advice(self) -> str:
        """A sentence with advice for the user; empty if the trained model is better."""
        where = f"{self.kind} documents" if self.kind else "the test set"
        return f"On {where} {_ADVICE[self.word]}" if _ADVICE[self.word] else ""

    def __str__(self) -> str:
        queries = f"{self.queries:,} held-out queries"
        if self.groups < self.queries:
            queries += f" of {self.groups:,} passages"
        if self.folds > 1:
            queries += f" in {self.folds} splits"
        test = {**asdict(self), "p_value": self.p}
        difference = describe_difference(self.metric, self.base, self.trained, queries, test)
        where = f" on {self.kind} documents" if self.kind else ""
        line = f"{self.word}{where}: {difference}; BM25 {self.bm25:.3f}"
        if self.word != BETTER:
            line += "; keep the base model"
        return line

    def record(self) -> dict[str, Any]:
        """Return the verdict as the content of a JSON file."""
        meaning = _MEANINGS.get(self.kind, "")
        return {**asdict(self), "line": str(self), "advice": self.advice, "meaning": meaning}


def compute_verdict(
    trained: Mapping[str, float],
    base: Mapping[str, float],
    bm25: Mapping[str, float],
    groups: Mapping[str, Any],
    metric: str = "NDCG@10",
    folds: int = 1,
    kind: str = "",
) -> Verdict:
    """Compute the verdict from the scores of the queries.

    Args:
        trained, base, bm25: {query id: score} of each system, with the same queries.
        groups: {query id: its group}.
        metric: the name of the metric.
        folds: the number of splits that the queries come from.
        kind: see `Verdict`.
    """
    test = sign_flip_test(trained, base, groups)
    return Verdict(
        word=judge(test),
        metric=metric,
        base=statistics.fmean(base.values()),
        trained=statistics.fmean(trained.values()),
        bm25=statistics.fmean(bm25.values()),
        difference=test["difference"],
        low=test["low"],
        high=test["high"],
        p=test["p_value"],
        queries=len(base),
        groups=int(test["groups"]),
        changed_groups=int(test["changed_groups"]),
        folds=folds,
        kind=kind,
    )


def compute_verdicts(scores: ScoreColumns, folds: int = 1) -> dict[str, Verdict]:
    """Compute a verdict on new documents and one on known documents, if each has enough queries.

    Returns:
        {"new": verdict, "known": verdict}; or one verdict over all queries, as "new" or "known" if
        all are of this kind, else as "all".
    """
    queries: dict[str, list[str]] = {"new": [], "known": []}
    for query, is_known in scores["known"].items():
        queries["known" if is_known else "new"].append(query)
    has_both = min(map(len, queries.values())) >= LEAST_QUERIES_OF_KIND
    if not has_both:
        present = [kind for kind in queries if queries[kind]]
        queries = {present[0] if len(present) == 1 else "all": list(scores["known"])}
    verdicts = {}
    for kind, members in queries.items():
        trained, base, bm25 = (
            {query: scores[system][query] for query in members}
            for system in ("trained", "base", "bm25")
        )
        verdicts[kind] = compute_verdict(
            trained, base, bm25, scores["group"], folds=folds, kind=kind if has_both else ""
        )
    return verdicts


def warn_of_disagreement(verdict: Verdict, choice: Choice) -> list[str]:
    """Return warnings if only one of dev and test shows a better model, one line each.

    Args:
        verdict: the comparison with the base model on all test queries.
        choice: the chosen settings, with the comparison with the base model on dev.
    """
    warnings = []
    dev = choice.against_base
    differences = (
        f"{dev['difference']:+.3f} on dev ({describe_interval(dev)}), and "
        f"{verdict.difference:+.3f} on test"
    )
    is_better_on_dev = dev["low"] > 0.0
    is_better_on_test = verdict.word == BETTER
    if is_better_on_dev and not is_better_on_test:
        warnings.append(f"dev and test disagree: {differences}; the test counts")
    if is_better_on_test and not is_better_on_dev:
        warnings.append(f"the model is significantly better on test, but not on dev: {differences}")
    return warnings


def warn_of_test(verdict: Verdict) -> list[str]:
    """Return warnings about the test alone: few groups of queries, and a better BM25."""
    where = f" on {verdict.kind} documents" if verdict.kind else ""
    warnings = warn_of_few_groups(f"the test queries{where}", verdict.groups)
    if verdict.bm25 > verdict.trained:
        warnings.append(
            f"BM25 scores {verdict.bm25:.3f}{where}, more than the trained model: search with "
            "BM25, or combine both"
        )
    return warnings


# The test -----------------------------------------------------------------------------------------


def load_trained(folder: Path, base: DualEncoder) -> DualEncoder:
    """Load a model that was trained from the base model, on the same device.

    Code that comes with the model is trusted if that of the base model is.
    """
    return DualEncoder.from_pretrained(
        str(folder), device=str(base.device), trust_remote_code=base.trust_remote_code
    )


class SystemResult(NamedTuple):
    """The results of one system on the test set.

    Attributes:
        means: {metric: mean over the queries}.
        query_scores: {query id: nDCG@10}.
        run: {query id: {document id: score}} of the retrieved documents.
    """

    means: dict[str, float]
    query_scores: dict[str, float]
    run: Run


def search_trained(evaluator: RetrievalEvaluator, base: DualEncoder, trained: DualEncoder) -> Run:
    """Search with the trained model.

    It encodes the documents, unless its document tower is that of the base model, as after
    query-side training.

    Args:
        evaluator: its ``documents`` are the document embeddings by the base model, or None.
    """
    documents = evaluator.documents
    is_encoded_anew = model_fingerprint(trained, "document") != model_fingerprint(base, "document")
    if is_encoded_anew:
        evaluator.documents = None  # the search then encodes the documents with its model
    try:
        return evaluator.search(trained, show_progress=is_encoded_anew)
    finally:
        evaluator.documents = documents


def search_test_set(
    evaluator: RetrievalEvaluator,
    base: DualEncoder,
    trained: DualEncoder,
    bm25_weights: Mapping[str, float],
) -> dict[str, SystemResult]:
    """Search the test set with BM25, both models, and both with BM25 beside them.

    Args:
        evaluator: the evaluator of the test set. Its ``documents`` are the document embeddings by
            the base model.
        bm25_weights: {"base": weight of BM25 beside the base model, "trained": the same}.

    Returns:
        {system: result} with the systems `SYSTEMS`.
    """
    runs = {
        "bm25": evaluator.search_bm25(),
        "base": evaluator.search(base),
        "trained": search_trained(evaluator, base, trained),
    }
    for name, weight in bm25_weights.items():
        runs[f"{name}_with_bm25"] = fuse_runs(runs[name], runs["bm25"], weight)
    results = {}
    for system, run in runs.items():
        means = evaluator.score_run(run)
        results[system] = SystemResult(means, evaluator.query_scores, run)
    return results


def describe_production(scores: ScoreColumns, bm25_weights: Mapping[str, float]) -> str:
    """Return a line about searches with BM25 beside the vectors, as in production."""
    means = {system: statistics.fmean(scores[system].values()) for system in SYSTEMS}
    line = (
        f"with BM25 beside the vectors: nDCG@10 {means['base_with_bm25']:.3f} -> "
        f"{means['trained_with_bm25']:.3f} (weights of BM25, chosen on dev: "
        f"{bm25_weights['base']:g} and {bm25_weights['trained']:g})"
    )
    test = sign_flip_test(scores["trained"], scores["base_with_bm25"], scores["group"])
    if bm25_weights["base"] > 0 and judge(test) != BETTER:
        line += "; the base model with BM25 is level with the trained model alone, or better"
    return line


def select_shown_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """Return {name in a report, such as "NDCG@10": mean} of the metrics that a report shows."""
    return {name: means[name.lower()] for name in _SHOWN_METRICS}


def compare_queries(
    dataset: BeirDataset, base: SystemResult, trained: SystemResult
) -> dict[str, Any]:
    """Return the queries with the largest gains and losses, and the number of gains and losses.

    Args:
        dataset: the test set.
        base, trained: the results of the base model and of the trained model.
    """
    gains = {}
    for query_id, base_score in base.query_scores.items():
        gains[query_id] = trained.query_scores[query_id] - base_score
    ascending = sorted(gains, key=lambda query_id: gains[query_id])
    descending = sorted(gains, key=lambda query_id: -gains[query_id])
    gained = [query_id for query_id in descending if gains[query_id] > 0]
    lost = [query_id for query_id in ascending if gains[query_id] < 0]

    def describe(query_ids: list[str]) -> list[dict[str, Any]]:
        shown = query_ids[:MAX_SHOWN_QUERIES]
        return [_describe_query(dataset, query_id, base, trained) for query_id in shown]

    return {
        "gained": describe(gained),
        "lost": describe(lost),
        "num_gained": len(gained),
        "num_lost": len(lost),
        "num_same": len(gains) - len(gained) - len(lost),
    }


def _describe_query(
    dataset: BeirDataset, query_id: str, base: SystemResult, trained: SystemResult
) -> dict[str, Any]:
    """Return the texts of a query, its relevant documents and its top documents, with scores."""
    relevant_documents = []
    for document_id, grade in dataset.qrels[query_id].items():
        if grade > 0 and document_id in dataset.corpus:
            relevant_documents.append(dict(dataset.corpus[document_id]))
    return {
        "query": dataset.queries[query_id],
        "before": base.query_scores[query_id],
        "after": trained.query_scores[query_id],
        "gold": relevant_documents,
        "top_before": _get_top_documents(dataset, query_id, base.run),
        "top_after": _get_top_documents(dataset, query_id, trained.run),
    }


def _get_top_documents(dataset: BeirDataset, query_id: str, run: Run) -> list[dict[str, Any]]:
    """Return the texts of a query's top documents, each with a mark whether it is relevant."""
    scores = run.get(query_id, {})
    ranking = sorted(scores, key=lambda document_id: -scores[document_id])
    top_documents = []
    for document_id in ranking[:_NUM_TOP_DOCUMENTS]:
        is_relevant = dataset.qrels[query_id].get(document_id, 0) > 0
        top_documents.append({**dataset.corpus[document_id], "is_gold": is_relevant})
    return top_documents


def write_verdicts_to_card(model_folder: Path, verdicts: Iterable[Verdict], base_name: str) -> None:
    """Write the verdicts at the top of the model card, below its metadata.

    Those of an earlier start are replaced.

    Args:
        base_name: the name of the base model.
    """
    paragraphs = []
    for verdict in verdicts:
        record = verdict.record()
        paragraphs += [f"**{verdict}**", record["meaning"], record["advice"]]
    paragraphs.append(f"Compared with {base_name} as it is, by contaccum fit.")
    text = "\n\n".join(paragraph for paragraph in paragraphs if paragraph)
    insert_card_section(model_folder, "verdict of contaccum fit", text)
