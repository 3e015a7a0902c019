"""MS MARCO passage ranking: a folder of collection, queries, qrels and triples of ids.

Texts stay on disk and are read when their query's turn comes. Held in memory are 16 bytes for each passage and query,
the judgements of the split, and 4 bytes for each triple that is used. A .gz collection or queries file is unpacked into
a temporary file. Text triples, a file, are `readers`' business.
"""

from __future__ import annotations

import gzip
import re
import shutil
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from contaccum.data.beir import NOT_A_PAIR, SCORE
from contaccum.data.records import (
    BYTE_ORDER_MARK,
    UNREADABLE,
    Fault,
    RecordReport,
    checked_line,
    one_line,
    open_data_file,
    quoted,
    read_lines,
    take,
)
from contaccum.errors import DataError

_HEADER_WORDS = {*b"id pid qid docid doc_id query_id passage_id text passage query".split()}
_LAYOUT = (
    "an MS MARCO folder holds collection.tsv, queries.SPLIT.tsv, qrels.SPLIT.tsv and perhaps "
    "qidpidtriples.SPLIT.*.tsv, each plain or .gz; without SPLIT, queries.tsv, qrels.tsv and triples.tsv"
)


def is_msmarco_folder(path: Path) -> bool:
    """Whether `path` is a directory with a collection in it."""
    return any((path / name).is_file() for name in ("collection.tsv", "collection.tsv.gz"))


def read_msmarco(
    folder: Path, split: str, num_negatives: int | None, report: RecordReport
) -> Iterator[tuple[int, str, list[str], list[str]]]:
    """(line in the qrels, query, positives, negatives) for each query that a split judges above 0, in their order.

    Negatives are those of the folder's triples of ids for the split (qid, positive pid, negative pid), in the order of
    the file: the first `num_negatives`, None: all; with 0 that file is not read. Published triples hold hundreds.

    Raises:
        DataError: a file is missing or cannot be used, nothing usable is left, or a bad record under "stop".
    """
    collection, queries_file = _file(folder, "collection.tsv"), _file(folder, f"queries.{split}.tsv", "queries.tsv")
    qrels = qrels_file(folder, split)
    triples_file = _triples_file(folder, split) if num_negatives != 0 else None
    with _Texts(collection, report, "passages") as passages, _Texts(queries_file, report, "queries") as queries:
        judged = _read_qrels(qrels, report, queries, passages)
        negatives = {query: array("i") for query in judged}
        if triples_file is not None:
            _read_triples(triples_file, report, negatives, num_negatives, queries, passages)
        for query, (line, scores) in judged.items():
            positives = [passages[place] for place, score in scores.items() if score > 0]
            if positives:
                yield (
                    line,
                    queries[queries.place(query, "query", "queries")],
                    positives,
                    [passages[place] for place in negatives[query]],
                )


class _Texts:
    """The texts of an `id<TAB>text` file by id, without holding them: a hash and a place in the file for each line.

    Ids go by 64-bit hashes: of ten million, two share one with a probability of 3e-6, and would be reported.
    """

    def __init__(self, path: Path, report: RecordReport, what: str) -> None:
        self.path, self._file = path, _seekable(path)
        hashes, starts, lines = array("q"), array("q"), array("q")
        for line, (identifier, start) in take(path, self._lines(), _id_and_start, report):
            hashes.append(hash(identifier))
            starts.append(start)
            lines.append(line)
        # Stable, so that of equal ids the first in the file comes first.
        order = np.argsort(np.array(hashes, dtype=np.int64), kind="stable")
        self._hashes, self._starts = (np.array(x, dtype=np.int64)[order] for x in (hashes, starts))
        again = np.flatnonzero(self._hashes[1:] == self._hashes[:-1]) + 1
        report.used -= len(again)
        for line in sorted(lines[int(order[place])] for place in again):
            report.reject(path, line, Fault("duplicate id", mend="keep one line for each id"))
        report.refuse_if_nothing_left(path, len(hashes), what)

    def _lines(self) -> Iterator[tuple[int, tuple[int, bytes]]]:
        """(line, (the byte at which it starts, its bytes)), but for blank lines and a header."""
        end = 0
        for line, raw in enumerate(self._file, start=1):
            start, end = end, end + len(raw)
            words = {cell.strip().lower() for cell in raw.removeprefix(BYTE_ORDER_MARK).split(b"\t")}
            if raw.strip() and not (start == 0 and words <= _HEADER_WORDS):
                yield line, (start, raw)

    def __enter__(self) -> _Texts:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def place(self, identifier: str, what: str, where: str) -> int:
        """The place of an id; raises `Fault` where it is not there."""
        place = int(self._hashes.searchsorted(hash(identifier)))
        if place == len(self._hashes) or self._hashes[place] != hash(identifier):
            raise Fault(f"unknown {what}", quoted(identifier), f"add it to the {where}")
        return place

    def __getitem__(self, place: int) -> str:
        self._file.seek(int(self._starts[place]))
        identifier, tab, text = self._file.readline().decode("utf-8-sig", "replace").partition("\t")
        if not tab or hash(identifier) != self._hashes[place]:
            raise DataError(one_line(f"{self.path}: a line is gone (it changed while it was read)"))
        return text.strip()


def _id_and_start(place: tuple[int, bytes]) -> tuple[str, int]:
    start, raw = place
    cells = checked_line(raw.decode("utf-8-sig", "surrogateescape")).split("\t")
    if len(cells) != 2 or not cells[0].strip() or not cells[1].strip():
        raise Fault("not an id and a text", f"found {quoted(cells)}", "write id and text, separated by a tab")
    return cells[0], start


def _seekable(path: Path) -> IO[bytes]:
    """Open a file for reading at any byte; what is gzip is unpacked into a temporary file that vanishes when closed."""
    file = open_data_file(path)
    if not isinstance(file, gzip.GzipFile):
        return file
    unpacked = tempfile.TemporaryFile(prefix="contaccum-")  # noqa: SIM115  # the caller closes it
    try:
        with file:
            shutil.copyfileobj(file, unpacked, 1 << 20)
    except UNREADABLE as error:
        unpacked.close()
        mend = f"get it again, or let TMPDIR name a folder with more room than {tempfile.gettempdir()}"
        raise DataError(one_line(f"{path}: cannot be unpacked: {error} ({mend})")) from error
    unpacked.seek(0)
    return unpacked


def _read_qrels(
    path: Path, report: RecordReport, queries: _Texts, passages: _Texts
) -> dict[str, tuple[int, dict[int, int]]]:
    """Lines of qid, 0, pid and score, as {query id: (its first line, {place of the passage: score})}."""
    judged: dict[str, tuple[int, dict[int, int]]] = {}

    def judgement(line: str) -> tuple[str, int, int]:
        query, _, passage, score = _columns(line, 4, "query id, 0, passage id and score")
        if not SCORE.fullmatch(score):
            raise Fault("score is not an integer", f"found {quoted(score)}")
        queries.place(query, "query", "queries")
        place = passages.place(passage, "passage", "collection")
        if query in judged and place in judged[query][1]:
            pair = f"query {quoted(query)}, passage {quoted(passage)}"
            raise Fault("duplicate judgement", pair, "keep one line for each query and passage")
        return query, place, int(score)

    for line, (query, place, score) in take(path, read_lines(path), judgement, report):
        report.note(NOT_A_PAIR, score <= 0)
        judged.setdefault(query, (line, {}))[1][place] = score
    report.refuse_if_nothing_left(path, len(judged), "judgements")
    return judged


def _read_triples(
    path: Path,
    report: RecordReport,
    negatives: dict[str, array[int]],
    most: int | None,
    queries: _Texts,
    passages: _Texts,
) -> None:
    """Add the places of the first `most` negatives of each query, of lines of qid, pid+ and pid-."""

    def triple(line: str) -> tuple[str, int]:
        query, _, passage = _columns(line, 3, "query id, positive id and negative id")
        queries.place(query, "query", "queries")
        return query, passages.place(passage, "passage", "collection")

    for _, (query, place) in take(path, read_lines(path), triple, report):
        found = negatives.get(query)
        if found is None:
            report.note("triples of queries that the qrels do not judge, not used")
        elif most is None or len(found) < most:
            found.append(place)


def _columns(line: str, count: int, names: str) -> list[str]:
    cells = line.split()
    if len(cells) != count:
        raise Fault(f"not {count} columns", f"found {len(cells)}", f"write {names}, separated by tabs")
    return cells


def qrels_file(folder: Path, split: str) -> Path:
    """The judgements of a split, plain or .gz; a file without a split in its name is of every one.

    Raises:
        DataError: there is none; the message says which splits there are.
    """
    return _file(folder, f"qrels.{split}.tsv", "qrels.tsv")


def _file(folder: Path, *names: str) -> Path:
    if not folder.is_dir():
        raise DataError(one_line(f"{folder}: no such folder (check the path; {_LAYOUT})"))
    for name in names:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    splits = sorted({re.sub(r"^qrels\.|\.tsv(\.gz)?$", "", path.name) for path in folder.glob("qrels.*.tsv*")})
    there = ", ".join(splits) or "none"
    raise DataError(one_line(f"{folder / names[0]}: no such file; qrels are there of: {there} ({_LAYOUT})"))


def _triples_file(folder: Path, split: str) -> Path | None:
    """The folder's triples of ids: *qidpidtriples*.SPLIT.*tsv or, without a split, triples.tsv; plain or .gz.

    triples.SPLIT.*.tsv is left alone: those that are published hold texts.
    """
    there = sorted(path.name for path in folder.iterdir())
    pattern = re.compile(rf".*qidpidtriples\.(.+\.)?{re.escape(split)}(\..+)?\.tsv(\.gz)?")
    names = [name for name in there if pattern.fullmatch(name)]
    names = names or [name for name in there if re.fullmatch(r"(qidpid)?triples\.tsv(\.gz)?", name)]
    names = [name for name in names if not (name.endswith(".gz") and name.removesuffix(".gz") in names)]
    if len(names) > 1:
        raise DataError(one_line(f"{folder}: several files of triples: {', '.join(names)} (keep one there)"))
    return folder / names[0] if names else None
