"""The verdict: is the chosen candidate better on test than the best search without training?

The test set is searched and scored here, for the verdict only, and never to choose a candidate.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from contaccum.data.beir import BeirDataset, list_positives, load_beir_folder
from contaccum.data.near_duplicates import group_records, normalise
from contaccum.data.records import Record
from contaccum.encoders.export import insert_card_section
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.evaluation.metrics import (
    BETTER,
    MIN_CHANGED_GROUPS,
    WORSE,
    describe_difference,
    judge,
    sign_flip_test,
    warn_of_few_groups,
)
from contaccum.evaluation.results import Run
from contaccum.experiments.candidates import MEAN, Candidate, read_known_queries, search_with
from contaccum.experiments.ladder import Ladder
from contaccum.retrieval.bm25 import fuse_runs
from contaccum.retrieval.documents import StoreDocuments

SYSTEMS = ("bm25", "base", "base_with_bm25", "trained", "trained_with_bm25")
"""What is compared on the test set."""
ScoreColumns = dict[str, dict[str, Any]]
"""{column: {test query: value}}: nDCG@10 of each of `SYSTEMS`, whether it is "known", its "texts"
(those of the query and of its relevant documents), and, once folds are pooled, its "group"."""
LEAST_QUERIES_OF_KIND = 10
"""Least number of known, and of new, test queries for a verdict on each kind."""

_SHOWN_METRICS = ("NDCG@10", "MRR@10", "Recall@100")  # their names in the report
_MAX_SHOWN_QUERIES = 10  # with the largest gains, with the largest losses, and failing
_NUM_TOP_DOCUMENTS = 3  # retrieved documents that the record shows for a query
_NUM_FIRST = 5  # documents among which users look for the right one
_MEANINGS = {
    "new": "No training query is about these documents, as if they were added later.",
    "known": "Training had other queries about these documents, as in a search of fixed articles.",
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
                f"{self.word}{where}: nothing that was trained is clearly better on dev than "
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
        return {**asdict(self), "line": str(self), "meaning": _MEANINGS.get(self.kind, "")}

    def warnings(self) -> list[str]:
        """Return warnings about the test alone: few groups of queries, and a better BM25."""
        where = f" on {self.kind} documents" if self.kind else ""
        warnings = warn_of_few_groups(f"the test queries{where}", self.groups)
        if self.bm25 > max(self.chosen, self.free):
            warnings.append(
                f"BM25 alone scores {self.bm25:.3f} on test{where}, more than what dev preferred"
            )
        return warnings


# Search and scores --------------------------------------------------------------------------------


class SystemResult(NamedTuple):
    """The {metric: mean}, {query id: nDCG@10} and retrieved documents of a system on test."""

    means: dict[str, float]
    query_scores: dict[str, float]
    run: Run


def search_test_set(
    data: Path, documents: StoreDocuments | None, ladder: Ladder, chosen: Candidate, folder: Path
) -> tuple[BeirDataset, dict[str, SystemResult]]:
    """Search the test set of a split by each of `SYSTEMS`; return it, and the results.

    ``documents`` are the document vectors by the base model. The map or the model of the chosen
    candidate is in ``folder``.
    """
    test_set = load_beir_folder(data / "test", "test")
    evaluator = RetrievalEvaluator(test_set, batch_size=ladder.job.batch_size)
    evaluator.documents = documents
    bm25 = evaluator.search_bm25()
    runs = {"bm25": bm25}
    base = ladder.base_candidate
    for name, candidate, place in (
        ("base", base, ladder.get_folder(base)),
        ("trained", chosen, folder),
    ):
        runs[name] = search_with(candidate, ladder.base, place, evaluator)
        runs[f"{name}_with_bm25"] = fuse_runs(runs[name], bm25, candidate.bm25_weight)
    results = {}
    for system, run in runs.items():
        means = evaluator.score_run(run)
        results[system] = SystemResult(means, evaluator.query_scores, run)
    return test_set, results


def collect_scores(
    test_set: BeirDataset,
    results: Mapping[str, SystemResult],
    fold: int = 0,
    dev: BeirDataset | None = None,
) -> ScoreColumns:
    """Return the scores of the test queries of a fold, with their kinds and texts.

    Queries of ``dev`` are left out. They have texts, because they may link others to a group.
    """
    known = read_known_queries(test_set.path)
    left_out = set(map(normalise, dev.queries.values())) if dev else set()
    scores: ScoreColumns = {name: {} for name in (*SYSTEMS, "known", "texts")}
    for query_id, (text, positives) in zip(test_set.queries, list_positives(test_set), strict=True):
        query = f"{fold}/{query_id}"  # folds may use the same query ids
        scores["texts"][query] = [text, *positives]
        if normalise(text) in left_out:
            continue
        for system in SYSTEMS:
            scores[system][query] = results[system].query_scores[query_id]
        scores["known"][query] = query_id in known
    return scores


def join_folds(fold_scores: Sequence[ScoreColumns]) -> ScoreColumns:
    """Return the scores of the test queries of all folds, with their groups.

    Known queries of several folds may be about the same passage, so queries are in one group by
    their texts (see `group_queries`), whatever their folds.
    """
    pooled: ScoreColumns = {}
    for scores in fold_scores:
        for name, values in scores.items():
            pooled.setdefault(name, {}).update(values)
    records = [Record(query, positives, []) for query, *positives in pooled["texts"].values()]
    groups = group_records(records).group_of_record
    pooled["group"] = dict(zip(pooled["texts"], groups, strict=True))
    return pooled


# Comparison ---------------------------------------------------------------------------------------


def compute_verdict(
    scores: Mapping[str, Mapping[str, Any]],
    systems: tuple[str, str],
    names: tuple[str, str],
    queries: Collection[str],
    **notes: Any,
) -> Verdict:
    """Compute the verdict on some queries from their scores.

    Args:
        scores: {column: {query: value}}: the scores of the systems and of "bm25", and the "group".
        systems, names: the columns of the best search without training and of the chosen candidate,
            and their names.
        notes: those attributes of `Verdict` that do not follow from the scores.
    """
    free, chosen, bm25 = (
        {query: scores[system][query] for query in queries} for system in (*systems, "bm25")
    )
    test = sign_flip_test(chosen, free, scores["group"])
    return Verdict(
        word=judge(test),
        metric="NDCG@10",
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
        **notes,
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
    verdicts = {}
    for kind, members in queries.items():
        verdicts[kind] = compute_verdict(
            scores,
            systems,
            names,
            members,
            folds=folds,
            kind=kind if has_both else "",
            keeps_index=free.system == "anew" and chosen.system == "map",
            questions=questions,
        )
    return verdicts


def describe_vectors(scores: ScoreColumns) -> str:
    """Return a line that compares the vectors alone, without BM25, on all test queries."""
    test = sign_flip_test(scores["trained"], scores["base"], scores["group"])
    base, trained = (statistics.fmean(scores[name].values()) for name in ("base", "trained"))
    queries = f"{len(scores['base']):,} queries"
    return f"the vectors alone: {describe_difference('NDCG@10', base, trained, queries, test)}"


def tabulate(
    results: Mapping[str, SystemResult],
    scores: ScoreColumns,
    kinds: Collection[str],
    ladder: Ladder,
    chosen: Candidate,
    free_system: str,
    groups: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return a row for each system: its name and its scores on dev and test.

    ``low`` and ``high`` are the nDCG@10 on test of the best search without training, plus the
    limits of the 95% interval of the difference from it; None if the test gives no interval.

    Args:
        scores: the scores of the test queries, which are in ``groups``.
        kinds: the kinds of documents, each of which has a verdict.
        free_system: the system that is the best search without training.
    """
    free = statistics.fmean(scores[free_system].values())
    bm25, base = ladder.candidates[:2]
    with_bm25 = chosen.name if chosen.system == "bm25" else f"{chosen.name} with BM25"
    table = []
    for system, name, dev in (
        ("bm25", "BM25", bm25.scores),
        ("base", base.name, base.vectors),
        ("base_with_bm25", f"{base.name} with BM25", base.scores),
        ("trained", chosen.name, chosen.vectors),
        ("trained_with_bm25", with_bm25, chosen.scores),
    ):
        if "bm25" in system and not ladder.has_texts:
            continue
        row: dict[str, Any] = {"name": name, "is_free": system == free_system}
        row["dev"] = dev.get(MEAN)  # None for the vectors of BM25
        row |= {metric: results[system].means[metric.lower()] for metric in _SHOWN_METRICS}
        test = sign_flip_test(scores[system], scores[free_system], groups)
        has_interval = test["changed_groups"] >= MIN_CHANGED_GROUPS
        row["low"] = free + test["low"] if has_interval else None
        row["high"] = free + test["high"] if has_interval else None
        for kind in kinds if len(kinds) > 1 else ():
            of_kind = [
                score
                for query, score in scores[system].items()
                if scores["known"][query] == (kind == "known")
            ]
            # All queries of a kind may be those of other splits.
            row[kind] = statistics.fmean(of_kind) if of_kind else None
        table.append(row)
    return table


def compare_queries(
    dataset: BeirDataset, base: SystemResult, trained: SystemResult
) -> dict[str, Any]:
    """Return the queries that gained most, that lost most, and that still fail, with their numbers.

    Each has its texts, its relevant documents and the top documents by both searches, ``base`` and
    ``trained``. A query fails if neither has a relevant document among the first ten. ``first`` is
    the number of queries with a relevant document among the first five, before and after.
    """
    before, after = base.query_scores, trained.query_scores
    gains = {query_id: after[query_id] - before[query_id] for query_id in before}
    lists = {
        "gained": sorted((q for q in gains if gains[q] > 0), key=lambda q: -gains[q]),
        "lost": sorted((q for q in gains if gains[q] < 0), key=lambda q: gains[q]),
        "failing": [q for q in gains if gains[q] == 0 and after[q] == 0],
    }

    def list_top(query_id: str, run: Run, number: int) -> list[dict[str, Any]]:
        """Return the texts of a query's top documents, each with a mark whether it is relevant."""
        scores = run.get(query_id, {})
        grades = dataset.qrels[query_id]
        ranking = sorted(scores, key=lambda document_id: -scores[document_id])
        return [
            {**dataset.corpus[document_id], "is_gold": grades.get(document_id, 0) > 0}
            for document_id in ranking[:number]
        ]

    def describe(query_id: str) -> dict[str, Any]:
        relevant = [name for name, grade in dataset.qrels[query_id].items() if grade > 0]
        return {
            "query": dataset.queries[query_id],
            "before": before[query_id],
            "after": after[query_id],
            "gold": [dict(dataset.corpus[name]) for name in relevant if name in dataset.corpus],
            "top_before": list_top(query_id, base.run, _NUM_TOP_DOCUMENTS),
            "top_after": list_top(query_id, trained.run, _NUM_TOP_DOCUMENTS),
        }

    def count_found(run: Run) -> int:
        tops = [list_top(query_id, run, _NUM_FIRST) for query_id in gains]
        return sum(any(document["is_gold"] for document in top) for top in tops)

    return {
        **{name: list(map(describe, ids[:_MAX_SHOWN_QUERIES])) for name, ids in lists.items()},
        **{f"num_{name}": len(ids) for name, ids in lists.items()},
        "num_same": len(gains) - len(lists["gained"]) - len(lists["lost"]),
        "first": {"before": count_found(base.run), "after": count_found(trained.run)},
    }


def write_verdicts_to_card(model_folder: Path, verdicts: Iterable[Verdict], base_name: str) -> None:
    """Write the verdicts at the top of the model card; those of an earlier start are replaced."""
    paragraphs = []
    for verdict in verdicts:
        paragraphs += [f"**{verdict}**", _MEANINGS.get(verdict.kind, "")]
    paragraphs.append(f"By contaccum fit, from {base_name}.")
    text = "\n\n".join(paragraph for paragraph in paragraphs if paragraph)
    insert_card_section(model_folder, "verdict of contaccum fit", text)
