"""The verdict: is the chosen candidate better than the best search without training?"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from contaccum.encoders.export import insert_card_section
from contaccum.evaluation.metrics import (
    BETTER,
    LEVEL,
    WORSE,
    describe_difference,
    judge,
    sign_flip_test,
    warn_of_few_groups,
)
from contaccum.experiments.candidates import Candidate
from contaccum.experiments.comparison import ScoreColumns

LEAST_QUERIES_OF_KIND = 10
"""Least number of known, and of new, test queries for a verdict on each kind."""

_MEANINGS = {
    "new": "No training query is about these documents, as if they were added later.",
    "known": "Training had other queries about these documents, as in a search of fixed articles.",
}
_ADVICE = {
    BETTER: "",
    WORSE: "training made the search worse",
    LEVEL: "training did not make the search significantly better",
}


@dataclass(frozen=True)
class Verdict:
    """The comparison of the chosen candidate with the best search without training, on test.

    Attributes:
        word: "BETTER" or "WORSE" if p is at most 0.05 and at least `MIN_CHANGED_GROUPS` groups of
            queries have changed, else "LEVEL".
        metric: the name of the metric that is compared.
        free, chosen, bm25: the mean of the metric over the queries: for the best search without
            training, for the chosen candidate, and for BM25.
        difference: ``chosen`` minus ``free``.
        low, high, p: the limits of its 95% interval, and the p-value of the hypothesis that there
            is no difference; see `sign_flip_test`.
        queries: the number of queries.
        groups: the number of groups of queries; queries about the same passage are in one group.
        changed_groups: the number of groups whose scores differ.
        free_name, chosen_name: what is compared.
        folds: the number of splits that the queries come from.
        kind: the documents of the queries, "new" or "known", if each has a verdict; else "".
        keeps_index: True if ``free`` encodes all documents anew, and ``chosen`` does not.
        questions: the kind of the queries; see `Split`.
    """

    word: str
    metric: str
    free: float
    chosen: float
    bm25: float
    difference: float
    low: float
    high: float
    p: float
    queries: int
    groups: int
    changed_groups: int
    free_name: str
    chosen_name: str
    folds: int = 1
    kind: str = ""
    keeps_index: bool = False
    questions: str = ""

    @property
    def advice(self) -> str:
        """A sentence with advice for the user; empty if training has paid."""
        if self.keeps_index and self.word != WORSE:
            return "The old index with the map is not significantly worse: nothing must be encoded."
        if self.keeps_index:
            return "The old index with the map is worse: encode all documents anew."
        if self.word == BETTER:
            return ""
        where = f"{self.kind} documents" if self.kind else "the test set"
        return f"On {where} {_ADVICE[self.word]}: keep {self.free_name}."

    def __str__(self) -> str:
        queries = f"{self.queries:,} held-out queries"
        if self.groups < self.queries:
            queries += f" of {self.groups:,} passages"
        if self.folds > 1:
            queries += f" in {self.folds} splits"
        test = {**asdict(self), "p_value": self.p}
        difference = describe_difference(self.metric, self.free, self.chosen, queries, test)
        where = f" on {self.questions} questions" if self.questions else ""
        where += f" on {self.kind} documents" if self.kind else ""
        if self.free_name == self.chosen_name:
            return (
                f"{self.word}{where}: nothing that was trained is better on dev than "
                f"{self.free_name}, which has {self.free:.3f} on {queries}: keep it"
            )
        line = f"{self.word}{where}: {difference}; from {self.free_name} to {self.chosen_name}"
        if self.keeps_index:
            keeps = "encode all documents anew" if self.word == WORSE else "keep the old index"
            return f"{line}; {keeps}"
        if self.word != BETTER:
            line += f"; keep {self.free_name}"
        return line

    def record(self) -> dict[str, Any]:
        """Return the verdict as the content of a JSON file."""
        meaning = _MEANINGS.get(self.kind, "")
        return {**asdict(self), "line": str(self), "advice": self.advice, "meaning": meaning}


def compute_verdict(
    scores: Mapping[str, Mapping[str, Any]],
    systems: tuple[str, str],
    names: tuple[str, str],
    queries: Collection[str],
    metric: str = "NDCG@10",
    folds: int = 1,
    kind: str = "",
    keeps_index: bool = False,
) -> Verdict:
    """Compute the verdict on some queries from their scores.

    Args:
        scores: {column: {query: value}}: the scores of the systems and of "bm25", and the "group".
        systems, names: the columns of the best search without training and of the chosen candidate,
            and their names.
        queries: the queries.
        metric: the name of the metric.
        folds: the number of splits that the queries come from.
        kind, keeps_index: see `Verdict`.
    """
    free, chosen, bm25 = (
        {query: scores[system][query] for query in queries} for system in (*systems, "bm25")
    )
    test = sign_flip_test(chosen, free, scores["group"])
    return Verdict(
        word=judge(test),
        metric=metric,
        free=statistics.fmean(free.values()),
        chosen=statistics.fmean(chosen.values()),
        bm25=statistics.fmean(bm25.values()),
        difference=test["difference"],
        low=test["low"],
        high=test["high"],
        p=test["p_value"],
        queries=len(free),
        groups=int(test["groups"]),
        changed_groups=int(test["changed_groups"]),
        free_name=names[0],
        chosen_name=names[1],
        folds=folds,
        kind=kind,
        keeps_index=keeps_index,
    )


def compute_verdicts(
    scores: ScoreColumns, free: Candidate, chosen: Candidate, folds: int = 1, questions: str = ""
) -> dict[str, Verdict]:
    """Compute a verdict on new documents and one on known documents, if each has enough queries.

    Returns:
        {"new": verdict, "known": verdict}; or one verdict over all queries, as "new" or "known" if
        all are of this kind, else as "all".
    """
    queries: dict[str, list[str]] = {"new": [], "known": []}
    for query, is_known in scores["known"].items():
        queries["known" if is_known else "new"].append(query)
    has_both = min(map(len, queries.values())) >= LEAST_QUERIES_OF_KIND
    if not has_both:
        present = [kind for kind in queries if queries[kind]]
        queries = {present[0] if len(present) == 1 else "all": list(scores["known"])}
    systems = ("bm25" if free.system == "bm25" else "base_with_bm25", "trained_with_bm25")
    names = (free.describe(), chosen.describe())
    keeps_index = free.system == "anew" and chosen.system == "map"
    verdicts = {}
    for kind, members in queries.items():
        shown = kind if has_both else ""
        verdict = compute_verdict(
            scores, systems, names, members, folds=folds, kind=shown, keeps_index=keeps_index
        )
        verdicts[kind] = replace(verdict, questions=questions)
    return verdicts


def describe_vectors(scores: ScoreColumns) -> str:
    """Return a line that compares the vectors alone, without BM25, on all test queries."""
    test = sign_flip_test(scores["trained"], scores["base"], scores["group"])
    base, trained = (statistics.fmean(scores[name].values()) for name in ("base", "trained"))
    queries = f"{len(scores['base']):,} queries"
    return f"the vectors alone: {describe_difference('NDCG@10', base, trained, queries, test)}"


def warn_of_test(verdict: Verdict) -> list[str]:
    """Return warnings about the test alone: few groups of queries, and a better BM25."""
    where = f" on {verdict.kind} documents" if verdict.kind else ""
    warnings = warn_of_few_groups(f"the test queries{where}", verdict.groups)
    if verdict.bm25 > max(verdict.chosen, verdict.free):
        warnings.append(
            f"BM25 alone scores {verdict.bm25:.3f} on test{where}, more than what dev preferred"
        )
    return warnings


def write_verdicts_to_card(model_folder: Path, verdicts: Iterable[Verdict], base_name: str) -> None:
    """Write the verdicts at the top of the model card, below its metadata.

    Those of an earlier start are replaced.

    Args:
        base_name: the name of the base model.
    """
    paragraphs = []
    for verdict in verdicts:
        record = verdict.record()
        paragraphs += [f"**{verdict}**", record["meaning"], record["advice"]]
    paragraphs.append(f"By contaccum fit, from {base_name}.")
    text = "\n\n".join(paragraph for paragraph in paragraphs if paragraph)
    insert_card_section(model_folder, "verdict of contaccum fit", text)
