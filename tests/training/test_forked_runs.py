"""Runs that are killed or run on several ranks end like an uninterrupted run of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_forking_script

SCRIPT = Path(__file__).with_name("forked_runs.py")


def read_outcome(folder: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Return the final state and the log of a run."""
    outcome = torch.load(folder / "outcome.pt", weights_only=True)
    return outcome["state"], outcome["log"]


def assert_same_outcome(expected_folder: Path, folder: Path, num_updates: int) -> None:
    """Assert that two runs ended with the same state, bit for bit, and with the same log."""
    expected_state, expected_log = read_outcome(expected_folder)
    state, log = read_outcome(folder)
    assert state.keys() == expected_state.keys()
    for key, expected in expected_state.items():
        assert torch.equal(state[key], expected), key
    assert log == expected_log
    assert [line["update"] for line in log] == list(range(1, num_updates + 1))


@pytest.mark.long
@pytest.mark.parametrize("num_kills", [1, 20])
def test_a_run_killed_at_random_instants_ends_bit_identical(num_kills, tmp_path):
    result = run_forking_script(SCRIPT, str(num_kills), tmp_path)
    assert result["killed"] == num_kills, result
    assert set(result["codes"]) == {0}, result
    if num_kills > 1:
        last_saved_updates = set(result["reached"])
        assert len(last_saved_updates) > 3, result  # the kills hit different updates
    for name in result["folders"]:
        folder = tmp_path / name
        assert_same_outcome(tmp_path / "straight", folder, num_updates=6)
        files = {path.name for path in folder.iterdir()}
        assert files == {
            "checkpoint-5",
            "checkpoint-6",
            "identity.json",
            "train_log.jsonl",
            "outcome.pt",
        }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """Run forked_runs.py on several ranks; return the folder of its runs and its result."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_forking_script(SCRIPT, "ranks", folder)


def assert_close_outcome(expected_folder: Path, folder: Path) -> None:
    """Assert that two runs ended with the same weights and log, up to the order of sums."""
    expected_state, expected_log = read_outcome(expected_folder)
    state, log = read_outcome(folder)
    for key, expected in expected_state.items():
        if key.startswith("model."):
            assert (state[key] - expected).abs().max() < 1e-10, (folder.name, key)
    assert len(log) == 2
    assert len(expected_log) == 2
    for line, expected_line in zip(log, expected_log, strict=True):
        for key, expected in expected_line.items():
            assert line[key] == pytest.approx(expected, rel=1e-6, abs=1e-9), (folder.name, key)


@pytest.mark.long
def test_two_and_four_ranks_end_with_the_weights_of_one_process(ranks):
    folder, result = ranks
    assert result["codes"]["1"] == [0]
    assert result["codes"]["2"] == [0, 0]
    assert result["codes"]["4"] == [0, 0, 0, 0]
    for name in result["cases"]:
        assert_close_outcome(folder / f"{name}-1", folder / f"{name}-2")
    assert_close_outcome(folder / "contaccum, untied-1", folder / "contaccum, untied-4")


@pytest.mark.long
def test_ranks_stop_together_and_resume_on_two_ranks_or_on_one(ranks):
    folder, result = ranks
    codes = result["codes"]
    assert codes["straight"] == [0, 0]
    # One rank received the signal, in the first micro-step of the second update. Both finish it.
    assert codes["stopped"] == [143, 143]
    assert codes["resumed"] == [0, 0]
    assert_same_outcome(folder / "ranks", folder / "stopped", num_updates=4)
    for name in ("ranks", "stopped"):
        record = json.loads((folder / name / "identity.json").read_text())
        for rank in (0, 1):
            run_id = (folder / name / f"run_id-{rank}").read_text()
            assert run_id == record["run_id"]
    # A single rank continues with the whole bank, and with the remaining pairs.
    assert codes["alone"] == [0]
    alone, _ = read_outcome(folder / "alone")
    two_ranks, _ = read_outcome(folder / "ranks")
    id_keys = [key for key in alone if key.endswith("bank.document_ids")]
    assert len(id_keys) > 0
    for key in id_keys:
        assert torch.equal(alone[key], two_ranks[key]), key
