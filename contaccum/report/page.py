"""One HTML page of runs, evaluations and comparisons that needs nothing else: no network, and no script but its own.

What is said of each source is worked out here; page.html.j2 puts it into words and tables. Jinja escapes every text,
matplotlib those of its pictures, and a content security policy lets no other script run and nothing load.
"""

from __future__ import annotations

import base64
import hashlib
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from contaccum.comparison.report import COST, METRICS, NOTES, query_means, table_rows
from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.metrics import MAIN_METRICS, holm, paired_bootstrap
from contaccum.files import redact
from contaccum.report.charts import Line, Panel, difference_panel, line_panel, map_panel, stacked_panel, to_svg
from contaccum.report.sources import COMPARISON, EVALUATION, RUN, Records, Source, query_texts, read_sources
from contaccum.training.log import CollapseWatch
from contaccum.version import __version__

_HERE = Path(__file__).parent
_MAIN = next(iter(METRICS))
_SHOWN = 50  # gains, and losses, that are listed
_TIE = 1e-9  # scores of a metric that differ at all differ by more
_TOWERS = "full: queries; dashed: passages"
# Title, keys of the log (of two, the second is dashed), note, level to compare with.
_LOG_PANELS: tuple[tuple[str, tuple[str, ...], str, float | None], ...] = (
    ("Loss", ("loss",), "of the local rows; each run with its own negatives", None),
    ("Gradient norm ratio", ("grad_norm_ratio",), "passages over queries; 1 is balance", 1.0),
    ("Gradient norms", ("grad_norm_query", "grad_norm_passage"), _TOWERS, None),
    ("Learning rate", ("learning_rate",), "", None),
    ("Bank entries in use", ("bank_fill",), "at most bank_size; those that drifted too far have retired", None),
    ("Age of the oldest entry", ("bank_age",), "in updates", None),
    ("Cosine then and now", ("drift_cosine_query", "drift_cosine_passage"), f"of a text; {_TOWERS}", 1.0),
    ("Shift of the towers' means", ("drift_shift_query", "drift_shift_passage"), f"over spread; {_TOWERS}", None),
    ("Drift beside the shift", ("drift_residual_query", "drift_residual_passage"), f"over spread; {_TOWERS}", None),
    ("Softmax on the bank", ("bank_mass", "in_batch_mass"), "full: bank; dashed: negatives in the batch", None),
    ("Old column over fresh", ("bank_mass_aged",), "softmax of a column; 1: age says nothing", 1.0),
    ("Spread of embeddings", ("embedding_spread",), "of the passages of a micro-batch; near 0: collapse", None),
    ("Pairs per second", ("pairs_per_second",), "", None),
    ("Peak memory", ("peak_memory_mb",), "MB", None),
)


def build_page(paths: Sequence[Path], metric: str | None = None, title: str | None = None) -> str:
    """The page of all that lies at some paths, as one text.

    Args:
        metric: what evaluations are compared by; None: nDCG@10, or the first main metric that all have.

    Raises:
        UserError: a path that is nothing to report of, or is damaged; a metric that no result has.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

    sources = read_sources(paths)
    loader = FileSystemLoader(_HERE)
    templates = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: redact(value) if type(value) is str else value,  # before it is escaped
    )
    templates.filters["plain"] = plain
    style, script = ((_HERE / name).read_text(encoding="utf-8").strip() for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    names = [path.stem if path.suffix == ".json" else path.resolve().name for path in paths]
    try:
        page = templates.get_template("page.html.j2").render(
            title=title or ", ".join(names)[:120],
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
    """A setting as one writes it: lower-case booleans, lists with commas, nothing for None."""
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {plain(x)}" for key, x in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


# Training runs -------------------------------------------------------------------------------------------------------


def _training(runs: Sequence[Source]) -> dict[str, Any]:
    """Beside each run: its best figure, last loss, median seconds, peak of memory, settings."""
    settings = {}
    for run in runs:
        parts = [run.record.get(part) or {} for part in ("data", "model", "evaluation")]
        facts = dict(run.record.get("arguments") or {})
        for name, part in zip(("data", "model", "evaluation"), parts, strict=True):
            facts |= {f"{name} {key}": value for key, value in part.items() if key != "sets"}
        hidden = ("output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "disable_tqdm")
        settings[run.name] = {key: plain(value) for key, value in facts.items() if key not in hidden and plain(value)}
    keys = dict.fromkeys(key for one in settings.values() for key in one)
    evaluated = {run.name: [run.evaluations] for run in runs}
    figures = [(name, (f"eval_{name}",), "", None) for name in dict.fromkeys(f for run in runs for f in _figures(run))]
    logs = {run.name: [run.log] for run in runs}
    return {
        "runs": [
            {
                "of": run,
                "last": run.log[-1]["update"] if run.log else 0,
                "loss": next(reversed(_numbers(run.log, "loss")), None),
                "best": best_figure(run),
                "seconds": statistics.median(_numbers(run.log, "seconds") or [0.0]),
                "memory": max(_numbers(run.log, "peak_memory_mb"), default=0.0),
                "settings": settings[run.name],
            }
            for run in runs
        ],
        "differing": [key for key in keys if len({one.get(key, "") for one in settings.values()}) > 1],
        "warnings": [line for name, found in logs.items() for line in _warnings(name, found[0])],
        "panels": [*_panels(figures, evaluated), *log_panels(logs)],
        "names": list(logs),
    }


def best_figure(run: Source) -> tuple[str, float, int] | None:
    """The metric that the run chose its best by (else the first), its best value while training, and when."""
    chosen = str((run.record.get("arguments") or {}).get("metric_for_best_model")).removeprefix("eval_")
    figures = _figures(run)
    for metric in ([chosen] if chosen in figures else figures)[:1]:
        sign = 1 if metric.endswith("loss") else -1
        points = [(r[f"eval_{metric}"], r["update"]) for r in run.evaluations if _is_number(r.get(f"eval_{metric}"))]
        return (metric, *min(points, key=lambda point: (sign * point[0], point[1])))
    return None


def _figures(run: Source) -> list[str]:
    """Figures of evaluations while training; the first is the one to look at first."""
    keys = dict.fromkeys(key for record in run.evaluations for key, value in record.items() if _is_number(value))
    speeds = ("runtime", "per_second", "preparation_time")
    return [key.removeprefix("eval_") for key in keys if key.startswith("eval_") and not key.endswith(speeds)]


def log_panels(logs: Mapping[str, Sequence[Records]]) -> list[Panel]:
    """Curves by name, of one log or of those of several seeds, and where the softmax lies by age, of the first."""
    panels = _panels(_LOG_PANELS, logs)
    for name, found in logs.items():
        known = [record for record in (found or [[]])[0] if "in_batch_mass" in record]
        ages = {int(key.rpartition("_")[2]) for r in known for key in r if key.startswith("bank_mass_age_")}
        if len(ages) > 1:
            keys = ["in_batch_mass", *(f"bank_mass_age_{age}" for age in sorted(ages))]
            layers = {key: [float(record.get(key) or 0.0) for record in known] for key in keys}
            note = "negatives in the batch (grey), banked ones by age"
            panels.append(stacked_panel(f"Softmax by age, {name}", [r["update"] for r in known], layers, note))
    return panels


def _panels(
    about: Sequence[tuple[str, tuple[str, ...], str, float | None]], logs: Mapping[str, Sequence[Records]]
) -> list[Panel]:
    panels = []
    for title, keys, note, level in about:
        lines = []
        for series, (name, found) in enumerate(logs.items()):
            for key in keys:
                runs = [[(r["update"], r[key]) for r in log if _is_number(r.get(key))] for log in found]
                lines += [Line(name, runs, series, dashed=key != keys[0])] if runs and all(runs) else []
        panels += [line_panel(title, lines, note, level)] if lines else []
    return panels


def _warnings(name: str, log: Records) -> list[str]:
    """Collapses that a log shows, by the rules that warned while it was written, and updates that were skipped."""
    watch = CollapseWatch()
    found = [line for record in log for line in watch.observe(dict(record))]
    skipped = [str(record["update"]) for record in log if record.get("skipped")]
    if skipped:
        found.append(f"{len(skipped)} updates were skipped, a loss or gradient not being finite: {', '.join(skipped)}")
    return [f"{name}: {line[:300]}" for line in found]


def _numbers(log: Records, key: str) -> list[float]:
    return [record[key] for record in log if _is_number(record.get(key))]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and value - value == 0


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
    for group in same_data.values():
        names = dict.fromkeys((*([metric] if metric else []), *MAIN_METRICS, *group[0].record["metrics"]))
        shown = [name for name in names if all(_is_number(one.record["metrics"].get(name)) for one in group)]
        chosen, data = next(iter(shown), ""), group[0].record["data"]
        first, *others = [
            {query: values[chosen] for query, values in one.record["per_query"].items() if chosen in values}
            for one in group
        ]
        named = list(zip(group[1:], others, strict=True))
        pairs = [_beside(one.name, mine, group[0].name, first, chosen) for one, mine in named if _same(mine, first)]
        for pair, p_holm in zip(pairs, holm([pair["found"].p_value for pair in pairs]), strict=True):
            pair["p_holm"] = p_holm
        sections.append(
            {
                "data": data,
                "results": group,
                "shown": shown[:6],
                "not_compared": [one.name for one, mine in named if not _same(mine, first)],
                "pairs": pairs,
                "texts": query_texts(data) if pairs else {},
            }
        )
    return sections


def _same(mine: Mapping[str, float], theirs: Mapping[str, float]) -> bool:
    return bool(mine) and mine.keys() == theirs.keys()


def _beside(
    name: str, scores: Mapping[str, float], baseline: str, others: Mapping[str, float], metric: str
) -> dict[str, Any]:
    """A result beside another over the same queries: bootstrap, wins, ties and losses, and the greatest of them."""
    # Rounded, so that equal changes are in the order of their queries.
    changes = sorted((-round(score - others[query], 9), query) for query, score in scores.items())
    wins, losses = sum(change < -_TIE for change, _ in changes), sum(change > _TIE for change, _ in changes)
    ties = len(changes) - wins - losses
    listed = [*changes[: min(wins, _SHOWN)], *changes[len(changes) - min(losses, _SHOWN) :]]
    title = f"{name} against {baseline}, {metric} by query"
    note = f"{wins:,} better, {ties:,} equal, {losses:,} worse"
    return {
        "name": name,
        "baseline": baseline,
        "found": paired_bootstrap(list(scores.values()), [others[query] for query in scores]),
        "counts": (wins, ties, losses),
        "panel": difference_panel(title, [-change for change, _ in changes], note),
        "listed": [(query, others[query], scores[query]) for _, query in listed],
        "left_out": wins + losses - len(listed),
    }


# Comparisons ---------------------------------------------------------------------------------------------------------


def _comparison(one: Source) -> dict[str, Any]:
    """Beside the report: its tables, pictures, what its logs warn of, and differences by query to the baseline."""
    report, groups = one.record, one.record["groups"]
    tables = dict.fromkeys((data, metric) for g in groups.values() for data, m in g["metrics"].items() for metric in m)
    about = {data["name"]: data for data in report["data"]["evaluation"]}
    pairs = []
    for row in report["comparisons"]:
        mine, theirs = (_query_scores(one, groups[row[key]], row) for key in ("group", "baseline_group"))
        if row["metric"] == _MAIN and _same(mine, theirs):
            names = [_label(groups[row[key]]) for key in ("group", "baseline_group")]
            pair = _beside(names[0], mine, names[1], theirs, f"{_MAIN} on {row['data']}")
            pairs.append({**pair, "texts": query_texts(about.get(row["data"], {}))})
    return {
        "name": one.name,
        "report": report,
        "tables": sorted(tables, key=lambda pair: pair[1] != _MAIN),
        "warnings": [line for name, log in one.logs.items() for line in _warnings(name, log)],
        "panels": comparison_panels(one),
        "names": list(map(_label, groups.values())),
        "pairs": pairs,
    }


def comparison_panels(one: Source, only: Sequence[str] | None = None) -> list[Panel]:
    """Curves of the main metric by update and by second, the runs' logs, and a map of the final metric.

    Args:
        only: names of the groups whose curves are drawn; None: all. The map is of all.
    """
    runs = one.record["runs"]
    groups = [group for name, group in one.record["groups"].items() if only is None or name in only]
    members = {_label(g): [name for name in runs if _is_of(runs[name], g)] for g in groups}
    panels = []
    for unit, key in (("update", "update"), ("seconds of training", "train_seconds")):
        lines = []
        for series, (label, names) in enumerate(members.items()):
            curves = [[(point[key], point[_MAIN]) for point in runs[name]["curve"]] for name in names]
            lines += [Line(label, curves, series)] if curves and all(len(curve) > 1 for curve in curves) else []
        panels += [line_panel(f"{METRICS[_MAIN]} by {unit}", lines, "mean over seeds", unit=unit)] if lines else []
    logs = {label: [one.logs[name] for name in names if one.logs.get(name)] for label, names in members.items()}
    return [*panels, *log_panels(logs), *_map(one.record)]


def _map(report: Mapping[str, Any]) -> list[Panel]:
    """The final metric by seed, or with a grid its mean over seeds with the last gridded key's values as columns."""
    *outer, last = report["grid"] or ("seed",)
    columns = [str(value) for value in report["grid"].get(last, report["seeds"])]
    rows: dict[str, list[float]] = {}
    for group in report["groups"].values():
        labels, scored = group["labels"], [found[_MAIN] for found in group["metrics"].values()][:1]
        title = ", ".join([group["entry"], *(f"{key}={labels[key]}" for key in outer if key in labels)])
        values: dict[str, float] = {}
        for found in scored:
            values = dict(zip(map(str, group["seeds"]), found["values"], strict=True))
            if report["grid"]:
                values = {column: found["mean"] for column in columns if labels.get(last, column) == column}
        row = rows.setdefault(title, [float("nan")] * len(columns))
        row[:] = [values.get(column, value) for column, value in zip(columns, row, strict=True)]
    return [map_panel(f"final {METRICS[_MAIN]}", [f"{last}={column}" for column in columns], rows)] if rows else []


def _query_scores(one: Source, group: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, float]:
    """{query: score}, averaged over the row's seeds; nothing unless the results of all of them are there."""
    runs = [run for run in one.results.values() if _is_of(run, group) and run["seed"] in row["seeds"]]
    found = [run["evaluations"][row["data"]] for run in runs if row["data"] in run["evaluations"]]
    return query_means(found, _MAIN) if len(found) == len(row["seeds"]) else {}


def _is_of(run: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
    return (run["entry"], run["labels"]) == (group["entry"], group["labels"])


def _label(group: Mapping[str, Any]) -> str:
    return ", ".join([group["entry"], *(f"{key}={value}" for key, value in group["labels"].items())])
