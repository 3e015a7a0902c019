"""eval/compare: the plan of the runs, fair runs, tuning on dev, the statistics of the report."""

import itertools
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from programs import ROOT, run_program
from small_data import write_training_and_beir_data

sys.path.insert(0, str(ROOT / "eval" / "compare"))

from comparison import processes
from comparison import run as comparison_run
from comparison.plan import Group, make_groups, read_options
from comparison.report import METRICS, build_report, render_markdown
from comparison.tuning import (
    apply_chosen_values,
    find_best_value,
    next_values,
    read_ladder,
    tune_groups,
)

from contaccum.errors import ConfigError
from contaccum.evaluation.metrics import sign_flip_test
from contaccum.files import read_json, write_json
from contaccum.training.arguments import ContAccumTrainingArguments


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    write_training_and_beir_data(folder, 43)
    return folder


@pytest.fixture(scope="module")
def tokens(data_folder, tiny_model_path) -> list[str]:
    """Options of a run of a second: 43 pairs, n=4, K=3, two epochs of 4 updates."""
    return [
        f"--model={tiny_model_path}",
        f"--train_data={data_folder / 'pairs.jsonl'}",
        "--num_train_epochs=2",
        "--learning_rate=1e-3",
        "--per_device_train_batch_size=4",
        "--gradient_accumulation_steps=3",
        "--bank_size=20",
        "--use_cpu=true",
    ]


def plan_runs(tokens, methods, variants=()) -> list[Group]:
    return make_groups(read_options([], tokens), methods, variants)


def get_training_arguments(group: Group) -> Any:
    return ContAccumTrainingArguments.from_settings(group.settings)


# The plan


def test_in_batch_has_all_pairs_of_an_update_in_one_batch(tokens):
    in_batch, accumulated = map(
        get_training_arguments, plan_runs(tokens, ["in_batch", "grad_accum"])
    )
    assert in_batch.gradient_accumulation_steps == 1
    assert in_batch.per_device_train_batch_size == 4 * 3
    assert in_batch.total_train_batch_size == accumulated.total_train_batch_size


def test_bank_settings_are_dropped_for_methods_without_a_bank(tokens):
    options = [*tokens, "--normalize_by", "all"]
    options += ["--mask_duplicates=false", "--temperature=0.1"]
    variants = [["published", "drift_compensation=none", "learning_rate=2e-5"]]
    without_bank, with_bank, published = map(
        get_training_arguments, plan_runs(options, ["grad_accum", "contaccum"], variants)
    )
    assert without_bank.bank_size is None
    assert without_bank.normalize_by == "local"
    assert with_bank.bank_size == 20
    assert with_bank.normalize_by == "all"
    assert published.method == "contaccum"
    assert published.drift_compensation == "none"
    assert published.learning_rate == 2e-5
    # Settings that need no bank are kept for all methods.
    for args in (without_bank, with_bank, published):
        assert args.mask_duplicates is False
        assert args.temperature == 0.1


def test_command_line_overrides_config_files(tmp_path):
    """The settings that a comparison sets itself are not read from a config."""
    settings = {"model": "m", "bank_size": 8, "train_data": ["a", "b"], "seed": 3, "save_steps": 2}
    settings |= {"output_dir": "o", "eval_strategy": "steps", "metric_for_best_model": "mrr@10"}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    options = read_options([str(path)], ["--bank_size", "16", "--bank_hard_negatives=false"])
    data = {"train_data": ["a", "b"]}
    assert options == {"model": "m", "bank_size": 16, "bank_hard_negatives": False, **data}


@pytest.mark.parametrize(
    ("options", "methods", "variants", "word"),
    [
        (["--bank_sise", "3"], ["contaccum"], [], "bank_size"),
        (["--seed", "3"], ["contaccum"], [], "--seeds"),
        ([], ["contacum"], [], "contaccum"),
        ([], [], [["a", "method=grad_accum", "bank_size=8"]], "a: "),
        ([], ["contaccum"], [["contaccum", "bank_size=8"]], "this name"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(tokens, options, methods, variants, word):
    with pytest.raises(ConfigError, match=word):
        plan_runs([*tokens, *options], methods, variants)


# The runs


# Replaces comparison.run in the processes; the job decides how the process ends.
CHILD = """
import json, os, signal, sys
from pathlib import Path
job = json.loads(Path(sys.argv[1]).read_text())
if job["behaviour"] == "fail":
    sys.exit("no such thing")
if job["behaviour"] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if job["behaviour"] == "hang":
    os.read(0, 1)  # returns when the parent closes the pipe
(Path(job["folder"]) / "result.json").write_text(os.environ["OMP_NUM_THREADS"])
"""


def start_jobs(folder, behaviours, max_processes, progress) -> dict[str, str]:
    """Run a job in `CHILD` for each behaviour."""
    script = folder / "child.py"
    script.write_text(CHILD)
    jobs = [
        {
            "name": f"{number}-{behaviour}",
            "folder": str(folder / str(number)),
            "behaviour": behaviour,
        }
        for number, behaviour in enumerate(behaviours)
    ]
    return processes.run_jobs(jobs, max_processes, progress, (sys.executable, str(script)))


def test_failed_jobs_are_named_and_the_others_run(tmp_path):
    """No more processes run at once than the limit allows."""
    lines: list[str] = []
    failed = start_jobs(tmp_path, ["fail", "ok", "killed", "ok"], 2, lines.append)
    assert failed.keys() == {"0-fail", "2-killed"}
    assert "exit code 1: no such thing" in failed["0-fail"]
    assert "exit code -9" in failed["2-killed"]
    for folder in ("1", "3"):
        assert int((tmp_path / folder / "result.json").read_text()) >= 1
    changes = [1 if line.endswith(": started") else -1 for line in lines]
    assert max(itertools.accumulate(changes)) == 2


def test_an_interrupt_leaves_no_process(tmp_path):
    lines: list[str] = []

    def interrupt(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start_jobs(tmp_path, ["hang", "hang", "ok"], 3, interrupt)
    for child in psutil.Process().children():
        assert not any("child.py" in part for part in child.cmdline())


# Tuning


def test_every_group_is_tuned_by_its_own_scores_in_common_rounds(tokens):
    groups = plan_runs(tokens, ["grad_accum", "contaccum"], [["slow", "learning_rate=1e-5"]])
    best_rates = {"grad_accum": 2e-3, "contaccum": 6e-4}
    rounds: list[list[str]] = []

    def train(groups):
        """Return scores that fall with the distance to the best rate; a rate of 1 fails."""
        rounds.append([group.name for group in groups])
        results, failed = {}, {}
        for group in groups:
            rate = get_training_arguments(group).learning_rate
            if rate == 1:
                failed[group.run_name(3)] = "not finite"
                continue
            score = 0.5 - abs(rate - best_rates[group.entry])
            results[group.run_name(3)] = {
                "evaluations": {
                    data: {"metrics": {"NDCG@10": score + gain}}
                    for data, gain in (("a", 0.2), ("b", 0.0))
                }
            }
        return results, failed

    ladder = read_ladder("learning_rate=1e-3,2e-3,1", 3)
    tunings, failed = tune_groups(groups, ladder, train)
    assert [len(names) for names in rounds] == [6, 1, 1]
    assert rounds[1] == ["contaccum_learning_rate-0.00056"]
    assert tunings["grad_accum"]["scores"] == {1e-3: 0.599, 2e-3: 0.6, 1.0: None}
    # The mean over two data sets.
    assert tunings["contaccum"]["scores"][5.6e-4] == pytest.approx(0.5 + 0.1 - 4e-5)
    assert failed["tune/grad_accum_learning_rate-1_seed-3"] == "not finite"
    assert not tunings["contaccum"]["at_end"]

    final = apply_chosen_values(groups, "learning_rate", tunings)
    rates = {group.name: get_training_arguments(group).learning_rate for group in final}
    assert rates == {
        "grad_accum_learning_rate-0.002": 2e-3,
        "contaccum_learning_rate-0.00056": 5.6e-4,
        "slow": 1e-5,
    }
    tunings["contaccum"]["chosen"] = None  # every run failed
    assert len(apply_chosen_values(groups, "learning_rate", tunings)) == 2


@pytest.mark.parametrize(
    ("values", "score_value", "further_values", "best"),
    [
        ((1e-4, 1.8e-4, 3.2e-4), lambda x: -abs(x - 1.8e-4), [], 1.8e-4),
        ((1e-4, 1.8e-4, 3.2e-4), lambda x: -abs(x - 6e-4), [5.8e-4, 1e-3], 5.8e-4),
        ((1e-4, 1.8e-4, 3.2e-4), lambda x: -abs(x - 3e-5), [5.6e-5, 3.1e-5, 1.7e-5], 3.1e-5),
        ((1e-4, 1.8e-4, 3.2e-4), lambda x: 0.0, [], 1.8e-4),  # of equal values, an inner one
        ((1e-4, 1.8e-4, 3.2e-4), lambda x: None if x > 2e-4 else x, [], 1.8e-4),  # a failure
        ((1e-4, 1.8e-4, 3.2e-4), lambda x: None, [], None),
        ((2.0, 1.0), lambda x: min(x, 1.0), [0.56], 1.0),  # below the smaller of equal ones
    ],
)
def test_values_are_tried_beyond_an_end_while_the_best_is_there(
    values, score_value, further_values, best
):
    scores: dict[float, float | None] = {}
    while next_ones := next_values(values, scores):
        scores |= {value: score_value(value) for value in next_ones}
    assert list(scores) == [*values, *further_values]
    assert find_best_value(scores) == best


# The program


@pytest.fixture(scope="module")
def compare(tokens, data_folder):
    """Return a function that runs the program, with all jobs in this process.

    It returns the exit code. A process for each job would take some seconds to start.
    """

    def run_jobs(jobs: Any, *args: Any) -> dict[str, str]:
        for job in jobs:
            Path(job["folder"]).mkdir(parents=True)
            write_json(Path(job["folder"], "job.json"), job)
            comparison_run.do_job(str(Path(job["folder"], "job.json")))
        return {}

    def run(output: Path, *options: str, run_jobs: Any = run_jobs) -> int:
        argv = [*tokens, "--eval_data", data_folder / "beir", f"--output_dir={output}"]
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stopped:
            patch.setenv("PYTHONPATH", str(ROOT))  # restores the value that the program changes
            patch.setattr(comparison_run, "run_jobs", run_jobs)
            run_program("eval/compare/compare.py", *argv, *options)
        return stopped.value.code

    return run


OPTIONS = ("--methods", "grad_accum", "contaccum", "--seeds", "3", "4")


@pytest.fixture(scope="module")
def finished(compare, tmp_path_factory) -> Path:
    """Return the folder of two methods with two seeds."""
    folder = tmp_path_factory.mktemp("compared")
    assert compare(folder, *OPTIONS) == 0
    return folder


@pytest.fixture
def report(finished) -> dict[str, Any]:
    return read_json(finished / "report.json")


@pytest.fixture
def results(finished, report) -> dict[str, Any]:
    return {name: read_json(finished / "runs" / name / "result.json") for name in report["runs"]}


def test_all_methods_start_from_the_same_weights_and_data_order(finished, results):
    """tests/training/test_data_order.py checks that an order has the same pairs in each update."""
    for seed in (3, 4):
        runs = [results[f"{method}_seed-{seed}"] for method in ("grad_accum", "contaccum")]
        for key in ("initial_weights", "data_order", "updates", "pairs_per_update"):
            assert runs[0][key] == runs[1][key], key
        assert runs[0]["final_loss"] != runs[1]["final_loss"]
    assert len({result["data_order"] for result in results.values()}) == 2
    for result in results.values():
        assert (result["updates"], result["pairs_per_update"]) == (8, 12)
        assert result["grad_norm_ratio"] > 0
    run_folder = finished / "runs" / "contaccum_seed-3"
    assert (run_folder / "training" / "train_log.jsonl").exists()
    assert not list(run_folder.rglob("*.safetensors"))  # the weights are not kept


def average_over_seeds(results: dict[str, Any], method: str, metric: str) -> dict[str, float]:
    evaluations = [results[f"{method}_seed-{seed}"]["evaluations"]["beir"] for seed in (3, 4)]
    first, second = [evaluation["per_query"] for evaluation in evaluations]
    return {query: (first[query][metric] + second[query][metric]) / 2 for query in first}


def test_differences_are_to_the_baseline_query_by_query_with_holms_correction(report, results):
    assert [row["metric"] for row in report["comparisons"]] == list(METRICS)
    [data] = report["data"]["evaluation"]
    for row in report["comparisons"]:
        ours, theirs = (
            average_over_seeds(results, method, row["metric"])
            for method in ("contaccum", "grad_accum")
        )
        for key, value in sign_flip_test(ours, theirs, data["query_groups"]).items():
            assert row[key] == pytest.approx(value), key
        assert row["p_holm"] == row["p_value"]  # there is one comparison
    group = report["groups"]["contaccum"]
    runs = [results[f"contaccum_seed-{seed}"] for seed in (3, 4)]
    values = [run["evaluations"]["beir"]["metrics"]["MRR@10"] for run in runs]
    summary = group["metrics"]["beir"]["MRR@10"]
    assert summary["mean"] == pytest.approx(statistics.fmean(values))
    assert summary["sd"] == pytest.approx(statistics.stdev(values))
    assert group["train_seconds"] == pytest.approx(
        statistics.fmean(run["train_seconds"] for run in runs)
    )
    assert group["peak_memory_mb"] == max(run["peak_memory_mb"] for run in runs)
    [few_groups] = report["warnings"]
    assert "about only 4 different passages" in few_groups


def build_again(report, results, failed=None, **context: Any) -> dict[str, Any]:
    groups = [Group(name, name, name, {}, None) for name in report["groups"]]
    context = {name: report[name] for name in ("command", "settings", "data", "tuning")} | context
    return build_report(groups, [3, 4], "grad_accum", results, failed or {}, context)


def test_unfair_differences_and_uncertain_choices_are_warned_of(report, results):
    results["contaccum_seed-3"]["initial_weights"] = "other"
    results["contaccum_seed-4"]["updates"] = 9
    group = {"entry": "contaccum", "chosen": 1.0, "at_end": True, "scores": {1e-3: 0.1, 1.0: 0.2}}
    sets = report["data"]["evaluation"]
    tuning = {"key": "learning_rate", "seed": 3, "data": sets, "groups": {"contaccum": group}}
    built = build_again(report, results, tuning=tuning)
    few_groups, at_end, same_data, weights, updates = built["warnings"]
    assert "at an end" in at_end
    assert "beir" in same_data
    assert weights == "contaccum: another initial_weights than grad_accum (seeds 3)"
    assert updates == "contaccum: another updates than grad_accum (seeds 4)"
    assert "**0.2000**" in render_markdown(built)
    in_equal_time = build_again(report, results, settings={"options": {}, "seconds": 60.0})
    assert in_equal_time["warnings"] == [few_groups, weights]


def test_failed_runs_are_named_and_the_rest_is_reported(report, results):
    del results["contaccum_seed-3"]
    failed = {"contaccum_seed-3": "exit code -9"}
    built = build_again(report, results, failed)
    rows = [row for row in built["comparisons"] if row["metric"] == "MRR@10"]
    assert [(row["group"], row["seeds"]) for row in rows] == [("contaccum", [4])]
    assert "failed: contaccum_seed-3: exit code -9" in render_markdown(built)
    empty_report = build_again(report, {}, failed)
    assert empty_report["comparisons"] == []
    assert "failed:" in render_markdown(empty_report)


def test_a_second_call_trains_missing_runs_only(compare, finished, tmp_path, capsys):
    started: list[list[str]] = []  # the names of the runs that each call starts

    def fail_all(jobs: Any, *args: Any) -> dict[str, str]:
        names = [job["name"] for job in jobs]
        started.append(names)
        return dict.fromkeys(names, "exit code 1: too bad")

    finished = shutil.copytree(finished, tmp_path / "again")
    assert compare(finished, *OPTIONS, run_jobs=fail_all) == 0
    assert compare(finished, *OPTIONS, "--bank_size=16", run_jobs=fail_all) == 2
    assert "another bank_size (20, now 16)" in capsys.readouterr().err
    assert compare(finished, *OPTIONS, "5", run_jobs=fail_all) == 1
    assert started == [[], ["grad_accum_seed-5", "contaccum_seed-5"]]
    assert "too bad" in (finished / "report.md").read_text()


@pytest.mark.long  # the process takes ten seconds to start
def test_a_run_in_a_process_has_the_result_of_this_process(
    finished, results, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'eval' / 'compare'}:{ROOT}")
    expected = results["contaccum_seed-3"]
    job = read_json(finished / "runs" / "contaccum_seed-3" / "job.json")
    job["folder"] = str(tmp_path / "run")
    job["settings"]["output_dir"] = str(tmp_path / "run" / "training")
    assert processes.run_jobs([job], 1) == {}
    result = read_json(tmp_path / "run" / "result.json")
    for key in ("identity", "initial_weights", "data_order", "updates", "evaluations"):
        assert result[key] == expected[key]
    assert result["final_loss"] == pytest.approx(expected["final_loss"], rel=1e-5)


def test_in_equal_time_each_method_has_as_many_updates_as_fit_into_it(
    compare, tmp_path, monkeypatch
):
    update_seconds = {"grad_accum": 2.0, "contaccum": 2.5}
    run_job = comparison_run.run_job

    def run_slowly(job: Any) -> dict[str, Any]:
        return {**run_job(job), "seconds_per_update": update_seconds[job["entry"]]}

    monkeypatch.setattr(comparison_run, "run_job", run_slowly)
    methods = ["--methods", "grad_accum", "contaccum"]
    assert compare(tmp_path, "--seconds=6", "--seeds=3", *methods) == 0
    report = read_json(tmp_path / "report.json")
    updates = {name: group["updates"] for name, group in report["groups"].items()}
    assert updates == {"grad_accum": 3, "contaccum": 2}
    assert not any("updates" in line for line in report["warnings"])
    timed = read_json(tmp_path / "time" / "contaccum_seed-3" / "result.json")
    assert timed["updates"] == comparison_run.TIMED_UPDATES
    assert timed["evaluations"] == {}


@pytest.mark.long
def test_methods_are_tuned_on_dev_then_run_at_their_best(
    compare, data_folder, tmp_path, monkeypatch
):
    """A tuning run that reads the test set fails, as dev has none."""
    dev = shutil.copytree(data_folder / "beir", tmp_path / "dev")
    (dev / "qrels" / "test.tsv").rename(dev / "qrels" / "dev.tsv")
    output = tmp_path / "out"
    options = ["--seeds", "3", "--methods", "grad_accum", "contaccum"]
    options += ["--tune", "learning_rate=1e-4,1e-3", "--tune_data", str(dev)]
    assert compare(output, *options) == 0
    report = read_json(output / "report.json")
    tunings = report["tuning"]["groups"]
    for name, tuning in tunings.items():
        for value, score in tuning["scores"].items():
            folder = output / "tune" / f"{name}_learning_rate-{value}_seed-3"
            result = read_json(folder / "result.json")
            assert list(result["evaluations"]) == ["dev"]
            assert result["evaluations"]["dev"]["metrics"]["NDCG@10"] == score
    expected_runs = [
        f"{name}_learning_rate-{tuning['chosen']}_seed-3" for name, tuning in tunings.items()
    ]
    assert list(report["runs"]) == expected_runs
