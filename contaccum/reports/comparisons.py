"""Comparisons of methods on a page: the tables of `contaccum compare`, curves, logs, and differences by query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contaccum.reports.blocks import (
    Block,
    Cell,
    Chart,
    Charts,
    Facts,
    Notes,
    Section,
    Table,
    about,
    cell,
    is_number,
    p_value,
    plain,
)
from contaccum.reports.queries import Against, mean_over_seeds, query_blocks
from contaccum.reports.runs import log_charts, warnings_of
from contaccum.reports.sources import ComparedRuns, Records, query_texts
from contaccum.reports.svg import Line, line_chart

# As `contaccum.comparison.evaluating.METRICS` calls them, without importing what trains.
_MAIN = "NDCG@10"
_COST = (
    ("s/update", "seconds_per_update", ".3f"),
    ("training s", "train_seconds", ",.1f"),
    ("peak MB", "peak_memory_mb", ",.0f"),
    ("gradient ratio", "grad_norm_ratio", ".3f"),
    ("final loss", "final_loss", ".4f"),
)


def comparison_section(one: ComparedRuns) -> Section:
    """Everything that a comparison left."""
    report = one.report
    blocks: list[Block] = []
    if report.get("warnings"):
        blocks.append(Notes([f"take care: {line}" for line in report["warnings"]], warning=True))
    if report.get("failed"):
        blocks.append(Notes([f"failed: {name}: {why}" for name, why in report["failed"].items()], warning=True))
    found = dict.fromkeys(
        (name, metric) for g in report["groups"].values() for name, m in g["metrics"].items() for metric in m
    )
    for number, (data, metric) in enumerate(sorted(found, key=lambda pair: pair[1] != _MAIN)):
        blocks.append(_metric_table(report, data, metric, folded=number > 0))
    blocks += _curves(report)
    logs = _logs_of_groups(one)
    collapses = [f"{name}: {line}" for name, log in logs.items() for line in warnings_of(log)]
    if collapses:
        blocks.append(Notes(collapses, warning=True))
    blocks += log_charts(logs)
    blocks += _queries(one)
    blocks.append(_cost(report))
    settings = report.get("settings", {})
    facts = {"command": str(report.get("command", "")), **about(report)}
    facts |= {key: plain(value) for key, value in settings.get("options", {}).items()}
    facts |= {f"evaluation {key}": plain(x) for key, x in settings.get("evaluation", {}).items() if x is not None}
    facts |= {f"machine {key}": plain(x) for key, x in (report.get("machine") or {}).items() if x is not None}
    for data in report.get("data", {}).get("evaluation", []):
        facts[f"data {data['name']} ({data['split']})"] = plain(
            {key: value for key, value in data.items() if key not in ("name", "split")}
        )
    blocks.append(Facts(facts, "Command, settings, data and versions", folded=True))
    seeds = ", ".join(map(str, report["seeds"]))
    intro = f"baseline {report['baseline']}; seeds {seeds}; mean and sd are over seeds, intervals and p over queries"
    return Section(f"Comparison {one.name}", blocks, intro)


def _metric_table(report: Mapping[str, Any], data: str, metric: str, folded: bool) -> Table:
    grid, several = list(report["grid"]), len(report["seeds"]) > 1
    rows: list[list[Cell]] = []
    for name, group in report["groups"].items():
        values = group["metrics"].get(data, {}).get(metric)
        if values is None:
            continue
        against = [
            row
            for row in report["comparisons"]
            if row["group"] == name and row["data"] == data and row["metric"] == metric
        ]
        for row in against or [None]:
            labels = group["labels"] if row is None else row["labels"]
            cells = [cell(group["entry"]), *(cell(labels.get(key, "")) for key in grid)]
            cells += [cell(values["mean"]), *([cell(values["sd"])] if several else [])]
            if row is None:
                cells += [cell(None)] * 4
            else:
                interval = Cell(f"{row['low']:+.4f} to {row['high']:+.4f}", row["low"], True)
                cells += [cell(row["difference"], "+.4f"), interval, p_value(row["p_value"]), p_value(row["p_holm"])]
            rows.append(cells)
    header = ["method", *grid, "mean", *(["sd"] if several else []), "difference", "95% interval", "p", "p (Holm)"]
    return Table(header, rows, f"{metric} on {data}", folded=folded)


def _curves(report: Mapping[str, Any]) -> list[Block]:
    """The metric while training, a line per group: the mean over its runs."""
    lines: dict[str, list[Line]] = {"update": [], "seconds of training": []}
    names = []
    for group in report["groups"].values():
        runs = [run for run in report["runs"].values() if _is_of(run, group)]
        curves = [run["curve"] for run in runs if len(run.get("curve") or ()) > 1]
        if not curves:
            continue
        names.append(_label(group))
        for unit, key in (("update", "update"), ("seconds of training", "train_seconds")):
            points = [
                (sum(p[key] for p in at) / len(at), sum(p[_MAIN] for p in at) / len(at))
                for at in zip(*curves, strict=False)
                if all(is_number(p.get(key)) and is_number(p.get(_MAIN)) for p in at)
            ]
            lines[unit].append(Line(names[-1], points, len(names) - 1))
    charts = [
        Chart(f"{_MAIN} by {unit}", line_chart(found, f"{_MAIN} by {unit}", unit=unit), "mean over seeds")
        for unit, found in lines.items()
        if any(line.points for line in found)
    ]
    return [Charts(charts, names)] if charts else []


def _is_of(run: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
    return run.get("entry") == group["entry"] and run.get("labels") == group["labels"]


def _label(group: Mapping[str, Any]) -> str:
    return ", ".join([group["entry"], *(f"{key}={value}" for key, value in group["labels"].items())])


def _logs_of_groups(one: ComparedRuns) -> dict[str, Records]:
    """The log of the first seed of each group, where it lies beside the report."""
    logs: dict[str, Records] = {}
    for group in one.report["groups"].values():
        for name, run in one.report["runs"].items():
            if _is_of(run, group) and one.logs.get(name):
                logs.setdefault(_label(group), one.logs[name])
    return logs


def _queries(one: ComparedRuns) -> list[Block]:
    """Differences by query to the baseline, on each set by the main metric; needs the results of the runs."""
    pairs: dict[str, list[tuple[Against, str]]] = {}
    groups = one.report["groups"]
    for row in one.report["comparisons"]:
        if row["metric"] != _MAIN or not one.results:
            continue
        mine, theirs = (_scores(one, groups[row[key]], row) for key in ("group", "baseline_group"))
        if mine is None or theirs is None or mine.keys() != theirs.keys():
            continue
        pair = Against(_label(groups[row["group"]]), mine, _label(groups[row["baseline_group"]]), theirs)
        pairs.setdefault(row["data"], []).append((pair, f"{_MAIN} on {row['data']}"))
    about_sets = {data["name"]: data for data in one.report["data"]["evaluation"]} if pairs else {}
    return [
        block for name, found in pairs.items() for block in query_blocks(found, query_texts(about_sets.get(name, {})))
    ]


def _scores(one: ComparedRuns, group: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, float] | None:
    found = []
    for result in one.results.values():
        evaluation = result.get("evaluations", {}).get(row["data"])
        if evaluation is not None and _is_of(result, group) and result.get("seed") in row["seeds"]:
            found.append(dict(zip(evaluation["query_ids"], evaluation["per_query"][_MAIN], strict=True)))
    return mean_over_seeds(found) if len(found) == len(row["seeds"]) else None


def _cost(report: Mapping[str, Any]) -> Table:
    grid = list(report["grid"])
    rows = [
        [
            cell(group["entry"]),
            *(cell(group["labels"].get(key, "")) for key in grid),
            cell(len(group["seeds"])),
            *(cell(group.get(key), form) for _, key, form in _COST),
        ]
        for group in report["groups"].values()
    ]
    return Table(["method", *grid, "seeds", *(title for title, _, _ in _COST)], rows, "Cost")
