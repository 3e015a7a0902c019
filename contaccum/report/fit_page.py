"""HTML page of a finished `contaccum fit`: the verdict first, then texts, trials and settings.

A fit trains a model several times with different settings (trials), chooses the trial with the best
score on dev, and compares its model with the model as it is, before training.

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
from contaccum.files import read_json, redact
from contaccum.training.log import EVAL_LOG, TRAIN_LOG, read_log

_FOLDER = Path(__file__).parent
_SHORT_TEXT = 300  # characters of a passage that are shown before it is opened
_METRICS = ("NDCG@10", "MRR@10", "Recall@100")
_CURVES = ((EVAL_LOG, "eval_ndcg@10"), (TRAIN_LOG, "loss"), (TRAIN_LOG, "learning_rate"))
"""Logs of the final training, each with a key that is plotted."""

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


def build_fit_page(folder: Path) -> str:
    """Return the page of a fit.

    Args:
        folder: folder of the fit, which holds ``fit.json``. The training logs are read from its
            folder ``trained`` or ``model``; without logs the page has no curves.

    Raises:
        DataError: a file cannot be read.
    """
    record = read_json(folder / "fit.json")
    settings = record["choice"]["settings"]
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
    setting_names: dict[str, None] = {}  # a set that keeps the order
    for trial in record["trials"]:
        setting_names.update(dict.fromkeys(trial["settings"]))
    picture_numbers = itertools.count(1)

    def render_svg(panel: Panel) -> str:
        return panel.to_svg(salt=str(next(picture_numbers)))

    # "model" may be a merge with the base model, or the model of a second stage.
    curves = _make_curves(folder / ("trained" if (folder / "trained").is_dir() else "model"))
    if record["curve"]:
        points = [(float(share), float(score)) for share, score in record["curve"]]
        curves.append(Panel("nDCG@10 on test", {"trained": points}, "share of training queries"))

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
        trials_panel=make_trials_panel(record),
        setting_names=setting_names,
        curves=curves,
        config=yaml.safe_dump(record["settings"], sort_keys=False, allow_unicode=True),
        guard=record.get("guard"),
        is_query_side=settings.get("method") == "query_side",
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


def make_trials_panel(record: Mapping[str, Any]) -> Panel | None:
    """Return a plot of the scores on dev by learning rate; None if no trial has both."""
    points_of_methods: dict[str, list[tuple[float, float]]] = {}
    chosen_points = []
    rates = []
    for trial in record["trials"]:
        rate = trial["settings"].get("learning_rate")
        if rate is None or trial["score"] is None:
            continue
        point = (float(rate), float(trial["score"]))
        method = str(trial["settings"]["method"])
        points_of_methods.setdefault(method, []).append(point)
        rates.append(float(rate))
        if trial["trial"] == record["choice"]["trial"]:
            chosen_points.append(point)
    if not rates:
        return None
    lines = {method: sorted(points) for method, points in points_of_methods.items()}
    lowest_rate = min(rates)
    highest_rate = max(rates)
    if lowest_rate < highest_rate:
        [base_score] = [row["dev"] for row in record["scores"] if "as it is" in row["name"]]
        lines["the model as it is"] = [(lowest_rate, base_score), (highest_rate, base_score)]
    lines["chosen"] = chosen_points
    return Panel("nDCG@10 on dev by learning rate", lines, "learning rate", log_x=True)


def _make_curves(model_folder: Path) -> list[Panel]:
    """Return plots of the final training; an empty list if there are no logs."""
    panels = []
    for name, key in _CURVES:
        log_file = model_folder / name
        if not log_file.is_file():
            continue
        # A killed process may have left a last line without its end.
        num_whole_lines = log_file.read_bytes().count(b"\n")
        points = []
        for line in read_log(log_file, num_whole_lines):
            if line.get(key) is not None:
                points.append((line["update"], line[key]))
        if points:
            panels.append(Panel(key, {"trained": points}))
    return panels


class Panel(NamedTuple):
    """A plot of lines.

    Attributes:
        title: the plotted value.
        lines: {name of the line: its points (x, y)}. The position of a name sets its colour.
        unit: label of the x axis.
        log_x: True for a logarithmic x axis.
    """

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
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
            axes: Any = figure.subplots()
            for position, points in enumerate(self.lines.values()):
                x_values, y_values = zip(*points, strict=True)
                marker = "." if len(points) < _FEW_POINTS else ""
                colour = f"C{position % 10}"
                axes.plot(x_values, y_values, color=colour, marker=marker, linewidth=1.4)
            axes.set_xlabel(self.unit)
            if self.unit == "update":
                axes.xaxis.get_major_locator().set_params(integer=True)
            if self.log_x:
                # matplotlib's own labels are formulas, which parse_math=False would show as text.
                ticks = sorted({x for points in self.lines.values() for x, _ in points})
                axes.set_xscale("log")
                axes.set_xticks(ticks, [f"{x:g}" for x in ticks], rotation=45)
                axes.minorticks_off()
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
