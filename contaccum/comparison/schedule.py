"""Processes of a comparison: several at once, each with its share of the cores, none left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contaccum.comparison.run import JOB, RESULT, WITH_PARENT, write_json

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 5.0


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_jobs(accelerator: bool) -> int:
    """One at a time where runs share an accelerator; else two cores each, so that a machine's memory lasts."""
    return 1 if accelerator else max(1, available_cores() // 2)


@dataclass
class _Child:
    job: Mapping[str, Any]
    number: int
    process: subprocess.Popen[bytes]
    folder: Path
    started: float = field(default_factory=time.monotonic)


def run_jobs(
    jobs: Sequence[Mapping[str, Any]],
    folders: Mapping[str, Path],
    at_once: int,
    threads: int,
    progress: Callable[[str], None] = print,
    done: Callable[[str], str] = lambda name: "",
    command: Sequence[str] = (sys.executable, "-m", "contaccum.comparison.run"),
) -> dict[str, str]:
    """Run every job, ``at_once`` at a time with ``threads`` each; returns name -> why, for those that failed.

    Each process writes stdout.log and stderr.log into its folder. Whatever ends this function, an interrupt for
    instance, ends the processes.

    Args:
        folders: name of the job -> its folder, which exists.
        done: what the line says about a job that is finished.
        command: gets the path of job.json and WITH_PARENT.
    """
    waiting = list(enumerate(jobs, start=1))
    children: list[_Child] = []
    failed: dict[str, str] = {}
    taken: dict[str, list[float]] = {}
    try:
        while waiting or children:
            while waiting and len(children) < at_once:
                number, job = waiting.pop(0)
                progress(f"[{number}/{len(jobs)}] {job['name']}: started")
                children.append(_start(job, number, folders[job["name"]], threads, command))
            for child in [child for child in children if child.process.poll() is not None]:
                children.remove(child)
                _close(child)
                name, seconds = child.job["name"], time.monotonic() - child.started
                code = child.process.returncode
                if code == 0 and (child.folder / RESULT).is_file():
                    taken.setdefault(child.job["entry"], []).append(seconds)
                    line = f"done in {_duration(seconds)}{done(name)}"
                else:
                    failed[name] = _reason(code, child.folder / "stderr.log")
                    line = f"FAILED after {_duration(seconds)}: {failed[name]}"
                left = _time_left([job for _, job in waiting], children, taken, at_once)
                progress(f"[{child.number}/{len(jobs)}] {name}: {line}{left}")
            if children:
                time.sleep(_POLL_SECONDS)
    finally:
        _end(children)
    return failed


def _start(job: Mapping[str, Any], number: int, folder: Path, threads: int, command: Sequence[str]) -> _Child:
    write_json(folder / JOB, {**job, "threads": threads})
    root = str(Path(__file__).resolve().parents[2])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "RAYON_NUM_THREADS": str(threads),  # the tokenizers
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }
    with open(folder / "stdout.log", "wb") as out, open(folder / "stderr.log", "wb") as err:
        process = subprocess.Popen(
            [*command, str(folder / JOB), WITH_PARENT],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            env=environment,
            # Ctrl-C reaches this process alone, which then ends the others in order.
            start_new_session=True,
        )
    return _Child(job, number, process, folder)


def _end(children: Sequence[_Child]) -> None:
    for child in children:
        _signal(child, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _signal(child, getattr(signal, "SIGKILL", signal.SIGTERM))
            child.process.wait()
        _close(child)


def _signal(child: _Child, number: int) -> None:
    try:
        if hasattr(os, "killpg"):
            os.killpg(child.process.pid, number)  # and the workers that it started
        else:
            child.process.terminate()
    except ProcessLookupError:
        return


def _close(child: _Child) -> None:
    if child.process.stdin is not None:
        child.process.stdin.close()


def _reason(code: int, stderr: Path) -> str:
    text = stderr.read_text(encoding="utf-8", errors="replace") if stderr.is_file() else ""
    lines = [line.strip() for line in re.split(r"[\r\n]", text) if line.strip()]
    last = lines[-1][:300] if lines else "nothing on stderr"
    if code >= 0:
        return f"exit code {code}: {last}" if code else f"ended without a result: {last}"
    name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
    return f"killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}: {last}"


def _time_left(
    waiting: Sequence[Mapping[str, Any]], running: Sequence[_Child], taken: Mapping[str, list[float]], at_once: int
) -> str:
    if not (waiting or running):
        return ""
    everything = [seconds for times in taken.values() for seconds in times]
    if not everything:
        return ""
    mean = sum(everything) / len(everything)

    def expected(job: Mapping[str, Any]) -> float:
        times = taken.get(job["entry"])
        return sum(times) / len(times) if times else mean

    now = time.monotonic()
    rest = sum(expected(job) for job in waiting)
    rest += sum(max(0.0, expected(child.job) - (now - child.started)) for child in running)
    return f"; about {_duration(rest / at_once)} left"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"
