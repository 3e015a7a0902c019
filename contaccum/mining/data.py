"""Data to mine in: queries, their known positives, and the passages that may become negatives.

Texts that are equal after `normalise` count as one passage, whatever their ids. Otherwise a copy of
a positive could be mined as a negative.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

from contaccum.data import (
    BeirDataset,
    Passage,
    RecordReport,
    load_beir_folder,
    read_passages,
)
from contaccum.data.beir import OUTSIDE_CORPUS
from contaccum.data.near_duplicates import normalise
from contaccum.data.readers import Source
from contaccum.data.records import Fault, parse_text
from contaccum.errors import DataError
from contaccum.files import AnyPath, Fingerprint

JsonObject = dict[str, Any]
"""A JSON object of a report."""


@dataclass(frozen=True)
class MiningData:
    """Q queries with their known positives, and the passages that are searched for negatives.

    A passage is named by its row in `documents`.

    Attributes:
        query_ids: ids of the queries, (Q,).
        queries: texts of the queries, (Q,).
        documents: distinct passages. The first `pool_size` are the pool, the candidates for
            negatives; the rest are positives that are not in the pool.
        pool_size: number of passages in the pool.
        positives: for each query the rows of its known positives: first the positives of its own
            records, then all other positives that the data have for the same query text.
        record_positives: for each query and each of its own records the rows of the record's
            positives, for example [[0, 4], [2]] for a query with two records. Equal records are
            kept once. Each judgement of a BEIR folder counts as a record.
        excluded: for each query the pool rows that must not become its negatives, because they are
            a known positive, share a text or id with one, or repeat the query.
        record: path, format, fingerprint and counts of the data, for reports.
    """

    query_ids: list[str]
    queries: list[str]
    documents: list[Passage]
    pool_size: int
    positives: list[list[int]]
    record_positives: list[list[list[int]]]
    excluded: list[list[int]]
    record: JsonObject = field(repr=False, compare=False)


class _JudgedQuery(NamedTuple):
    """A query and its relevant passages, from one record of the source."""

    query_id: str | None
    text: str
    positives: list[Passage]


@dataclass
class _KnownPositives:
    """The positives of all queries of a source.

    Attributes:
        of_records: the positives of each record of a query, by the query's id and text.
        of_text: all positives of the queries with the same text key; see `_compute_text_key`.
    """

    of_records: dict[tuple[str | None, str], list[list[Passage]]]
    of_text: dict[bytes, list[Passage]]

    def iter_passages(self) -> Iterator[Passage]:
        """Yield the positives of all queries."""
        return chain.from_iterable(self.of_text.values())


def load_mining_data(
    source: AnyPath | Iterable[Mapping[str, Any]],
    corpus: AnyPath | None = None,
    *,
    data_format: Any = None,
    split: str = "train",
    on_bad_record: Literal["stop", "skip"] = "stop",
    columns: Mapping[str, str] | None = None,
    min_score: float | None = None,
) -> MiningData:
    """Load queries with their known positives, and the passages that are searched for negatives.

    The searched passages, the pool, are the passages of `corpus`. Without `corpus`, the pool is the
    whole corpus of a BEIR folder, or the distinct positives of other data. Negatives that the data
    list are not added to the pool.

    Args:
        source: training data in any format that `read_records` reads; or records in memory, each a
            mapping with "query" (a text) and "positive" (a text, or a list of texts).
        corpus: a file of passages, or a BEIR folder, as `read_passages` reads them.
        data_format, split, columns, min_score: see `read_records`.
        on_bad_record: "stop" raises an error at the first bad record, "skip" counts it.

    Raises:
        ConfigError: for an unknown format, or settings that the format does not have.
        DataError: for data that cannot be read, no query with a positive, or an empty pool.
    """
    report = RecordReport(on_bad_record)
    pool: list[Passage] | None = None
    record: JsonObject = {"path": "records", "format": "records"}
    record["corpus"] = None if corpus is None else str(corpus)
    queries: Iterable[_JudgedQuery]
    if not isinstance(source, (str, os.PathLike)):
        queries = _iter_queries_in_memory(source)
    else:
        training_source = Source(source, data_format, split, columns, min_score=min_score)
        record["path"] = str(source)
        record["format"] = training_source.data_format
        record["split"] = split
        if record["format"] == "beir":
            dataset = load_beir_folder(training_source.path, split, report=report)
            num_missing = len(dataset.list_missing_documents())
            report.leave_out(training_source.path, OUTSIDE_CORPUS, num_missing)
            passages = {}
            for document_id, document in dataset.corpus.items():
                passages[document_id] = Passage(document_id, **document)
            pool = _drop_blank_passages(passages.values())
            queries = _iter_beir_queries(dataset, passages)
        else:
            queries = (
                _JudgedQuery(None, row.query, _make_passages(row.positives))
                for row in training_source.records(report)
            )
    content = Fingerprint()
    # By default, training makes a row of each judgement of a BEIR folder, and a row of each record
    # of other formats (`positives` in docs/data.md). Training on mined data makes the same rows.
    one_record_per_positive = record["format"] == "beir"
    known_positives = _collect_positives(queries, one_record_per_positive, content)
    if corpus is not None:
        pool = _drop_blank_passages(read_passages(corpus, report, may_be_blank=True))
    for passage in pool or ():
        content.add(*passage)
    record["records"] = report.summary()
    record["fingerprint"] = content.hex()
    return _build_mining_data(known_positives, pool, record)


def _drop_blank_passages(passages: Iterable[Passage]) -> list[Passage]:
    """Drop the passages without title and text, which published sets have."""
    return [passage for passage in passages if passage.passage]


def _iter_queries_in_memory(records: Iterable[Mapping[str, Any]]) -> Iterator[_JudgedQuery]:
    for number, record in enumerate(records):
        positive = record.get("positive")
        texts: Sequence[Any] = [positive]
        if isinstance(positive, Sequence) and not isinstance(positive, str):
            texts = positive
        try:
            query = parse_text(record.get("query"), "query")
            passages = _make_passages([parse_text(text, "positive") for text in texts])
        except Fault as fault:
            raise DataError(f"record {number}: {fault} (correct the record)") from fault
        yield _JudgedQuery(None, query, passages)


def _iter_beir_queries(
    dataset: BeirDataset, passages: Mapping[str, Passage]
) -> Iterator[_JudgedQuery]:
    for query_id, judgements in dataset.qrels.items():
        relevant_ids = [name for name, grade in judgements.items() if grade > 0]
        positives = [passages[name] for name in relevant_ids if name in passages]
        yield _JudgedQuery(query_id, dataset.queries[query_id], positives)


def _make_passages(texts: Iterable[str]) -> list[Passage]:
    """Return texts without ids as passages whose ids are hashes of the texts."""
    passages = []
    for text in texts:
        hash_prefix = _compute_text_key(text).hex()[:16]
        passages.append(Passage(f"passage-{hash_prefix}", "", text))
    return passages


def _collect_positives(
    queries: Iterable[_JudgedQuery], one_record_per_positive: bool, content: Fingerprint
) -> _KnownPositives:
    """Collect the positives of all queries.

    Args:
        queries: records of the source.
        one_record_per_positive: True to make a record of each positive.
        content: a fingerprint, to which all texts are added.
    """
    collected = _KnownPositives(of_records=defaultdict(list), of_text=defaultdict(list))
    for query in queries:
        # Some of BEIR's published sets judge empty documents as relevant.
        positives = [passage for passage in query.positives if passage.passage]
        if not positives:
            continue
        records = [positives]
        if one_record_per_positive:
            records = [[passage] for passage in positives]
        collected.of_records[query.query_id, query.text] += records
        collected.of_text[_compute_text_key(query.text)] += positives
        content.add(query.text, *(passage.passage for passage in positives))
    return collected


def _build_mining_data(
    known_positives: _KnownPositives, pool: list[Passage] | None, record: JsonObject
) -> MiningData:
    """Give each distinct passage a row, and find the excluded rows of each query.

    Args:
        known_positives: the positives of all queries.
        pool: passages to search; None: the known positives.
        record: a description of the data, to which counts are added.

    Raises:
        DataError: if there is no query with a positive, or no passage to search.
    """
    documents: dict[bytes, Passage] = {}
    searched_passages = known_positives.iter_passages() if pool is None else pool
    for passage in searched_passages:
        documents.setdefault(_compute_text_key(passage.passage), passage)
    pool_size = len(documents)
    if pool_size == 0:
        raise DataError(f"{record['path']}: no passage is left to mine in (correct the data)")
    if not known_positives.of_records:
        raise DataError(f"{record['path']}: no query has a positive (correct the data)")
    excluded_by_query = _find_excluded_rows(list(documents.values()), known_positives)
    for passage in known_positives.iter_passages():
        documents.setdefault(_compute_text_key(passage.passage), passage)
    row_by_text = {text_key: row for row, text_key in enumerate(documents)}

    data = MiningData([], [], list(documents.values()), pool_size, [], [], [], record)
    num_pairs = 0
    for number, (query, records) in enumerate(known_positives.of_records.items()):
        query_id, text = query
        text_key = _compute_text_key(text)
        own_positives = list(chain.from_iterable(records))
        all_positives = [*own_positives, *known_positives.of_text[text_key]]
        data.query_ids.append(query_id or f"query-{number}")
        data.queries.append(text)
        data.positives.append(_find_rows(all_positives, row_by_text))
        data.record_positives.append(_find_rows_of_records(records, row_by_text))
        data.excluded.append(sorted(excluded_by_query[text_key]))
        num_pairs += len(_find_rows(own_positives, row_by_text))
    record["queries"] = len(data.queries)
    record["pairs"] = num_pairs
    record["passages"] = pool_size
    return data


def _find_excluded_rows(
    pool: list[Passage], known_positives: _KnownPositives
) -> dict[bytes, set[int]]:
    """Return, for each text key of a query, the pool rows that must not become its negatives."""
    keys_by_query: dict[bytes, set[bytes | str]] = {}
    for query_key, positives in known_positives.of_text.items():
        keys: set[bytes | str] = {query_key}
        for passage in positives:
            keys.update(_compute_copy_keys(passage))
        keys_by_query[query_key] = keys
    # A table of the keys of all passages would take much memory for a large corpus. Only the keys
    # of queries and known positives are needed.
    needed_keys = set().union(*keys_by_query.values())
    rows_by_key: dict[bytes | str, list[int]] = defaultdict(list)
    for row, passage in enumerate(pool):
        for key in needed_keys.intersection(_compute_copy_keys(passage)):
            rows_by_key[key].append(row)

    excluded_by_query = {}
    for query_key, keys in keys_by_query.items():
        excluded: set[int] = set()
        for key in keys:
            excluded.update(rows_by_key[key])
        excluded_by_query[query_key] = excluded
    return excluded_by_query


def _find_rows(passages: Iterable[Passage], row_by_text: Mapping[bytes, int]) -> list[int]:
    """Return the distinct rows of some passages, in their order."""
    rows = [row_by_text[_compute_text_key(passage.passage)] for passage in passages]
    return list(dict.fromkeys(rows))


def _find_rows_of_records(
    records: Iterable[list[Passage]], row_by_text: Mapping[bytes, int]
) -> list[list[int]]:
    """Return the rows of each record's positives, without records that are equal to others."""
    distinct_records = {}
    for positives in records:
        rows = _find_rows(positives, row_by_text)
        distinct_records[tuple(rows)] = rows
    return list(distinct_records.values())


def _compute_text_key(text: str) -> bytes:
    """Return a hash that is equal for texts that are equal after `normalise`."""
    return hashlib.blake2b(normalise(text).encode(), digest_size=16).digest()


def _compute_copy_keys(passage: Passage) -> list[bytes | str]:
    """Return the keys of a passage; a passage that shares one of them counts as its copy.

    The keys are the id, the text with its title, and the text alone: another document may hold the
    same text under another title.
    """
    keys: list[bytes | str] = [passage.id]
    for text in (passage.passage, passage.text):
        if text.strip():
            keys.append(_compute_text_key(text))
    return keys
