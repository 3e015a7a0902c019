"""Questions and the answers to be found for them, as open-domain QA is scored: DPR's files and their kin.

DPR's `nq-test.qa.csv` and others (a question, a tab, a Python list of answers; no header), jsonl (as published with NQ
open), or a json array (DPR's training files). What an answer matches is not decided here (`evaluation.answers`).
"""

from __future__ import annotations

import ast
import csv
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contaccum.data.json_array import read_json_array
from contaccum.data.records import (
    Fault,
    OnBadRecord,
    RecordReport,
    add_to_fingerprint,
    filled_text_of,
    open_data_file,
    quoted,
    read_json_lines,
    read_lines,
)

_QUESTION, _ANSWERS = ("question", "query"), ("answers", "answer")


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


def load_questions(path: str | Path, on_bad_record: OnBadRecord = "stop") -> Questions:
    """Read a file of questions with answers, plain or gzip.

    Of a JSON record, `question` (or `query`) is the question and `answers` (or `answer`) a text or a list of texts.

    Raises:
        DataError: the file cannot be used, no question is left, or a bad record under "stop".
    """
    path, report = Path(path), RecordReport(on_bad_record)
    texts: dict[str, str] = {}
    answers: dict[str, list[str]] = {}
    digest = hashlib.sha256()
    for line, record in _records(path, report):
        try:
            text, found = filled_text_of(record[0], "question"), _answers(record[1])
        except Fault as fault:
            report.reject(path, line, fault)
            continue
        report.accept()
        name = f"question-{len(texts) + 1}"
        texts[name], answers[name] = text, found
        add_to_fingerprint(digest, text, *found, "")
    report.refuse_if_nothing_left(path, len(texts), "questions")
    return Questions(texts, answers, digest.hexdigest(), report)


def _records(path: Path, report: RecordReport) -> Iterator[tuple[int, tuple[Any, Any]]]:
    """The line and the two fields of every record, each counted as seen."""
    with open_data_file(path) as file:
        try:
            start = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        except (OSError, EOFError):
            start = b""  # reading it line by line says what is wrong
    if start in (b"[", b"{"):
        read = read_json_array if start == b"[" else read_json_lines
        for line, record in read(path, report):
            yield line, (_first(record, _QUESTION), _first(record, _ANSWERS))
        return
    for line, text in read_lines(path, report):
        report.see()
        try:
            yield line, _cells(text)
        except Fault as fault:
            report.reject(path, line, fault)


def _first(record: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((record[name] for name in names if name in record), None)


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


def _answers(value: Any) -> list[str]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)):
        raise Fault("no answers", f"found {quoted(value)}", "give a text, or a list of texts")
    answers = [filled_text_of(answer, "answer") for answer in listed]
    if not answers:
        raise Fault("no answers", "the list is empty", "give one at least")
    return answers
