"""Files of mined negatives, in the formats that training data are read from, and their reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from contaccum.data import Passage
from contaccum.errors import ConfigError, DataError, check_choice
from contaccum.files import AnyPath, require_writable, write_json, write_text
from contaccum.mining.data import JsonObject
from contaccum.mining.search import MinedNegatives

OUTPUT_FORMATS = ("pairs", "dpr", "tevatron", "ntuples")


class _ScoredPassage(NamedTuple):
    passage: Passage
    score: float


class _MinedQuery(NamedTuple):
    """A query with its known positives and mined negatives.

    Attributes:
        query_id: id of the query.
        text: text of the query.
        positives: all known positives, also those of other queries with the same text.
        record_positives: the positives of each of the query's own records.
        negatives: the mined negatives, best first.
        has_all_negatives: True if no negative is missing.
    """

    query_id: str
    text: str
    positives: list[_ScoredPassage]
    record_positives: list[list[_ScoredPassage]]
    negatives: list[_ScoredPassage]
    has_all_negatives: bool


def write_mined(
    mined: MinedNegatives,
    path: AnyPath,
    output_format: str = "pairs",
    report: JsonObject | None = None,
) -> tuple[Path, Path]:
    """Write negatives to `path`, and a report to `path` + ".report.json".

    A file is written completely or not at all. "pairs" has a record for each record of the data,
    with all its positives; "ntuples" a record for each pair of query and positive; "dpr" and
    "tevatron" a record for each query with all its known positives. docs/mining.md lists the
    fields. Queries with too few negatives are written with the negatives they have, but "ntuples"
    leaves them out.

    Args:
        mined: the negatives.
        path: a file that does not exist.
        output_format: one of `OUTPUT_FORMATS`.
        report: entries for the report, besides `mined.record()`.

    Returns:
        The path of the negatives and the path of the report.

    Raises:
        UserError: see `check_output`.
        DataError: if there is no record to write.
    """
    path = check_output(path, output_format)
    format_records = _FORMATTERS[output_format]
    if output_format == "pairs" and not _has_several_positives(mined):
        format_records = _format_single_pairs
    lines = _format_lines(mined, format_records)
    first_line = next(lines, None)
    if first_line is None:
        num_negatives = mined.rows.shape[1]
        raise DataError(f"{path}: no query has {num_negatives} negatives (lower num_negatives)")
    if output_format == "dpr":
        parts = chain(["[\n", first_line], (f",\n{line}" for line in lines), ["\n]\n"])
    else:
        parts = chain([first_line], (f"\n{line}" for line in lines), ["\n"])
    write_text(path, parts)
    report_path = _get_report_path(path)
    write_json(report_path, {**(report or {}), "output_format": output_format, **mined.record()})
    return path, report_path


def _format_lines(
    mined: MinedNegatives, format_records: Callable[[_MinedQuery], Iterable[JsonObject]]
) -> Iterator[str]:
    """Yield the records of all queries as JSON, one in memory at a time."""
    for query in range(len(mined.rows)):
        for record in format_records(_collect_query(mined, query)):
            yield json.dumps(record, ensure_ascii=False)


def check_output(path: AnyPath, output_format: str) -> Path:
    """Check that negatives can be written to `path`, and make its folder; return the path.

    Raises:
        UserError: for an unknown format, a file or report that exists, or a folder that is not
            writable.
    """
    path = Path(path)
    check_choice("output_format", output_format, OUTPUT_FORMATS)
    require_writable(path)
    for file in (path, _get_report_path(path)):
        if file.exists():
            raise ConfigError(f"{file}: exists already (name another file, or remove it)")
    return path


def _get_report_path(path: Path) -> Path:
    return Path(f"{path}.report.json")


def _collect_query(mined: MinedNegatives, query: int) -> _MinedQuery:
    """Return a query, by its number, with its passages and their scores."""
    data = mined.data
    has_negative = mined.rows[query] >= 0

    def make_scored(rows: Iterable[int], scores: Iterable[float]) -> list[_ScoredPassage]:
        pairs = zip(rows, scores, strict=True)
        return [_ScoredPassage(data.documents[row], score) for row, score in pairs]

    positives = make_scored(data.positives[query], mined.positive_scores[query].tolist())
    positive_by_row = dict(zip(data.positives[query], positives, strict=True))
    record_positives = []
    for rows in data.record_positives[query]:
        record_positives.append([positive_by_row[row] for row in rows])
    return _MinedQuery(
        query_id=data.query_ids[query],
        text=data.queries[query],
        positives=positives,
        record_positives=record_positives,
        negatives=make_scored(
            mined.rows[query][has_negative].tolist(), mined.scores[query][has_negative].tolist()
        ),
        has_all_negatives=bool(has_negative.all()),
    )


def _format_dpr(query: _MinedQuery) -> list[JsonObject]:
    """Return the record of a query in DPR's format."""
    record = {
        "question": query.text,
        "answers": [],
        "positive_ctxs": _format_passages(query.positives, "passage_id"),
        "negative_ctxs": [],
        "hard_negative_ctxs": _format_passages(query.negatives, "passage_id"),
    }
    return [record]


def _format_tevatron(query: _MinedQuery) -> list[JsonObject]:
    """Return the record of a query in Tevatron's format."""
    record = {
        "query_id": query.query_id,
        "query": query.text,
        "positive_passages": _format_passages(query.positives, "docid"),
        "negative_passages": _format_passages(query.negatives, "docid"),
    }
    return [record]


def _format_passages(passages: list[_ScoredPassage], id_field: str) -> list[JsonObject]:
    records = []
    for passage, score in passages:
        record = {id_field: passage.id, "title": passage.title, "text": passage.text}
        records.append({**record, "score": score})
    return records


def _has_several_positives(mined: MinedNegatives) -> bool:
    """Return True if any record of the data has several positives."""
    records = chain.from_iterable(mined.data.record_positives)
    return any(len(rows) > 1 for rows in records)


def _format_pairs(query: _MinedQuery) -> list[JsonObject]:
    """Return a record for each record of a query, with lists of passages and scores."""
    records = []
    for positives in query.record_positives:
        record = {
            "query": query.text,
            "positive": [positive.passage.passage for positive in positives],
            "negatives": [negative.passage.passage for negative in query.negatives],
            "positive_score": [positive.score for positive in positives],
            "negative_scores": [negative.score for negative in query.negatives],
        }
        records.append(record)
    return records


def _format_single_pairs(query: _MinedQuery) -> list[JsonObject]:
    """Return the records of `_format_pairs` with one positive each, which is no list.

    A file has either only lists or no lists, so that each of its columns has one type.
    """
    records = _format_pairs(query)
    for record in records:
        [record["positive"]] = record["positive"]
        [record["positive_score"]] = record["positive_score"]
    return records


def _format_ntuples(query: _MinedQuery) -> list[JsonObject]:
    """Return a record for each pair of a query and a positive, with a field for each negative.

    A query with too few negatives has no records: all records must have the same fields.
    """
    if not query.has_all_negatives:
        return []
    records = []
    for passage, score in dict.fromkeys(chain.from_iterable(query.record_positives)):
        record: JsonObject = {"query": query.text, "positive": passage.passage}
        for number, negative in enumerate(query.negatives, start=1):
            record[f"negative_{number}"] = negative.passage.passage
        record["scores"] = [score, *(negative.score for negative in query.negatives)]
        records.append(record)
    return records


_FORMATTERS: dict[str, Callable[[_MinedQuery], list[JsonObject]]] = {
    "pairs": _format_pairs,
    "dpr": _format_dpr,
    "tevatron": _format_tevatron,
    "ntuples": _format_ntuples,
}
