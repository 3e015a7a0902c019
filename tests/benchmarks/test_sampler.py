"""`contaccum bench sampler` on a few rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contaccum.benchmarks.sampler import SAMPLERS
from contaccum.cli import main


def test_samplers_are_compared_on_the_same_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "sampler.json"
    arguments = ["--rows", "2000", "--duplicates", "0.3", "--repeats", "1", "--windows", "8", f"--output={output}"]
    assert main(["bench", "sampler", *arguments]) == 0
    result = json.loads(output.read_text())
    samplers = {r["sampler"]: r for r in result["records"] if "sampler" in r}
    assert set(samplers) == set(SAMPLERS)
    for record in samplers.values():
        assert record["rows"] == 2000 and record["pairs_per_second"] > 0
    assert samplers["planned"]["repeats"] == samplers["no_duplicates"]["repeats"] == 0 < samplers["shuffled"]["repeats"]
    assert samplers["no_duplicates"]["ratio"] == 1.0 < samplers["planned"]["ratio"]
    theirs, ours = (r for r in result["records"] if "window" in r)
    assert theirs["window"] == 0 and ours["window"] == 8 and ours["saved"] > 0.3
    assert ours["update_spread"] < 3 < theirs["update_spread"]
    assert "planned" in capsys.readouterr().out


def test_what_cannot_be_measured_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sampler", "--samplers", "fast"]) == 2
    assert main(["bench", "sampler", "--rows", "0"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
