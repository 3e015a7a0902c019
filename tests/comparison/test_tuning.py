"""Each group's own best value of a setting: what is tried, what is chosen, and that it is found on dev alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from contaccum.cli import main
from contaccum.comparison import run as comparison_run
from contaccum.comparison.plan import Plan, make_plan, read_options, with_chosen
from contaccum.comparison.summary import build_report, markdown
from contaccum.comparison.tuning import Ladder, about_tuning, climb, read_ladder
from contaccum.errors import ConfigError
from contaccum.files import write_json
from contaccum.report import Source, build_page, comparison_panels
from contaccum.tuning.ladder import best_of, next_values

LADDER = Ladder("learning_rate", ["1e-4", "1.8e-4", "3.2e-4"], 1.8, 6, [0])


def climbed(score: Any, ladder: Ladder = LADDER) -> tuple[list[str], str | None]:
    """What is tried, in order, and what is chosen, where a value has the score that a function gives it."""
    scores: dict[str, float | None] = {}
    while values := next_values(ladder.values, ladder.factor, ladder.most, scores):
        scores |= {value: score(float(value)) for value in values}
    return list(scores), best_of(scores)


@pytest.mark.parametrize(
    ("score", "beyond", "chosen"),
    [
        (lambda x: -abs(x - 1.8e-4), [], "1.8e-4"),  # inside at once
        (lambda x: -abs(x - 6e-4), ["0.00058", "0.001"], "0.00058"),
        (lambda x: -abs(x - 3e-5), ["5.6e-5", "3.1e-5", "1.7e-5"], "3.1e-5"),
        (lambda x: x, ["0.00058", "0.001", "0.0018"], "0.0018"),  # six, and still at an end
        (lambda x: 0.0, [], "1.8e-4"),  # of equal ones, one inside
        (lambda x: None if x > 2e-4 else x, [], "1.8e-4"),  # one that failed is an end
        (lambda x: None, [], None),
    ],
)
def test_a_ladder_goes_on_beyond_an_end_while_that_is_the_best(score, beyond, chosen):
    assert climbed(score) == ([*LADDER.values, *beyond], chosen)


def test_of_two_equal_values_the_smaller_is_taken_and_the_ladder_goes_down_once():
    ladder = LADDER._replace(values=["2", "1"], factor=2.0)
    assert climbed(lambda x: min(x, 1.0), ladder) == (["2", "1", "0.5"], "1")


@pytest.fixture
def plan(tokens) -> Plan:
    methods, variants, grid = (
        ["grad_accum", "contaccum"],
        [["slow", "learning_rate=1e-5"]],
        ["bank_size=8,16"],
    )
    return make_plan(read_options([], tokens), methods, variants, grid, [0, 1], "grad_accum")


def scored(*scores: float) -> dict[str, Any]:
    """A result of made-up scores of queries."""
    mean = sum(scores) / len(scores)
    return {
        "metrics": {"NDCG@10": mean},
        "per_query": {f"q{i}": {"NDCG@10": x} for i, x in enumerate(scores)},
    }


def made_up(asked: list[set[str]], best: dict[str, float]) -> Any:
    """Stands for training: the nearer the learning rate to the entry's best, the better; a rate of 1 fails."""

    def train(rungs: Plan) -> Any:
        asked.append(set(rungs.groups))
        results, failed = {}, {}
        for group in rungs.groups.values():
            score = 0.5 - abs(group.parsed[2].learning_rate - best[group.entry])
            for seed in rungs.seeds:
                if group.parsed[2].learning_rate == 1:
                    failed[group.run(seed)] = "not finite"
                else:
                    sets = {"a": scored(score + seed, score + seed), "b": scored(score, score)}
                    results[group.run(seed)] = {"evaluations": sets}
        return results, failed

    return train


def test_every_group_climbs_by_itself_all_in_the_same_rounds(plan):
    asked: list[set[str]] = []
    ladder = read_ladder(plan, "learning_rate=1e-3,2e-3,1", 2.0, 5, [1, 3])
    found = climb(plan, ladder, made_up(asked, {"grad_accum": 2e-3, "contaccum": 4e-4}))
    names = ["grad_accum", "contaccum_bank_size-8", "contaccum_bank_size-16"]
    assert [len(names) for names in asked] == [9, 2, 2]
    assert asked[1] == {f"{name}_learning_rate-0.0005" for name in names[1:]}
    scores, failed = found.scores, found.failed
    assert list(scores["grad_accum"]) == ["1e-3", "2e-3", "1"] and scores["grad_accum"]["1"] is None
    assert scores["contaccum_bank_size-8"]["0.0005"] == pytest.approx(
        1.5 - 1e-4
    )  # seeds 1 and 3, two sets
    assert failed["tune/grad_accum_learning_rate-1_seed-3"] == "not finite" and len(failed) == 6

    groups = about_tuning(plan, ladder, found, [])["groups"]
    chosen = {name: of["chosen"] for name, of in groups.items()}
    assert chosen == {"grad_accum": "2e-3", **dict.fromkeys(names[1:], "0.0005")}
    final = with_chosen(plan, ladder.key, chosen)
    slow = [f"slow_bank_size-{m}_learning_rate-1e-5" for m in (8, 16)]
    assert list(final.groups) == [
        *(
            "grad_accum_learning_rate-2e-3",
            *(f"{name}_learning_rate-0.0005" for name in names[1:]),
            *slow,
        )
    ]
    rates = [group.parsed[2].learning_rate for group in final.groups.values()]
    assert rates == [2e-3, 5e-4, 5e-4, 1e-5, 1e-5] and list(final.seeds) == [0, 1]
    assert [(theirs, of["learning_rate"]) for (_, theirs), of in final.pairs.items()] == [
        ("grad_accum_learning_rate-2e-3", value) for value in ("0.0005", "0.0005", "1e-5", "1e-5")
    ]
    without = with_chosen(plan, ladder.key, {**chosen, names[1]: None})
    assert len(without.groups) == 4 and len(without.pairs) == 3


def test_a_report_says_what_was_tried_and_warns_of_a_best_at_an_end(plan):
    data = [{"name": "beir", "split": "dev", "queries": 4, "documents": 8, "fingerprint": "f"}]
    ladder = read_ladder(plan, "learning_rate=1e-3,2e-3,1", 2.0, 4, None)
    found = climb(plan, ladder, made_up([], {"grad_accum": 2e-3, "contaccum": 1e-5}))
    tuning = about_tuning(plan, ladder, found, data)
    final = with_chosen(
        plan, ladder.key, {name: of["chosen"] for name, of in tuning["groups"].items()}
    )
    about = {
        "command": "",
        "settings": {"evaluation": {"queries": None, "corpus": None}},
        "tuning": tuning,
    }
    report = build_report(final, {}, found.failed, {**about, "data": {"evaluation": data}})
    cells = "bank_size=8: 0.0005 of 4; bank_size=16: 0.0005 of 4"
    at_end = f"contaccum: its best learning_rate is at an end of the values tried ({cells})"
    no_test = "beir: learning_rate was chosen on this data, so that its scores are no test"
    assert report["warnings"] == [at_end, no_test]
    lines = markdown(report).splitlines()
    assert "| method | bank_size | 0.0005 | 1e-3 | 2e-3 | 1 | chosen and lowest |" in lines
    assert (
        "| grad_accum |  |  | 0.4990 | **0.5000** | failed | +0.0010 (+0.0010 to +0.0010) |"
        in lines
    )
    assert (
        "| contaccum | 8 | **0.4995** | 0.4990 | 0.4980 | failed | +0.0015 (+0.0015 to +0.0015) |"
        in lines
    )
    (panel,) = comparison_panels(Source("comparison", "c", report))
    assert panel.log_x and panel.lines["grad_accum, learning_rate=2e-3"] == [
        [(1e-3, 0.499), (2e-3, 0.5)]
    ]
    assert panel.lines["slow, bank_size=8, learning_rate=1e-5"] == []


def test_a_report_warns_where_dev_data_decide_nothing(plan):
    """One query gains what the other loses."""
    ladder = read_ladder(plan, "learning_rate=1e-3,2e-3", 2.0, 2, None)
    by_rate = {1e-3: scored(0.9, 0.2), 2e-3: scored(0.1, 0.8)}

    def train(rungs: Plan) -> Any:
        results = {}
        for group in rungs.groups.values():
            rate = group.parsed[2].learning_rate
            for seed in rungs.seeds:
                results[group.run(seed)] = {"evaluations": {"a": by_rate[rate]}}
        return results, {}

    tuning = about_tuning(plan, ladder, climb(plan, ladder, train), [])
    worst = tuning["groups"]["grad_accum"]["worst"]
    assert (worst["value"], worst["difference"]) == ("2e-3", pytest.approx(0.1))
    assert worst["low"] < 0 < worst["high"]
    final = with_chosen(
        plan, ladder.key, {name: of["chosen"] for name, of in tuning["groups"].items()}
    )
    report = build_report(final, {}, {}, {"tuning": tuning, "data": {"evaluation": []}})
    told = [line for line in report["warnings"] if "do not tell its best learning_rate" in line]
    assert len(told) == 2  # each method, with its cells
    assert "1e-3 against 2e-3: +0.1000" in told[0]


@pytest.mark.parametrize(
    ("given", "factor", "message"),
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
def test_what_cannot_be_climbed_is_refused(plan, given, factor, message):
    with pytest.raises(ConfigError, match=message):
        read_ladder(plan, given, factor, 12, None)


def in_this_process(jobs: Any, *args: Any) -> dict[str, str]:
    """Stands for `run_jobs`, whose processes each take some seconds to begin."""
    for job in jobs:
        write_json(Path(job["folder"], "result.json"), comparison_run.run_job(job))
    return {}


@pytest.mark.long
def test_each_method_is_tuned_on_dev_then_run_at_its_best_and_nothing_is_done_twice(
    tokens, place, tmp_path, capsys, monkeypatch
):
    shutil.copytree(place / "beir", tmp_path / "dev")
    judged = tmp_path / "dev" / "qrels" / "test.tsv"
    lines = judged.read_text().splitlines()
    judged.with_name("dev.tsv").write_text("\n".join(lines[:3]) + "\n")
    judged.unlink()  # so that a tuning run that looked for it would fail
    out = tmp_path / "out"
    arguments = [
        "compare",
        *tokens,
        "--eval_data",
        str(place / "beir"),
        f"--output_dir={out}",
        "--seeds",
        "3",
    ]
    arguments += ["--methods", "grad_accum", "contaccum", "--tune", "learning_rate=1e-4,1e-3"]
    assert main(arguments) == 2
    assert "--tune_data: give BEIR folders" in capsys.readouterr().err and not out.exists()
    monkeypatch.setattr(comparison_run, "run_jobs", in_this_process)
    arguments += ["--tune_data", str(tmp_path / "dev"), "--tune_most", "3"]
    assert main(arguments) == 0
    report = json.loads((out / "report.json").read_text())
    for name, group in report["tuning"]["groups"].items():
        for value, score in group["scores"].items():
            result = json.loads(
                (out / "tune" / f"{name}_learning_rate-{value}_seed-3" / "result.json").read_text()
            )
            assert result["evaluations"]["dev"]["metrics"]["NDCG@10"] == score
            assert list(result["evaluations"]) == ["dev"]
    rates = sorted(run["labels"]["learning_rate"] for run in report["runs"].values())
    assert rates == sorted(group["chosen"] for group in report["tuning"]["groups"].values())

    asked: list[str] = []
    monkeypatch.setattr(
        comparison_run,
        "run_jobs",
        lambda jobs, *args: asked.extend(job["name"] for job in jobs) or {},
    )
    before = (out / "report.md").read_text()
    assert main(arguments) == 0 and asked == []
    assert (out / "report.md").read_text() == before
    page = build_page([out])
    assert (
        "nDCG@10 on dev by learning_rate" in page
        and ">0.001</text>" in page
        and "mathdefault" not in page
    )
