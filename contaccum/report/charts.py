"""Pictures by matplotlib: panels that are drawn side by side into a PNG, or each as an SVG inside the page.

A panel knows its numbers and draws them on the axes that it is given. Nothing is read, and only means are worked out.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Points = Sequence[tuple[float, float]]
Log = Sequence[Mapping[str, Any]]

_COLUMNS = 3  # of a PNG
_INK = "#010203"  # text and axes, for which the page puts its own colour
_STYLE: Any = {  # the keys' own type is a list of all of them
    "svg.fonttype": "none",  # texts stay texts
    "text.parse_math": False,  # a dollar sign in a name is one
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}
# Of a log, what is drawn; docs/drift.md says what each is.
_DRAWN = (
    *("loss", "grad_norm_ratio", "grad_norm_query", "grad_norm_passage", "bank_fill", "bank_age"),
    *("drift_cosine_query", "drift_cosine_passage", "drift_shift_query", "drift_shift_passage"),
    *("drift_residual_query", "drift_residual_passage", "bank_mass", "in_batch_mass", "bank_mass_aged"),
    *("embedding_spread", "peak_memory_mb"),
)


class Panel(NamedTuple):
    """A picture: its title, and what draws it on axes."""

    title: str
    draw: Callable[[Any], None]


def line_panel(title: str, lines: Mapping[str, Sequence[Points]], unit: str = "update") -> Panel:
    """Lines over updates, say: the mean over runs, and a band from the lowest to the highest.

    Args:
        lines: name -> the points of one run, or of several that differ by the seed; of none, nothing is drawn. The
            place of a name is its colour.
    """

    def draw(axes: Any) -> None:
        for series, (name, found) in enumerate(lines.items()):
            length = min(map(len, found), default=0)
            if not length:
                continue
            runs = np.asarray([points[:length] for points in found], dtype=float)
            x, y = runs[..., 0].mean(axis=0), runs[..., 1]
            colour, marker = f"C{series % 10}", "." if length < 40 else ""
            axes.plot(x, y.mean(axis=0), color=colour, marker=marker, linewidth=1.4, label=name)
            if len(runs) > 1:
                axes.fill_between(x, y.min(axis=0), y.max(axis=0), color=colour, alpha=0.15, linewidth=0)
        axes.set_xlabel(unit)

    return Panel(title, draw)


def log_panels(logs: Mapping[str, Sequence[Log]], keys: Sequence[str] = _DRAWN) -> list[Panel]:
    """A picture of every key that some log holds: name -> the log of one run, or those of several seeds."""
    panels = []
    for key in keys:
        lines = {
            name: [[(record["update"], record[key]) for record in log if record.get(key) is not None] for log in found]
            for name, found in logs.items()
        }
        panels += [line_panel(key, lines)] if any(map(any, lines.values())) else []
    return panels


def save_png(panels: Sequence[Panel], path: Path) -> None:
    """All panels in one picture, three in a row."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = math.ceil(len(panels) / _COLUMNS) or 1
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5 * _COLUMNS, 3.6 * rows), layout="constrained")
        for number, panel in enumerate(panels, start=1):
            axes = figure.add_subplot(rows, _COLUMNS, number)
            panel.draw(axes)
            axes.set_title(panel.title, fontsize=9)
            if axes.get_legend_handles_labels()[1]:
                axes.legend(fontsize=7)
        figure.savefig(path, format="png", dpi=110)


def to_svg(panel: Panel) -> str:
    """One panel as an element for the page: its texts escaped, its ids its own, its ink the page's colour of text."""
    import matplotlib
    from matplotlib.figure import Figure

    out = io.StringIO()
    # Clip paths and markers are known by hashes, which must differ between the pictures of a page.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": panel.title}):
        figure = Figure(figsize=(4.4, 2.5), layout="constrained")
        panel.draw(figure.subplots())
        figure.savefig(out, format="svg", transparent=True)
    box, body = re.split(r'<svg [^>]*(viewBox="[^"]*")[^>]*>', out.getvalue())[1:]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|font-family: [^;\"]*;", "", body, flags=re.S)
    body = re.sub(r' id="[\w.]+_\d+"', "", body).replace(_INK, "currentColor")
    return f'<svg role="img" aria-label="{escape(panel.title)}" {box}>{body}'
