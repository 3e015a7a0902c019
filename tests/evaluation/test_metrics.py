"""Metrics equal their formulas, the bootstrap equals all resamples, Holm equals the textbook."""

import itertools

import numpy as np
import pytest

from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.metrics import (
    add_holm,
    check_metric,
    check_metrics,
    metric_names,
    paired_bootstrap,
    score_run,
    sort_as_trec_eval,
)

K_VALUES = [1, 3, 10, 100]


def compute_gain(grades: list[int], k: int) -> float:
    """Compute the discounted cumulative gain at k of grades in the order of their ranks."""
    return sum(grade / np.log2(rank + 1) for rank, grade in enumerate(grades[:k], 1))


def compute_metrics(grades: dict[str, int], hits: dict[str, float], k: int) -> dict[str, float]:
    """Compute the metrics at k of one query by their formulas."""
    ranking = sorted(hits, key=hits.get, reverse=True)
    ranked_grades = [grades.get(document, 0) for document in ranking]
    num_relevant = sum(grade > 0 for grade in grades.values())
    num_found = np.cumsum(np.array(ranked_grades) > 0)
    relevant_ranks = [rank for rank, grade in enumerate(ranked_grades, 1) if grade > 0]
    relevant_ranks_to_k = [rank for rank in relevant_ranks if rank <= k]
    best_gain = compute_gain(sorted(grades.values(), reverse=True), k)
    precisions = [num_found[rank - 1] / rank for rank in relevant_ranks_to_k]
    metrics = {
        "NDCG": 0.0,
        "MAP": 0.0,
        "Recall": 0.0,
        "P": num_found[k - 1] / k,
        "MRR": 0.0,
        "Accuracy": float(len(relevant_ranks_to_k) > 0),
    }
    if best_gain > 0:
        metrics["NDCG"] = compute_gain(ranked_grades, k) / best_gain
    if num_relevant > 0:
        metrics["MAP"] = sum(precisions) / num_relevant
        metrics["Recall"] = num_found[k - 1] / num_relevant
    if relevant_ranks_to_k:
        metrics["MRR"] = 1 / relevant_ranks_to_k[0]
    return metrics


def test_every_metric_equals_its_formula_on_random_runs():
    rng = np.random.default_rng(0)
    ids = [f"d{number}" for number in range(200)]
    qrels = {}
    run = {}
    for number in range(30):
        judged = rng.choice(ids, rng.integers(1, 8), replace=False)
        retrieved = rng.choice(ids, 120, replace=False)
        qrels[f"q{number}"] = {str(document): int(rng.integers(0, 3)) for document in judged}
        scores = rng.permutation(120)
        hits = zip(retrieved, scores, strict=True)
        run[f"q{number}"] = {str(document): float(score) for document, score in hits}
    means, per_query = score_run(qrels, run, K_VALUES)
    assert list(means) == metric_names(K_VALUES)
    for query, grades in qrels.items():
        for k in K_VALUES:
            for kind, expected in compute_metrics(grades, run[query], k).items():
                actual = per_query[query][f"{kind}@{k}"]
                assert actual == pytest.approx(expected), (query, kind, k)
    for name, mean in means.items():
        assert mean == pytest.approx(np.mean([scores[name] for scores in per_query.values()]))


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


@pytest.mark.parametrize("k_values", [[], [0]])
def test_wrong_cut_offs_are_refused(k_values):
    with pytest.raises(ConfigError, match="k_values"):
        score_run({"q": {"a": 1}}, {}, k_values)


def test_empty_judgements_are_refused():
    with pytest.raises(DataError, match="qrels"):
        score_run({"q": {}}, {"q": {"a": 1.0}})


@pytest.mark.parametrize(("a", "b"), [([1.0], [1.0, 2.0]), ([], []), ([float("nan")], [1.0])])
def test_unpaired_or_nan_scores_are_refused(a, b):
    with pytest.raises(DataError, match="paired scores"):
        paired_bootstrap(a, b)


def test_metrics_may_be_named_in_any_case():
    assert check_metrics(["MRR@7", "p@1", "mrr@7"], (1, 7)) == ("MRR@7", "P@1")
    assert check_metric("eval_NDCG@10") == "ndcg@10"
    assert check_metric("p@1") == "p@1"


def test_default_metrics_are_those_that_the_cut_offs_allow():
    assert check_metrics(None, (1, 10)) == ("NDCG@10", "MRR@10")
    assert check_metrics(None, (7,)) == ("NDCG@7",)


def test_unknown_metrics_and_other_cut_offs_are_refused():
    with pytest.raises(ConfigError, match=r"MRR@10 is not computed with k_values 1, 7"):
        check_metrics(["MRR@10"], (1, 7))
    for name in ("ndcg", "ndgc@10", "ndcg@0"):
        with pytest.raises(ConfigError, match="there is no metric"):
            check_metric(name)


def test_p_value_and_interval_agree_with_all_resamples_of_a_small_sample():
    differences = np.array([0.5, 0.25, -0.125, 1.0, 0.375])
    observed = differences.mean()
    means = np.array([np.mean(resample) for resample in itertools.product(differences, repeat=5)])
    exact_p_value = float((np.abs(means - observed) >= observed - 1e-12).mean())
    exact_low, exact_high = np.quantile(means, [0.025, 0.975])
    result = paired_bootstrap(differences, np.zeros(5), resamples=50_000)
    assert result["p_value"] == pytest.approx(exact_p_value, abs=0.005)
    assert result["low"] == pytest.approx(exact_low, abs=0.01)
    assert result["high"] == pytest.approx(exact_high, abs=0.01)


def test_equal_systems_have_a_p_value_of_one():
    scores = np.array([0.5, 0.25, -0.125, 1.0, 0.375])
    expected = {"difference": 0.0, "low": 0.0, "high": 0.0, "p_value": 1.0}
    assert paired_bootstrap(scores, scores) == expected


@pytest.mark.parametrize(
    ("p_values", "adjusted"),
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.9, 0.8], [1.0, 1.0]),
    ],
)
def test_holm_is_the_textbook_procedure(p_values, adjusted):
    tests = [{"p_value": p_value} for p_value in p_values]
    add_holm(tests)
    assert [test["p_holm"] for test in tests] == pytest.approx(adjusted)
