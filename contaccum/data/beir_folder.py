"""A BEIR folder (corpus, queries, judgements) as plain dictionaries, checked record by record.

It reads what BEIR's own loader reads and gives the same dictionaries, but names the file and line of whatever
it cannot use. It does not fetch data sets (`beir_names`), make training pairs (`pairs`) or encode anything.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contaccum.data.records import (
    Fault,
    OnBadRecord,
    RecordReport,
    add_to_fingerprint,
    filled_text_of,
    one_line,
    quoted,
    read_json_lines,
    read_lines,
    text_of,
)
from contaccum.errors import DataError

# Nine digits fit every integer type that a metric may use.
_SCORE = re.compile(r"[+-]?[0-9]{1,9}")
_HEADER_STARTS = {"query-id", "query_id", "queryid", "qid", "query"}
_LAYOUT = "a BEIR folder holds corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv, each plain or .gz"


@dataclass(frozen=True)
class BeirDataset:
    """One split of a BEIR folder.

    Attributes:
        name: the folder's name.
        corpus: {document id: {"title", "text"}}, in the order of the file.
        queries: {query id: text}, only those that the split judges, in the order of the judgements.
        qrels: {query id: {document id: score}}.
        split: the name of the split.
        fingerprint: sha256, in hex, of all of the above but the names; compression, line ends and a
            byte-order mark do not change it.
        path: the folder.
        report: what became of every record of the three files.
    """

    name: str
    corpus: dict[str, dict[str, str]]
    queries: dict[str, str]
    qrels: dict[str, dict[str, int]]
    split: str
    fingerprint: str
    path: Path
    report: RecordReport = field(repr=False, compare=False)


def load_beir_folder(
    path: str | Path,
    split: str = "test",
    on_bad_record: OnBadRecord = "stop",
    report: RecordReport | None = None,
    allow_empty_documents: bool = True,
) -> BeirDataset:
    """Read one split of a BEIR folder.

    Where a file is there both plain and as .gz, the plain one is read. An integer `_id` becomes its decimal
    string, which is how the qrels name it. The header of the qrels may be missing.

    Args:
        path: the folder.
        split: the qrels file to read, `qrels/SPLIT.tsv`.
        on_bad_record: "stop" or "skip". Bad are: broken JSON, a missing or repeated `_id`, a missing text, an
            empty query, a judgement of an unknown query or document or with other than three columns, a score
            that is no integer, and a second judgement of the same query and document. Leaving judgements out
            changes nDCG and recall.
        report: counts go here instead of into a new report; its own `on_bad_record` then holds.
        allow_empty_documents: published sets hold documents without title and text, and are scored with
            them; so evaluation keeps them (and notes how many). False, for training: they are bad records.

    Raises:
        DataError: a file or the split is missing, nothing usable is left, or a bad record under "stop".
    """
    folder = Path(path)
    if report is None:
        report = RecordReport(on_bad_record)
    corpus_file, queries_file = beir_file(folder, "corpus.jsonl"), beir_file(folder, "queries.jsonl")
    qrels_file = split_file(folder, split)

    corpus = read_corpus(corpus_file, report, allow_empty_documents)
    all_queries = _read_queries(queries_file, report)
    qrels = _read_qrels(qrels_file, report, all_queries, corpus)
    report.refuse_if_nothing_left(qrels_file, len(qrels), "judgements")
    queries = {query_id: all_queries[query_id] for query_id in qrels}

    digest = hashlib.sha256()
    for document_id, document in corpus.items():
        add_to_fingerprint(digest, "d", document_id, document["title"], document["text"])
    for query_id, judged in qrels.items():
        add_to_fingerprint(digest, "q", query_id, queries[query_id])
        for document_id, score in judged.items():
            add_to_fingerprint(digest, "j", document_id, str(score))
    return BeirDataset(
        # resolve(), so that "." has a name too.
        name=folder.resolve().name,
        corpus=corpus,
        queries=queries,
        qrels=qrels,
        split=split,
        fingerprint=digest.hexdigest(),
        path=folder,
        report=report,
    )


def passage_text(title: str, text: str, title_separator: str = " ") -> str:
    """(title + separator + text).strip(), as BEIR's encoders join them; no separator beside an empty half."""
    if not title.strip():
        return text.strip()
    if not text.strip():
        return title.strip()
    return (title + title_separator + text).strip()


def is_beir_folder(path: str | Path) -> bool:
    """Whether `path` is a directory with a corpus in it."""
    return any(os.path.isfile(os.path.join(path, name)) for name in ("corpus.jsonl", "corpus.jsonl.gz"))


def beir_file(folder: Path, name: str) -> Path:
    """The path of file `name` in the folder, plain or .gz.

    Raises:
        DataError: the folder or the file is missing; the message tells which.
    """
    if not os.path.exists(folder):
        raise DataError(one_line(f"{folder}: no such folder (check the path; {_LAYOUT})"))
    if not os.path.isdir(folder):
        raise DataError(one_line(f"{folder}: is a file, a folder is expected ({_LAYOUT})"))
    for candidate in (folder / name, folder / f"{name}.gz"):
        if os.path.exists(candidate):
            return candidate
    raise DataError(one_line(f"{folder / name}: no such file ({_LAYOUT})"))


def split_file(folder: Path, split: str) -> Path:
    """The path of the qrels of a split, plain or .gz.

    Raises:
        DataError: the folder has no such split; the message names those that it has.
    """
    for candidate in (folder / "qrels" / f"{split}.tsv", folder / "qrels" / f"{split}.tsv.gz"):
        if os.path.isfile(candidate):
            return candidate
    names = os.listdir(folder / "qrels") if os.path.isdir(folder / "qrels") else []
    splits = sorted({re.sub(r"\.tsv(\.gz)?$", "", n) for n in names if re.search(r"\.tsv(\.gz)?$", n)})
    there = f"it has: {', '.join(splits)}" if splits else "it has none"
    raise DataError(one_line(f"{folder / 'qrels'}: no split {quoted(split)}; {there} ({_LAYOUT})"))


def judged_queries(folder: Path, split: str) -> set[str]:
    """Ids of the queries that a split judges; whether the judgements can be used is for `load_beir_folder` to say.

    Raises:
        DataError: no such folder or split, or nothing in it.
    """
    path = split_file(folder, split)
    rows = [text.split("\t") for _, text in read_lines(path, RecordReport("skip"))]
    if rows and _is_header(rows[0]):
        del rows[0]
    if not rows:
        raise DataError(one_line(f"{path}: judges no query (get it again)"))
    return {cells[0] for cells in rows}


def _id_of(record: dict[str, Any]) -> str:
    value = record.get("_id")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    identifier = text_of(value, "_id")
    if not identifier.strip():
        raise Fault("missing _id", "it is blank")
    return identifier


def _refuse_repeated(identifier: str, known: dict[str, Any]) -> None:
    if identifier in known:
        raise Fault("duplicate _id", quoted(identifier), "keep one record for each _id")


def read_corpus(path: Path, report: RecordReport, allow_empty: bool) -> dict[str, dict[str, str]]:
    """{document id: {"title", "text"}} of a corpus.jsonl, plain or gzip; see `load_beir_folder`.

    Raises:
        DataError: the file cannot be used, a bad record under "stop", or no document is left.
    """
    corpus: dict[str, dict[str, str]] = {}
    empty = 0
    for line, record in read_json_lines(path, report):
        try:
            document_id = _id_of(record)
            _refuse_repeated(document_id, corpus)
            text = text_of(record.get("text"), "text")
            title = "" if record.get("title") is None else text_of(record["title"], "title")
            if not passage_text(title, text):
                if not allow_empty:
                    raise Fault("empty document", quoted(document_id))
                empty += 1
        except Fault as fault:
            report.reject(path, line, fault)
            continue
        report.accept()
        corpus[document_id] = {"title": title, "text": text}
    report.note("empty documents kept", empty)
    report.refuse_if_nothing_left(path, len(corpus), "documents")
    return corpus


def _read_queries(path: Path, report: RecordReport) -> dict[str, str]:
    queries: dict[str, str] = {}
    for line, record in read_json_lines(path, report):
        try:
            query_id = _id_of(record)
            _refuse_repeated(query_id, queries)
            text = filled_text_of(record.get("text"), "text")
        except Fault as fault:
            report.reject(path, line, fault)
            continue
        report.accept()
        queries[query_id] = text
    report.refuse_if_nothing_left(path, len(queries), "queries")
    return queries


def _is_header(cells: list[str]) -> bool:
    return cells[0].lower() in _HEADER_STARTS and not _SCORE.fullmatch(cells[-1])


def _read_qrels(
    path: Path, report: RecordReport, queries: dict[str, str], corpus: dict[str, dict[str, str]]
) -> dict[str, dict[str, int]]:
    qrels: dict[str, dict[str, int]] = {}
    first = True
    for line, text in read_lines(path, report):
        cells = text.split("\t")
        # Only a line that starts like a header is one: BEIR drops the first line whatever it is, and with it
        # the first judgement of a file that has no header.
        is_header = first and _is_header(cells)
        first = False
        if is_header:
            continue
        report.see()
        try:
            if len(cells) != 3:
                mend = "write query-id, corpus-id and score, separated by tabs"
                raise Fault("not three columns", f"found {len(cells)}", mend)
            query_id, document_id, score = cells
            if not _SCORE.fullmatch(score.strip()):
                raise Fault("score is not an integer", f"found {quoted(score)}")
            if query_id not in queries:
                raise Fault("unknown query", quoted(query_id), "add it to queries.jsonl")
            if document_id not in corpus:
                raise Fault("unknown document", quoted(document_id), "add it to corpus.jsonl")
            if document_id in qrels.get(query_id, {}):
                pair = f"query {quoted(query_id)}, document {quoted(document_id)}"
                raise Fault("duplicate judgement", pair, "keep one line for each query and document")
        except Fault as fault:
            report.reject(path, line, fault)
            continue
        report.accept()
        qrels.setdefault(query_id, {})[document_id] = int(score)
    return qrels
