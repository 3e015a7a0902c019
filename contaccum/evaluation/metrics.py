"""Retrieval metrics of a run against relevance judgements: BEIR's numbers, per query and unrounded.

nDCG, MAP, recall and precision come from pytrec_eval, as in BEIR; MRR and accuracy follow BEIR's custom metrics.
Unlike BEIR's functions these do not change the caller's run, count a judged query without results as zero for
every metric, and order tied scores one way everywhere. Significance tests and tables are elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from contaccum.errors import ConfigError, DataError

DEFAULT_K_VALUES = (1, 3, 5, 10, 20, 100, 1000)

# Name as BEIR prints it -> (pytrec_eval measure, its key in a query's scores)
_TREC_MEASURES = {
    "NDCG": ("ndcg_cut", "ndcg_cut_"),
    "MAP": ("map_cut", "map_cut_"),
    "Recall": ("recall", "recall_"),
    "P": ("P", "P_"),
}
KINDS = (*_TREC_MEASURES, "MRR", "Accuracy")


def score_run(
    qrels: Mapping[str, Mapping[str, int]],
    run: Mapping[str, Mapping[str, float]],
    k_values: Sequence[int] = DEFAULT_K_VALUES,
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Score a run; returns means over the judged queries, and the same metrics per query.

    Metrics are named as BEIR prints them: NDCG@k, MAP@k, Recall@k, P@k, MRR@k, Accuracy@k for every k. A document
    with its query's id is ignored, as in BEIR. Queries without judgements are ignored; judged queries that the run
    does not have count as zero, so that a run cannot gain by leaving hard queries out (pytrec_eval alone skips them).

    Raises `ConfigError` for k < 1, `DataError` when nothing is judged or a score is NaN.
    """
    import pytrec_eval

    k_values = check_k_values(k_values)
    judged = {qid: {docid: int(grade) for docid, grade in grades.items()} for qid, grades in qrels.items() if grades}
    if not judged:
        raise DataError("the relevance judgements (qrels) are empty: there is nothing to score a run against")
    scored = {qid: {docid: float(score) for docid, score in run.get(qid, {}).items() if docid != qid} for qid in judged}
    for qid, hits in scored.items():
        if any(score != score for score in hits.values()):
            raise DataError(f"query {qid}: the run has a score that is not a number")

    cuts = ",".join(map(str, k_values))
    evaluator = pytrec_eval.RelevanceEvaluator(judged, {f"{name}.{cuts}" for name, _ in _TREC_MEASURES.values()})
    trec = evaluator.evaluate(scored)
    per_query: dict[str, dict[str, float]] = {}
    for qid, grades in judged.items():
        scores = {
            f"{name}@{k}": float(trec[qid][f"{key}{k}"]) for name, (_, key) in _TREC_MEASURES.items() for k in k_values
        }
        first = _first_relevant_rank(grades, scored[qid])
        for k in k_values:
            hit = first is not None and first <= k
            scores[f"MRR@{k}"] = 1.0 / first if first is not None and hit else 0.0
            scores[f"Accuracy@{k}"] = float(hit)
        per_query[qid] = scores
    names = next(iter(per_query.values()))
    return {name: float(np.mean([scores[name] for scores in per_query.values()])) for name in names}, per_query


def metric_names(k_values: Sequence[int]) -> list[str]:
    """The names of all metrics that `score_run` gives, in its order."""
    names = [f"{name}@{k}" for name in _TREC_MEASURES for k in k_values]
    return names + [f"{name}@{k}" for k in k_values for name in ("MRR", "Accuracy")]


def check_metrics(names: Sequence[str], k_values: Sequence[int]) -> tuple[str, ...]:
    """Metrics chosen by name, each once; raises `ConfigError` for one that these cut-offs do not give."""
    known = metric_names(k_values)
    for name in names:
        if name not in known:
            kinds = ", ".join(KINDS)
            cuts = ", ".join(map(str, k_values))
            raise ConfigError(
                f"there is no metric {name!r}: write a kind ({kinds}), @ and one of k_values ({cuts}), such as "
                f"{known[0]}; --k_values sets other cut-offs"
            )
    return tuple(dict.fromkeys(names))


def check_k_values(k_values: Sequence[int]) -> tuple[int, ...]:
    """The cut-offs, ascending and once each; raises `ConfigError` for none, or for one that is no whole number >= 1."""
    if not k_values or any(isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in k_values):
        raise ConfigError(f"k_values must be whole numbers of at least 1, such as 10 100, not {list(k_values)}")
    return tuple(sorted(set(k_values)))


def trec_order(hits: Mapping[str, float]) -> list[tuple[str, float]]:
    """Documents in the order in which trec_eval ranks them: score in float32 descending, ties by id descending."""
    rounded = _float32(hits).tolist()
    order = sorted(zip(rounded, hits, strict=True), reverse=True)
    return [(docid, hits[docid]) for _, docid in order]


def _first_relevant_rank(grades: Mapping[str, int], hits: Mapping[str, float]) -> int | None:
    rounded = _float32(hits)
    scores = dict(zip(hits, rounded.tolist(), strict=True))
    relevant = [(scores[docid], docid) for docid, grade in grades.items() if grade > 0 and docid in scores]
    if not relevant:
        return None
    best, best_docid = max(relevant)
    ties_ahead = sum(score == best and docid > best_docid for docid, score in scores.items())
    return 1 + ties_ahead + int((rounded > best).sum())


def _float32(hits: Mapping[str, float]) -> np.ndarray:
    # trec_eval keeps scores in float32, so that what differs less than that is a tie to it.
    return np.fromiter(hits.values(), dtype=np.float32, count=len(hits))
