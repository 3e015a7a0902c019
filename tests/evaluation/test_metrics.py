"""Metrics are BEIR's numbers, per query, for any run."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import pytrec_eval
from beir.retrieval.evaluation import EvaluateRetrieval

from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.metrics import score_run

K_VALUES = [1, 3, 5, 10, 100]


def random_qrels_and_run(seed, queries=40, documents=200, depth=120, ties=False):
    rng = np.random.default_rng(seed)
    ids = [f"d{number}" for number in range(documents)]
    qrels, run = {}, {}
    for number in range(queries):
        qid = f"q{number}"
        qrels[qid] = {str(d): int(rng.integers(0, 3)) for d in rng.choice(ids, rng.integers(1, 8), replace=False)}
        scores = rng.integers(0, 6, depth) if ties else rng.permutation(depth)
        run[qid] = {str(d): float(s) for d, s in zip(rng.choice(ids, depth, replace=False), scores, strict=True)}
    return qrels, run


@pytest.mark.parametrize("seed", range(5))
def test_every_metric_agrees_with_beir_on_random_runs(seed):
    qrels, run = random_qrels_and_run(seed)
    metrics, per_query = score_run(qrels, run, K_VALUES)
    expected: dict[str, float] = {}
    for part in EvaluateRetrieval.evaluate(qrels, run, K_VALUES):
        expected |= part
    expected |= EvaluateRetrieval.evaluate_custom(qrels, run, K_VALUES, "mrr")
    expected |= EvaluateRetrieval.evaluate_custom(qrels, run, K_VALUES, "accuracy")
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=6e-6), name  # BEIR rounds to five places
        assert metrics[name] == pytest.approx(np.mean([scores[name] for scores in per_query.values()]))


def test_mrr_orders_ties_as_trec_eval_does():
    qrels, run = random_qrels_and_run(0, ties=True)
    _, per_query = score_run(qrels, run, [120])
    expected = pytrec_eval.RelevanceEvaluator(qrels, {"recip_rank"}).evaluate(run)
    for qid in qrels:
        assert per_query[qid]["MRR@120"] == pytest.approx(expected[qid]["recip_rank"])


def test_scores_that_are_equal_in_float32_are_tied_for_every_metric():
    metrics, _ = score_run({"q": {"a": 1}}, {"q": {"a": 1.0 + 1e-9, "b": 1.0}}, [1])
    assert metrics["NDCG@1"] == metrics["MRR@1"] == metrics["Accuracy@1"] == 0.0


@pytest.mark.parametrize("leave_out", ["absent", "empty"])
def test_judged_queries_without_results_count_as_zero(leave_out):
    qrels, run = random_qrels_and_run(1)
    full, full_per_query = score_run(qrels, run, K_VALUES)
    lost = [f"q{number}" for number in range(10)]
    for qid in lost:
        run.pop(qid)
        if leave_out == "empty":
            run[qid] = {}
    metrics, per_query = score_run(qrels, run, K_VALUES)
    for name, value in metrics.items():
        assert value == pytest.approx(full[name] - sum(full_per_query[qid][name] for qid in lost) / len(qrels))
    assert all(per_query[qid][name] == 0.0 for qid in lost for name in metrics)


def test_a_document_with_the_querys_id_is_ignored_and_the_run_is_left_alone():
    qrels, run = {"a": {"b": 1}}, {"a": {"a": 9.0, "b": 1.0}, "unjudged": {"b": 1.0}}
    before = copy.deepcopy(run)
    metrics, per_query = score_run(qrels, run, [1])
    assert metrics["NDCG@1"] == metrics["MRR@1"] == 1.0 and list(per_query) == ["a"]
    assert run == before


def test_float32_scores_are_accepted():
    metrics, _ = score_run({"q": {"a": 1}}, {"q": {"a": np.float32(0.5), "b": np.float32(0.25)}}, [1])
    assert metrics["NDCG@1"] == 1.0


@pytest.mark.parametrize("k_values", [[], [0], [-1], [1.5], ["10"], [True]])
def test_unusable_cut_offs_are_refused(k_values):
    with pytest.raises(ConfigError, match="k_values"):
        score_run({"q": {"a": 1}}, {}, k_values)


def test_nothing_judged_is_refused_rather_than_scored():
    with pytest.raises(DataError, match="qrels"):
        score_run({"q": {}}, {"q": {"a": 1.0}})


def test_a_score_that_is_not_a_number_is_refused():
    with pytest.raises(DataError, match="query q"):
        score_run({"q": {"a": 1}}, {"q": {"a": float("nan")}})
