"""Training runs on a page: what they were, what their logs say of loss, gradients, bank and drift, and figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from contaccum.reports.blocks import Block, Chart, Charts, Facts, Notes, Section, Table, about, cell, is_number, plain
from contaccum.reports.sources import Records, TrainingRun
from contaccum.reports.svg import COLOURS, Line, line_chart, stacked_chart
from contaccum.training.collapse import CollapseWatch
from contaccum.training.curves import mass_by_age


class Panel(NamedTuple):
    """What is drawn of the log: two keys make a full and a dashed line; a reference is a level to compare with."""

    title: str
    keys: tuple[str, ...]
    note: str = ""
    reference: float | None = None


_QUERY_PASSAGE = "full: queries; dashed: passages"
PANELS = (
    Panel("Loss", ("loss",), "of the local rows; each run with its own negatives"),
    Panel("Gradient norm ratio", ("grad_norm_ratio",), "passages over queries; 1 is balance", 1.0),
    Panel("Gradient norms", ("grad_norm_query", "grad_norm_passage"), _QUERY_PASSAGE),
    Panel("Learning rate", ("learning_rate",)),
    Panel("Bank entries in use", ("bank_fill",), "at most bank_size; those that drifted too far have retired"),
    Panel("Age of the oldest entry", ("bank_age",), "in updates"),
    Panel("Cosine then and now", ("drift_cosine_query", "drift_cosine_passage"), f"of a text; {_QUERY_PASSAGE}", 1.0),
    Panel("Shift of the towers' means", ("drift_shift_query", "drift_shift_passage"), f"over spread; {_QUERY_PASSAGE}"),
    Panel(
        "Drift beside the shift", ("drift_residual_query", "drift_residual_passage"), f"over spread; {_QUERY_PASSAGE}"
    ),
    Panel("Softmax on the bank", ("bank_mass", "in_batch_mass"), "full: bank; dashed: negatives in the batch"),
    Panel("Old column over fresh", ("bank_mass_aged",), "softmax of a column; 1: age tells nothing", 1.0),
    Panel("Spread of embeddings", ("embedding_spread",), "of the passages of a micro-batch; near 0: collapse"),
    Panel("Pairs per second", ("pairs_per_second",)),
    Panel("Peak memory", ("peak_memory_mb",), "MB"),
)
_SETTINGS_HIDDEN = ("output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "disable_tqdm")


def runs_section(runs: Sequence[TrainingRun]) -> Section:
    """All training runs together: an overview, their warnings, curves, settings and versions."""
    blocks: list[Block] = [_overview(runs)]
    warnings = [f"{run.name}: {line}" for run in runs for line in warnings_of(run.log)]
    if warnings:
        blocks.append(Notes(warnings, warning=True))
    names = [run.name for run in runs]
    figures = _figure_charts(runs)
    if figures:
        blocks.append(Charts(figures, names, "; ".join(_figures_of(run) for run in runs if run.evaluations)))
    blocks += log_charts({run.name: run.log for run in runs})
    blocks += _settings(runs)
    return Section("Training", blocks)


def _overview(runs: Sequence[TrainingRun]) -> Table:
    header = ["run", "method", "seed", "pairs/update", "bank", "updates", "last loss", "best figure", "at update"]
    header += ["s/update", "peak MB", "data"]
    rows = []
    for run in runs:
        log, arguments = run.log, run.run.get("arguments") or {}
        last = log[-1]["update"] if log else 0
        of = run.run.get("updates")
        metric, best, update = best_figure(run)
        seconds = _numbers(log, "seconds")
        rows.append(
            [
                cell(run.name),
                cell(run.run.get("method")),
                cell(plain(run.run.get("seed", ""))),
                cell(run.run.get("pairs_per_update")),
                cell(arguments.get("bank_size")),
                cell(f"{last:,} of {of:,}" if isinstance(of, int) and of != last else f"{last:,}"),
                cell(next(reversed(_numbers(log, "loss")), None)),
                cell("" if best is None else f"{metric} {best:.4f}"),
                cell(update),
                cell(statistics.median(seconds) if seconds else None, ".3f"),
                cell(max(_numbers(log, "peak_memory_mb"), default=None), ",.0f"),
                cell(str((run.run.get("data") or {}).get("fingerprint") or "")[:12]),
            ]
        )
    return Table(header, rows, note="Seconds are the median of an update's; data is the start of its fingerprint.")


def best_figure(run: TrainingRun) -> tuple[str, float | None, int | None]:
    """The metric that the run chose its best by (else the first), its best value while training, and when."""
    chosen = str((run.run.get("arguments") or {}).get("metric_for_best_model") or "").removeprefix("eval_")
    metrics = _metrics(run.evaluations)
    metric = chosen if chosen in metrics else next(iter(metrics), "")
    points = [(r[f"eval_{metric}"], r["update"]) for r in run.evaluations if is_number(r.get(f"eval_{metric}"))]
    if not points:
        return "", None, None
    lower = metric.endswith("loss")
    value, update = min(points) if lower else max(points, key=lambda point: (point[0], -point[1]))
    return metric, value, update


def warnings_of(log: Records) -> list[str]:
    """Collapses that the log shows, by the rules that warned while it was written, and updates that were skipped."""
    watch = CollapseWatch()
    found = [line for record in log for line in watch.observe(record)]
    skipped = [record["update"] for record in log if record.get("skipped")]
    if skipped:
        shown = ", ".join(map(str, skipped[:8])) + (", ..." if len(skipped) > 8 else "")
        found.append(f"{len(skipped)} updates were skipped, since a loss or gradient was not finite: {shown}")
    return found


def _metrics(evaluations: Records) -> list[str]:
    """Figures of evaluations while training, without `eval_`; the first is the one to look at first."""
    keys = dict.fromkeys(key for record in evaluations for key, value in record.items() if is_number(value))
    speeds = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
    names = [key.removeprefix("eval_") for key in keys if key.startswith("eval_")]
    return [name for name in names if not name.endswith(speeds)]


def _figures_of(run: TrainingRun) -> str:
    """On what a run evaluated itself."""
    about = run.run.get("evaluation")
    if not about:
        return f"{run.name}: on its eval_dataset, or by an evaluator of its own"
    of = about.get("of_documents", about["documents"])
    part = f"a sample of {about['documents']:,} of" if of > about["documents"] else "all"
    queries = f"{about['queries']:,} queries, {part} {of:,} documents"
    return f"{run.name}: on {about['name']} ({about['split']}), {queries}"


def _figure_charts(runs: Sequence[TrainingRun]) -> list[Chart]:
    metrics = dict.fromkeys(name for run in runs for name in _metrics(run.evaluations))
    logs = {run.name: run.evaluations for run in runs}
    return [chart for name in metrics if (chart := _chart(Panel(name, (f"eval_{name}",)), logs)) is not None]


def log_charts(logs: Mapping[str, Records]) -> list[Block]:
    """Curves of runs by name, and where the softmax of each lies by age, if its bank has a past."""
    charts = [chart for panel in PANELS if (chart := _chart(panel, logs)) is not None]
    masses = []
    for name, log in logs.items():
        updates, layers = mass_by_age([record for record in log if isinstance(record.get("update"), int)])
        if updates:
            svg = stacked_chart(updates, layers, f"{name}: share of the softmax by age of the columns")
            masses.append(Chart(name, svg, "share of the local rows' softmax, by age of the columns"))
    names = list(logs)
    blocks: list[Block] = [Charts(charts, names, _thinned(logs))] if charts else []
    if masses:
        note = "From below: negatives in the batch (grey), then banked passages, the younger the lighter."
        blocks.append(Charts(masses, (), note))
    return blocks


def _chart(panel: Panel, logs: Mapping[str, Records]) -> Chart | None:
    lines = []
    for series, (name, log) in enumerate(logs.items()):
        for place, key in enumerate(panel.keys):
            points = [(r["update"], r[key]) for r in log if is_number(r.get("update")) and is_number(r.get(key))]
            label = name if len(panel.keys) == 1 else f"{name}, {key}"
            if points:
                lines.append(Line(label, points, series, dashed=place > 0))
    if not lines:
        return None
    return Chart(panel.title, line_chart(lines, panel.title, panel.reference), panel.note)


def _thinned(logs: Mapping[str, Records]) -> str:
    longest = max(map(len, logs.values()), default=0)
    told = f"Of {longest:,} updates, each point is the mean of several." if longest > 400 else ""
    again = f" Colours begin again after {COLOURS} runs." if len(logs) > COLOURS else ""
    return (told + again).strip()


def _settings(runs: Sequence[TrainingRun]) -> list[Block]:
    arguments = [{**(run.run.get("arguments") or {}), **_data_facts(run.run)} for run in runs]
    keys = dict.fromkeys(key for one in arguments for key in one if key not in _SETTINGS_HIDDEN)
    blocks: list[Block] = []
    if len(runs) > 1:
        differing = [key for key in keys if len({repr(one.get(key)) for one in arguments}) > 1]
        rows = [[cell(key), *(cell(_value(one.get(key))) for one in arguments)] for key in differing]
        header = ["setting", *(run.name for run in runs)]
        note = "" if rows else "The runs have the same settings."
        blocks.append(Table(header, rows, "What differs between the runs", note))
    for run, one in zip(runs, arguments, strict=True):
        facts = {key: _value(value) for key, value in one.items() if value not in (None, [], {}, "")}
        blocks.append(Facts({**about(run.run), **facts}, f"{run.name}: versions, data and all settings", folded=True))
    return blocks


def _data_facts(run: Mapping[str, Any]) -> dict[str, Any]:
    data, evaluation, model = (run.get(key) or {} for key in ("data", "evaluation", "model"))
    facts = {f"data {key}": value for key, value in data.items() if key != "sets"}
    facts |= {f"model {key}": value for key, value in model.items()}
    return facts | {f"evaluation {key}": value for key, value in evaluation.items()}


def _numbers(log: Records, key: str) -> list[float]:
    return [record[key] for record in log if is_number(record.get(key))]


def _value(value: Any) -> str:
    return "" if value is None else plain(value)
