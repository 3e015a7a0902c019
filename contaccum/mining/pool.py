"""What mining works on: queries with their known positives, and the pool of passages that may become negatives.

Equal texts are one passage here, whatever their ids, spacing or case, so that a copy of a positive cannot come back as
a negative. Where they come from is `sources`' business; nothing is scored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from contaccum.data.passages import Passage
from contaccum.data.records import one_line
from contaccum.errors import DataError


@dataclass(frozen=True)
class MiningData:
    """Q queries, and passages that are called by their row.

    Attributes:
        query_ids, queries: (Q,).
        documents: rows below `pool_size` are the pool; the others are positives from outside it, and never candidates.
        positives: for each query the rows of its known positives, without repetition: those of its own pairs first,
            then whatever else the data calls a positive of the same query text.
        positive_documents: the same as the data spell them, which may differ from `documents` in spacing and case.
        pair_counts: for each query, how many of its positives stand in a pair of their own.
        excluded: for each query the pool rows that are a known positive or have the same text or id.
        same_as_query: for each query the pool rows, not excluded already, whose text is the query's.
        record: path, format, fingerprint and counts, for reports.
    """

    query_ids: list[str]
    queries: list[str]
    documents: list[Passage]
    pool_size: int
    positives: list[list[int]]
    positive_documents: list[list[Passage]]
    pair_counts: list[int]
    excluded: list[list[int]]
    same_as_query: list[list[int]]
    record: dict[str, Any] = field(repr=False, compare=False)

    def marked(self, listed: Sequence[Sequence[int]], numbers: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Where `rows` (q, k) of the queries `numbers` (q,) are among the rows that `listed` has for the query."""
        counts = [len(listed[number]) for number in numbers]
        flat = np.fromiter((row for number in numbers for row in listed[number]), dtype=np.int64, count=sum(counts))
        # A pair of a query and a row as one integer; row -1 becomes 0, which stands for no row.
        width = len(self.documents) + 1
        pairs = np.repeat(np.arange(len(numbers)), counts) * width + flat + 1
        return np.isin(np.arange(len(numbers))[:, None] * width + rows + 1, pairs) & (rows >= 0)


@dataclass
class Judged:
    """One query as the data have it: positives that make pairs, and positives that do not."""

    id: str
    query: str
    pairs: list[Passage]
    further: list[Passage] = field(default_factory=list)


def _key(text: str) -> bytes:
    """Equal for texts that differ in spacing or case alone."""
    return hashlib.blake2b(" ".join(text.split()).casefold().encode(), digest_size=16).digest()


def _keys(document: Passage) -> list[bytes]:
    """Of the passage, and of its text without the title: the same text may lie elsewhere under another title."""
    return [_key(part) for part in (document.passage, document.text) if part.strip()]


class _Pool:
    """Distinct passages, found again by text or id. Texts without title and ids are kept for the `wanted` alone."""

    def __init__(self, wanted_keys: set[bytes], wanted_ids: set[str]) -> None:
        self.wanted_keys, self.wanted_ids = wanted_keys, wanted_ids
        self.documents: list[Passage] = []
        self.row_of: dict[bytes, int] = {}
        self.rows_with_text: dict[bytes, list[int]] = {}
        self.row_of_id: dict[str, int] = {}
        self.empty = self.repeated = 0

    def add(self, document: Passage) -> None:
        passage = document.passage
        if not passage:
            self.empty += 1
            return
        row = self.row_of.setdefault(_key(passage), len(self.documents))
        if row == len(self.documents):
            self.documents.append(document)
        else:
            self.repeated += 1
        if document.id in self.wanted_ids:
            self.row_of_id[document.id] = row
        if document.title.strip() and (key := _key(document.text)) in self.wanted_keys:
            self.rows_with_text.setdefault(key, []).append(row)

    def alike(self, keys: Iterable[bytes]) -> set[int]:
        """The rows whose passage, or whose text without title, has one of these keys."""
        rows: set[int] = set()
        for key in keys:
            if key in self.row_of:
                rows.add(self.row_of[key])
            rows.update(self.rows_with_text.get(key, ()))
        return rows


def assemble(judged: list[Judged], source: Iterable[Passage], record: dict[str, Any]) -> MiningData:
    """Queries and the passages of `source` as rows; `record` is what a report says about where they are from.

    Raises:
        DataError: no passage, or no positive, that is not empty.
    """
    by_id = record["format"] == "beir"
    known: dict[bytes, list[Passage]] = {}
    for entry in judged:
        known.setdefault(_key(entry.query), []).extend((*entry.pairs, *entry.further))
    wanted = {key for documents in known.values() for document in documents for key in _keys(document)}
    ids = {document.id for documents in known.values() for document in documents} if by_id else set()
    pool = _Pool(wanted | set(known), ids)
    for document in source:
        pool.add(document)
    if not pool.documents:
        where = record.get("corpus", record)["path"]
        raise DataError(one_line(f"{where}: no passage left to mine in (correct the data)"))
    pool_size = len(pool.documents)

    outside: dict[bytes, int] = {}
    documents = pool.documents

    def row_of(document: Passage) -> int | None:
        if not document.passage:
            return None
        key = _key(document.passage)
        row = pool.row_of.get(key, outside.get(key))
        if row is None:
            row = outside[key] = len(documents)
            documents.append(document)
        return row

    queries, positives, positive_documents, pair_counts, excluded, same_as_query = [], [], [], [], [], []
    listed = empty_pairs = 0
    for entry in judged:
        own = [row_of(document) for document in entry.pairs]
        listed += len(own)
        empty_pairs += own.count(None)
        pairs = list(dict.fromkeys(row for row in own if row is not None))
        if not pairs:
            continue
        key = _key(entry.query)
        spelled: dict[int, Passage] = {}
        for document in (*entry.pairs, *known[key]):
            if (row := row_of(document)) is not None:
                spelled.setdefault(row, document if by_id else _named(document, documents[row]))
        alike = pool.alike(k for document in known[key] for k in _keys(document))
        if by_id:
            alike.update(pool.row_of_id[d.id] for d in known[key] if d.id in pool.row_of_id)
        queries.append(entry)
        positives.append(list(spelled))
        positive_documents.append(list(spelled.values()))
        pair_counts.append(len(pairs))
        excluded.append(sorted(alike))
        same_as_query.append(sorted(pool.alike([key]) - alike))
    if not queries:
        raise DataError(one_line(f"{record['path']}: every positive passage is empty (correct the data)"))
    record |= {
        "queries": len(queries),
        "pairs": sum(pair_counts),
        "pairs_that_occur_again": listed - empty_pairs - sum(pair_counts),
        "pairs_with_an_empty_passage": empty_pairs,
        "known_positives": sum(map(len, positives)),
        "passages": pool_size,
        "passages_that_occur_again": pool.repeated if by_id or "corpus" in record else 0,
        "empty_passages": pool.empty,
    }
    return MiningData(
        query_ids=[entry.id for entry in queries],
        queries=[entry.query for entry in queries],
        documents=documents,
        pool_size=pool_size,
        positives=positives,
        positive_documents=positive_documents,
        pair_counts=pair_counts,
        excluded=excluded,
        same_as_query=same_as_query,
        record=record,
    )


def _named(document: Passage, same: Passage) -> Passage:
    """A positive by the id, and where it can be by the title, that the pool has for the same passage."""
    return same if same.passage == document.passage else document._replace(id=same.id)
