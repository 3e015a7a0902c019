"""Mined negatives as files: in one of four formats, with a report beside them, each whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from contaccum.errors import ConfigError, DataError, check_choice
from contaccum.files import AnyPath, require_writable, write_json, write_text
from contaccum.mining.miner import MinedNegatives, MinedQuery, Scored


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
    wanted = mined.rules.num_negatives if on_too_few == "drop" else 0
    kept = (query for query in mined.queries if len(query.negatives) >= wanted)
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


def _pairs(query: MinedQuery) -> Iterator[dict[str, Any]]:
    second = [_short(n.cross_encoder_score) for n in query.negatives if n.cross_encoder_score is not None]
    for positive in query.positives[: query.pair_count]:
        yield {
            "query": query.query,
            "positive": positive.passage,
            "negatives": [negative.passage for negative in query.negatives],
            "positive_score": _short(positive.score),
            "negative_scores": [_short(negative.score) for negative in query.negatives],
            **({"negative_cross_encoder_scores": second} if second else {}),
        }


def _ntuples(query: MinedQuery) -> Iterator[dict[str, Any]]:
    for positive in query.positives[: query.pair_count]:
        yield {
            "query": query.query,
            "positive": positive.passage,
            **{f"negative_{i}": negative.passage for i, negative in enumerate(query.negatives, start=1)},
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
        "query_id": query.query_id,
        "query": query.query,
        "positive_passages": [_context(scored, "docid") for scored in query.positives],
        "negative_passages": [_context(scored, "docid") for scored in query.negatives],
    }


_FORMATS: dict[str, tuple[str, Callable[[MinedQuery], Iterator[dict[str, Any]]]]] = {
    "pairs": (".jsonl", _pairs),
    "dpr": (".json", _dpr),
    "tevatron": (".jsonl", _tevatron),
    "ntuples": (".jsonl", _ntuples),
}
OUTPUT_FORMATS = tuple(_FORMATS)


def _context(scored: Scored, id_field: str) -> dict[str, Any]:
    return {id_field: scored.id, "title": scored.title, "text": scored.text, "score": _short(scored.score)}


def _short(score: float) -> float:
    """Seven digits, about what a float32 has."""
    return float(f"{score:.7g}")
