"""Run programs as from a command line: of the repository in this process, of tests in a new one."""

import json
import os
import runpy
import subprocess
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


def run_torchrun(*argv: object) -> subprocess.CompletedProcess[str]:
    """Run torchrun on CPUs with options, a program and its arguments."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, argv)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def run_forking_script(script: Path, argument: str, folder: Path) -> dict[str, Any]:
    """Run a script of the tests that uses `forks` in a new process; return the JSON it prints.

    Args:
        script: the script.
        argument: its first argument.
        folder: its second argument, where it writes results and the errors of its forks.
    """
    paths = [str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = [sys.executable, str(script), argument, str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    errors = "\n".join(path.read_text()[-2000:] for path in folder.glob("error-*.txt"))
    assert process.returncode == 0, process.stderr[-3000:] + errors
    assert not errors, errors
    return json.loads(process.stdout.splitlines()[-1])
