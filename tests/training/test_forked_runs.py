"""Runs that are killed, or that several processes share, end as one that nothing happened to."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


def run_script(what: str, folder: Path, name: str = "forked_runs.py") -> dict[str, Any]:
    script = Path(__file__).with_name(name)
    paths = os.pathsep.join(
        [str(script.parent.parent), str(script.parents[2]), os.environ.get("PYTHONPATH", "")]
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(script), what, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    errors = "\n".join(path.read_text()[-2000:] for path in folder.glob("error-*.txt"))
    assert done.returncode == 0, done.stderr[-3000:] + errors
    assert not errors, errors
    return json.loads(done.stdout.splitlines()[-1])


def outcome(folder: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    found = torch.load(folder / "outcome.pt", weights_only=True)
    return found["state"], found["log"]


def assert_same_outcome(expected: Path, found: Path, updates: int) -> None:
    (one, log), (other, other_log) = outcome(expected), outcome(found)
    assert one.keys() == other.keys()
    assert [key for key, value in one.items() if not torch.equal(value, other[key])] == []
    assert log == other_log and [line["update"] for line in log] == list(range(1, updates + 1))


@pytest.mark.parametrize(
    "kills", [pytest.param(1, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.long)]
)
def test_a_run_killed_at_random_instants_ends_bit_identical(kills, tmp_path):
    found = run_script(str(kills), tmp_path)
    assert found["killed"] == kills and set(found["codes"]) == {0}, found
    assert kills == 1 or len(set(found["reached"])) > 3, found  # all along the way
    for folder in (tmp_path / name for name in found["folders"]):
        assert_same_outcome(tmp_path / "straight", folder, 6)
        left = {path.name for path in folder.iterdir()}
        assert left == {"checkpoint-5", "checkpoint-6", "run.json", "train_log.jsonl", "outcome.pt"}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_script("ranks", folder)


@pytest.mark.slow
def test_two_and_four_ranks_end_with_the_weights_of_one_process(ranks):
    folder, found = ranks
    assert (
        found["codes"]["1"] == [0]
        and found["codes"]["2"] == [0, 0]
        and found["codes"]["4"] == [0] * 4
    )
    compared = [(name, 2) for name in found["cases"]] + [("contaccum, untied", 4)]
    for name, count in compared:
        (one, log), (other, other_log) = (
            outcome(folder / f"{name}-1"),
            outcome(folder / f"{name}-{count}"),
        )
        weights = [key for key in one if key.startswith("model.")]
        assert max((one[key] - other[key]).abs().max().item() for key in weights) < 1e-10, name
        assert len(log) == len(other_log) == 2
        for line, expected in zip(other_log, log, strict=True):
            for key, value in expected.items():
                assert line[key] == pytest.approx(value, rel=1e-6, abs=1e-9), (name, key)


@pytest.mark.slow
def test_ranks_stop_together_and_go_on_as_many_or_as_one(ranks):
    folder, found = ranks
    codes = found["codes"]
    assert codes["straight"] == [0, 0]
    # The signal came to one rank, in the first micro-step of the second update: both finish it.
    assert codes["stopped"] == [143, 143] and codes["resumed"] == [0, 0]
    assert_same_outcome(folder / "ranks", folder / "stopped", 4)
    for name in ("ranks", "stopped"):
        record = json.loads((folder / name / "run.json").read_text())
        ids = [(folder / name / f"run_id-{number}").read_text() for number in range(2)]
        assert ids == [record["run_id"]] * 2
    # One rank has the bank, and the pairs that are left.
    assert codes["alone"] == [0]
    one, two = (outcome(folder / name)[0] for name in ("alone", "ranks"))
    ids = [key for key in one if key.endswith("bank.document_ids")]
    assert ids and all(torch.equal(one[key], two[key]) for key in ids)
