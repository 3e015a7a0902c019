"""`contaccum compare` as a user runs it: real processes once, then what a second call does."""

import json
from pathlib import Path
from typing import Any

import pytest

from contaccum.cli import main
from contaccum.comparison import run as comparison_run
from contaccum.comparison.summary import METRICS
from contaccum.report import build_page

MORE = [
    "--methods",
    "grad_accum",
    "contaccum",
    "--seeds",
    "3",
    "--jobs",
    "2",
    "--eval_updates",
    "4",
]


@pytest.fixture(scope="session")
def options(tokens, place) -> list[str]:
    return [*tokens, "--eval_data", str(place / "beir")]


@pytest.fixture(scope="module")
def compared(options, tmp_path_factory) -> tuple[list[str], Path]:
    """A comparison of two tiny models: the command's arguments, and its folder."""
    folder = tmp_path_factory.mktemp("compared")
    arguments = ["compare", *options, f"--output_dir={folder}", *MORE]
    assert main(arguments) == 0
    return arguments, folder


@pytest.mark.slow
def test_two_methods_are_trained_scored_and_reported(compared):
    _, folder = compared
    report = json.loads((folder / "report.json").read_text())
    assert report["warnings"] == [] and report["failed"] == {} and len(report["comparisons"]) == 4
    assert report["data"]["evaluation"][0]["queries"] == 4
    assert {run["machine"]["threads"] for run in report["runs"].values()} == {1}
    for name, run in report["runs"].items():
        evaluation = json.loads((folder / "runs" / name / "result.json").read_text())[
            "evaluations"
        ]["beir"]
        assert [point["update"] for point in run["curve"]] == [0, 4, 8]
        for metric in METRICS:
            values = [scores[metric] for scores in evaluation["per_query"].values()]
            assert (
                sum(values) / 4
                == pytest.approx(evaluation["metrics"][metric])
                == run["curve"][-1][metric]
            )
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    page = build_page([folder])
    (row,) = (row for row in report["comparisons"] if row["metric"] == "NDCG@10")
    assert (
        f">{row['difference']:+.4f}</td>" in page
        and "nDCG@10 by update" in page
        and "bank_fill" in page
    )
    files = {path.name for path in (folder / "runs" / "contaccum_seed-3").iterdir()}
    assert {
        "job.json",
        "result.json",
        "train_log.jsonl",
        "eval_log.jsonl",
        "run.json",
        "stderr.log",
    } <= files
    assert not any(name.endswith(".safetensors") for name in files)


@pytest.mark.slow
def test_finished_runs_are_not_trained_again_and_other_settings_are_refused(
    compared, capsys, monkeypatch
):
    arguments, folder = compared
    asked: list[list[str]] = []

    def failing(jobs: Any, *args: Any) -> dict[str, str]:
        asked.append([job["name"] for job in jobs])
        return {job["name"]: "exit code 1: too bad" for job in jobs}

    monkeypatch.setattr(comparison_run, "run_jobs", failing)
    assert main(arguments) == 0
    assert "2 of 2 runs are finished" in capsys.readouterr().out and asked == [[]]

    assert main([*arguments, "--bank_size=16"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert (
        "contaccum_seed-3 was run with other settings: bank_size was 20, is 16" in error
        and "--output_dir" in error
    )

    assert main([*arguments, "--seeds", "3", "4", "--methods", "grad_accum"]) == 1
    assert "failed: grad_accum_seed-4: exit code 1: too bad" in capsys.readouterr().out
    assert asked[1:] == [["grad_accum_seed-4"]]
    assert "too bad" in (folder / "report.md").read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--eval_queries", "0"], "must be at least 1"),
        (["--eval_split", "train"], "train"),
        (["--eval_data"], "--eval_data"),
        (["--model", "https://me:secret@example.org/m"], "credential"),
    ],
)
def test_mistakes_give_one_line_before_anything_is_trained(
    options, tmp_path, capsys, more, message
):
    arguments = ["compare", *options, f"--output_dir={tmp_path / 'out'}"]
    assert main([*arguments, *more]) == 2
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("contaccum: error")
    ]
    assert message in line and "secret" not in line
    assert not (tmp_path / "out").exists()
