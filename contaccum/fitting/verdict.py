"""The verdict: the test whether the trained model is better than the base model.

The test set is used for the verdict only, and never to choose settings.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from contaccum.evaluation.metrics import paired_bootstrap
from contaccum.tuning.choice import Choice

BETTER = "BETTER"
WORSE = "WORSE"
LEVEL = "LEVEL"

_ADVICE = {
    BETTER: "",
    WORSE: "On the test set the trained model is worse than the base model: keep the base model.",
    LEVEL: (
        "On the test set the trained model is not significantly better than the base model: keep "
        "the base model."
    ),
}


@dataclass(frozen=True)
class Verdict:
    """The comparison of the trained model with the base model on held-out queries.

    Attributes:
        word: "BETTER" if the 95% interval of the difference lies above 0, "WORSE" if it lies below
            0, else "LEVEL".
        metric: the name of the metric that is compared.
        base, trained, bm25: the mean of the metric over the queries, for each system.
        difference: ``trained`` minus ``base``.
        low, high: the limits of its 95% interval, by a paired bootstrap over the queries.
        p: the p-value of the hypothesis that there is no difference.
        queries: the number of queries.
        folds: the number of splits that the queries come from.
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
    folds: int = 1

    @property
    def advice(self) -> str:
        """A sentence with advice for the user; empty if the trained model is better."""
        return _ADVICE[self.word]

    def __str__(self) -> str:
        p_value = f"p = {self.p:.3f}"
        if self.p < 0.001:
            p_value = "p < 0.001"
        queries = f"{self.queries:,} held-out queries"
        if self.folds > 1:
            queries += f" of {self.folds} splits"
        metric = self.metric.replace("NDCG", "nDCG")
        line = (
            f"{self.word}: {metric} {self.base:.3f} -> {self.trained:.3f} on {queries} "
            f"({self.difference:+.3f}, 95% {self.low:+.3f} to {self.high:+.3f}, {p_value}); "
            f"BM25 {self.bm25:.3f}"
        )
        if self.word != BETTER:
            line += "; keep the base model"
        return line

    def record(self) -> dict[str, Any]:
        """Return the verdict as the content of a JSON file."""
        return {**asdict(self), "line": str(self), "advice": self.advice}


def compute_verdict(
    trained: Mapping[str, float],
    base: Mapping[str, float],
    bm25: Mapping[str, float],
    metric: str = "NDCG@10",
    folds: int = 1,
) -> Verdict:
    """Compute the verdict from the scores of the queries.

    Args:
        trained, base, bm25: {query id: score} of each system, with the same queries.
        metric: the name of the metric.
        folds: the number of splits that the queries come from.
    """
    query_ids = list(base)
    bootstrap = paired_bootstrap(
        [trained[query] for query in query_ids], [base[query] for query in query_ids]
    )
    word = LEVEL
    if bootstrap["low"] > 0.0:
        word = BETTER
    if bootstrap["high"] < 0.0:
        word = WORSE
    return Verdict(
        word=word,
        metric=metric,
        base=statistics.fmean(base.values()),
        trained=statistics.fmean(trained.values()),
        bm25=statistics.fmean(bm25.values()),
        difference=bootstrap["difference"],
        low=bootstrap["low"],
        high=bootstrap["high"],
        p=bootstrap["p_value"],
        queries=len(query_ids),
        folds=folds,
    )


def collect_warnings(verdict: Verdict, choice: Choice) -> list[str]:
    """Return the warnings of the choice, then warnings about the verdict, one line each.

    Args:
        verdict: the comparison with the base model on test.
        choice: the chosen settings, with the comparison with the base model on dev.
    """
    warnings = list(choice.warnings)
    dev = choice.against_base
    differences = (
        f"{dev['difference']:+.3f} on dev (95% {dev['low']:+.3f} to {dev['high']:+.3f}), and "
        f"{verdict.difference:+.3f} on test"
    )
    is_better_on_dev = dev["low"] > 0.0
    is_better_on_test = verdict.word == BETTER
    if is_better_on_dev and not is_better_on_test:
        warnings.append(f"dev and test disagree: {differences}; the test counts")
    if is_better_on_test and not is_better_on_dev:
        warnings.append(f"the model is significantly better on test, but not on dev: {differences}")
    return warnings + warn_of_bm25(verdict)


def warn_of_bm25(verdict: Verdict) -> list[str]:
    """Return a warning if BM25 is better than the model on test; otherwise an empty list."""
    if verdict.bm25 <= verdict.trained:
        return []
    return [
        f"BM25 scores {verdict.bm25:.3f}, more than the trained model: search with BM25, or "
        "combine both"
    ]
