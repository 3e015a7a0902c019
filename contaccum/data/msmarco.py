"""MS MARCO passage ranking: a folder of collection, queries, qrels and triples of ids.

Texts stay on disk and are read when their query's turn comes, so that collection and queries may not be compressed.
Held in memory are 16 bytes for each passage and query, the judgements of the split, and 4 bytes for each triple that is
used. Text triples, a file, are `readers`' business.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from contaccum.data.beir import SCORE
from contaccum.data.records import Fault, RecordReport, checked_line, one_line, quoted, read_lines, take
from contaccum.errors import DataError


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
    qrels = _file(folder, f"qrels.{split}.tsv", "qrels.tsv")
    triples = None if num_negatives == 0 else _triples_file(folder, split)
    collection, asked = _file(folder, "collection.tsv"), _file(folder, f"queries.{split}.tsv", "queries.tsv")
    with open(collection, "rb") as passages_file, open(asked, "rb") as queries_file:
        passages, queries = _Texts(collection, passages_file, report), _Texts(asked, queries_file, report)

        def judgement(line: str) -> tuple[int, int, int]:
            query, _, passage, score = _columns(line, "query id, 0, passage id, score")
            if not SCORE.fullmatch(score):
                raise Fault("score is not an integer", f"found {quoted(score)}")
            return queries.place(query), passages.place(passage), int(score)

        def triple(line: str) -> tuple[int, int]:
            query, _, passage = _columns(line, "query id, positive id, negative id")
            return queries.place(query), passages.place(passage)

        judged: dict[int, tuple[int, list[int]]] = {}
        for line, (query, passage, score) in take(qrels, read_lines(qrels), judgement, report):
            if score > 0:
                judged.setdefault(query, (line, []))[1].append(passage)
        negatives = {query: array("i") for query in judged}
        for _, (query, passage) in take(triples, read_lines(triples), triple, report) if triples else ():
            if query in judged and (num_negatives is None or len(negatives[query]) < num_negatives):
                negatives[query].append(passage)
        for query, (line, positives) in judged.items():
            yield line, queries[query], [passages[p] for p in positives], [passages[p] for p in negatives[query]]


class _Texts:
    """The texts of an `id<TAB>text` file by id, without holding them: a hash and an offset in the file for each line.

    Ids go by 64-bit hashes: of ten million, two share one with a probability of 3e-6, and would be refused.
    """

    def __init__(self, path: Path, file: IO[bytes], report: RecordReport) -> None:
        self._path, self._file = path, file
        if path.suffix == ".gz":
            raise DataError(one_line(f"{path}: is compressed, and its texts are looked up in it (unpack it first)"))
        hashes, offsets = array("q"), array("q")
        for _, (identifier, offset) in take(path, self._lines(), _id_and_offset, report):
            hashes.append(hash(identifier))
            offsets.append(offset)
        report.refuse_if_nothing_left(path, len(hashes), "texts")
        order = np.argsort(np.frombuffer(hashes, dtype=np.int64))
        self._hashes, self._offsets = (np.frombuffer(x, dtype=np.int64)[order] for x in (hashes, offsets))
        for place in np.flatnonzero(self._hashes[1:] == self._hashes[:-1]).tolist():
            what = f"two lines have the id {quoted(self._line(place)[0])}"
            raise DataError(one_line(f"{path}: {what} (keep one line for each id)"))

    def _lines(self) -> Iterator[tuple[int, tuple[int, bytes]]]:
        end = 0
        for number, raw in enumerate(self._file, start=1):
            start, end = end, end + len(raw)
            if raw.strip():
                yield number, (start, raw)

    def _line(self, place: int) -> list[str]:
        self._file.seek(int(self._offsets[place]))
        return self._file.readline().decode("utf-8-sig", "replace").split("\t")

    def place(self, identifier: str) -> int:
        """The place of an id; raises `Fault` where it is not there."""
        place = int(self._hashes.searchsorted(hash(identifier)))
        if place == len(self._hashes) or self._hashes[place] != hash(identifier):
            raise Fault(f"unknown id in {self._path.name}", quoted(identifier), "add it there")
        return place

    def __getitem__(self, place: int) -> str:
        return self._line(place)[-1].strip()


def _id_and_offset(line: tuple[int, bytes]) -> tuple[str, int]:
    cells = checked_line(line[1].decode("utf-8-sig", "surrogateescape")).split("\t")
    if len(cells) != 2 or not cells[0].strip() or not cells[1].strip():
        raise Fault("not an id and a text", f"found {quoted(cells)}", "write id and text, separated by a tab")
    return cells[0], line[0]


def _columns(line: str, names: str) -> list[str]:
    cells, wanted = line.split(), len(names.split(", "))
    if len(cells) != wanted:
        raise Fault(f"not {wanted} columns", f"found {len(cells)}", f"write {names}, separated by tabs")
    return cells


def _file(folder: Path, *names: str) -> Path:
    for path in (folder / f"{name}{ending}" for name in names for ending in ("", ".gz")):
        if path.is_file():
            return path
    there = ", ".join(sorted(path.name for path in folder.glob("q*.tsv*"))) or "nothing"
    mend = "MS MARCO is collection.tsv, queries.SPLIT.tsv, qrels.SPLIT.tsv and perhaps qidpidtriples.SPLIT.*.tsv"
    raise DataError(one_line(f"{folder / names[0]}: no such file; beside it: {there} ({mend})"))


def _triples_file(folder: Path, split: str) -> Path | None:
    # triples.SPLIT.*.tsv is left alone: those that are published hold texts.
    found = sorted(folder.glob(f"*qidpidtriples.{split}.*tsv*")) or sorted(folder.glob("triples.tsv*"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise DataError(one_line(f"{folder}: several files of triples: {names} (keep one there)"))
    return found[0] if found else None
