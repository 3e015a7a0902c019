"""One HTML page of runs, evaluations and comparisons, which needs no network and no script.

The content of the page is computed here; page.html.j2 puts it into words and tables. Jinja escapes
every text, matplotlib escapes those of its plots, and the page's policy lets no script run and
nothing load.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from contaccum import __version__
from contaccum.comparison.summary import COST, METRICS, NOTES, join_words, table_rows, template
from contaccum.errors import ConfigError
from contaccum.evaluation.metrics import MAIN_METRICS, add_holm
from contaccum.evaluation.tables import compare_queries
from contaccum.files import redact
from contaccum.report.panels import EVAL_METRIC, comparison_panels, log_panels, to_svg
from contaccum.report.sources import Log, Source, read_source
from contaccum.training.log import EVAL_LOG, TRAIN_LOG, CollapseWatch

_FOLDER = Path(__file__).parent
STYLE_FILE = _FOLDER / "page.css"
_MAX_CHANGES = 50  # gains, and losses, that are listed for a pair of results
_MAX_METRICS = 6  # columns of a table of results
_MAX_TITLE_NAMES = 4
_MAX_WARNING = 300  # characters
_COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_ORDINALS = (
    *("first", "second", "third", "fourth", "fifth"),
    *("sixth", "seventh", "eighth", "ninth", "tenth"),
)
# Entries of an evaluation's "data" that are equal for results on the same data.
_DATA_IDENTITY = ("fingerprint", "split", "questions_fingerprint", "passages_fingerprint", "match")


def build_page(paths: Sequence[Path], metric: str | None = None) -> str:
    """Return the page of the runs, evaluations and comparisons at some paths.

    Args:
        metric: the metric that evaluations are compared by; None: nDCG@10, or the first main metric
            that all results have.

    Raises:
        UserError: a path holds nothing that can be reported.
        ConfigError: no result has the metric.
    """
    sources = [source for path in paths for source in read_source(path)]
    title = _title(sources)
    runs = [source for source in sources if source.kind == "run"]
    evaluations = [source for source in sources if source.kind == "evaluation"]
    comparisons = [source for source in sources if source.kind == "comparison"]
    _make_names_unique(runs)
    _make_names_unique(comparisons)
    comparison_parts = []
    for comparison in comparisons:
        panels = comparison_panels(comparison)
        comparison_parts.append((comparison, _warnings(comparison.logs), panels))
    picture_numbers = itertools.count(1)
    made_at = datetime.now(UTC)
    page = template(_FOLDER / "page.html.j2", autoescape=True, finalize=redact_text)
    return page.render(
        title=title,
        training=_training(runs),
        evaluations=_evaluations(evaluations, metric),
        comparisons=comparison_parts,
        style=STYLE_FILE.read_text(encoding="utf-8"),
        svg=lambda panel: to_svg(panel, salt=str(next(picture_numbers))),
        cost=COST,
        notes=NOTES,
        metrics=METRICS,
        main_metric=next(iter(METRICS)),
        table_rows=table_rows,
        max_changes=_MAX_CHANGES,
        made=f"contaccum {__version__}, {made_at:%Y-%m-%d %H:%M} UTC",
    )


def redact_text(value: Any) -> Any:
    """Blank credentials in a plain text, and leave other values and markup as they are.

    Jinja calls this before it escapes the text.
    """
    return redact(value) if type(value) is str else value


def _title(sources: Sequence[Source]) -> str:
    """Return what was compared on which data: "contaccum and grad_accum on scifact"."""
    num_sources: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    for source in sources:
        data = tuple(_data_names(source))
        for name in _entry_names(source):
            num_sources[name, source.kind, data] += 1
    counted_names: dict[str, str] = {}
    for (name, kind, _), count in num_sources.items():
        counted_name = f"{name} ({_count_word(count)} {kind}s)" if count > 1 else name
        # A run and its evaluation are one name, with the count of either if there is one.
        if name not in counted_names or count > 1:
            counted_names[name] = counted_name
    names = _shorten_list(list(counted_names.values()))
    results = [source for source in sources if source.kind != "run"]
    test_data = dict.fromkeys(data for source in results for data in _data_names(source))
    training_data = dict.fromkeys(data for source in sources for data in _data_names(source))
    if test_data:
        return f"{names} on {_shorten_list(list(test_data))}"
    if training_data:
        return f"{names} trained on {_shorten_list(list(training_data))}"
    return names


def _entry_names(source: Source) -> list[str]:
    """Return the names of a comparison's entries, or the name of any other source."""
    if source.kind == "comparison":
        return [entry["name"] for entry in source.record["entries"]]
    return [source.name]


def _data_names(source: Source) -> list[str]:
    """Return the names of a result's or comparison's data sets, or of a run's training sets."""
    data = source.record.get("data", {})
    if source.kind == "comparison":
        return [part["name"] for part in data["evaluation"]]
    if source.kind == "run":
        return list(data.get("sets", {}))
    return [data["name"]] if data.get("name") else []


def _shorten_list(names: Sequence[str]) -> str:
    """Return "a, b and c", or the first of many names and the number of the others."""
    if len(names) <= _MAX_TITLE_NAMES:
        return join_words(names)
    shown = names[: _MAX_TITLE_NAMES - 1]
    return join_words([*shown, f"{_count_word(len(names) - len(shown))} others"])


def _count_word(count: int) -> str:
    return _COUNTS[count] if count < len(_COUNTS) else str(count)


def _make_names_unique(sources: Sequence[Source]) -> None:
    """Number equal names, since tables and curves are by name: "mine" and "mine (second)"."""
    num_seen: Counter[str] = Counter()
    for source in sources:
        name = source.name
        num_seen[name] += 1
        number = num_seen[name]
        if number > 1:
            ordinal = _ORDINALS[number - 1] if number <= len(_ORDINALS) else f"number {number}"
            source.name = f"{name} ({ordinal})"


def _training(runs: Sequence[Source]) -> dict[str, Any]:
    """Return each run's figures and settings, the settings that differ, warnings and curves."""
    train_logs = {run.name: run.logs[TRAIN_LOG] for run in runs}
    eval_logs = {run.name: run.logs[EVAL_LOG] for run in runs}
    rows = [_run_row(run) for run in runs]
    for row in rows[1:]:
        row["difference"] = _best_difference(row, rows[0])
    settings = dict.fromkeys(key for row in rows for key in row["settings"])
    differing = []
    for key in settings:
        values = {row["settings"].get(key, "") for row in rows}
        if len(values) > 1:
            differing.append(key)
    eval_records = itertools.chain.from_iterable(eval_logs.values())
    eval_metrics = dict.fromkeys(key for record in eval_records for key in record if "@" in key)
    eval_panels = log_panels({name: [log] for name, log in eval_logs.items()}, list(eval_metrics))
    return {
        "runs": rows,
        "differing": differing,
        "warnings": _warnings(train_logs),
        "panels": eval_panels + log_panels({name: [log] for name, log in train_logs.items()}),
    }


def _run_row(run: Source) -> dict[str, Any]:
    """Return the figures of a training run for its row of the table, and its settings."""
    log = run.logs[TRAIN_LOG]
    evaluations = [record for record in run.logs[EVAL_LOG] if EVAL_METRIC in record]
    scores = [(record[EVAL_METRIC], record["update"]) for record in evaluations]
    arguments = run.record["arguments"]
    return {
        "name": run.name,
        "record": run.record,
        "settings": {key: str(value) for key, value in arguments.items() if key != "output_dir"},
        "bank_size": arguments.get("bank_size"),
        "best": max(scores, default=None),
        "difference": None,
        "last": log[-1]["update"] if log else 0,
        "loss": log[-1]["loss"] if log else None,
        "seconds": statistics.median([record["seconds"] for record in log] or [0.0]),
        "memory": max((record["peak_memory_mb"] for record in log), default=0.0),
    }


def _best_difference(row: Mapping[str, Any], first: Mapping[str, Any]) -> float | None:
    """Return the difference of a run's best score to the first run's.

    It is None if the two were not scored on the same data, or one has no score.
    """
    evaluation = row["record"].get("evaluation")
    if evaluation is None or evaluation != first["record"].get("evaluation"):
        return None
    if row["best"] is None or first["best"] is None:
        return None
    return float(row["best"][0] - first["best"][0])


def _warnings(logs: Mapping[str, Log]) -> list[str]:
    """Return a line for each collapse and each skipped update that a log shows.

    Args:
        logs: {name of the run: its training log}.
    """
    lines = []
    for name, log in logs.items():
        watch = CollapseWatch()
        warnings = [warning for record in log for warning in watch.observe(record)]
        for record in log:
            if record.get("skipped"):
                warnings.append(f"update {record['update']}: skipped, not finite")
        lines += [f"{name}: {warning[:_MAX_WARNING]}" for warning in warnings]
    return lines


def _evaluations(evaluations: Sequence[Source], metric: str | None) -> list[dict[str, Any]]:
    """Return the content of the section of each data set."""
    available = dict.fromkeys(name for source in evaluations for name in source.record["metrics"])
    if metric is not None and evaluations and metric not in available:
        raise ConfigError(f"--metric {metric}: no result has it; there are {', '.join(available)}")
    by_data: dict[tuple[Any, ...], list[Source]] = {}
    for source in evaluations:
        identity = tuple(source.record["data"].get(name) for name in _DATA_IDENTITY)
        by_data.setdefault(identity, []).append(source)
    return [_data_section(results, metric) for results in by_data.values()]


def _data_section(results: Sequence[Source], metric: str | None) -> dict[str, Any]:
    """Return the results on one data set, their common metrics, and each against the first."""
    _make_names_unique(results)
    first, *others = results
    preferred = [metric] if metric else []
    names = dict.fromkeys([*preferred, *MAIN_METRICS, *first.record["metrics"]])
    common = [name for name in names if all(name in source.record["metrics"] for source in results)]
    pairs = []
    if common:
        first_scores = _scores_by_query(first, common[0])
        for other in others:
            scores = _scores_by_query(other, common[0])
            changes = compare_queries(scores, first_scores, shown=_MAX_CHANGES)
            pairs.append({**changes, "name": other.name})
    add_holm(pairs)
    return {
        "data": first.record["data"],
        "results": results,
        "metrics": common[:_MAX_METRICS],
        "pairs": pairs,
    }


def _scores_by_query(evaluation: Source, metric: str) -> dict[str, float]:
    return {query: scores[metric] for query, scores in evaluation.record["per_query"].items()}
