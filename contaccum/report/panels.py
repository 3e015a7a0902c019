"""Plots of training curves, each as an SVG for the page, or all side by side in a PNG.

A panel is one plot. This module decides which values are plotted; page.html.j2 decides where the
plots appear.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from contaccum.comparison.summary import METRICS, cell_name
from contaccum.evaluation.results import JsonObject
from contaccum.report.sources import Log, Source

_INK = "#010203"  # placeholder colour, which to_svg replaces by the page's text colour
_STYLE: Any = {  # Any, because matplotlib's type for the keys is a literal of all of them
    "svg.fonttype": "none",  # keep texts as texts, not as paths
    "text.parse_math": False,  # a dollar sign in a name does not start a formula
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}
EVAL_METRIC = "eval_ndcg@10"
"""Metric of eval_log.jsonl that is plotted first and decides which update of a run is the best."""
# Keys of train_log.jsonl that are plotted; docs/drift.md and docs/training.md explain them.
_MAIN_KEYS = ("loss", "learning_rate", "grad_norm_query", "grad_norm_passage", "bank_fill")
_DIAGNOSTIC_KEYS = (
    *("grad_norm_ratio", "bank_age", "bank_mass", "in_batch_mass", "bank_mass_aged"),
    *("drift_cosine_query", "drift_cosine_passage", "drift_shift_query", "drift_shift_passage"),
    *("drift_residual_query", "drift_residual_passage"),
    *("masked", "embedding_spread", "peak_memory_mb"),
)
_FEW_POINTS = 40  # lines with fewer points have a marker at each point

Points = Sequence[tuple[float, float]]
"""Points (x, y) of one run's line."""


class Panel(NamedTuple):
    """A plot of lines: each is the mean over runs, with a band from the lowest to the highest.

    Attributes:
        title: the plotted value.
        lines: {name of the line: points of each of its runs, which differ by the seed}. The
            position of a name sets its colour; a line without points is not drawn.
        unit: label of the x axis.
        log_x: True for a logarithmic x axis.
        is_diagnostic: True if the page shows the plot only in a part that is closed at first.
    """

    title: str
    lines: Mapping[str, Sequence[Points]]
    unit: str = "update"
    log_x: bool = False
    is_diagnostic: bool = False

    def draw(self, axes: Any) -> None:
        """Draw the lines onto axes of matplotlib, each as far as its shortest run goes.

        Runs without points, whose logs are missing, are left out.
        """
        for position, (name, all_runs) in enumerate(self.lines.items()):
            runs = [run for run in all_runs if run]
            if not runs:
                continue
            length = min(map(len, runs))
            points = np.asarray([run[:length] for run in runs], dtype=float)
            x = points[..., 0].mean(axis=0)
            y = points[..., 1]
            colour = f"C{position % 10}"
            marker = ""
            if length < _FEW_POINTS:
                marker = "."
            axes.plot(x, y.mean(axis=0), color=colour, marker=marker, linewidth=1.4, label=name)
            if len(runs) > 1:
                lowest = y.min(axis=0)
                highest = y.max(axis=0)
                axes.fill_between(x, lowest, highest, color=colour, alpha=0.15, linewidth=0)
        axes.set_xlabel(self.unit)
        if self.unit == "update":
            axes.xaxis.get_major_locator().set_params(integer=True)
        if self.log_x:
            # matplotlib's own tick labels are formulas, which parse_math=False would show as text.
            ticks = self._get_x_values()
            axes.set_xscale("log")
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks], rotation=45)
            axes.minorticks_off()

    def _get_x_values(self) -> list[float]:
        """Return the distinct x values of all lines, ascending."""
        x_values: set[float] = set()
        for runs in self.lines.values():
            for run in runs:
                x_values.update(x for x, _ in run)
        return sorted(x_values)


def log_panels(
    logs: Mapping[str, Sequence[Log]],
    keys: Sequence[str] = (*_MAIN_KEYS, *_DIAGNOSTIC_KEYS),
    x_key: str = "update",
) -> list[Panel]:
    """Return a panel for each key that any log holds. All but the main keys are diagnostics.

    Args:
        logs: {name of the line: logs of its runs, one for each seed}.
        keys: keys of log records to plot.
        x_key: key of the x values.
    """
    panels = []
    for key in keys:
        lines = {}
        has_points = False
        for name, runs in logs.items():
            lines[name] = [_get_points(log, x_key, key) for log in runs]
            has_points = has_points or any(lines[name])
        if has_points:
            is_diagnostic = key not in (EVAL_METRIC, *_MAIN_KEYS)
            panels.append(Panel(key, lines, is_diagnostic=is_diagnostic))
    return panels


def _get_points(log: Log, x_key: str, y_key: str) -> Points:
    return [(record[x_key], record[y_key]) for record in log if record.get(y_key) is not None]


def comparison_panels(comparison: Source) -> list[Panel]:
    """Return plots of the main metric, by update and by seconds of training, and of the logs.

    The runs of a group, which differ by the seed, are one line.
    """
    report = comparison.record
    metric, metric_title = next(iter(METRICS.items()))
    groups = report["groups"].values()
    runs_by_line: dict[str, list[JsonObject]] = {}
    for group in groups:
        runs_by_line[_get_line_name(group)] = []
    for run in report["runs"].values():
        runs_by_line[_get_line_name(run)].append(run)
    panels = []
    if report.get("tuning"):
        panels.append(_tuning_panel(report, metric_title, list(runs_by_line)))
    curves = {}
    logs = {}
    for name, runs in runs_by_line.items():
        curves[name] = [run["curve"] for run in runs]
        logs[name] = [comparison.logs[run["name"]] for run in runs]
    for unit, key in (("update", "update"), ("seconds of training", "train_seconds")):
        for panel in log_panels(curves, [metric], key):
            panels.append(Panel(f"{metric_title} by {unit}", panel.lines, unit))
    return panels + log_panels(logs)


def _tuning_panel(report: Mapping[str, Any], metric_title: str, line_names: Sequence[str]) -> Panel:
    """Return a plot of the scores on dev by the value of the tuned setting.

    Args:
        report: record of the comparison.
        metric_title: name of the metric in the title.
        line_names: names in the order of the other panels, because the position sets the colour.
    """
    tuning = report["tuning"]
    lines: dict[str, list[Points]] = {name: [] for name in line_names}
    for group in tuning["groups"].values():
        if not group["final"]:
            continue
        points = []
        for value, score in group["scores"].items():
            if score is not None:
                points.append((float(value), score))
        name = _get_line_name(report["groups"][group["final"]])
        lines[name] = [sorted(points)]
    return Panel(f"{metric_title} on dev by {tuning['key']}", lines, tuning["key"], log_x=True)


def _get_line_name(group: Mapping[str, Any]) -> str:
    cell = cell_name(group["labels"])
    if cell:
        return f"{group['entry']}, {cell}"
    return group["entry"]


def save_png(panels: Sequence[Panel], path: Path) -> None:
    """Draw all panels into one picture, three in a row."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = math.ceil(len(panels) / 3) or 1
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(15, 3.6 * rows), layout="constrained")
        for number, panel in enumerate(panels, start=1):
            axes = figure.add_subplot(rows, 3, number)
            panel.draw(axes)
            axes.set_title(panel.title, fontsize=9)
            if axes.get_legend_handles_labels()[1]:
                axes.legend(fontsize=7)
        figure.savefig(path, format="png", dpi=110)


def to_svg(panel: Panel, salt: str) -> str:
    """Return a panel as an SVG element with escaped texts, in the page's text colour.

    Args:
        panel: the plot.
        salt: text that differs between the pictures of a page. It makes the ids of clip paths and
            markers unique. Of several equal ids, a browser uses the first one; if that one is in a
            closed part of the page, it draws nothing.
    """
    import matplotlib
    from matplotlib.figure import Figure

    output = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": salt}):
        figure = Figure(figsize=(4.4, 2.5), layout="constrained")
        panel.draw(figure.subplots())
        figure.savefig(output, format="svg", transparent=True)
    _, view_box, body = re.split(r'<svg [^>]*(viewBox="[^"]*")[^>]*>', output.getvalue())
    # Removed, because the page has its own metadata, styles and fonts.
    unneeded = r"<metadata>.*?</metadata>|<style.*?</style>|font-family: [^;\"]*;"
    body = re.sub(unneeded, "", body, flags=re.S)
    # The ids of a figure's parts, such as "axes_1", are equal in all pictures, without references.
    body = re.sub(r' id="[\w.]+_\d+"', "", body)
    body = body.replace(_INK, "currentColor")
    return f'<svg role="img" aria-label="{escape(panel.title)}" {view_box}>{body}'
