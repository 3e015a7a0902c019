"""Groups of training records that a split must keep on one side.

Two records are linked if they share a text (a query or a positive passage), have nearly the same
text, or have the same document of the corpus, one of them without its title
(`contaccum.data.near_duplicates`). A group is a connected component of the graph of linked records:
all records that are linked directly or through other records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from scipy.cluster.hierarchy import DisjointSet

from contaccum.data.beir import BeirDataset, get_positives
from contaccum.data.fields import Record
from contaccum.data.near_duplicates import (
    find_near_duplicates,
    get_words,
    join_near_duplicates,
    normalise,
)
from contaccum.data.readers import Passage
from contaccum.data.records import fold_case

HeldOutBy = Literal["passage", "query"]
"""Texts that link records: queries and passages ("passage"), or queries alone ("query").

With "passage", no passage of a held-out query is in training. With "query", it may be.
"""

_MAX_SHARED_QUERIES = 0.2
"""Largest share of test queries that may have a positive in common with the training records, if
the test set is to count as held out by passage."""


class Grouping(NamedTuple):
    """The groups of the records. A group is named by a number.

    Attributes:
        group_of_record: number of the group of each record, in the order of the records.
        queries_of_group: {group: number of distinct queries of its records}.
        key_of_group: {group: its alphabetically first query}. Group numbers depend on the order of
            the records, this key does not.
        groups_of_test: groups that are linked with the test set that the data came with.
        num_near_duplicates: number of texts that nearly equal an earlier text.
    """

    group_of_record: list[int]
    queries_of_group: dict[int, int]
    key_of_group: dict[int, str]
    groups_of_test: set[int]
    num_near_duplicates: int


def group_records(
    records: Sequence[Record],
    test: BeirDataset | None,
    held_out_by: HeldOutBy,
    documents: Iterable[Passage] = (),
    show_progress: bool = False,
) -> Grouping:
    """Group the records that are linked.

    Each distinct normalised text has a number. A group is a set of these numbers, and a record is
    in the group of its query.

    Args:
        records: the training records.
        test: a test set that the data came with; None: there is none.
        held_out_by: "query" to link records by queries alone. A passage that is a query too, or
            nearly so, counts as a query.
        documents: the corpus. Passages that are one of its documents, with its title or without
            it, are linked.
        show_progress: True for a progress bar.
    """
    text_numbers: dict[str, int] = {}
    links = []
    for record in records:
        query = text_numbers.setdefault(normalise(record.query), len(text_numbers))
        if held_out_by == "passage":
            for positive in record.positives:
                passage = text_numbers.setdefault(normalise(positive), len(text_numbers))
                links.append((query, passage))
    test_texts = set()
    if test is not None:
        for text in _iter_test_texts(test, held_out_by):
            test_texts.add(text_numbers.setdefault(normalise(text), len(text_numbers)))

    if held_out_by == "query":
        passages = [positive for record in records for positive in record.positives]
        passages_like_queries = find_near_duplicates(passages, text_numbers)
        for record in records:
            for positive in passages_like_queries.intersection(record.positives):
                passage = text_numbers.setdefault(normalise(positive), len(text_numbers))
                links.append((text_numbers[normalise(record.query)], passage))

    groups = DisjointSet(range(len(text_numbers)))
    for query, passage in links:
        groups.merge(query, passage)
    num_near_duplicates = join_near_duplicates(list(text_numbers), groups, show_progress)
    if held_out_by == "passage":
        number_of_words = {get_words(text): number for text, number in text_numbers.items()}
        for document in documents:
            if not document.title:
                continue
            with_title = number_of_words.get(get_words(document.passage))
            without_title = number_of_words.get(get_words(document.text))
            if with_title is not None and without_title is not None:
                groups.merge(with_title, without_title)

    group_of_record = []
    queries: dict[int, set[str]] = {}
    key_of_group: dict[int, str] = {}
    for record in records:
        query_text = normalise(record.query)
        group = groups[text_numbers[query_text]]
        group_of_record.append(group)
        queries.setdefault(group, set()).add(query_text)
        key = fold_case(record.query)
        key_of_group[group] = min(key, key_of_group.get(group, key))
    return Grouping(
        group_of_record,
        queries_of_group={group: len(members) for group, members in queries.items()},
        key_of_group=key_of_group,
        groups_of_test={groups[text] for text in test_texts},
        num_near_duplicates=num_near_duplicates,
    )


def group_queries(dataset: BeirDataset) -> dict[str, int]:
    """Return {query id: number of its group} for a data set, by the same rule as a split.

    Queries are in one group if they share a relevant document, or have nearly the same text as each
    other or as a relevant document. Their scores are not independent of each other.
    """
    records = []
    for query_id, text in dataset.queries.items():
        records.append(Record(text, get_positives(dataset, query_id), negatives=[]))
    groups = group_records(records, None, "passage").group_of_record
    return dict(zip(dataset.queries, groups, strict=True))


def choose_held_out_by(records: Sequence[Record], test: BeirDataset | None) -> HeldOutBy:
    """Choose how to hold out dev queries, so that dev resembles the test set.

    Returns:
        "query" if more than a fifth of the test queries have a positive that a training record has
        too, else "passage".
    """
    if test is None:
        return "passage"
    training_positives: set[str] = set()
    for record in records:
        training_positives.update(normalise(positive) for positive in record.positives)
    num_shared = 0
    for query_id in test.queries:
        test_positives = {normalise(positive) for positive in get_positives(test, query_id)}
        if not test_positives.isdisjoint(training_positives):
            num_shared += 1
    return "query" if num_shared > _MAX_SHARED_QUERIES * len(test.queries) else "passage"


def _iter_test_texts(test: BeirDataset, held_out_by: HeldOutBy) -> Iterator[str]:
    """Yield the texts of a test set that link records."""
    for query_id, text in test.queries.items():
        yield text
        if held_out_by == "passage":
            yield from get_positives(test, query_id)
