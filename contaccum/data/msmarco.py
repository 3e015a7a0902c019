"""MS MARCO passage ranking: a folder of collection, queries, qrels and triples of ids.

Texts stay on disk and are read when their query's turn comes, so that collection and queries may not be compressed.
Held in memory are 16 bytes for each passage and query, the judgements, and 4 bytes for each triple that is used.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from contaccum.data.beir import beir_file, score_of
from contaccum.data.records import Fault, RecordReport, as_text, cells_of, one_line, quoted, read_lines, take, text_of
from contaccum.errors import DataError


def read_msmarco(
    folder: Path, split: str, num_negatives: int | None, report: RecordReport
) -> Iterator[tuple[str, list[str], list[str]]]:
    """(query, positives, negatives) for each query that a split judges above 0, in the order of the qrels.

    Negatives are those of the folder's triples of ids for the split (qid, positive pid, negative pid), in the order of
    the file: the first `num_negatives`, None: all; with 0 that file is not read. Published triples hold hundreds.
    Raises `DataError`.
    """
    names = (f"qrels.{split}.tsv", "collection.tsv", f"queries.{split}.tsv")
    qrels, collection, asked = (beir_file(folder, name) for name in names)
    # triples.SPLIT.*.tsv is left alone: those that are published hold texts.
    triples = [] if num_negatives == 0 else sorted(folder.glob(f"*qidpidtriples.{split}.*"))[:1]
    with open(collection, "rb") as passages_file, open(asked, "rb") as queries_file:
        passages, queries = _Texts(collection, passages_file, report), _Texts(asked, queries_file, report)

        def judgement(line: str) -> tuple[int, int, int]:
            query, _, passage, score = cells_of(line, 4, None)
            return queries.place(query), passages.place(passage), score_of(score)

        def triple(line: str) -> tuple[int, int]:
            query, _, passage = cells_of(line, 3, None)
            return queries.place(query), passages.place(passage)

        judged: dict[int, list[int]] = {}
        for query, passage, score in take(qrels, read_lines(qrels), judgement, report):
            if score > 0:
                judged.setdefault(query, []).append(passage)
        negatives = {query: array("i") for query in judged}
        for path in triples:
            for query, passage in take(path, read_lines(path), triple, report):
                if query in judged and (num_negatives is None or len(negatives[query]) < num_negatives):
                    negatives[query].append(passage)
        for query, positives in judged.items():
            yield queries[query], [passages[p] for p in positives], [passages[p] for p in negatives[query]]


class _Texts:
    """The texts of an `id<TAB>text` file by id, without holding them: a 64-bit hash and an offset for each line.

    Of ten million ids, two share a hash with a probability of 3e-6, and would be refused.
    """

    def __init__(self, path: Path, file: IO[bytes], report: RecordReport) -> None:
        self._path, self._file = path, file
        if path.suffix == ".gz":
            raise DataError(one_line(f"{path}: is compressed, and its texts are looked up in it (unpack it first)"))
        found = take(path, self._lines(), _hash_and_offset, report)
        table = np.fromiter(found, dtype=[("hash", np.int64), ("offset", np.int64)])
        table = table[np.argsort(table["hash"])]
        self._hashes, self._offsets = np.ascontiguousarray(table["hash"]), table["offset"]
        again = np.flatnonzero(self._hashes[1:] == self._hashes[:-1])
        if len(again):
            raise DataError(one_line(f"{path}: two lines have the id {quoted(self._line(again[0])[0])} (keep one)"))

    def _lines(self) -> Iterator[tuple[int, Any]]:
        start = 0
        for number, raw in enumerate(self._file, start=1):
            if raw.strip():
                yield number, (start, raw)
            start += len(raw)

    def _line(self, place: int) -> list[str]:
        self._file.seek(int(self._offsets[place]))
        return self._file.readline().decode("utf-8-sig").split("\t")

    def place(self, identifier: str) -> int:
        """The place of an id; raises `Fault` where it is not there."""
        place = int(self._hashes.searchsorted(hash(identifier)))
        if place == len(self._hashes) or self._hashes[place] != hash(identifier):
            raise Fault(f"unknown id in {self._path.name}", quoted(identifier))
        return place

    def __getitem__(self, place: int) -> str:
        return self._line(place)[-1].strip()


def _hash_and_offset(row: tuple[int, bytes]) -> tuple[int, int]:
    line = as_text(row[1])
    if isinstance(line, Fault):
        raise line
    identifier, text = cells_of(line, 2)
    text_of(text, "text")
    return hash(identifier), row[0]
