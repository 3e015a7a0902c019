"""MS MARCO passage ranking: a folder of collection, queries, qrels and triples of ids.

Held in memory are the judgements, and 8 bytes for each triple that is used; texts are found by their ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

from contaccum.data.beir import beir_file, score_of
from contaccum.data.records import RecordReport, TextsById, cells_of, read_lines, take, text_of


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
    passages, queries = (
        TextsById(path, take(path, read_lines(path), _text, report)) for path in (collection, asked)
    )

    def judgement(line: str) -> tuple[str, int, int]:
        query, _, passage, score = cells_of(line, 4, None)
        queries.place(query)
        return query, passages.place(passage), score_of(score)

    judged: dict[str, list[int]] = {}
    for query, passage, score in take(qrels, read_lines(qrels), judgement, report):
        if score > 0:
            judged.setdefault(query, []).append(passage)
    negatives = {query: array("q") for query in judged}

    def triple(line: str) -> None:
        query, _, passage = cells_of(line, 3, None)
        if query not in negatives:
            queries.place(query)
        elif num_negatives is None or len(negatives[query]) < num_negatives:
            negatives[query].append(passages.place(passage))

    for path in triples:
        for _ in take(path, read_lines(path), triple, report):
            pass
    for query, positives in judged.items():
        yield (
            queries[queries.place(query)],
            [passages[p] for p in positives],
            [passages[p] for p in negatives[query]],
        )


def _text(line: str) -> tuple[str, str]:
    identifier, text = cells_of(line, 2)
    return identifier, text_of(text, "text").strip()
