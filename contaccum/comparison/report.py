"""From the results of runs to a comparison: means over seeds, differences to the baseline, and whether to trust them.

Reads what the runs left; trains and draws nothing. The tables are those of report.md and of `contaccum report`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contaccum.evaluation.metrics import add_holm, paired_bootstrap

if TYPE_CHECKING:
    from contaccum.comparison.plan import Group, Plan

# Metric as evaluate_beir names it -> as a report does. The first is the one that curves show.
METRICS = {"NDCG@10": "nDCG@10", "Recall@100": "Recall@100", "MRR@10": "MRR@10", "Accuracy@20": "Top-20 accuracy"}
NOTES = """\
Mean and standard deviation (sd) are over seeds. A difference is to the baseline in the same cell of the grid; its
interval and p-value are of a paired bootstrap over queries (10,000 resamples, two-sided, scores averaged over
seeds first): they speak of other queries, not of other seeds; the sd does that. Holm's p is corrected over the rows of
its table. A value in brackets is the baseline's: the row itself has no such setting. Seconds are of training alone;
s/update is the median. The gradient ratio is passages over queries."""

# Column of the table of costs -> key of a result, how it is averaged over seeds, how it is shown.
COST: dict[str, tuple[str, Any, str]] = {
    "pairs": ("pairs_trained", statistics.fmean, "{:,.0f}"),
    "s/update": ("seconds_per_update", statistics.median, "{:.3f}"),
    "training s": ("train_seconds", statistics.fmean, "{:,.1f}"),
    "peak MB": ("peak_memory_mb", max, "{:,.0f}"),
    "gradient ratio": ("grad_norm_ratio", statistics.fmean, "{:.3f}"),
    "final loss": ("final_loss", statistics.fmean, "{:.4f}"),
}

_LACKED = {"-", "false", "none", "0", "0.0"}  # values of a setting that an entry does without

Results = Mapping[str, Mapping[str, Any]]  # name of the run -> its result.json


def build_report(plan: Plan, results: Results, failed: Mapping[str, str], about: Mapping[str, Any]) -> dict[str, Any]:
    """The content of report.json.

    Args:
        results: of the runs that are finished.
        failed: name of the run -> why.
        about: command, settings, data, tuning, versions, commit; taken over as it is.
    """
    # Imported here, so that a page is drawn without torch.
    from contaccum.comparison.plan import changed_settings, loss_settings

    left_out = ("evaluations", "identity")
    settings = loss_settings(plan)
    return {
        "tuning": None,
        **about,
        "baseline": plan.baseline,
        "seeds": list(plan.seeds),
        "grid": {key: list(values) for key, values in plan.grid.items()},
        "entries": [entry._asdict() for entry in plan.entries],
        "tricks": {"settings": settings, "said": _said(settings)},
        "changed_settings": changed_settings(plan),
        "warnings": [*_tuning_warnings(about), *_fairness_warnings(plan, results)],
        "failed": dict(failed),
        "groups": {group.name: _summary(group, plan.seeds, results) for group in plan.groups.values()},
        "comparisons": _compare(plan, results),
        "runs": {n: {key: x for key, x in result.items() if key not in left_out} for n, result in results.items()},
    }


def _summary(group: Group, seeds: Sequence[int], results: Results) -> dict[str, Any]:
    """Means over seeds of what a group's finished runs measured."""
    found = {seed: results[group.run(seed)] for seed in seeds if group.run(seed) in results}
    runs = list(found.values())
    about: dict[str, Any] = {"entry": group.entry, "method": group.method, "labels": dict(group.labels)}
    about |= {"seeds": list(found), "updates": sorted({run["updates"] for run in runs})}
    about |= {"pairs_per_update": group.parsed[2].total_train_batch_size, "metrics": {}}
    for data in runs[0]["evaluations"] if runs else ():
        about["metrics"][data] = {}
        for metric in METRICS:
            values = [run["evaluations"][data]["metrics"][metric] for run in runs]
            sd = statistics.stdev(values) if len(values) > 1 else None
            about["metrics"][data][metric] = {"mean": statistics.fmean(values), "sd": sd, "values": values}
    for key, average, _ in COST.values():
        values = [run[key] for run in runs if run.get(key) is not None]
        about[key] = average(values) if values else None
    return about


def _compare(plan: Plan, results: Results) -> list[dict[str, Any]]:
    """Every group against the baseline of its cell, on every data set by every metric.

    Scores are averaged over the seeds that both have, per query; ``p_holm`` is corrected over all rows of the same data
    set and metric.
    """
    rows: list[dict[str, Any]] = []
    for names, labels in plan.pairs.items():
        group, baseline = (plan.groups[name] for name in names)
        seeds = [s for s in plan.seeds if group.run(s) in results and baseline.run(s) in results]
        about = {"group": group.name, "baseline_group": baseline.name, "entry": group.entry, "labels": labels}
        for data in results[group.run(seeds[0])]["evaluations"] if seeds else ():
            mine, theirs = ([results[g.run(s)]["evaluations"][data] for s in seeds] for g in (group, baseline))
            for metric in METRICS:
                ours, other = by_query(mine, metric), by_query(theirs, metric)
                by_seed = [x["metrics"][metric] - y["metrics"][metric] for x, y in zip(mine, theirs, strict=True)]
                row = {**about, "data": data, "metric": metric, "seeds": seeds, "queries": len(ours)}
                row |= paired_bootstrap(list(ours.values()), [other[query] for query in ours])
                rows.append({**row, "difference_by_seed": by_seed})
    for family in {(row["data"], row["metric"]) for row in rows}:
        add_holm([row for row in rows if (row["data"], row["metric"]) == family])
    return rows


def by_query(evaluations: Sequence[Mapping[str, Any]], metric: str) -> dict[str, float]:
    """{query: its score, averaged over the evaluations of several seeds}."""
    queries = evaluations[0]["per_query"]
    return {query: statistics.fmean(one["per_query"][query][metric] for one in evaluations) for query in queries}


def _said(settings: Mapping[str, Mapping[str, str]]) -> str:
    """Which settings of the loss some entries had and others had not, of `loss_settings`, as a sentence."""
    keys = next(iter(settings.values()))
    values = {key: {None if of[key] in _LACKED else of[key] for of in settings.values()} for key in keys}
    differing = [key for key in keys if len(values[key]) > 1]
    lacked = [key for key in differing if None in values[key]]
    parts = {
        "some entries had and others had not": lacked,
        "all had, with different values": [key for key in differing if key not in lacked],
    }
    said = "; ".join(f"{what}: {', '.join(keys)}" for what, keys in parts.items() if keys)
    return f"Of the loss's settings {said}." if said else "All entries had the same settings of the loss."


def _tuning_warnings(about: Mapping[str, Any]) -> list[str]:
    """Warn of entries without a best value or with one at an end of those tried, and of data that chose the value."""
    tuning = about.get("tuning")
    if not tuning:
        return []
    key = tuning["key"]
    cases: dict[str, list[str]] = {}
    for group in tuning["groups"].values():
        cell = cell_name(group["labels"])
        if group["chosen"] is None:
            text = f"{group['entry']}: every {key} tried failed, so that it has no final runs"
            cases.setdefault(text, []).extend([cell] if cell else [])
        elif group["at_end"]:
            text = f"{group['entry']}: its best {key} is at an end of the values tried"
            best = f"{group['chosen']} of {len(group['scores'])}"
            cases.setdefault(text, []).append(f"{cell}: {best}" if cell else best)
    lines = [f"{text} ({'; '.join(details)})" if details else text for text, details in cases.items()]
    tuning_data = {data["fingerprint"] for data in tuning["data"]}
    for data in about["data"]["evaluation"]:
        if data["fingerprint"] in tuning_data:
            lines.append(f"{data['name']}: {key} was chosen on this data, so that its scores are no test")
    return lines


# Key of a run's result that must be the same as the baseline's -> what a warning says when it is not.
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
    """Warn, once for each entry, of what its runs had other than their baseline's runs of the same seed.

    A warning names the seeds that it concerns, and the cells of the grid where these are not the same in every cell.
    """
    cells_by_entry: dict[str, set[str]] = {}
    concerned: dict[tuple[str, str, str], dict[str, list[int]]] = {}
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
                    seeds = concerned.setdefault((group.entry, phrase, baseline.entry), {})
                    seeds.setdefault(cell, []).append(seed)
    lines = []
    for (entry, phrase, baseline_entry), seeds_by_cell in concerned.items():
        texts = {cell: _seeds_text(seeds) for cell, seeds in seeds_by_cell.items()}
        same_in_all_cells = seeds_by_cell.keys() == cells_by_entry[entry] and len(set(texts.values())) == 1
        if same_in_all_cells:
            details = next(iter(texts.values()))
        else:
            details = "; ".join(f"{cell}, {text}" for cell, text in texts.items())
        lines.append(f"{entry} {phrase} than {baseline_entry}: {details}")
    return lines


def _seeds_text(seeds: Sequence[int]) -> str:
    """Return "seed 3", or "seeds 0, 1 and 2"."""
    noun = "seed" if len(seeds) == 1 else "seeds"
    return f"{noun} {join_words([str(seed) for seed in seeds])}"


def cell_name(labels: Mapping[str, str]) -> str:
    """Return the grid's values of a group as a reader sees them: "bank_size=8, learning_rate=1e-3"."""
    return ", ".join(f"{key}={value}" for key, value in labels.items())


def join_words(words: Sequence[str]) -> str:
    """Return "a", "a and b", or "a, b and c"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def markdown(report: Mapping[str, Any]) -> str:
    """Return the text of report.md: the result, its warnings, other metrics, costs, then what was compared and how."""
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


def template(path: Path, **more: Any) -> Any:
    """A template of Jinja's, in which a name that is not there is an error; ``more`` is for its environment."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    more |= {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=FileSystemLoader(path.parent), **more).get_template(path.name)


def table_rows(report: Mapping[str, Any], data: str, metric: str) -> Iterator[dict[str, Any]]:
    """The rows of a table: ``entry``, ``labels``, ``mean`` and ``sd`` of a group, and ``compared``, the report's row.

    A group has a row for each baseline that it is compared with, or one where ``compared`` is None.
    """
    for name, group in report["groups"].items():
        values = group["metrics"].get(data, {}).get(metric)
        own = (name, data, metric)
        found = [row for row in report["comparisons"] if (row["group"], row["data"], row["metric"]) == own]
        for row in found or [None]:
            if values is not None:
                labels = (row or group)["labels"]
                yield {"entry": group["entry"], "labels": labels, **values, "compared": row}
