"""From results to numbers, tables and a picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from contaccum.comparison.evaluating import METRICS
from contaccum.comparison.pictures import draw_report
from contaccum.comparison.plan import Plan, make_plan, read_entries, read_grid
from contaccum.comparison.report import build_report, markdown, pairs_to_compare
from contaccum.evaluation.significance import holm, paired_bootstrap

ABOUT = {
    "command": "contaccum compare",
    "data": {"evaluation": [{"name": "beir", "split": "test", "queries": 20, "documents": 30, "fingerprint": "f"}]},
}
QUERIES = [f"q{i}" for i in range(20)]


@pytest.fixture
def plan(options: dict[str, list[str]]) -> Plan:
    entries = read_entries(["grad_accum", "contaccum"], [["published", "drift_compensation=none"]], "contaccum")
    return make_plan(options, entries, read_grid(["bank_size=8,16"]), [0, 1])


def score(run: Any, query: int) -> float:
    """Made-up scores: better with a greater bank, a little other for each seed and query."""
    gain = {"grad_accum": 0.0, "contaccum": 0.1, "published": -0.02}[run.entry]
    bank = int(run.labels.get("bank_size", 0)) / 1000
    return 0.4 + gain + bank + 0.01 * run.seed + (query * 37 % 11) / 50 + (query * run.seed * 13 % 7) / 70


def made_up(plan: Plan) -> dict[str, dict[str, Any]]:
    results = {}
    for run in plan.runs:
        values = [score(run, number) for number in range(20)]
        scored = {
            "metrics": {metric: statistics.fmean(values) for metric in METRICS},
            "query_ids": QUERIES,
            "per_query": dict.fromkeys(METRICS, values),
        }
        results[run.name] = {
            "name": run.name,
            "evaluations": {"beir": scored},
            "initial_weights": f"weights {run.seed}",
            "data_order": f"order {run.seed}",
            "pairs_per_update": 12,
            "updates": 8,
            "git_commit": "c",
            "versions": {"torch": "2"},
            "machine": {"threads": 1},
            "train_seconds": 8.0 + run.seed,
            "seconds_per_update": 1.0,
            "evaluation_seconds": 2.0,
            "peak_memory_mb": 100.0 + run.seed,
            "grad_norm_ratio": 1.5,
            "final_loss": None,
            "curve": [{"update": u, "train_seconds": float(u), "NDCG@10": u / 10} for u in (4, 8)],
        }
    return results


def test_differences_are_to_the_baseline_of_the_same_cell_query_by_query(plan: Plan):
    results = made_up(plan)
    report = build_report(plan, results, {}, ABOUT)
    rows = [row for row in report["comparisons"] if row["metric"] == "NDCG@10"]
    assert [(row["entry"], row["labels"]["bank_size"]) for row in rows] == [
        ("contaccum", "8"),
        ("contaccum", "16"),
        ("published", "8"),
        ("published", "16"),
    ]
    assert {row["baseline_group"] for row in rows} == {"grad_accum"}  # one run for both cells
    runs = {name: group.runs for name, group in plan.groups.items()}
    for row in rows:
        mine, theirs = (
            [statistics.fmean(score(runs[row[key]][seed], q) for seed in (0, 1)) for q in range(20)]
            for key in ("group", "baseline_group")
        )
        expected = paired_bootstrap(mine, theirs, 10_000, 0)
        assert (row["difference"], row["low"], row["high"], row["p_value"]) == pytest.approx(expected)
        assert len(row["difference_by_seed"]) == 2
    assert [row["p_holm"] for row in rows] == holm([row["p_value"] for row in rows])
    group = report["groups"]["contaccum_bank_size-16"]
    values = [results[run.name]["evaluations"]["beir"]["metrics"]["NDCG@10"] for run in runs[row["group"]].values()]
    assert group["seeds"] == [0, 1] and group["train_seconds"] == 8.5 and group["peak_memory_mb"] == 101.0
    assert report["groups"][row["group"]]["metrics"]["beir"]["NDCG@10"]["mean"] == pytest.approx(
        statistics.fmean(values)
    )
    assert report["groups"][row["group"]]["metrics"]["beir"]["NDCG@10"]["sd"] == pytest.approx(statistics.stdev(values))
    assert report["warnings"] == []


def test_a_variant_that_fixes_a_value_of_the_grid_is_of_that_cell(
    options: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    variants = [["published", "learning_rate=0.00002", "bank_size=null"], ["other", "learning_rate=3e-5"]]
    entries = read_entries(["grad_accum"], variants, "contaccum")
    plan = make_plan(options, entries, read_grid(["learning_rate=1e-5,2e-5"]), [0])
    rows = [(labels["learning_rate"], name, baseline) for labels, name, baseline in pairs_to_compare(plan)]
    assert [row for row in rows if row[1] != row[2]] == [
        ("2e-5", "published", "grad_accum_learning_rate-2e-5"),
        ("(1e-5)", "other", "grad_accum_learning_rate-1e-5"),  # of no cell: beside all
        ("(2e-5)", "other", "grad_accum_learning_rate-2e-5"),
    ]
    titles: list[str] = []
    monkeypatch.setattr("matplotlib.figure.FigureBase.suptitle", lambda self, title, **_: titles.append(title))
    draw_report(plan, {}, {}, tmp_path / "report.png")
    assert titles == ["curves at learning_rate=2e-5"]


def test_a_baseline_with_a_bank_is_compared_in_each_cell(options: dict[str, list[str]]):
    entries = read_entries(["grad_accum", "contaccum"], [], "contaccum")
    plan = make_plan(options, entries, read_grid(["bank_size=8,16"]), [0], baseline="contaccum")
    report = build_report(plan, made_up(plan), {}, ABOUT)
    rows = [row for row in report["comparisons"] if row["metric"] == "MRR@10"]
    assert [(row["entry"], row["labels"]["bank_size"]) for row in rows] == [
        ("grad_accum", "(8)"),
        ("grad_accum", "(16)"),
    ]
    assert rows[0]["difference"] > rows[1]["difference"]
    assert "| grad_accum | (16) |" in markdown({**report, "settings": {}})


def test_unequal_beginnings_and_data_are_told_first(plan: Plan):
    results = made_up(plan)
    odd = results["contaccum_bank_size-8_seed-1"]
    odd["initial_weights"], odd["data_order"], odd["updates"] = "other", "other", 9
    report = build_report(plan, results, {}, ABOUT)
    assert len(report["warnings"]) == 3
    assert all(w.startswith(odd["name"]) and "grad_accum_seed-1" in w for w in report["warnings"])
    text = markdown(report)
    assert text.index("Take care") < text.index("## beir")


def test_a_variant_is_not_held_against_cells_that_it_is_not_of(options: dict[str, list[str]]):
    entries = read_entries(["grad_accum"], [["published", "per_device_train_batch_size=8"]], "contaccum")
    plan = make_plan(options, entries, read_grid(["per_device_train_batch_size=4,8"]), [0])
    results = made_up(plan)
    for run in plan.runs:
        results[run.name]["pairs_per_update"] = run.pairs_per_update
    assert len({run.pairs_per_update for run in plan.runs}) == 2
    assert build_report(plan, results, {}, ABOUT)["warnings"] == []


def test_runs_that_failed_are_told_and_the_rest_is_reported(plan: Plan):
    results = made_up(plan)
    for name in ("contaccum_bank_size-8_seed-1", "published_bank_size-8_seed-0", "published_bank_size-8_seed-1"):
        del results[name]
    report = build_report(plan, results, {"contaccum_bank_size-8_seed-1": "killed by SIGKILL"}, ABOUT)
    assert report["groups"]["contaccum_bank_size-8"]["seeds"] == [0]
    row = next(row for row in report["comparisons"] if row["group"] == "contaccum_bank_size-8")
    assert row["seeds"] == [0] and row["sd_over_seeds"] is None
    assert report["groups"]["published_bank_size-8"]["metrics"] == {}
    assert "killed by SIGKILL" in markdown(report)
    empty = build_report(plan, {}, {"a": "b"}, ABOUT)
    assert empty["comparisons"] == [] and "## Failed" in markdown(empty)


def test_report_to_read_has_every_metric_and_cost(plan: Plan):
    text = markdown(build_report(plan, made_up(plan), {}, ABOUT))
    for shown in METRICS.values():
        assert f"### {shown}" in text
    assert "published: contaccum with drift_compensation=none" in text
    assert "| contaccum | 16 | 2 | 1.000 | 8.5 | 101 | 1.500 | - |" in text
    assert "8 updates of 12 pairs" in text and "beir (test): 20 queries, 30 documents" in text


@pytest.mark.parametrize("grid", [[], ["bank_size=8,16"], ["learning_rate=1e-5,2e-5", "bank_size=8,16"]])
def test_picture_is_drawn_for_what_there_is(options: dict[str, list[str]], grid: list[str], tmp_path: Path):
    plan = make_plan(options, read_entries(["grad_accum", "contaccum"], [], "contaccum"), read_grid(grid), [0, 1])
    results = made_up(plan)
    record = {"loss": 1.0, "grad_norm_ratio": 2.0, "drift_cosine": 0.5, "drift_more": None, "bank_mass": 0.1}
    logs = {name: [{"update": u, **record} for u in range(1, 9)] for name in results}
    draw_report(plan, results, logs, tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 10_000
    draw_report(plan, {}, {}, tmp_path / "empty.png")
    assert (tmp_path / "empty.png").is_file()
