"""Metrics equal their formulas, and rank ties as trec_eval does."""

import numpy as np
import pytest

from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.metrics import (
    MAIN_METRICS,
    check_metric,
    check_metrics,
    get_k_values,
    metric_names,
    score_run,
    sort_as_trec_eval,
)

K_VALUES = [1, 3, 10, 100]


def compute_gain(grades: list[int], k: int) -> float:
    """Compute the discounted cumulative gain at k of grades in the order of their ranks."""
    gain = 0.0
    for rank, grade in enumerate(grades[:k], 1):
        gain += grade / np.log2(rank + 1)
    return gain


def compute_metrics(grades: dict[str, int], hits: dict[str, float], k: int) -> dict[str, float]:
    """Compute the metrics at k of one query by their formulas."""
    ranking = sorted(hits, key=hits.get, reverse=True)
    ranked_grades = [grades.get(document, 0) for document in ranking]
    num_relevant = sum(1 for grade in grades.values() if grade > 0)
    # The ranks of the relevant documents among the first k, and the precision at each rank.
    relevant_ranks: list[int] = []
    precisions: list[float] = []
    for rank, grade in enumerate(ranked_grades[:k], 1):
        if grade > 0:
            relevant_ranks.append(rank)
            precisions.append(len(relevant_ranks) / rank)
    num_found = len(relevant_ranks)
    best_gain = compute_gain(sorted(grades.values(), reverse=True), k)
    metrics = {
        "NDCG": 0.0,
        "MAP": 0.0,
        "Recall": 0.0,
        "P": num_found / k,
        "MRR": 0.0,
        "Accuracy": float(num_found > 0),
    }
    if best_gain > 0:
        metrics["NDCG"] = compute_gain(ranked_grades, k) / best_gain
    if num_relevant > 0:
        metrics["MAP"] = sum(precisions) / num_relevant
        metrics["Recall"] = num_found / num_relevant
    if relevant_ranks:
        metrics["MRR"] = 1 / relevant_ranks[0]
    return metrics


def test_every_metric_equals_its_formula_on_random_runs():
    rng = np.random.default_rng(0)
    document_ids = [f"d{number}" for number in range(200)]
    qrels = {}
    run = {}
    for number in range(30):
        judged_ids = rng.choice(document_ids, rng.integers(1, 8), replace=False).tolist()
        grades = rng.integers(0, 3, len(judged_ids)).tolist()
        qrels[f"q{number}"] = dict(zip(judged_ids, grades, strict=True))
        # Different scores for more documents than the largest cut-off.
        retrieved_ids = rng.choice(document_ids, 120, replace=False).tolist()
        scores = rng.permutation(120).astype(float).tolist()
        run[f"q{number}"] = dict(zip(retrieved_ids, scores, strict=True))
    means, per_query = score_run(qrels, run, K_VALUES)
    assert list(means) == metric_names(K_VALUES)
    for query, grades in qrels.items():
        for k in K_VALUES:
            for kind, expected in compute_metrics(grades, run[query], k).items():
                actual = per_query[query][f"{kind}@{k}"]
                assert actual == pytest.approx(expected), (query, kind, k)
    for name, mean in means.items():
        values = [scores[name] for scores in per_query.values()]
        assert mean == pytest.approx(np.mean(values))


def test_scores_that_are_equal_in_float32_are_ordered_by_id_descending():
    hits = {"a": 1.0 + 1e-9, "b": np.float32(1.0)}
    means, _ = score_run({"q": {"a": 1}}, {"q": hits}, [1])
    assert means["NDCG@1"] == 0.0
    assert means["MRR@1"] == 0.0
    assert means["Accuracy@1"] == 0.0
    ranking = sort_as_trec_eval({"a": 1.0 + 1e-9, "c": 0.5, "b": 1.0})
    assert ranking == [("b", 1.0), ("a", 1.0 + 1e-9), ("c", 0.5)]


def test_a_document_with_the_querys_id_and_queries_without_judgements_are_ignored():
    run = {"a": {"a": 9.0, "b": 1.0}, "unjudged": {"b": 1.0}}
    means, per_query = score_run({"a": {"b": 1}}, run, [1])
    assert means["NDCG@1"] == 1.0
    assert list(per_query) == ["a"]
    assert run["a"] == {"a": 9.0, "b": 1.0}  # the caller's run has not changed


def test_judgements_that_give_no_score_are_refused():
    with pytest.raises(DataError, match="qrels"):
        score_run({"q": {}}, {"q": {"a": 1.0}})


def test_metrics_may_be_named_in_any_case():
    assert check_metrics(["MRR@7", "p@1", "mrr@7"]) == ("MRR@7", "P@1")
    assert check_metrics(None) == MAIN_METRICS
    assert get_k_values(["MRR@7", "p@1"]) == (1, 3, 5, 7, 10, 20, 100, 1000)
    assert check_metric("eval_NDCG@10") == "ndcg@10"


@pytest.mark.parametrize("name", ["ndgc@10", "ndcg@0"])
def test_unknown_metrics_are_refused(name):
    with pytest.raises(ConfigError, match="ndcg@10"):
        check_metrics([name])
