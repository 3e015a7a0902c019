"""report.png: curves while training, and the final metric over the grid. Draws what is there; works nothing out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from contaccum.comparison.evaluating import METRICS
from contaccum.comparison.plan import Plan
from contaccum.comparison.report import Results
from contaccum.training.curves import mass_by_age

_COLUMNS = 3
_MAX_HEAT_ROWS = 40
_POINTS = 200  # more would not be seen
METRIC = next(iter(METRICS))
_BANK_PANELS = {
    "drift_shift_passage": "drift: mean shift of passages / spread",
    "drift_residual_passage": "drift: what is left of it / spread",
    "drift_cosine_passage": "cosine of a passage then and now",
    "drift_cosine_query": "cosine of a query then and now",
    "bank_age": "age of the oldest entry in use, updates",
    "bank_fill": "bank entries in use",
    "bank_mass": "share of the softmax on the bank",
    "bank_mass_aged": "softmax of an old column over a fresh one",
}


def draw_report(plan: Plan, results: Results, logs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw a comparison into a PNG.

    Lines are means over seeds, bands reach from the lowest to the highest seed. With a grid, curves are those of its
    first cell to which all belong, and a map shows the final metric of all.

    Args:
        logs: name of the run -> the records of its train_log.jsonl.
    """
    import matplotlib

    matplotlib.use("Agg")  # no screen needed
    import matplotlib.pyplot as plt

    cell, groups = next(
        (found for found in plan.cells if all(plan.belongs(entry, found[0]) for entry in found[1])), plan.cells[0]
    )
    shown = METRICS[METRIC]
    has_curves = any(len(result["curve"]) > 1 for result in results.values())
    panels: list[tuple[str, str, str]] = []
    if has_curves:
        panels += [("curve", "update", shown), ("curve", "train_seconds", shown)]
    fields = _fields(logs)
    panels += [("log", name, name) for name in ("grad_norm_ratio", "loss") if name in fields]
    panels += [("log", key, label) for key, label in _BANK_PANELS.items() if key in fields]
    stacked = next((name for name in groups.values() if _masses(plan, name, logs)[0]), None)
    panels += [("mass", stacked, "share of the local rows' softmax")] if stacked is not None else []
    panels += [("final", "", shown)]

    rows = math.ceil(len(panels) / _COLUMNS)
    heat = _heat_rows(plan, results) if len(plan.cells) > 1 else []
    heat_height = 1.2 + 0.28 * len(heat) if heat else 0.0
    figure = plt.figure(figsize=(5 * _COLUMNS, 3.8 * rows + heat_height), layout="constrained")
    upper: Any = figure
    lower: Any = None
    if heat:
        parts: Any = figure.subfigures(2, 1, height_ratios=[3.8 * rows, heat_height])
        upper, lower = parts
    axes: list[Any] = list(np.ravel(upper.subplots(rows, _COLUMNS, squeeze=False)))
    colours = {entry.name: f"C{number % 10}" for number, entry in enumerate(plan.entries)}
    styles = {entry.name: ("-", "--", ":", "-.")[number // 10 % 4] for number, entry in enumerate(plan.entries)}
    for panel, (kind, key, label) in zip(axes, panels, strict=False):
        if kind == "final":
            _draw_final(panel, plan, groups, results, colours)
            continue
        if kind == "mass":
            _draw_masses(panel, plan, key, logs)
            panel.set(xlabel="update", ylabel=label)
            continue
        for entry, name in groups.items():
            runs = [run.name for run in plan.groups[name].runs.values()]
            if kind == "curve":
                series = [(r["curve"], key, METRIC) for r in (results.get(run) for run in runs) if r and r["curve"]]
            else:
                series = [(logs[run], "update", key) for run in runs if logs.get(run)]
            _draw_line(panel, series, colours[entry], styles[entry], entry, marker="." if kind == "curve" else "")
        panel.set(xlabel="seconds of training" if key == "train_seconds" else "update", ylabel=label)
        if key == "grad_norm_ratio":
            panel.set(ylabel="grad norm, passages / queries")
            panel.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
        if key == "loss":
            panel.set(ylabel="loss (each with its own negatives)")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    for panel in axes[len(panels) :]:
        panel.set_visible(False)
    if cell:
        upper.suptitle("curves at " + ", ".join(f"{key}={value}" for key, value in cell.items()), fontsize=10)
    if heat:
        _draw_heat(lower, plan, heat, shown)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _masses(plan: Plan, name: str, logs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    """`mass_by_age` of a group's first seed."""
    return mass_by_age(logs.get(next(iter(plan.groups[name].runs.values())).name) or [])


def _draw_masses(axes: Any, plan: Plan, name: str, logs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Where the softmax of the local rows lies: negatives in the batch, and banked passages by age. The first seed."""
    updates, layers = _masses(plan, name, logs)
    colours = ["lightgrey", *(f"{0.25 + 0.6 * i / (len(layers) - 1):.2f}" for i in range(len(layers) - 1))]
    values = [shares for _, shares in layers]
    axes.stackplot(updates, values, labels=[label for label, _ in layers], colors=colours)
    axes.set(title=name, ylim=(0, 1))
    axes.title.set_fontsize(9)
    axes.legend(fontsize=7, loc="upper right")


def _fields(logs: Mapping[str, Sequence[Mapping[str, Any]]]) -> set[str]:
    """Keys under which some record has a number."""
    return {
        key
        for records in logs.values()
        for record in (*records[:1], *records[-1:])
        for key, value in record.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _draw_line(axes: Any, series: list[Any], colour: str, style: str, label: str, marker: str) -> None:
    """The mean over runs, and a band of their range; runs that stopped early count as long as they last."""
    lines = []
    for records, x, y in series:
        points = [(r[x], r[y]) for r in records if _finite(r.get(x)) and _finite(r.get(y))]
        if points:
            lines.append(np.asarray(points[:: max(1, len(points) // _POINTS)], dtype=float))
    if not lines:
        return
    length = min(len(line) for line in lines)
    together = np.stack([line[:length] for line in lines])  # (runs, points, 2)
    x, y = together[..., 0].mean(axis=0), together[..., 1]
    axes.plot(x, y.mean(axis=0), color=colour, linestyle=style, marker=marker, linewidth=1.2, label=label)
    if len(lines) > 1:
        axes.fill_between(x, y.min(axis=0), y.max(axis=0), color=colour, alpha=0.15, linewidth=0)


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _final_values(plan: Plan, name: str, results: Results) -> list[float]:
    """The metric on the first data set, a value a seed."""
    found = [results[run.name] for run in plan.groups[name].runs.values() if run.name in results]
    return [next(iter(result["evaluations"].values()))["metrics"][METRIC] for result in found]


def _draw_final(axes: Any, plan: Plan, groups: Mapping[str, str], results: Results, colours: Mapping[str, str]) -> None:
    for place, (entry, name) in enumerate(groups.items()):
        values = _final_values(plan, name, results)
        if values:
            axes.plot([place] * len(values), values, "o", color=colours[entry], alpha=0.5, markersize=5)
            axes.plot([place - 0.25, place + 0.25], [np.mean(values)] * 2, color=colours[entry], linewidth=2)
    axes.set_xticks(range(len(groups)), list(groups), rotation=30, ha="right", fontsize=8)
    axes.set(ylabel=f"final {METRICS[METRIC]}", xlim=(-0.6, len(groups) - 0.4))
    axes.grid(alpha=0.3, axis="y")


def _heat_rows(plan: Plan, results: Results) -> list[tuple[str, list[float]]]:
    """A row for each entry and each combination of all gridded keys but the last, whose values are the columns."""
    *outer, last = plan.grid
    by_cell = {tuple(cell.values()): groups for cell, groups in plan.cells}
    rows: dict[tuple[str, ...], tuple[str, list[float]]] = {}
    for entry in plan.entries:
        for values in itertools.product(*(plan.grid[key] for key in outer)):
            names = [by_cell[(*values, value)][entry.name] for value in plan.grid[last]]
            # Cells that share their runs are one row.
            means = [float(np.mean(found)) if (found := _final_values(plan, n, results)) else math.nan for n in names]
            labels = plan.groups[names[0]].labels
            title = ", ".join([entry.name, *(f"{key}={labels[key]}" for key in outer if key in labels)])
            rows.setdefault(tuple(names), (title, means))
    return list(rows.values())[:_MAX_HEAT_ROWS]


def _draw_heat(figure: Any, plan: Plan, rows: list[tuple[str, list[float]]], shown: str) -> None:
    last = list(plan.grid)[-1]
    axes = figure.subplots()
    image = axes.imshow(np.asarray([means for _, means in rows]), aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(plan.grid[last])), [f"{last}={value}" for value in plan.grid[last]], fontsize=8)
    axes.set_yticks(range(len(rows)), [title for title, _ in rows], fontsize=8)
    low, high = image.get_clim()
    for y, (_, means) in enumerate(rows):
        for x, mean in enumerate(means):
            if math.isfinite(mean):
                colour = "black" if high > low and (mean - low) / (high - low) > 0.6 else "white"
                axes.text(x, y, f"{mean:.4f}", ha="center", va="center", fontsize=7, color=colour)
    axes.set_title(f"final {shown}, mean over seeds", fontsize=10)
