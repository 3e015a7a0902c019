"""`contaccum compare` with real processes, a second call, and wrong options."""

import json
from pathlib import Path
from typing import Any

import pytest

from contaccum.cli import main
from contaccum.comparison import run as comparison_run
from contaccum.comparison.summary import METRICS


@pytest.fixture(scope="session")
def options(tokens, data_folder) -> list[str]:
    return [*tokens, "--eval_data", str(data_folder / "beir")]


@pytest.fixture(scope="module")
def compared(options, tmp_path_factory) -> tuple[list[str], Path]:
    """Compare two tiny models; return the arguments and the output folder."""
    folder = tmp_path_factory.mktemp("compared")
    arguments = ["compare", *options, f"--output_dir={folder}"]
    arguments += ["--methods", "grad_accum", "contaccum", "--seeds", "3"]
    arguments += ["--jobs", "2", "--eval_updates", "4"]
    assert main(arguments) == 0
    return arguments, folder


@pytest.mark.slow
def test_two_methods_are_trained_scored_and_reported(compared):
    _, folder = compared
    report = json.loads((folder / "report.json").read_text())
    assert report["warnings"] == []
    assert report["failed"] == {}
    assert len(report["comparisons"]) == 4
    assert report["data"]["evaluation"][0]["queries"] == 4
    assert len(report["runs"]) == 2
    for name, run in report["runs"].items():
        assert run["machine"]["threads"] == 1
        result = json.loads((folder / "runs" / name / "result.json").read_text())
        evaluation = result["evaluations"]["beir"]
        assert [point["update"] for point in run["curve"]] == [0, 4, 8]
        last_point = run["curve"][-1]
        for metric in METRICS:
            values = [scores[metric] for scores in evaluation["per_query"].values()]
            mean = evaluation["metrics"][metric]
            assert sum(values) / 4 == pytest.approx(mean)
            assert last_point[metric] == pytest.approx(mean)
    differences = {row["metric"]: row["difference"] for row in report["comparisons"]}
    assert differences.keys() == METRICS.keys()
    run_folder = folder / "runs" / "contaccum_seed-3"
    for name in ("job.json", "result.json", "run.json", "stderr.log"):
        assert (run_folder / name).exists(), name
    for name in ("train_log.jsonl", "eval_log.jsonl"):
        assert (run_folder / name).exists(), name
    # The weights are not kept.
    assert not list(run_folder.glob("*.safetensors"))


@pytest.mark.slow
def test_second_call_trains_only_missing_runs(compared, capsys, monkeypatch):
    """A second call with other settings is refused."""
    arguments, folder = compared
    started_runs: list[list[str]] = []  # the names of the runs that each call starts

    def fail_all(jobs: Any, *args: Any) -> dict[str, str]:
        names = [job["name"] for job in jobs]
        started_runs.append(names)
        return dict.fromkeys(names, "exit code 1: too bad")

    monkeypatch.setattr(comparison_run, "run_jobs", fail_all)
    assert main(arguments) == 0
    assert "2 of 2 runs are finished" in capsys.readouterr().out
    assert started_runs == [[]]

    assert main([*arguments, "--bank_size=16"]) == 2
    [error] = capsys.readouterr().err.splitlines()
    assert "contaccum_seed-3 was run with other settings: bank_size was 20, is 16" in error
    assert "--output_dir" in error

    assert main([*arguments, "--seeds", "3", "4", "--methods", "grad_accum"]) == 1
    assert "failed: grad_accum_seed-4: exit code 1: too bad" in capsys.readouterr().out
    assert started_runs[1:] == [["grad_accum_seed-4"]]
    assert "too bad" in (folder / "report.md").read_text()


@pytest.mark.parametrize(
    ("wrong_options", "message"),
    [
        (["--eval_queries", "0"], "must be at least 1"),
        (["--eval_split", "train"], "train"),
        (["--eval_data"], "--eval_data"),
        (["--model", "https://me:secret@example.org/m"], "credential"),
    ],
)
def test_wrong_options_give_one_line_before_training(
    options, tmp_path, capsys, wrong_options, message
):
    arguments = ["compare", *options, f"--output_dir={tmp_path / 'out'}"]
    assert main([*arguments, *wrong_options]) == 2
    lines = capsys.readouterr().err.splitlines()
    [error] = [line for line in lines if line.startswith("contaccum: error")]
    assert message in error
    assert "secret" not in error
    assert not (tmp_path / "out").exists()
