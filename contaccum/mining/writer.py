"""Mined negatives as files: in one of four formats, with a report beside them, each whole or not at all.

It knows formats and paths. What the negatives are was decided before.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from contaccum.data.records import one_line
from contaccum.errors import ConfigError, UserError
from contaccum.mining.miner import MinedNegatives, MinedQuery, OnTooFew, Scored
from contaccum.redaction import redact_record

OutputFormat = Literal["pairs", "dpr", "tevatron", "ntuples"]


def write_mined(
    mined: MinedNegatives,
    path: str | os.PathLike[str],
    output_format: OutputFormat = "pairs",
    on_too_few: OnTooFew = "drop",
    report: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> tuple[Path, Path]:
    """Write negatives to `path` and a report to `path` + ".report.json"; returns both paths.

    - "pairs" (.jsonl), a line for each pair: {"query", "positive", "negatives": [..], "positive_score",
      "negative_scores": [..]}, and "negative_cross_encoder_scores" where there was a cross-encoder.
    - "ntuples" (.jsonl), a line for each pair: {"query", "positive", "negative_1", .., "scores": [positive's,
      negative_1's, ..]}.
    - "dpr" (.json), an array of queries with all their known positives: {"question", "positive_ctxs",
      "hard_negative_ctxs"} of {"passage_id", "title", "text", "score"}.
    - "tevatron" (.jsonl), a line for each query, likewise: {"query_id", "query", "positive_passages",
      "negative_passages"} of {"docid", "title", "text", "score"}.

    Args:
        on_too_few: "drop" leaves out queries with fewer negatives than `num_negatives`, "keep" writes what there is.
        report: more for the report, beside `mined.record()`.
        overwrite: replace what is there.

    Raises:
        ConfigError, UserError: see `check_output`.
        DataError: under "drop", when no query has enough negatives.
    """
    from contaccum.evaluation.results import write_atomically

    path = check_output(path, output_format, overwrite)
    if on_too_few not in ("drop", "keep"):
        raise ConfigError(f"on_too_few must be drop or keep, got {on_too_few!r}")
    if on_too_few == "drop":
        mined.require_full_queries()
    record = {**(report or {}), "output_format": output_format, **mined.record(on_too_few)}
    # Made first: whatever may fail in it should fail before the negatives are there.
    text = json.dumps(redact_record(record), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    lines = (line for query in mined.queries(on_too_few) for line in _FORMATS[output_format][1](query))
    write_atomically(path, _array(lines) if output_format == "dpr" else (f"{_json(line)}\n" for line in lines))
    write_atomically(report_of(path), [text])
    return path, report_of(path)


def report_of(path: Path) -> Path:
    """The path of the report that belongs to a file of negatives."""
    return path.with_name(path.name + ".report.json")


def check_output(
    path: str | os.PathLike[str], output_format: str, overwrite: bool = False, inputs: Iterable[Any] = ()
) -> Path:
    """`path`, once its folder is there and can be written to.

    Args:
        inputs: files, and folders of files, that must not be replaced, whatever `overwrite` says.

    Raises:
        ConfigError: an unknown format, a name that does not fit it, or a file that is there already.
        UserError: the path is a folder, or cannot be written to.
    """
    path = Path(path)
    if output_format not in _FORMATS:
        raise ConfigError(f"output_format={output_format!r} is unknown (use one of {', '.join(_FORMATS)})")
    suffix = _FORMATS[output_format][0]
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file, such as {path / f'hard{suffix}'}")
    if path.suffix != suffix:
        raise ConfigError(f"{path}: output_format {output_format} is written to a file that ends in {suffix}")
    files = {file.resolve() for given in inputs if given is not None for file in _files_of(Path(given))}
    for written in (path, report_of(path)):
        if written.resolve() in files:
            raise ConfigError(f"{written}: is also the input; name another file")
    for existing in (path, report_of(path)):
        if existing.exists() and not overwrite:
            raise ConfigError(f"{existing}: exists already (name another file, or replace it with --overwrite)")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(one_line(f"{path}: cannot be written here ({error.strerror or error})")) from error
    return path


def _files_of(given: Path) -> Iterator[Path]:
    """What is read where `given` is the input: of a folder the files of a BEIR set, not what lies beside them."""
    yield given
    if given.is_dir():
        for name in ("corpus.jsonl", "queries.jsonl"):
            yield given / name


def _pairs(query: MinedQuery) -> Iterator[dict[str, Any]]:
    for positive in query.positives[: query.pair_count]:
        line = {
            "query": query.query,
            "positive": positive.document.passage,
            "negatives": [negative.document.passage for negative in query.negatives],
            "positive_score": _short(positive.score),
            "negative_scores": [_short(negative.score) for negative in query.negatives],
        }
        second = [_short(n.cross_encoder_score) for n in query.negatives if n.cross_encoder_score is not None]
        if second:
            line["negative_cross_encoder_scores"] = second
        yield line


def _ntuples(query: MinedQuery) -> Iterator[dict[str, Any]]:
    for positive in query.positives[: query.pair_count]:
        yield {
            "query": query.query,
            "positive": positive.document.passage,
            **{f"negative_{i}": negative.document.passage for i, negative in enumerate(query.negatives, start=1)},
            "scores": [_short(scored.score) for scored in (positive, *query.negatives)],
        }


def _dpr(query: MinedQuery) -> Iterator[dict[str, Any]]:
    yield {
        "question": query.query,
        "answers": [],
        "positive_ctxs": [_context(scored, "passage_id") for scored in query.positives],
        "negative_ctxs": [],
        "hard_negative_ctxs": [_context(scored, "passage_id") for scored in query.negatives],
    }


def _tevatron(query: MinedQuery) -> Iterator[dict[str, Any]]:
    yield {
        "query_id": query.id,
        "query": query.query,
        "positive_passages": [_context(scored, "docid") for scored in query.positives],
        "negative_passages": [_context(scored, "docid") for scored in query.negatives],
    }


_FORMATS: dict[str, tuple[str, Callable[[MinedQuery], Iterator[dict[str, Any]]]]] = {
    "pairs": (".jsonl", _pairs),
    "ntuples": (".jsonl", _ntuples),
    "dpr": (".json", _dpr),
    "tevatron": (".jsonl", _tevatron),
}
OUTPUT_FORMATS = tuple(_FORMATS)


def _context(scored: Scored, id_field: str) -> dict[str, Any]:
    document = scored.document
    return {id_field: document.id, "title": document.title, "text": document.text, "score": _short(scored.score)}


def _short(score: float) -> float:
    """Seven digits, about what a float32 has."""
    return float(f"{score:.7g}")


def _json(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def _array(records: Iterable[dict[str, Any]]) -> Iterator[str]:
    separator = "[\n"
    for record in records:
        yield separator + _json(record)
        separator = ",\n"
    yield "\n]\n"
