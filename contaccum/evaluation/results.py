"""Results of evaluations: records in JSON, runs in TREC format, tables and comparisons.

A record holds what is needed to reproduce the numbers of one data set. The JSON file of several
sets is a table, in which a row is a dict: name, split, queries, documents, metrics, and either
``file``, the record of the set, or ``parts``, rows whose mean is this row.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, Literal
from urllib.parse import quote, unquote

from contaccum.data import CQADUPSTACK_PARTS
from contaccum.data.rows import (
    Fault,
    OnBadRecord,
    RecordReport,
    parse_number,
    parse_rows,
    read_lines,
    split_cells,
)
from contaccum.errors import DataError, quoted, warn_once
from contaccum.evaluation import metrics
from contaccum.files import atomic_file, provenance, read_json
from contaccum.redaction import redact

Run = dict[str, dict[str, float]]
"""{query id: {document id: score}}"""

Scores = Mapping[str, float]
"""{query id: score}"""

Row = Mapping[str, Any]

# Prefix of an id that is percent-encoded, because a line of a TREC run could not hold it unchanged.
_ENCODED = "percent-encoded:"

_TIE = 1e-9  # scores that differ by less, in the last bits, are ties


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
        tokenisation: `tokenisation_fingerprint` of the model; None for a run of another system.
        endpoint: comparison of the model with its embedding server; see `evaluate_endpoint`.
        identity: hash of everything that decides the metrics; None if it is not known.
        precision: type of autocast, "float32" without autocast, "unknown" for a run.
        created: time of the evaluation, in UTC.
    """

    metrics: dict[str, float]
    per_query: dict[str, dict[str, float]]
    run: Run
    data: dict[str, Any]
    model: dict[str, Any]
    search: dict[str, Any]
    tokenisation: str | None = None
    endpoint: dict[str, Any] = field(default_factory=dict)
    identity: str | None = None
    precision: str = "unknown"
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def record(self) -> dict[str, Any]:
        """Return the content of the JSON file: versions, and all attributes except ``run``."""
        attributes = {name: value for name, value in vars(self).items() if name != "run"}
        return {**attributes, **provenance()}


def write_result(result: EvaluationResult, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Write the record to ``path`` and the run to ``<stem>.trec`` beside it; return the record.

    Earlier files stay until both are complete. Where a record is, its run is too.
    """
    path = Path(path)
    run_path = path.with_suffix(".trec")
    # Scores per query, ids and numbers, are as large as the data: they are not redacted.
    record = redact({**result.record(), "per_query": {}})
    record["per_query"] = result.per_query
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
    return record


def read_result(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a record that `write_result` wrote.

    Raises:
        DataError: there is no such record, or a score in it is no number between 0 and 1.
    """
    record: dict[str, Any] = read_json(path)
    for key in ("metrics", "per_query", "data", "search"):
        if not isinstance(record.get(key), dict):
            raise DataError(
                f"{path}: not a results file, which has metrics, per_query, data and search; "
                "evaluate again"
            )
    for query, scores in [("(mean)", record["metrics"]), *record["per_query"].items()]:
        for metric in record["metrics"]:
            score: Any = scores.get(metric) if isinstance(scores, dict) else None
            # By type, because True is an int.
            if type(score) not in (int, float) or not 0 <= score <= 1:
                raise DataError(
                    f"{path}: {metric} of query {quoted(query)} is no number between 0 and 1; "
                    "evaluate again"
                )
    return record


# Runs in TREC format ------------------------------------------------------------------------------


def trec_lines(run: Iterable[tuple[str, Mapping[str, float]]], tag: str) -> Iterator[str]:
    """Yield the lines ``query_id Q0 document_id rank score tag`` of a run file.

    The run is in pairs of query id and {document id: score}. The order is trec_eval's (equal scores
    by id, descending). Scores have nine digits, which represent a float32 exactly.
    """
    for query_id, hits in run:
        query_cell = _encode_id(query_id)
        for rank, (document_id, score) in enumerate(metrics.sort_as_trec_eval(hits), start=1):
            document_cell = _encode_id(document_id)
            yield f"{query_cell} Q0 {document_cell} {rank} {score:.9g} {tag}\n"


def _encode_id(identifier: str) -> str:
    """Return the id, percent-encoded after a marker if it is empty or holds white space.

    Without a marker, literal ``%20`` in the ids of other systems, such as URLs, would be decoded.
    """
    # isprintable() is False for all white space but the blank, and for a byte-order mark, which
    # readers drop.
    fits = identifier.isprintable() and " " not in identifier and identifier != ""
    if fits and not identifier.startswith(_ENCODED):
        return identifier
    return _ENCODED + quote(identifier)


def read_trec_run(path: str | os.PathLike[str], on_bad_record: OnBadRecord = "stop") -> Run:
    """Read a run of any system, plain or gzip. As in trec_eval, scores and not ranks decide.

    Under "skip", a warning counts the lines that are left out. Under "stop", `DataError` is raised
    for a line without six columns, a score that is no finite number, and a repeated document.
    """
    report = RecordReport(on_bad_record)
    run: Run = {}

    def parse_line(line: str) -> tuple[str, str, float]:
        cells = split_cells(line, 6, None)
        query, document = (
            unquote(cell.removeprefix(_ENCODED)) if cell.startswith(_ENCODED) else cell
            for cell in (cells[0], cells[2])
        )
        if document in run.get(query, {}):
            raise Fault("duplicate document", f"{quoted(document)} of query {quoted(query)}")
        return query, document, parse_number(cells[4])

    for query, document, score in parse_rows(path, read_lines(path), parse_line, report):
        run.setdefault(query, {})[document] = score
    if report.reported:
        warn_once(report.summary())
    return run


# Tables -------------------------------------------------------------------------------------------


def fill_page(page: str, tables: Mapping[str, str]) -> str:
    """Return a page with new tables, {name: Markdown}.

    A table stands between the comments ``<!-- table: NAME -->`` and ``<!-- end of table -->``.
    """
    for name, table in tables.items():
        head, start, rest = page.partition(f"<!-- table: {name} -->\n")
        _, end, tail = rest.partition("<!-- end of table -->")
        if not (start and end):
            raise ValueError(f"the page has no place for the table {name!r}")
        page = f"{head}{start}\n{table}\n\n{end}{tail}"
    return page


def markdown_table(header: Sequence[str], cells: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table whose columns are aligned; a cell of None is blank."""
    rows = [list(header)]
    for row in cells:
        texts = []
        for cell in row:
            if cell is None:
                cell = ""
            elif isinstance(cell, float):
                cell = f"{cell:.4f}"
            texts.append(str(cell).replace("|", r"\|"))
        rows.append(texts)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    lines = []
    for row in rows:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("| " + " | ".join(padded) + " |")
    return "\n".join(lines)


def make_table(
    files: Mapping[str, Path], records: Mapping[str, Mapping[str, Any]], shown: Sequence[str]
) -> dict[str, Any]:
    """Return the table of several sets, as the JSON file holds it.

    ``files`` and ``records`` have the label of each set as key, and the same model and settings;
    ``shown`` are the metrics for `sets_table`. All twelve parts of CQADupStack become one row.
    """
    rows: list[Row] = []
    parts: list[Row] = []
    for label, record in records.items():
        row = {
            "name": label,
            **{name: record["data"][name] for name in ("split", "queries", "documents")},
            "file": files[label].name,
            "metrics": record["metrics"],
        }
        (parts if label in CQADUPSTACK_PARTS else rows).append(row)
    if len(parts) < len(CQADUPSTACK_PARTS):
        rows += parts
    else:
        mean_row = {
            "name": "cqadupstack",
            "split": parts[0]["split"],
            "queries": sum(part["queries"] for part in parts),
            "documents": sum(part["documents"] for part in parts),
            "metrics": _mean_metrics(parts),
            "parts": parts,
        }
        rows.append(mean_row)
    first = next(iter(records.values()))  # the values that are read are equal in all records
    return {
        **{name: first[name] for name in ("model", "tokenisation", "precision")},
        "search": {name: first["search"].get(name) for name in ("index", "index_parameters", "k")},
        "shown": list(shown),
        "sets": rows,
        "mean": _mean_metrics(rows),
        **provenance(),
    }


def sets_table(table: Mapping[str, Any]) -> str:
    """Return the Markdown of a table of sets, and of their mean if there are several."""
    names = table["shown"]
    cells = []
    for row in table["sets"]:
        scores = [row["metrics"][name] for name in names]
        cells.append([row["name"], row["split"], row["queries"], *scores])
    if len(cells) > 1:
        cells.append(["mean", "", "", *(table["mean"][name] for name in names)])
    return markdown_table(["data", "split", "queries", *names], cells)


def _mean_metrics(rows: Sequence[Row]) -> dict[str, float]:
    return {name: fmean(row["metrics"][name] for row in rows) for name in rows[0]["metrics"]}


# Comparison with an earlier result ----------------------------------------------------------------


def read_previous(path: Path, metric: str) -> dict[str, Scores]:
    """Return {fingerprint of a data set: {query id: score by a metric}} of an earlier result.

    It is a record, or a table of several sets, whose records lie beside it. A file that is no
    result, or lacks the metric, raises `DataError`.
    """
    content = read_json(path)
    files = [path]
    if "sets" in content:
        try:
            parts = [part for row in content["sets"] for part in row.get("parts", [row])]
            # Only the name is used, so that a table cannot point to files elsewhere.
            files = [path.parent / Path(part["file"]).name for part in parts]
        except (AttributeError, KeyError, TypeError) as error:
            raise DataError(f"{path}: its sets name no files of results; evaluate again") from error
    previous: dict[str, Scores] = {}
    for file in files:
        record = read_result(file)
        if metric not in record["metrics"]:
            raise DataError(f"{file}: has no {metric} (name another as the first of --metrics)")
        scores = {query: values[metric] for query, values in record["per_query"].items()}
        previous[str(record["data"].get("fingerprint"))] = scores
    return previous


def compare(label: str, ours: Scores, theirs: Scores, groups: Mapping[str, int]) -> dict[str, Any]:
    """Return the comparison of this evaluation of a set with an earlier one, as the file holds it.

    It has means, the result of `sign_flip_test`, and the numbers of wins, ties and losses, from the
    side of ``ours``.
    """
    differences = [score - theirs[query] for query, score in ours.items()]
    return {
        "data": label,
        "queries": len(ours),
        "ours": fmean(ours.values()),
        "earlier": fmean(theirs.values()),
        **metrics.sign_flip_test(ours, theirs, groups),
        "wins": sum(difference > _TIE for difference in differences),
        "ties": sum(abs(difference) <= _TIE for difference in differences),
        "losses": sum(difference < -_TIE for difference in differences),
    }


def check_requirement(
    requirement: Literal["not-worse", "better"], metric: str, row: Row
) -> tuple[bool, str]:
    """Return whether a row of `compare` meets a requirement, and a line about it.

    If too few groups have changed to tell (see `judge`), neither is met. But a result that is equal
    on every query is not worse.
    """
    word = metrics.judge(row)
    has_changed = row["wins"] + row["losses"] > 0
    if has_changed and row["changed_groups"] < metrics.MIN_CHANGED_GROUPS:
        title = "CANNOT TELL"
    elif requirement == "better":
        title = "BETTER" if word == metrics.BETTER else "NOT BETTER"
    else:
        title = "WORSE" if word == metrics.WORSE else "NOT WORSE"
    queries = f"{row['queries']:,} queries"
    if row["groups"] < row["queries"]:
        queries += f" of {row['groups']:,} passages"
    difference = metrics.describe_difference(
        metric, row["earlier"], row["ours"], f"{queries} of {row['data']}", row
    )
    line = f"{title}: {difference}" + ("" if has_changed else "; no score has changed")
    return title in ("BETTER", "NOT WORSE"), line


def comparison_table(rows: Sequence[Row]) -> str:
    """Return the Markdown table of what `compare` and `add_holm` have found, with notes."""
    names = ["data", "queries", "groups", "ours", "earlier"]
    counts = ["wins", "ties", "losses"]
    cells = []
    notes = []
    for row in rows:
        cells.append([row[name] for name in names])
        cells[-1] += [f"{row['difference']:+.4f}", metrics.describe_interval(row, 4)]
        for p_value in (row["p_value"], row["p_holm"]):
            cells[-1].append("<0.001" if p_value < 0.001 else f"{p_value:.3f}")
        cells[-1] += [row[name] for name in counts]
        for warning in metrics.warn_of_few_groups(f"the queries of {row['data']}", row["groups"]):
            notes.append(f"- {warning}")
    notes.append(
        "- sign-flip test over groups of queries with the same relevant documents, two-sided; "
        "Holm's correction over the rows"
    )
    header = [*names, "difference", "interval", "p", "p (Holm)", *counts]
    return "\n".join([markdown_table(header, cells), "", *notes])
