"""One HTML page of runs, evaluations and comparisons, without scripts and network access.

A source is the output of one command (see `sources`): of `contaccum train` (a run), of `evaluate`
or `open_qa` (an evaluation), or of `compare` (a comparison).

The content of the page is computed here; page.html.j2 puts it into words and tables. Jinja escapes
all texts of the page, matplotlib escapes the texts in plots, and the page's content security policy
forbids scripts and external resources.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from contaccum import __version__
from contaccum.comparison.summary import COST, METRICS, NOTES, join_words, table_rows, template
from contaccum.errors import ConfigError
from contaccum.evaluation.metrics import MAIN_METRICS, add_holm
from contaccum.evaluation.tables import compare_queries
from contaccum.files import redact
from contaccum.report.panels import EVAL_METRIC, Panel, comparison_panels, log_panels, to_svg
from contaccum.report.sources import Log, Source, read_source
from contaccum.training.log import EVAL_LOG, TRAIN_LOG, CollapseWatch

_FOLDER = Path(__file__).parent
STYLE_FILE = _FOLDER / "page.css"
_MAX_CHANGES = 50  # listed gains, and listed losses, for a pair of results
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
        paths: folders and files that `read_source` reads.
        metric: metric to compare evaluations by; None: nDCG@10, or the first main metric that all
            results have.

    Raises:
        UserError: a path holds nothing that can be reported.
        ConfigError: a result does not have the metric.
    """
    sources: list[Source] = []
    for path in paths:
        sources.extend(read_source(path))
    title = _make_title(sources)
    runs = _select_sources(sources, "run")
    evaluations = _select_sources(sources, "evaluation")
    comparisons = _select_sources(sources, "comparison")
    _make_names_unique(runs)
    _make_names_unique(comparisons)
    comparison_parts = []
    for comparison in comparisons:
        panels = comparison_panels(comparison)
        comparison_parts.append((comparison, _collect_warnings(comparison.logs), panels))
    created_at = datetime.now(UTC)
    page = template(_FOLDER / "page.html.j2", autoescape=True, finalize=redact)
    return page.render(
        title=title,
        training=_summarize_training(runs),
        evaluations=_make_data_sections(evaluations, metric),
        comparisons=comparison_parts,
        style=STYLE_FILE.read_text(encoding="utf-8"),
        svg=make_svg_renderer(),
        cost=COST,
        notes=NOTES,
        metrics=METRICS,
        main_metric=next(iter(METRICS)),
        table_rows=table_rows,
        max_changes=_MAX_CHANGES,
        created=f"contaccum {__version__}, {created_at:%Y-%m-%d %H:%M} UTC",
    )


def make_svg_renderer() -> Callable[[Panel], str]:
    """Return a function that renders the panels of one page, each with a salt of its own."""
    picture_numbers = itertools.count(1)

    def render_svg(panel: Panel) -> str:
        return to_svg(panel, salt=str(next(picture_numbers)))

    return render_svg


def _select_sources(sources: Sequence[Source], source_type: str) -> list[Source]:
    return [source for source in sources if source.source_type == source_type]


def _make_title(sources: Sequence[Source]) -> str:
    """Return a title with models and data, such as "contaccum and grad_accum on scifact"."""
    num_sources: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    for source in sources:
        data_names = tuple(_get_data_names(source))
        for name in _get_entry_names(source):
            num_sources[name, source.source_type, data_names] += 1
    counted_names: dict[str, str] = {}
    for (name, source_type, _), count in num_sources.items():
        # A run and the evaluation of its model have the same name, which the title has once. If it
        # has a count, as in "mine (three runs)", the count stays.
        if count > 1:
            counted_names[name] = f"{name} ({_spell_count(count)} {source_type}s)"
        else:
            counted_names.setdefault(name, name)
    names = _shorten_list(list(counted_names.values()))
    test_data: list[str] = []
    training_data: list[str] = []
    for source in sources:
        if source.source_type == "run":
            training_data.extend(_get_data_names(source))
        else:
            test_data.extend(_get_data_names(source))
    if test_data:
        return f"{names} on {_shorten_list(_drop_repeated(test_data))}"
    if training_data:
        return f"{names} trained on {_shorten_list(_drop_repeated(training_data))}"
    return names


def _drop_repeated(names: Iterable[str]) -> list[str]:
    """Return the names in their order, each once."""
    return list(dict.fromkeys(names))


def _get_entry_names(source: Source) -> list[str]:
    """Return the names of a comparison's entries, or the name of any other source."""
    if source.source_type == "comparison":
        return [entry["name"] for entry in source.record["entries"]]
    return [source.name]


def _get_data_names(source: Source) -> list[str]:
    """Return the names of a result's or comparison's data sets, or of a run's training sets."""
    data = source.record.get("data", {})
    if source.source_type == "comparison":
        return [part["name"] for part in data["evaluation"]]
    if source.source_type == "run":
        return list(data.get("sets", {}))
    if data.get("name"):
        return [data["name"]]
    return []


def _shorten_list(names: Sequence[str]) -> str:
    """Return "a, b and c", or the first of many names and the number of the others."""
    if len(names) <= _MAX_TITLE_NAMES:
        return join_words(names)
    shown = names[: _MAX_TITLE_NAMES - 1]
    num_others = len(names) - len(shown)
    return join_words([*shown, f"{_spell_count(num_others)} others"])


def _spell_count(count: int) -> str:
    if count < len(_COUNTS):
        return _COUNTS[count]
    return str(count)


def _make_names_unique(sources: Sequence[Source]) -> None:
    """Add numbers to equal names, as in "mine" and "mine (second)".

    Tables and curves are identified by these names.
    """
    num_seen: Counter[str] = Counter()
    for source in sources:
        name = source.name
        num_seen[name] += 1
        number = num_seen[name]
        if number > 1:
            ordinal = f"number {number}"
            if number <= len(_ORDINALS):
                ordinal = _ORDINALS[number - 1]
            source.name = f"{name} ({ordinal})"


def _summarize_training(runs: Sequence[Source]) -> dict[str, Any]:
    """Return scores and settings of each run, the settings that differ, warnings and curves."""
    rows = []
    train_logs: dict[str, Log] = {}
    train_curves: dict[str, list[Log]] = {}
    eval_curves: dict[str, list[Log]] = {}
    eval_keys: list[str] = []
    for run in runs:
        rows.append(_make_run_row(run))
        train_log = run.logs[TRAIN_LOG]
        eval_log = run.logs[EVAL_LOG]
        train_logs[run.name] = train_log
        train_curves[run.name] = [train_log]
        eval_curves[run.name] = [eval_log]
        for record in eval_log:
            eval_keys.extend(record)
    for number, row in enumerate(rows):
        row["difference"] = _compute_best_difference(row, rows[:number])
    eval_metrics = [key for key in _drop_repeated(eval_keys) if "@" in key]
    return {
        "runs": rows,
        "differing": _find_differing_settings([row["settings"] for row in rows]),
        "warnings": _collect_warnings(train_logs),
        "panels": log_panels(eval_curves, eval_metrics) + log_panels(train_curves),
    }


def _find_differing_settings(settings_of_runs: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of the settings that are not equal in all runs."""
    names: list[str] = []
    for settings in settings_of_runs:
        names.extend(settings)
    differing = []
    for name in _drop_repeated(names):
        values = {settings.get(name, "") for settings in settings_of_runs}
        if len(values) > 1:
            differing.append(name)
    return differing


def _make_run_row(run: Source) -> dict[str, Any]:
    """Return a training run's row of the table, and its settings.

    ``best`` is the best score on dev and the update at which it was first reached, ``last`` is the
    last update, ``seconds`` is the median of an update, and ``memory`` the peak memory in MB.
    """
    log = run.logs[TRAIN_LOG]
    last_record = log[-1] if log else {"update": 0, "loss": None}
    scores = []
    for record in run.logs[EVAL_LOG]:
        if EVAL_METRIC in record:
            scores.append((record[EVAL_METRIC], record["update"]))
    arguments = run.record["arguments"]
    settings = {key: str(value) for key, value in arguments.items() if key != "output_dir"}
    seconds = [record["seconds"] for record in log]
    return {
        "name": run.name,
        "record": run.record,
        "settings": settings,
        "bank_size": arguments.get("bank_size"),
        "best": max(scores, key=lambda score_and_update: score_and_update[0], default=None),
        "difference": None,
        "last": last_record["update"],
        "loss": last_record["loss"],
        "seconds": statistics.median(seconds or [0.0]),
        "memory": max((record["peak_memory_mb"] for record in log), default=0.0),
    }


def _compute_best_difference(
    row: Mapping[str, Any], earlier_rows: Sequence[Mapping[str, Any]]
) -> float | None:
    """Return a run's best score minus that of the first run that was scored on the same data.

    The result is None if the run is the first one on its data, or one of the two has no score.
    """
    evaluation = row["record"].get("evaluation")
    if evaluation is None:
        return None
    for first in earlier_rows:
        if first["record"].get("evaluation") == evaluation:
            if row["best"] is None or first["best"] is None:
                return None
            return float(row["best"][0] - first["best"][0])
    return None


def _collect_warnings(logs: Mapping[str, Log]) -> list[str]:
    """Return a line for each symptom of a collapse and each skipped update in the logs.

    Args:
        logs: {name of the run: its training log}.
    """
    lines = []
    for name, log in logs.items():
        watch = CollapseWatch()
        warnings: list[str] = []
        for record in log:
            warnings.extend(watch.observe(record))
        for record in log:
            if record.get("skipped"):
                warnings.append(f"update {record['update']}: skipped, not finite")
        for warning in warnings:
            lines.append(f"{name}: {warning[:_MAX_WARNING]}")
    return lines


def _make_data_sections(evaluations: Sequence[Source], metric: str | None) -> list[dict[str, Any]]:
    """Return the content of the section of each data set."""
    by_data: dict[tuple[str | None, ...], list[Source]] = {}
    for source in evaluations:
        identity = tuple(source.record["data"].get(name) for name in _DATA_IDENTITY)
        by_data.setdefault(identity, []).append(source)
    return [_make_data_section(results, metric) for results in by_data.values()]


def _make_data_section(results: Sequence[Source], metric: str | None) -> dict[str, Any]:
    """Return the results on one data set, their common metrics, and comparisons with the first.

    Raises:
        ConfigError: a result does not have the metric of ``--metric``.
    """
    for source in results:
        if metric is not None and metric not in source.record["metrics"]:
            raise ConfigError(
                f"--metric {metric}: {source.name} has no such metric; there are "
                f"{', '.join(source.record['metrics'])}"
            )
    _make_names_unique(results)
    first = results[0]
    names = [*MAIN_METRICS, *first.record["metrics"]]
    if metric is not None:
        names.insert(0, metric)
    common = []
    for name in _drop_repeated(names):
        if all(name in source.record["metrics"] for source in results):
            common.append(name)
    pairs = []
    if common:
        first_scores = _get_scores_by_query(first, common[0])
        for other in results[1:]:
            scores = _get_scores_by_query(other, common[0])
            changes = compare_queries(scores, first_scores, shown=_MAX_CHANGES)
            pairs.append({**changes, "name": other.name})
    add_holm(pairs)
    return {
        "data": first.record["data"],
        "results": results,
        "metrics": common[:_MAX_METRICS],
        "pairs": pairs,
    }


def _get_scores_by_query(evaluation: Source, metric: str) -> dict[str, float]:
    return {query: scores[metric] for query, scores in evaluation.record["per_query"].items()}
