"""Whether the trained model is better than the model as it is, by a test set that was read once."""

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
    WORSE: "Training made the model worse on these data: keep the base model.",
    LEVEL: "The test set does not tell the trained model from the base model: keep the base model.",
}


@dataclass(frozen=True)
class Verdict:
    """The comparison of the trained model with the model as it is, on held-out queries.

    Attributes:
        word: "BETTER" if the 95% interval of the difference lies above 0, "WORSE" if it lies below,
            else "LEVEL".
        metric: that is compared.
        base, trained, bm25: its means over the queries.
        difference: trained minus base, with its 95% interval from `low` to `high`, and `p` of "there
            is no difference"; by a paired bootstrap over the queries.
        queries: that were scored.
        folds: splits that the queries come from.
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
        """A sentence about what to do; empty where the trained model is better."""
        return _ADVICE[self.word]

    def __str__(self) -> str:
        p = "p < 0.001" if self.p < 0.001 else f"p = {self.p:.3f}"
        queries = f"{self.queries:,} held-out queries"
        if self.folds > 1:
            queries += f" of {self.folds} splits"
        metric = self.metric.replace("NDCG", "nDCG")
        line = (
            f"{self.word}: {metric} {self.base:.3f} -> {self.trained:.3f} on {queries} "
            f"({self.difference:+.3f}, 95% {self.low:+.3f} to {self.high:+.3f}, {p}); BM25 {self.bm25:.3f}"
        )
        if self.word != BETTER:
            line += ": keep the base model"
        return line

    def record(self) -> dict[str, Any]:
        """Return all of it for a JSON file."""
        return {**asdict(self), "line": str(self), "advice": self.advice}


def judge(
    trained: Mapping[str, float],
    base: Mapping[str, float],
    bm25: Mapping[str, float],
    metric: str = "NDCG@10",
    folds: int = 1,
) -> Verdict:
    """Return the verdict of scores by query.

    Args:
        trained, base, bm25: {query id: score}, of the same queries.
    """
    queries = list(base)
    found = paired_bootstrap(
        [trained[query] for query in queries], [base[query] for query in queries]
    )
    word = LEVEL
    if found["low"] > 0.0:
        word = BETTER
    if found["high"] < 0.0:
        word = WORSE
    return Verdict(
        word=word,
        metric=metric,
        base=statistics.fmean(base.values()),
        trained=statistics.fmean(trained.values()),
        bm25=statistics.fmean(bm25.values()),
        difference=found["difference"],
        low=found["low"],
        high=found["high"],
        p=found["p_value"],
        queries=len(queries),
        folds=folds,
    )


def warnings_of(verdict: Verdict, choice: Choice) -> list[str]:
    """Return what is to be known beside a verdict, a line each."""
    warnings = list(choice.warnings)
    dev = choice.against_base
    on_dev = f"{dev['difference']:+.3f} on dev (95% {dev['low']:+.3f} to {dev['high']:+.3f})"
    if dev["low"] > 0.0 and verdict.word != BETTER:
        warnings.append(f"dev and test disagree: {on_dev}, and {verdict.difference:+.3f} on test")
    if dev["low"] <= 0.0 and verdict.word == BETTER:
        warnings.append(f"test says more than dev: {on_dev}, and {verdict.difference:+.3f} on test")
    if verdict.bm25 > verdict.trained:
        warnings.append(
            f"BM25 scores {verdict.bm25:.3f}, more than the trained model: search by words, or by both"
        )
    return warnings
