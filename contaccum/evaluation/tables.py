"""Tables of an evaluation: scores of its data sets, and comparisons with earlier results.

A row of a table is a dict, which the JSON file of an evaluation of several sets holds in the same
form: name, split, queries, documents, metrics, and either ``file``, the record of the set, or
``parts``, rows whose mean is this row. An earlier result is a record of one set or a table of
several sets. Only results on the same data are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from contaccum.data import CQADUPSTACK_FORUMS
from contaccum.errors import DataError
from contaccum.evaluation.beir import EvaluationSet
from contaccum.evaluation.metrics import add_holm, sign_flip_test, warn_of_few_groups
from contaccum.evaluation.results import JsonObject, read_result
from contaccum.files import read_json

Row = Mapping[str, Any]
Scores = Mapping[str, float]
"""{query id: score}"""

_CQADUPSTACK_LABELS = frozenset(f"cqadupstack/{forum}" for forum in CQADUPSTACK_FORUMS)

# Differences are rounded, so that scores that differ in the last bits are ties, and equal changes
# are ordered by query.
_DIGITS_OF_DIFFERENCES = 9
_MAX_CHANGES = 5  # listed gains, and listed losses


def fill_page(page: str, tables: Mapping[str, str]) -> str:
    """Return a page of the documentation with its tables.

    A table stands between the comments ``<!-- table: NAME -->`` and ``<!-- end of table -->``.

    Args:
        page: the page; what stands between the comments is replaced.
        tables: {name of a table: its Markdown}.

    Raises:
        ValueError: the page has no place for a table.
    """
    for name, table in tables.items():
        start_comment = f"<!-- table: {name} -->\n"
        start = page.find(start_comment)
        end = page.find("<!-- end of table -->", start)
        if start < 0 or end < 0:
            raise ValueError(f"the page has no place for the table {name!r}")
        page = f"{page[:start]}{start_comment}\n{table}\n\n{page[end:]}"
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


def table_rows(sets: Sequence[EvaluationSet], records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a row for each data set, from its record.

    If all twelve parts of CQADupStack are there, they are one row: their mean, in which each part
    has the same weight.
    """
    rows: list[Row] = []
    cqadupstack_parts: list[Row] = []
    for evaluation_set, record in zip(sets, records, strict=True):
        row = {
            "name": evaluation_set.label,
            "split": record["data"]["split"],
            "queries": record["data"]["queries"],
            "documents": record["data"]["documents"],
            "file": evaluation_set.output.name,
            "metrics": record["metrics"],
        }
        rows.append(row)
        if evaluation_set.label in _CQADUPSTACK_LABELS:
            cqadupstack_parts.append(row)
    if len(cqadupstack_parts) < len(_CQADUPSTACK_LABELS):
        return rows
    mean_row = {
        "name": "cqadupstack",
        "split": cqadupstack_parts[0]["split"],
        "queries": sum(part["queries"] for part in cqadupstack_parts),
        "documents": sum(part["documents"] for part in cqadupstack_parts),
        "metrics": mean_metrics(cqadupstack_parts),
        "parts": cqadupstack_parts,
    }
    return [*(row for row in rows if row not in cqadupstack_parts), mean_row]


def sets_table(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Return a Markdown table of the metrics ``names`` of all rows, and their mean."""
    cells = []
    for row in rows:
        scores = [row["metrics"][name] for name in names]
        cells.append([row["name"], row["split"], row["queries"], *scores])
    if len(rows) > 1:
        means = mean_metrics(rows)
        cells.append(["mean", "", "", *(means[name] for name in names)])
    return markdown_table(["data", "split", "queries", *names], cells)


def mean_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean of every metric over rows, which all have the same weight."""
    means = {}
    for name in rows[0]["metrics"]:
        means[name] = fmean(row["metrics"][name] for row in rows)
    return means


def read_previous(path: Path, labels: Mapping[str, str], metric: str) -> dict[str, Scores]:
    """Read the scores per query of an earlier result, for the data sets of this evaluation.

    Args:
        path: an earlier record, or an earlier table of several sets, which lists the records that
            lie beside it.
        labels: {fingerprint of the data: label} of this evaluation's sets.
        metric: name of the metric to read.

    Returns:
        {label: {query id: score}} of the sets that the earlier result has.

    Raises:
        DataError: the file is not a result, has none of these data sets, or lacks the metric.
    """
    content = read_json(path)
    files = [path]
    if "sets" in content:
        parts = [part for row in content["sets"] for part in row.get("parts", [row])]
        # Only the name is used, so that a table cannot point to files elsewhere.
        files = [path.parent / Path(part["file"]).name for part in parts]
    previous: dict[str, Scores] = {}
    for file in files:
        record = read_result(file)
        label = labels.get(record["data"].get("fingerprint"))
        if label is None:
            continue
        if metric not in record["metrics"]:
            raise DataError(f"{file}: has no {metric} (name another as the first of --metrics)")
        per_query = record["per_query"]
        previous[label] = {query: scores[metric] for query, scores in per_query.items()}
    if not previous:
        raise DataError(
            f"{path}: is on other data than {', '.join(labels.values())} (compare with a result on "
            "the same data)"
        )
    return previous


def compare(
    path: Path,
    metric: str,
    ours: Mapping[str, Scores],
    theirs: Mapping[str, Scores],
    groups: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    """Compare this evaluation with an earlier result, set by set, by `compare_queries`.

    The p-values of the sets are corrected together by Holm's procedure. A positive difference means
    that ``ours`` has the higher score.

    Args:
        path: file of the earlier result.
        metric: name of the metric.
        ours: {label: {query id: score}} of this evaluation.
        theirs: {label: {query id: score}} of the earlier result; its sets are compared.
        groups: {label: {query id: its group}}.

    Returns:
        The comparison as the JSON file holds it.
    """
    rows = []
    for label, scores in theirs.items():
        rows.append({"data": label, **compare_queries(ours[label], scores, groups[label])})
    add_holm(rows)
    return {"earlier": str(path), "metric": metric, "rows": rows}


def compare_queries(ours: Scores, theirs: Scores, groups: Mapping[str, int]) -> dict[str, Any]:
    """Compare two results over the same queries.

    Args:
        ours: {query id: score} of this evaluation.
        theirs: {query id: score} of the earlier result.
        groups: {query id: its group}.

    Returns:
        Means, the result of `sign_flip_test`, numbers of wins, ties and losses, and the greatest
        changes.
    """
    our_scores = list(ours.values())
    their_scores = [theirs[query] for query in ours]
    changes: list[JsonObject] = []
    for query, our_score in ours.items():
        their_score = theirs[query]
        difference = round(our_score - their_score, _DIGITS_OF_DIFFERENCES)
        changes.append(
            {"query": query, "difference": difference, "ours": our_score, "earlier": their_score}
        )
    # The largest changes first, equal ones by query.
    changes.sort(key=lambda change: (-abs(change["difference"]), change["query"]))
    gains = [change for change in changes if change["difference"] > 0]
    losses = [change for change in changes if change["difference"] < 0]
    return {
        "queries": len(changes),
        "ours": fmean(our_scores),
        "earlier": fmean(their_scores),
        **sign_flip_test(ours, theirs, groups),
        "wins": len(gains),
        "ties": len(changes) - len(gains) - len(losses),
        "losses": len(losses),
        "greatest_gains": gains[:_MAX_CHANGES],
        "greatest_losses": losses[:_MAX_CHANGES],
    }


def comparison_table(comparison: Mapping[str, Any]) -> str:
    """Return the Markdown table of a comparison that `compare` made, with notes."""
    header = [
        "data",
        "queries",
        "groups",
        "ours",
        "earlier",
        "difference",
        "95% interval",
        "p",
        "p (Holm)",
        "wins",
        "ties",
        "losses",
    ]
    cells = []
    notes = []
    for row in comparison["rows"]:
        cells.append(
            [
                row["data"],
                row["queries"],
                row["groups"],
                row["ours"],
                row["earlier"],
                f"{row['difference']:+.4f}",
                f"{row['low']:+.4f} to {row['high']:+.4f}",
                _format_p_value(row["p_value"]),
                _format_p_value(row["p_holm"]),
                row["wins"],
                row["ties"],
                row["losses"],
            ]
        )
        for key in ("greatest_gains", "greatest_losses"):
            changes = [f"{change['query']} {change['difference']:+.4f}" for change in row[key]]
            if changes:
                notes.append(f"- {row['data']}, {key.replace('_', ' ')}: {', '.join(changes)}")
        for warning in warn_of_few_groups(f"the queries of {row['data']}", row["groups"]):
            notes.append(f"- {warning}")
    notes.append(
        "- sign-flip test over groups of queries with the same relevant documents, two-sided; "
        "Holm's correction over the rows"
    )
    title = f"## {comparison['metric']} against {comparison['earlier']}"
    return "\n".join([title, "", markdown_table(header, cells), "", *notes])


def _format_p_value(p_value: float) -> str:
    if p_value < 0.001:
        return "<0.001"
    return f"{p_value:.3f}"
