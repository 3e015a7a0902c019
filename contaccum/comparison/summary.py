"""The report of a comparison: means over seeds, differences to the baseline, and warnings.

It is computed from the results of the runs; nothing is trained or plotted here. A group has the
runs of one method or variant (an entry) in one cell of the grid. See `contaccum.comparison.plan`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contaccum.evaluation.metrics import add_holm, paired_bootstrap

if TYPE_CHECKING:
    from contaccum.comparison.plan import Group, Plan

METRICS = {
    "NDCG@10": "nDCG@10",
    "Recall@100": "Recall@100",
    "MRR@10": "MRR@10",
    "Accuracy@20": "Top-20 accuracy",
}
"""{metric, as `evaluate_beir` names it: its title in a report}; the first is the main metric."""

MAIN_METRIC = next(iter(METRICS))

NOTES = """\
The mean and the standard deviation (sd) are over seeds. A difference is the score of a row
minus the score of the baseline in the same cell of the grid. Its interval and p-value come from
a paired bootstrap over queries (10,000 resamples, two-sided; scores are averaged over seeds
first): they show how the difference varies with the queries, and the sd shows how a score
varies with the seed. Holm's p is corrected over the rows of its table. A value in brackets is a
setting of the baseline that the method of the row does not use, or for which the variant of the
row has a value of its own. Seconds are training time without evaluation; s/update is the
median. The gradient ratio is the norm of the passage gradients over the norm of the query
gradients."""

COST: dict[str, tuple[str, Callable[[list[float]], float], str]] = {
    "pairs": ("pairs_trained", statistics.fmean, "{:,.0f}"),
    "s/update": ("seconds_per_update", statistics.median, "{:.3f}"),
    "training s": ("train_seconds", statistics.fmean, "{:,.1f}"),
    "peak MB": ("peak_memory_mb", max, "{:,.0f}"),
    "gradient ratio": ("grad_norm_ratio", statistics.fmean, "{:.3f}"),
    "final loss": ("final_loss", statistics.fmean, "{:.4f}"),
}
"""{column of the table of costs: (key in a run's result, function over seeds, number format)}"""

# Values of a loss setting that mean "off" or "not used by the method".
_SWITCHED_OFF = {"-", "false", "none", "0", "0.0"}

Results = Mapping[str, Mapping[str, Any]]
"""{name of the run: content of its result.json}"""

Row = dict[str, Any]
"""The comparison of a group with its baseline on one data set by one metric, in report.json."""


def build_report(
    plan: Plan,
    results: Results,
    failed: Mapping[str, str],
    context: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of report.json.

    Args:
        results: the results of the finished runs.
        failed: {name of the run: reason}.
        context: command, settings, data, tuning, versions and commit, which are copied unchanged.
    """
    # Imported here, so that `contaccum report` can show a comparison without importing torch.
    from contaccum.comparison.settings import changed_settings, loss_settings

    settings = loss_settings(plan)
    groups = {}
    for group in plan.groups.values():
        groups[group.name] = _summarize(group, plan.seeds, results)
    return {
        "tuning": None,
        **context,
        "baseline": plan.baseline,
        "seeds": list(plan.seeds),
        "grid": {key: list(values) for key, values in plan.grid.items()},
        "entries": [entry._asdict() for entry in plan.entries],
        "tricks": {"settings": settings, "said": _describe_differences(settings)},
        "changed_settings": changed_settings(plan),
        "warnings": [
            *_collect_tuning_warnings(context),
            *_collect_fairness_warnings(plan, results),
        ],
        "failed": dict(failed),
        "groups": groups,
        "comparisons": _compare_with_baseline(plan, results),
        "runs": {name: _drop_query_scores(result) for name, result in results.items()},
    }


def _drop_query_scores(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's result without its evaluations and its identity, which are long."""
    short_result = dict(result)
    short_result.pop("evaluations", None)
    short_result.pop("identity", None)
    return short_result


def _summarize(group: Group, seeds: Sequence[int], results: Results) -> dict[str, Any]:
    """Return the scores and costs of a group, averaged over the seeds whose runs have finished."""
    finished_seeds = []
    runs = []
    for seed in seeds:
        if group.run_name(seed) in results:
            finished_seeds.append(seed)
            runs.append(results[group.run_name(seed)])
    data_names = list(runs[0]["evaluations"]) if runs else []
    summary: dict[str, Any] = {
        "entry": group.entry,
        "method": group.method,
        "labels": dict(group.labels),
        "seeds": finished_seeds,
        "updates": sorted({run["updates"] for run in runs}),
        "pairs_per_update": group.arguments.training.total_train_batch_size,
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


def _compare_with_baseline(plan: Plan, results: Results) -> list[Row]:
    """Compare every group with the baseline of its cell, on every data set by every metric.

    The score of a query is averaged over the seeds for which both groups have a finished run.
    ``p_holm`` is corrected over all rows with the same data set and metric.
    """
    rows: list[Row] = []
    for (name, baseline_name), labels in plan.comparisons.items():
        group = plan.groups[name]
        baseline = plan.groups[baseline_name]
        seeds = []
        for seed in plan.seeds:
            if group.run_name(seed) in results and baseline.run_name(seed) in results:
                seeds.append(seed)
        data_names = results[group.run_name(seeds[0])]["evaluations"] if seeds else ()
        for data in data_names:
            evaluations = []
            baseline_evaluations = []
            for seed in seeds:
                result = results[group.run_name(seed)]
                baseline_result = results[baseline.run_name(seed)]
                evaluations.append(result["evaluations"][data])
                baseline_evaluations.append(baseline_result["evaluations"][data])
            for metric in METRICS:
                row = {
                    "group": group.name,
                    "baseline_group": baseline.name,
                    "entry": group.entry,
                    "labels": labels,
                    "data": data,
                    "metric": metric,
                    "seeds": seeds,
                    **_compare_evaluations(evaluations, baseline_evaluations, metric),
                }
                rows.append(row)
    rows_by_table: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        rows_by_table.setdefault((row["data"], row["metric"]), []).append(row)
    for table in rows_by_table.values():
        add_holm(table)
    return rows


def _compare_evaluations(
    evaluations: Sequence[Mapping[str, Any]],
    baseline_evaluations: Sequence[Mapping[str, Any]],
    metric: str,
) -> dict[str, Any]:
    """Return the result of a paired bootstrap over queries, and the difference for each seed.

    Args:
        evaluations: the evaluations of a group's runs, one per seed.
        baseline_evaluations: the evaluations of the baseline's runs, with the same seeds in the
            same order.
    """
    scores = average_by_query(evaluations, metric)
    baseline_scores = average_by_query(baseline_evaluations, metric)
    bootstrap = paired_bootstrap(
        list(scores.values()),
        [baseline_scores[query] for query in scores],
    )
    differences = []
    for evaluation, baseline in zip(evaluations, baseline_evaluations, strict=True):
        differences.append(evaluation["metrics"][metric] - baseline["metrics"][metric])
    return {"queries": len(scores), **bootstrap, "difference_by_seed": differences}


def average_by_query(evaluations: Sequence[Mapping[str, Any]], metric: str) -> dict[str, float]:
    """Return {query id: mean of its score over evaluations}.

    Args:
        evaluations: the evaluations of the same queries, for instance one per seed.
    """
    means = {}
    for query in evaluations[0]["per_query"]:
        scores = [evaluation["per_query"][query][metric] for evaluation in evaluations]
        means[query] = statistics.fmean(scores)
    return means


def _describe_differences(settings: Mapping[str, Mapping[str, str]]) -> str:
    """Return sentences that name the loss settings in which the entries differ.

    Args:
        settings: {entry: {setting: its value}}, as `loss_settings` returns them.
    """
    partly_used = []
    different = []
    for key in next(iter(settings.values())):
        values = {entry_settings[key] for entry_settings in settings.values()}
        used_values = values - _SWITCHED_OFF
        if used_values and used_values != values:
            partly_used.append(key)
        elif len(used_values) > 1:
            different.append(key)
    sentences = []
    if partly_used:
        names = ", ".join(partly_used)
        sentences.append(f"Settings of the loss that only some entries use: {names}.")
    if different:
        names = ", ".join(different)
        sentences.append(
            f"Settings of the loss that all entries use with different values: {names}."
        )
    if not sentences:
        sentences.append("All entries have the same settings of the loss.")
    return " ".join(sentences)


def _collect_tuning_warnings(context: Mapping[str, Any]) -> list[str]:
    """Return warnings about uncertain choices of tuning, and about scores on the tuning data.

    Warnings with the same text are joined in one line, with the details of each cell of the grid.
    """
    tuning = context.get("tuning")
    if not tuning:
        return []
    key = tuning["key"]
    details_by_text: dict[str, list[str]] = {}
    for group in tuning["groups"].values():
        cell = cell_name(group["labels"])
        for text, detail in _find_weaknesses(key, group):
            if cell and detail:
                detail = f"{cell}: {detail}"
            details_by_text.setdefault(text, []).append(detail or cell)
    lines = []
    for text, details in details_by_text.items():
        joined = "; ".join(filter(None, details))
        lines.append(f"{text} ({joined})" if joined else text)
    tuning_data = {data["fingerprint"] for data in tuning["data"]}
    for data in context["data"]["evaluation"]:
        if data["fingerprint"] in tuning_data:
            lines.append(
                f"{data['name']}: {key} was chosen on these data, so the scores on them are too "
                "optimistic; score on other data"
            )
    return lines


def _find_weaknesses(key: str, group: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a warning and its detail for each weakness of the value that tuning has chosen.

    Args:
        group: the tuning of a group, as `summarize_tuning` returns it.
    """
    entry = group["entry"]
    chosen = group["chosen"]
    if chosen is None:
        yield f"{entry}: every run of tuning {key} failed, so there are no final runs", ""
        return
    if group["at_end"]:
        text = (
            f"{entry}: the best {key} is the smallest or the largest value tried, so a value "
            "beyond it may be better; try it with --tune, or raise --tune_most"
        )
        yield text, f"chosen {chosen}, {len(group['scores'])} values tried"
    worst = group["worst"]
    if worst is not None and worst["low"] <= 0.0:
        text = (
            f"{entry}: on the dev data the best {key} is not significantly better than the one "
            "with the lowest score, so the choice says little; take more dev queries"
        )
        detail = (
            f"{chosen} against {worst['value']}: {worst['difference']:+.4f}, 95% "
            f"{worst['low']:+.4f} to {worst['high']:+.4f}"
        )
        yield text, detail


# {key of a run's result that must be equal in a fair comparison: the phrase if it differs, in
# "ENTRY phrase than BASELINE"}
_SAME_AS_BASELINE = {
    "initial_weights": "started from other weights",
    "data_order": "had other pairs in some update, maybe by another batch sampler,",
    "pairs_per_update": "had another number of pairs per update",
    "updates": "made another number of updates",
    "git_commit": "ran with another commit of contaccum",
    "versions": "ran with other versions of packages",
    "machine": "ran on another machine, or with another number of threads,",
}


def _collect_fairness_warnings(plan: Plan, results: Results) -> list[str]:
    """Return warnings about runs that differ from the baseline's run in more than the method.

    Runs of an entry with the same difference share a warning. It names the seeds of these runs, and
    also the cells of the grid unless all cells have the difference with the same seeds.
    """
    cells_by_entry: dict[str, set[str]] = {}
    seeds_by_text: dict[tuple[str, str], dict[str, list[int]]] = {}  # (entry, text): cell: seeds
    for (name, baseline_name), labels in plan.comparisons.items():
        group = plan.groups[name]
        baseline = plan.groups[baseline_name]
        cell = cell_name(labels)
        cells_by_entry.setdefault(group.entry, set()).add(cell)
        for seed in plan.seeds:
            run = results.get(group.run_name(seed))
            baseline_run = results.get(baseline.run_name(seed))
            if run is None or baseline_run is None:
                continue
            for key, phrase in _SAME_AS_BASELINE.items():
                if run[key] != baseline_run[key]:
                    text = f"{group.entry} {phrase} than {baseline.entry}"
                    seeds_by_cell = seeds_by_text.setdefault((group.entry, text), {})
                    seeds_by_cell.setdefault(cell, []).append(seed)
    lines = []
    for (entry, text), seeds_by_cell in seeds_by_text.items():
        seeds_of_cells = list(seeds_by_cell.values())
        has_all_cells = seeds_by_cell.keys() == cells_by_entry[entry]
        first_seeds = seeds_of_cells[0]
        if has_all_cells and all(seeds == first_seeds for seeds in seeds_of_cells):
            detail = _format_seeds(first_seeds)
        else:
            details = []
            for cell, seeds in seeds_by_cell.items():
                details.append(f"{cell}, {_format_seeds(seeds)}")
            detail = "; ".join(details)
        lines.append(f"{text}: {detail}")
    return lines


def _format_seeds(seeds: Sequence[int]) -> str:
    """Return "seed 3", or "seeds 0, 1 and 2"."""
    noun = "seed" if len(seeds) == 1 else "seeds"
    return f"{noun} {join_words([str(seed) for seed in seeds])}"


def cell_name(labels: Mapping[str, str]) -> str:
    """Return the labels of a group as text: "bank_size=8, learning_rate=1e-3"."""
    return ", ".join(f"{key}={value}" for key, value in labels.items())


def join_words(words: Sequence[str]) -> str:
    """Return "a", "a and b", or "a, b and c"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def render_markdown(report: Mapping[str, Any]) -> str:
    """Return the text of report.md: result, warnings, other metrics, costs, data and settings."""
    other_metrics = [metric for metric in METRICS if metric != MAIN_METRIC]
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
        "main_metric": MAIN_METRIC,
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
    """Return a Jinja template that raises an error for an undefined name.

    Args:
        settings: further settings of Jinja's environment.
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

    A row has the ``entry``, ``labels``, ``mean``, ``sd`` and ``values`` of a group. Under
    ``compared`` it has the comparison with a baseline, or None for a group without comparison. A
    group that is compared with several baselines has a row for each of them.
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
