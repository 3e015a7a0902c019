"""Training records in JSON: DPR's arrays, Tevatron's lines, and lines of pairs, triplets or n-tuples.

One record is in memory at a time. Files are opened and lines are counted by `records` and `json_array`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contaccum.data.fields import Fields
from contaccum.data.json_array import read_json_array
from contaccum.data.record import Record, RecordRules, list_of, training_text
from contaccum.data.records import Fault, RecordReport, quoted, read_json_lines

_FALLEN_BACK = "records without hard_negative_ctxs, their negative_ctxs taken"


def read_dpr(path: Path, rules: RecordRules, report: RecordReport) -> Iterator[Record]:
    """DPR's JSON array of {"question", "answers", "positive_ctxs", "hard_negative_ctxs", "negative_ctxs"}.

    Negatives are the `hard_negative_ctxs`; a record that has none falls back on its `negative_ctxs` (passages of
    other questions), as DPR's own trainer does, and the report says how often. A record without positives, of which
    the published files have some, is a bad record.

    Raises:
        DataError: the file cannot be used, or a bad record under "stop".
    """
    for line, record in read_json_array(path, report):
        fallen_back = False
        try:
            if "question" not in record and "positive_ctxs" not in record:
                mend = "other records than DPR's go one a line, as jsonl, without [ and ]"
                raise Fault("missing question", f"its fields are {quoted(', '.join(record), 200)}", mend)
            query = training_text(record.get("question"), "question")
            positives = rules.positives(list_of(record.get("positive_ctxs"), "positive_ctxs"), "positive_ctxs")
            field = "hard_negative_ctxs"
            listed = _list_or_none(record, field)
            # With no negatives wanted, the random ones are not worth a word.
            if not listed and rules.num_negatives != 0:
                others = _list_or_none(record, "negative_ctxs")
                if others:
                    field, listed, fallen_back = "negative_ctxs", others, True
            negatives = rules.negatives(listed, field)
            topic = rules.topic(record)
        except Fault as fault:
            report.reject(path, line, fault)
            continue
        report.accept()
        report.note(_FALLEN_BACK, int(fallen_back))
        rules.note_unused(report, bool(listed))
        yield Record(query, positives, negatives, topic)


def read_tevatron(path: Path, rules: RecordRules, report: RecordReport) -> Iterator[Record]:
    """Tevatron's lines of {"query_id", "query", "positive_passages", "negative_passages"}.

    A passage is {"docid", "title", "text"}; ids are not used, and negatives may be missing.

    Raises:
        DataError: the file cannot be used, or a bad record under "stop".
    """
    for line, record in read_json_lines(path, report):
        try:
            query = training_text(record.get("query"), "query")
            listed = list_of(record.get("positive_passages"), "positive_passages")
            positives = rules.positives(listed, "positive_passages")
            listed = _list_or_none(record, "negative_passages")
            negatives = rules.negatives(listed, "negative_passages")
            topic = rules.topic(record)
        except Fault as fault:
            report.reject(path, line, fault)
            continue
        report.accept()
        rules.note_unused(report, bool(listed))
        yield Record(query, positives, negatives, topic)


def read_json_pairs(path: Path, fields: Fields, rules: RecordRules, report: RecordReport) -> Iterator[Record]:
    """Lines of one object each, whose `fields` are the query, the positives and perhaps negatives and a title.

    Raises:
        DataError: the file cannot be used, no record has a column that was asked for, or a bad record under "stop".
    """
    names: list[str] = []
    for line, record in read_json_lines(path, report):
        names = list(record)
        try:
            fields.settle(record)
            result, negatives = fields.read(record, rules)
        except Fault as fault:
            report.reject(path, line, fault)
            continue
        report.accept()
        rules.note_unused(report, negatives)
        yield result
    if fields.query is not None:
        fields.refuse_never_seen(path, names)


def _list_or_none(record: dict[str, Any], what: str) -> list[Any]:
    return [] if record.get(what) is None else list_of(record[what], what)
