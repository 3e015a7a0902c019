"""Dry runs of benchmarks/gpu.py in this process."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from programs import run_program

PROGRAM = "benchmarks/gpu.py"
TINY = ("--device", "cpu", "--tiny")


class DryRun(NamedTuple):
    """A run of the program: its exit code, its records by file name, and what it printed."""

    code: int
    records: dict[str, Any]
    printed: str


def run_parts(output: Path, *argv: Any) -> DryRun:
    """Run the program on the CPU with tiny sizes."""
    printed = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        pytest.raises(SystemExit) as stopped,
    ):
        patch.setenv("HF_HUB_OFFLINE", "1")  # the program sets it, too, but does not remove it
        run_program(PROGRAM, *TINY, "--output", output, *argv)
    records = {path.stem: json.loads(path.read_text()) for path in output.glob("*.json")}
    return DryRun(stopped.value.code, records, printed.getvalue())
