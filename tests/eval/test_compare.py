"""eval/compare: the plan of the runs, fair runs, tuning on dev, the statistics of the report."""

import json
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
from comparison.tuning import apply_chosen_values, read_ladder, tune_groups

from contaccum.errors import ConfigError
from contaccum.evaluation.metrics import add_holm, sign_flip_test
from contaccum.files import read_json, write_json
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.setup import load_data


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
    settings_of_comparison = {
        "seed": 3,
        "output_dir": "o",
        "eval_data": "d",
        "eval_strategy": "steps",
        "early_stopping_patience": 3,
        "load_best_model_at_end": True,
        "metric_for_best_model": "mrr@10",
        "save_steps": 2,
    }
    settings = {"model": "m", "bank_size": 8, "train_data": ["a", "b"], **settings_of_comparison}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    options = read_options([str(path)], ["--bank_size", "16", "--no_bank_hard_negatives", "--bf16"])
    assert options == {
        "model": "m",
        "bank_size": 16,
        "train_data": ["a", "b"],
        "bank_hard_negatives": False,
        "bf16": True,
    }


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


@pytest.fixture
def sets(data_folder) -> list[dict[str, Any]]:
    return comparison_run.describe_sets([str(data_folder / "beir")], "test")


def make_jobs(groups, sets, folder) -> list[dict[str, Any]]:
    return comparison_run.make_jobs(groups, [3], sets, folder)


def test_a_run_of_another_model_in_the_same_folder_has_another_identity(
    tokens, tiny_model_path, sets, tmp_path
):
    model = tmp_path / "model"
    shutil.copytree(tiny_model_path, model)
    groups = plan_runs([*tokens, f"--model={model}"], ["contaccum"])
    [job] = make_jobs(groups, sets, tmp_path)
    [same_job] = make_jobs(groups, sets, tmp_path)
    assert job["identity"] == same_job["identity"]
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    [other_job] = make_jobs(groups, sets, tmp_path)
    assert job["identity"] != other_job["identity"]


def test_all_methods_start_from_the_same_weights_and_data_order(tokens, sets, tmp_path):
    """tests/training/test_data_order.py checks that an order has the same pairs in each update."""
    groups = plan_runs(tokens, ["in_batch", "contaccum"])
    results = [comparison_run.run_job(job) for job in make_jobs(groups, sets, tmp_path)]
    assert len({result["initial_weights"] for result in results}) == 1
    assert len({result["data_order"] for result in results}) == 1
    assert len({result["final_loss"] for result in results}) == 2
    for result in results:
        assert result["updates"] == 8
        assert result["pairs_per_update"] == 12
        assert result["grad_norm_ratio"] > 0
    assert json.loads(json.dumps(results)) == results


def test_data_order_depends_on_the_micro_batch_only_where_batches_are_composed(tokens):
    def fingerprint_orders(*options: str) -> set[str]:
        fingerprints = set()
        for group in plan_runs([*tokens, *options], ["in_batch", "grad_accum"]):
            args = get_training_arguments(group)
            training_data = load_data(group.settings)
            fingerprints.add(comparison_run.fingerprint_data_order(args, training_data))
        return fingerprints

    assert len(fingerprint_orders()) == 1
    assert len(fingerprint_orders("--batch_sampler=no_duplicates")) == 2
    assert fingerprint_orders("--data_seed=7") != fingerprint_orders()


@pytest.mark.long  # the process takes ten seconds to start
def test_a_run_in_a_process_has_the_result_of_this_process(tokens, sets, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'eval' / 'compare'}:{ROOT}")
    [job] = make_jobs(plan_runs(tokens, ["contaccum"]), sets, tmp_path)
    assert processes.run_jobs([job], 1) == {}
    result = read_json(Path(job["folder"], "result.json"))
    expected = comparison_run.run_job(job)
    for key in ("identity", "initial_weights", "data_order", "updates", "evaluations"):
        assert result[key] == expected[key]
    assert result["final_loss"] == pytest.approx(expected["final_loss"], rel=1e-5)
    assert result["machine"]["threads"] == processes._count_cores()
    assert not list(Path(job["folder"]).glob("*.safetensors"))  # the weights are not kept


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
    jobs = []
    for number, behaviour in enumerate(behaviours):
        job = {"name": f"{number}-{behaviour}", "folder": str(folder / str(number))}
        jobs.append({**job, "behaviour": behaviour})
    return processes.run_jobs(jobs, max_processes, progress, (sys.executable, str(script)))


def test_failed_jobs_are_named_and_the_others_run(tmp_path):
    """No more processes run at once than the limit allows, and they share the cores."""
    lines: list[str] = []
    failed = start_jobs(tmp_path, ["fail", "ok", "killed", "ok"], 2, lines.append)
    assert failed.keys() == {"0-fail", "2-killed"}
    assert "exit code 1: no such thing" in failed["0-fail"]
    assert "exit code -9" in failed["2-killed"]
    num_threads = str(max(1, processes._count_cores() // 2))
    for folder in ("1", "3"):
        assert (tmp_path / folder / "result.json").read_text() == num_threads
    num_running = [0]
    for line in lines:
        change = 1 if line.endswith(": started") else -1
        num_running.append(num_running[-1] + change)
    assert max(num_running) == 2
    assert num_running[-1] == 0


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


def make_train(best_rates, rounds):
    """Return a function that replaces training.

    The score is the higher, the nearer the learning rate is to the best rate of the entry. A rate
    of 1 fails. The names of the groups are appended to ``rounds``.
    """

    def train(groups):
        rounds.append([group.name for group in groups])
        results, failed = {}, {}
        for group in groups:
            rate = get_training_arguments(group).learning_rate
            if rate == 1:
                failed[group.run_name(3)] = "not finite"
                continue
            score = 0.5 - abs(rate - best_rates[group.entry])
            evaluations = {}
            for data, gain in (("a", 0.2), ("b", 0.0)):
                evaluations[data] = {"metrics": {"NDCG@10": score + gain}}
            results[group.run_name(3)] = {"evaluations": evaluations}
        return results, failed

    return train


def test_every_group_is_tuned_by_its_own_scores_in_common_rounds(tokens):
    groups = plan_runs(tokens, ["grad_accum", "contaccum"], [["slow", "learning_rate=1e-5"]])
    rounds: list[list[str]] = []
    ladder = read_ladder("learning_rate=1e-3,2e-3,1", 3)
    train = make_train({"grad_accum": 2e-3, "contaccum": 6e-4}, rounds)
    tunings, failed = tune_groups(groups, ladder, train)
    assert [len(names) for names in rounds] == [6, 1, 1]
    assert rounds[1] == ["contaccum_learning_rate-0.00056"]
    assert tunings["grad_accum"]["scores"] == {1e-3: 0.599, 2e-3: 0.6, 1.0: None}
    # The mean over two data sets.
    score = tunings["contaccum"]["scores"][5.6e-4]
    assert score == pytest.approx(0.5 + 0.1 - 4e-5)
    assert failed["tune/grad_accum_learning_rate-1_seed-3"] == "not finite"
    assert not tunings["contaccum"]["at_end"]

    final = apply_chosen_values(groups, "learning_rate", tunings)
    assert [group.name for group in final] == [
        "grad_accum_learning_rate-0.002",
        "contaccum_learning_rate-0.00056",
        "slow",
    ]
    rates = [get_training_arguments(group).learning_rate for group in final]
    assert rates == [2e-3, 5.6e-4, 1e-5]
    tunings["contaccum"]["chosen"] = None  # every run failed
    assert len(apply_chosen_values(groups, "learning_rate", tunings)) == 2


# The report

NUM_QUERIES = 20
QUERY_GROUPS = {f"q{query}": query // 2 for query in range(NUM_QUERIES)}
SETS = [
    {
        "name": "beir",
        "split": "test",
        "queries": 20,
        "documents": 30,
        "fingerprint": "f",
        "query_groups": QUERY_GROUPS,
    }
]
FEW_GROUPS = (
    "the queries of beir are about only 10 different passages: only a large difference can be told "
    "from chance, whatever the number of queries"
)
CONTEXT = {
    "command": "python eval/compare/compare.py",
    "settings": {"options": {"bank_size": "20"}, "seconds": None},
    "data": {"evaluation": SETS},
    "tuning": None,
}
GAINS = {"grad_accum": 0.0, "contaccum": 0.1, "published": -0.02}
FACTORS = {"NDCG@10": 1.0, "Recall@100": 0.9, "MRR@10": 0.8, "Accuracy@20": 0.7}
"""Each metric is the made-up score times its own factor."""


def make_scores(entry: str, seed: int) -> list[float]:
    """Return a made-up score of each query."""
    scores = []
    for query in range(NUM_QUERIES):
        # Remainders of products vary without a pattern, and are the same in every test.
        change = (query * 37 % 11) / 50 + (query * (seed + 1) * 13 % 7) / 70
        gain = GAINS[entry] * (query * 7 % 5) / 2
        scores.append(0.4 + gain + 0.01 * seed + change)
    return scores


def average_over_seeds(entry: str) -> dict[str, float]:
    pairs = zip(make_scores(entry, 0), make_scores(entry, 1), strict=True)
    return {f"q{query}": statistics.fmean(pair) for query, pair in enumerate(pairs)}


@pytest.fixture
def groups(tokens) -> list[Group]:
    return plan_runs(tokens, ["grad_accum", "contaccum"], [["published", "normalize_by=all"]])


@pytest.fixture
def results(groups) -> dict[str, dict[str, Any]]:
    """Return a made-up result of every run, with two seeds."""
    results = {}
    for group in groups:
        for seed in (0, 1):
            scores = make_scores(group.entry, seed)
            per_query = {}
            for query, score in enumerate(scores):
                per_query[f"q{query}"] = {
                    metric: factor * score for metric, factor in FACTORS.items()
                }
            mean = statistics.fmean(scores)
            metrics = {metric: factor * mean for metric, factor in FACTORS.items()}
            results[group.run_name(seed)] = {
                "evaluations": {"beir": {"metrics": metrics, "per_query": per_query}},
                "initial_weights": f"weights {seed}",
                "data_order": f"order {seed}",
                "train_seconds": 8.0 + seed,
                "peak_memory_mb": 100.0 + seed,
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
    return results


def test_differences_are_to_the_baseline_query_by_query_with_holms_correction(groups, results):
    report = build_report(groups, [0, 1], "grad_accum", results, {}, CONTEXT)
    assert report["warnings"] == [FEW_GROUPS]
    assert len(report["comparisons"]) == 2 * len(METRICS)
    rows = [row for row in report["comparisons"] if row["metric"] == "NDCG@10"]
    assert [row["group"] for row in rows] == ["contaccum", "published"]
    baseline_means = average_over_seeds("grad_accum")
    for row in rows:
        expected = sign_flip_test(average_over_seeds(row["group"]), baseline_means, QUERY_GROUPS)
        assert expected["groups"] == 10
        for key, value in expected.items():
            assert row[key] == pytest.approx(value), key
    tests = [{"p_value": row["p_value"]} for row in rows]
    add_holm(tests)
    assert [row["p_holm"] for row in rows] == [test["p_holm"] for test in tests]

    text = render_markdown(report)
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "contaccum" and len(cells) == 7:
            break
    mean = statistics.fmean(average_over_seeds("contaccum").values())
    assert cells[1] == f"{mean:.4f}"
    assert cells[3] == f"{rows[0]['difference']:+.4f}"
    assert cells[6] == f"{rows[0]['p_holm']:.3f}"
    assert "- published: contaccum normalize_by=all" in text


def test_group_has_mean_and_standard_deviation_over_seeds(groups, results):
    report = build_report(groups, [0, 1], "grad_accum", results, {}, CONTEXT)
    group = report["groups"]["contaccum"]
    seed_means = [statistics.fmean(make_scores("contaccum", seed)) for seed in (0, 1)]
    summary = group["metrics"]["beir"]["NDCG@10"]
    assert summary["mean"] == pytest.approx(statistics.fmean(seed_means))
    assert summary["sd"] == pytest.approx(statistics.stdev(seed_means))
    assert group["train_seconds"] == 8.5  # the mean of 8 and 9
    assert group["peak_memory_mb"] == 101.0  # the maximum of 100 and 101


def test_unfair_differences_and_uncertain_choices_are_warned_of(groups, results):
    results["contaccum_seed-1"]["initial_weights"] = "other"
    results["published_seed-0"]["updates"] = 9
    group = {"entry": "contaccum", "chosen": 1.0, "at_end": True, "scores": {1e-3: 0.1, 1.0: 0.2}}
    tuning = {"key": "learning_rate", "seed": 0, "data": SETS, "groups": {"contaccum": group}}
    context = {**CONTEXT, "tuning": tuning}
    report = build_report(groups, [0, 1], "grad_accum", results, {}, context)
    few_groups, at_end, same_data, weights, updates = report["warnings"]
    assert few_groups == FEW_GROUPS
    assert "at an end" in at_end
    assert "beir" in same_data
    assert weights == "contaccum: another initial_weights than grad_accum (seeds 1)"
    assert updates == "published: another updates than grad_accum (seeds 0)"
    assert "**0.2000**" in render_markdown(report)
    in_equal_time = {**CONTEXT, "settings": {"options": {}, "seconds": 60.0}}
    report = build_report(groups, [0, 1], "grad_accum", results, {}, in_equal_time)
    assert report["warnings"] == [few_groups, weights]


def test_failed_runs_are_named_and_the_rest_is_reported(groups, results):
    for name in ("contaccum_seed-1", "published_seed-0", "published_seed-1"):
        del results[name]
    failed = {"contaccum_seed-1": "exit code -9"}
    report = build_report(groups, [0, 1], "grad_accum", results, failed, CONTEXT)
    rows = [row for row in report["comparisons"] if row["metric"] == "MRR@10"]
    assert [(row["group"], row["seeds"]) for row in rows] == [("contaccum", [0])]
    assert report["groups"]["published"]["metrics"] == {}
    assert "failed: contaccum_seed-1: exit code -9" in render_markdown(report)
    empty_report = build_report(groups, [0, 1], "grad_accum", {}, failed, CONTEXT)
    assert empty_report["comparisons"] == []
    assert "failed:" in render_markdown(empty_report)


# The program


@pytest.fixture
def compare(tokens, data_folder, monkeypatch):
    """Return a function that runs the program; it returns the exit code."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # restores the value that the program changes

    def run(output: Path, *options: str) -> int:
        argv = [*tokens, "--eval_data", data_folder / "beir", f"--output_dir={output}"]
        with pytest.raises(SystemExit) as stopped:
            run_program("eval/compare/compare.py", *argv, *options)
        return stopped.value.code

    return run


def run_jobs_in_this_process(jobs: Any, *args: Any) -> dict[str, str]:
    """Replace `run_jobs`, whose processes each take some seconds to start."""
    for job in jobs:
        Path(job["folder"]).mkdir(parents=True)
        write_json(Path(job["folder"], "job.json"), job)
        comparison_run.do_job(str(Path(job["folder"], "job.json")))
    return {}


def test_two_methods_are_trained_and_a_second_call_trains_missing_runs_only(
    compare, tmp_path, monkeypatch, capsys
):
    options = ["--methods", "grad_accum", "contaccum", "--seeds", "3"]
    monkeypatch.setattr(comparison_run, "run_jobs", run_jobs_in_this_process)
    assert compare(tmp_path, *options) == 0
    report = read_json(tmp_path / "report.json")
    assert len(report["warnings"]) == 1
    assert "about only 4 different passages" in report["warnings"][0]
    assert report["failed"] == {}
    assert len(report["comparisons"]) == 4
    assert len(report["runs"]) == 2
    for name in report["runs"]:
        result = read_json(tmp_path / "runs" / name / "result.json")
        evaluation = result["evaluations"]["beir"]
        for metric in METRICS:
            values = [scores[metric] for scores in evaluation["per_query"].values()]
            assert sum(values) / 4 == pytest.approx(evaluation["metrics"][metric])
    run_folder = tmp_path / "runs" / "contaccum_seed-3"
    assert (run_folder / "training" / "train_log.jsonl").exists()
    assert not list(run_folder.rglob("*.safetensors"))  # the weights are not kept

    started: list[list[str]] = []  # the names of the runs that each call starts

    def fail_all(jobs: Any, *args: Any) -> dict[str, str]:
        names = [job["name"] for job in jobs]
        started.append(names)
        return dict.fromkeys(names, "exit code 1: too bad")

    monkeypatch.setattr(comparison_run, "run_jobs", fail_all)
    assert compare(tmp_path, *options) == 0
    assert started == [[]]
    assert compare(tmp_path, *options, "--bank_size=16") == 2
    assert "another bank_size (20, now 16)" in capsys.readouterr().err
    assert compare(tmp_path, "--seeds", "3", "4", "--methods", "grad_accum") == 1
    assert started[1:] == [["grad_accum_seed-4"]]
    assert "too bad" in (tmp_path / "report.md").read_text()


def make_dev_data(beir: Path, dev: Path) -> Path:
    """Copy a BEIR folder; three of its judgements become the split `dev`, and `test` is removed."""
    shutil.copytree(beir, dev)
    test_file = dev / "qrels" / "test.tsv"
    lines = test_file.read_text().splitlines()
    test_file.with_name("dev.tsv").write_text("\n".join(lines[:3]) + "\n")
    test_file.unlink()  # a tuning run that reads it fails
    return dev


def test_in_equal_time_each_method_has_as_many_updates_as_fit_into_it(
    compare, tmp_path, monkeypatch
):
    update_seconds = {"grad_accum": 2.0, "contaccum": 2.5}
    run_job = comparison_run.run_job

    def run_slowly(job: Any) -> dict[str, Any]:
        return {**run_job(job), "seconds_per_update": update_seconds[job["entry"]]}

    monkeypatch.setattr(comparison_run, "run_job", run_slowly)
    monkeypatch.setattr(comparison_run, "run_jobs", run_jobs_in_this_process)
    assert (
        compare(tmp_path, "--seconds=6", "--seeds=3", "--methods", "grad_accum", "contaccum") == 0
    )
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
    dev = make_dev_data(data_folder / "beir", tmp_path / "dev")
    output = tmp_path / "out"
    monkeypatch.setattr(comparison_run, "run_jobs", run_jobs_in_this_process)
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
