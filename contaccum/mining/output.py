"""Files of mined negatives, in the formats that training data are read from, and their reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
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

    The first `num_pairs` positives are those of the query's own training pairs. The others are
    known from other records with the same query text.
    """

    query_id: str
    text: str
    positives: list[_ScoredPassage]
    num_pairs: int
    negatives: list[_ScoredPassage]
    has_all_negatives: bool


def write_mined(
    mined: MinedNegatives,
    path: AnyPath,
    output_format: str = "pairs",
    report: JsonObject | None = None,
) -> tuple[Path, Path]:
    """Write negatives to `path`, and a report to `path` + ".report.json".

    A file is written completely or not at all. "pairs" and "ntuples" have a record for each pair,
    "dpr" and "tevatron" a record for each query with all its known positives. docs/mining.md lists
    the fields. Queries with too few negatives are written with the negatives they have, but
    "ntuples" leaves them out.

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
    lines = []
    for query in range(len(mined.rows)):
        for record in format_records(_collect_query(mined, query)):
            lines.append(json.dumps(record, ensure_ascii=False))
    if not lines:
        num_negatives = mined.rows.shape[1]
        raise DataError(f"{path}: no query has {num_negatives} negatives (lower num_negatives)")
    if output_format == "dpr":
        write_text(path, "[\n" + ",\n".join(lines) + "\n]\n")
    else:
        write_text(path, (f"{line}\n" for line in lines))
    report_path = Path(f"{path}.report.json")
    write_json(report_path, {**(report or {}), "output_format": output_format, **mined.record()})
    return path, report_path


def check_output(path: AnyPath, output_format: str) -> Path:
    """Check that negatives can be written to `path`, and make its folder; return the path.

    Raises:
        UserError: for an unknown format, a file that exists, or a folder that is not writable.
    """
    path = Path(path)
    check_choice("output_format", output_format, OUTPUT_FORMATS)
    require_writable(path)
    if path.exists():
        raise ConfigError(f"{path}: exists already (name another file, or remove it)")
    return path


def _collect_query(mined: MinedNegatives, query: int) -> _MinedQuery:
    """Return a query, by its number, with its passages and their scores."""
    data = mined.data
    has_negative = mined.rows[query] >= 0

    def make_scored(rows: Iterable[int], scores: Iterable[float]) -> list[_ScoredPassage]:
        pairs = zip(rows, scores, strict=True)
        return [_ScoredPassage(data.documents[row], score) for row, score in pairs]

    return _MinedQuery(
        query_id=data.query_ids[query],
        text=data.queries[query],
        positives=make_scored(data.positives[query], mined.positive_scores[query].tolist()),
        num_pairs=data.pair_counts[query],
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


def _format_pairs(query: _MinedQuery) -> list[JsonObject]:
    """Return a record for each pair of a query, with lists of negatives and scores."""
    records = []
    for passage, score in query.positives[: query.num_pairs]:
        record = {
            "query": query.text,
            "positive": passage.passage,
            "negatives": [negative.passage.passage for negative in query.negatives],
            "positive_score": score,
            "negative_scores": [negative.score for negative in query.negatives],
        }
        records.append(record)
    return records


def _format_ntuples(query: _MinedQuery) -> list[JsonObject]:
    """Return a record for each pair of a query, with a field for each negative.

    A query with too few negatives has no records: all records must have the same fields.
    """
    if not query.has_all_negatives:
        return []
    records = []
    for passage, score in query.positives[: query.num_pairs]:
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
