"""Runs in TREC format, read back: `qid Q0 docid rank score tag`, from whatever system.

Writing is in `results`. Ranks are not believed: as in trec_eval, the order is that of the scores.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from urllib.parse import unquote

from contaccum.data.records import Fault, OnBadRecord, RecordReport, quoted, read_lines


def read_trec_run(
    path: str | Path, on_bad_record: OnBadRecord = "stop", report: RecordReport | None = None
) -> dict[str, dict[str, float]]:
    """{query id: {document id: score}} of a run file, plain or gzip; blanks in ids, written %20, are blanks again.

    Raises:
        DataError: the file cannot be used, or a bad line under "stop": not six columns, a score that is no finite
            number, or a document twice for one query.
    """
    path = Path(path)
    report = report or RecordReport(on_bad_record)
    run: dict[str, dict[str, float]] = {}
    for line, text in read_lines(path, report):
        report.see()
        try:
            cells = text.split()
            if len(cells) != 6:
                mend = "write query, Q0, document, rank, score and tag, separated by blanks"
                raise Fault("not six columns", f"found {len(cells)}", mend)
            query, document = _with_blanks(cells[0]), _with_blanks(cells[2])
            hits = run.setdefault(query, {})
            if document in hits:
                raise Fault(
                    "duplicate document", f"{quoted(document)} of query {quoted(query)}", "keep one line for it"
                )
            try:
                score = float(cells[4])
            except ValueError:
                score = math.nan
            if not math.isfinite(score):
                raise Fault("score is not a number", f"found {quoted(cells[4])}")
        except Fault as fault:
            report.reject(path, line, fault)
            continue
        report.accept()
        hits[document] = score
    run = {query: hits for query, hits in run.items() if hits}
    report.refuse_if_nothing_left(path, len(run), "results")
    return run


def _with_blanks(identifier: str) -> str:
    """Undoes what `results` writes for blanks, and nothing else that looks alike."""

    def blank(found: re.Match[str]) -> str:
        text = unquote(found.group())
        return text if text.isspace() else found.group()

    return re.sub("(?:%[0-9A-F]{2})+", blank, identifier)
