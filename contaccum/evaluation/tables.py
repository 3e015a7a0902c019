"""The table of an evaluation of several sets, as text, Markdown, CSV and JSON, with published figures beside it.

A row is what the JSON holds of it: name, split, queries, documents, metrics, and either the fingerprint and file of one
set or the `parts` that it is the mean of. Published figures, with the source of each and how it was scored, lie in
published.json. Means are computed here; what a difference is worth is for `compare` to say.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from contaccum.data import default_split
from contaccum.evaluation.beir import EvaluationSet
from contaccum.files import read_json

OURS = "this model"

Row = Mapping[str, Any]


class Section(NamedTuple):
    """A table for people: its title, header and cells (None is blank), notes below it, and what a page alone adds."""

    title: str
    header: Sequence[str]
    cells: Sequence[Sequence[Any]]
    notes: Sequence[str] = ()
    sources: Sequence[str] = ()


def table_rows(sets: Sequence[EvaluationSet], records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each set, from its record; the parts of CQADupStack are one, in which each counts alike."""
    parts: dict[str, list[Row]] = {}
    for one, record in zip(sets, records, strict=True):
        about = {"name": one.label, "split": one.split, "queries": record["data"]["queries"]}
        source = {"documents": one.documents, "fingerprint": one.fingerprint, "file": one.output.name}
        parts.setdefault(one.row, []).append({**about, **source, "metrics": record["metrics"]})
    return [rows[0] if rows[0]["name"] == name else mean_row(name, rows) for name, rows in parts.items()]


def mean_row(name: str, parts: Sequence[Row]) -> dict[str, Any]:
    """The row that is the mean of parts, each of which counts alike."""
    sums = {key: sum(part[key] for part in parts) for key in ("queries", "documents")}
    return {"name": name, "split": parts[0]["split"], **sums, "metrics": _mean(parts), "parts": list(parts)}


@lru_cache(maxsize=1)
def published() -> dict[str, Any]:
    """metric; judged_queries {set: how many}; models, each with name, how, sources and scores {set: score}."""
    return read_json(Path(__file__).with_name("published.json"))


def beside_published(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Our scores beside published ones; None where nothing is published on any of the sets, or not by that metric.

    Returns:
        metric; scores {set: {model: score}}, ours under :data:`OURS`; other_data {set: why it is not the set that the
        published figures are of}; common, the sets that all models have a figure on; mean {model: mean over these}.
    """
    metric, judged = published()["metric"], published()["judged_queries"]
    if any(metric not in row["metrics"] for row in rows):
        return None
    scores: dict[str, dict[str, float]] = {}
    other = {}
    for row in rows:
        name = row["name"]
        known = published()["models"] if row["split"] == default_split(name) else []
        theirs = {model["name"]: model["scores"][name] for model in known if name in model["scores"]}
        scores[name] = {OURS: row["metrics"][metric], **theirs}
        if theirs and judged.get(name) != row["queries"]:
            there = f"{row['queries']:,} judged queries, BEIR has {judged.get(name):,}"
            other[name] = f"{there}: other data, not to be compared"
    if all(len(row) == 1 for row in scores.values()):
        return None
    common = [name for name, row in scores.items() if name not in other and len(row) == len(_models())]
    mean = {model: fmean(scores[name][model] for name in common) for model in _models()} if common else {}
    return {"metric": metric, "scores": scores, "other_data": other, "common": common, "mean": mean}


def sections(rows: Sequence[Row], names: Sequence[str]) -> list[Section]:
    """The metrics ``names`` of all rows and their mean, and the published figures."""
    cells = [[row["name"], row["split"], row["queries"], *(row["metrics"][n] for n in names)] for row in rows]
    if len(rows) > 1:
        cells.append(["mean", "", "", *(_mean(rows)[name] for name in names)])
    parts = ["a set of several parts is the mean over them and counts once"] if any("parts" in r for r in rows) else []
    found = [Section("", ["data", "split", "queries", *names], cells, sources=parts)]
    beside = beside_published(rows)
    if beside is not None:
        title = f"{beside['metric']} beside published figures (sources: docs/evaluation.md)"
        cells, notes = _beside(beside)
        found.append(Section(title, ["data", *_models()], cells, notes, [_source(m) for m in published()["models"]]))
    return found


def as_text(sections: Sequence[Section]) -> str:
    """For the terminal: the first column to the left, numbers of four digits to the right."""
    parts = []
    for section in sections:
        rows = [list(section.header), *([_shown(cell) for cell in row] for row in section.cells)]
        first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = [
            "  ".join([row[0].ljust(first), *(c.rjust(w) for c, w in zip(row[1:], widths, strict=True))]).rstrip()
            for row in rows
        ]
        parts.append("\n".join([*([section.title] if section.title else []), *lines, *section.notes]))
    return "\n\n".join(parts)


def as_markdown(title: str, sections: Sequence[Section]) -> str:
    """A page, with the sources."""
    lines = [f"# {title}", ""]
    for section in sections:
        lines += [f"## {section.title}", ""] if section.title else []
        rows = [section.header, ["---"] * len(section.header), *([_shown(c) for c in row] for row in section.cells)]
        lines += ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
        lines += ["", *(f"- {note}" for note in (*section.notes, *section.sources)), ""]
    return "\n".join(lines)


def as_csv(rows: Sequence[Row], names: Sequence[str]) -> str:
    """A line per row and one per mean, numbers unrounded; a column of published figures is called MODEL METRIC."""
    beside = beside_published(rows)
    columns = {model: f"{model} {published()['metric']}" for model in _models()[1:]} if beside else {}
    lines: list[dict[str, Any]] = []
    for row in rows:
        scores = beside["scores"][row["name"]] if beside else {}
        theirs = {columns[model]: score for model, score in scores.items() if model != OURS}
        about = {"data": row["name"], **{key: row[key] for key in ("split", "queries", "documents")}}
        lines.append({**about, **row["metrics"], **theirs})
    if len(rows) > 1:
        lines.append({"data": "mean", **_mean(rows)})
    if beside and beside["mean"]:
        means = {columns.get(model, beside["metric"]): mean for model, mean in beside["mean"].items()}
        lines.append({"data": f"mean of {len(beside['common'])} that all have", **means})
    file = io.StringIO()
    header = ["data", "split", "queries", "documents", *names, *columns.values()]
    writer = csv.DictWriter(file, header, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def as_json(rows: Sequence[Row], names: Sequence[str]) -> dict[str, Any]:
    """The tables for programs: all metrics, not only those shown."""
    beside = beside_published(rows)
    known = {**beside, "models": published()["models"]} if beside else None
    return {"shown": list(names), "sets": list(rows), "mean": _mean(rows), "published": known}


def _models() -> list[str]:
    return [OURS, *(model["name"] for model in published()["models"])]


def _mean(rows: Sequence[Row]) -> dict[str, float]:
    return {name: fmean(row["metrics"][name] for row in rows) for name in rows[0]["metrics"]}


def _beside(beside: Mapping[str, Any]) -> tuple[list[list[Any]], list[str]]:
    """Cells and notes of the table with published figures."""
    cells: list[list[Any]] = [
        [name + ("*" if name in beside["other_data"] else ""), *(row.get(model) for model in _models())]
        for name, row in beside["scores"].items()
    ]
    if beside["mean"] and len(beside["scores"]) > 1:
        cells.append([f"mean of {len(beside['common'])}", *(beside["mean"][model] for model in _models())])
    notes = [f"*{name}: {why}" for name, why in beside["other_data"].items()]
    if beside["mean"] and len(beside["common"]) < len(beside["scores"]):
        notes.append(f"the mean is over those that all models have a figure on: {', '.join(beside['common'])}")
    return cells, notes


def _source(model: Mapping[str, Any]) -> str:
    sources = "; ".join(f"{source['sets']}: {source['where']} ({source['revision']})" for source in model["sources"])
    return f"{model['name']}: {model['how']} {sources}"


def _shown(cell: Any) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.4f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)
