"""What open-domain QA and search read: passages of a corpus one by one, and questions with their answers.

A corpus may be of any size: memory holds a record. Nothing is encoded, joined or remembered; whether an id occurs twice
is for those to find out who hold the ids, and what an answer matches is decided in `evaluation`.
"""

from __future__ import annotations

import ast
import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from contaccum.data.beir import beir_file
from contaccum.data.records import (
    Fault,
    OnBadRecord,
    RecordReport,
    filled_text_of,
    first_bytes,
    identifier_of,
    open_data_file,
    parquet_rows,
    passage_text,
    quoted,
    read_json_array,
    read_json_lines,
    read_lines,
    take,
    text_of,
)
from contaccum.files import AnyPath, Fingerprint

_IDS, _TEXTS = ("_id", "id", "docid", "doc_id", "pid", "passage_id"), ("text", "passage", "contents")
_HEADER_WORDS = {*_IDS, *_TEXTS, "title"}
_QUESTION, _ANSWERS = ("question", "query"), ("answers", "answer")


class Passage(NamedTuple):
    """A passage and what it is called; `title` is empty where there is none, or where the data came as one text."""

    id: str
    title: str
    text: str

    @property
    def passage(self) -> str:
        """Title, space, text: what is encoded, and what training reads."""
        return passage_text(self.title, self.text)


def read_passages(path: AnyPath, report: RecordReport) -> Iterator[Passage]:
    """Every passage of a corpus, in its order; each record is counted in ``report``.

    Args:
        path: a BEIR folder, or a file, plain or gzip: jsonl (`_id` or `id`, `title`, `text`), tab-separated `id text
            title` (DPR's, cells quoted as in csv, a header or none) or `id text` (MS MARCO's, no quoting), parquet with
            columns called as in jsonl.
        report: bad are: broken lines, a wrong number of columns, a missing id, a missing or empty text.

    Raises:
        DataError: the source cannot be used, or a bad record under "stop".
    """
    path = _corpus_file(path)
    start = first_bytes(path)
    if start.startswith(b"PAR1"):
        rows = parquet_rows(path, lambda names: [name for name in names if name in _HEADER_WORDS])
    else:
        rows = read_json_lines(path) if start.startswith(b"{") else _tab_separated(path)
    return (passage for _, passage in take(path, rows, _passage, report))


def _passage(record: dict[str, Any]) -> Passage:
    title = record.get("title")
    title = "" if title is None else text_of(title, "title")
    passage = Passage(identifier_of(_first(record, _IDS), "id"), title, text_of(_first(record, _TEXTS), "text"))
    if not passage.passage:
        raise Fault("empty passage", quoted(passage.id))
    return passage


def count_roughly(path: AnyPath) -> int:
    """How many passages there are, for a bar of progress: rows of a parquet file, lines of another; nothing is checked.

    Raises:
        DataError: the source cannot be opened.
        OSError, EOFError, zlib.error: it cannot be read to its end.
    """
    path = _corpus_file(path)
    if first_bytes(path).startswith(b"PAR1"):
        import pyarrow.parquet as pq

        return pq.read_metadata(path).num_rows
    with open_data_file(path) as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _corpus_file(path: AnyPath) -> Path:
    return beir_file(Path(path), "corpus.jsonl") if os.path.isdir(path) else Path(path)


def _first(record: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _tab_separated(path: Path) -> Iterator[tuple[int, Any]]:
    names: list[str] = []
    for line, text in read_lines(path):
        cells = [] if isinstance(text, Fault) else text.split("\t")
        if cells and not names:
            names = [cell.strip().lower() for cell in cells]
            if len(names) in (2, 3) and set(names) <= _HEADER_WORDS:
                continue
            names = ["id", "text", "title"][: max(2, min(3, len(cells)))]
        # DPR's file is csv with tabs; MS MARCO's is not, and a quote there is a quote.
        if len(names) == 3 and any('"' in cell for cell in cells):
            cells = next(csv.reader([text], delimiter="\t"), [])
        if cells and len(cells) != len(names):
            mend = f"write {', '.join(names)}, separated by tabs"
            text = Fault("wrong number of columns", f"found {len(cells)}", mend)
        yield line, text if isinstance(text, Fault) else dict(zip(names, cells, strict=True))


@dataclass(frozen=True)
class Questions:
    """Q questions.

    Attributes:
        texts: {question id: text}. The ids are `question-N`, N being the place among those that are used, from 1.
        answers: {question id: answers, at least one}.
        fingerprint: sha256, in hex, of texts and answers.
        report: what became of every record.
    """

    texts: dict[str, str]
    answers: dict[str, list[str]]
    fingerprint: str
    report: RecordReport = field(repr=False, compare=False)


def load_questions(path: AnyPath, on_bad_record: OnBadRecord = "stop") -> Questions:
    """Read a file of questions with answers, plain or gzip.

    DPR's `nq-test.qa.csv` and others (a question, a tab, a Python list of answers; no header), jsonl (as published with
    NQ open), or a JSON array (DPR's training files). Of a JSON record, `question` (or `query`) is the question and
    `answers` (or `answer`) a text or a list of texts.

    Raises:
        DataError: the file cannot be used, no question is left, or a bad record under "stop".
    """
    path, report = Path(path), RecordReport(on_bad_record)
    start = first_bytes(path)[:1]
    rows: Any = {b"[": read_json_array, b"{": read_json_lines}.get(start, read_lines)(path)
    texts: dict[str, str] = {}
    answers: dict[str, list[str]] = {}
    content = Fingerprint()
    for _, (text, found) in take(path, rows, _question, report):
        name = f"question-{len(texts) + 1}"
        texts[name], answers[name] = text, found
        content.add(text, *found, "")
    report.refuse_if_nothing_left(path, len(texts), "questions")
    return Questions(texts, answers, content.hex(), report)


def _question(row: str | dict[str, Any]) -> tuple[str, list[str]]:
    question, value = _cells(row) if isinstance(row, str) else (_first(row, _QUESTION), _first(row, _ANSWERS))
    listed = [value] if isinstance(value, str) else value
    text = filled_text_of(question, "question")
    if not isinstance(listed, (list, tuple)) or not listed:
        raise Fault("no answers", f"found {quoted(value)}", "give a text, or a list of one at least")
    return text, [filled_text_of(answer, "answer") for answer in listed]


def _cells(text: str) -> tuple[str, Any]:
    cells = next(csv.reader([text], delimiter="\t"), [])
    if len(cells) != 2:
        mend = "write the question, a tab, and the answers as ['one', 'two']"
        raise Fault("not two columns", f"found {len(cells)}", mend)
    try:
        # Literals only: nothing of the file is run.
        return cells[0], ast.literal_eval(cells[1].strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise Fault("answers are not a list", f"found {quoted(cells[1])}", "write them as ['one', 'two']") from None
