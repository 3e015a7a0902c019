"""The report of a comparison: means over seeds, differences to the baseline, and warnings.

It is computed from the results of the runs; nothing is trained here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from comparison.plan import Group
from contaccum.evaluation.metrics import add_holm, sign_flip_test, warn_of_few_groups
from contaccum.evaluation.results import markdown_table

METRICS = {
    "NDCG@10": "nDCG@10",
    "Recall@100": "Recall@100",
    "MRR@10": "MRR@10",
    "Accuracy@20": "Top-20 accuracy",
}
"""{metric, as `evaluate_beir` names it: its title in a report}; the first is the main metric."""

MAIN_METRIC = next(iter(METRICS))

NOTES = """\
The mean and the standard deviation (sd) are over seeds. A difference is the score of a row minus
the score of the baseline, over the seeds that both have. Its interval and p-value come from a
two-sided sign-flip test over groups of queries that share a relevant document or nearly a text
(scores are averaged over seeds first): they show how the difference varies with the queries, and
the sd shows how a score varies with the seed. Holm's p is corrected over the rows of its table.
Seconds are training time without evaluation; s/update is the median. The gradient ratio is the norm
of the passage gradients over the norm of the query gradients."""

COST: dict[str, tuple[str, Callable[[list[float]], float], str]] = {
    "updates": ("updates", max, "{:,.0f}"),
    "pairs": ("pairs_trained", statistics.fmean, "{:,.0f}"),
    "s/update": ("seconds_per_update", statistics.median, "{:.3f}"),
    "training s": ("train_seconds", statistics.fmean, "{:,.1f}"),
    "peak MB": ("peak_memory_mb", max, "{:,.0f}"),
    "gradient ratio": ("grad_norm_ratio", statistics.fmean, "{:.3f}"),
    "final loss": ("final_loss", statistics.fmean, "{:.4f}"),
}
"""{column of the table of costs: (key in a run's result, function over seeds, number format)}"""

SAME_AS_BASELINE = (
    *("initial_weights", "data_order", "pairs_per_update", "updates"),
    *("git_commit", "versions", "machine"),
)
"""Keys of a run's result that must be equal in a fair comparison."""

Results = Mapping[str, Mapping[str, Any]]


def build_report(
    groups: Sequence[Group],
    seeds: Sequence[int],
    baseline: str,
    results: Results,
    failed: Mapping[str, str],
    context: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of report.json.

    Args:
        baseline: the entry that the others are compared with.
        results: the results of the finished runs.
        failed: {name of the run: reason}.
        context: command, settings, data, tuning, versions and commit, which are copied unchanged.
    """
    runs = {}
    for name, result in results.items():
        runs[name] = {key: result[key] for key in result if key not in ("evaluations", "identity")}
    return {
        **context,
        "baseline": baseline,
        "seeds": list(seeds),
        "warnings": [
            *_find_few_groups(context),
            *_find_tuning_weaknesses(context),
            *_find_unfair_differences(groups, seeds, baseline, results),
        ],
        "failed": dict(failed),
        "groups": {group.name: _summarize(group, seeds, results) for group in groups},
        "comparisons": _compare_with_baseline(groups, seeds, baseline, results, context),
        "runs": runs,
    }


def _summarize(group: Group, seeds: Sequence[int], results: Results) -> dict[str, Any]:
    """Return the scores and costs of a group, averaged over the seeds whose runs have finished."""
    finished = [seed for seed in seeds if group.run_name(seed) in results]
    runs = [results[group.run_name(seed)] for seed in finished]
    metrics: dict[str, dict[str, Any]] = {}
    for data in runs[0]["evaluations"] if runs else ():
        metrics[data] = {}
        for metric in METRICS:
            values = [run["evaluations"][data]["metrics"][metric] for run in runs]
            metrics[data][metric] = {
                "mean": statistics.fmean(values),
                "sd": statistics.stdev(values) if len(values) > 1 else None,
                "values": values,
            }
    summary: dict[str, Any] = {
        "entry": group.entry,
        "method": group.method,
        "overrides": group.overrides,
        "seeds": finished,
        "metrics": metrics,
    }
    for key, average, _ in COST.values():
        values = [run[key] for run in runs if run[key] is not None]
        summary[key] = average(values) if values else None
    return summary


def _compare_with_baseline(
    groups: Sequence[Group],
    seeds: Sequence[int],
    baseline: str,
    results: Results,
    context: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Compare every group with the baseline, on every data set by every metric.

    The score of a query is averaged over the seeds for which both groups have a finished run.
    ``p_holm`` is corrected over all rows with the same data set and metric.
    """
    rows = []
    query_groups = {data["name"]: data["query_groups"] for data in context["data"]["evaluation"]}
    families: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for group, pairs in _pair_runs(groups, seeds, baseline, results):
        for data in pairs[0][1]["evaluations"] if pairs else ():
            ours = [run["evaluations"][data] for _, run, _ in pairs]
            theirs = [run["evaluations"][data] for _, _, run in pairs]
            for metric in METRICS:
                row = {
                    "group": group.name,
                    "data": data,
                    "metric": metric,
                    "seeds": [seed for seed, _, _ in pairs],
                    **compare_queries(ours, theirs, metric, query_groups[data]),
                }
                rows.append(row)
                families.setdefault((data, metric), []).append(row)
    for family in families.values():
        add_holm(family)
    return rows


def _pair_runs(
    groups: Sequence[Group], seeds: Sequence[int], baseline: str, results: Results
) -> Iterator[tuple[Group, list[tuple[int, Mapping[str, Any], Mapping[str, Any]]]]]:
    """Yield each group but the baseline's, with (seed, its run, run of the baseline).

    Seeds of which a run is missing are left out.
    """
    for base_group in groups:
        if base_group.entry != baseline:
            continue
        for group in groups:
            pairs = []
            for seed in seeds:
                run = results.get(group.run_name(seed))
                base_run = results.get(base_group.run_name(seed))
                if run is not None and base_run is not None:
                    pairs.append((seed, run, base_run))
            if group is not base_group:
                yield group, pairs


def compare_queries(
    ours: Sequence[Mapping[str, Any]],
    theirs: Sequence[Mapping[str, Any]],
    metric: str,
    query_groups: Mapping[str, int],
) -> dict[str, Any]:
    """Compare two groups of runs; see `sign_flip_test`.

    Args:
        ours, theirs: evaluations of the same queries, one per seed.
        query_groups: {query id: its group}.

    Returns:
        The number of queries, and the result of the test; its ``groups`` are groups of queries.
    """
    scores = average_by_query(ours, metric)
    test = sign_flip_test(scores, average_by_query(theirs, metric), query_groups)
    return {"queries": len(scores), **test}


def average_by_query(evaluations: Sequence[Mapping[str, Any]], metric: str) -> dict[str, float]:
    """Return {query id: mean of its score over evaluations}, for instance one per seed."""
    means = {}
    for query in evaluations[0]["per_query"]:
        means[query] = statistics.fmean(
            evaluation["per_query"][query][metric] for evaluation in evaluations
        )
    return means


def _find_few_groups(context: Mapping[str, Any]) -> Iterator[str]:
    """Yield warnings about data sets whose queries are about few passages."""
    for data in context["data"]["evaluation"]:
        num_groups = len(set(data["query_groups"].values()))
        yield from warn_of_few_groups(f"the queries of {data['name']}", num_groups)


def _find_tuning_weaknesses(context: Mapping[str, Any]) -> Iterator[str]:
    """Yield warnings about uncertain choices of tuning, and about scores on the tuning data."""
    tuning = context["tuning"]
    if not tuning:
        return
    key = tuning["key"]
    for group in tuning["groups"].values():
        entry, chosen, worst = group["entry"], group["chosen"], group["worst"]
        if chosen is None:
            yield f"{entry}: every run of tuning {key} failed, so there are no final runs"
        elif group["at_end"]:
            yield f"{entry}: the best {key}, {chosen}, is at an end of the values tried"
        if worst is not None and worst["low"] <= 0.0:
            yield (
                f"{entry}: on dev, {key} {chosen} is not significantly better than the worst value "
                f"{worst['value']} ({worst['difference']:+.4f}, {_format_interval(worst)})"
            )
    tuning_data = {data["fingerprint"] for data in tuning["data"]}
    for data in context["data"]["evaluation"]:
        if data["fingerprint"] in tuning_data:
            yield f"{data['name']}: {key} was chosen on these data, so the scores are optimistic"


def _find_unfair_differences(
    groups: Sequence[Group], seeds: Sequence[int], baseline: str, results: Results
) -> Iterator[str]:
    """Yield warnings about runs that differ from the baseline's run in more than the method."""
    for group, pairs in _pair_runs(groups, seeds, baseline, results):
        for key in SAME_AS_BASELINE:
            differing = [str(seed) for seed, run, base_run in pairs if run[key] != base_run[key]]
            if differing:
                yield f"{group.entry}: another {key} than {baseline} (seeds {', '.join(differing)})"


def render_markdown(report: Mapping[str, Any]) -> str:
    """Return the text of report.md: the main metric, warnings, other metrics, costs, settings."""
    sets = report["data"]["evaluation"]
    names = [data["name"] for data in sets]
    parts = [f"# {', '.join(group['entry'] for group in report['groups'].values())}"]
    for name in names:
        parts.append(_render_scores(report, name, MAIN_METRIC))
    lines = [*report["warnings"]]
    for name, reason in report["failed"].items():
        lines.append(f"failed: {name}: {reason}")
    if lines:
        parts.append("## Warnings\n\n" + "\n".join(f"- {line}" for line in lines))
    for name in names:
        for metric in METRICS:
            if metric != MAIN_METRIC:
                parts.append(_render_scores(report, name, metric))
    parts.append(_render_costs(report))
    if report["tuning"]:
        parts.append(_render_tuning(report["tuning"]))
    lines = [f"`{report['command']}`", ""]
    for data in sets:
        lines.append(
            f"- {data['name']} ({data['split']}): {data['queries']:,} queries in "
            f"{len(set(data['query_groups'].values())):,} groups, {data['documents']:,} documents"
        )
    for name, group in report["groups"].items():
        settings = [f"{key}={value}" for key, value in group["overrides"].items()]
        lines.append(f"- {name}: {' '.join([group['method'], *settings])}")
    for key, value in report["settings"]["options"].items():
        lines.append(f"- {key}: {value}")
    parts.append("## What was compared\n\n" + "\n".join(lines))
    parts.append(f"## How to read it\n\n{NOTES}")
    return "\n\n".join(parts) + "\n"


def _render_scores(report: Mapping[str, Any], data: str, metric: str) -> str:
    """Return the table of a data set and metric, with its title."""
    comparisons = {}
    for row in report["comparisons"]:
        if row["data"] == data and row["metric"] == metric:
            comparisons[row["group"]] = row
    cells = []
    for name, group in report["groups"].items():
        if data not in group["metrics"]:
            continue
        scores = group["metrics"][data][metric]
        sd = "" if scores["sd"] is None else f"{scores['sd']:.4f}"
        line = [name, f"{scores['mean']:.4f}", sd]
        row = comparisons.get(name)
        if row is None:
            line += [""] * 4
        else:
            line += [f"{row['difference']:+.4f}", _format_interval(row)]
            line += [f"{row['p_value']:.3f}", f"{row['p_holm']:.3f}"]
        cells.append(line)
    header = ["runs", "mean", "sd", f"minus {report['baseline']}"]
    header += ["95% interval", "p", "p (Holm)"]
    return f"## {METRICS[metric]} on {data}\n\n{markdown_table(header, cells)}"


def _render_costs(report: Mapping[str, Any]) -> str:
    cells = []
    for name, group in report["groups"].items():
        line = [name, str(len(group["seeds"]))]
        for key, _, form in COST.values():
            line.append("" if group[key] is None else form.format(group[key]))
        cells.append(line)
    return f"## Cost\n\n{markdown_table(['runs', 'seeds', *COST], cells)}"


def _render_tuning(tuning: Mapping[str, Any]) -> str:
    """Return the table of the scores on dev of each value; the chosen one is in bold."""
    values = {value for group in tuning["groups"].values() for value in group["scores"]}
    ordered = sorted(values, key=float)
    cells = []
    for group in tuning["groups"].values():
        line = [group["entry"]]
        for value in ordered:
            score = group["scores"].get(value)
            text = "" if score is None else f"{score:.4f}"
            line.append(f"**{text}**" if value == group["chosen"] else text)
        cells.append(line)
    return (
        f"## Tuning of {tuning['key']}\n\n{METRICS[MAIN_METRIC]} on dev, with seed "
        f"{tuning['seed']}:\n\n{markdown_table(['entry', *ordered], cells)}"
    )


def _format_interval(test: Mapping[str, float]) -> str:
    return f"{test['low']:+.4f} to {test['high']:+.4f}"
