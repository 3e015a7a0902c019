"""Which training records hang together, so that a split must not part them.

Two records hang together if they share a text (a query or a positive passage, equal after case and
white space) or a near-duplicate of one. What hangs together, directly or through others, is a
group: a connected component of the graph of texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from scipy.cluster.hierarchy import DisjointSet

from contaccum.data.beir import BeirDataset
from contaccum.data.fields import Record
from contaccum.data.near_duplicates import join_near_duplicates, normalise
from contaccum.data.records import passage_text

HeldOutBy = Literal["passage", "query"]
"""What records hang together by: queries and passages, or queries alone."""

_MOST_SHARED = 0.2  # of the queries of a test set that is still said to hold out passages


class Grouping(NamedTuple):
    """Which records hang together."""

    group_of_record: list[int]
    queries_of_group: dict[int, int]  # number of distinct queries of the records of each group
    key_of_group: dict[int, str]  # of each group the query that comes first in the alphabet
    groups_of_test: set[int]  # those that hang together with a test set which the data came with
    num_near_duplicates: int


def group_records(
    records: Sequence[Record],
    test: BeirDataset | None,
    held_out_by: HeldOutBy,
    show_progress: bool = False,
) -> Grouping:
    """Find the records that hang together.

    Args:
        test: a test set that the data came with.
        held_out_by: with "query", passages do not count.
    """
    texts: dict[str, int] = {}
    pairs = []
    for record in records:
        query = texts.setdefault(normalise(record.query), len(texts))
        if held_out_by == "passage":
            for positive in record.positives:
                passage = texts.setdefault(normalise(positive), len(texts))
                pairs.append((query, passage))
    texts_of_test = set()
    if test is not None:
        for text in _texts_of_test(test, held_out_by):
            texts_of_test.add(texts.setdefault(normalise(text), len(texts)))

    groups = DisjointSet(range(len(texts)))
    for query, passage in pairs:
        groups.merge(query, passage)
    num_near_duplicates = join_near_duplicates(list(texts), groups, show_progress)

    group_of_record = []
    queries: dict[int, set[str]] = {}
    for record in records:
        query_text = normalise(record.query)
        group = groups[texts[query_text]]
        group_of_record.append(group)
        queries.setdefault(group, set()).add(query_text)
    return Grouping(
        group_of_record,
        {group: len(members) for group, members in queries.items()},
        {group: min(members) for group, members in queries.items()},
        {groups[text] for text in texts_of_test},
        num_near_duplicates,
    )


def held_out_like(records: Sequence[Record], test: BeirDataset | None) -> HeldOutBy:
    """Return how to hold out queries so that they are to the records what the test set is to them.

    It is "query" if over a fifth of the test queries need a passage that a record needs too.
    """
    if test is None:
        return "passage"
    positives = {normalise(positive) for record in records for positive in record.positives}
    num_shared = 0
    for query in test.queries:
        passages = _positives_of_query(test, query)
        num_shared += any(normalise(passage) in positives for passage in passages)
    return "query" if num_shared > _MOST_SHARED * len(test.queries) else "passage"


def _texts_of_test(test: BeirDataset, held_out_by: HeldOutBy) -> Iterator[str]:
    for query, text in test.queries.items():
        yield text
        if held_out_by == "passage":
            yield from _positives_of_query(test, query)


def _positives_of_query(dataset: BeirDataset, query: str) -> list[str]:
    """Return the texts of the relevant documents of a query, by its id."""
    judged = dataset.qrels[query]
    return [passage_text(**dataset.corpus[name]) for name, grade in judged.items() if grade > 0]
