"""What mining works on: queries with their known positives, and the pool of passages that may become negatives.

Equal texts are one passage here, whatever their ids, spacing or case, so that a copy of a positive cannot come back as
a negative. Nothing is scored.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from contaccum.data import Passage, RecordReport, load_beir_folder, read_records, sniff_format
from contaccum.data.beir import beir_file, read_corpus
from contaccum.data.readers import JUDGED
from contaccum.data.records import Fault, filled_text_of, quoted, take, text_of
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
    source: str | os.PathLike[str] | Iterable[Any],
    corpus: str | os.PathLike[str] | Iterable[Any] | None = None,
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
        source: training data in any format that `read_records` takes; or records in memory: mappings with "query" and
            "positive", or whose first two values are these, or (query, positive). A positive is a text, or a list of
            them, of which the first makes the pair.
        corpus: jsonl with `_id`, `title` and `text`, plain or gzip; a BEIR folder, whose corpus it is; or passages in
            memory: texts, or mappings with "text" and perhaps "_id" and "title".
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
        pool = [Passage(name, **document) for name, document in data.corpus.items()]
        positives = {query: [d for d, score in found.items() if score > 0] for query, found in data.qrels.items()}
        judged = [
            _Judged(query, data.queries[query], [Passage(d, **data.corpus[d]) for d in found], [])
            for query, found in positives.items()
            if found
        ]
        fingerprint = data.fingerprint
    else:
        if record["format"] == "records":
            numbered: Any = enumerate(source, 1)  # type: ignore[arg-type]  # no path, by what stands above
            rows: Iterable[Any] = (row for _, row in take("records", numbered, _in_memory, report))
        else:
            found = read_records(record["path"], record["format"], split, columns, report, num_negatives=0)
            rows = ((row.query, row.positives) for row in found)
        judged, fingerprint = _by_query(rows, None if record["format"] in JUDGED else 1)
    what = "judgements above 0" if record["format"] == "beir" else "pairs"
    report.refuse_if_nothing_left(record["path"], len(judged), what)
    record |= {"fingerprint": fingerprint, "records": report.summary()}
    if corpus is not None:
        pool, record["corpus"] = _read_pool(corpus, RecordReport(on_bad_record))
    return _assemble(judged, pool, record)


def _read_pool(corpus: Any, report: RecordReport) -> tuple[list[Passage], dict[str, Any]]:
    """The passages of a corpus of its own, and what a report says about it."""
    where = "corpus"
    if isinstance(corpus, (str, os.PathLike)):
        where, path = str(corpus), Path(corpus)
        read = read_corpus(beir_file(path, "corpus.jsonl") if path.is_dir() else path, report, allow_empty=True)
        pool = [Passage(name, **document) for name, document in read.items()]
    else:
        pool = [passage for _, passage in take("corpus", enumerate(corpus, 1), _passage, report)]
    digest = Fingerprint()
    for document in pool:
        digest.add(*document)
    return pool, {"path": where, "fingerprint": digest.hex(), "records": report.summary()}


def _passage(row: Any) -> Passage:
    fields = {"text": row} if isinstance(row, str) else row
    if not isinstance(fields, Mapping):
        raise Fault("not a passage", f"found {quoted(row)}", "give a text, or a mapping with text")
    text = text_of(fields.get("text"), "text")
    return Passage(str(fields.get("_id") or f"text-{text}"), text_of(fields.get("title") or "", "title"), text)


def _in_memory(row: Any) -> tuple[str, list[str]]:
    if isinstance(row, Mapping):
        row = (row["query"], row["positive"]) if row.keys() >= {"query", "positive"} else list(row.values())
    if isinstance(row, str) or not isinstance(row, Sequence) or len(row) < 2:
        raise Fault("not a query and its positive", f"found {quoted(row)}", "give (query, positive) or a mapping")
    positives = row[1] if isinstance(row[1], (list, tuple)) and row[1] else [row[1]]
    return filled_text_of(row[0], "query"), [filled_text_of(text, "positive") for text in positives]


def _by_query(rows: Iterable[tuple[str, list[str]]], paired: int | None) -> tuple[list[_Judged], str]:
    """Rows of the same query as one, the first `paired` positives of each making a pair; and their fingerprint."""
    of_query: dict[str, _Judged] = {}
    numbers: dict[str, int] = {}
    digest = Fingerprint()
    for query, positives in rows:
        judged = of_query.setdefault(query, _Judged(f"query-{len(of_query)}", query, [], []))
        named = [Passage(f"passage-{numbers.setdefault(text, len(numbers))}", "", text) for text in positives]
        judged.pairs.extend(named[:paired])
        judged.further.extend(named[len(named[:paired]) :])
        for text in positives[:paired]:
            digest.add(query, text)
    return list(of_query.values()), digest.hex()


def _key(text: str) -> bytes:
    """Equal for texts that differ in spacing or case alone."""
    return hashlib.blake2b(" ".join(text.split()).casefold().encode(), digest_size=16).digest()


def _keys(document: Passage) -> list[bytes]:
    """Of the passage, and of its text without the title: the same text may lie elsewhere under another title."""
    return [_key(part) for part in (document.passage, document.text) if part.strip()]


def _assemble(judged: list[_Judged], pool: list[Passage] | None, record: dict[str, Any]) -> MiningData:
    """Equal passages become one row, so that a copy of a positive cannot come back as a negative."""
    known: dict[bytes, list[Passage]] = {}
    for entry in judged:
        known.setdefault(_key(entry.query), []).extend((*entry.pairs, *entry.further))
    wanted = {key for documents in known.values() for document in documents for key in _keys(document)} | set(known)
    ids = {document.id for found in known.values() for document in found} if record["format"] == "beir" else set()
    documents: list[Passage] = []
    row_of: dict[bytes, int] = {}
    alike: dict[bytes | str, set[int]] = {}

    def add(document: Passage) -> int | None:
        if not document.passage:
            return None
        row = row_of.setdefault(_key(document.passage), len(documents))
        if row == len(documents):
            documents.append(document)
        names: set[Any] = wanted.intersection(_keys(document)) | ids.intersection([document.id])
        for name in names:
            alike.setdefault(name, set()).add(row)
        return row

    every = [document for found in known.values() for document in found]
    rows = [add(document) for document in (every if pool is None else pool)]
    pool_size = len(documents)
    if not pool_size:
        raise DataError(f"{record.get('corpus', record)['path']}: no passage left to mine in (correct the data)")
    queries: list[_Judged] = []
    positives, pair_counts, excluded = [], [], []
    for entry in judged:
        pairs = dict.fromkeys(row for row in map(add, entry.pairs) if row is not None)
        if not pairs:
            continue
        key = _key(entry.query)
        names: set[bytes | str] = {key, *(name for document in known[key] for name in _keys(document))}
        names |= ids.intersection(document.id for document in known[key])
        further = [row for row in map(add, known[key]) if row is not None]
        queries.append(entry)
        positives.append(list(dict.fromkeys([*pairs, *further])))
        pair_counts.append(len(pairs))
        excluded.append(sorted(row for name in names for row in alike.get(name, ()) if row < pool_size))
    if not queries:
        raise DataError(f"{record['path']}: every positive passage is empty (correct the data)")
    listed = sum(len(entry.pairs) for entry in queries)
    record |= {"queries": len(queries), "queries_without_a_passage": len(judged) - len(queries)}
    record |= {"pairs": sum(pair_counts), "pairs_that_occur_again_or_are_empty": listed - sum(pair_counts)}
    record |= {"known_positives": sum(map(len, positives)), "passages": pool_size, "empty_passages": rows.count(None)}
    record["passages_that_occur_again"] = 0 if pool is None else len(rows) - rows.count(None) - pool_size
    ids_of_queries, texts = [entry.id for entry in queries], [entry.query for entry in queries]
    excluded = [list(dict.fromkeys(of_query)) for of_query in excluded]
    return MiningData(ids_of_queries, texts, documents, pool_size, positives, pair_counts, excluded, record)
