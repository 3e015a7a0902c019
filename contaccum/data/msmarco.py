"""MS MARCO passage ranking: a folder with a collection, queries, qrels, and triples of ids.

A line of each file, with tabs or other white space between the cells:

    collection.tsv               passage id, text
    queries.SPLIT.tsv            query id, text
    qrels.SPLIT.tsv              query id, 0, passage id, grade
    *qidpidtriples.SPLIT.*       query id, positive id, negative id

Memory holds the judgements, and 8 bytes for each triple that is used. Texts are looked up on disk.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from contaccum.data.beir import find_beir_file, parse_grade
from contaccum.data.records import RecordReport, parse_rows, parse_text, read_lines, split_cells
from contaccum.data.text_lookup import TextLookup


class QueryTexts(NamedTuple):
    """Texts of a query, its relevant passages and its negatives."""

    query: str
    positives: list[str]
    negatives: list[str]


class _Judgement(NamedTuple):
    """A line of the qrels; `passage_number` is the number of the passage in the `TextLookup`."""

    query_id: str
    passage_number: int
    grade: int


def read_msmarco(
    folder: Path, split: str, num_negatives: int | None, report: RecordReport
) -> Iterator[QueryTexts]:
    """Yield each query with a passage of a grade above 0 in a split, in the order of the qrels.

    The negatives come from the folder's file of triples of ids (query, positive, negative) for the
    split. A query has each negative once.

    Args:
        folder: the folder.
        split: name of the split, such as "train" or "dev.small".
        num_negatives: number of different negatives per query, the first in the file; None: all,
            which are hundreds per query in the published files. With 0, the file is not read.
        report: receives the counts of records.

    Raises:
        DataError: for a missing file, or a bad record under "stop".
    """
    qrels_file = find_beir_file(folder, f"qrels.{split}.tsv")
    collection_file = find_beir_file(folder, "collection.tsv")
    queries_file = find_beir_file(folder, f"queries.{split}.tsv")
    passages = _read_texts(collection_file, report)
    queries = _read_texts(queries_file, report)

    def parse_judgement(line: str) -> _Judgement:
        query_id, _, passage_id, grade = split_cells(line, 4, None)
        queries.find_number(query_id)  # raises Fault for an unknown id
        return _Judgement(query_id, passages.find_number(passage_id), parse_grade(grade))

    positives: dict[str, list[int]] = {}
    for judgement in parse_rows(qrels_file, read_lines(qrels_file), parse_judgement, report):
        if judgement.grade > 0:
            positives.setdefault(judgement.query_id, []).append(judgement.passage_number)
    negatives = {query_id: array("q") for query_id in positives}

    def add_negative(line: str) -> None:
        query_id, _, passage_id = split_cells(line, 3, None)
        if query_id not in negatives:
            queries.find_number(query_id)  # a query without judgement is ignored, an unknown id not
        elif num_negatives is None:
            negatives[query_id].append(passages.find_number(passage_id))
        elif len(negatives[query_id]) < num_negatives:
            number = passages.find_number(passage_id)
            # A query with several positives may have triples with the same negative.
            if number not in negatives[query_id]:
                negatives[query_id].append(number)

    triples_file = None if num_negatives == 0 else _find_triples_file(folder, split)
    if triples_file is not None:
        for _ in parse_rows(triples_file, read_lines(triples_file), add_negative, report):
            pass
    for query_id, positive_numbers in positives.items():
        distinct_negatives = dict.fromkeys(map(passages.get_text, negatives[query_id]))
        yield QueryTexts(
            queries.get_text(queries.find_number(query_id)),
            [passages.get_text(number) for number in positive_numbers],
            list(distinct_negatives),
        )


def _find_triples_file(folder: Path, split: str) -> Path | None:
    """Return the file of triples of ids, or None.

    The published triples.SPLIT.*.tsv do not count, because they hold texts.
    """
    files = sorted(folder.glob(f"*qidpidtriples.{split}.*"))
    return files[0] if files else None


def _read_texts(path: Path, report: RecordReport) -> TextLookup:
    return TextLookup(path, parse_rows(path, read_lines(path), _parse_text_line, report))


def _parse_text_line(line: str) -> tuple[str, str]:
    text_id, text = split_cells(line, 2)
    return text_id, parse_text(text, "text").strip()
