"""One HTML page of runs, evaluations and comparisons that needs nothing else: no network and no script.

The content of the page is worked out here; page.html.j2 puts it into words and tables. Jinja escapes every text,
matplotlib escapes those of its plots, and the page's policy lets no script run and nothing load.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from contaccum import __version__
from contaccum.comparison.report import COST, METRICS, NOTES, table_rows, template
from contaccum.errors import ConfigError
from contaccum.evaluation.metrics import MAIN_METRICS, add_holm
from contaccum.evaluation.tables import compare_queries
from contaccum.files import redact
from contaccum.report.panels import comparison_panels, log_panels, to_svg
from contaccum.report.sources import Log, Source, read_source
from contaccum.training.log import EVAL_LOG, TRAIN_LOG, CollapseWatch

_FOLDER = Path(__file__).parent
_MAX_CHANGES = 50  # gains, and losses, that are listed for a pair of results
_MAX_METRICS = 6  # columns of a table of results
_EVAL_METRIC = "eval_ndcg@10"  # the metric of eval_log.jsonl that a run's best evaluation is chosen by
# Entries of an evaluation's "data" that are equal for results on the same data.
_DATA_IDENTITY = ("fingerprint", "split", "questions_fingerprint", "passages_fingerprint", "match")


def build_page(paths: Sequence[Path], metric: str | None = None) -> str:
    """Return the page of the runs, evaluations and comparisons at some paths.

    Args:
        metric: the metric that evaluations are compared by; None: nDCG@10, or the first main metric that all have.

    Raises:
        UserError: a path holds nothing that can be reported.
        ConfigError: no result has the metric.
    """
    sources = [source for path in paths for source in read_source(path)]
    for number, source in enumerate(sources):  # everything is by name, so that names must differ
        same = [other.name for other in sources[:number]].count(source.name)
        source.name += f" ({number + 1})" if same else ""
    comparisons = [source for source in sources if source.kind == "comparison"]
    page = template(_FOLDER / "page.html.j2", autoescape=True, finalize=_redact_text)
    return page.render(
        title=", ".join(source.name for source in sources)[:120],
        training=_training([source for source in sources if source.kind == "run"]),
        evaluations=_evaluations([source for source in sources if source.kind == "evaluation"], metric),
        comparisons=[(source, _warnings(source.logs), comparison_panels(source)) for source in comparisons],
        style=(_FOLDER / "page.css").read_text(encoding="utf-8"),
        svg=to_svg,
        cost=COST,
        notes=NOTES,
        metrics=METRICS,
        table_rows=table_rows,
        max_changes=_MAX_CHANGES,
        made=f"contaccum {__version__}, {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    )


def _redact_text(value: Any) -> Any:
    """Blank credentials in a plain text; Jinja calls this before it escapes the text. Markup is left as it is."""
    return redact(value) if type(value) is str else value


def _training(runs: Sequence[Source]) -> dict[str, Any]:
    """Return each run's figures and settings, the settings that differ, warnings and curves."""
    train_logs = {run.name: run.logs[TRAIN_LOG] for run in runs}
    eval_logs = {run.name: run.logs[EVAL_LOG] for run in runs}
    rows = [_run_row(run) for run in runs]
    settings = dict.fromkeys(key for row in rows for key in row["settings"])
    eval_keys = dict.fromkeys(key for log in eval_logs.values() for record in log for key in record if "@" in key)
    eval_panels = log_panels({name: [log] for name, log in eval_logs.items()}, list(eval_keys))
    return {
        "runs": rows,
        "differing": [key for key in settings if len({row["settings"].get(key, "") for row in rows}) > 1],
        "warnings": _warnings(train_logs),
        "panels": eval_panels + log_panels({name: [log] for name, log in train_logs.items()}),
    }


def _run_row(run: Source) -> dict[str, Any]:
    """Return the figures of a training run for its row of the table, and its settings."""
    log = run.logs[TRAIN_LOG]
    evaluations = [record for record in run.logs[EVAL_LOG] if _EVAL_METRIC in record]
    scores = [(record[_EVAL_METRIC], record["update"]) for record in evaluations]
    arguments = run.record["arguments"]
    return {
        "name": run.name,
        "record": run.record,
        "settings": {key: str(value) for key, value in arguments.items() if key != "output_dir"},
        "best": max(scores, default=None),
        "last": log[-1]["update"] if log else 0,
        "loss": log[-1]["loss"] if log else None,
        "seconds": statistics.median([record["seconds"] for record in log] or [0.0]),
        "memory": max((record["peak_memory_mb"] for record in log), default=0.0),
    }


def _warnings(logs: Mapping[str, Log]) -> list[str]:
    """Return a line for each collapse that a log shows, by the rules of training, and for each skipped update.

    Args:
        logs: {name of the run: its training log}.
    """
    lines = []
    for name, log in logs.items():
        watch = CollapseWatch()
        warnings = [warning for record in log for warning in watch.observe(record)]
        warnings += [f"update {record['update']}: skipped, not finite" for record in log if record.get("skipped")]
        lines += [f"{name}: {warning[:300]}" for warning in warnings]
    return lines


def _evaluations(evaluations: Sequence[Source], metric: str | None) -> list[dict[str, Any]]:
    """Return, for each data set, its results, the metrics that all of them have, and each result against the first."""
    available = dict.fromkeys(name for source in evaluations for name in source.record["metrics"])
    if metric is not None and evaluations and metric not in available:
        raise ConfigError(f"--metric {metric}: no result has it; there are {', '.join(available)}")
    by_data: dict[tuple[Any, ...], list[Source]] = {}
    for source in evaluations:
        identity = tuple(source.record["data"].get(name) for name in _DATA_IDENTITY)
        by_data.setdefault(identity, []).append(source)
    return [_data_section(results, metric) for results in by_data.values()]


def _data_section(results: Sequence[Source], metric: str | None) -> dict[str, Any]:
    """Return the content of the section of one data set, for the results on it."""
    first, *others = results
    preferred = [metric] if metric else []
    names = dict.fromkeys([*preferred, *MAIN_METRICS, *first.record["metrics"]])
    common = [name for name in names if all(name in source.record["metrics"] for source in results)]
    pairs = []
    if common:
        first_scores = _scores_by_query(first, common[0])
        for other in others:
            changes = compare_queries(_scores_by_query(other, common[0]), first_scores, shown=_MAX_CHANGES)
            pairs.append({**changes, "name": other.name})
    add_holm(pairs)
    return {"data": first.record["data"], "results": results, "metrics": common[:_MAX_METRICS], "pairs": pairs}


def _scores_by_query(evaluation: Source, metric: str) -> dict[str, float]:
    return {query: scores[metric] for query, scores in evaluation.record["per_query"].items()}
