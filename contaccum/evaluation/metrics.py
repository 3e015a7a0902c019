"""Retrieval metrics of a run, computed by pytrec_eval, and significance tests of two systems.

A run is the result of a search, {query id: {document id: score}}. The k best documents of a query
give its Accuracy@k, which is 1 if any of them is relevant, else 0; the other metrics are
trec_eval's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytrec_eval

from contaccum.errors import ConfigError, DataError, closest, warn_once

DEFAULT_K_VALUES = (1, 3, 5, 10, 20, 100, 1000)
"""Cut-offs of the metrics of an evaluation."""
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
# pytrec_eval has no MRR@k. It is derived from the reciprocal rank.
_METRIC_FAMILIES = (*_TREC_MEASURES, "MRR")
_METRIC_PATTERN = re.compile(rf"(?:eval_)?((?:{'|'.join(_METRIC_FAMILIES).lower()})@[1-9][0-9]*)")


def score_run(
    qrels: Mapping[str, Mapping[str, int]],
    run: Mapping[str, Mapping[str, float]],
    k_values: Sequence[int] = DEFAULT_K_VALUES,
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Score a run by NDCG@k, MAP@k, Recall@k, P@k, Accuracy@k and MRR@k.

    As in BEIR, a document with the query's id is ignored. Queries without judgements are ignored
    too. Judged queries that are missing in the run count as zero (pytrec_eval alone skips them).

    Args:
        qrels: relevance judgements, {query id: {document id: grade}}, at least one.
        run: {query id: {document id: score}}.
        k_values: cut-offs, from 1 on.

    Returns:
        {metric: mean over the judged queries}, and {query id: {metric: value}}.
    """
    judgements = {}
    trec_run = {}
    for query_id, grades in qrels.items():
        if not grades:
            continue
        hits = run.get(query_id, {})
        judgements[query_id] = {document: int(grade) for document, grade in grades.items()}
        trec_run[query_id] = {document: float(score) for document, score in hits.items()}
        trec_run[query_id].pop(query_id, None)
    cut_offs = ",".join(map(str, k_values))
    measures = {f"{measure}.{cut_offs}" for measure in _TREC_MEASURES.values()}
    measures.add("recip_rank")
    trec_scores = pytrec_eval.RelevanceEvaluator(judgements, measures).evaluate(trec_run)

    per_query = {}
    for query_id in judgements:
        query_scores = trec_scores[query_id]
        scores = {}
        for name, measure in _TREC_MEASURES.items():
            for k in k_values:
                scores[f"{name}@{k}"] = query_scores[f"{measure}_{k}"]
        for k in k_values:
            # trec_eval's reciprocal rank has no cut-off, and so counts if Accuracy@k is 1.
            scores[f"MRR@{k}"] = query_scores["recip_rank"] * scores[f"Accuracy@{k}"]
        per_query[query_id] = scores
    means = {
        name: float(np.mean([scores[name] for scores in per_query.values()]))
        for name in metric_names(k_values)
    }
    return means, per_query


def ignored_judgements(qrels: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the queries with a relevant document of the query's own id, which never counts."""
    return [query for query, grades in qrels.items() if grades.get(query, 0) > 0]


def warn_of_ignored_judgements(qrels: Mapping[str, Mapping[str, int]], name: str) -> None:
    """Warn about `ignored_judgements`, once for each data set with this ``name``."""
    queries = ignored_judgements(qrels)
    if queries:
        warn_once(
            f"{name}: {len(queries)} judgements above 0 name the document with the query's own id, "
            f"such as {queries[0]!r:.60}. As in BEIR, that document is dropped from the results: "
            "these judgements count as not found. If these documents are not the queries "
            "themselves, give queries and documents different ids"
        )


def sort_as_trec_eval(hits: Mapping[str, float]) -> list[tuple[str, float]]:
    """Sort {document id: score} as trec_eval does: by score in float32, then by id, descending."""
    float32_scores = np.fromiter(hits.values(), dtype=np.float32, count=len(hits)).tolist()
    ranking = sorted(zip(float32_scores, hits, strict=True), reverse=True)
    return [(document_id, hits[document_id]) for _, document_id in ranking]


def metric_names(k_values: Sequence[int]) -> list[str]:
    """Return the names of all metrics that `score_run` computes, in its order."""
    return [f"{family}@{k}" for family in _METRIC_FAMILIES for k in k_values]


def check_metrics(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return metrics, named in any case, as `metric_names` does; None: `MAIN_METRICS`.

    Raises `ConfigError` for a metric that does not exist.
    """
    written = {family.lower(): family for family in _METRIC_FAMILIES}
    checked = [check_metric(name).partition("@") for name in names or MAIN_METRICS]
    return tuple(dict.fromkeys(f"{written[family]}@{k}" for family, _, k in checked))


def get_k_values(names: Iterable[str]) -> tuple[int, ...]:
    """Return `DEFAULT_K_VALUES` and the cut-offs of these metrics, in ascending order."""
    return tuple(sorted({*DEFAULT_K_VALUES, *(int(name.partition("@")[2]) for name in names)}))


def check_metric(name: str) -> str:
    """Return a metric's name as in logs: in lower case and without a trainer's ``eval_``.

    Raises `ConfigError` for a metric that does not exist.
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


# Significance tests between two systems that answered the same queries ----------------------------

ALPHA = 0.05
"""Level of the tests: the intervals hold 95%."""

MIN_CHANGED_GROUPS = 6
"""Fewer groups than this cannot show a difference: the smallest two-sided p-value of k groups is
2 / 2^k, which is 0.0625 for five groups."""

BETTER = "BETTER"
WORSE = "WORSE"
LEVEL = "LEVEL"

FEW_GROUPS = 30
"""Fewer groups than this are little evidence, and the user is told so."""

_MAX_EXACT_GROUPS = 13  # 2^13 = 8,192 sign vectors are about as many as are drawn otherwise
_NUM_FLIPS = 10_000
_BISECTIONS = 40
_MAX_SIGNS = 2_000_000  # signs that are in memory at once
_TOLERANCE = 1e-12  # sums in another order differ in the last bits


def sign_flip_test(
    ours: Mapping[str, float], theirs: Mapping[str, float], groups: Mapping[str, Any], seed: int = 0
) -> dict[str, float]:
    """Compare two systems by their scores on the same queries, which are in groups.

    The unit of the test is a group of linked queries (see `contaccum.data.near_duplicates`):
    queries about the same passage have similar differences, so many of them are little evidence. If
    the systems do not differ, the differences of a group are as likely with the other sign. The
    p-value is the share of sign vectors, one sign for each group, with which the mean difference
    over the queries is at least as far from 0 as it is: of all vectors for up to 13 groups with a
    difference, else of 10,000 random ones and the observed one. The 95% interval holds the
    differences that this test does not reject (Lehmann and Romano 2005, sections 5.8 to 5.12). With
    fewer than `MIN_CHANGED_GROUPS` groups that changed, it is -1 to 1: the test supposes the same
    difference everywhere, so ties alone would reject every difference but 0.

    Args:
        ours, theirs: {query id: score between 0 and 1} with the same queries.
        groups: {query id: its group}.
        seed: seed of the random signs.

    Returns:
        ``difference``: mean of ours minus mean of theirs. ``low`` and ``high``: its 95% interval.
        ``p_value``: two-sided. ``groups``: number of groups. ``changed_groups``: number of groups
        whose total is not the same for both systems.

    Raises:
        DataError: the queries differ, there are none, or a score is NaN or infinite.
    """
    differences = np.array([ours[query] - theirs.get(query, np.nan) for query in ours])
    if len(ours) != len(theirs) or not len(ours) or not np.isfinite(differences).all():
        raise DataError(
            "two systems can only be compared by finite scores of the same queries; got "
            f"{len(ours)} and {len(theirs)} queries"
        )
    numbers: dict[Any, int] = {}
    group_of_query = [numbers.setdefault(groups[query], len(numbers)) for query in ours]
    sums = np.bincount(group_of_query, differences)  # (g,)
    sizes = np.bincount(group_of_query).astype(float)  # (g,)
    has_changed = np.abs(sums) > _TOLERANCE
    num_changed = int(has_changed.sum())
    flipped = _flip_all(sums, sizes, seed)
    p_value = _compute_p_value(flipped, 0.0)
    if num_changed <= _MAX_EXACT_GROUPS:
        # A group without a difference has none with another sign either: its sign is not needed.
        p_value = _compute_p_value(_flip_all(sums[has_changed], sizes[has_changed], seed), 0.0)
    difference = float(differences.mean())
    low, high = -1.0, 1.0
    if num_changed >= MIN_CHANGED_GROUPS:
        is_rejected = p_value <= ALPHA
        # Each limit lies between a difference that is rejected and one that is not.
        inner_low, inner_high = difference, difference
        outer_low, outer_high = -1.0, 1.0
        if is_rejected and difference > 0:
            outer_low = 0.0
        elif is_rejected:
            outer_high = 0.0
        else:
            inner_low, inner_high = min(difference, 0.0), max(difference, 0.0)
        low = _find_limit(flipped, inner_low, outer_low)
        high = _find_limit(flipped, inner_high, outer_high)
    return {
        "difference": difference,
        "low": low,
        "high": high,
        "p_value": p_value,
        "groups": len(sums),
        "changed_groups": num_changed,
    }


def judge(test: Mapping[str, float]) -> str:
    """Return "BETTER", "WORSE" or "LEVEL" for a result of `sign_flip_test`.

    The first two need a p-value of at most 0.05, and `MIN_CHANGED_GROUPS`.
    """
    if test["p_value"] > ALPHA or test["changed_groups"] < MIN_CHANGED_GROUPS:
        return LEVEL
    return BETTER if test["difference"] > 0 else WORSE


def describe_interval(test: Mapping[str, float], num_digits: int = 3) -> str:
    """Return "95% -0.012 to +0.034", or why a result of `sign_flip_test` has no interval."""
    if test["changed_groups"] < MIN_CHANGED_GROUPS:
        return (
            f"no interval: scores changed on {test['changed_groups']} of {test['groups']:,} "
            f"passages, and the test needs {MIN_CHANGED_GROUPS}"
        )
    return f"95% {test['low']:+.{num_digits}f} to {test['high']:+.{num_digits}f}"


def describe_difference(
    metric: str, before: float, after: float, queries: str, test: Mapping[str, float]
) -> str:
    """Return a line such as "nDCG@10 0.607 -> 0.705 on 9 queries (+0.098, 95% ..., p = 0.002)".

    ``before`` and ``after`` are the means of both systems, ``test`` is from `sign_flip_test`.
    """
    evidence = describe_interval(test)
    if test["changed_groups"] >= MIN_CHANGED_GROUPS:
        evidence += ", p < 0.001" if test["p_value"] < 0.001 else f", p = {test['p_value']:.3f}"
    return (
        f"{metric.replace('NDCG', 'nDCG')} {before:.3f} -> {after:.3f} on {queries} "
        f"({test['difference']:+.3f}, {evidence})"
    )


def warn_of_few_groups(queries: str, num_groups: int) -> list[str]:
    """Return a warning if ``queries``, such as "the test queries", are in few groups."""
    if num_groups >= FEW_GROUPS:
        return []
    return [
        f"{queries} are about only {num_groups} different passages: only a large difference can be "
        "told from chance, whatever the number of queries"
    ]


def add_holm(tests: Sequence[dict[str, Any]]) -> None:
    """Add ``p_holm`` to each test of a family: its ``p_value``, adjusted by Holm's procedure.

    Of m tests, the smallest p-value is multiplied by m, the next one by m - 1, and so on, and no
    adjusted value is smaller than the one before it. If the tests with ``p_holm`` of at most alpha
    are rejected, the probability of any false rejection is at most alpha (Holm 1979).
    """
    adjusted = 0.0
    for rank, test in enumerate(sorted(tests, key=lambda test: test["p_value"])):
        adjusted = max(adjusted, min(1.0, test["p_value"] * (len(tests) - rank)))
        test["p_holm"] = adjusted


def _flip_all(sums: np.ndarray, sizes: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the totals (f,) of sums and of sizes with each of f sign vectors, the observed first.

    With a supposed difference s, the sums of the groups are ``sums - s * sizes``. So the totals for
    any s follow from these two.
    """
    num_groups = len(sums)
    columns = np.stack([sums, sizes], axis=1)  # (g, 2)
    if num_groups <= _MAX_EXACT_GROUPS:
        bits = np.arange(2**num_groups)[:, None] >> np.arange(num_groups)
        totals = [(1.0 - 2.0 * (bits & 1)) @ columns]
    else:
        totals = [columns.sum(axis=0, keepdims=True)]
        generator = np.random.default_rng(seed)
        block_size = max(1, _MAX_SIGNS // num_groups)
        for start in range(0, _NUM_FLIPS, block_size):
            num_drawn = min(block_size, _NUM_FLIPS - start)
            signs = 1.0 - 2.0 * generator.integers(0, 2, (num_drawn, num_groups), dtype=np.int8)
            totals.append(signs @ columns)
    sums, sizes = np.concatenate(totals).T
    return sums, sizes


def _compute_p_value(flipped: tuple[np.ndarray, np.ndarray], supposed: float) -> float:
    """Return the p-value of the hypothesis that the difference is the supposed one."""
    flipped_sums, flipped_sizes = flipped
    distances = np.abs(flipped_sums - supposed * flipped_sizes)
    return float(np.mean(distances >= distances[0] - _TOLERANCE * max(1.0, distances[0])))


def _find_limit(flipped: tuple[np.ndarray, np.ndarray], inner: float, outer: float) -> float:
    """Return the limit of the interval between a difference inside of it and one outside."""
    if _compute_p_value(flipped, outer) > ALPHA:
        return outer
    # By hand: scipy.optimize.bisect refuses an inner difference whose p is ALPHA or less, as of a
    # few tied groups.
    for _ in range(_BISECTIONS):
        middle = (inner + outer) / 2
        if _compute_p_value(flipped, middle) > ALPHA:
            inner = middle
        else:
            outer = middle
    return inner
