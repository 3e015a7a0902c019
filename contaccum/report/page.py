"""One HTML page of runs, evaluations and comparisons that needs nothing else: no network, and no script but its own.

What lies at a path is read here, and what is said of it worked out; page.html.j2 puts it into words and tables. Jinja
escapes every text, matplotlib those of its pictures, and a content security policy lets no other script run and nothing
load.
"""

from __future__ import annotations

import base64
import hashlib
import json
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from contaccum.comparison.report import COST, METRICS, NOTES, table_rows
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.evaluation.metrics import MAIN_METRICS, holm
from contaccum.evaluation.results import read_result, result_files
from contaccum.evaluation.tables import compare_queries
from contaccum.files import read_json, redact
from contaccum.report.charts import Log, Panel, difference_panel, is_number, line_panel, log_panels, to_svg
from contaccum.training.log import EVAL_LOG, RUN_RECORD, TRAIN_LOG, CollapseWatch, read_log
from contaccum.version import __version__

RUN, COMPARISON, EVALUATION = "run", "comparison", "evaluation"

_HERE = Path(__file__).parent
_REPORT = "report.json"
_MAIN = next(iter(METRICS))
_SHOWN = 50  # gains, and losses, that are listed


@dataclass
class Source:
    """What one command left.

    Attributes:
        kind: RUN, EVALUATION (on one data set) or COMPARISON.
        record: `run.json`, the result of the evaluation, or the comparison's `report.json`.
        log, evaluations: of a run, a record per update and one per evaluation while training.
        logs: of a comparison, by name of the run, where the runs lie beside it.
    """

    kind: str
    path: Path
    name: str
    record: Mapping[str, Any]
    log: Log = ()
    evaluations: Log = ()
    logs: Mapping[str, Log] = field(default_factory=dict)


def build_page(paths: Sequence[Path], metric: str | None = None, title: str | None = None) -> str:
    """The page of all that lies at some paths, as one text.

    Args:
        metric: what evaluations are compared by; None: nDCG@10, or the first main metric that all have.

    Raises:
        UserError: a path that is nothing to report of, or is damaged; a metric that no result has.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

    sources = [source for path in paths for source in read_source(path)]
    for number, source in enumerate(sources):  # everything is by name, so that names must differ
        same = [other.name for other in sources[:number]].count(source.name)
        source.name += f" ({number + 1})" if same else ""
    templates = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: redact(value) if type(value) is str else value,  # before it is escaped
    )
    templates.filters["plain"] = plain
    style, script = ((_HERE / name).read_text(encoding="utf-8").strip() for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    try:
        page = templates.get_template("page.html.j2").render(
            title=title or ", ".join(source.name for source in sources)[:120],
            training=_training([one for one in sources if one.kind == RUN]),
            evaluations=_evaluations([one for one in sources if one.kind == EVALUATION], metric),
            comparisons=[_comparison(one) for one in sources if one.kind == COMPARISON],
            style=style,
            script=script,
            # Styles stand beside what they are of, as matplotlib writes them; they can neither run nor load anything.
            policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'",
            svg=to_svg,
            about={"cost": COST, "notes": NOTES, "metrics": METRICS, "rows": table_rows, "shown": _SHOWN},
            made=f"contaccum {__version__}, {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        )
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, TemplateError) as error:
        where = ", ".join(str(source.path) for source in sources)
        raise DataError(f"{where}: damaged: does not hold what contaccum writes ({error!r})") from error
    return redact(page)


def plain(value: Any) -> str:
    """A setting as one writes it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# What lies at a path -------------------------------------------------------------------------------------------------


def read_source(path: Path) -> Iterator[Source]:
    """What the path holds, known by what lies there: one thing, or the results of an evaluation of several sets.

    Raises:
        UserError: nothing that can be reported, or damaged.
    """
    content = read_json(path) if path.is_file() else {}
    if (path / _REPORT).is_file() or {"groups", "comparisons", "entries"} <= content.keys():
        yield read_comparison(path if content else path / _REPORT)
    elif (path / RUN_RECORD).is_file() or (path / TRAIN_LOG).is_file():
        run = read_json(path / RUN_RECORD) if (path / RUN_RECORD).is_file() else {}
        yield Source(RUN, path, path.resolve().name, run, _log(path / TRAIN_LOG), _log(path / EVAL_LOG))
    elif "sets" in content or {"metrics", "per_query", "data"} <= content.keys():
        for file in result_files(path):
            record = read_result(file)
            yield Source(EVALUATION, file, Path((record.get("model") or {}).get("name") or file.stem).name, record)
    else:
        raise UserError(
            f"{path}: nothing that can be reported (give a folder of `contaccum train` or `contaccum compare`, or a "
            "file of `contaccum evaluate` or `contaccum open_qa`)"
        )


def read_comparison(path: Path) -> Source:
    """A comparison's `report.json`, and the results and logs of its runs where they lie beside it."""
    report = read_json(path)
    logs = {name: _log(path.parent / "runs" / Path(name).name / TRAIN_LOG) for name in report.get("runs", {})}
    return Source(COMPARISON, path, path.resolve().parent.name, report, logs=logs)


def _log(path: Path) -> Log:
    """The records of a log, none where there is no file; a last line that a kill cut short is left out."""
    return read_log(path, path.read_bytes().count(b"\n")) if path.is_file() else []


def _query_texts(data: Mapping[str, Any]) -> dict[str, str]:
    """{query id: text} of a BEIR folder that was scored, if it still lies where it did; else nothing."""
    path = Path(str(data.get("path"))) / "queries.jsonl"
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {str(record["_id"]): str(record["text"]) for record in records}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


# Training runs -------------------------------------------------------------------------------------------------------


def _training(runs: Sequence[Source]) -> dict[str, Any]:
    """Beside each run: its best figure, last loss, median seconds, peak of memory, settings."""
    settings = {run.name: _settings(run.record) for run in runs}
    keys = dict.fromkeys(key for one in settings.values() for key in one)
    figures = dict.fromkeys(key for run in runs for point in run.evaluations for key in point if _is_figure(key))
    return {
        "runs": [
            {
                "of": run,
                "last": run.log[-1]["update"] if run.log else 0,
                "loss": next(reversed(_numbers(run.log, "loss")), None),
                "best": _best(run, list(figures)),
                "seconds": statistics.median(_numbers(run.log, "seconds") or [0.0]),
                "memory": max(_numbers(run.log, "peak_memory_mb"), default=0.0),
                "settings": settings[run.name],
            }
            for run in runs
        ],
        "differing": [key for key in keys if len({one.get(key, "") for one in settings.values()}) > 1],
        "warnings": [line for run in runs for line in _warnings(run.name, run.log)],
        "panels": [
            *log_panels({run.name: [run.evaluations] for run in runs}, list(figures)),
            *log_panels({run.name: [run.log] for run in runs}),
        ],
        "names": [run.name for run in runs],
    }


def _settings(record: Mapping[str, Any]) -> dict[str, str]:
    hidden = ("output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "disable_tqdm", "data sets")
    found = dict(record.get("arguments") or {})
    for part in ("data", "model", "evaluation"):
        found |= {f"{part} {key}": value for key, value in (record.get(part) or {}).items()}
    return {key: plain(value) for key, value in found.items() if key not in hidden and value is not None}


def _is_figure(key: str) -> bool:
    return key == "eval_loss" or (key.startswith("eval_") and "@" in key)


def _best(run: Source, figures: Sequence[str]) -> tuple[str, float, int] | None:
    """The metric that the run chose its best by (else the first figure), its best value while training, and when."""
    chosen = "eval_" + str((run.record.get("arguments") or {}).get("metric_for_best_model")).removeprefix("eval_")
    figure = next((key for key in (chosen, *figures) if key in figures), "")
    points = [(point[figure], point["update"]) for point in run.evaluations if is_number(point.get(figure))]
    if not points:
        return None
    return (figure[5:], *(min if figure == "eval_loss" else max)(points, key=lambda point: point[0]))


def _warnings(name: str, log: Log) -> list[str]:
    """Collapses that a log shows, by the rules that warned while it was written, and updates that were skipped."""
    watch = CollapseWatch()
    found = [line for record in log for line in watch.observe(record)]
    skipped = [str(record["update"]) for record in log if record.get("skipped")]
    if skipped:
        found.append(f"{len(skipped)} updates were skipped, a loss or gradient not being finite: {', '.join(skipped)}")
    return [f"{name}: {line[:300]}" for line in found]


def _numbers(log: Log, key: str) -> list[float]:
    return [record[key] for record in log if is_number(record.get(key))]


# Evaluations ---------------------------------------------------------------------------------------------------------


def _evaluations(evaluations: Sequence[Source], metric: str | None) -> list[dict[str, Any]]:
    """For each data set its results, the metrics that all have, and each result beside the first."""
    known = dict.fromkeys(name for one in evaluations for name in one.record["metrics"])
    if metric is not None and evaluations and metric not in known:
        raise ConfigError(f"--metric {metric}: no result has it; there are {', '.join(known) or 'none'}")
    same_data: dict[tuple[Any, ...], list[Source]] = {}
    identity = ("fingerprint", "split", "questions_fingerprint", "passages_fingerprint", "match")
    for one in evaluations:
        same_data.setdefault(tuple(one.record["data"].get(name) for name in identity), []).append(one)
    sections = []
    for first, *others in same_data.values():
        names = dict.fromkeys((*([metric] if metric else []), *MAIN_METRICS, *first.record["metrics"]))
        shown = [n for n in names if all(is_number(one.record["metrics"].get(n)) for one in (first, *others))]
        chosen = next(iter(shown), "")
        scores = {
            one.name: {query: values[chosen] for query, values in one.record["per_query"].items() if chosen in values}
            for one in (first, *others)
        }
        same = [
            one.name for one in others if scores[first.name] and scores[one.name].keys() == scores[first.name].keys()
        ]
        pairs = [_beside(name, scores[name], first.name, scores[first.name], chosen) for name in same]
        for pair, p_holm in zip(pairs, holm([pair["p_value"] for pair in pairs]), strict=True):
            pair["p_holm"] = p_holm
        sections.append(
            {
                "data": first.record["data"],
                "results": [first, *others],
                "shown": shown[:6],
                "not_compared": [other.name for other in others if other.name not in same],
                "pairs": pairs,
                "texts": _query_texts(first.record["data"]) if pairs else {},
            }
        )
    return sections


def _beside(
    name: str, scores: Mapping[str, float], baseline: str, others: Mapping[str, float], metric: str
) -> dict[str, Any]:
    """What `compare_queries` says of a result beside the baseline, and a picture of it."""
    found = compare_queries(scores, others, shown=_SHOWN)
    note = "{wins:,} better, {ties:,} equal, {losses:,} worse".format(**found)
    changes = [score - others[query] for query, score in scores.items()]
    panel = difference_panel(f"{name} against {baseline}, {metric} by query", changes, note)
    return {**found, "name": name, "baseline": baseline, "panel": panel}


# Comparisons ---------------------------------------------------------------------------------------------------------


def _comparison(one: Source) -> dict[str, Any]:
    """Beside the report: its tables, pictures, and what its logs warn of."""
    report, groups = one.record, one.record["groups"]
    tables = dict.fromkeys((data, metric) for g in groups.values() for data, m in g["metrics"].items() for metric in m)
    return {
        "name": one.name,
        "report": report,
        "tables": sorted(tables, key=lambda pair: pair[1] != _MAIN),
        "warnings": [line for name, log in one.logs.items() for line in _warnings(name, log)],
        "panels": comparison_panels(one),
        "names": list(map(_label, groups.values())),
    }


def comparison_panels(one: Source, only: Collection[str] | None = None) -> list[Panel]:
    """Curves of the main metric by update and by second, and of the runs' logs.

    Args:
        only: names of the groups that are drawn; None: all.
    """
    runs = one.record["runs"].values()
    groups = [group for name, group in one.record["groups"].items() if only is None or name in only]
    members = {
        _label(group): [run for run in runs if (run["entry"], run["labels"]) == (group["entry"], group["labels"])]
        for group in groups
    }
    panels = []
    for unit, key in (("update", "update"), ("seconds of training", "train_seconds")):
        lines = {
            label: [[(point[key], point[_MAIN]) for point in run["curve"]] for run in found]
            for label, found in members.items()
        }
        title = f"{METRICS[_MAIN]} by {unit}"
        panels += [line_panel(title, lines, "mean over seeds", unit)] if any(map(any, lines.values())) else []
    logs = {label: [one.logs[run["name"]] for run in found] for label, found in members.items()}
    return [*panels, *log_panels(logs)]


def _label(group: Mapping[str, Any]) -> str:
    return ", ".join([group["entry"], *(f"{key}={value}" for key, value in group["labels"].items())])
