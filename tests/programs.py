"""Run a program of scripts/, eval/ or benchmarks/ as from a command line, in this process."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def run_program(program: str, *argv: Any) -> None:
    """Run a program, named by its path in the repository, with command-line arguments."""
    with pytest.MonkeyPatch.context() as patch:
        # As `python program` does, so that a program finds the modules beside it.
        patch.setattr(sys, "path", [str((ROOT / program).parent), *sys.path])
        patch.setattr(sys, "argv", [program, *map(str, argv)])
        runpy.run_path(str(ROOT / program), run_name="__main__")
