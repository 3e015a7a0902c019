"""HTML page of a finished `contaccum fit`: the verdict, two charts and what to do next come first.

A fit makes several ways to search (candidates), chooses one by its score on dev, and compares it on
test with the best one that needs no training. Questions with their passages, tables and settings
follow.

The page needs no network and no script. Its content is computed here; fit_page.html.j2 puts it into
words and tables, and Jinja escapes every text.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import yaml

from contaccum import __version__
from contaccum.evaluation.metrics import WORSE
from contaccum.redaction import redact

_FOLDER = Path(__file__).parent
_SHORT_TEXT = 300  # characters of a passage that are shown before it is opened
_NUM_OPEN = 3  # questions of each list that are open
_FIRST_RUNG_OF_NEW_DOCUMENTS = 3  # from this one on, candidates have new vectors of documents
_METRICS = ("NDCG@10", "MRR@10", "Recall@100")
RUNGS = ("no training", "linear map", "query tower", "both towers", "both towers, further")
"""The names of the rungs in the report."""

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
    return environment.get_template("fit_page.html.j2").render(
        record=record,
        data=show_path(record["data"]["path"]),
        folder=show_path(str(folder)),
        verdicts=record["verdicts"],
        kinds=[kind for kind in record["verdicts"] if kind in record["scores"][0]],
        folds=record["verdict"]["folds"],
        found=describe_found(record),
        next_steps=list_next_steps(record),
        charts=draw_charts(record),
        metrics=_METRICS,
        changes=[
            ("that gained most", changes["gained"], changes["num_gained"]),
            ("that lost most", changes["lost"], changes["num_lost"]),
            ("that still fail", changes["failing"], changes["num_failing"]),
        ],
        num_open=_NUM_OPEN,
        short_text=_SHORT_TEXT,
        join_title_and_text=join_title_and_text,
        dev_kinds=[kind for kind in candidates[0]["scores"] if kind != "all"],  # it is the mean
        chosen=chosen,
        recommended=candidates[record["recommended"]],
        config=yaml.safe_dump(
            {name: show_path(value) for name, value in chosen["settings"].items()},
            sort_keys=False,
            allow_unicode=True,
        ),
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


def describe_found(record: Mapping[str, Any]) -> str:
    """Return how many questions find a right passage among the first five, as a sentence."""
    first = record["changes"]["first"]
    found = f"for {first['after']:,} of {record['split']['test']:,} questions"
    sentence = f"The right passage is among the first five {found}"
    if record["chosen"] == record["free"]:
        return f"{sentence}, without training."
    return f"{sentence}; with the best search that needs no training, for {first['before']:,}."


def list_next_steps(record: Mapping[str, Any]) -> list[str]:
    """Return three sentences: what to use, what it needs, and what would help further."""
    recommended = record["candidates"][record["recommended"]]
    num_failing = record["changes"]["num_failing"]
    name = recommended["name"] + (" with BM25" if 0 < recommended["bm25_weight"] < 1 else "")
    if recommended["rung"] > 0:
        steps = [f"Use {name}, which is in the folder model: see “Load and serve” below."]
        if recommended["rung"] < _FIRST_RUNG_OF_NEW_DOCUMENTS:
            steps.append(
                f"Keep your index: the vectors of documents are those of {record['model']}. Only "
                "questions are encoded by the new model."
            )
        else:
            steps.append("Encode all documents with the new model: their vectors have changed.")
    else:
        verdict = record["verdict"]
        steps = [f"Keep {name}: no training is needed. See “Load and serve” below."]
        steps.append(
            f"To gain by training, add pairs of the questions that users ask (training had "
            f"{record['split']['train']:,}), give it more time with --budget, or try other base "
            "models with --model A B C."
            if verdict["word"] != WORSE
            else "Look for what differs between training and test: the kinds of questions, their "
            "language, or pairs that do not match."
        )
    steps.append(
        f"Read the {num_failing:,} questions whose right passage neither search has among the "
        "first ten, at the end of the lists below. Is it in the corpus, and is another one right "
        "as well? Pairs of their kind help training most."
        if num_failing
        else "Every question has a right passage among the first ten: collect harder questions, so "
        "that a later fit can show a gain."
    )
    return steps


def join_title_and_text(document: Mapping[str, str]) -> str:
    """Return a document's title, as a sentence, followed by its text."""
    title = document.get("title") or ""
    if not title:
        return document["text"]
    if not title.endswith((".", "?", "!")):
        title += "."
    return f"{title} {document['text']}"


def draw_charts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the title and the SVG element of two charts: the ladder on dev, and the test."""
    import matplotlib
    from matplotlib.figure import Figure

    charts = []
    for title, draw in (
        ("nDCG@10 on dev, by the minutes after which each candidate was there", draw_ladder),
        (
            "nDCG@10 on test, with the 95% interval of the difference from the dashed line",
            draw_test,
        ),
    ):
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
            label = f"{candidate['number']}"
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
