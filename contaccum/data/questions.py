"""Questions with their answers, in the formats of open question answering."""

from __future__ import annotations

import ast
import csv
from dataclasses import dataclass, field
from typing import Any

from contaccum.data import records
from contaccum.data.records import Fault, RecordReport, first_of, quoted, take, text_of
from contaccum.files import AnyPath, Fingerprint


@dataclass(frozen=True)
class Questions:
    """Questions with their answers. Ids are `question-N`, N being the place among those that are used, from 1."""

    texts: dict[str, str]  # by id
    answers: dict[str, list[str]]  # by id, one at least
    fingerprint: str  # sha256, in hex, of texts and answers
    report: RecordReport = field(repr=False, compare=False)


def load_questions(path: AnyPath, on_bad_record: records.OnBadRecord = "stop") -> Questions:
    """Read a file of questions with answers, plain or gzip.

    DPR's `nq-test.qa.csv` and others (a question, a tab, a Python list of answers; no header), jsonl (as published with
    NQ open). Of a JSON record, `question` (or `query`) is the question and
    `answers` (or `answer`) a text or a list of texts. Raises `DataError`.
    """
    report = RecordReport(on_bad_record)
    rows = (
        records.read_json_lines(path)
        if records.first_bytes(path).startswith(b"{")
        else records.read_lines(path)
    )
    texts, answers, content = {}, {}, Fingerprint()
    for number, (text, listed) in enumerate(take(path, rows, _question, report), start=1):
        texts[f"question-{number}"], answers[f"question-{number}"] = text, listed
        content.add(text, *listed, "")
    return Questions(texts, answers, content.hex(), report)


def _question(row: str | dict[str, Any]) -> tuple[str, list[str]]:
    if isinstance(row, str):
        cells = next(csv.reader([row], delimiter="\t"), [])
        if len(cells) != 2:
            raise Fault(
                "not 2 columns", f"found {len(cells)}, not a question, a tab, and ['one', 'two']"
            )
        try:
            # Literals only: nothing of the file is run.
            row = {"question": cells[0], "answers": ast.literal_eval(cells[1].strip())}
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise Fault("answers are not a list", f"found {quoted(cells[1])}") from None
    text, answers = (
        text_of(first_of(row, ("question", "query")), "question"),
        first_of(row, ("answers", "answer")),
    )
    listed = [answers] if isinstance(answers, str) else answers
    if not isinstance(listed, (list, tuple)) or not listed:
        raise Fault("no answers", f"found {quoted(answers)}")
    return text, [text_of(answer, "answer") for answer in listed]
