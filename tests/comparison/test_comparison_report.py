"""The report of a comparison: from results of runs to numbers, warnings and tables."""

import re
import statistics
from collections.abc import Mapping
from typing import Any

import pytest

from contaccum.comparison.options import read_options
from contaccum.comparison.plan import Plan, make_plan
from contaccum.comparison.summary import METRICS, build_report, render_markdown, table_rows
from contaccum.evaluation.metrics import add_holm, paired_bootstrap
from contaccum.training.arguments import LOSS_SETTINGS

NUM_QUERIES = 20
CONTEXT = {
    "command": "contaccum compare",
    "settings": {"evaluation": {"queries": None, "corpus": 25}},
    "data": {
        "evaluation": [
            {
                "name": "beir",
                "split": "test",
                "queries": NUM_QUERIES,
                "documents": 30,
                "fingerprint": "f",
            }
        ]
    },
}

# The part of a result that is the same in every run.
EQUAL_IN_ALL_RUNS = {
    "pairs_per_update": 12,
    "updates": 8,
    "pairs_trained": 86,
    "seconds_per_update": 1.0,
    "grad_norm_ratio": 1.5,
    "final_loss": None,
    "git_commit": "the same",
    "versions": "the same",
    "machine": "the same",
}


def make_score(entry: str, labels: Mapping[str, str], seed: int, query: int) -> float:
    """Return a made-up score: larger with a larger bank, slightly different by seed and query."""
    gain_of_entry = {"grad_accum": 0.0, "contaccum": 0.1, "published": -0.02}[entry]
    gain_of_bank = int(labels.get("bank_size", 0)) / 1000
    gain_of_seed = 0.01 * seed
    # Remainders of products vary without a pattern, and are the same in every test.
    change_of_query = (query * 37 % 11) / 50
    change_of_query_and_seed = (query * seed * 13 % 7) / 70
    gains = gain_of_entry + gain_of_bank + gain_of_seed
    return 0.4 + gains + change_of_query + change_of_query_and_seed


def make_scores(entry: str, labels: Mapping[str, str], seed: int) -> list[float]:
    """Return the made-up score of each query."""
    return [make_score(entry, labels, seed, query) for query in range(NUM_QUERIES)]


def average_over_seeds(entry: str, labels: Mapping[str, str]) -> list[float]:
    """Return the score of each query, averaged over the two seeds."""
    first_scores = make_scores(entry, labels, seed=0)
    second_scores = make_scores(entry, labels, seed=1)
    means = []
    for scores in zip(first_scores, second_scores, strict=True):
        means.append(statistics.fmean(scores))
    return means


FACTORS = {"NDCG@10": 1.0, "Recall@100": 0.9, "MRR@10": 0.8, "Accuracy@20": 0.7}
"""Each metric is the made-up score times its own factor."""


def make_evaluation(scores: list[float]) -> dict[str, Any]:
    """Return an evaluation in the form of result.json."""
    per_query = {}
    for query, score in enumerate(scores):
        per_query[f"q{query}"] = {metric: factor * score for metric, factor in FACTORS.items()}
    mean = statistics.fmean(scores)
    means = {metric: factor * mean for metric, factor in FACTORS.items()}
    return {"metrics": means, "per_query": per_query}


def make_results(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return a made-up result of every run, in the form of result.json."""
    results = {}
    for group in plan.groups.values():
        for seed in plan.seeds:
            scores = make_scores(group.entry, group.labels, seed)
            results[group.run_name(seed)] = {
                "name": group.run_name(seed),
                "evaluations": {"beir": make_evaluation(scores)},
                "initial_weights": f"weights {seed}",
                "data_order": f"order {seed}",
                "train_seconds": 8.0 + seed,
                "peak_memory_mb": 100.0 + seed,
                **EQUAL_IN_ALL_RUNS,
            }
    return results


def make_small_plan(tokens: list[str], baseline: str | None = None) -> Plan:
    """Return a plan of three entries, two bank sizes and two seeds."""
    return make_plan(
        read_options([], tokens),
        ["grad_accum", "contaccum"],
        [["published", "drift_compensation=none"]],
        ["bank_size=8,16"],
        [0, 1],
        baseline,
    )


@pytest.fixture(scope="module")
def plan(tokens) -> Plan:
    return make_small_plan(tokens)


def find_comparisons(report: Mapping[str, Any], **values: str) -> list[dict[str, Any]]:
    """Return the comparisons that have the wanted values, such as metric="MRR@10"."""
    rows = []
    for row in report["comparisons"]:
        if values.items() <= row.items():
            rows.append(row)
    return rows


def test_differences_are_to_the_baseline_of_the_same_cell_query_by_query(plan):
    report = build_report(plan, make_results(plan), {}, CONTEXT)
    rows = find_comparisons(report, metric="NDCG@10")
    assert [(row["entry"], row["labels"]["bank_size"]) for row in rows] == [
        ("contaccum", "8"),
        ("contaccum", "16"),
        ("published", "8"),
        ("published", "16"),
    ]
    baseline_means = average_over_seeds("grad_accum", {})
    for row in rows:
        # grad_accum does not use bank_size, so one of its runs serves for both cells.
        assert row["baseline_group"] == "grad_accum"
        means = average_over_seeds(row["entry"], row["labels"])
        for key, expected in paired_bootstrap(means, baseline_means).items():
            assert row[key] == pytest.approx(expected), key
        assert statistics.fmean(row["difference_by_seed"]) == pytest.approx(row["difference"])
    tests = [{"p_value": row["p_value"]} for row in rows]
    add_holm(tests)
    for row, test in zip(rows, tests, strict=True):
        assert row["p_holm"] == test["p_holm"]
    assert report["warnings"] == []


def test_group_has_mean_and_standard_deviation_over_seeds(plan):
    report = build_report(plan, make_results(plan), {}, CONTEXT)
    group = report["groups"]["contaccum_bank_size-16"]
    seed_means = []
    for seed in (0, 1):
        scores = make_scores("contaccum", group["labels"], seed)
        seed_means.append(statistics.fmean(scores))
    summary = group["metrics"]["beir"]["NDCG@10"]
    assert summary["mean"] == pytest.approx(statistics.fmean(seed_means))
    assert summary["sd"] == pytest.approx(statistics.stdev(seed_means))
    assert group["seeds"] == [0, 1]
    assert group["train_seconds"] == 8.5  # the mean of 8 and 9
    assert group["peak_memory_mb"] == 101.0  # the maximum of 100 and 101


def test_baseline_with_a_bank_is_compared_in_each_cell(tokens):
    plan = make_small_plan(tokens, baseline="contaccum")
    report = build_report(plan, make_results(plan), {}, CONTEXT)
    small_bank, large_bank = find_comparisons(report, metric="MRR@10", entry="grad_accum")
    assert small_bank["labels"]["bank_size"] == "(8)"
    assert large_bank["labels"]["bank_size"] == "(16)"
    # The baseline has a higher score with the larger bank.
    assert small_bank["difference"] > large_bank["difference"]
    assert "| grad_accum | (16) |" in render_markdown(report)


def test_unfair_difference_is_reported_once_per_entry_with_its_seeds(plan):
    results = make_results(plan)
    for seed in (0, 1):
        for bank_size in (8, 16):
            results[f"contaccum_bank_size-{bank_size}_seed-{seed}"]["git_commit"] = "other"
    results["contaccum_bank_size-8_seed-1"]["initial_weights"] = "other"
    results["contaccum_bank_size-8_seed-1"]["updates"] = 9
    assert build_report(plan, results, {}, CONTEXT)["warnings"] == [
        "contaccum ran with another commit of contaccum than grad_accum: seeds 0 and 1",
        "contaccum started from other weights than grad_accum: bank_size=8, seed 1",
        "contaccum made another number of updates than grad_accum: bank_size=8, seed 1",
    ]


def test_report_has_result_then_warnings_then_what_was_compared(plan):
    results = make_results(plan)
    results["contaccum_bank_size-8_seed-1"]["initial_weights"] = "other"
    text = render_markdown(build_report(plan, results, {}, CONTEXT))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    assert headings == [
        "grad_accum, contaccum and published on beir",
        "Result",
        "nDCG@10 on beir",
        "Warnings",
        "Other metrics",
        "Recall@100 on beir",
        "MRR@10 on beir",
        "Top-20 accuracy on beir",
        "Cost",
        "What was compared",
        "Settings",
        "How to read it",
    ]
    assert text.index("| contaccum | 16 |") < text.index("## Warnings")


def test_failed_runs_are_named_and_the_rest_is_reported(plan):
    results = make_results(plan)
    del results["contaccum_bank_size-8_seed-1"]
    del results["published_bank_size-8_seed-0"]
    del results["published_bank_size-8_seed-1"]
    failed = {"contaccum_bank_size-8_seed-1": "exit code -9"}
    report = build_report(plan, results, failed, CONTEXT)
    [row] = find_comparisons(report, metric="MRR@10", group="contaccum_bank_size-8")
    assert row["seeds"] == [0]
    assert report["groups"]["published_bank_size-8"]["metrics"] == {}
    assert "- contaccum_bank_size-8_seed-1: exit code -9" in render_markdown(report)
    empty_report = build_report(plan, {}, {"a": "b"}, CONTEXT)
    assert empty_report["comparisons"] == []
    assert "## Failed" in render_markdown(empty_report)


def test_markdown_has_every_metric_and_the_costs(plan):
    report = build_report(plan, make_results(plan), {}, CONTEXT)
    lines = render_markdown(report).splitlines()
    for metric, title in METRICS.items():
        rows = list(table_rows(report, "beir", metric))
        assert len(rows) == 5  # grad_accum, and two entries with two sizes of the bank each
        # A blank line, the header and the line below it are between the title and the first row.
        start = lines.index(f"### {title} on beir") + 4
        for row, line in zip(rows, lines[start : start + 5], strict=True):
            cells = line.strip("|").split("|")
            assert len(cells) == 8
            assert cells[0].strip() == row["entry"]
            mean = statistics.fmean(average_over_seeds(row["entry"], row["labels"]))
            assert cells[2].strip() == f"{FACTORS[metric] * mean:.4f}"
    for line in (
        "- published: contaccum with drift_compensation=none",
        "| contaccum | 16 | 2 | 8 | 86 | 1.000 | 8.5 | 101 | 1.500 | - |",
        "- 8 updates of 12 pairs",
        "- beir (test): 20 queries, 30 documents, a fixed sample",
    ):
        assert line in lines


def test_loss_settings_that_a_method_does_not_use_are_named_and_shown_as_dashes(tokens):
    options = read_options([], [*tokens, "--bank_hard_negatives=false", "--temperature=0.1"])
    variants = [["published", "drift_compensation=none", "normalize_by=all"]]
    plan = make_plan(options, ["grad_accum", "contaccum"], variants, ["bank_size=8,16"], [0])
    report = build_report(plan, make_results(plan), {}, CONTEXT)
    settings = report["tricks"]["settings"]
    for entry_settings in settings.values():
        assert list(entry_settings) == list(LOSS_SETTINGS)
    keys = ("temperature", "bank_size", "bank_hard_negatives", "drift_compensation", "normalize_by")
    expected_values = {
        "grad_accum": ["0.1", "-", "-", "-", "-"],
        "contaccum": ["0.1", "8 or 16", "false", "auto", "local"],
        "published": ["0.1", "8 or 16", "false", "none", "all"],
    }
    assert settings.keys() == expected_values.keys()
    for entry, values in expected_values.items():
        assert [settings[entry][key] for key in keys] == values, entry
    description = report["tricks"]["said"]
    assert "Settings of the loss that only some entries use: " in description
    assert "drift_compensation" in description
    assert "temperature" not in description
    assert "bank_hard_negatives" not in description  # it is off in every entry with a bank
    assert description in render_markdown(report)


def test_description_of_loss_settings_that_differ_or_are_equal(tokens):
    options = read_options([], [*tokens, "--bank_hard_negatives=false", "--temperature=0.1"])
    different = make_plan(options, ["contaccum"], [["hot", "temperature=1.0"]], [], [0])
    assert build_report(different, {}, {}, CONTEXT)["tricks"]["said"] == (
        "Settings of the loss that all entries use with different values: temperature."
    )
    equal = make_plan(options, ["grad_accum", "grad_cache"], [], [], [0])
    assert build_report(equal, {}, {}, CONTEXT)["tricks"]["said"] == (
        "All entries have the same settings of the loss."
    )


def test_settings_that_differ_between_entries_or_from_the_default_are_listed(tokens):
    variants = [["published", "drift_compensation=none", "query_prompt=a|b"]]
    methods = ["grad_cache", "contaccum", "pre_batch", "in_batch"]
    options = read_options(
        [], [*tokens, "--temperature=0.1", "--normalize_by=local", "--learning_rate=5e-5"]
    )
    plan = make_plan(options, methods, variants, ["bank_size=8,16"], [0])
    text = render_markdown(build_report(plan, {}, {}, CONTEXT))
    settings = text[text.index("## Settings") : text.index("## How to read it")]
    table = re.findall(r"^\|.*$", settings, re.MULTILINE)
    assert table[0] == "| setting | grad_cache | contaccum | pre_batch | in_batch | published |"
    assert set(table[2:]) == {
        "| per_device_train_batch_size | 4 | 4 | 4 | 12 | 4 |",
        "| gradient_accumulation_steps | 3 | 3 | 3 | 1 | 3 |",
        "| bank_size | - | 8 or 16 | 8 or 16 | - | 8 or 16 |",
        "| query_bank_size | - | default | 0 | - | default |",
        "| drift_compensation | - | auto | auto | - | none |",
        r"| query_prompt | default | default | default | default | a\|b |",
    }
    equal_settings = re.findall(r"^- ([^:\n]*)", settings, re.MULTILINE)
    assert set(equal_settings) == {
        "model",
        "train_data",
        "num_train_epochs",
        "temperature",
        "use_cpu",
    }
    assert "- temperature: 0.1\n" in settings


def test_settings_with_default_values_are_not_listed():
    options = {"model": ["m"], "train_data": ["d"]}
    plan = make_plan(options, ["grad_accum", "contaccum"], [], [], [0])
    report = build_report(plan, {}, {}, CONTEXT)
    assert set(report["changed_settings"]) == {"model", "train_data"}
