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

_COLUMNS = 3  # of a PNG
_POINTS = 400  # of a line; more would not be seen
_INK = "#010203"  # text and axes, for which the page puts its own colour
_STYLE: Any = {  # the keys' own type is a list of all of them
    "svg.fonttype": "none",  # texts stay texts
    "text.parse_math": False,  # a dollar sign in a name is one
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}


class Panel(NamedTuple):
    """A picture: its title, what draws it on axes, a note, and of a map the number of its rows."""

    title: str
    draw: Callable[[Any], None]
    note: str = ""
    rows: int = 0


class Line(NamedTuple):
    """Points of one run, or of several that differ by the seed; ``series`` chooses the colour."""

    name: str
    runs: Sequence[Points]
    series: int = 0
    dashed: bool = False


def line_panel(
    title: str, lines: Sequence[Line], note: str = "", level: float | None = None, unit: str = "update"
) -> Panel:
    """Lines over updates, say: the mean over runs, and a band from the lowest to the highest.

    Args:
        level: what to compare with, drawn where it lies within reach.
    """

    def draw(axes: Any) -> None:
        for line in lines:
            length = min(map(len, line.runs))
            runs = np.asarray([run[:length] for run in line.runs], dtype=float)[:, :: math.ceil(length / _POINTS)]
            x, y = runs[..., 0].mean(axis=0), runs[..., 1]
            look = {"color": f"C{line.series % 10}", "gid": f"series-{line.series}"}
            style, label = ("--", None) if line.dashed else ("-", line.name)
            marker = "." if length < 40 else ""
            axes.plot(x, y.mean(axis=0), linestyle=style, marker=marker, linewidth=1.4, label=label, **look)
            if len(runs) > 1:
                axes.fill_between(x, y.min(axis=0), y.max(axis=0), alpha=0.15, linewidth=0, **look)
        low, high = axes.get_ylim()
        if level is not None and 2 * low - high <= level <= 2 * high - low:
            axes.axhline(level, color="grey", linewidth=0.8, linestyle=":")
        axes.set_xlabel(unit)

    return Panel(title, draw, note)


def stacked_panel(title: str, updates: Sequence[int], layers: Mapping[str, Sequence[float]], note: str = "") -> Panel:
    """Shares from 0 to 1 on top of each other: the first below and grey, the others from light to dark."""

    def draw(axes: Any) -> None:
        shades = [(0.12, 0.47, 0.71, shade) for shade in np.linspace(0.25, 0.95, len(layers) - 1)]
        axes.stackplot(updates, list(layers.values()), labels=list(layers), colors=["lightgrey", *shades])
        axes.set(ylim=(0, 1), xlabel="update")

    return Panel(title, draw, note)


def difference_panel(title: str, differences: Sequence[float], note: str = "") -> Panel:
    """A bar per query, from the greatest gain to the greatest loss."""

    def draw(axes: Any) -> None:
        values = np.sort(np.asarray(differences, dtype=float))[::-1]
        for part, colour in ((np.maximum(values, 0), "tab:green"), (np.minimum(values, 0), "tab:red")):
            axes.fill_between(np.arange(len(values)), part, step="mid", color=colour)
        axes.set_xlabel("queries, by difference")

    return Panel(title, draw, note)


def map_panel(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[float]], note: str = "") -> Panel:
    """A value per cell as colour and number, (rows, columns); NaN stays blank."""

    def draw(axes: Any) -> None:
        cells = axes.pcolormesh(np.asarray(list(rows.values())), cmap="viridis")  # an image would be no SVG
        axes.grid(False)
        axes.set_xticks(np.arange(len(columns)) + 0.5, columns)
        axes.set_yticks(np.arange(len(rows)) + 0.5, list(rows))
        axes.invert_yaxis()
        low, high = cells.get_clim()
        for y, values in enumerate(rows.values()):
            for x, value in enumerate(values):
                colour = "black" if value > low + 0.6 * (high - low) else "white"
                text = f"{value:.4f}" if math.isfinite(value) else ""
                axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", color=colour)

    return Panel(title, draw, note, len(rows))


def save_png(panels: Sequence[Panel], path: Path, title: str = "") -> None:
    """All panels in one picture, three in a row, maps below them in rows of their own."""
    import matplotlib
    from matplotlib.figure import Figure

    small, maps = [p for p in panels if not p.rows], [p for p in panels if p.rows]
    heights = [3.6] * math.ceil(len(small) / _COLUMNS) + [1.2 + 0.28 * panel.rows for panel in maps]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5 * _COLUMNS, sum(heights)), layout="constrained")
        grid = figure.add_gridspec(len(heights), _COLUMNS, height_ratios=heights)
        places: list[Any] = [grid[number // _COLUMNS, number % _COLUMNS] for number in range(len(small))]
        places += [grid[len(heights) - len(maps) + number, :] for number in range(len(maps))]
        for place, panel in zip(places, [*small, *maps], strict=True):
            axes = figure.add_subplot(place)
            panel.draw(axes)
            axes.set_title("\n".join(filter(None, (panel.title, panel.note))), fontsize=9)
            if axes.get_legend_handles_labels()[1]:
                axes.legend(fontsize=7)
        figure.suptitle(title, fontsize=10)
        figure.savefig(path, format="png", dpi=110)


def to_svg(panel: Panel) -> str:
    """One panel as an element for the page: its texts escaped, its ids its own, its ink the page's colour of text."""
    import matplotlib
    from matplotlib.figure import Figure

    ink: Any = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK)
    out = io.StringIO()
    # Clip paths and markers are known by hashes, which must differ between the pictures of a page.
    with matplotlib.rc_context({**_STYLE, **ink, "svg.hashsalt": panel.title}):
        figure = Figure(figsize=(10, 1.2 + 0.28 * panel.rows) if panel.rows else (4.4, 2.5), layout="constrained")
        panel.draw(figure.subplots())
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    box, body = re.split(r'<svg [^>]*(viewBox="[^"]*")[^>]*>', out.getvalue())[1:]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|font-family: [^;\"]*;", "", body, flags=re.S)
    body = re.sub(r' id="series-(\d+)"', r' data-series="\1"', body)
    body = re.sub(r' id="[\w.]+_\d+"', "", body).replace(_INK, "currentColor")
    return f'<svg role="img" aria-label="{escape(panel.title)}" {box}>{body}'
