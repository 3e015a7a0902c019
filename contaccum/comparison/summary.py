"""The report of a comparison: means over seeds, differences to the baseline, and warnings.

It is computed from the results of the runs; nothing is trained or plotted here. `contaccum report`
shows the same tables as report.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contaccum.evaluation.metrics import add_holm, paired_bootstrap

if TYPE_CHECKING:
    from contaccum.comparison.plan import Group, Plan

# Metric as evaluate_beir names it -> its name in a report. Curves show the first one.
METRICS = {
    "NDCG@10": "nDCG@10",
    "Recall@100": "Recall@100",
    "MRR@10": "MRR@10",
    "Accuracy@20": "Top-20 accuracy",
}
NOTES = """\
Mean and standard deviation (sd) are over seeds. A difference is to the baseline in the same cell of
the grid. Its interval and p-value come from a paired bootstrap over queries (10,000 resamples,
two-sided, scores averaged over seeds first): they say how the difference varies with the queries,
and the sd says how a score varies with the seed. Holm's p is corrected over the rows of its table.
A value in brackets is the baseline's: the row itself has no such setting. Seconds are of training
alone; s/update is the median. The gradient ratio is passages over queries."""

# Column of the table of costs -> key of a run's result, average over seeds, format.
COST: dict[str, tuple[str, Any, str]] = {
    "pairs": ("pairs_trained", statistics.fmean, "{:,.0f}"),
    "s/update": ("seconds_per_update", statistics.median, "{:.3f}"),
    "training s": ("train_seconds", statistics.fmean, "{:,.1f}"),
    "peak MB": ("peak_memory_mb", max, "{:,.0f}"),
    "gradient ratio": ("grad_norm_ratio", statistics.fmean, "{:.3f}"),
    "final loss": ("final_loss", statistics.fmean, "{:.4f}"),
}

_SWITCHED_OFF = {"-", "false", "none", "0", "0.0"}  # values of a setting that an entry is without

Results = Mapping[str, Mapping[str, Any]]
"""{name of the run: content of its result.json}"""


def build_report(
    plan: Plan,
    results: Results,
    failed: Mapping[str, str],
    context: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of report.json.

    Args:
        results: results of the finished runs.
        failed: {name of the run: the reason}.
        context: command, settings, data, tuning, versions and commit, which are copied as they are.
    """
    # Imported here, so that a page is drawn without torch.
    from contaccum.comparison.plan import changed_settings, loss_settings

    settings = loss_settings(plan)
    groups = plan.groups.values()
    return {
        "tuning": None,
        **context,
        "baseline": plan.baseline,
        "seeds": list(plan.seeds),
        "grid": {key: list(values) for key, values in plan.grid.items()},
        "entries": [entry._asdict() for entry in plan.entries],
        "tricks": {"settings": settings, "said": _describe_differences(settings)},
        "changed_settings": changed_settings(plan),
        "warnings": [*_tuning_warnings(context), *_fairness_warnings(plan, results)],
        "failed": dict(failed),
        "groups": {group.name: _summarize(group, plan.seeds, results) for group in groups},
        "comparisons": _compare_with_baseline(plan, results),
        "runs": {name: _without_scores(result) for name, result in results.items()},
    }


def _without_scores(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's result without the scores of each query, and without what identifies it."""
    return {key: value for key, value in result.items() if key not in ("evaluations", "identity")}


def _summarize(group: Group, seeds: Sequence[int], results: Results) -> dict[str, Any]:
    """Return means over seeds of the figures of a group's finished runs."""
    finished_seeds = [seed for seed in seeds if group.run(seed) in results]
    runs = [results[group.run(seed)] for seed in finished_seeds]
    data_names = list(runs[0]["evaluations"]) if runs else []
    summary: dict[str, Any] = {
        "entry": group.entry,
        "method": group.method,
        "labels": dict(group.labels),
        "seeds": finished_seeds,
        "updates": sorted({run["updates"] for run in runs}),
        "pairs_per_update": group.parsed[2].total_train_batch_size,
        "metrics": {data: _average_metrics(runs, data) for data in data_names},
    }
    for key, average, _ in COST.values():
        values = [run[key] for run in runs if run.get(key) is not None]
        summary[key] = average(values) if values else None
    return summary


def _average_metrics(runs: Sequence[Mapping[str, Any]], data: str) -> dict[str, dict[str, Any]]:
    """Return {metric: its mean, standard deviation and values over runs} on a data set."""
    averages = {}
    for metric in METRICS:
        values = [run["evaluations"][data]["metrics"][metric] for run in runs]
        averages[metric] = {
            "mean": statistics.fmean(values),
            "sd": statistics.stdev(values) if len(values) > 1 else None,
            "values": values,
        }
    return averages


def _compare_with_baseline(plan: Plan, results: Results) -> list[dict[str, Any]]:
    """Compare every group with the baseline of its cell, on every data set by every metric.

    Scores are averaged, per query, over the seeds that both have. ``p_holm`` is corrected over all
    rows of the same data set and metric.
    """
    rows: list[dict[str, Any]] = []
    for (name, baseline_name), labels in plan.pairs.items():
        group = plan.groups[name]
        baseline = plan.groups[baseline_name]
        seeds = []
        for seed in plan.seeds:
            if group.run(seed) in results and baseline.run(seed) in results:
                seeds.append(seed)
        data_names = results[group.run(seeds[0])]["evaluations"] if seeds else ()
        for data in data_names:
            evaluations = [results[group.run(seed)]["evaluations"][data] for seed in seeds]
            baselines = [results[baseline.run(seed)]["evaluations"][data] for seed in seeds]
            for metric in METRICS:
                row = {
                    "group": group.name,
                    "baseline_group": baseline.name,
                    "entry": group.entry,
                    "labels": labels,
                    "data": data,
                    "metric": metric,
                    "seeds": seeds,
                    **_compare_evaluations(evaluations, baselines, metric),
                }
                rows.append(row)
    for family in {(row["data"], row["metric"]) for row in rows}:
        add_holm([row for row in rows if (row["data"], row["metric"]) == family])
    return rows


def _compare_evaluations(
    evaluations: Sequence[Mapping[str, Any]],
    baselines: Sequence[Mapping[str, Any]],
    metric: str,
) -> dict[str, Any]:
    """Return the paired bootstrap over queries, and the difference of each seed.

    Args:
        evaluations: evaluations of a group's runs, one per seed.
        baselines: evaluations of the baseline's runs, of the same seeds in the same order.
    """
    scores = by_query(evaluations, metric)
    baseline_scores = by_query(baselines, metric)
    bootstrap = paired_bootstrap(
        list(scores.values()),
        [baseline_scores[query] for query in scores],
    )
    differences = []
    for evaluation, baseline in zip(evaluations, baselines, strict=True):
        differences.append(evaluation["metrics"][metric] - baseline["metrics"][metric])
    return {"queries": len(scores), **bootstrap, "difference_by_seed": differences}


def by_query(evaluations: Sequence[Mapping[str, Any]], metric: str) -> dict[str, float]:
    """Return {query: its score, averaged over the evaluations of several seeds}."""
    means = {}
    for query in evaluations[0]["per_query"]:
        scores = [evaluation["per_query"][query][metric] for evaluation in evaluations]
        means[query] = statistics.fmean(scores)
    return means


def _describe_differences(settings: Mapping[str, Mapping[str, str]]) -> str:
    """Return a sentence on the loss's settings that only some entries have, or that differ.

    Args:
        settings: {entry: {setting: its value}}, as `loss_settings` returns them.
    """
    lacked = []
    different = []
    for key in next(iter(settings.values())):
        values = {entry_settings[key] for entry_settings in settings.values()}
        used_values = values - _SWITCHED_OFF
        if used_values and used_values != values:
            lacked.append(key)
        elif len(used_values) > 1:
            different.append(key)
    parts = []
    if lacked:
        parts.append(f"some entries had and others had not: {', '.join(lacked)}")
    if different:
        parts.append(f"all had, with different values: {', '.join(different)}")
    if not parts:
        return "All entries had the same settings of the loss."
    return f"Of the loss's settings {'; '.join(parts)}."


def _tuning_warnings(context: Mapping[str, Any]) -> list[str]:
    """Warn of best values at an end of those tried, and of data that a value was chosen on.

    An entry without any best value is named too.
    """
    tuning = context.get("tuning")
    if not tuning:
        return []
    key = tuning["key"]
    details_by_text: dict[str, list[str]] = {}
    for group in tuning["groups"].values():
        cell = cell_name(group["labels"])
        if group["chosen"] is None:
            text = f"{group['entry']}: every {key} tried failed, so that it has no final runs"
            details_by_text.setdefault(text, []).append(cell)
            continue
        if group["at_end"]:
            text = f"{group['entry']}: its best {key} is at an end of the values tried"
            best = f"{group['chosen']} of {len(group['scores'])}"
            details_by_text.setdefault(text, []).append(f"{cell}: {best}" if cell else best)
        worst = group.get("worst")  # reports of earlier versions have none
        if worst is not None and worst["low"] <= 0.0:
            text = (
                f"{group['entry']}: dev data do not tell its best {key} from the one that scores "
                "lowest; take more dev queries, or do not read much into the choice"
            )
            interval = (
                f"{group['chosen']} against {worst['value']}: {worst['difference']:+.4f}, 95% "
                f"{worst['low']:+.4f} to {worst['high']:+.4f}"
            )
            details_by_text.setdefault(text, []).append(f"{cell}: {interval}" if cell else interval)
    lines = []
    for text, details in details_by_text.items():
        detail = "; ".join(filter(None, details))
        lines.append(f"{text} ({detail})" if detail else text)
    tuning_data = {data["fingerprint"] for data in tuning["data"]}
    for data in context["data"]["evaluation"]:
        if data["fingerprint"] in tuning_data:
            text = f"{key} was chosen on this data, so that its scores are no test"
            lines.append(f"{data['name']}: {text}")
    return lines


# Key of a run's result that must be equal to the baseline's -> the warning if it is not.
_SAME_AS_BASELINE = {
    "initial_weights": "began with other weights",
    "data_order": "saw other pairs in some update (another batch sampler, or pairs per update?)",
    "pairs_per_update": "has other pairs per update",
    "updates": "made another number of updates",
    "git_commit": "was of another commit of contaccum",
    "versions": "had other versions of packages",
    "machine": "was on another machine, or had other threads,",
}


def _fairness_warnings(plan: Plan, results: Results) -> list[str]:
    """Warn, once for each entry, if its runs differ unfairly from the baseline's of the same seed.

    A warning names the seeds that it concerns, and the cells of the grid where the seeds are not
    the same in every cell.
    """
    cells_by_entry: dict[str, set[str]] = {}
    seeds_by_text: dict[tuple[str, str], dict[str, list[int]]] = {}
    for (name, baseline_name), labels in plan.pairs.items():
        group = plan.groups[name]
        baseline = plan.groups[baseline_name]
        cell = cell_name(labels)
        cells_by_entry.setdefault(group.entry, set()).add(cell)
        for seed in plan.seeds:
            run = results.get(group.run(seed))
            baseline_run = results.get(baseline.run(seed))
            if run is None or baseline_run is None:
                continue
            for key, phrase in _SAME_AS_BASELINE.items():
                if run[key] != baseline_run[key]:
                    text = f"{group.entry} {phrase} than {baseline.entry}"
                    seeds_by_cell = seeds_by_text.setdefault((group.entry, text), {})
                    seeds_by_cell.setdefault(cell, []).append(seed)
    lines = []
    for (entry, text), seeds_by_cell in seeds_by_text.items():
        details = {cell: _seeds_text(seeds) for cell, seeds in seeds_by_cell.items()}
        all_cells = seeds_by_cell.keys() == cells_by_entry[entry]
        if all_cells and len(set(details.values())) == 1:
            detail = next(iter(details.values()))
        else:
            detail = "; ".join(f"{cell}, {seeds}" for cell, seeds in details.items())
        lines.append(f"{text}: {detail}")
    return lines


def _seeds_text(seeds: Sequence[int]) -> str:
    """Return "seed 3", or "seeds 0, 1 and 2"."""
    noun = "seed" if len(seeds) == 1 else "seeds"
    return f"{noun} {join_words([str(seed) for seed in seeds])}"


def cell_name(labels: Mapping[str, str]) -> str:
    """Return the grid's values of a group: "bank_size=8, learning_rate=1e-3"."""
    return ", ".join(f"{key}={value}" for key, value in labels.items())


def join_words(words: Sequence[str]) -> str:
    """Return "a", "a and b", or "a, b and c"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def markdown(report: Mapping[str, Any]) -> str:
    """Return the text of report.md: the result and warnings, costs, then what was compared."""
    main_metric, *other_metrics = METRICS
    differing_settings = {}
    common_settings = {}
    for key, value_by_entry in report["changed_settings"].items():
        values = list(value_by_entry.values())
        if len(set(values)) == 1:
            common_settings[key] = values[0]
        else:
            differing_settings[key] = values
    context = {
        "report": report,
        "metric_titles": METRICS,
        "main_metric": main_metric,
        "other_metrics": other_metrics,
        "rows": table_rows,
        "cost": COST,
        "notes": NOTES,
        "differing_settings": differing_settings,
        "common_settings": common_settings,
        "join_words": join_words,
    }
    return template(Path(__file__).with_name("report.md.j2")).render(context)


def template(path: Path, **settings: Any) -> Any:
    """Return a Jinja template, in which an undefined name is an error.

    Args:
        settings: more settings of Jinja's environment.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(path.parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **settings,
    )
    return environment.get_template(path.name)


def table_rows(report: Mapping[str, Any], data: str, metric: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table of a data set and metric.

    A row has ``entry`` and ``labels``; ``mean``, ``sd`` and ``values`` of a group; and
    ``compared``, the report's comparison with a baseline. A group has a row for each baseline that
    it is compared with, or one row where ``compared`` is None.
    """
    for name, group in report["groups"].items():
        values = group["metrics"].get(data, {}).get(metric)
        if values is None:
            continue
        comparisons = []
        for comparison in report["comparisons"]:
            key = (comparison["group"], comparison["data"], comparison["metric"])
            if key == (name, data, metric):
                comparisons.append(comparison)
        for comparison in comparisons or [None]:
            labels = (comparison or group)["labels"]
            yield {"entry": group["entry"], "labels": labels, **values, "compared": comparison}
