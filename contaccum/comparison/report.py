"""From the results of runs to a comparison: means over seeds, differences to the baseline, and whether to trust them.

Reads what the runs left, trains nothing, draws nothing. The tables of :func:`markdown` say what they are.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from contaccum.comparison.evaluating import METRICS
from contaccum.comparison.plan import Group, Plan
from contaccum.evaluation.significance import holm, paired_bootstrap

RESAMPLES = 10_000
BOOTSTRAP_SEED = 0

_NOTES = f"""\
Mean and standard deviation (sd) are over seeds. A difference is to the baseline in the same cell of the grid; its
interval and p-value are of a paired bootstrap over queries ({RESAMPLES:,} resamples, two-sided, scores averaged over
seeds first): they speak of other queries, not of other seeds; the sd does that. Holm's p is corrected over the rows of
its table. A value in brackets is the baseline's: the row itself has no such setting. Seconds are of training alone;
s/update is the median. The gradient ratio is passages over queries.
""".split("\n")

Results = Mapping[str, Mapping[str, Any]]  # name of the run -> its result.json


def build_report(plan: Plan, results: Results, failed: Mapping[str, str], about: Mapping[str, Any]) -> dict[str, Any]:
    """The content of report.json.

    Args:
        results: of the runs that are finished.
        failed: name of the run -> why.
        about: command, settings, data, versions, commit, machine; taken over as it is.
    """
    return {
        **about,
        "baseline": plan.baseline,
        "seeds": list(plan.seeds),
        "grid": {key: list(values) for key, values in plan.grid.items()},
        "entries": [
            {"name": entry.name, "method": entry.method, "overrides": dict(entry.overrides)} for entry in plan.entries
        ],
        "statistics": {"resamples": RESAMPLES, "bootstrap_seed": BOOTSTRAP_SEED, "confidence": 0.95},
        "warnings": list(warnings(plan, results)),
        "failed": dict(failed),
        "groups": {group.name: _summary(group, results) for group in plan.groups.values()},
        "comparisons": compare(plan, results),
        "runs": {
            name: {key: value for key, value in result.items() if key not in ("evaluations", "identity")}
            for name, result in results.items()
        },
    }


def _summary(group: Group, results: Results) -> dict[str, Any]:
    """Means over seeds of what a group's finished runs measured."""
    found = {seed: results[run.name] for seed, run in group.runs.items() if run.name in results}
    metrics: dict[str, dict[str, Any]] = {}
    for data in next(iter(found.values()))["evaluations"] if found else ():
        metrics[data] = {}
        for metric in METRICS:
            values = [result["evaluations"][data]["metrics"][metric] for result in found.values()]
            metrics[data][metric] = {"mean": statistics.fmean(values), "sd": _sd(values), "values": values}
    cost: dict[str, Any] = {}
    for key, reduce in (
        ("seconds_per_update", statistics.median),
        ("train_seconds", statistics.fmean),
        ("evaluation_seconds", statistics.fmean),
        ("peak_memory_mb", max),
        ("grad_norm_ratio", statistics.fmean),
        ("final_loss", statistics.fmean),
    ):
        values = [result[key] for result in found.values() if result[key] is not None]
        cost[key] = reduce(values) if values else None
    return {
        "entry": group.entry,
        "method": group.method,
        "labels": dict(group.labels),
        "seeds": list(found),
        "pairs_per_update": next(iter(group.runs.values())).pairs_per_update,
        "updates": sorted({result["updates"] for result in found.values()}),
        "metrics": metrics,
        **cost,
    }


def pairs_to_compare(plan: Plan) -> list[tuple[dict[str, str], str, str]]:
    """(labels, group, baseline's group), each pair once, though it may fill several cells of the grid.

    A variant that fixes one of the grid's values is compared in the cells of that value alone.
    """
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for cell, groups in plan.compared():
        baseline = groups[plan.baseline]
        for entry, name in groups.items():
            own = {**plan.fixed(entry), **plan.groups[name].labels}
            theirs = {**plan.fixed(plan.baseline), **plan.groups[baseline].labels}
            # What only the baseline has is in brackets: it tells rows apart, but is no setting of theirs.
            labels = {key: own.get(key, f"({theirs[key]})" if key in theirs else "") for key in cell}
            rows.setdefault((name, baseline), labels)
    order = list(plan.groups)
    return [(rows[pair], *pair) for pair in sorted(rows, key=lambda pair: order.index(pair[0]))]


def compare(plan: Plan, results: Results) -> list[dict[str, Any]]:
    """Every group against the baseline of its cell, on every data set by every metric.

    Scores are averaged over the seeds that both have, per query; ``p_holm`` is corrected over all rows of the same data
    set and metric.
    """
    rows: list[dict[str, Any]] = []
    known: dict[str, dict[tuple[str, str], dict[int, dict[str, float]]]] = {
        group.name: _query_scores(group, results) for group in plan.groups.values()
    }
    for labels, name, baseline in pairs_to_compare(plan):
        if name == baseline:
            continue
        for (data, metric), mine in known[name].items():
            theirs = known[baseline].get((data, metric), {})
            seeds = [seed for seed in mine if seed in theirs]
            if not seeds:
                continue
            queries = list(mine[seeds[0]])
            a = [statistics.fmean(mine[seed][query] for seed in seeds) for query in queries]
            b = [statistics.fmean(theirs[seed][query] for seed in seeds) for query in queries]
            found = paired_bootstrap(a, b, RESAMPLES, BOOTSTRAP_SEED)
            by_seed = [
                statistics.fmean(mine[s].values()) - statistics.fmean(theirs[s][query] for query in queries)
                for s in seeds
            ]
            rows.append(
                {
                    "group": name,
                    "baseline_group": baseline,
                    "entry": plan.groups[name].entry,
                    "labels": labels,
                    "data": data,
                    "metric": metric,
                    "seeds": seeds,
                    "queries": len(queries),
                    **found._asdict(),
                    "difference_by_seed": by_seed,
                    "sd_over_seeds": _sd(by_seed),
                }
            )
    for family in {(row["data"], row["metric"]) for row in rows}:
        members = [row for row in rows if (row["data"], row["metric"]) == family]
        for row, p in zip(members, holm([row["p_value"] for row in members]), strict=True):
            row["p_holm"] = p
    return rows


def _query_scores(group: Group, results: Results) -> dict[tuple[str, str], dict[int, dict[str, float]]]:
    """(data set, metric) -> seed -> query id -> score."""
    scores: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for seed, run in group.runs.items():
        for data, evaluation in results.get(run.name, {}).get("evaluations", {}).items():
            for metric, values in evaluation["per_query"].items():
                by_query = dict(zip(evaluation["query_ids"], values, strict=True))
                scores.setdefault((data, metric), {})[seed] = by_query
    return scores


def warnings(plan: Plan, results: Results) -> Iterator[str]:
    """What would make a comparison unfair: runs of one cell and seed that did not begin or go on alike."""
    checks = (
        ("initial_weights", "began with other weights"),
        ("data_order", "saw other pairs in some update (another batch sampler, or pairs per update?)"),
        ("pairs_per_update", "has other pairs per update"),
        ("updates", "made another number of updates"),
    )
    said: set[str] = set()
    for _, groups in plan.compared():
        for seed in plan.seeds:
            # The baseline's first: it is what the others are compared with, if it was finished.
            names = dict.fromkeys([groups[plan.baseline], *groups.values()])
            found = [results.get(plan.groups[name].runs[seed].name) for name in names]
            finished = [result for result in found if result is not None]
            for result in finished[1:]:
                reference = finished[0]
                for key, phrase in checks:
                    if result[key] != reference[key]:
                        said.add(f"{result['name']} {phrase} than {reference['name']}")
    yield from sorted(said)
    for key, what in (
        ("git_commit", "commits of contaccum"),
        ("versions", "package versions"),
        ("machine", "machines"),
    ):
        different = {str(result[key]) for result in results.values()}
        if len(different) > 1:
            yield f"runs were made with {len(different)} different {what} (or numbers of threads): mind the times"


def _sd(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


# The report to read ----------------------------------------------------------------------------------------------


def markdown(report: Mapping[str, Any]) -> str:
    """report.md: what was compared, what came out, what it cost."""
    groups, grid = report["groups"], list(report["grid"])
    baseline = report["baseline"]
    lines = [f"# {', '.join(entry['name'] for entry in report['entries'])} compared", ""]
    lines += [f"`{report['command']}`", ""]
    lines += [f"- baseline {baseline}; seeds {', '.join(map(str, report['seeds']))}"]
    for data in report.get("data", {}).get("evaluation", []):
        lines.append(
            f"- {data['name']} ({data['split']}): {data['queries']:,} queries, {data['documents']:,} documents"
            f"{_sampled(report)}"
        )
    updates = sorted({n for group in groups.values() for n in group["updates"]})
    pairs = sorted({group["pairs_per_update"] for group in groups.values()})
    lines.append(f"- {_range(updates)} updates of {_range(pairs)} pairs")
    for entry in report["entries"]:
        if entry["overrides"]:
            settings = ", ".join(f"{key}={value}" for key, value in entry["overrides"].items())
            lines.append(f"- {entry['name']}: {entry['method']} with {settings}")
    lines.append("")
    if report["warnings"]:
        lines += ["## Take care", "", *(f"- {text}" for text in report["warnings"]), ""]
    if report["failed"]:
        lines += ["## Failed", "", *(f"- {name}: {reason}" for name, reason in report["failed"].items()), ""]
    for data in dict.fromkeys(name for group in groups.values() for name in group["metrics"]):
        lines += [f"## {data}", ""]
        for metric, shown in METRICS.items():
            lines += [f"### {shown}", "", *_metric_table(report, data, metric, grid), ""]
    lines += ["## Cost", "", *_cost_table(groups, grid), ""]
    lines += ["## How to read it", "", *_NOTES]
    return "\n".join(lines)


def _metric_table(report: Mapping[str, Any], data: str, metric: str, grid: list[str]) -> list[str]:
    compared = {
        (row["group"], row["baseline_group"]): row
        for row in report["comparisons"]
        if (row["data"], row["metric"]) == (data, metric)
    }
    header = ["method", *grid, "mean", "sd", "difference", "95% interval", "p", "p (Holm)"]
    rows, shown = [], set()
    for name, group in report["groups"].items():
        values = group["metrics"].get(data, {}).get(metric)
        if values is None:
            continue
        own = [group["entry"], *(group["labels"].get(key, "") for key in grid)]
        numbers = [f"{values['mean']:.4f}", "-" if values["sd"] is None else f"{values['sd']:.4f}"]
        for (mine, _), row in compared.items():
            if mine != name:
                continue
            shown.add(name)
            interval = f"{row['low']:+.4f} to {row['high']:+.4f}"
            labels = [group["entry"], *(row["labels"].get(key, "") for key in grid)]
            rows.append(
                [*labels, *numbers, f"{row['difference']:+.4f}", interval, _p(row["p_value"]), _p(row["p_holm"])]
            )
        if name not in shown:
            rows.append([*own, *numbers, *["-"] * 4])
    return _table(header, rows)


def _cost_table(groups: Mapping[str, Mapping[str, Any]], grid: list[str]) -> list[str]:
    header = ["method", *grid, "seeds", "s/update", "training s", "peak MB", "gradient ratio", "final loss"]
    keys = (
        ("seconds_per_update", ".3f"),
        ("train_seconds", ".1f"),
        ("peak_memory_mb", ".0f"),
        ("grad_norm_ratio", ".3f"),
        ("final_loss", ".4f"),
    )
    return _table(
        header,
        [
            [
                group["entry"],
                *(group["labels"].get(key, "") for key in grid),
                str(len(group["seeds"])),
                *("-" if group[key] is None else format(group[key], spec) for key, spec in keys),
            ]
            for group in groups.values()
        ],
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def _p(value: float) -> str:
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _range(values: Sequence[int]) -> str:
    return " to ".join(f"{n:,}" for n in dict.fromkeys([values[0], values[-1]])) if values else "no"


def _sampled(report: Mapping[str, Any]) -> str:
    settings = report.get("settings", {}).get("evaluation", {})
    kept = [
        f"{settings[key]:,} {what}"
        for key, what in (("queries", "queries"), ("corpus", "documents"))
        if settings.get(key)
    ]
    return f", a fixed sample of at most {' and '.join(kept)}" if kept else ""
