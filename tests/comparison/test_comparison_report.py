"""From results to numbers and tables."""

import statistics
from typing import Any

import pytest

from contaccum.comparison.plan import Plan, make_plan, read_options
from contaccum.comparison.report import METRICS, build_report, markdown, table_rows
from contaccum.evaluation.metrics import add_holm, paired_bootstrap
from contaccum.training.arguments import LOSS_SETTINGS

ABOUT = {
    "command": "contaccum compare",
    "settings": {"evaluation": {"queries": None, "corpus": 25}},
    "data": {"evaluation": [{"name": "beir", "split": "test", "queries": 20, "documents": 30, "fingerprint": "f"}]},
}


# What is the same of every run.
ALIKE = {"pairs_per_update": 12, "updates": 8, "pairs_trained": 86, "seconds_per_update": 1.0, "grad_norm_ratio": 1.5}
ALIKE |= {"final_loss": None, **dict.fromkeys(("git_commit", "versions", "machine"), "the same")}


def score(entry: str, labels: Any, seed: int, query: int) -> float:
    """Made-up: better with a greater bank, a little other for each seed and query."""
    gain = {"grad_accum": 0.0, "contaccum": 0.1, "published": -0.02}[entry]
    bank = int(labels.get("bank_size", 0)) / 1000
    return 0.4 + gain + bank + 0.01 * seed + (query * 37 % 11) / 50 + (query * seed * 13 % 7) / 70


def means(entry: str, labels: Any) -> list[float]:
    """By query, over the two seeds."""
    return [statistics.fmean(score(entry, labels, seed, query) for seed in (0, 1)) for query in range(20)]


def made_up(plan: Plan) -> dict[str, dict[str, Any]]:
    """A result of every run, as its process would leave it."""
    results = {}
    for group in plan.groups.values():
        for seed in plan.seeds:
            scores = {f"q{n}": score(group.entry, group.labels, seed, n) for n in range(20)}
            evaluation = {
                "metrics": dict.fromkeys(METRICS, statistics.fmean(scores.values())),
                "per_query": {query: dict.fromkeys(METRICS, value) for query, value in scores.items()},
            }
            results[group.run(seed)] = {
                "name": group.run(seed),
                "evaluations": {"beir": evaluation},
                "initial_weights": f"weights {seed}",
                "data_order": f"order {seed}",
                "train_seconds": 8.0 + seed,
                "peak_memory_mb": 100.0 + seed,
                **ALIKE,
            }
    return results


def planned(tokens: list[str], baseline: str | None = None) -> Plan:
    variants, grid = [["published", "drift_compensation=none"]], ["bank_size=8,16"]
    return make_plan(read_options([], tokens), ["grad_accum", "contaccum"], variants, grid, [0, 1], baseline)


@pytest.fixture(scope="module")
def plan(tokens) -> Plan:
    return planned(tokens)


def test_differences_are_to_the_baseline_of_the_same_cell_query_by_query(plan):
    report = build_report(plan, made_up(plan), {}, ABOUT)
    rows = [row for row in report["comparisons"] if row["metric"] == "NDCG@10"]
    entries = ("contaccum", "published")
    assert [(r["entry"], r["labels"]["bank_size"]) for r in rows] == [(e, m) for e in entries for m in ("8", "16")]
    assert {row["baseline_group"] for row in rows} == {"grad_accum"}  # one run for both cells
    for row in rows:
        expected = paired_bootstrap(means(row["entry"], row["labels"]), means("grad_accum", {}))
        assert {key: row[key] for key in expected} == pytest.approx(expected)
        assert statistics.fmean(row["difference_by_seed"]) == pytest.approx(row["difference"])
    add_holm(again := [{"p_value": row["p_value"]} for row in rows])
    assert [row["p_holm"] for row in rows] == [row["p_holm"] for row in again]
    group = report["groups"]["contaccum_bank_size-16"]
    values = [statistics.fmean(score("contaccum", group["labels"], seed, q) for q in range(20)) for seed in (0, 1)]
    found = group["metrics"]["beir"]["NDCG@10"]
    assert (found["mean"], found["sd"]) == pytest.approx((statistics.fmean(values), statistics.stdev(values)))
    assert (group["seeds"], group["train_seconds"], group["peak_memory_mb"]) == ([0, 1], 8.5, 101.0)
    assert report["warnings"] == []


def test_a_baseline_with_a_bank_is_compared_in_each_cell(tokens):
    plan = planned(tokens, "contaccum")
    report = build_report(plan, made_up(plan), {}, ABOUT)
    rows = [row for row in report["comparisons"] if row["metric"] == "MRR@10" and row["entry"] == "grad_accum"]
    assert [row["labels"]["bank_size"] for row in rows] == ["(8)", "(16)"]
    assert rows[0]["difference"] > rows[1]["difference"]
    assert "| grad_accum | (16) |" in markdown(report)


def test_unequal_beginnings_and_data_are_said_first(plan):
    results = made_up(plan)
    odd = results["contaccum_bank_size-8_seed-1"]
    odd |= {"initial_weights": "other", "data_order": "other", "updates": 9}
    report = build_report(plan, results, {}, ABOUT)
    assert len(report["warnings"]) == 3
    assert all(line.startswith(odd["name"]) and "grad_accum_seed-1" in line for line in report["warnings"])
    text = markdown(report)
    assert text.index("## Take care") < text.index("## beir")


def test_runs_that_failed_are_named_and_the_rest_is_reported(plan):
    results = made_up(plan)
    for name in ("contaccum_bank_size-8_seed-1", "published_bank_size-8_seed-0", "published_bank_size-8_seed-1"):
        del results[name]
    report = build_report(plan, results, {"contaccum_bank_size-8_seed-1": "exit code -9"}, ABOUT)
    (row,) = [r for r in report["comparisons"] if r["group"] == "contaccum_bank_size-8" and r["metric"] == "MRR@10"]
    assert row["seeds"] == [0]
    assert report["groups"]["published_bank_size-8"]["metrics"] == {}
    assert "- contaccum_bank_size-8_seed-1: exit code -9" in markdown(report)
    empty = build_report(plan, {}, {"a": "b"}, ABOUT)
    assert empty["comparisons"] == [] and "## Failed" in markdown(empty)


def test_report_to_read_has_every_metric_and_cost(plan):
    report = build_report(plan, made_up(plan), {}, ABOUT)
    text = markdown(report)
    lines = text.splitlines()
    for metric, shown in METRICS.items():
        start = lines.index(f"### {shown}")
        cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[start + 4 : start + 9]]
        expected = [(r["entry"], f"{r['mean']:.4f}") for r in table_rows(report, "beir", metric)]
        assert [(c[0], c[2]) for c in cells] == expected and {len(c) for c in cells} == {8}
    for line in (
        "- published: contaccum with drift_compensation=none",
        "| contaccum | 16 | 2 | 8 | 86 | 1.000 | 8.5 | 101 | 1.500 | - |",
        "- 8 updates of 12 pairs",
        "- beir (test): 20 queries, 30 documents, a fixed sample",
    ):
        assert line in lines


def test_settings_of_the_loss_that_a_method_has_not_are_named_and_dashes(tokens):
    variants = [["published", "drift_compensation=none", "normalize_by=all"]]
    tokens = [*tokens, "--bank_hard_negatives=false", "--temperature=0.1"]
    plan = make_plan(read_options([], tokens), ["grad_accum", "contaccum"], variants, ["bank_size=8,16"], [0])
    report = build_report(plan, made_up(plan), {}, ABOUT)
    found = report["tricks"]["settings"]
    assert all(list(of) == list(LOSS_SETTINGS) for of in found.values())
    keys = ("temperature", "bank_size", "bank_hard_negatives", "drift_compensation", "normalize_by")
    assert [found["grad_accum"][key] for key in keys] == ["0.1", "-", "-", "-", "-"]
    assert [found["contaccum"][key] for key in keys] == ["0.1", "8 or 16", "false", "auto", "local"]
    assert [found["published"][key] for key in keys] == ["0.1", "8 or 16", "false", "none", "all"]
    said = report["tricks"]["said"]
    assert "some entries had and others had not: " in said and "drift_compensation" in said
    assert "temperature" not in said and "bank_hard_negatives" not in said  # none had hard negatives in a bank
    assert said in markdown(report)

    alike = make_plan(read_options([], tokens), ["contaccum"], [["hot", "temperature=1.0"]], [], [0])
    said = build_report(alike, {}, {}, ABOUT)["tricks"]["said"]
    assert said == "Of the loss's settings all had, with different values: temperature."
    alone = make_plan(read_options([], tokens), ["grad_accum", "grad_cache"], [], [], [0])
    assert build_report(alone, {}, {}, ABOUT)["tricks"]["said"] == "All entries had the same settings of the loss."
