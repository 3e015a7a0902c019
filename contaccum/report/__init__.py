"""One HTML page of runs, evaluations and comparisons that needs nothing else: no network and no script.

What lies at a path is read here, what is said of it worked out, and curves are drawn, each as an SVG inside the page or
side by side in a PNG; page.html.j2 puts the rest into words and tables. Jinja escapes every text, matplotlib those of
its pictures, and the page's policy lets nothing run and nothing load.
"""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from contaccum import __version__
from contaccum.comparison.report import COST, METRICS, NOTES, table_rows, template
from contaccum.errors import ConfigError, UserError
from contaccum.evaluation.metrics import MAIN_METRICS, add_holm
from contaccum.evaluation.results import read_result, result_files
from contaccum.evaluation.tables import compare_queries
from contaccum.files import read_json, redact
from contaccum.training.log import EVAL_LOG, RUN_RECORD, TRAIN_LOG, CollapseWatch, read_log

_HERE = Path(__file__).parent
_REPORT = "report.json"
_SHOWN = 50  # gains, and losses, that are listed
Log = Sequence[Mapping[str, Any]]


@dataclass
class Source:
    """What one command left: a run's `run.json`, an evaluation's result or a comparison's `report.json`; and its logs.

    ``logs`` are by name of the file, or, of a comparison, by name of its run, where the runs lie beside it.
    """

    kind: str
    name: str
    record: Mapping[str, Any]
    logs: Mapping[str, Log] = field(default_factory=dict)


def build_page(paths: Sequence[Path], metric: str | None = None) -> str:
    """The page of all that lies at some paths, as one text.

    Args:
        metric: what evaluations are compared by; None: nDCG@10, or the first main metric that all have.

    Raises:
        UserError: a path that is nothing to report of; a metric that no result has.
    """
    sources = [source for path in paths for source in _read_source(path)]
    for number, source in enumerate(sources):  # everything is by name, so that names must differ
        same = [other.name for other in sources[:number]].count(source.name)
        source.name += f" ({number + 1})" if same else ""
    runs, evaluations, comparisons = (
        [one for one in sources if one.kind == kind] for kind in ("run", "evaluation", "comparison")
    )
    # Texts are redacted before they are escaped.
    how: Any = {"autoescape": True, "finalize": lambda value: redact(value) if type(value) is str else value}
    return template(_HERE / "page.html.j2", **how).render(
        title=", ".join(source.name for source in sources)[:120],
        training=_training(runs),
        evaluations=_evaluations(evaluations, metric),
        comparisons=[(one, _warnings(one.logs), comparison_panels(one)) for one in comparisons],
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        svg=to_svg,
        about={"cost": COST, "notes": NOTES, "metrics": METRICS, "rows": table_rows, "shown": _SHOWN},
        made=f"contaccum {__version__}, {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    )


def _read_source(path: Path) -> Iterator[Source]:
    """What the path holds, known by what lies there: one thing, or the results of an evaluation of several sets."""
    content = read_json(path) if path.is_file() else {}
    if (path / _REPORT).is_file() or {"groups", "comparisons", "entries"} <= content.keys():
        yield read_comparison(path if content else path / _REPORT)
    elif (path / RUN_RECORD).is_file():
        logs = {name: _log(path / name) for name in (TRAIN_LOG, EVAL_LOG)}
        yield Source("run", path.resolve().name, read_json(path / RUN_RECORD), logs)
    elif "sets" in content or {"metrics", "per_query", "data"} <= content.keys():
        for file in result_files(path):
            record = read_result(file)
            yield Source("evaluation", Path((record.get("model") or {}).get("name") or file.stem).name, record)
    else:
        mend = "give a folder of `contaccum train` or `compare`, or a file of `contaccum evaluate` or `open_qa`"
        raise UserError(f"{path}: nothing that can be reported ({mend})")


def read_comparison(path: Path) -> Source:
    """A comparison's `report.json`, and the logs of its runs where they lie beside it."""
    report = read_json(path)
    logs = {name: _log(path.parent / "runs" / Path(name).name / TRAIN_LOG) for name in report["runs"]}
    return Source("comparison", path.resolve().parent.name, report, logs)


def _log(path: Path) -> Log:
    """The records of a log, none where there is no file; a last line that a kill cut short is left out."""
    return read_log(path, path.read_bytes().count(b"\n")) if path.is_file() else []


def _training(runs: Sequence[Source]) -> dict[str, Any]:
    """Each run's figures and settings, which settings differ, and curves."""
    logs, curves = ({run.name: run.logs[file] for run in runs} for file in (TRAIN_LOG, EVAL_LOG))
    rows = []
    for run in runs:
        log = logs[run.name]
        scores = [(point["eval_ndcg@10"], point["update"]) for point in curves[run.name] if "eval_ndcg@10" in point]
        row: dict[str, Any] = {"name": run.name, "record": run.record, "best": max(scores, default=None)}
        row["settings"] = {key: str(x) for key, x in run.record["arguments"].items() if key != "output_dir"}
        row |= {"last": log[-1]["update"] if log else 0, "loss": log[-1]["loss"] if log else None}
        row["seconds"] = statistics.median([record["seconds"] for record in log] or [0.0])
        row["memory"] = max((record["peak_memory_mb"] for record in log), default=0.0)
        rows.append(row)
    figures = dict.fromkeys(key for curve in curves.values() for point in curve for key in point if "@" in key)
    keys = dict.fromkeys(key for row in rows for key in row["settings"])
    panels = log_panels({name: [curve] for name, curve in curves.items()}, list(figures))
    return {
        "runs": rows,
        "differing": [key for key in keys if len({row["settings"].get(key, "") for row in rows}) > 1],
        "warnings": _warnings(logs),
        "panels": panels + log_panels({name: [log] for name, log in logs.items()}),
    }


def _warnings(logs: Mapping[str, Log]) -> list[str]:
    """Collapses that logs show, by the rules that warned while they were written, and updates that were skipped."""
    lines = []
    for name, log in logs.items():
        watch = CollapseWatch()
        found = [line for record in log for line in watch.observe(record)]
        found += [f"update {record['update']}: skipped, not finite" for record in log if record.get("skipped")]
        lines += [f"{name}: {line[:300]}" for line in found]
    return lines


def _evaluations(evaluations: Sequence[Source], metric: str | None) -> list[dict[str, Any]]:
    """For each data set its results, the metrics that all have, and each result beside the first."""
    known = dict.fromkeys(name for one in evaluations for name in one.record["metrics"])
    if metric is not None and evaluations and metric not in known:
        raise ConfigError(f"--metric {metric}: no result has it; there are {', '.join(known)}")
    same_data: dict[tuple[Any, ...], list[Source]] = {}
    identity = ("fingerprint", "split", "questions_fingerprint", "passages_fingerprint", "match")
    for one in evaluations:
        same_data.setdefault(tuple(one.record["data"].get(name) for name in identity), []).append(one)
    sections = []
    for found in same_data.values():
        first, *others = found
        names = dict.fromkeys((*([metric] if metric else []), *MAIN_METRICS, *first.record["metrics"]))
        shown = [name for name in names if all(name in one.record["metrics"] for one in found)]
        pairs = []
        for other in others if shown else ():
            ours, theirs = ({q: x[shown[0]] for q, x in one.record["per_query"].items()} for one in (other, first))
            pairs.append({**compare_queries(ours, theirs, shown=_SHOWN), "name": other.name})
        add_holm(pairs)
        sections.append({"data": first.record["data"], "results": found, "shown": shown[:6], "pairs": pairs})
    return sections


def comparison_panels(one: Source) -> list[Panel]:
    """Curves of the main metric by update and by second, and of the runs' logs, each setting's seeds together."""
    main, title = next(iter(METRICS.items()))
    members: dict[str, list[Any]] = {_label(group): [] for group in one.record["groups"].values()}
    for run in one.record["runs"].values():
        members[_label(run)].append(run)
    panels = []
    tuning = one.record.get("tuning")
    if tuning:
        # All names in the same order as in other panels, since the place of a name is its colour.
        points: dict[str, list[Any]] = {label: [] for label in members}
        for group in tuning["groups"].values():
            if group["final"]:
                scored = [(float(value), score) for value, score in group["scores"].items() if score is not None]
                points[_label(one.record["groups"][group["final"]])] = [scored]
        panels.append(Panel(f"{title} on dev by {tuning['key']}", points, tuning["key"], log_x=True))
    for unit, key in (("update", "update"), ("seconds of training", "train_seconds")):
        curves = {label: [run["curve"] for run in runs] for label, runs in members.items()}
        panels += [Panel(f"{title} by {unit}", x.lines, unit) for x in log_panels(curves, [main], key)]
    return panels + log_panels({label: [one.logs[run["name"]] for run in runs] for label, runs in members.items()})


def _label(group: Mapping[str, Any]) -> str:
    return ", ".join([group["entry"], *(f"{key}={value}" for key, value in group["labels"].items())])


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
    *("masked", "embedding_spread", "peak_memory_mb"),
)


class Panel(NamedTuple):
    """A picture: lines over updates, say; of each the mean over runs, and a band from the lowest to the highest.

    Attributes:
        lines: name -> the points of one run, or of several that differ by the seed; of none, nothing is drawn. The
            place of a name is its colour.
    """

    title: str
    lines: Mapping[str, Sequence[Any]]
    unit: str = "update"
    log_x: bool = False

    def draw(self, axes: Any) -> None:
        """Onto axes of matplotlib."""
        for series, (name, found) in enumerate(self.lines.items()):
            length = min(map(len, found), default=0)
            if not length:
                continue
            runs = np.asarray([points[:length] for points in found], dtype=float)
            x, y = runs[..., 0].mean(axis=0), runs[..., 1]
            colour, marker = f"C{series % 10}", "." if length < 40 else ""
            axes.plot(x, y.mean(axis=0), color=colour, marker=marker, linewidth=1.4, label=name)
            if len(runs) > 1:
                axes.fill_between(x, y.min(axis=0), y.max(axis=0), color=colour, alpha=0.15, linewidth=0)
        axes.set_xlabel(self.unit)
        if self.log_x:  # ticked where points are: matplotlib's own ticks are formulas, which are not set here
            ticks = sorted({x for found in self.lines.values() for points in found for x, _ in points})
            axes.set_xscale("log")
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks], rotation=45)
            axes.minorticks_off()


def log_panels(logs: Mapping[str, Sequence[Log]], keys: Sequence[str] = _DRAWN, x: str = "update") -> list[Panel]:
    """A picture of every key that some log holds: name -> the log of one run, or those of several seeds."""

    def points(log: Log, key: str) -> list[tuple[float, float]]:
        return [(record[x], record[key]) for record in log if record.get(key) is not None]

    panels = [Panel(key, {name: [points(log, key) for log in found] for name, found in logs.items()}) for key in keys]
    return [panel for panel in panels if any(map(any, panel.lines.values()))]


def save_png(panels: Sequence[Panel], path: Path) -> None:
    """All panels in one picture, three in a row."""
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
