"""Runs that are killed or stopped, and resumed, end as the uninterrupted one does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("killed_runs.py")


def run_script(*arguments: object) -> dict[str, Any]:
    paths = os.pathsep.join([str(SCRIPT.parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_same_outcome(expected: Path, found: Path, updates: int = 16) -> None:
    one, other = (torch.load(folder / "outcome.pt", weights_only=True) for folder in (expected, found))
    assert one["state"].keys() == other["state"].keys()
    assert [key for key, value in one["state"].items() if not torch.equal(value, other["state"][key])] == []
    assert one["log"] == other["log"]
    assert [line["update"] for line in one["log"]] == list(range(1, updates + 1))


@pytest.mark.slow
def test_run_killed_at_twenty_random_instants_ends_bit_identical(tmp_path: Path) -> None:
    found = run_script("random", tmp_path, 20)
    assert found["killed"] == 20 and set(found["codes"]) == {0}, found
    assert len(set(found["reached"])) > 3, found  # all along the way
    for folder in (tmp_path / name for name in found["folders"]):
        assert_same_outcome(tmp_path / "straight", folder)
        left = {path.name for path in folder.iterdir()}
        assert left == {"checkpoint-15", "checkpoint-16", "run.json", "train_log.jsonl", "outcome.pt"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "micro_steps"), [("SIGTERM", [1, 5, 13]), ("SIGINT", [6])])
def test_signal_saves_after_the_micro_step_and_the_run_goes_on_bit_identical(
    name: str, micro_steps: list[int], tmp_path: Path
) -> None:
    # In the first micro-step, inside an update, at the begin of an epoch (4 updates each); in the last of an update.
    number = getattr(signal, name).value
    found = run_script("signal", tmp_path, number, json.dumps(micro_steps))
    assert found["stops"] == [128 + number] * len(micro_steps)
    assert found["codes"] == [0] * (1 + len(micro_steps))
    for at in micro_steps:
        assert_same_outcome(tmp_path / "straight", tmp_path / f"signal-{at}")


@pytest.mark.slow
def test_ranks_stop_together_and_go_on_as_many_or_as_one(tmp_path: Path) -> None:
    codes = run_script("ranks", tmp_path)
    assert codes["straight"] == [0, 0]
    # The signal came to one rank, in the first micro-step of the second update: both finish it.
    assert codes["stopped"] == [143, 143] and codes["resumed"] == [0, 0]
    assert_same_outcome(tmp_path / "straight", tmp_path / "stopped", updates=4)
    # One rank has the bank, and the pairs that are left.
    assert codes["one"] == [0]
    one, two = (torch.load(tmp_path / name / "outcome.pt", weights_only=True) for name in ("one", "straight"))
    assert [line["update"] for line in one["log"]] == [1, 2, 3, 4]
    (name,) = [name for name in one["state"] if name.endswith("bank.enqueued")]
    assert torch.equal(one["state"][name], two["state"][name])
    # Without gather_across_devices each has a bank of its own, and nobody could go on with two: refused.
    assert codes["own"] == [0, 0] and codes["alone"] == [0]
