"""Retrieval metrics of a run, by pytrec_eval, and whether one system is better than another on the same queries.

Unlike BEIR's functions, `score_run` leaves the caller's run as it is, counts a judged query without results as
zero for every metric, and orders tied scores as trec_eval does everywhere. Numbers in, numbers out: models, data sets
and tables are elsewhere.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from contaccum.errors import ConfigError, DataError, closest

logger = logging.getLogger(__name__)

DEFAULT_K_VALUES = (1, 3, 5, 10, 20, 100, 1000)
MAIN_METRICS = ("NDCG@10", "MRR@10", "MAP@100", "Recall@100", "Accuracy@20")
"""What tables show unless they are asked for others."""
DEFAULT_METRICS = (
    "ndcg@10",
    "mrr@10",
    "map@100",
    "recall@20",
    "recall@100",
    "accuracy@1",
    "accuracy@20",
)
"""What is computed while training, under the names that logs have."""

# Name as BEIR prints it -> pytrec_eval's measure, which it takes as `ndcg_cut.10` and gives as `ndcg_cut_10`.
_TREC_MEASURES = {
    "NDCG": "ndcg_cut",
    "MAP": "map_cut",
    "Recall": "recall",
    "P": "P",
    "Accuracy": "success",
}
_KINDS = (*_TREC_MEASURES, "MRR")
_METRIC = re.compile(rf"(?:eval_)?((?:{'|'.join(_KINDS).lower()})@[1-9][0-9]*)")


def score_run(
    qrels: Mapping[str, Mapping[str, int]],
    run: Mapping[str, Mapping[str, float]],
    k_values: Sequence[int] = DEFAULT_K_VALUES,
    ignore_identical_ids: bool = True,
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Score a run {query id: {document id: score}}; returns means over the judged queries, and the same per query.

    Metrics are named as BEIR prints them: NDCG@k, MAP@k, Recall@k, P@k, Accuracy@k, MRR@k for every k. A document
    with its query's id is ignored, as in BEIR, unless `ignore_identical_ids` is False. Queries without judgements are
    ignored; judged queries that the run does not have count as zero, so that a run cannot gain by leaving hard queries
    out (pytrec_eval alone skips them).

    Raises:
        ConfigError: k < 1.
        DataError: nothing is judged.
    """
    import pytrec_eval

    k_values = check_k_values(k_values)
    judged = {
        qid: {docid: int(grade) for docid, grade in grades.items()}
        for qid, grades in qrels.items()
        if grades
    }
    if not judged:
        raise DataError(
            "the relevance judgements (qrels) are empty: there is nothing to score a run against"
        )
    scored = {
        qid: {docid: float(score) for docid, score in run.get(qid, {}).items()} for qid in judged
    }
    for qid in judged if ignore_identical_ids else ():
        scored[qid].pop(qid, None)
    cuts = ",".join(map(str, k_values))
    measures = {f"{measure}.{cuts}" for measure in _TREC_MEASURES.values()} | {"recip_rank"}
    trec = pytrec_eval.RelevanceEvaluator(judged, measures).evaluate(scored)
    per_query = {}
    for qid in judged:
        scores = {
            f"{kind}@{k}": trec[qid][f"{name}_{k}"]
            for kind, name in _TREC_MEASURES.items()
            for k in k_values
        }
        scores |= {f"MRR@{k}": trec[qid]["recip_rank"] * scores[f"Accuracy@{k}"] for k in k_values}
        per_query[qid] = scores
    names = metric_names(k_values)
    return {
        name: float(np.mean([scores[name] for scores in per_query.values()])) for name in names
    }, per_query


def ignored_judgements(qrels: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the queries for which the document with their own id is judged above 0.

    `score_run` ignores that document, so no search can find it.
    """
    return [query for query, grades in qrels.items() if grades.get(query, 0) > 0]


def warn_of_ignored_judgements(qrels: Mapping[str, Mapping[str, int]], name: str) -> None:
    """Warn, once for each data set of this ``name``, where there are `ignored_judgements`."""
    queries = ignored_judgements(qrels)
    if queries:
        _warn_once(
            f"{name}: {len(queries)} judgements above 0 name the document with the query's own id, "
            f"such as {queries[0]!r:.60}. As in BEIR, that document is dropped from the results: "
            "these judgements count as not found and lower the scores. If these documents are not "
            "the queries themselves, give queries and documents different ids"
        )


@cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def trec_order(hits: Mapping[str, float]) -> list[tuple[str, float]]:
    """Documents in the order in which trec_eval ranks them: score in float32 descending, ties by id descending."""
    # trec_eval holds scores in float32, so that what differs by less is a tie to it.
    rounded = np.fromiter(hits.values(), dtype=np.float32, count=len(hits)).tolist()
    return [
        (docid, hits[docid]) for _, docid in sorted(zip(rounded, hits, strict=True), reverse=True)
    ]


def metric_names(k_values: Sequence[int]) -> list[str]:
    """The names of all metrics that `score_run` gives, in its order."""
    return [f"{kind}@{k}" for kind in _KINDS for k in k_values]


def check_metrics(names: Sequence[str] | None, k_values: Sequence[int]) -> tuple[str, ...]:
    """Metrics chosen by name, each once; None: those of `MAIN_METRICS` that these cut-offs give.

    Raises:
        ConfigError: a metric that these cut-offs do not give.
    """
    known = {name.lower(): name for name in metric_names(k_values)}
    if names is None:
        names = [name for name in MAIN_METRICS if name.lower() in known] or [f"NDCG@{k_values[-1]}"]
    for name in names:
        if check_metric(name) not in known:
            cuts = ", ".join(map(str, k_values))
            raise ConfigError(
                f"{name} is not computed with k_values {cuts}: --k_values sets other cut-offs"
            )
    return tuple(dict.fromkeys(known[check_metric(name)] for name in names))


def check_metric(name: str) -> str:
    """A metric's name as in logs, lower case and without a trainer's ``eval_``.

    Raises:
        ConfigError: no such metric.
    """
    found = _METRIC.fullmatch(name.lower())
    if found is None:
        kinds, hint = ", ".join(_KINDS).lower(), closest(name.lower(), DEFAULT_METRICS)
        raise ConfigError(
            f"there is no metric {name!r}: write a kind ({kinds}), @ and a number, such as ndcg@10{hint}"
        )
    return found[1]


def check_k_values(k_values: Sequence[int]) -> tuple[int, ...]:
    """The cut-offs, ascending and once each; raises `ConfigError` for none, or one below 1."""
    if not k_values or min(k_values) < 1:
        raise ConfigError(
            f"k_values must be whole numbers of at least 1, such as 10 100, not {list(k_values)}"
        )
    return tuple(sorted(set(k_values)))


def paired_bootstrap(
    a: Sequence[float] | np.ndarray,
    b: Sequence[float] | np.ndarray,
    resamples: int = 10_000,
    seed: int = 0,
) -> dict[str, float]:
    """Compare two systems by their scores on the same queries, (n,) each, in the same order.

    Returns the `difference` of the means, a minus b, its 95% interval, `low` to `high`, and the two-sided `p_value` of
    "there is no difference".

    n queries at a time are resampled with replacement. The interval holds the middle 95% of the resampled differences
    (percentile bootstrap). The p-value is how often a resampled difference is as far from the observed one
    as that is from zero: the bootstrap's distribution shifted to the null hypothesis (Efron and Tibshirani 1993,
    chapter 16), with one added to both counts, so that it is never 0.

    Raises:
        DataError: scores of different lengths, none, or some that are not numbers.
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1 or not x.size or not np.isfinite(x - y).all():
        raise DataError(
            f"paired scores are numbers, one a query, of the same queries; got {x.shape} and {y.shape}"
        )
    differences = x - y
    n, observed = len(differences), float(differences.mean())
    generator = np.random.default_rng(seed)
    means = np.array(
        [differences[generator.integers(0, n, size=n)].mean() for _ in range(resamples)]
    )
    # Sums in another order differ in the last bits: that must not turn a tie into a miss.
    slack = 1e-12 * max(1.0, float(np.abs(differences).max()))
    as_far = int((np.abs(means - observed) >= abs(observed) - slack).sum())
    low, high = np.quantile(means, [0.025, 0.975])
    p_value = (1 + as_far) / (1 + resamples)
    return {"difference": observed, "low": float(low), "high": float(high), "p_value": p_value}


def add_holm(tests: Sequence[dict[str, Any]]) -> None:
    """Put `p_holm` into each test of a family: its `p_value`, adjusted by Holm's step-down procedure.

    Rejecting those at most alpha keeps the chance of any false rejection at most alpha (Holm 1979).
    """
    adjusted = 0.0
    for rank, test in enumerate(sorted(tests, key=lambda test: test["p_value"])):
        adjusted = max(adjusted, min(1.0, test["p_value"] * (len(tests) - rank)))
        test["p_holm"] = adjusted
