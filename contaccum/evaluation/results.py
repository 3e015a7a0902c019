"""The result of one evaluation and its files: a JSON record, and the run in TREC format beside it.

The record holds what is needed to reproduce a number, with the versions of the software. Metrics
are computed in `metrics`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

from contaccum.data.records import (
    Fault,
    RecordReport,
    parse_number,
    parse_rows,
    quoted,
    read_lines,
    split_cells,
)
from contaccum.errors import DataError
from contaccum.evaluation.metrics import (
    metric_names,
    sort_as_trec_eval,
)
from contaccum.files import atomic_file, provenance, read_json, redact, require_writable

Run = dict[str, dict[str, float]]
"""{query id: {document id: score}}"""

JsonObject = dict[str, Any]
"""Object of a JSON file: a part of a record."""

# Prefix of an id that is percent-encoded, because a line of a TREC run could not hold it unchanged.
_ENCODED = "percent-encoded:"


@dataclass
class EvaluationResult:
    """Result of one model, or of one run of another system, on one data set.

    Attributes:
        metrics: {"NDCG@10": ...}, means over the judged queries, not rounded.
        per_query: {query id: {metric: value}}.
        run: the run that was scored; it is written to the TREC file, not to the record.
        data: name, split, path, documents, queries, judgements, fingerprint.
        model: name, fingerprint, similarity, dimension.
        search: index, index_parameters, k, gpus; for an approximate index also its recall.
        tokenisation: hash of the settings, beside the weights, that decide embeddings; None for a
            run of another system.
        endpoint: comparison of the model with the embedding server whose embeddings were scored in
            its place; see `endpoint.evaluate_endpoint`.
        timing: seconds of encoding, indexing and searching.
        precision: type of autocast, "float32" without autocast, "unknown" for a run.
        created: time of the evaluation, in UTC.
    """

    metrics: dict[str, float]
    per_query: dict[str, dict[str, float]]
    run: Run
    data: JsonObject
    model: JsonObject
    search: JsonObject
    tokenisation: str | None = None
    endpoint: JsonObject = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)
    precision: str = "unknown"
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def record(self) -> dict[str, Any]:
        """Return the content of the JSON file: versions, and all attributes except ``run``."""
        names = [item.name for item in fields(self) if item.name != "run"]
        record = {name: getattr(self, name) for name in names}
        record.update(provenance())
        return record


def write_result(result: EvaluationResult, path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write the record to ``path`` and the run to ``<stem>.trec`` beside it.

    Each file appears as a whole or not at all, and earlier files stay until both are complete. The
    record is renamed last, so where a record is, its run is too.

    Returns:
        The paths of the record and of the run.
    """
    path = Path(path)
    run_path = path.with_suffix(".trec")
    require_writable(path)
    record = result.record()
    for key, value in record.items():
        # Scores per query are as large as the data and hold only ids and numbers, so they are not
        # searched for credentials.
        if key != "per_query":
            record[key] = redact(value)
    content = json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False)
    # The tag of a run is the last part of the model's name, without white space.
    name = Path(redact(str(result.model.get("name") or "contaccum"))).name
    lines = trec_lines(result.run.items(), re.sub(r"\s+", "_", name) or "contaccum")
    with atomic_file(path) as new_record, atomic_file(run_path) as new_run:
        for file, parts in ((new_record, [content, "\n"]), (new_run, lines)):
            with file.open("w", encoding="utf-8", newline="") as opened:
                opened.writelines(parts)
                os.fsync(opened)
        # A kill between the two renames must not leave an older record beside the new run.
        path.unlink(missing_ok=True)
    return path, run_path


def read_result(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a record that `write_result` wrote.

    Raises:
        DataError: the file is missing, or is not a record of a result.
    """
    record = read_json(path)
    for key in ("metrics", "per_query", "data"):
        if not isinstance(record.get(key), dict):
            raise DataError(
                f"{path}: not a results file, which has metrics, per_query and data; evaluate again"
            )
    return record


def agrees(record: Mapping[str, Any], plan: Mapping[str, Any]) -> bool:
    """Return True if a record has all entries of a plan, in nested dicts too.

    A plan is the part of a record that is known before the evaluation; see `plan_search`. The
    record may have further entries.
    """
    for key, planned in plan.items():
        if isinstance(planned, dict):
            is_equal = agrees(record.get(key) or {}, planned)
        else:
            is_equal = record.get(key) == planned
        if not is_equal:
            return False
    return True


def read_finished(
    path: Path, plan: Mapping[str, Any], k_values: Sequence[int]
) -> dict[str, Any] | None:
    """Read the record of an earlier evaluation with the same model, data, settings and metrics.

    Args:
        path: the file of the record, which may not exist.
        plan: the entries that the record must have; see `agrees`.
        k_values: the cut-offs of its metrics.

    Returns:
        The record; None if there is none, if it differs, or if an embedding server made it.
    """
    if not path.exists():
        return None
    record = read_result(path)
    has_same_metrics = record["metrics"].keys() == set(metric_names(k_values))
    if has_same_metrics and not record.get("endpoint") and agrees(record, plan):
        return record
    return None


def trec_lines(run: Iterable[tuple[str, Mapping[str, float]]], tag: str) -> Iterator[str]:
    """Yield the lines ``query_id Q0 document_id rank score tag`` of a run file.

    The order is trec_eval's (equal scores by id, descending). Scores have nine digits, which
    represent a float32 exactly. Ids with white space are encoded; see `_encode_id`.

    Args:
        run: pairs of query id and {document id: score}.
        tag: name of the system, without white space.
    """
    for query_id, hits in run:
        query_cell = _encode_id(query_id)
        for rank, (document_id, score) in enumerate(sort_as_trec_eval(hits), start=1):
            document_cell = _encode_id(document_id)
            yield f"{query_cell} Q0 {document_cell} {rank} {score:.9g} {tag}\n"


def _encode_id(identifier: str) -> str:
    """Return the id as it is or, where a TREC line cannot hold it, percent-encoded after a marker.

    A TREC line is split at white space, so an id that is empty or holds white space must be
    encoded. The marker is needed because ids of other systems may hold ``%20`` literally, as URLs
    do: such ids must not be decoded.
    """
    # isprintable() is False for all white space but the blank, and for a byte-order mark, which
    # readers drop.
    fits = identifier.isprintable() and " " not in identifier and identifier != ""
    if fits and not identifier.startswith(_ENCODED):
        return identifier
    return _ENCODED + quote(identifier)


def read_trec_run(
    path: str | os.PathLike[str], on_bad_record: Literal["stop", "skip"] = "stop"
) -> Run:
    """Read a run of any system, plain or gzip.

    Ids that `trec_lines` has encoded are decoded; all others stay as they are. The column of ranks
    is ignored: as in trec_eval, the scores decide the order.

    Args:
        path: file of the run.
        on_bad_record: "stop" or "skip" at a bad line.

    Raises:
        DataError: the file cannot be used, or, under "stop", a line does not have six columns, its
            score is not a finite number, or it repeats a document of its query.
    """
    report = RecordReport(on_bad_record)
    run: Run = {}

    def parse_line(line: str) -> tuple[str, str, float]:
        cells = split_cells(line, 6, None)
        query, document = [
            unquote(cell.removeprefix(_ENCODED)) if cell.startswith(_ENCODED) else cell
            for cell in (cells[0], cells[2])
        ]
        if document in run.get(query, {}):
            raise Fault("duplicate document", f"{quoted(document)} of query {quoted(query)}")
        return query, document, parse_number(cells[4])

    for query, document, score in parse_rows(path, read_lines(path), parse_line, report):
        run.setdefault(query, {})[document] = score
    return run
