"""The HTML page of a finished `contaccum fit`: the verdict first, then texts, trials and settings.

It needs no network and no script. The content is computed here; fit_page.html.j2 puts it into
words and tables, and Jinja escapes every text.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from contaccum import __version__
from contaccum.comparison.summary import template
from contaccum.files import read_json
from contaccum.report.page import STYLE_FILE, redact_text
from contaccum.report.panels import EVAL_METRIC, Panel, log_panels, to_svg
from contaccum.report.sources import Log, read_whole_lines
from contaccum.training.log import EVAL_LOG, TRAIN_LOG

_TEMPLATE = Path(__file__).with_name("fit_page.html.j2")
_SHORT_TEXT = 300  # characters of a passage that are shown at once
_METRICS = ("NDCG@10", "MRR@10", "Recall@100")
_SHOWN_CURVES = (EVAL_METRIC, "loss", "learning_rate")


def build_fit_page(folder: Path) -> str:
    """Return the page of a fit.

    Args:
        folder: with ``fit.json``, and the logs of the training in ``model``; without these there
            are no curves.

    Raises:
        DataError: for a file that cannot be read.
    """
    record = read_json(folder / "fit.json")
    settings = record["choice"]["settings"]
    picture_numbers = itertools.count(1)
    page = template(_TEMPLATE, autoescape=True, finalize=redact_text)
    return page.render(
        record=record,
        verdict=record["verdict"],
        metrics=_METRICS,
        changes=[
            ("gained", record["changes"]["gained"], record["changes"]["num_gained"]),
            ("lost", record["changes"]["lost"], record["changes"]["num_lost"]),
        ],
        short_text=_SHORT_TEXT,
        title_and_text=title_and_text,
        trials_panel=trials_panel(record),
        setting_names=_setting_names(record["trials"]),
        curves=_curves(folder / "model"),
        config=yaml.safe_dump(record["settings"], sort_keys=False, allow_unicode=True),
        is_query_side=settings.get("method") == "query_side",
        folder=folder,
        style=STYLE_FILE.read_text(encoding="utf-8"),
        svg=lambda panel: to_svg(panel, salt=str(next(picture_numbers))),
        made=f"contaccum {__version__}, {record['made_with']['time']}",
    )


def title_and_text(document: Mapping[str, str]) -> str:
    """Return a document's title and text as one text."""
    title = document.get("title") or ""
    if not title:
        return document["text"]
    end = "" if title.endswith((".", "?", "!")) else "."
    return f"{title}{end} {document['text']}"


def trials_panel(record: Mapping[str, Any]) -> Panel | None:
    """Return the plot of dev scores by learning rate; None if no trial has both."""
    lines: dict[str, list[Sequence[tuple[float, float]]]] = {}
    chosen = []
    for trial in record["trials"]:
        rate = trial["settings"].get("learning_rate")
        if rate is None or trial["score"] is None:
            continue
        point = (float(rate), float(trial["score"]))
        method = str(trial["settings"]["method"])
        lines.setdefault(method, []).append([point])
        if trial["trial"] == record["choice"]["trial"]:
            chosen.append(point)
    if not lines:
        return None
    by_method = {}
    rates: set[float] = set()
    for method, points in lines.items():
        in_order = sorted(point for [point] in points)
        rates.update(rate for rate, _ in in_order)
        by_method[method] = [in_order]
    base = next(row["dev"] for row in record["scores"] if "as it is" in row["name"])
    if len(rates) > 1:
        by_method["the model as it is"] = [[(min(rates), base), (max(rates), base)]]
    by_method["chosen"] = [chosen]
    return Panel("nDCG@10 on dev by learning rate", by_method, "learning rate", log_x=True)


def _setting_names(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of all settings that trials differ by, in their order."""
    names: dict[str, None] = {}
    for trial in trials:
        names.update(dict.fromkeys(trial["settings"]))
    return list(names)


def _curves(model_folder: Path) -> list[Panel]:
    """Return plots of the final training, as far as there are logs."""
    logs: dict[str, list[Log]] = {}
    for name in (EVAL_LOG, TRAIN_LOG):
        logs[name] = [read_whole_lines(model_folder / name)]
    panels = []
    for name in logs:
        panels += log_panels({"trained": logs[name]}, _SHOWN_CURVES)
    return panels
