"""HTML page of a finished `contaccum fit`: the verdict, two charts and what to do next come first.

A fit makes several ways to search (candidates), chooses one by its score on dev, and compares it on
test with the best one that needs no training. Questions with their passages, tables and settings
follow.

The page needs no network and no script. The charts are drawn here; fit_page.html.j2 has the words
and tables, and Jinja escapes every text.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from contaccum import __version__
from contaccum.data.rows import passage_text
from contaccum.redaction import redact
from contaccum.settings import to_yaml

_FOLDER = Path(__file__).parent
RUNGS = ("no training", "linear map", "query tower", "both towers", "both towers, further")

_INK = "#010203"  # placeholder colour, which to_svg replaces by the page's text colour
_STYLE: Any = {  # Any, because matplotlib's type for the keys is a literal of all of them
    "svg.fonttype": "none",  # keep texts as texts, not as paths
    "text.parse_math": False,  # a dollar sign in a name does not start a formula
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.labelcolor": _INK,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}
_FREE_COLOUR = "tab:gray"
_CHOSEN_COLOUR = "tab:green"


def build_fit_page(record: Mapping[str, Any], folder: Path) -> str:
    """Return the page of a fit, from its result and its folder."""
    candidates = record["candidates"]
    chosen = candidates[record["chosen"]]
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
        finalize=redact,
    )
    environment.filters["commas"] = "{:,}".format
    return environment.get_template("fit_page.html.j2").render(
        record=record,
        data=show_path(record["data"]["path"]),
        folder=show_path(str(folder)),
        kinds=[kind for kind in record["verdicts"] if kind in record["scores"][0]],
        charts=draw_charts(record),
        passage_text=passage_text,
        dev_kinds=[kind for kind in candidates[0]["scores"] if kind != "all"],  # it is the mean
        chosen=chosen,
        recommended=candidates[record["recommended"]],
        config=to_yaml({name: show_path(value) for name, value in chosen["settings"].items()}),
        style=(_FOLDER / "page.css").read_text(encoding="utf-8"),
        created=f"contaccum {__version__}, {record['made_with']['time']}",
    )


def show_path(value: Any) -> Any:
    """Return an absolute path below the current folder as relative, another as its last part.

    The report is sent to others, who have no use for the folders of this machine. Other values are
    returned as they are.
    """
    if not isinstance(value, str) or not os.path.isabs(value):
        return value
    path = Path(value)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def draw_charts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the title and the SVG element of two charts: the ladder on dev, and the test."""
    import matplotlib
    from matplotlib.figure import Figure

    ladder = "nDCG@10 on dev, by the minutes after which each candidate was there"
    on_test = "nDCG@10 on test, with the 95% interval of the difference from the dashed line"
    charts = []
    for title, draw in ((ladder, draw_ladder), (on_test, draw_test)):
        # The salt makes the ids of clip paths and markers differ between the charts: of several
        # equal ids in a page, a browser uses the first one.
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": title}):
            figure = Figure(figsize=(4.2, 2.8), layout="constrained")
            draw(figure.subplots(), record)
            charts.append((title, to_svg(figure, title)))
    return charts


def draw_ladder(axes: Any, record: Mapping[str, Any]) -> None:
    """Draw the score of each candidate on dev by minutes; those better than all before are named.

    A line shows the best search without training.
    """
    candidates = record["candidates"]
    free = candidates[record["free"]]["scores"]["mean"]
    axes.axhline(free, color=_FREE_COLOUR, linestyle="--", linewidth=1)
    points: dict[str, list[tuple[float, float]]] = {}
    best = -1.0
    for candidate in candidates:
        point = (candidate["seconds"] / 60, candidate["scores"]["mean"])
        points.setdefault(RUNGS[candidate["rung"]], []).append(point)
        is_chosen = candidate["number"] == record["chosen"]
        if is_chosen:
            axes.scatter(*point, s=90, facecolors="none", edgecolors=_CHOSEN_COLOUR, linewidths=1.5)
        if point[1] > best or is_chosen:
            best = max(best, point[1])
            label = str(candidate["number"])
            axes.annotate(label, point, textcoords="offset points", xytext=(5, 5))
    for number, (rung, of_rung) in enumerate(points.items()):
        colour = _FREE_COLOUR if number == 0 else f"C{number - 1}"
        axes.plot(*zip(*of_rung, strict=True), ".", color=colour, label=rung)
    axes.set_xlabel("minutes (the numbers are those of the candidates; a ring: chosen)")
    axes.legend(loc="lower right")


def draw_test(axes: Any, record: Mapping[str, Any]) -> None:
    """Draw the mean of each system on test, with the interval of its difference from free.

    A line shows the best search without training, and the chosen candidate is coloured.
    """
    [free] = [row["NDCG@10"] for row in record["scores"] if row["is_free"]]
    axes.axvline(free, color=_FREE_COLOUR, linestyle="--", linewidth=1)
    rows = record["scores"][::-1]  # the first row becomes the highest one
    for height, row in enumerate(rows):
        colour = _CHOSEN_COLOUR if height == 0 else _FREE_COLOUR
        if row["low"] is not None:
            axes.plot([row["low"], row["high"]], [height, height], color=colour)
        axes.plot(row["NDCG@10"], height, "o", color=colour, markersize=5)
        # The name starts at the left edge, above the bar.
        place = (0.01, height + 0.25)
        axes.annotate(
            f"{row['name']}: {row['NDCG@10']:.3f}", place, xycoords=("axes fraction", "data")
        )
    axes.set_yticks([])
    axes.set_ylim(-0.5, len(rows) - 0.3)
    axes.margins(x=0.1)


def to_svg(figure: Any, title: str) -> str:
    """Return a figure as an SVG element with escaped texts, in the page's text colour."""
    output = io.StringIO()
    figure.savefig(output, format="svg", transparent=True)
    _, view_box, body = re.split(r'<svg [^>]*(viewBox="[^"]*")[^>]*>', output.getvalue())
    # Removed, because the page has its own metadata, styles and fonts.
    unneeded = r"<metadata>.*?</metadata>|<style.*?</style>|font-family: [^;\"]*;"
    body = re.sub(unneeded, "", body, flags=re.S)
    # The ids of a figure's parts, such as "axes_1", are equal in all pictures, without references.
    body = re.sub(r' id="[\w.]+_\d+"', "", body)
    body = body.replace(_INK, "currentColor")
    return f'<svg role="img" aria-label="{escape(title)}" {view_box}>{body}'
