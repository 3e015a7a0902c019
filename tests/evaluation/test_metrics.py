"""Metrics equal their formulas, and rank ties as trec_eval does."""

from math import log2

import numpy as np
import pytest

from contaccum.errors import ConfigError
from contaccum.evaluation.metrics import (
    MAIN_METRICS,
    check_metric,
    check_metrics,
    get_k_values,
    metric_names,
    score_run,
    sort_as_trec_eval,
)


def test_every_metric_equals_its_formula():
    """The relevant documents b, d and e have the ranks 2, 4 and none; g is judged irrelevant."""
    run = {"q": {"a": 5.0, "b": 4.0, "c": 3.0, "d": 2.0, "g": 1.0}}
    means, per_query = score_run({"q": {"b": 1, "d": 2, "e": 1, "g": 0}}, run, [1, 2, 4])
    assert list(means) == metric_names([1, 2, 4])
    best_gains = {1: 2, 2: 2 + 1 / log2(3), 4: 2 + 1 / log2(3) + 1 / 2}
    gains = {1: 0, 2: 1 / log2(3), 4: 1 / log2(3) + 2 / log2(5)}
    expected = {f"NDCG@{k}": gains[k] / best_gains[k] for k in gains}
    expected |= {"MAP@1": 0, "MAP@2": 1 / 2 / 3, "MAP@4": (1 / 2 + 2 / 4) / 3}
    expected |= {"Recall@1": 0, "Recall@2": 1 / 3, "Recall@4": 2 / 3}
    expected |= {"P@1": 0, "P@2": 1 / 2, "P@4": 2 / 4}
    expected |= {"Accuracy@1": 0, "Accuracy@2": 1, "Accuracy@4": 1}
    expected |= {"MRR@1": 0, "MRR@2": 1 / 2, "MRR@4": 1 / 2}
    assert per_query["q"] == means == pytest.approx(expected)


def test_scores_that_are_equal_in_float32_are_ordered_by_id_descending():
    hits = {"a": 1.0 + 1e-9, "b": np.float32(1.0)}
    means, _ = score_run({"q": {"a": 1}}, {"q": hits}, [1])
    assert means["NDCG@1"] == means["MRR@1"] == means["Accuracy@1"] == 0.0
    ranking = sort_as_trec_eval({"a": 1.0 + 1e-9, "c": 0.5, "b": 1.0})
    assert ranking == [("b", 1.0), ("a", 1.0 + 1e-9), ("c", 0.5)]


def test_a_document_with_the_querys_id_and_queries_without_judgements_are_ignored():
    run = {"a": {"a": 9.0, "b": 1.0}, "unjudged": {"b": 1.0}}
    means, per_query = score_run({"a": {"b": 1}}, run, [1])
    assert means["NDCG@1"] == 1.0
    assert list(per_query) == ["a"]
    assert run["a"] == {"a": 9.0, "b": 1.0}  # the caller's run has not changed


def test_metrics_may_be_named_in_any_case():
    assert check_metrics(["MRR@7", "p@1", "mrr@7"]) == ("MRR@7", "P@1")
    assert check_metrics(None) == MAIN_METRICS
    assert get_k_values(["MRR@7", "p@1"]) == (1, 3, 5, 7, 10, 20, 100, 1000)
    assert check_metric("eval_NDCG@10") == "ndcg@10"


@pytest.mark.parametrize("name", ["ndgc@10", "ndcg@0"])
def test_unknown_metrics_are_refused(name):
    with pytest.raises(ConfigError, match="ndcg@10"):
        check_metrics([name])
