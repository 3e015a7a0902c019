"""Retrieval metrics of a run, computed by pytrec_eval.

A run is the result of a search, {query id: {document id: score}}. A query is judged if it has
relevance judgements (qrels). The k best documents of a query give its Accuracy@k, which is 1 if any
of them is relevant, else 0; the other metrics are trec_eval's.

Differences from BEIR's functions: `score_run` does not change the caller's run, counts a judged
query without results as zero for every metric, and orders tied scores as trec_eval does.

Input and output are numbers; models, data sets and tables belong to other modules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from contaccum.data.records import warn_once
from contaccum.defaults import DEFAULT_K_VALUES
from contaccum.errors import ConfigError, DataError, closest

MAIN_METRICS = ("NDCG@10", "MRR@10", "MAP@100", "Recall@100", "Accuracy@20")
"""Metrics that tables show by default."""
DEFAULT_METRICS = (
    "ndcg@10",
    "mrr@10",
    "map@100",
    "recall@20",
    "recall@100",
    "accuracy@1",
    "accuracy@20",
)
"""Metrics that are computed during training, with the names that they have in logs."""

# BEIR's name -> name in pytrec_eval. pytrec_eval accepts "ndcg_cut.10" and returns "ndcg_cut_10".
_TREC_MEASURES = {
    "NDCG": "ndcg_cut",
    "MAP": "map_cut",
    "Recall": "recall",
    "P": "P",
    "Accuracy": "success",
}
# pytrec_eval has no MRR@k. It is derived from the reciprocal rank, see `_rename_trec_scores`.
_METRIC_FAMILIES = (*_TREC_MEASURES, "MRR")
_METRIC_PATTERN = re.compile(rf"(?:eval_)?((?:{'|'.join(_METRIC_FAMILIES).lower()})@[1-9][0-9]*)")


def score_run(
    qrels: Mapping[str, Mapping[str, int]],
    run: Mapping[str, Mapping[str, float]],
    k_values: Sequence[int] = DEFAULT_K_VALUES,
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Score a run by NDCG@k, MAP@k, Recall@k, P@k, Accuracy@k and MRR@k.

    Queries without judgements are ignored. Judged queries that are missing in the run count as
    zero, so that a run does not gain by leaving out hard queries (pytrec_eval alone skips them).

    Args:
        qrels: relevance judgements, {query id: {document id: grade}}.
        run: {query id: {document id: score}}.
        k_values: cut-offs.

    Returns:
        {metric: mean over the judged queries}, and {query id: {metric: value}}.

    Raises:
        ConfigError: a cut-off is below 1.
        DataError: there are no judgements.
    """
    import pytrec_eval

    k_values = check_k_values(k_values)
    judgements = {}
    trec_run = {}
    for query_id, grades in qrels.items():
        if not grades:
            continue
        hits = run.get(query_id, {})
        judgements[query_id] = {document: int(grade) for document, grade in grades.items()}
        trec_run[query_id] = {document: float(score) for document, score in hits.items()}
        trec_run[query_id].pop(query_id, None)
    if not judgements:
        raise DataError(
            "the relevance judgements (qrels) are empty, so there is nothing to score a run "
            "against (name a split that has judgements)"
        )
    cut_offs = ",".join(map(str, k_values))
    measures = {f"{measure}.{cut_offs}" for measure in _TREC_MEASURES.values()}
    measures.add("recip_rank")
    trec_scores = pytrec_eval.RelevanceEvaluator(judgements, measures).evaluate(trec_run)

    per_query = {}
    for query_id in judgements:
        per_query[query_id] = _rename_trec_scores(trec_scores[query_id], k_values)
    means = {}
    for name in metric_names(k_values):
        means[name] = float(np.mean([scores[name] for scores in per_query.values()]))
    return means, per_query


def _rename_trec_scores(
    trec_scores: Mapping[str, float], k_values: Sequence[int]
) -> dict[str, float]:
    """Return a query's scores under BEIR's names.

    trec_eval's reciprocal rank has no cut-off. MRR@k is the reciprocal rank if the first relevant
    document is among the k best (Accuracy@k is 1), else 0.
    """
    scores = {}
    for name, measure in _TREC_MEASURES.items():
        for k in k_values:
            scores[f"{name}@{k}"] = trec_scores[f"{measure}_{k}"]
    for k in k_values:
        scores[f"MRR@{k}"] = trec_scores["recip_rank"] * scores[f"Accuracy@{k}"]
    return scores


def ignored_judgements(qrels: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the queries whose relevant documents include one with the query's own id.

    `score_run` ignores that document in a run, so it always counts as not found.
    """
    return [query for query, grades in qrels.items() if grades.get(query, 0) > 0]


def warn_of_ignored_judgements(qrels: Mapping[str, Mapping[str, int]], name: str) -> None:
    """Warn about `ignored_judgements`, once for each data set with this ``name``."""
    queries = ignored_judgements(qrels)
    if queries:
        warn_once(
            f"{name}: {len(queries)} judgements above 0 name the document with the query's own id, "
            f"such as {queries[0]!r:.60}. As in BEIR, that document is dropped from the results: "
            "these judgements count as not found and lower the scores. If these documents are not "
            "the queries themselves, give queries and documents different ids"
        )


def sort_as_trec_eval(hits: Mapping[str, float]) -> list[tuple[str, float]]:
    """Sort {document id: score} as trec_eval does: by score, then by id, both descending.

    trec_eval holds scores in float32, so scores that differ by less than that are equal.
    """
    float32_scores = np.fromiter(hits.values(), dtype=np.float32, count=len(hits)).tolist()
    ranking = sorted(zip(float32_scores, hits, strict=True), reverse=True)
    return [(document_id, hits[document_id]) for _, document_id in ranking]


def metric_names(k_values: Sequence[int]) -> list[str]:
    """Return the names of all metrics that `score_run` computes, in its order."""
    names: list[str] = []
    for family in _METRIC_FAMILIES:
        names.extend(f"{family}@{k}" for k in k_values)
    return names


def check_metrics(names: Sequence[str] | None, k_values: Sequence[int]) -> tuple[str, ...]:
    """Return the chosen metrics with BEIR's names, as `metric_names` writes them, each once.

    Args:
        names: metrics in any case; None: `MAIN_METRICS`, as far as ``k_values`` allow.
        k_values: cut-offs that are computed.

    Raises:
        ConfigError: a metric does not exist, or has another cut-off.
    """
    available = {name.lower(): name for name in metric_names(k_values)}
    if names is None:
        names = [name for name in MAIN_METRICS if name.lower() in available]
        if not names:
            names = [f"NDCG@{k_values[-1]}"]
    chosen = []
    for name in names:
        key = check_metric(name)
        if key not in available:
            cut_offs = ", ".join(map(str, k_values))
            raise ConfigError(
                f"{name} is not computed with k_values {cut_offs}: --k_values sets other cut-offs"
            )
        chosen.append(available[key])
    return tuple(dict.fromkeys(chosen))


def check_metric(name: str) -> str:
    """Return a metric's name as in logs: in lower case and without a trainer's ``eval_``.

    Raises:
        ConfigError: the metric does not exist.
    """
    match = _METRIC_PATTERN.fullmatch(name.lower())
    if match is None:
        families = ", ".join(_METRIC_FAMILIES).lower()
        hint = closest(name.lower(), DEFAULT_METRICS)
        raise ConfigError(
            f"there is no metric {name!r}: write a metric ({families}), @ and a number, such as "
            f"ndcg@10{hint}"
        )
    return match[1]


def check_k_values(k_values: Sequence[int]) -> tuple[int, ...]:
    """Return the cut-offs in ascending order, each once.

    Raises:
        ConfigError: a cut-off is below 1.
    """
    if min(k_values) < 1:
        raise ConfigError(f"k_values must be at least 1, such as 10 100, not {list(k_values)}")
    return tuple(sorted(set(k_values)))
