"""The tables of an evaluation: its sets, beside published figures, and against earlier results query by query.

A row is what the JSON holds of it: name, split, queries, documents, metrics, and either the fingerprint and file of one
set or the `parts` that it is the mean of. Published figures, with the source of each and how it was scored, lie in
published.json. An earlier result is a record of one set or a table of several, by this version of ``contaccum
evaluate`` or by one before; only results on the same data are compared. Nothing is encoded or searched here.
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
from contaccum.errors import DataError
from contaccum.evaluation.beir import EvaluationSet
from contaccum.evaluation.metrics import holm, paired_bootstrap
from contaccum.evaluation.results import read_result, result_files
from contaccum.files import read_json

RESAMPLES = 10_000
QUERIES_SHOWN = 5

Row = Mapping[str, Any]
Scores = Mapping[str, float]
"""{query id: score}"""


class Section(NamedTuple):
    """A table for people: its title, header and cells (None is blank), and notes below it."""

    title: str
    header: Sequence[str]
    cells: Sequence[Sequence[Any]]
    notes: Sequence[str] = ()


# The sets ------------------------------------------------------------------------------------------------------------


def table_rows(sets: Sequence[EvaluationSet], records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each set, from its record; the parts of CQADupStack are one, in which each counts alike."""
    parts: dict[str, list[Row]] = {}
    for one, record in zip(sets, records, strict=True):
        about = {"name": one.label, "split": one.split, "queries": record["data"]["queries"]}
        source = {"documents": one.documents, "fingerprint": one.fingerprint, "file": one.output.name}
        parts.setdefault(one.row, []).append({**about, **source, "metrics": record["metrics"]})
    rows: list[Row] = []
    for name, found in parts.items():
        sums = {key: sum(part[key] for part in found) for key in ("queries", "documents")}
        mean = {"name": name, "split": found[0]["split"], **sums, "metrics": mean_metrics(found), "parts": found}
        rows.append(found[0] if found[0]["name"] == name else mean)
    return rows


def table_section(rows: Sequence[Row], names: Sequence[str]) -> Section:
    """The metrics ``names`` of all rows and their mean."""
    cells = [[row["name"], row["split"], row["queries"], *(row["metrics"][n] for n in names)] for row in rows]
    if len(rows) > 1:
        cells.append(["mean", "", "", *(mean_metrics(rows)[name] for name in names)])
    return Section("", ["data", "split", "queries", *names], cells)


def as_csv(rows: Sequence[Row], names: Sequence[str]) -> str:
    """A line per row and one for the mean, numbers unrounded."""
    file = io.StringIO()
    header = ["name", "split", "queries", "documents", *names]
    writer = csv.DictWriter(file, ["data", *header[1:]], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({"data": row["name"], **{key: {**row, **row["metrics"]}[key] for key in header[1:]}})
    if len(rows) > 1:
        writer.writerow({"data": "mean", **{name: mean_metrics(rows)[name] for name in names}})
    return file.getvalue()


def mean_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Every metric's mean over rows, each of which counts alike."""
    return {name: fmean(row["metrics"][name] for row in rows) for name in rows[0]["metrics"]}


# Published figures ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def published() -> dict[str, Any]:
    """metric; judged_queries {set: how many}; models, each with name, how, sources and scores {set: score}."""
    return read_json(Path(__file__).with_name("published.json"))


def published_section(rows: Sequence[Row]) -> Section | None:
    """Our scores beside published ones; None where nothing is published on any of the sets, or not by that metric.

    The mean is over the sets that every model has a figure on. A set with another number of judged queries is other
    data: it is marked, and left out of the mean.
    """
    metric, judged, models = (published()[key] for key in ("metric", "judged_queries", "models"))
    cells: list[list[Any]] = []
    notes = []
    common: list[list[Any]] = []
    for row in rows:
        name, ours = row["name"], row["metrics"].get(metric)
        right_split = row["split"] == default_split(name)
        theirs = [model["scores"].get(name) if right_split else None for model in models]
        other = any(theirs) and judged[name] != row["queries"]
        cells.append([name + "*" * other, ours, *theirs])
        if other:
            there = f"{row['queries']:,} judged queries, BEIR has {judged[name]:,}"
            notes.append(f"*{name}: {there}: other data, not to be compared")
        elif all(theirs):
            common.append([ours, *theirs])
    if not any(any(theirs) for _, ours, *theirs in cells if ours is not None):
        return None
    if common and len(rows) > 1:
        cells.append([f"mean of {len(common)}", *map(fmean, zip(*common, strict=True))])
    title = f"{metric} beside published figures (sources: docs/evaluation.md)"
    return Section(title, ["data", "this model", *(model["name"] for model in models)], cells, notes)


# Earlier results -----------------------------------------------------------------------------------------------------


class PreviousResult(NamedTuple):
    """An earlier result: its scores of one metric by the label of our data set, and what only it has."""

    path: Path
    metric: str
    scores: Mapping[str, Scores]
    left_out: Sequence[str]


def read_previous(path: Path, sets: Sequence[EvaluationSet], metric: str) -> PreviousResult:
    """The scores of an earlier result on the sets of this evaluation.

    Raises:
        DataError: no result, none of our data sets, or a result without this metric.
    """
    labels = {one.fingerprint: one.label for one in sets}
    scores: dict[str, Scores] = {}
    left_out: list[str] = []
    for file in result_files(path):
        record = read_result(file)
        theirs = record["data"]
        if theirs.get("fingerprint") in labels:
            scores[labels[theirs["fingerprint"]]] = scores_of(record, metric, file)
        else:
            left_out.append(_about(theirs.get("name"), theirs.get("split"), theirs.get("fingerprint")))
    if not scores:
        here = ", ".join(_about(one.label, one.split, one.fingerprint) for one in sets[:3])
        there = ", ".join(left_out[:3])
        raise DataError(f"{path}: is on other data: {there}; here: {here} (compare results of the same data)")
    return PreviousResult(path, metric, scores, left_out)


def scores_of(record: Mapping[str, Any], metric: str, path: Path) -> Scores:
    """A metric of every query of a result; raises `DataError` where some have none."""
    try:
        return {query: float(values[metric]) for query, values in record["per_query"].items()}
    except (KeyError, TypeError, ValueError):
        what = f"has no {metric} of every query"
        raise DataError(f"{path}: {what} (name another as the first of --metrics, or evaluate again)") from None


def compare(ours: Mapping[str, Scores], previous: PreviousResult) -> dict[str, Any]:
    """Each set, by :func:`compare_queries`; Holm's correction is over the sets. Raises `DataError` for other queries.

    Args:
        ours: {label: scores}; positive differences are in their favour.
    """
    rows = []
    for label, theirs in previous.scores.items():
        if ours[label].keys() != theirs.keys():
            raise DataError(f"{previous.path}: has scores of other queries on {label} (evaluate it again)")
        rows.append({"data": label, **compare_queries(ours[label], theirs)})
    for row, p in zip(rows, holm([row["p_value"] for row in rows]), strict=True):
        row["p_holm"] = p
    about = {"earlier": str(previous.path), "metric": previous.metric, "resamples": RESAMPLES, "seed": 0}
    return {**about, "rows": rows, "left_out": list(previous.left_out)}


def compare_queries(ours: Scores, theirs: Scores, shown: int = QUERIES_SHOWN) -> dict[str, Any]:
    """Two results over the same queries: means, a paired bootstrap, wins, ties and losses, and the greatest changes.

    Args:
        shown: how many gains, and how many losses.
    """
    a, b = list(ours.values()), [theirs[query] for query in ours]
    # Rounded, so that what differs in the last bits is a tie, and equal changes are in the order of their queries.
    changes: list[dict[str, Any]] = [
        {"query": query, "difference": round(score - theirs[query], 9), "ours": score, "earlier": theirs[query]}
        for query, score in ours.items()
    ]
    gains = sorted((c for c in changes if c["difference"] > 0), key=lambda c: (-c["difference"], c["query"]))
    losses = sorted((c for c in changes if c["difference"] < 0), key=lambda c: (c["difference"], c["query"]))
    return {
        "queries": len(a),
        "ours": fmean(a),
        "earlier": fmean(b),
        **paired_bootstrap(a, b, RESAMPLES)._asdict(),
        "wins": len(gains),
        "ties": len(a) - len(gains) - len(losses),
        "losses": len(losses),
        "greatest_gains": gains[:shown],
        "greatest_losses": losses[:shown],
    }


def comparison_section(comparison: Mapping[str, Any]) -> Section:
    """What the terminal and the page show of :func:`compare`."""
    notes = []
    for row in comparison["rows"]:
        for key in ("greatest_gains", "greatest_losses"):
            if row[key]:
                shown = ", ".join(f"{c['query']} {c['difference']:+.4f}" for c in row[key])
                notes.append(f"{row['data']}, {key.replace('_', ' ')}: {shown}")
    notes += [f"not compared, since only the earlier has it: {about}" for about in comparison["left_out"]]
    notes.append(f"paired bootstrap over queries, {RESAMPLES:,} resamples, two-sided; Holm's correction over the rows")
    return Section(
        f"{comparison['metric']} against {comparison['earlier']}",
        ["data", "ours", "earlier", "difference", "95% interval", "p", "p (Holm)", "wins", "ties", "losses"],
        [_cells(row) for row in comparison["rows"]],
        [" ".join(note.split()) for note in notes],  # ids may hold line ends
    )


def _about(name: Any, split: Any, fingerprint: Any) -> str:
    return f"{name} {split} (fingerprint {str(fingerprint)[:12]})"


def _cells(row: Mapping[str, Any]) -> list[Any]:
    interval = f"{row['low']:+.4f} to {row['high']:+.4f}"
    p = ["<0.001" if row[key] < 0.001 else f"{row[key]:.3f}" for key in ("p_value", "p_holm")]
    counts = (row[key] for key in ("wins", "ties", "losses"))
    return [row["data"], row["ours"], row["earlier"], f"{row['difference']:+.4f}", interval, *p, *counts]


# Forms ---------------------------------------------------------------------------------------------------------------


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
    """A page of them."""
    lines = [f"# {title}", ""]
    for section in sections:
        lines += [f"## {section.title}", ""] if section.title else []
        rows = [section.header, ["---"] * len(section.header), *([_shown(c) for c in row] for row in section.cells)]
        lines += ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
        lines += ["", *(f"- {note}" for note in section.notes), ""]
    return "\n".join(lines)


def _shown(cell: Any) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.4f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)
