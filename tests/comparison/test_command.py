"""`contaccum compare` as a user runs it: real processes once, then what a second call does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from contaccum.cli import main
from contaccum.comparison import schedule

Options = dict[str, list[str]]


def command(options: Options, places: dict[str, str], output: Path, *more: str) -> list[str]:
    plain = [f"--{key}={values[0]}" for key, values in options.items()]
    return ["compare", *plain, f"--output_dir={output}", "--eval_data", places["beir"], *more]


def test_two_methods_are_trained_reported_and_not_trained_again(
    options: Options, places: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    more = ["--methods", "grad_accum", "contaccum", "--seeds", "3", "--jobs", "2", "--eval_updates", "4"]
    assert main(command(options, places, tmp_path, *more)) == 0
    out = capsys.readouterr().out
    assert out.count(": started") == 2 and "[2/2]" in out and "beir nDCG@10" in out and "take care" not in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["groups"]) == {"grad_accum", "contaccum"} and report["warnings"] == []
    assert len(report["comparisons"]) == 4 and report["data"]["evaluation"][0]["queries"] == 12
    assert all(run["machine"]["threads"] == max(1, schedule.available_cores() // 2) for run in report["runs"].values())
    assert (tmp_path / "report.md").is_file() and (tmp_path / "report.png").is_file()
    files = {path.name for path in (tmp_path / "runs" / "contaccum_seed-3").iterdir()}
    assert {"job.json", "result.json", "train_log.jsonl", "run.json", "stderr.log"} <= files
    assert not any(name.endswith(".safetensors") for name in files) and "model" not in files

    results = [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("runs/*/result.json"))]
    assert main(command(options, places, tmp_path, *more)) == 0
    assert "2 runs are finished already" in capsys.readouterr().out
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("runs/*/result.json"))] == results

    assert main(command({**options, "bank_size": ["16"]}, places, tmp_path, *more)) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "contaccum_seed-3 was run with other settings: bank_size was 20, is 16" in error and "--overwrite" in error
    assert "grad_accum" not in error  # it has no bank
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("runs/*/result.json"))] == results


def test_a_failed_run_gives_exit_code_1_and_is_tried_again(
    options: Options,
    places: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    asked: list[list[str]] = []

    def failing(jobs: Any, *args: Any, **kwargs: Any) -> dict[str, str]:
        asked.append([job["name"] for job in jobs])
        return {job["name"]: "exit code 1: too bad" for job in jobs}

    monkeypatch.setattr(schedule, "run_jobs", failing)
    for _ in range(2):
        arguments = command(options, places, tmp_path, "--methods", "grad_accum", "--seeds", "0", "1")
        assert main(arguments) == 1
        assert "failed: grad_accum_seed-0: exit code 1: too bad" in capsys.readouterr().out
    assert asked == [["grad_accum_seed-0", "grad_accum_seed-1"]] * 2
    assert "too bad" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--metods", "contaccum"], "did you mean 'methods'"),
        (["--eval_split", "train"], "no split 'train'"),
        (["--eval_queries", "0"], "--eval_queries must be at least 1"),
        (["--seeds", "1", "1"], "each seed once"),
        (["--seeds", "one"], "invalid int value"),
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--train_data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--grid", "bank_size=4,8", "query_bank_size=6"], "query_bank_size=6"),
    ],
)
def test_mistakes_give_one_line_before_anything_is_trained(
    options: Options,
    places: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    message: str,
):
    assert main(command(options, places, tmp_path / "out", *more)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("contaccum: error")]
    assert message in line
    assert not (tmp_path / "out").exists()


def test_evaluation_data_is_asked_for(capsys: pytest.CaptureFixture[str]):
    assert main(["compare", "--model", "m"]) == 2
    assert "--eval_data" in capsys.readouterr().err


def test_help_needs_no_torch():
    code = "import sys; from contaccum.cli import main\ntry: main(['compare', '--help'])\nexcept SystemExit: pass\n"
    done = subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], capture_output=True)
    assert done.returncode == 0 and b"--variant" in done.stdout
