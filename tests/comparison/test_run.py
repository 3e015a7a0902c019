"""One run: the same pairs and weights for every method; and the processes of several."""

import json
import os
import sys
from typing import Any

import psutil
import pytest

from contaccum.comparison.plan import make_plan, read_options
from contaccum.comparison.run import _data_order, about_sets, make_jobs, run_job, run_jobs
from contaccum.training.config import load_data


def test_every_method_begins_with_the_same_weights_and_the_same_order_of_data(
    tokens, place, tmp_path
):
    """That such an order is one of the same pairs in each update: tests/training/test_data_order.py."""
    evaluation = {
        "data": [str(place / "beir")],
        "split": "test",
        "updates": None,
        "precision": "float32",
    }
    evaluation |= {"queries": None, "corpus": None, "batch_size": 32}
    plan = make_plan(read_options([], tokens), ["in_batch", "contaccum"], [], [], [3])
    jobs = make_jobs(plan, evaluation, about_sets(evaluation), tmp_path)
    results = [run_job(job) for job in jobs]
    for key, different in (("initial_weights", 1), ("data_order", 1), ("final_loss", 2)):
        assert len({result[key] for result in results}) == different
    for result in results:
        assert (result["updates"], result["pairs_per_update"], result["curve"]) == (8, 12, [])
        assert (
            result["train_seconds"] > 0
            and result["peak_memory_mb"] > 10
            and result["grad_norm_ratio"] > 0
        )
    assert json.loads(json.dumps(results)) == results


def test_batches_that_are_composed_by_their_size_are_another_order_of_data(tokens):
    def orders(*more: str) -> set[str]:
        plan = make_plan(
            read_options([], [*tokens, *more]), ["in_batch", "grad_accum"], [], [], [0]
        )
        data = load_data(*next(iter(plan.groups.values())).parsed[1:])
        return {_data_order(group.parsed[2], data) for group in plan.groups.values()}

    assert len(orders()) == 1
    assert len(orders("--batch_sampler=no_duplicates")) == 2
    assert len(orders("--dataloader_drop_last=true")) == 2
    assert orders("--data_seed=7") != orders()


# Stands for contaccum.comparison.run: does what the job says.
CHILD = """
import json, os, signal, sys
from pathlib import Path
job = json.loads(Path(sys.argv[1]).read_text())
if job["what"] == "fail":
    print("reading", file=sys.stderr)
    sys.exit("no such thing")
if job["what"] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if job["what"] == "hang":
    os.read(0, 1)  # until the parent is gone
(Path(job["folder"]) / "result.json").write_text(os.environ["OMP_NUM_THREADS"])
"""


@pytest.fixture
def start(tmp_path) -> Any:
    script = tmp_path / "child.py"
    script.write_text(CHILD)

    def run(whats: list[str], at_once: int, progress: Any) -> dict[str, str]:
        jobs = [
            {"name": f"{n}-{what}", "folder": str(tmp_path / str(n)), "what": what}
            for n, what in enumerate(whats)
        ]
        return run_jobs(jobs, at_once, progress, (sys.executable, str(script)))

    return run


def test_failures_are_named_and_the_others_go_on_never_more_than_asked_for_at_once(start, tmp_path):
    lines: list[str] = []
    failed = start(["fail", "ok", "killed", "ok"], 2, lines.append)
    assert failed == {
        "0-fail": "exit code 1: no such thing",
        "2-killed": "exit code -9: nothing on stderr",
    }
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert [(tmp_path / n / "result.json").read_text() for n in ("1", "3")] == [threads, threads]
    running = [0]
    for line in lines:
        running.append(running[-1] + (1 if line.endswith(": started") else -1))
    assert (max(running), running[-1]) == (2, 0)


def test_an_interrupt_leaves_no_process(start):
    seen: list[str] = []

    def interrupt(line: str) -> None:
        seen.append(line)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(["hang", "hang", "ok"], 3, interrupt)
    left = [
        child
        for child in psutil.Process().children()
        if any("child.py" in part for part in child.cmdline())
    ]
    assert left == []
