"""Plots of lines as SVG elements for an HTML page."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

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
_FEW_POINTS = 40  # lines with fewer points have a marker at each point

Points = Sequence[tuple[float, float]]


class Panel(NamedTuple):
    """A plot of lines.

    Attributes:
        title: the plotted value.
        lines: {name of the line: its points (x, y)}. The position of a name sets its colour.
        unit: label of the x axis.
        log_x: True for a logarithmic x axis.
    """

    title: str
    lines: Mapping[str, Points]
    unit: str = "update"
    log_x: bool = False

    def to_svg(self, salt: str) -> str:
        """Return an SVG element with escaped texts, in the page's text colour.

        Args:
            salt: text that differs between the pictures of a page. It makes the ids of clip paths
                and markers unique. Of several equal ids, a browser uses the first one; if that one
                is in a closed part of the page, it draws nothing.
        """
        import matplotlib
        from matplotlib.figure import Figure

        output = io.StringIO()
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": salt}):
            figure = Figure(figsize=(4.4, 2.5), layout="constrained")
            self._draw(figure.subplots())
            figure.savefig(output, format="svg", transparent=True)
        _, view_box, body = re.split(r'<svg [^>]*(viewBox="[^"]*")[^>]*>', output.getvalue())
        # Removed, because the page has its own metadata, styles and fonts.
        unneeded = r"<metadata>.*?</metadata>|<style.*?</style>|font-family: [^;\"]*;"
        body = re.sub(unneeded, "", body, flags=re.S)
        # The ids of a figure's parts, such as "axes_1", are equal in all pictures, without
        # references.
        body = re.sub(r' id="[\w.]+_\d+"', "", body)
        body = body.replace(_INK, "currentColor")
        return f'<svg role="img" aria-label="{escape(self.title)}" {view_box}>{body}'

    def _draw(self, axes: Any) -> None:
        """Draw the lines onto axes of matplotlib."""
        for position, points in enumerate(self.lines.values()):
            x_values, y_values = zip(*points, strict=True)
            marker = "." if len(points) < _FEW_POINTS else ""
            colour = f"C{position % 10}"
            axes.plot(x_values, y_values, color=colour, marker=marker, linewidth=1.4)
        axes.set_xlabel(self.unit)
        if self.unit == "update":
            axes.xaxis.get_major_locator().set_params(integer=True)
        if self.log_x:
            # matplotlib's own tick labels are formulas, which parse_math=False would show as text.
            ticks = sorted({x for points in self.lines.values() for x, _ in points})
            axes.set_xscale("log")
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks], rotation=45)
            axes.minorticks_off()
