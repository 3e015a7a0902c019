"""Processes: several at once, failures told and survived, none left behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from contaccum.comparison.schedule import available_cores, default_jobs, run_jobs

# Stands for contaccum.comparison.run: does what the job says.
CHILD = """
import json, os, signal, sys
from pathlib import Path
path = Path(sys.argv[1])
job = json.loads(path.read_text())
what = job["what"]
if what == "fail":
    print("reading", file=sys.stderr)
    sys.exit("no such thing")
if what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "hang":
    os.read(0, 1)  # until the parent is gone, or a signal comes
if what != "nothing":
    (path.parent / "result.json").write_text(json.dumps({"threads": os.environ["OMP_NUM_THREADS"]}))
"""


@pytest.fixture
def start(tmp_path: Path) -> Any:
    script = tmp_path / "child.py"
    script.write_text(CHILD)

    def run(whats: list[str], at_once: int = 2, **more: Any) -> tuple[dict[str, str], dict[str, Path]]:
        jobs = [{"name": f"{number}-{what}", "entry": what, "what": what} for number, what in enumerate(whats)]
        folders = {str(job["name"]): tmp_path / str(job["name"]) for job in jobs}
        for folder in folders.values():
            folder.mkdir(exist_ok=True)
        more = {"progress": lambda line: None, "command": (sys.executable, str(script)), **more}
        return run_jobs(jobs, folders, at_once, 3, **more), folders

    return run


def test_failures_are_told_and_the_others_go_on(start: Any):
    lines: list[str] = []
    failed, folders = start(["fail", "ok", "killed", "nothing", "ok"], progress=lines.append)
    assert failed == {
        "0-fail": "exit code 1: no such thing",
        "2-killed": "killed by SIGKILL (out of memory?): nothing on stderr",
        "3-nothing": "ended without a result: nothing on stderr",
    }
    for name in ("1-ok", "4-ok"):
        assert json.loads((folders[name] / "result.json").read_text()) == {"threads": "3"}
    assert sum(": started" in line for line in lines) == 5 and sum("FAILED" in line for line in lines) == 3
    assert any(line.startswith("[2/5] 1-ok: done in") for line in lines)


def test_no_more_than_asked_for_run_at_once_and_what_is_left_is_estimated(start: Any):
    running, most, lines = 0, 0, []

    def progress(line: str) -> None:
        nonlocal running, most
        running += 1 if ": started" in line else -1
        most = max(most, running)
        lines.append(line)

    start(["ok"] * 5, at_once=2, progress=progress)
    assert (running, most) == (0, 2)
    ends = [line for line in lines if "done" in line]
    assert all("left" in line for line in ends[:-1]) and "left" not in ends[-1]


def test_an_interrupt_leaves_no_process(start: Any, tmp_path: Path):
    seen: list[str] = []

    def interrupt(line: str) -> None:
        seen.append(line)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(["hang", "hang", "ok"], at_once=3, progress=interrupt)
    left = [child for child in psutil.Process().children() if any("child.py" in part for part in child.cmdline())]
    assert left == []


def test_default_of_runs_at_once():
    assert default_jobs(accelerator=True) == 1
    assert default_jobs(accelerator=False) == max(1, available_cores() // 2)
