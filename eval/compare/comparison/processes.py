"""The processes of a study: every job (training of one run) has its own, several at once.

Each process gets its share of the CPU cores. No process outlives the program that starts it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from contaccum.files import write_json

JOB_FILE = "job.json"

Job = dict[str, Any]
"""A run as JSON: name, folder, settings, evaluation and identity; see `make_jobs`."""

_POLL_SECONDS = 0.1
_MAX_ERROR_LENGTH = 300
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")

_Process = subprocess.Popen[bytes]


def run_jobs(
    jobs: Sequence[Job],
    max_processes: int | None,
    progress: Callable[[str], None] = print,
    command: Sequence[str] = (sys.executable, "-m", "comparison.run"),
) -> dict[str, str]:
    """Run every job in an empty folder and in a process of its own.

    All processes are ended when this function ends, also if it ends by an interrupt.

    Args:
        max_processes: the number of processes that run at once; None: one on a machine with an
            accelerator, else one for every two CPU cores.
        progress: is called with a line whenever a job starts or ends.
        command: the command of a process, to which the path of the job's file is appended.

    Returns:
        {name of the job: reason} for the jobs that failed.
    """
    num_cores = _count_cores()
    if not max_processes:
        max_processes = 1 if torch.accelerator.is_available() else max(1, num_cores // 2)
    # The number of jobs does not matter, so that runs that are added later have equal threads.
    num_threads = max(1, num_cores // max_processes)
    environment = {**os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(num_threads))}

    waiting = list(jobs)
    running: list[tuple[Job, _Process]] = []
    failed: dict[str, str] = {}
    try:
        while waiting or running:
            while waiting and len(running) < max_processes:
                job = waiting.pop(0)
                progress(f"[{len(jobs) - len(waiting)}/{len(jobs)}] {job['name']}: started")
                running.append((job, _start_process(job, command, environment)))
            time.sleep(_POLL_SECONDS)
            ended = [pair for pair in running if pair[1].poll() is not None]
            for job, process in ended:
                running.remove((job, process))
                if process.returncode:
                    failed[job["name"]] = _describe_failure(job, process.returncode)
                progress(f"{job['name']}: {failed.get(job['name'], 'done')}")
    finally:
        for _, process in running:
            # This closes stdin of the process. The process then ends itself, by
            # `exit_with_parent`.
            process.communicate()
    return failed


def exit_with_parent() -> None:
    """Wait until the parent process ends, and then end this process.

    A process that `run_jobs` starts calls this in a daemon thread.

    The stdin of this process is a pipe from the parent, which never writes to it. The pipe closes
    when the parent ends for any reason, and then the read returns.
    """
    os.read(0, 1)
    os._exit(130)


def _count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _start_process(job: Job, command: Sequence[str], environment: dict[str, str]) -> _Process:
    """Start the process of a job in an empty folder, with its output in files of the folder."""
    folder = Path(job["folder"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / JOB_FILE, job)
    with open(folder / "stdout.log", "wb") as stdout, open(folder / "stderr.log", "wb") as stderr:
        return subprocess.Popen(
            [*command, str(folder / JOB_FILE)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
        )


def _describe_failure(job: Job, exit_code: int) -> str:
    """Return the exit code and the last line that the process wrote to stderr."""
    log = Path(job["folder"], "stderr.log")
    last_line = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
    # Linux sends signal 9 (exit code -9) to a process when memory runs out.
    return f"exit code {exit_code}: {last_line[:_MAX_ERROR_LENGTH]} (see {log})"
