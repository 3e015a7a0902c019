"""What mining works on: queries with their known positives, and the pool of passages that may become negatives.

Equal texts are one passage here, whatever their ids, spacing or case, so that a copy of a positive cannot come back as
a negative. Nothing is scored.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from contaccum.data import Passage, RecordReport, load_beir_folder, read_passages, read_records, sniff_format
from contaccum.errors import DataError
from contaccum.files import Fingerprint


@dataclass(frozen=True)
class MiningData:
    """Q queries, and passages that are called by their row.

    Attributes:
        query_ids, queries: (Q,).
        documents: distinct passages. Rows below `pool_size` are the pool; the others are positives from outside it,
            and never candidates.
        positives: for each query the rows of its known positives: those of its own pairs first, then whatever else the
            data call a positive of the same query text.
        pair_counts: for each query, how many of its positives make a pair of their own.
        excluded: for each query the pool rows that are a known positive, have its text or id, or repeat the query.
        record: path, format, fingerprint and counts, for reports.
    """

    query_ids: list[str]
    queries: list[str]
    documents: list[Passage]
    pool_size: int
    positives: list[list[int]]
    pair_counts: list[int]
    excluded: list[list[int]]
    record: dict[str, Any] = field(repr=False, compare=False)


class _Judged(NamedTuple):
    """One query as the data have it: positives that make pairs, and positives that do not."""

    id: str
    query: str
    pairs: list[Passage]
    further: list[Passage]


def load_mining_data(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    corpus: str | os.PathLike[str] | None = None,
    *,
    data_format: Any = None,
    split: str = "train",
    on_bad_record: Literal["stop", "skip"] = "stop",
    columns: Mapping[str, str] | None = None,
) -> MiningData:
    """Queries with their known positives, and the passages among which their negatives are sought.

    The pool is the whole corpus of a BEIR folder, and else the data's distinct positives (negatives that the data list
    are not part of it). With `corpus` it is that corpus instead, and nothing else.

    Args:
        source: training data in any format that `read_records` takes; or records in memory, mappings with "query" and
            "positive": a text, or a list of texts of which the first makes the pair.
        corpus: a file of passages, or a BEIR folder whose corpus it is; see `read_passages`.
        data_format, split, columns: see `read_records`; of files.

    Raises:
        ConfigError, DataError: data that cannot be used, or an empty pool.
    """
    report, pool = RecordReport(on_bad_record), None
    record: dict[str, Any] = {"path": "records", "format": "records"}
    if isinstance(source, (str, os.PathLike)):
        record = {"path": str(source), "format": data_format or sniff_format(source, columns), "split": split}
    if record["format"] == "beir":
        data = load_beir_folder(record["path"], split, report=report)
        passages = {name: Passage(name, **document) for name, document in data.corpus.items()}
        pool = [passage for passage in passages.values() if passage.passage]
        judged = [
            _Judged(query, data.queries[query], pairs, [])
            for query, found in data.qrels.items()
            if (pairs := [passages[name] for name, score in found.items() if score > 0 and passages[name].passage])
        ]
        record["fingerprint"] = data.fingerprint
    else:
        if record["format"] == "records":
            mappings: Any = source
            rows = ((row["query"], row["positive"]) for row in mappings)
        else:
            found = read_records(record["path"], record["format"], split, columns, report, num_negatives=0)
            rows = ((row.query, row.positives) for row in found)
        # Of a record with several positives the first is trained on, unless people have judged them all.
        judged, record["fingerprint"] = _by_query(rows, None if record["format"] == "msmarco" else 1)
    record["records"] = report.summary()
    if corpus is not None:
        corpus_report, digest = RecordReport(on_bad_record), Fingerprint()
        pool = list(read_passages(corpus, corpus_report))
        for passage in pool:
            digest.add(*passage)
        record["corpus"] = {"path": str(corpus), "fingerprint": digest.hex(), "records": corpus_report.summary()}
    return _assemble(judged, pool, record)


def _by_query(rows: Iterable[tuple[str, Any]], paired: int | None) -> tuple[list[_Judged], str]:
    """Rows of the same query as one, the first `paired` positives of each making a pair; and their fingerprint."""
    of_query: dict[str, _Judged] = {}
    digest = Fingerprint()
    for query, given in rows:
        positives = [given] if isinstance(given, str) else list(given)
        judged = of_query.setdefault(query, _Judged(f"query-{len(of_query)}", query, [], []))
        passages = [Passage(f"passage-{_key(text).hex()[:16]}", "", text) for text in positives]
        judged.pairs.extend(passages[:paired])
        judged.further.extend(passages[len(passages[:paired]) :])
        for text in positives[:paired]:
            digest.add(query, text)
    return list(of_query.values()), digest.hex()


def _assemble(judged: list[_Judged], pool: list[Passage] | None, record: dict[str, Any]) -> MiningData:
    """Equal passages become one row; rows that look like a positive of a query, or like the query, are excluded."""
    keys = [_key(one.query) for one in judged]
    known: dict[bytes, list[Passage]] = defaultdict(list)  # of the queries of one text together
    for key, one in zip(keys, judged, strict=True):
        known[key] += [*one.pairs, *one.further]
    names_of = {key: {key, *(name for passage in found for name in _names(passage))} for key, found in known.items()}
    wanted = set().union(*names_of.values())
    documents: list[Passage] = []
    row_of: dict[bytes, int] = {}
    rows_called: dict[bytes | str, set[int]] = defaultdict(set)

    def add(passage: Passage) -> int:
        row = row_of.setdefault(_key(passage.passage), len(documents))
        if row == len(documents):
            documents.append(passage)
        for name in wanted.intersection(_names(passage)):
            rows_called[name].add(row)
        return row

    for passage in (passage for found in known.values() for passage in found) if pool is None else pool:
        add(passage)
    pool_size = len(documents)
    if not pool_size or not judged:
        what = "no query has a positive" if pool_size else "no passage is left to mine in"
        raise DataError(f"{record['path']}: {what} (correct the data)")
    pairs = [list(dict.fromkeys(map(add, one.pairs))) for one in judged]
    positives = [list(dict.fromkeys([*own, *map(add, known[key])])) for own, key in zip(pairs, keys, strict=True)]
    excluded = [
        sorted({row for name in names_of[key] for row in rows_called.get(name, ()) if row < pool_size}) for key in keys
    ]
    record |= {"queries": len(judged), "pairs": sum(map(len, pairs)), "passages": pool_size}
    ids, queries = [one.id for one in judged], [one.query for one in judged]
    return MiningData(ids, queries, documents, pool_size, positives, [*map(len, pairs)], excluded, record)


def _key(text: str) -> bytes:
    """Equal for texts that differ in spacing or case alone."""
    return hashlib.blake2b(" ".join(text.split()).casefold().encode(), digest_size=16).digest()


def _names(passage: Passage) -> list[bytes | str]:
    """What a copy has too: the id, the text with its title, or without, for it may lie elsewhere under another one."""
    return [passage.id, *(_key(part) for part in (passage.passage, passage.text) if part.strip())]
