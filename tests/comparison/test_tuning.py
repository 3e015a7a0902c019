"""`contaccum compare --tune`: the values that are tried, the chosen value, and dev data only."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from contaccum.cli import main
from contaccum.comparison import run as comparison_run
from contaccum.comparison.options import read_options
from contaccum.comparison.plan import Plan, apply_chosen_values, make_plan
from contaccum.comparison.summary import build_report, render_markdown
from contaccum.comparison.tuning import Ladder, read_ladder, summarize_tuning, tune_groups
from contaccum.errors import ConfigError
from contaccum.files import write_json
from contaccum.tuning.ladder import choose_value, next_values

LADDER = Ladder("learning_rate", ["1e-4", "1.8e-4", "3.2e-4"], 1.8, 6, [0])

TrainRuns = Callable[[Plan], tuple[dict[str, Any], dict[str, str]]]


def try_values(
    score_value: Callable[[float], float | None], ladder: Ladder = LADDER
) -> tuple[list[str], str | None]:
    """Return the values that are tried, in order, and the value that is chosen."""
    scores: dict[str, float | None] = {}
    while values := next_values(ladder.values, ladder.factor, ladder.max_values, scores):
        for value in values:
            scores[value] = score_value(float(value))
    return list(scores), choose_value(scores)


@pytest.mark.parametrize(
    ("score_value", "further_values", "chosen"),
    [
        (lambda x: -abs(x - 1.8e-4), [], "1.8e-4"),  # the best value is inside at once
        (lambda x: -abs(x - 6e-4), ["0.00058", "0.001"], "0.00058"),
        (lambda x: -abs(x - 3e-5), ["5.6e-5", "3.1e-5", "1.7e-5"], "3.1e-5"),
        (lambda x: x, ["0.00058", "0.001", "0.0018"], "0.0018"),  # ends at six values
        (lambda x: 0.0, [], "1.8e-4"),  # of equal values, an inner one is chosen
        (lambda x: None if x > 2e-4 else x, [], "1.8e-4"),  # nothing is tried beyond a failure
        (lambda x: None, [], None),
    ],
)
def test_values_are_tried_beyond_an_end_while_the_best_is_there(
    score_value, further_values, chosen
):
    assert try_values(score_value) == ([*LADDER.values, *further_values], chosen)


def test_smaller_of_two_equal_values_is_chosen_and_one_smaller_is_tried():
    ladder = LADDER._replace(values=["2", "1"], factor=2.0)
    assert try_values(lambda x: min(x, 1.0), ladder) == (["2", "1", "0.5"], "1")


@pytest.fixture
def plan(tokens) -> Plan:
    return make_plan(
        read_options([], tokens),
        ["grad_accum", "contaccum"],
        [["slow", "learning_rate=1e-5"]],
        ["bank_size=8,16"],
        [0, 1],
        "grad_accum",
    )


def make_evaluation(scores: Sequence[float]) -> dict[str, Any]:
    """Return an evaluation in which each query has a given score."""
    return {
        "metrics": {"NDCG@10": sum(scores) / len(scores)},
        "per_query": {f"q{i}": {"NDCG@10": score} for i, score in enumerate(scores)},
    }


def make_train(best_rates: dict[str, float], rounds: list[set[str]] | None = None) -> TrainRuns:
    """Return a function that replaces training.

    The score is the higher, the nearer the learning rate is to the best rate of the entry. A rate
    of 1 fails. The names of the groups are appended to ``rounds``.
    """

    def train(plan: Plan) -> tuple[dict[str, Any], dict[str, str]]:
        if rounds is not None:
            rounds.append(set(plan.groups))
        results = {}
        failed = {}
        for group in plan.groups.values():
            rate = group.arguments.training.learning_rate
            score = 0.5 - abs(rate - best_rates[group.entry])
            for seed in plan.seeds:
                if rate == 1:
                    failed[group.run_name(seed)] = "not finite"
                    continue
                evaluations = {
                    "a": make_evaluation([score + seed, score + seed]),
                    "b": make_evaluation([score, score]),
                }
                results[group.run_name(seed)] = {"evaluations": evaluations}
        return results, failed

    return train


def get_chosen_values(tuning: dict[str, Any]) -> dict[str, str | None]:
    return {name: group["chosen"] for name, group in tuning["groups"].items()}


def test_every_group_is_tuned_by_its_own_scores_in_common_rounds(plan):
    rounds: list[set[str]] = []
    ladder = read_ladder(plan, "learning_rate=1e-3,2e-3,1", 2.0, 5, [1, 3])
    train = make_train({"grad_accum": 2e-3, "contaccum": 4e-4}, rounds)
    result = tune_groups(plan, ladder, train)
    banked_groups = ["contaccum_bank_size-8", "contaccum_bank_size-16"]
    assert [len(groups) for groups in rounds] == [9, 2, 2]
    assert rounds[1] == {f"{name}_learning_rate-0.0005" for name in banked_groups}
    assert list(result.scores["grad_accum"]) == ["1e-3", "2e-3", "1"]
    assert result.scores["grad_accum"]["1"] is None
    # The mean over seeds 1 and 3 and over two data sets.
    assert result.scores["contaccum_bank_size-8"]["0.0005"] == pytest.approx(1.5 - 1e-4)
    assert result.failed["tune/grad_accum_learning_rate-1_seed-3"] == "not finite"
    assert len(result.failed) == 6

    chosen = get_chosen_values(summarize_tuning(plan, ladder, result, []))
    assert chosen == {"grad_accum": "2e-3", **dict.fromkeys(banked_groups, "0.0005")}


def test_an_impossible_value_beyond_the_users_ends_a_ladder(plan):
    """Half a warm-up update is impossible; the best value 1 is the smallest one."""

    def train(plan: Plan) -> tuple[dict[str, Any], dict[str, str]]:
        results = {}
        for group in plan.groups.values():
            score = 1.0 / group.arguments.training.gradient_accumulation_steps
            for seed in plan.seeds:
                evaluations = {"a": make_evaluation([score, score])}
                results[group.run_name(seed)] = {"evaluations": evaluations}
        return results, {}

    ladder = read_ladder(plan, "gradient_accumulation_steps=1,2", 2.0, 5, [1])
    result = tune_groups(plan, ladder, train)
    assert result.scores["grad_accum"] == {"1": 1.0, "2": 0.5, "0.5": None}


def test_final_plan_has_the_chosen_values(plan):
    chosen = {
        "grad_accum": "2e-3",
        "contaccum_bank_size-8": "0.0005",
        "contaccum_bank_size-16": "0.0005",
    }
    final = apply_chosen_values(plan, "learning_rate", chosen)
    assert list(final.groups) == [
        "grad_accum_learning_rate-2e-3",
        "contaccum_bank_size-8_learning_rate-0.0005",
        "contaccum_bank_size-16_learning_rate-0.0005",
        "slow_bank_size-8_learning_rate-1e-5",
        "slow_bank_size-16_learning_rate-1e-5",
    ]
    rates = [group.arguments.training.learning_rate for group in final.groups.values()]
    assert rates == [2e-3, 5e-4, 5e-4, 1e-5, 1e-5]
    assert list(final.seeds) == [0, 1]
    assert {baseline for _, baseline in final.comparisons} == {"grad_accum_learning_rate-2e-3"}
    row_rates = [labels["learning_rate"] for labels in final.comparisons.values()]
    assert row_rates == ["0.0005", "0.0005", "1e-5", "1e-5"]


def test_group_without_a_chosen_value_is_left_out_of_the_final_plan(plan):
    chosen = {
        "grad_accum": "2e-3",
        "contaccum_bank_size-8": None,
        "contaccum_bank_size-16": "0.0005",
    }
    final = apply_chosen_values(plan, "learning_rate", chosen)
    assert len(final.groups) == 4
    assert len(final.comparisons) == 3


def test_report_shows_all_values_and_warns_of_a_best_value_at_an_end(plan):
    data = [{"name": "beir", "split": "dev", "queries": 4, "documents": 8, "fingerprint": "f"}]
    ladder = read_ladder(plan, "learning_rate=1e-3,2e-3,1", 2.0, 4, None)
    result = tune_groups(plan, ladder, make_train({"grad_accum": 2e-3, "contaccum": 1e-5}))
    tuning = summarize_tuning(plan, ladder, result, data)
    final = apply_chosen_values(plan, ladder.key, get_chosen_values(tuning))
    context = {
        "command": "",
        "settings": {"evaluation": {"queries": None, "corpus": None}},
        "tuning": tuning,
        "data": {"evaluation": data},
    }
    report = build_report(final, {}, result.failed, context)
    assert report["warnings"] == [
        "contaccum: the best learning_rate is the smallest or the largest value tried, so a value "
        "beyond it may be better; try it with --tune, or raise --tune_most "
        "(bank_size=8: chosen 0.0005, 4 values tried; bank_size=16: chosen 0.0005, 4 values tried)",
        "beir: learning_rate was chosen on these data, so the scores on them are too optimistic; "
        "score on other data",
    ]
    lines = render_markdown(report).splitlines()
    for line in (
        "| method | bank_size | 0.0005 | 1e-3 | 2e-3 | 1 | chosen minus lowest |",
        "| grad_accum |  |  | 0.4990 | **0.5000** | no score | +0.0010 (+0.0010 to +0.0010) |",
        "| contaccum | 8 | **0.4995** | 0.4990 | 0.4980 | no score | "
        "+0.0015 (+0.0015 to +0.0015) |",
    ):
        assert line in lines


def test_report_warns_if_dev_data_do_not_decide(plan):
    """One query gains what the other query loses."""
    ladder = read_ladder(plan, "learning_rate=1e-3,2e-3", 2.0, 2, None)
    evaluations = {1e-3: make_evaluation([0.9, 0.2]), 2e-3: make_evaluation([0.1, 0.8])}

    def train(tuning_plan: Plan) -> tuple[dict[str, Any], dict[str, str]]:
        results = {}
        for group in tuning_plan.groups.values():
            rate = group.arguments.training.learning_rate
            for seed in tuning_plan.seeds:
                results[group.run_name(seed)] = {"evaluations": {"a": evaluations[rate]}}
        return results, {}

    tuning = summarize_tuning(plan, ladder, tune_groups(plan, ladder, train), [])
    worst = tuning["groups"]["grad_accum"]["worst"]
    assert worst["value"] == "2e-3"
    assert worst["difference"] == pytest.approx(0.1)
    assert worst["low"] < 0 < worst["high"]
    final = apply_chosen_values(plan, ladder.key, get_chosen_values(tuning))
    report = build_report(final, {}, {}, {"tuning": tuning, "data": {"evaluation": []}})
    text = "the best learning_rate is not significantly better than the one with the lowest score"
    warnings = [line for line in report["warnings"] if text in line]
    assert len(warnings) == 2  # one for each method, with its cells
    assert "1e-3 against 2e-3: +0.1000" in warnings[0]


@pytest.mark.parametrize(
    ("argument", "factor", "message"),
    [
        (None, 1.8, "--tune_data without --tune"),
        ("learning_rate=1e-4,fast", 1.8, "write key=value,value with two positive numbers"),
        ("learning_rate=1e-4,0.0001", 1.8, "two positive numbers or more"),
        ("learning_rate=0,1e-4", 1.8, "two positive numbers or more"),
        ("learning_rate", 1.8, "write key=value,value"),
        ("bank_size=8,16", 1.8, "--tune bank_size with --grid bank_size: drop one"),
        ("seed=1,2", 1.8, "seed: a comparison sets it"),
        ("learning_rate=1e-4,2e-4", 1.0, "--tune_factor must be at least 1.1"),
    ],
)
def test_settings_that_cannot_be_tuned_are_refused(plan, argument, factor, message):
    with pytest.raises(ConfigError, match=message):
        read_ladder(plan, argument, factor, 12, None)


def run_jobs_in_this_process(jobs: Any, *args: Any) -> dict[str, str]:
    """Replace `run_jobs`, whose processes each take some seconds to start."""
    for job in jobs:
        write_json(Path(job["folder"], "result.json"), comparison_run.run_job(job))
    return {}


def make_dev_data(beir: Path, dev: Path) -> Path:
    """Copy a BEIR folder; three of its judgements become the split `dev`, and `test` is removed."""
    shutil.copytree(beir, dev)
    test_file = dev / "qrels" / "test.tsv"
    lines = test_file.read_text().splitlines()
    test_file.with_name("dev.tsv").write_text("\n".join(lines[:3]) + "\n")
    test_file.unlink()  # a tuning run that reads it fails
    return dev


@pytest.mark.long
def test_methods_are_tuned_on_dev_then_run_at_their_best_and_never_twice(
    tokens, data_folder, tmp_path, capsys, monkeypatch
):
    dev = make_dev_data(data_folder / "beir", tmp_path / "dev")
    output = tmp_path / "out"
    arguments = ["compare", *tokens, "--eval_data", str(data_folder / "beir")]
    arguments += [f"--output_dir={output}", "--seeds", "3"]
    arguments += ["--methods", "grad_accum", "contaccum", "--tune", "learning_rate=1e-4,1e-3"]
    assert main(arguments) == 2
    assert "--tune_data: give BEIR folders" in capsys.readouterr().err
    assert not output.exists()

    monkeypatch.setattr(comparison_run, "run_jobs", run_jobs_in_this_process)
    arguments += ["--tune_data", str(dev), "--tune_most", "3"]
    assert main(arguments) == 0
    report = json.loads((output / "report.json").read_text())
    tuned_groups = report["tuning"]["groups"]
    for name, group in tuned_groups.items():
        for value, score in group["scores"].items():
            folder = output / "tune" / f"{name}_learning_rate-{value}_seed-3"
            result = json.loads((folder / "result.json").read_text())
            assert list(result["evaluations"]) == ["dev"]
            assert result["evaluations"]["dev"]["metrics"]["NDCG@10"] == score
    final_rates = sorted(run["labels"]["learning_rate"] for run in report["runs"].values())
    assert final_rates == sorted(group["chosen"] for group in tuned_groups.values())

    started_runs: list[str] = []

    def record_jobs(jobs: Any, *args: Any) -> dict[str, str]:
        started_runs.extend(job["name"] for job in jobs)
        return {}

    monkeypatch.setattr(comparison_run, "run_jobs", record_jobs)
    text_before = (output / "report.md").read_text()
    assert main(arguments) == 0
    assert started_runs == []
    assert (output / "report.md").read_text() == text_before
