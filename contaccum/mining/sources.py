"""Where queries, positives and passages are read from: files of any format that training reads, or memory.

Which passages are the same, and which may not become a negative, is decided in `pool`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from contaccum.data.beir_folder import beir_file, load_beir_folder, read_corpus
from contaccum.data.fields import parse_columns
from contaccum.data.formats import DATA_FORMATS, JUDGED, DataFormat, sniff_format
from contaccum.data.passages import Passage
from contaccum.data.reading import read_records
from contaccum.data.records import (
    Fault,
    OnBadRecord,
    RecordReport,
    add_to_fingerprint,
    filled_text_of,
    one_line,
    quoted,
    text_of,
)
from contaccum.errors import ConfigError, DataError
from contaccum.mining.pool import Judged, MiningData, assemble

# A query, the positives that make a pair with it, and its other positives.
Row = tuple[str, list[str], list[str]]


def load_mining_data(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any] | Sequence[Any]],
    corpus: str | os.PathLike[str] | Iterable[Mapping[str, Any] | str] | None = None,
    data_format: DataFormat | None = None,
    split: str = "train",
    on_bad_record: OnBadRecord = "stop",
    columns: Mapping[str, str] | None = None,
) -> MiningData:
    """Queries with their known positives, and the passages among which their negatives are sought.

    The pool is the whole corpus of a BEIR folder, and else the data's distinct positives (negatives that the data list
    are not part of it). With `corpus` it is that corpus instead, and nothing else. What is in memory is not written
    anywhere, and one `MiningData` serves any number of searches with any model.

    Args:
        source: training data in any format that `read_records` takes; or records in memory, such as a list or a
            `datasets.Dataset`. Of a record that is a mapping, "query" and "positive" are used where it has both; of any
            other, the first value is the query and the second its positive, as sentence-transformers' losses take
            columns. A positive is a text, or a list of them, the first of which makes the pair.
        corpus: jsonl with `_id`, `title` and `text`, plain or gzip; a BEIR folder, whose corpus it is; or passages in
            memory: texts, or mappings with "text" and perhaps "_id" and "title".
        data_format, split, columns: see `read_records`; of files.
        on_bad_record: "stop" or "skip".

    Raises:
        ConfigError, DataError: as `load_training_data`; an empty pool.
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if data_format is not None and data_format not in DATA_FORMATS:
            raise ConfigError(f"data_format={data_format!r} is unknown (use one of {', '.join(DATA_FORMATS)})")
        mapping = parse_columns(columns)
        found = data_format or sniff_format(path, mapping)
        if found == "beir":
            judged, pool, record = _read_beir(path, split, on_bad_record)
        else:
            judged, pool, record = _read_records(path, found, split, mapping, on_bad_record)
    else:
        judged, pool, record = _take_records(source, on_bad_record)
    if corpus is not None:
        pool, record["corpus"] = _read_separate_corpus(corpus, on_bad_record)
    return assemble(judged, pool, record)


def _read_beir(path: Path, split: str, on_bad_record: OnBadRecord) -> tuple[list[Judged], Iterable[Passage], Any]:
    data = load_beir_folder(path, split, on_bad_record)
    judged = []
    for query_id, scores in data.qrels.items():
        positives = [Passage(i, **data.corpus[i]) for i, score in scores.items() if score > 0]
        if positives:
            judged.append(Judged(query_id, data.queries[query_id], positives))
    if not judged:
        raise DataError(one_line(f"{path}: no judgement of split {split!r} is above 0 (name another --split)"))
    record = {"path": str(path), "format": "beir", "split": split, "fingerprint": data.fingerprint}
    record["records"] = data.report.summary()
    return judged, (Passage(i, **document) for i, document in data.corpus.items()), record


def _read_records(
    path: Path, data_format: DataFormat, split: str, columns: Mapping[str, str], on_bad_record: OnBadRecord
) -> tuple[list[Judged], Iterable[Passage], Any]:
    report = RecordReport(on_bad_record)
    digest = hashlib.sha256()
    rows: list[Row] = []
    for query, positives, *_ in read_records(path, data_format, split, columns, report, num_negatives=0):
        # Each judgement is a pair; of a record's list, training takes the first.
        paired = len(positives) if data_format in JUDGED else 1
        for positive in positives[:paired]:
            add_to_fingerprint(digest, query, positive)
        rows.append((query, positives[:paired], positives[paired:]))
    report.refuse_if_nothing_left(path, len(rows), "training pairs")
    judged, pool = _by_query(rows)
    record = {"path": str(path), "format": data_format, "split": None, "fingerprint": digest.hexdigest()}
    return judged, pool, record | {"records": report.summary()}


def _take_records(
    source: Iterable[Mapping[str, Any] | Sequence[Any]], on_bad_record: OnBadRecord
) -> tuple[list[Judged], Iterable[Passage], Any]:
    report = RecordReport(on_bad_record)
    digest = hashlib.sha256()
    rows: list[Row] = []
    for number, record in enumerate(source, start=1):
        report.see()
        try:
            query, positive = _query_and_positive(record)
            listed = positive if isinstance(positive, (list, tuple)) else [positive]
            if not listed:
                raise Fault("empty positive")
            query = filled_text_of(query, "query")
            positives = [filled_text_of(value, "positive") for value in listed]
        except Fault as fault:
            report.reject("records", number, fault)
            continue
        report.accept()
        add_to_fingerprint(digest, query, positives[0])
        rows.append((query, positives[:1], positives[1:]))
    report.refuse_if_nothing_left("records", len(rows), "pairs")
    judged, pool = _by_query(rows)
    record = {"path": "records", "format": "records", "split": None, "fingerprint": digest.hexdigest()}
    return judged, pool, record | {"records": report.summary()}


def _query_and_positive(record: object) -> tuple[Any, Any]:
    if isinstance(record, Mapping):
        if "query" in record and "positive" in record:
            return record["query"], record["positive"]
        record = list(record.values())
    if isinstance(record, str) or not isinstance(record, Sequence) or len(record) < 2:
        raise Fault("not a query and its positive", f"found {quoted(record)}", "give (query, positive) or a mapping")
    return record[0], record[1]


def _by_query(rows: Iterable[Row]) -> tuple[list[Judged], Iterable[Passage]]:
    """Rows of the same query as one; and the documents that they name, which have no ids but their numbers."""
    of_query: dict[str, Judged] = {}
    numbers: dict[str, int] = {}

    def document(passage: str) -> Passage:
        return Passage(f"passage-{numbers.setdefault(passage, len(numbers))}", "", passage)

    for query, pairs, further in rows:
        judged = of_query.setdefault(query, Judged(f"query-{len(of_query)}", query, []))
        judged.pairs.extend(map(document, pairs))
        judged.further.extend(map(document, further))
    pool = (positive for judged in of_query.values() for positive in (*judged.pairs, *judged.further))
    return list(of_query.values()), pool


def _read_separate_corpus(
    corpus: str | os.PathLike[str] | Iterable[Mapping[str, Any] | str], on_bad_record: OnBadRecord
) -> tuple[Iterable[Passage], dict[str, Any]]:
    report = RecordReport(on_bad_record)
    if isinstance(corpus, (str, os.PathLike)):
        path = Path(corpus)
        file = beir_file(path, "corpus.jsonl") if os.path.isdir(path) else path
        read = read_corpus(file, report, allow_empty=True)
        documents = [Passage(identifier, **document) for identifier, document in read.items()]
    else:
        path = Path("corpus")
        documents = list(_take_corpus(corpus, report))
    digest = hashlib.sha256()
    for document in documents:
        add_to_fingerprint(digest, *document)
    return documents, {"path": str(path), "fingerprint": digest.hexdigest(), "records": report.summary()}


def _take_corpus(corpus: Iterable[Mapping[str, Any] | str], report: RecordReport) -> Iterator[Passage]:
    for number, passage in enumerate(corpus):
        report.see()
        try:
            fields: Any = {"text": passage} if isinstance(passage, str) else passage
            if not isinstance(fields, Mapping):
                raise Fault("not a passage", f"found {quoted(passage)}", "give a text, or a mapping with text")
            title = "" if fields.get("title") is None else text_of(fields["title"], "title")
            identifier = fields.get("_id")
            name = f"corpus-{number}" if identifier is None else str(identifier)
            document = Passage(name, title, text_of(fields.get("text"), "text"))
        except Fault as fault:
            report.reject("corpus", number + 1, fault)
            continue
        report.accept()
        yield document
