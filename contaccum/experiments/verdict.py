"""The verdict: the test whether the trained model is better than the base model.

The test set is used for the verdict only, and never to choose settings.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from contaccum.evaluation.metrics import (
    ALPHA,
    MIN_CHANGED_GROUPS,
    sign_flip_test,
    warn_of_few_groups,
)
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
        word: "BETTER" or "WORSE" if p is at most 0.05 and at least `MIN_CHANGED_GROUPS` groups of
            queries have changed, else "LEVEL".
        metric: the name of the metric that is compared.
        base, trained, bm25: the mean of the metric over the queries, for each system.
        difference: ``trained`` minus ``base``.
        low, high, p: the limits of its 95% interval, and the p-value of the hypothesis that there
            is no difference; see `sign_flip_test`.
        queries: the number of queries.
        groups: the number of groups of queries; queries about the same passage are in one group.
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
    groups: int
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
        if self.groups < self.queries:
            queries += f" of {self.groups:,} passages"
        if self.folds > 1:
            queries += f" in {self.folds} splits"
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
    groups: Mapping[str, Any],
    metric: str = "NDCG@10",
    folds: int = 1,
) -> Verdict:
    """Compute the verdict from the scores of the queries.

    Args:
        trained, base, bm25: {query id: score} of each system, with the same queries.
        groups: {query id: its group}.
        metric: the name of the metric.
        folds: the number of splits that the queries come from.
    """
    test = sign_flip_test(trained, base, groups)
    word = LEVEL
    if test["p_value"] <= ALPHA and test["changed_groups"] >= MIN_CHANGED_GROUPS:
        word = BETTER if test["difference"] > 0 else WORSE
    return Verdict(
        word=word,
        metric=metric,
        base=statistics.fmean(base.values()),
        trained=statistics.fmean(trained.values()),
        bm25=statistics.fmean(bm25.values()),
        difference=test["difference"],
        low=test["low"],
        high=test["high"],
        p=test["p_value"],
        queries=len(base),
        groups=int(test["groups"]),
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
    return warnings + warn_of_test(verdict)


def warn_of_test(verdict: Verdict) -> list[str]:
    """Return warnings about the test alone: few groups of queries, and a better BM25."""
    warnings = warn_of_few_groups("the test queries", verdict.groups)
    if verdict.bm25 > verdict.trained:
        warnings.append(
            f"BM25 scores {verdict.bm25:.3f}, more than the trained model: search with BM25, or "
            "combine both"
        )
    return warnings
