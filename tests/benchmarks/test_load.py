"""`contaccum bench load`: a short run holds its bounds, and a run that leaks or slows down does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from contaccum.benchmarks import load
from contaccum.benchmarks.load import LoadSettings, Slice, summarise
from contaccum.cli import main

SETTINGS = LoadSettings(micro_steps=1000, local=4, bank=64)


def slices(**last: Any) -> list[Slice]:
    """A hundred slices of a steady run, with other values in its second half."""
    steady: dict[str, Any] = {"resident_mb": 500.0, "open_files": 6, "threads": 3, "cpu": 5e-3, "wall": 6e-3}
    return [
        Slice(10 * i, **{**steady, "machine": 1e-3, **(last if i > 50 else {})})  # type: ignore[arg-type]  # by name
        for i in range(1, 101)
    ]


@pytest.mark.slow  # the shorter version of the benchmark: 320 micro-steps of the real trainer
def test_short_run_wraps_its_bank_and_holds_memory_files_and_threads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "load.json"
    # Half a second of work says nothing about speed to within a few percent, on a machine with other work.
    sizes = ["--micro_steps", "320", "--bank", "32", "--rows", "128", "--local", "4", "--max_slowdown", "1"]
    assert main(["bench", "load", *sizes, f"--output={output}"]) == 0
    (record,) = json.loads(output.read_text())["records"]
    assert record["turns"] == 40 and record["broken"] == [] and record["bank_fill"] > 0
    assert abs(record["memory_growth"]) < 0.01
    assert record["open_files"][0] == record["open_files"][1] and record["threads"][1] <= record["threads"][0]
    assert [sample["micro_step"] for sample in record["samples"]][-1] == 320
    out = capsys.readouterr().out
    assert "320 micro-steps" in out and "40 times over" in out


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ({}, None),
        ({"resident_mb": 504.9}, None),
        ({"resident_mb": 505.1}, "resident memory grew by 1.02%"),
        ({"open_files": 7}, "open files grew from 6 to 7"),
        ({"threads": 4}, "threads grew from 3 to 4"),
        ({"cpu": 5.2e-3}, None),
        ({"cpu": 5.3e-3}, "6.0% longer"),
        # Other programs slow the fixed work down too, and that is not ours.
        ({"cpu": 8e-3, "machine": 1.6e-3}, None),
        ({"cpu": 8e-3, "machine": 1.1e-3}, "45.5% longer"),
    ],
)
def test_bounds_are_those_of_the_settings(last: dict[str, Any], said: str | None) -> None:
    broken = summarise(SETTINGS, slices(**last))["broken"]
    assert len(broken) == (said is not None) and (said is None or said in broken[0])


def test_broken_bound_gives_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"turns": 9.0, "bank_fill": 64, **summarise(SETTINGS, slices(threads=4))}
    monkeypatch.setattr(load, "measure_load", lambda settings, progress: [record])
    assert main(["bench", "load", f"--output={tmp_path / 'load.json'}"]) == 1
    assert "contaccum bench load: threads grew from 3 to 4" in capsys.readouterr().err
    assert json.loads((tmp_path / "load.json").read_text())["records"][0]["broken"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--micro_steps", "1600"], "the bank must be full"),
        (["--micro_steps", "100001"], "not a multiple"),
        (["--rows", "4"], "rows=4 is too few"),
        (["--local", "0"], "must be positive"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "load", *options, f"--output={tmp_path / 'load.json'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
