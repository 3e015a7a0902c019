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
"""Keys of a run's result that must be equal in a fair comparison. Updates differ in equal time."""

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
    pairs = _pair_runs(groups, seeds, baseline, results)
    runs = {}
    for name, result in results.items():
        runs[name] = {key: result[key] for key in result if key not in ("evaluations", "identity")}
    return {
        **context,
        "baseline": baseline,
        "seeds": list(seeds),
        "warnings": [*_find_weaknesses(context), *_find_unfair_runs(pairs, baseline, context)],
        "failed": dict(failed),
        "groups": {group.name: _summarize(group, seeds, results) for group in groups},
        "comparisons": _compare(pairs, context),
        "runs": runs,
    }


Pairs = dict[str, dict[int, tuple[Mapping[str, Any], Mapping[str, Any]]]]
"""{name of a group: {seed: (its run, the run of the baseline)}}"""


def _pair_runs(
    groups: Sequence[Group], seeds: Sequence[int], baseline: str, results: Results
) -> Pairs:
    """Pair the runs of each group with those of the baseline; without seeds that miss a run."""
    pairs: Pairs = {}
    for base_group in [group for group in groups if group.entry == baseline]:
        for group in groups:
            if group is base_group:
                continue
            pairs[group.name] = {}
            for seed in seeds:
                names = (group.run_name(seed), base_group.run_name(seed))
                if all(name in results for name in names):
                    pairs[group.name][seed] = (results[names[0]], results[names[1]])
    return pairs


def _summarize(group: Group, seeds: Sequence[int], results: Results) -> dict[str, Any]:
    """Return the scores and costs of a group, averaged over the seeds whose runs have finished."""
    finished = [seed for seed in seeds if group.run_name(seed) in results]
    runs = [results[group.run_name(seed)] for seed in finished]
    metrics: dict[str, dict[str, Any]] = {}
    for data in runs[0]["evaluations"] if runs else ():
        metrics[data] = {}
        for metric in METRICS:
            values = [run["evaluations"][data]["metrics"][metric] for run in runs]
            sd = statistics.stdev(values) if len(values) > 1 else None
            metrics[data][metric] = {"mean": statistics.fmean(values), "sd": sd, "values": values}
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


def _compare(pairs: Pairs, context: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare every group with the baseline, on every data set by every metric.

    The score of a query is averaged over seeds. ``p_holm`` is corrected over all rows with the same
    data set and metric.
    """
    rows = []
    for data in context["data"]["evaluation"]:
        for metric in METRICS:
            family = []
            for name, runs in pairs.items():
                if not runs:
                    continue
                ours, theirs = (
                    average_by_query([run["evaluations"][data["name"]] for run in side], metric)
                    for side in zip(*runs.values(), strict=True)
                )
                row = {"group": name, "data": data["name"], "metric": metric, "seeds": list(runs)}
                test = sign_flip_test(ours, theirs, data["query_groups"])
                family.append({**row, "queries": len(ours), **test})
            add_holm(family)
            rows += family
    return rows


def average_by_query(evaluations: Sequence[Mapping[str, Any]], metric: str) -> dict[str, float]:
    """Return {query id: mean of its score over evaluations}, one per seed."""
    means = {}
    for query in evaluations[0]["per_query"]:
        means[query] = statistics.fmean(
            evaluation["per_query"][query][metric] for evaluation in evaluations
        )
    return means


def _find_weaknesses(context: Mapping[str, Any]) -> Iterator[str]:
    """Yield warnings about few passages, uncertain tuning, and scores on the tuning data."""
    for data in context["data"]["evaluation"]:
        num_groups = len(set(data["query_groups"].values()))
        yield from warn_of_few_groups(f"the queries of {data['name']}", num_groups)
    tuning = context["tuning"]
    if not tuning:
        return
    key = tuning["key"]
    for group in tuning["groups"].values():
        entry, chosen = group["entry"], group["chosen"]
        if chosen is None:
            yield f"{entry}: every run of tuning {key} failed, so there are no final runs"
        elif group["at_end"]:
            yield f"{entry}: the best {key}, {chosen:g}, is at an end of the values tried"
    tuning_data = {data["fingerprint"] for data in tuning["data"]}
    for data in context["data"]["evaluation"]:
        if data["fingerprint"] in tuning_data:
            yield f"{data['name']}: {key} was chosen on these data, so the scores are optimistic"


def _find_unfair_runs(pairs: Pairs, baseline: str, context: Mapping[str, Any]) -> Iterator[str]:
    """Yield warnings about runs that differ from the baseline's run in more than the method."""
    for name, runs in pairs.items():
        for key in SAME_AS_BASELINE:
            if key == "updates" and context["settings"]["seconds"] is not None:
                continue
            seeds = [str(seed) for seed, (run, base) in runs.items() if run[key] != base[key]]
            if seeds:
                yield f"{name}: another {key} than {baseline} (seeds {', '.join(seeds)})"


def render_markdown(report: Mapping[str, Any]) -> str:
    """Return the text of report.md: the main metric, warnings, other metrics, costs, settings."""
    sets = report["data"]["evaluation"]
    parts = [f"# {', '.join(group['entry'] for group in report['groups'].values())}"]
    parts += [_render_scores(report, data["name"], MAIN_METRIC) for data in sets]
    lines = [*report["warnings"]]
    lines += [f"failed: {name}: {reason}" for name, reason in report["failed"].items()]
    if lines:
        parts.append("## Warnings\n\n" + "\n".join(f"- {line}" for line in lines))
    for data in sets:
        parts += [_render_scores(report, data["name"], name) for name in METRICS][1:]
    cells = []
    for name, group in report["groups"].items():
        line = [name, str(len(group["seeds"]))]
        for key, _, form in COST.values():
            line.append("" if group[key] is None else form.format(group[key]))
        cells.append(line)
    parts.append(f"## Cost\n\n{markdown_table(['runs', 'seeds', *COST], cells)}")
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
        line = [name, scores["mean"], scores["sd"], *[""] * 4]
        if row := comparisons.get(name):
            line[3:] = f"{row['difference']:+.4f}", f"{row['low']:+.4f} to {row['high']:+.4f}"
            line += f"{row['p_value']:.3f}", f"{row['p_holm']:.3f}"
        cells.append(line)
    header = ["runs", "mean", "sd", f"minus {report['baseline']}"]
    header += ["95% interval", "p", "p (Holm)"]
    return f"## {METRICS[metric]} on {data}\n\n{markdown_table(header, cells)}"


def _render_tuning(tuning: Mapping[str, Any]) -> str:
    """Return the table of the scores on dev of each value; the chosen one is in bold."""
    values = sorted({value for group in tuning["groups"].values() for value in group["scores"]})
    cells = []
    for group in tuning["groups"].values():
        line = [group["entry"]]
        for value in values:
            score = group["scores"].get(value)
            text = "" if score is None else f"{score:.4f}"
            line.append(f"**{text}**" if value == group["chosen"] else text)
        cells.append(line)
    table = markdown_table(["entry", *(f"{value:g}" for value in values)], cells)
    return (
        f"## Tuning of {tuning['key']}\n\n{METRICS[MAIN_METRIC]} on dev, with seed "
        f"{tuning['seed']}:\n\n{table}"
    )
