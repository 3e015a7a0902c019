"""Metrics against their formulas, the bootstrap against all resamples of a small sample, Holm against the textbook."""

import itertools

import numpy as np
import pytest

from contaccum.errors import ConfigError, DataError
from contaccum.evaluation import metrics
from contaccum.evaluation.metrics import (
    add_holm,
    check_metric,
    check_metrics,
    metric_names,
    paired_bootstrap,
    score_run,
)

K_VALUES = [1, 3, 10, 100]


def test_every_metric_equals_its_formula_on_random_runs():
    rng = np.random.default_rng(0)
    ids = [f"d{number}" for number in range(200)]
    qrels, run = {}, {}
    for number in range(30):
        graded, found = (
            rng.choice(ids, rng.integers(1, 8), replace=False),
            rng.choice(ids, 120, replace=False),
        )
        qrels[f"q{number}"] = {str(d): int(rng.integers(0, 3)) for d in graded}
        run[f"q{number}"] = {
            str(d): float(s) for d, s in zip(found, rng.permutation(120), strict=True)
        }
    means, per_query = score_run(qrels, run, K_VALUES)
    assert list(means) == metric_names(K_VALUES)
    for qid, grades in qrels.items():
        ranked = [grades.get(d, 0) for d in sorted(run[qid], key=run[qid].get, reverse=True)]
        ideal, relevant = sorted(grades.values(), reverse=True), sum(g > 0 for g in grades.values())
        hits = np.cumsum(np.array(ranked) > 0)
        first = next((place for place, grade in enumerate(ranked, 1) if grade > 0), None)
        for k in K_VALUES:
            gain = sum(g / np.log2(place + 1) for place, g in enumerate(ranked[:k], 1))
            best = sum(g / np.log2(place + 1) for place, g in enumerate(ideal[:k], 1))
            precisions = [hits[place - 1] / place for place, g in enumerate(ranked[:k], 1) if g > 0]
            expected = {
                "NDCG": gain / best if best else 0.0,
                "MAP": sum(precisions) / relevant if relevant else 0.0,
                "Recall": hits[k - 1] / relevant if relevant else 0.0,
                "P": hits[k - 1] / k,
                "MRR": 1 / first if first and first <= k else 0.0,
                "Accuracy": float(bool(first and first <= k)),
            }
            for kind, value in expected.items():
                assert per_query[qid][f"{kind}@{k}"] == pytest.approx(value), (qid, kind, k)
    for name, mean in means.items():
        assert mean == pytest.approx(np.mean([scores[name] for scores in per_query.values()]))


def test_ties_are_ordered_as_trec_eval_does_and_a_document_with_the_querys_id_is_ignored():
    # Equal in float32 is a tie, and of ties the later id is first.
    means, _ = score_run({"q": {"a": 1}}, {"q": {"a": 1.0 + 1e-9, "b": np.float32(1.0)}}, [1])
    assert means["NDCG@1"] == means["MRR@1"] == means["Accuracy@1"] == 0.0
    run = {"a": {"a": 9.0, "b": 1.0}, "unjudged": {"b": 1.0}}
    means, per_query = score_run({"a": {"b": 1}}, run, [1])
    assert means["NDCG@1"] == 1.0 and list(per_query) == ["a"] and run["a"] == {"a": 9.0, "b": 1.0}
    assert metrics.sort_as_trec_eval({"a": 1.0 + 1e-9, "c": 0.5, "b": 1.0}) == [
        ("b", 1.0),
        ("a", 1.0 + 1e-9),
        ("c", 0.5),
    ]


def test_what_cannot_be_scored_is_refused():
    for k_values in ([], [0]):
        with pytest.raises(ConfigError, match="k_values"):
            score_run({"q": {"a": 1}}, {}, k_values)
    with pytest.raises(DataError, match="qrels"):
        score_run({"q": {}}, {"q": {"a": 1.0}})
    for a, b in (([1.0], [1.0, 2.0]), ([], []), ([float("nan")], [1.0])):
        with pytest.raises(DataError, match="paired scores"):
            paired_bootstrap(a, b)


def test_metrics_are_named_in_any_case_and_unknown_ones_refused():
    assert check_metrics(["MRR@7", "p@1", "mrr@7"], (1, 7)) == ("MRR@7", "P@1")
    assert check_metrics(None, (1, 10)) == ("NDCG@10", "MRR@10") and check_metrics(None, (7,)) == (
        "NDCG@7",
    )
    with pytest.raises(ConfigError, match=r"MRR@10 is not computed with k_values 1, 7"):
        check_metrics(["MRR@10"], (1, 7))
    assert (check_metric("eval_NDCG@10"), check_metric("p@1")) == ("ndcg@10", "p@1")
    for name in ("ndcg", "ndgc@10", "ndcg@0"):
        with pytest.raises(ConfigError, match="there is no metric"):
            check_metric(name)


def test_p_value_and_interval_agree_with_all_resamples_of_a_small_sample():
    differences = np.array([0.5, 0.25, -0.125, 1.0, 0.375])
    means = np.array([np.mean(resample) for resample in itertools.product(differences, repeat=5)])
    exact = float((np.abs(means - differences.mean()) >= differences.mean() - 1e-12).mean())
    found = paired_bootstrap(differences, np.zeros(5), resamples=50_000)
    assert found["p_value"] == pytest.approx(exact, abs=0.005)
    assert (found["low"], found["high"]) == pytest.approx(
        tuple(np.quantile(means, [0.025, 0.975])), abs=0.01
    )
    assert list(paired_bootstrap(differences, differences).values()) == [0.0, 0.0, 0.0, 1.0]


def test_holm_is_the_textbook_procedure():
    for before, after in (
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.9, 0.8], [1.0, 1.0]),
    ):
        add_holm(tests := [{"p_value": p} for p in before])
        assert [test["p_holm"] for test in tests] == pytest.approx(after)
