"""MS MARCO passage ranking: a folder of collection, queries, qrels and triples of ids, or one file of text triples.

Texts stay on disk (`line_index`) and are read when their query's turn comes.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from contaccum.data.line_index import LineIndex, open_seekable
from contaccum.data.record import NOT_A_PAIR, Record, RecordRules
from contaccum.data.records import Fault, RecordReport, one_line, quoted, read_lines, read_raw_lines, text_line
from contaccum.errors import DataError

# {query id: {passage id: line of the judgement}}, judgements above 0 alone
Judged = dict[str, dict[str, int]]

_SCORE = re.compile(r"[+-]?[0-9]{1,9}")
_LAYOUT = (
    "an MS MARCO folder holds collection.tsv, queries.SPLIT.tsv, qrels.SPLIT.tsv and perhaps "
    "qidpidtriples.SPLIT.*.tsv, each plain or .gz; without SPLIT, queries.tsv, qrels.tsv and triples.tsv"
)
_NOT_JUDGED = "triples of queries that the qrels do not judge, not used"


def is_msmarco_folder(path: str | Path) -> bool:
    """Whether `path` is a directory with a collection in it."""
    return any(os.path.isfile(os.path.join(path, name)) for name in ("collection.tsv", "collection.tsv.gz"))


def read_msmarco(folder: Path, split: str, rules: RecordRules, report: RecordReport) -> Iterator[Record]:
    """One record for each query that the qrels of a split judge above 0, in their order.

    Negatives are those of the folder's triples of ids for the split (qid, positive pid, negative pid), in the order
    of the file; with `rules.num_negatives` 0 that file is not read. Published triples hold hundreds for each query:
    say how many to take.

    Held in memory: 16 bytes for each passage and query, the judgements of the split, and 24 bytes for each run of
    triples of one query (the published file has one run a query). A .gz collection, queries or triples file is
    unpacked into a temporary file.

    Bad are: lines without their two, four or three columns, blank texts, an id twice, a judgement twice, a score that
    is no integer, unknown ids, and the judgements of a query with fewer triples than the rules demand.

    Raises:
        DataError: a file is missing or cannot be used, nothing usable is left, or a bad record under "stop".
    """
    collection, queries_file, qrels_file = _files(folder, split)
    triples_file = _triples_file(folder, split) if rules.num_negatives != 0 else None
    with LineIndex(collection, report, "passages") as passages, LineIndex(queries_file, report, "queries") as queries:
        judged = _read_qrels(qrels_file, report, queries, passages)
        triples = None if triples_file is None else TripleIndex(triples_file, report, judged, queries, passages)
        try:
            for query_id, positives in judged.items():
                taken = [] if triples is None else triples.negatives(query_id, rules.num_negatives)
                try:
                    rules.require_negatives(len(taken))
                except Fault as fault:
                    for line in positives.values():
                        report.reject(qrels_file, line, fault)
                    continue
                report.accept(len(positives))
                yield Record(
                    queries.text(query_id),
                    [passages.text(passage_id).strip() for passage_id in list(positives)[: rules.max_positives]],
                    [passages.text(passage_id).strip() for passage_id in taken],
                )
        finally:
            if triples is not None:
                triples.close()


def read_text_triples(path: Path, rules: RecordRules, report: RecordReport) -> Iterator[Record]:
    """Lines of query, positive and negative text, separated by tabs, without a header: triples.train.small.tsv.

    Raises:
        DataError: the file cannot be used, it holds ids instead of texts, or a bad record under "stop".
    """
    first = True
    for line, text in read_lines(path, report):
        report.see()
        try:
            cells = text.split("\t")
            if len(cells) != 3:
                mend = "write query, positive and negative, separated by tabs"
                raise Fault("not three columns", f"found {len(cells)}", mend)
            if first and all(cell.strip().isdecimal() for cell in cells):
                mend = "name the folder that holds it beside collection.tsv, queries.SPLIT.tsv and qrels.SPLIT.tsv"
                raise DataError(one_line(f"{path}:{line}: triples of ids, not of texts ({mend})"))
            for cell, what in zip(cells, ("query", "positive", "negative"), strict=True):
                if not cell.strip():
                    raise Fault(f"empty {what}")
            first = False
            rules.require_negatives(1)
        except Fault as fault:
            report.reject(path, line, fault)
            continue
        report.accept()
        rules.note_unused(report, True)
        yield Record(cells[0], [cells[1].strip()], [cells[2].strip()][: rules.num_negatives])


class TripleIndex:
    """Where the triples of each query are in a file of qid, pid+ and pid-, separated by white space.

    Held are 24 bytes for each run of neighbouring lines of one query.

    Raises:
        DataError: the file cannot be used, or a bad record under "stop".
    """

    def __init__(
        self, path: Path, report: RecordReport, judged: Mapping[str, object], queries: LineIndex, passages: LineIndex
    ) -> None:
        self._path = path
        self._file, broken_off = open_seekable(path)
        keys, starts, counts = array("q"), array("q"), array("q")
        last, end = "", -1
        try:
            for line, start, raw in read_raw_lines(self._file, path, report, broken_off):
                if not raw.strip():
                    continue
                report.see()
                try:
                    query_id, negative = _triple(text_line(raw))
                    if query_id not in judged and query_id not in queries:
                        raise Fault("unknown query", quoted(query_id), "add it to the queries")
                    if negative not in passages:
                        raise Fault("unknown passage", quoted(negative), "add it to the collection")
                except Fault as fault:
                    report.reject(path, line, fault)
                    continue
                report.accept()
                if query_id not in judged:
                    report.note(_NOT_JUDGED)
                    continue
                if query_id == last and start == end:
                    counts[-1] += 1
                else:
                    keys.append(hash(query_id))
                    starts.append(start)
                    counts.append(1)
                last, end = query_id, start + len(raw)
        except BaseException:
            self._file.close()
            raise
        unsorted = np.array(keys, dtype=np.int64)
        order = np.argsort(unsorted, kind="stable")
        self._keys = unsorted[order]
        self._starts = np.array(starts, dtype=np.int64)[order]
        self._counts = np.array(counts, dtype=np.int64)[order]

    def negatives(self, query_id: str, most: int | None) -> list[str]:
        """Ids of the first `most` negatives of a query, in the order of the file; None: all."""
        found: list[str] = []
        first, end = (int(self._keys.searchsorted(hash(query_id), side)) for side in ("left", "right"))
        for run in range(first, end):
            self._file.seek(int(self._starts[run]))
            for _ in range(int(self._counts[run])):
                if most is not None and len(found) >= most:
                    return found
                try:
                    owner, negative = _triple(text_line(self._file.readline()))
                except Fault as fault:
                    raise DataError(one_line(f"{self._path}: {fault.reason} (it changed while it was read)")) from None
                # Another query's run, should the two ids have the same hash.
                if owner != query_id:
                    break
                found.append(negative)
        return found

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _triple(text: str) -> tuple[str, str]:
    cells = text.split()
    if len(cells) != 3:
        raise Fault("not three columns", f"found {len(cells)}", "write query id, positive id and negative id")
    return cells[0], cells[2]


def _read_qrels(path: Path, report: RecordReport, queries: LineIndex, passages: LineIndex) -> Judged:
    """Lines of qid, 0, pid and score. Those above 0 are counted as used by whoever forms their records."""
    judged: Judged = {}
    not_pairs: set[tuple[str, str]] = set()
    for line, text in read_lines(path, report):
        report.see()
        cells = text.split()
        try:
            if len(cells) != 4:
                mend = "write query id, 0, passage id and score, separated by tabs"
                raise Fault("not four columns", f"found {len(cells)}", mend)
            query_id, _, passage_id, score = cells
            if not _SCORE.fullmatch(score):
                raise Fault("score is not an integer", f"found {quoted(score)}")
            if query_id not in queries:
                raise Fault("unknown query", quoted(query_id), "add it to the queries")
            if passage_id not in passages:
                raise Fault("unknown passage", quoted(passage_id), "add it to the collection")
            if passage_id in judged.get(query_id, ()) or (query_id, passage_id) in not_pairs:
                pair = f"query {quoted(query_id)}, passage {quoted(passage_id)}"
                raise Fault("duplicate judgement", pair, "keep one line for each query and passage")
        except Fault as fault:
            report.reject(path, line, fault)
            continue
        if int(score) > 0:
            judged.setdefault(query_id, {})[passage_id] = line
        else:
            not_pairs.add((query_id, passage_id))
            report.accept()
            report.note(NOT_A_PAIR)
    report.refuse_if_nothing_left(path, len(judged), "judgements")
    return judged


def _files(folder: Path, split: str) -> tuple[Path, Path, Path]:
    """Collection, queries and qrels of a split, each plain or .gz; a file without a split in its name is of every one.

    Raises:
        DataError: one is missing; the message says which splits there are.
    """
    if not os.path.isdir(folder):
        raise DataError(one_line(f"{folder}: no such folder (check the path; {_LAYOUT})"))
    found = []
    for name, plain in (
        ("collection.tsv", "collection.tsv"),
        (f"queries.{split}.tsv", "queries.tsv"),
        (f"qrels.{split}.tsv", "qrels.tsv"),
    ):
        names = (name, f"{name}.gz", plain, f"{plain}.gz")
        path = next((folder / n for n in names if os.path.isfile(folder / n)), None)
        if path is None:
            matches = (re.fullmatch(r"qrels\.(.+)\.tsv(\.gz)?", n) for n in os.listdir(folder))
            splits = ", ".join(sorted({match.group(1) for match in matches if match})) or "none"
            raise DataError(one_line(f"{folder / name}: no such file; qrels are there of: {splits} ({_LAYOUT})"))
        found.append(path)
    return found[0], found[1], found[2]


def _triples_file(folder: Path, split: str) -> Path | None:
    """The folder's triples of ids: *qidpidtriples*.SPLIT.*tsv or, without a split, triples.tsv; plain or .gz.

    triples.SPLIT.*.tsv is left alone: those that are published hold texts.
    """
    there = os.listdir(folder)
    pattern = re.compile(rf".*qidpidtriples\.(.+\.)?{re.escape(split)}(\..+)?\.tsv(\.gz)?")
    names = sorted(name for name in there if pattern.fullmatch(name))
    names = names or [name for name in ("triples.tsv", "triples.tsv.gz", "qidpidtriples.tsv") if name in there]
    names = [name for name in names if not (name.endswith(".gz") and name.removesuffix(".gz") in names)]
    if len(names) > 1:
        raise DataError(one_line(f"{folder}: several files of triples: {', '.join(names)} (keep one there)"))
    return folder / names[0] if names else None
