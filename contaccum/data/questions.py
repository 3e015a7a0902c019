"""Questions with their answers, in the formats of open question answering."""

from __future__ import annotations

import ast
import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from contaccum.data.records import (
    Fault,
    OnBadRecord,
    RecordReport,
    get_first_value,
    parse_rows,
    parse_text,
    quoted,
    read_head,
    read_json_lines,
    read_lines,
)
from contaccum.files import AnyPath, Fingerprint


@dataclass(frozen=True)
class Questions:
    """Questions with their answers.

    The id of a question is `question-N`, where N counts the used questions from 1.

    Attributes:
        texts: {question id: text}.
        answers: {question id: answers}, at least one each.
        fingerprint: sha256, in hex, of texts and answers.
        report: counts of used and bad records.
    """

    texts: dict[str, str]
    answers: dict[str, list[str]]
    fingerprint: str
    report: RecordReport = field(repr=False, compare=False)


def load_questions(path: AnyPath, on_bad_record: OnBadRecord = "stop") -> Questions:
    """Load a file of questions with answers, plain or gzip.

    The file is either a table in DPR's format, such as `nq-test.qa.csv` (question, tab, Python list
    of answers, without a header), or jsonl, as published with NQ open. A JSON record has a
    `question` (or `query`), and `answers` (or `answer`), a text or a list of texts.

    Raises:
        DataError: for a file that cannot be read, or a bad record under "stop".
    """
    report = RecordReport(on_bad_record)
    is_json = read_head(path).startswith(b"{")
    rows = read_json_lines(path) if is_json else read_lines(path)
    content = Fingerprint()
    texts: dict[str, str] = {}
    answers: dict[str, list[str]] = {}
    questions = parse_rows(path, rows, _parse_question, report)
    for number, (text, answers_of_question) in enumerate(questions, start=1):
        question_id = f"question-{number}"
        texts[question_id] = text
        answers[question_id] = answers_of_question
        content.add(text, *answers_of_question, "")
    return Questions(texts, answers, content.hex(), report)


def _parse_question(row: str | Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the text and the answers of a question."""
    if isinstance(row, str):
        row = _parse_table_line(row)
    text = parse_text(get_first_value(row, ("question", "query")), "question")
    answers = get_first_value(row, ("answers", "answer"))
    if isinstance(answers, str):
        return text, [parse_text(answers, "answer")]
    if not isinstance(answers, (list, tuple)) or not answers:
        raise Fault("no answers", f"found {quoted(answers)}")
    return text, [parse_text(answer, "answer") for answer in answers]


def _parse_table_line(line: str) -> dict[str, Any]:
    """Return the question and the answers in a line of DPR's format."""
    try:
        cells = next(csv.reader([line], delimiter="\t"), [])
    except csv.Error as error:
        raise Fault("broken quoting", str(error)) from None
    if len(cells) != 2:
        raise Fault("not 2 columns", f"found {len(cells)}; a line is QUESTION<tab>['one', 'two']")
    try:
        # literal_eval evaluates literals only, so no code of the file runs.
        answers = ast.literal_eval(cells[1].strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise Fault("answers are not a list", f"found {quoted(cells[1])}") from None
    return {"question": cells[0], "answers": answers}
