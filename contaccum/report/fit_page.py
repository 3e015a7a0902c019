"""HTML page of a finished `contaccum fit`: the verdict first, then texts, candidates and settings.

A fit makes several ways to search (candidates), chooses one by its score on dev, and compares it on
test with the best one that needs no training.

The page needs no network and no script. Its content is computed here; fit_page.html.j2 puts it into
words and tables, and Jinja escapes every text.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from contaccum import __version__
from contaccum.evaluation.metrics import describe_interval
from contaccum.redaction import redact

_FOLDER = Path(__file__).parent
_SHORT_TEXT = 300  # characters of a passage that are shown before it is opened
_METRICS = ("NDCG@10", "MRR@10", "Recall@100")
RUNGS = ("no training", "linear map", "query tower", "both towers", "both towers, further")
"""The names of the rungs in the report."""

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


def build_fit_page(record: Mapping[str, Any], folder: Path) -> str:
    """Return the page of a fit.

    Args:
        record: its result, as JSON.
        folder: its folder.
    """
    candidates = record["candidates"]
    chosen = candidates[record["chosen"]]
    changes = record["changes"]
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
        finalize=redact,
    )
    picture_numbers = itertools.count(1)

    def render_svg(panel: Panel) -> str:
        return panel.to_svg(salt=str(next(picture_numbers)))

    return environment.get_template("fit_page.html.j2").render(
        record=record,
        verdicts=record["verdicts"],
        kinds=[kind for kind in record["verdicts"] if kind in record["scores"][0]],
        folds=record["verdict"]["folds"],
        metrics=_METRICS,
        changes=[
            ("gained", changes["gained"], changes["num_gained"]),
            ("lost", changes["lost"], changes["num_lost"]),
        ],
        short_text=_SHORT_TEXT,
        join_title_and_text=join_title_and_text,
        describe_interval=describe_interval,
        panel=make_ladder_panel(record),
        dev_kinds=[kind for kind in candidates[0]["scores"] if kind != "all"],  # it is the mean
        chosen=chosen,
        recommended=candidates[record["recommended"]],
        config=yaml.safe_dump(chosen["settings"], sort_keys=False, allow_unicode=True),
        folder=folder,
        style=(_FOLDER / "page.css").read_text(encoding="utf-8"),
        svg=render_svg,
        created=f"contaccum {__version__}, {record['made_with']['time']}",
    )


def join_title_and_text(document: Mapping[str, str]) -> str:
    """Return a document's title, as a sentence, followed by its text."""
    title = document.get("title") or ""
    if not title:
        return document["text"]
    if not title.endswith((".", "?", "!")):
        title += "."
    return f"{title} {document['text']}"


def make_ladder_panel(record: Mapping[str, Any]) -> Panel:
    """Return a plot of the candidates' scores on dev by the minutes after which they were there."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for candidate in record["candidates"]:
        point = (candidate["seconds"] / 60, candidate["scores"]["mean"])
        lines.setdefault(RUNGS[candidate["rung"]], []).append(point)
        if candidate["number"] == record["chosen"]:
            chosen = [point]
    return Panel("nDCG@10 on dev by minutes", {**lines, "chosen": chosen}, "minutes", is_line=False)


class Panel(NamedTuple):
    """A plot of lines.

    Attributes:
        title: the plotted value.
        lines: {name of the line: its points (x, y)}. The position of a name sets its colour.
        unit: label of the x axis.
        is_line: True to connect the points.
    """

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    unit: str = "update"
    is_line: bool = True

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
            axes: Any = figure.subplots()
            for position, points in enumerate(self.lines.values()):
                x_values, y_values = zip(*points, strict=True)
                marker = "." if len(points) < _FEW_POINTS else ""
                colour = f"C{position % 10}"
                style = "-" if self.is_line else "none"
                axes.plot(x_values, y_values, color=colour, marker=marker, linestyle=style)
            axes.set_xlabel(self.unit)
            if self.unit == "update":
                axes.xaxis.get_major_locator().set_params(integer=True)
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
