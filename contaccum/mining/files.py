"""Mined negatives as files: in one of four formats, with a report beside them, each whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from contaccum.data import Passage
from contaccum.errors import ConfigError, DataError, check_choice
from contaccum.files import AnyPath, require_writable, write_json, write_text
from contaccum.mining.miner import MinedNegatives


def write_mined(
    mined: MinedNegatives,
    path: AnyPath,
    output_format: str = "pairs",
    on_too_few: str = "drop",
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
    path = check_output(path, output_format, overwrite)
    check_choice("on_too_few", on_too_few, ("drop", "keep"))
    record = mined.record(on_too_few)
    if not record["queries_kept"]:
        mend = "lower num_negatives, loosen the rules, or use on_too_few keep"
        raise DataError(f"{mined.data.record['path']}: no query has {mined.rules.num_negatives} negatives ({mend})")
    kept = map(partial(_query, mined), np.flatnonzero(mined.kept(on_too_few)).tolist())
    lines = [json.dumps(line, ensure_ascii=False) for query in kept for line in _FORMATS[output_format][1](query)]
    write_text(path, "[\n" + ",\n".join(lines) + "\n]\n" if output_format == "dpr" else (f"{line}\n" for line in lines))
    write_json(report_of(path), {**(report or {}), "output_format": output_format, **record})
    return path, report_of(path)


def report_of(path: Path) -> Path:
    """The path of the report that belongs to a file of negatives."""
    return path.with_name(path.name + ".report.json")


def check_output(path: AnyPath, output_format: str, overwrite: bool = False, inputs: Iterable[Any] = ()) -> Path:
    """`path`, once its folder is there and can be written to.

    Args:
        inputs: files and BEIR folders that must not be replaced, whatever `overwrite` says.

    Raises:
        ConfigError: an unknown format, a name that does not fit it, or a file that is there already.
        UserError: the path is a folder, or cannot be written to.
    """
    path = Path(path)
    check_choice("output_format", output_format, OUTPUT_FORMATS)
    suffix = _FORMATS[output_format][0]
    require_writable(path)
    if path.suffix != suffix:
        raise ConfigError(f"{path}: output_format {output_format} is written to a file that ends in {suffix}")
    given = [Path(name) for name in inputs if name is not None]
    read = {file.resolve() for one in given for file in (one, one / "corpus.jsonl", one / "queries.jsonl")}
    for written in (path, report_of(path)):
        if written.resolve() in read:
            raise ConfigError(f"{written}: is also the input; name another file")
        if written.exists() and not overwrite:
            raise ConfigError(f"{written}: exists already (name another file, or replace it with --overwrite)")
    return path


class _Scored(NamedTuple):
    document: Passage
    score: float
    of_cross_encoder: float | None = None


class _Query(NamedTuple):
    """A query with all its known positives, the first `pair_count` of which make pairs, and its negatives."""

    query_id: str
    query: str
    positives: list[_Scored]
    pair_count: int
    negatives: list[_Scored]


def _query(mined: MinedNegatives, number: int) -> _Query:
    data, there = mined.data, mined.rows[number] >= 0
    second: Any = [None] * len(there) if mined.cross_encoder_scores is None else mined.cross_encoder_scores[number]
    negatives = zip(mined.rows[number], mined.scores[number], second, there, strict=True)
    positives = zip(data.positives[number], mined.positive_scores[number], strict=True)
    return _Query(
        data.query_ids[number],
        data.queries[number],
        [_Scored(data.documents[row], score) for row, score in positives],
        data.pair_counts[number],
        [_Scored(data.documents[row], score, other) for row, score, other, is_there in negatives if is_there],
    )


def _pairs(query: _Query) -> Iterator[dict[str, Any]]:
    second = [_short(n.of_cross_encoder) for n in query.negatives if n.of_cross_encoder is not None]
    for positive in query.positives[: query.pair_count]:
        yield {
            "query": query.query,
            "positive": positive.document.passage,
            "negatives": [negative.document.passage for negative in query.negatives],
            "positive_score": _short(positive.score),
            "negative_scores": [_short(negative.score) for negative in query.negatives],
            **({"negative_cross_encoder_scores": second} if second else {}),
        }


def _ntuples(query: _Query) -> Iterator[dict[str, Any]]:
    for positive in query.positives[: query.pair_count]:
        yield {
            "query": query.query,
            "positive": positive.document.passage,
            **{f"negative_{i}": negative.document.passage for i, negative in enumerate(query.negatives, start=1)},
            "scores": [_short(scored.score) for scored in (positive, *query.negatives)],
        }


def _dpr(query: _Query) -> Iterator[dict[str, Any]]:
    positives, negatives = ([_context(x, "passage_id") for x in part] for part in (query.positives, query.negatives))
    contexts = {"positive_ctxs": positives, "negative_ctxs": [], "hard_negative_ctxs": negatives}
    yield {"question": query.query, "answers": [], **contexts}


def _tevatron(query: _Query) -> Iterator[dict[str, Any]]:
    positives, negatives = ([_context(x, "docid") for x in part] for part in (query.positives, query.negatives))
    passages = {"positive_passages": positives, "negative_passages": negatives}
    yield {"query_id": query.query_id, "query": query.query, **passages}


_FORMATS: dict[str, tuple[str, Callable[[_Query], Iterator[dict[str, Any]]]]] = {
    "pairs": (".jsonl", _pairs),
    "dpr": (".json", _dpr),
    "tevatron": (".jsonl", _tevatron),
    "ntuples": (".jsonl", _ntuples),
}
OUTPUT_FORMATS = tuple(_FORMATS)


def _context(scored: _Scored, id_field: str) -> dict[str, Any]:
    document = scored.document
    return {id_field: document.id, "title": document.title, "text": document.text, "score": _short(scored.score)}


def _short(score: float) -> float:
    """Seven digits, about what a float32 has."""
    return float(f"{score:.7g}")
