"""The tables of an evaluation: its sets, and against earlier results query by query.

A row is what the JSON holds of it: name, split, queries, documents, metrics, and either the file of one set or the
`parts` that it is the mean of. An earlier result is a record of one set or a table of several; only results on the same
data are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from contaccum.errors import DataError
from contaccum.evaluation.beir_sets import EvaluationSet
from contaccum.evaluation.metrics import add_holm, paired_bootstrap
from contaccum.evaluation.results import read_result, result_files

Row = Mapping[str, Any]
Scores = Mapping[str, float]
"""{query id: score}"""


def markdown_table(header: Sequence[str], cells: Sequence[Sequence[Any]]) -> str:
    """A table for the terminal and for a page: columns stand below each other, None is blank."""
    rows = [list(header), *([_shown(cell) for cell in row] for row in cells)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("| " + " | ".join(row) + " |" for row in padded)


def _shown(cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:.4f}"
    return "" if cell is None else str(cell).replace("|", r"\|")


def table_rows(sets: Sequence[EvaluationSet], records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each set, from its record; the twelve parts of CQADupStack are one, in which each counts alike."""
    rows: list[Row] = []
    for one, record in zip(sets, records, strict=True):
        about = {key: record["data"][key] for key in ("split", "queries", "documents")}
        rows.append(
            {"name": one.label, **about, "file": one.output.name, "metrics": record["metrics"]}
        )
    parts = [row for row in rows if row["name"].startswith("cqadupstack/")]
    if not parts:
        return rows
    sums = {key: sum(part[key] for part in parts) for key in ("queries", "documents")}
    mean = {
        "name": "cqadupstack",
        "split": parts[0]["split"],
        **sums,
        "metrics": mean_metrics(parts),
        "parts": parts,
    }
    return [*(row for row in rows if row not in parts), mean]


def sets_table(rows: Sequence[Row], names: Sequence[str]) -> str:
    """The metrics ``names`` of all rows and their mean."""
    cells = [
        [row["name"], row["split"], row["queries"], *(row["metrics"][n] for n in names)]
        for row in rows
    ]
    if len(rows) > 1:
        cells.append(["mean", "", "", *(mean_metrics(rows)[name] for name in names)])
    return markdown_table(["data", "split", "queries", *names], cells)


def served_table(label: str, served: Mapping[str, Any]) -> str:
    """What the terminal and the page show of a record's ``served``; the first row is what the others differ from."""
    header = [
        "dimensions",
        "type",
        served["metric"],
        "difference",
        "95% interval",
        "bytes a document",
        "queries/s",
    ]
    cells: list[list[Any]] = []
    for row in served["rows"]:
        speed = f"{row['queries_per_second']:,.0f}"
        change = [f"{row['difference']:+.4f}", _interval(row)] if cells else [None, None]
        cells.append(
            [
                row["dimensions"],
                row["type"],
                row[served["metric"]],
                *change,
                row["bytes_per_document"],
                speed,
            ]
        )
    return f"## {label}: as served (binary rescored {served['rescore']}x)\n\n{markdown_table(header, cells)}"


def _interval(row: Mapping[str, float]) -> str:
    return f"{row['low']:+.4f} to {row['high']:+.4f}"


def mean_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Every metric's mean over rows, each of which counts alike."""
    return {name: fmean(row["metrics"][name] for row in rows) for name in rows[0]["metrics"]}


def read_previous(path: Path, labels: Mapping[str, str], metric: str) -> dict[str, Scores]:
    """{label: scores} by an earlier result, of those of our sets that it has.

    Args:
        labels: {fingerprint of the data: label} of our sets.

    Raises:
        DataError: no result, none of our data sets, or a result without this metric.
    """
    found: dict[str, Scores] = {}
    for file in result_files(path):
        record = read_result(file)
        label = labels.get(record["data"].get("fingerprint"))
        if label is not None:
            if metric not in record["metrics"]:
                raise DataError(f"{file}: has no {metric} (name another as the first of --metrics)")
            found[label] = {query: values[metric] for query, values in record["per_query"].items()}
    if not found:
        raise DataError(f"{path}: is on other data than {', '.join(labels.values())}")
    return found


def compare(
    path: Path, metric: str, ours: Mapping[str, Scores], theirs: Mapping[str, Scores]
) -> dict[str, Any]:
    """Each set of the earlier result ``theirs`` that lies at a path, by `compare_queries`.

    Holm's correction is over the sets. Positive differences are in favour of ``ours``, {label: scores}.
    """
    rows = [
        {"data": label, **compare_queries(ours[label], scores)} for label, scores in theirs.items()
    ]
    add_holm(rows)
    return {"earlier": str(path), "metric": metric, "resamples": 10_000, "seed": 0, "rows": rows}


def compare_queries(ours: Scores, theirs: Scores, shown: int = 5) -> dict[str, Any]:
    """Two results over the same queries: means, a paired bootstrap, wins, ties and losses, and the greatest changes.

    Args:
        shown: how many gains, and how many losses.
    """
    a, b = list(ours.values()), [theirs[query] for query in ours]
    # Rounded, so that what differs in the last bits is a tie, and equal changes are in the order of their queries.
    changes: list[dict[str, Any]] = [
        {
            "query": query,
            "difference": round(score - theirs[query], 9),
            "ours": score,
            "earlier": theirs[query],
        }
        for query, score in ours.items()
    ]
    changes.sort(key=lambda change: (-abs(change["difference"]), change["query"]))
    gains = [change for change in changes if change["difference"] > 0]
    losses = [change for change in changes if change["difference"] < 0]
    return {
        "queries": len(a),
        "ours": fmean(a),
        "earlier": fmean(b),
        **paired_bootstrap(a, b),
        "wins": len(gains),
        "ties": len(a) - len(gains) - len(losses),
        "losses": len(losses),
        "greatest_gains": gains[:shown],
        "greatest_losses": losses[:shown],
    }


def comparison_table(comparison: Mapping[str, Any]) -> str:
    """What the terminal and the page show of `compare`."""
    header = [
        "data",
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
    cells, notes = [], []
    for row in comparison["rows"]:
        p = ["<0.001" if row[key] < 0.001 else f"{row[key]:.3f}" for key in ("p_value", "p_holm")]
        counts = [row[key] for key in header[-3:]]
        cells.append(
            [
                row["data"],
                row["ours"],
                row["earlier"],
                f"{row['difference']:+.4f}",
                _interval(row),
                *p,
                *counts,
            ]
        )
        for key in ("greatest_gains", "greatest_losses"):
            changes = ", ".join(
                f"{change['query']} {change['difference']:+.4f}" for change in row[key]
            )
            notes += [f"- {row['data']}, {key.replace('_', ' ')}: {changes}"] if changes else []
    notes.append(
        "- paired bootstrap over queries, 10,000 resamples, two-sided; Holm's correction over the rows"
    )
    title = f"## {comparison['metric']} against {comparison['earlier']}"
    return "\n".join([title, "", markdown_table(header, cells), "", *notes])
