"""From results to numbers and tables."""

import statistics
from typing import Any

import pytest

from contaccum.comparison.plan import Plan, make_plan, read_options
from contaccum.comparison.summary import METRICS, build_report, markdown, table_rows
from contaccum.evaluation.metrics import add_holm, paired_bootstrap
from contaccum.training.arguments import LOSS_SETTINGS

ABOUT = {
    "command": "contaccum compare",
    "settings": {"evaluation": {"queries": None, "corpus": 25}},
    "data": {
        "evaluation": [
            {"name": "beir", "split": "test", "queries": 20, "documents": 30, "fingerprint": "f"}
        ]
    },
}


# What is the same of every run.
ALIKE = {
    "pairs_per_update": 12,
    "updates": 8,
    "pairs_trained": 86,
    "seconds_per_update": 1.0,
    "grad_norm_ratio": 1.5,
}
ALIKE |= {"final_loss": None, **dict.fromkeys(("git_commit", "versions", "machine"), "the same")}


def score(entry: str, labels: Any, seed: int, query: int) -> float:
    """Made-up: better with a greater bank, a little other for each seed and query."""
    gain = {"grad_accum": 0.0, "contaccum": 0.1, "published": -0.02}[entry]
    bank = int(labels.get("bank_size", 0)) / 1000
    return 0.4 + gain + bank + 0.01 * seed + (query * 37 % 11) / 50 + (query * seed * 13 % 7) / 70


def means(entry: str, labels: Any) -> list[float]:
    """By query, over the two seeds."""
    return [
        statistics.fmean(score(entry, labels, seed, query) for seed in (0, 1))
        for query in range(20)
    ]


def made_up(plan: Plan) -> dict[str, dict[str, Any]]:
    """A result of every run, as its process would leave it."""
    results = {}
    for group in plan.groups.values():
        for seed in plan.seeds:
            scores = {f"q{n}": score(group.entry, group.labels, seed, n) for n in range(20)}
            evaluation = {
                "metrics": dict.fromkeys(METRICS, statistics.fmean(scores.values())),
                "per_query": {
                    query: dict.fromkeys(METRICS, value) for query, value in scores.items()
                },
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
    return make_plan(
        read_options([], tokens), ["grad_accum", "contaccum"], variants, grid, [0, 1], baseline
    )


@pytest.fixture(scope="module")
def plan(tokens) -> Plan:
    return planned(tokens)


def test_differences_are_to_the_baseline_of_the_same_cell_query_by_query(plan):
    report = build_report(plan, made_up(plan), {}, ABOUT)
    rows = [row for row in report["comparisons"] if row["metric"] == "NDCG@10"]
    entries = ("contaccum", "published")
    assert [(r["entry"], r["labels"]["bank_size"]) for r in rows] == [
        (e, m) for e in entries for m in ("8", "16")
    ]
    assert {row["baseline_group"] for row in rows} == {"grad_accum"}  # one run for both cells
    for row in rows:
        expected = paired_bootstrap(means(row["entry"], row["labels"]), means("grad_accum", {}))
        assert {key: row[key] for key in expected} == pytest.approx(expected)
        assert statistics.fmean(row["difference_by_seed"]) == pytest.approx(row["difference"])
    add_holm(again := [{"p_value": row["p_value"]} for row in rows])
    assert [row["p_holm"] for row in rows] == [row["p_holm"] for row in again]
    group = report["groups"]["contaccum_bank_size-16"]
    values = [
        statistics.fmean(score("contaccum", group["labels"], seed, q) for q in range(20))
        for seed in (0, 1)
    ]
    found = group["metrics"]["beir"]["NDCG@10"]
    assert (found["mean"], found["sd"]) == pytest.approx(
        (statistics.fmean(values), statistics.stdev(values))
    )
    assert (group["seeds"], group["train_seconds"], group["peak_memory_mb"]) == ([0, 1], 8.5, 101.0)
    assert report["warnings"] == []


def test_a_baseline_with_a_bank_is_compared_in_each_cell(tokens):
    plan = planned(tokens, "contaccum")
    report = build_report(plan, made_up(plan), {}, ABOUT)
    rows = [
        row
        for row in report["comparisons"]
        if row["metric"] == "MRR@10" and row["entry"] == "grad_accum"
    ]
    assert [row["labels"]["bank_size"] for row in rows] == ["(8)", "(16)"]
    assert rows[0]["difference"] > rows[1]["difference"]
    assert "| grad_accum | (16) |" in markdown(report)


def test_a_difference_to_the_baseline_is_said_once_per_entry_with_its_seeds(plan):
    results = made_up(plan)
    for seed in (0, 1):
        for bank_size in (8, 16):
            results[f"contaccum_bank_size-{bank_size}_seed-{seed}"]["git_commit"] = "other"
    results["contaccum_bank_size-8_seed-1"] |= {"initial_weights": "other", "updates": 9}
    assert build_report(plan, results, {}, ABOUT)["warnings"] == [
        "contaccum was of another commit of contaccum than grad_accum: seeds 0 and 1",
        "contaccum began with other weights than grad_accum: bank_size=8, seed 1",
        "contaccum made another number of updates than grad_accum: bank_size=8, seed 1",
    ]


def test_the_report_begins_with_the_result_then_warnings_then_what_was_compared(plan):
    results = made_up(plan)
    results["contaccum_bank_size-8_seed-1"]["initial_weights"] = "other"
    text = markdown(build_report(plan, results, {}, ABOUT))
    headings = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    assert headings == [
        "grad_accum, contaccum and published on beir",
        *("Result", "nDCG@10 on beir", "Take care", "Other metrics"),
        *("Recall@100 on beir", "MRR@10 on beir", "Top-20 accuracy on beir"),
        *("Cost", "What was compared", "Settings", "How to read it"),
    ]
    assert text.index("| contaccum | 16 |") < text.index("## Take care")


def test_runs_that_failed_are_named_and_the_rest_is_reported(plan):
    results = made_up(plan)
    for name in (
        "contaccum_bank_size-8_seed-1",
        "published_bank_size-8_seed-0",
        "published_bank_size-8_seed-1",
    ):
        del results[name]
    report = build_report(plan, results, {"contaccum_bank_size-8_seed-1": "exit code -9"}, ABOUT)
    (row,) = [
        r
        for r in report["comparisons"]
        if r["group"] == "contaccum_bank_size-8" and r["metric"] == "MRR@10"
    ]
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
        start = lines.index(f"### {shown} on beir")
        cells = [
            [cell.strip() for cell in line.split("|")[1:-1]]
            for line in lines[start + 4 : start + 9]
        ]
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
    plan = make_plan(
        read_options([], tokens), ["grad_accum", "contaccum"], variants, ["bank_size=8,16"], [0]
    )
    report = build_report(plan, made_up(plan), {}, ABOUT)
    found = report["tricks"]["settings"]
    assert all(list(of) == list(LOSS_SETTINGS) for of in found.values())
    keys = ("temperature", "bank_size", "bank_hard_negatives", "drift_compensation", "normalize_by")
    assert [found["grad_accum"][key] for key in keys] == ["0.1", "-", "-", "-", "-"]
    assert [found["contaccum"][key] for key in keys] == ["0.1", "8 or 16", "false", "auto", "local"]
    assert [found["published"][key] for key in keys] == ["0.1", "8 or 16", "false", "none", "all"]
    said = report["tricks"]["said"]
    assert "some entries had and others had not: " in said and "drift_compensation" in said
    assert (
        "temperature" not in said and "bank_hard_negatives" not in said
    )  # none had hard negatives in a bank
    assert said in markdown(report)

    alike = make_plan(
        read_options([], tokens), ["contaccum"], [["hot", "temperature=1.0"]], [], [0]
    )
    said = build_report(alike, {}, {}, ABOUT)["tricks"]["said"]
    assert said == "Of the loss's settings all had, with different values: temperature."
    alone = make_plan(read_options([], tokens), ["grad_accum", "grad_cache"], [], [], [0])
    assert (
        build_report(alone, {}, {}, ABOUT)["tricks"]["said"]
        == "All entries had the same settings of the loss."
    )


def test_settings_are_listed_that_differ_between_entries_or_from_their_default(tokens):
    variants = [["published", "drift_compensation=none", "query_prompt=a|b"]]
    given = ["--temperature=0.1", "--normalize_by=local", "--learning_rate=5e-5"]
    methods = ["grad_cache", "contaccum", "pre_batch", "in_batch"]
    options = read_options([], [*tokens, *given])
    plan = make_plan(options, methods, variants, ["bank_size=8,16"], [0])
    text = markdown(build_report(plan, {}, {}, ABOUT))
    settings = text[text.index("## Settings") : text.index("## How to read it")]
    table = [line for line in settings.splitlines() if line.startswith("|")]
    assert table[0] == "| setting | grad_cache | contaccum | pre_batch | in_batch | published |"
    assert set(table[2:]) == {
        "| per_device_train_batch_size | 4 | 4 | 4 | 12 | 4 |",
        "| gradient_accumulation_steps | 3 | 3 | 3 | 1 | 3 |",
        "| bank_size | - | 8 or 16 | 8 or 16 | - | 8 or 16 |",
        "| query_bank_size | - | default | 0 | - | default |",
        "| drift_compensation | - | auto | auto | - | none |",
        r"| query_prompt | default | default | default | default | a\|b |",
    }
    common = {line.partition(":")[0] for line in settings.splitlines() if line.startswith("- ")}
    assert common == {"- model", "- train_data", "- num_train_epochs", "- temperature", "- use_cpu"}
    assert "- temperature: 0.1\n" in settings


def test_settings_that_are_all_at_their_default_make_no_table(tokens):
    options = {"model": ["m"], "train_data": ["d"]}
    plan = make_plan(options, ["grad_accum", "contaccum"], [], [], [0])
    assert set(build_report(plan, {}, {}, ABOUT)["changed_settings"]) == {"model", "train_data"}
