"""One table of an evaluation of several sets, as text, Markdown, CSV and JSON, with published figures beside it.

It is given means and computes means of means; what they are worth is for `significance` and `earlier` to say.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from contaccum.evaluation.published import published

MAIN_METRICS = ("NDCG@10", "MRR@10", "MAP@100", "Recall@100", "Accuracy@20")
OURS = "this model"
MEAN = "mean"


@dataclass(frozen=True)
class Row:
    """A data set of the table.

    Attributes:
        name: as `evaluation_sets` calls it.
        split: the split that was scored.
        queries, documents: how many.
        metrics: {"NDCG@10": ...}, all of them; of CQADupStack, the means over its parts.
        parts: what it is the mean of, [] for a set that is one.
        source: file and fingerprint, for the JSON.
    """

    name: str
    split: str
    queries: int
    documents: int
    metrics: Mapping[str, float]
    parts: Sequence[Row] = ()
    source: Mapping[str, Any] = field(default_factory=dict)


def mean_row(name: str, parts: Sequence[Row]) -> Row:
    """The row that is the mean of parts, each of which counts alike."""
    metrics = {metric: fmean(part.metrics[metric] for part in parts) for metric in parts[0].metrics}
    queries, documents = sum(part.queries for part in parts), sum(part.documents for part in parts)
    return Row(name, parts[0].split, queries, documents, metrics, parts)


def format_table(metrics: Mapping[str, Mapping[str, float]], names: Sequence[str] | None = None) -> str:
    """A table for the terminal: one row per data set, and their mean when there are several.

    Args:
        metrics: {data set: {metric: value}}.
        names: the metrics to show; None: those of `MAIN_METRICS` that all rows have, or all.
    """
    rows = dict(metrics)
    if names is None:
        names = [name for name in MAIN_METRICS if all(name in row for row in rows.values())]
        names = names or list(next(iter(rows.values())))
    if len(rows) > 1:
        rows[MEAN] = {name: fmean(row[name] for row in metrics.values()) for name in names}
    return aligned(["data", *names], [[label, *(row[name] for name in names)] for label, row in rows.items()])


@dataclass(frozen=True)
class Comparison:
    """Our scores beside published ones, on the rows that any are published for.

    Attributes:
        metric: of all of them.
        rows: {data set: {model: score}}, ours under `OURS`.
        other: {data set: why it is not the set that the published figures are of}.
        common: the data sets of the mean: all models have them, and they are BEIR's.
        mean: {model: mean over `common`}; empty where there are none.
    """

    metric: str
    rows: Mapping[str, Mapping[str, float]]
    other: Mapping[str, str]
    common: Sequence[str]
    mean: Mapping[str, float]

    @property
    def models(self) -> list[str]:
        return [OURS, *published().models]


def beside_published(rows: Sequence[Row]) -> Comparison | None:
    """None where nothing is published on any of the sets, or the metric was not computed."""
    known = published()
    metric = known.metric
    scores, other = {}, {}
    for row in rows:
        theirs = known.scores(row.name, row.split)
        if metric not in row.metrics:
            return None
        scores[row.name] = {OURS: row.metrics[metric], **theirs}
        expected = known.judged_queries.get(row.name)
        if theirs and expected != row.queries:
            other[row.name] = f"{row.queries:,} judged queries, BEIR has {expected:,}: other data, not to be compared"
    if all(len(row) == 1 for row in scores.values()):
        return None
    models = [OURS, *known.models]
    common = [name for name, row in scores.items() if name not in other and all(model in row for model in models)]
    mean = {model: fmean(scores[name][model] for name in common) for model in models} if common else {}
    return Comparison(metric, scores, other, common, mean)


def as_text(rows: Sequence[Row], names: Sequence[str]) -> str:
    """What the terminal shows."""
    text = format_table({row.name: row.metrics for row in rows}, names)
    comparison = beside_published(rows)
    if comparison is None:
        return text
    lines = [text, "", f"{comparison.metric} beside published figures (sources: docs/evaluation.md)"]
    lines.append(aligned(["data", *comparison.models], _cells(comparison)))
    return "\n".join([*lines, *_notes(comparison)])


def as_markdown(rows: Sequence[Row], names: Sequence[str], title: str) -> str:
    """The same as a page."""
    lines = [f"# {title}", ""]
    table = [[row.name, row.split, f"{row.queries:,}", *(row.metrics[name] for name in names)] for row in rows]
    if len(rows) > 1:
        table.append([MEAN, "", "", *(fmean(row.metrics[name] for row in rows) for name in names)])
    lines += markdown_table(["data", "split", "queries", *names], table)
    if any(row.parts for row in rows):
        lines += ["", "A set of several parts is the mean over them and counts once."]
    comparison = beside_published(rows)
    if comparison is not None:
        lines += ["", f"## {comparison.metric} beside published figures", ""]
        lines += markdown_table(["data", *comparison.models], _cells(comparison))
        lines += ["", *(f"- {note}" for note in _notes(comparison))]
        for model in published().document["models"]:
            sources = "; ".join(f"{s['sets']}: {s['where']} ({s['revision']})" for s in model["sources"])
            lines.append(f"- {model['name']}: {model['how']} {sources}")
    return "\n".join([*lines, ""])


def as_csv(rows: Sequence[Row], names: Sequence[str]) -> str:
    """A line per row and one per mean, numbers unrounded; a column of published figures is called MODEL METRIC."""
    comparison = beside_published(rows)
    models = comparison.models[1:] if comparison else []
    metric = comparison.metric if comparison else ""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["data", "split", "queries", "documents", *names, *(f"{model} {metric}" for model in models)])
    for row in rows:
        theirs = comparison.rows[row.name] if comparison else {}
        published_cells = [theirs.get(model, "") for model in models]
        own = [row.name, row.split, row.queries, row.documents]
        writer.writerow([*own, *(row.metrics[name] for name in names), *published_cells])
    if len(rows) > 1:
        means = [fmean(row.metrics[name] for row in rows) for name in names]
        writer.writerow([MEAN, "", "", "", *means, *("" for _ in models)])
    if comparison and comparison.mean:
        own = [comparison.mean[OURS] if name == metric else "" for name in names]
        label = f"{MEAN} of {len(comparison.common)} that all have"
        writer.writerow([label, "", "", "", *own, *(comparison.mean[model] for model in models)])
    return file.getvalue()


def as_json(rows: Sequence[Row], names: Sequence[str]) -> dict[str, Any]:
    """The tables for programs: all metrics, not only those shown."""
    comparison = beside_published(rows)
    return {
        "shown": list(names),
        "sets": [_row_json(row) for row in rows],
        "mean": {name: fmean(row.metrics[name] for row in rows) for name in rows[0].metrics},
        "published": None
        if comparison is None
        else {
            "metric": comparison.metric,
            "scores": comparison.rows,
            "other_data": comparison.other,
            "common": list(comparison.common),
            "mean": comparison.mean,
            "models": published().document["models"],
        },
    }


def _row_json(row: Row) -> dict[str, Any]:
    own = {"name": row.name, "split": row.split, "queries": row.queries, "documents": row.documents}
    parts = {"parts": [_row_json(part) for part in row.parts]} if row.parts else {}
    return {**own, **row.source, "metrics": dict(row.metrics), **parts}


def _cells(comparison: Comparison) -> list[list[Any]]:
    table: list[list[Any]] = [
        [name + ("*" if name in comparison.other else ""), *(row.get(model) for model in comparison.models)]
        for name, row in comparison.rows.items()
    ]
    if comparison.mean and len(comparison.rows) > 1:
        table.append([f"mean of {len(comparison.common)}", *(comparison.mean[model] for model in comparison.models)])
    return table


def _notes(comparison: Comparison) -> list[str]:
    notes = [f"*{name}: {why}" for name, why in comparison.other.items()]
    if comparison.mean and len(comparison.common) < len(comparison.rows):
        notes.append(f"the mean is over those that all models have a figure on: {', '.join(comparison.common)}")
    return notes


def aligned(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns for the terminal: the first to the left, numbers of four digits to the right, None blank."""
    cells = [list(header), *([_shown(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    widths[1:] = [max(width, 11) for width in widths[1:]]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in cells
    )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Lines of a Markdown table; None is a blank cell, and a bar in a text is escaped."""
    lines = [list(header), ["---"] * len(header), *([_shown(cell).replace("|", r"\|") for cell in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _shown(cell: Any) -> str:
    if cell is None:
        return ""
    return f"{cell:.4f}" if isinstance(cell, float) else str(cell)
