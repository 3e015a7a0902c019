"""Comparison on the test set: the search by each system, and the scores of the queries.

The test set is used for the verdict only, and never to choose a candidate.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from contaccum.data.beir import BeirDataset, get_positives, read_split_queries
from contaccum.data.near_duplicates import group_records, normalise
from contaccum.data.records import Record
from contaccum.data.rows import RecordReport
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.evaluation.metrics import MIN_CHANGED_GROUPS, sign_flip_test
from contaccum.evaluation.results import Run
from contaccum.experiments.candidates import MEAN, Candidate, search_with
from contaccum.retrieval.bm25 import fuse_runs

SYSTEMS = ("bm25", "base", "base_with_bm25", "trained", "trained_with_bm25")
"""What is compared on the test set."""
ScoreColumns = dict[str, dict[str, Any]]
"""{column: {test query: value}}: nDCG@10 of each of `SYSTEMS`, whether it is "known", its "texts"
(those of the query and of its relevant documents), and, once folds are pooled, its "group"."""
MAX_SHOWN_QUERIES = 10
"""The record shows so many queries with the largest gains, with the largest losses, and failing."""

_SHOWN_METRICS = ("NDCG@10", "MRR@10", "Recall@100")  # their names in the report
_NUM_TOP_DOCUMENTS = 3  # retrieved documents that the record shows for a query
_NUM_FIRST = 5  # documents among which users look for the right one


class SystemResult(NamedTuple):
    """The results of one system on the test set.

    Attributes:
        means: {metric: mean over the queries}.
        query_scores: {query id: nDCG@10}.
        run: {query id: {document id: score}} of the retrieved documents.
    """

    means: dict[str, float]
    query_scores: dict[str, float]
    run: Run


def search_test_set(
    evaluator: RetrievalEvaluator,
    base: DualEncoder,
    base_candidate: Candidate,
    chosen: Candidate,
    folder: Path,
    base_folder: Path | None = None,
) -> dict[str, SystemResult]:
    """Search the test set with BM25, both models, and both with BM25 beside them.

    Args:
        evaluator: the evaluator of the test set. Its ``documents`` are the document vectors by the
            base model.
        base_candidate: the base model, with the weight of BM25 beside it.
        chosen: the chosen candidate.
        folder: the folder with its map or its model.
        base_folder: the folder of ``base_candidate``, if it is a new model.

    Returns:
        {system: result} with the systems `SYSTEMS`.
    """
    bm25 = evaluator.search_bm25()
    runs = {
        "bm25": bm25,
        "base": search_with(base_candidate, base, base_folder or folder, evaluator),
        "trained": search_with(chosen, base, folder, evaluator),
    }
    for name, candidate in (("base", base_candidate), ("trained", chosen)):
        runs[f"{name}_with_bm25"] = fuse_runs(runs[name], bm25, candidate.bm25_weight)
    results = {}
    for system in SYSTEMS:
        means = evaluator.score_run(runs[system])
        results[system] = SystemResult(means, evaluator.query_scores, runs[system])
    return results


def collect_scores(
    test_set: BeirDataset,
    results: Mapping[str, SystemResult],
    fold: int = 0,
    dev: BeirDataset | None = None,
) -> ScoreColumns:
    """Return the scores of the test queries of a fold, with their kinds and texts.

    Args:
        results: {system: its result} of `SYSTEMS`.
        dev: its queries are left out. They have texts, because they may link others to a group.
    """
    known: set[str] = set()
    if (test_set.path / "qrels" / "known.tsv").is_file():
        known.update(read_split_queries(test_set.path, "known", RecordReport()))
    left_out = set(map(normalise, dev.queries.values())) if dev else set()
    scores: ScoreColumns = {name: {} for name in (*SYSTEMS, "known", "texts")}
    for query_id, text in test_set.queries.items():
        query = f"{fold}/{query_id}"  # folds may use the same query ids
        scores["texts"][query] = [text, *get_positives(test_set, query_id)]
        if normalise(text) in left_out:
            continue
        for system in SYSTEMS:
            scores[system][query] = results[system].query_scores[query_id]
        scores["known"][query] = query_id in known
    return scores


def pool_scores(fold_scores: Sequence[ScoreColumns]) -> ScoreColumns:
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


def tabulate(
    results: Mapping[str, SystemResult],
    scores: ScoreColumns,
    kinds: Collection[str],
    candidates: Sequence[Candidate],
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
    bm25_candidate, base_candidate = candidates[:2]
    with_bm25 = chosen.name if chosen.system == "bm25" else f"{chosen.name} with BM25"
    rows = (
        ("bm25", "BM25", bm25_candidate.scores),
        ("base", base_candidate.name, base_candidate.vectors),
        ("base_with_bm25", f"{base_candidate.name} with BM25", base_candidate.scores),
        ("trained", chosen.name, chosen.vectors),
        ("trained_with_bm25", with_bm25, chosen.scores),
    )
    table = []
    for system, name, dev in rows:
        row: dict[str, Any] = {"name": name, "is_free": system == free_system}
        row["dev"] = dev.get(MEAN)  # None for the vectors of BM25
        row |= {metric: results[system].means[metric.lower()] for metric in _SHOWN_METRICS}
        test = sign_flip_test(scores[system], scores[free_system], groups)
        has_interval = test["changed_groups"] >= MIN_CHANGED_GROUPS
        row["low"] = free + test["low"] if has_interval else None
        row["high"] = free + test["high"] if has_interval else None
        if len(kinds) > 1:
            for kind in kinds:
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

    A query fails if neither search has a relevant document among the first ten. ``first`` is the
    number of queries with a relevant document among the first five, before and after.

    Args:
        dataset: the test set.
        base, trained: the results of the search without training and of the chosen candidate.
    """
    gains = {
        query_id: trained.query_scores[query_id] - base_score
        for query_id, base_score in base.query_scores.items()
    }
    gained = [query_id for query_id, gain in gains.items() if gain > 0]
    gained.sort(key=gains.__getitem__, reverse=True)
    lost = [query_id for query_id, gain in gains.items() if gain < 0]
    lost.sort(key=gains.__getitem__)
    failing = [
        query_id
        for query_id, gain in gains.items()
        if gain == 0 and trained.query_scores[query_id] == 0
    ]

    def describe(query_ids: list[str]) -> list[dict[str, Any]]:
        shown = query_ids[:MAX_SHOWN_QUERIES]
        return [_describe_query(dataset, query_id, base, trained) for query_id in shown]

    def count_found(run: Run) -> int:
        return sum(
            any(
                document["is_gold"]
                for document in _get_top_documents(dataset, query_id, run, _NUM_FIRST)
            )
            for query_id in gains
        )

    return {
        "gained": describe(gained),
        "lost": describe(lost),
        "failing": describe(failing),
        "num_gained": len(gained),
        "num_lost": len(lost),
        "num_failing": len(failing),
        "num_same": len(gains) - len(gained) - len(lost),
        "first": {"before": count_found(base.run), "after": count_found(trained.run)},
    }


def _describe_query(
    dataset: BeirDataset, query_id: str, base: SystemResult, trained: SystemResult
) -> dict[str, Any]:
    """Return the texts of a query, its relevant documents and its top documents, with scores."""
    relevant = [name for name, grade in dataset.qrels[query_id].items() if grade > 0]
    return {
        "query": dataset.queries[query_id],
        "before": base.query_scores[query_id],
        "after": trained.query_scores[query_id],
        "gold": [dict(dataset.corpus[name]) for name in relevant if name in dataset.corpus],
        "top_before": _get_top_documents(dataset, query_id, base.run, _NUM_TOP_DOCUMENTS),
        "top_after": _get_top_documents(dataset, query_id, trained.run, _NUM_TOP_DOCUMENTS),
    }


def _get_top_documents(
    dataset: BeirDataset, query_id: str, run: Run, number: int
) -> list[dict[str, Any]]:
    """Return the texts of a query's top documents, each with a mark whether it is relevant."""
    scores = run.get(query_id, {})
    ranking = sorted(scores, key=lambda document_id: -scores[document_id])
    top_documents = []
    for document_id in ranking[:number]:
        is_relevant = dataset.qrels[query_id].get(document_id, 0) > 0
        top_documents.append({**dataset.corpus[document_id], "is_gold": is_relevant})
    return top_documents
