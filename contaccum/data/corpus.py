"""Texts to encode: the documents of a corpus, and queries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from contaccum.data.beir import find_beir_file
from contaccum.data.records import Columns, Passage, read_passages
from contaccum.data.rows import (
    OnBadRecord,
    RecordReport,
    parse_question_line,
    parse_rows,
    parse_text,
    passage_text,
    read_lines,
)
from contaccum.data.sampling import text_ids
from contaccum.errors import DataError

Corpus = Mapping[str, Mapping[str, str]]
"""{document id: {"title": title, "text": text}}; the title may be missing."""

_IDS_PER_BLOCK = 2**16


def read_texts(
    path: Path, kind: Literal["query", "document"], report: RecordReport, columns: Columns = None
) -> Iterator[Passage]:
    """Yield the documents or the queries of a corpus. Memory holds 8 bytes for each id.

    Args:
        path: a file or BEIR folder that `read_passages` reads. For queries, a BEIR folder's
            queries.jsonl is read, and DPR's question files (.csv) are accepted too. The ids of
            their questions are question-1, question-2, ..., without skipped lines.
        kind: "query" or "document". Documents may be blank.
        report: counts the records that are read and skipped.
        columns: see `read_passages`.

    Raises:
        DataError: the source cannot be used, or an id occurs twice.
    """
    if kind == "query" and path.is_dir():
        path = find_beir_file(path, "queries.jsonl")
    if kind == "query" and path.name.removesuffix(".gz").endswith(".csv"):

        def parse_question(line: str) -> str:
            question, _ = parse_question_line(line)
            return parse_text(question, "question")

        questions = parse_rows(path, read_lines(path), parse_question, report)
        for number, question in enumerate(questions, start=1):
            yield Passage(f"question-{number}", "", question)
        return
    sorted_hashes: np.ndarray = np.empty(0, dtype=np.int64)
    # Documents without text are encoded, so that a search finds what an evaluation finds.
    passages = read_passages(path, report, kind == "document", columns)
    while block := list(islice(passages, _IDS_PER_BLOCK)):
        block_hashes = text_ids(passage.id for passage in block)
        # A stable sort merges the two parts in nearly linear time, as the first is sorted already.
        sorted_hashes = np.sort(np.concatenate([sorted_hashes, block_hashes]), kind="stable")
        repeated_hashes = sorted_hashes[1:][sorted_hashes[1:] == sorted_hashes[:-1]]
        if len(repeated_hashes) > 0:
            row = np.flatnonzero(np.isin(block_hashes, repeated_hashes))[-1]
            raise DataError(
                f"{path}: id {block[row].id[:60]!r} occurs again (keep one record for each id)"
            )
        yield from block


def require_texts(
    corpus: Path, on_bad_record: OnBadRecord = "stop", columns: Columns = None
) -> None:
    """Read up to 65,536 texts of a corpus, in seconds; raise `DataError` if it cannot be used."""
    next(read_texts(corpus, "document", RecordReport(on_bad_record), columns), None)


def get_passage_texts(corpus: Corpus) -> list[str]:
    """Return the texts of all documents as they are encoded: title, space, text."""
    return [passage_text(entry.get("title") or "", entry["text"]) for entry in corpus.values()]
