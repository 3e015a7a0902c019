"""A single run (the same pairs and initial weights for every method), and several processes."""

import json
import shutil
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from contaccum.comparison import processes
from contaccum.comparison.options import read_options
from contaccum.comparison.plan import make_plan
from contaccum.comparison.processes import run_jobs
from contaccum.comparison.run import (
    _fingerprint_data_order,
    describe_evaluation_sets,
    make_jobs,
    run_job,
)
from contaccum.training.config import load_data


@pytest.fixture
def evaluation(data_folder) -> dict[str, Any]:
    return {
        "data": [str(data_folder / "beir")],
        "split": "test",
        "updates": None,
        "precision": "float32",
        "queries": None,
        "corpus": None,
        "batch_size": 32,
    }


def test_a_run_of_another_model_in_the_same_folder_has_another_identity(
    tokens, tiny_model_path, evaluation, tmp_path
):
    model = tmp_path / "model"
    shutil.copytree(tiny_model_path, model)
    options = read_options([], [*tokens, f"--model={model}"])
    plan = make_plan(options, ["contaccum"], [], [], [3])
    sets = describe_evaluation_sets(evaluation)
    [job] = make_jobs(plan, evaluation, sets, tmp_path)
    [same_job] = make_jobs(plan, evaluation, sets, tmp_path)
    assert job["identity"] == same_job["identity"]
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    [other_job] = make_jobs(plan, evaluation, sets, tmp_path)
    assert job["identity"] != other_job["identity"]


def test_all_methods_start_from_the_same_weights_and_data_order(tokens, evaluation, tmp_path):
    """tests/training/test_data_order.py checks that an order has the same pairs in each update."""
    plan = make_plan(read_options([], tokens), ["in_batch", "contaccum"], [], [], [3])
    jobs = make_jobs(plan, evaluation, describe_evaluation_sets(evaluation), tmp_path)
    results = [run_job(job) for job in jobs]
    assert len({result["initial_weights"] for result in results}) == 1
    assert len({result["data_order"] for result in results}) == 1
    assert len({result["final_loss"] for result in results}) == 2
    for result in results:
        assert result["updates"] == 8
        assert result["pairs_per_update"] == 12
        assert result["curve"] == []
        assert result["train_seconds"] > 0
        assert result["peak_memory_mb"] > 10
        assert result["grad_norm_ratio"] > 0
    assert json.loads(json.dumps(results)) == results


def test_data_order_depends_on_the_micro_batch_only_where_batches_are_composed(tokens):
    def fingerprint_orders(*options: str) -> set[str]:
        all_options = read_options([], [*tokens, *options])
        plan = make_plan(all_options, ["in_batch", "grad_accum"], [], [], [0])
        fingerprints = set()
        for group in plan.groups.values():
            training_data = load_data(group.arguments.data, group.arguments.training)
            fingerprints.add(_fingerprint_data_order(group.arguments.training, training_data))
        return fingerprints

    assert len(fingerprint_orders()) == 1
    assert len(fingerprint_orders("--batch_sampler=no_duplicates")) == 2
    assert len(fingerprint_orders("--dataloader_drop_last=true")) == 2
    assert fingerprint_orders("--data_seed=7") != fingerprint_orders()


# Replaces contaccum.comparison.run in the processes; the job decides how the process ends.
CHILD = """
import json, os, signal, sys
from pathlib import Path
job = json.loads(Path(sys.argv[1]).read_text())
if job["behaviour"] == "fail":
    print("reading", file=sys.stderr)
    sys.exit("no such thing")
if job["behaviour"] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if job["behaviour"] == "hang":
    os.read(0, 1)  # returns when the parent closes the pipe
(Path(job["folder"]) / "result.json").write_text(os.environ["OMP_NUM_THREADS"])
"""

StartJobs = Callable[[list[str], int, Callable[[str], None]], dict[str, str]]


@pytest.fixture
def start_jobs(tmp_path) -> StartJobs:
    """Return a function that runs a job in `CHILD` for each behaviour."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)

    def start(
        behaviours: list[str], max_processes: int, progress: Callable[[str], None]
    ) -> dict[str, str]:
        jobs: list[dict[str, Any]] = []
        for number, behaviour in enumerate(behaviours):
            jobs.append(
                {
                    "name": f"{number}-{behaviour}",
                    "folder": str(tmp_path / str(number)),
                    "behaviour": behaviour,
                }
            )
        return run_jobs(jobs, max_processes, progress, (sys.executable, str(script)))

    return start


def test_failed_jobs_are_named_and_the_others_run(start_jobs, tmp_path):
    """No more processes run at once than the limit allows, and they share the cores."""
    lines: list[str] = []
    failed = start_jobs(["fail", "ok", "killed", "ok"], 2, lines.append)
    assert failed == {
        "0-fail": f"exit code 1: no such thing (see {tmp_path}/0/stderr.log)",
        "2-killed": (
            f"killed by signal 9: nothing on stderr (see {tmp_path}/2/stderr.log; signal 9 often "
            "means too little memory: lower --jobs or per_device_train_batch_size)"
        ),
    }
    num_threads = str(max(1, processes._count_cores() // 2))
    for folder in ("1", "3"):
        assert (tmp_path / folder / "result.json").read_text() == num_threads
    num_running = [0]
    for line in lines:
        change = 1 if line.endswith(": started") else -1
        num_running.append(num_running[-1] + change)
    assert max(num_running) == 2
    assert num_running[-1] == 0


def test_an_interrupt_leaves_no_process(start_jobs):
    lines: list[str] = []

    def interrupt(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start_jobs(["hang", "hang", "ok"], 3, interrupt)
    for child in psutil.Process().children():
        assert not any("child.py" in part for part in child.cmdline())
