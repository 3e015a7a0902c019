"""Tiny training runs in forks of one process, for test_forked_runs.py; prints JSON.

Some forks are killed, and some are the ranks of one run. Starting Python with torch and
transformers takes seconds, while a fork of a process that has imported them takes no time.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import disable_progress_bars
from forks import fork, run_on_ranks, wait
from tiny_models import tiny_encoder
from tiny_runs import (
    SAVE_EVERY_UPDATE,
    call_at_micro_step,
    get_state,
    make_pairs,
    make_trainer,
    read_log,
)
from transformers.utils import logging as transformers_logging

import contaccum.losses.probe
from contaccum import ContAccumTrainer
from contaccum.settings import WITH_BANK

torch.set_num_threads(1)
disable_progress_bars()
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()

NUM_UPDATES = 6
ROOT = Path(sys.argv[2])
SETTINGS = {
    "per_device_train_batch_size": 2,
    "max_steps": NUM_UPDATES,
    "use_cpu": True,
    "save_total_limit": 2,
    **SAVE_EVERY_UPDATE,
}
MEASURED = ("seconds", "pairs_per_second", "peak_memory_mb")
"""Log entries that differ between runs on the same data."""


def make_run(folder: Path, rows: int = 23, negatives: int = 0, **settings: Any) -> ContAccumTrainer:
    """Return a trainer with the settings of all runs here."""
    return make_trainer(folder, make_pairs(rows, negatives), **{**SETTINGS, **settings})


def save_outcome(folder: Path, trainer: ContAccumTrainer) -> None:
    """Save the state and the log of a finished run for comparison."""
    state = get_state(trainer)
    log = read_log(folder)
    for line in log:
        for key in MEASURED:
            del line[key]
    if trainer.args.process_index == 0:
        torch.save({"state": state, "log": log}, folder / "outcome.pt")


def train(folder: Path, **settings: Any) -> None:
    """Train to the end, from the last checkpoint if there is one."""
    trainer = make_run(folder, **settings)
    trainer.train(resume_from_checkpoint="auto")
    save_outcome(folder, trainer)


def train_and_report(folder: Path, writing: int) -> None:
    """Train as `train` does, and write a byte to a pipe before each micro-step."""
    micro_step = ContAccumTrainer.micro_step

    def report(*args: Any, **kwargs: Any) -> Any:
        os.write(writing, b"x")
        return micro_step(*args, **kwargs)

    ContAccumTrainer.micro_step = report  # type: ignore[method-assign]
    train(folder)


def start_and_kill(folder: Path, num_micro_steps: int, seconds: float) -> int:
    """Start a run and kill it some seconds after a number of micro-steps; return its exit code.

    Micro-steps are counted first, because on a busy machine a micro-step may take any time.
    """
    reading, writing = os.pipe()
    child = fork(ROOT, lambda: train_and_report(folder, writing))
    os.close(writing)
    for _ in range(num_micro_steps):
        os.read(reading, 1)  # returns when a micro-step begins, or when the run has ended
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    code = wait(child)
    os.close(reading)
    return code


def find_last_update(folder: Path) -> int:
    """Return the update of the newest checkpoint in a folder; 0 without one."""
    updates = [int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")]
    return max(updates, default=0)


def kill(num_kills: int) -> dict[str, Any]:
    """Train one run without interruption, and others that are killed again and again.

    A run is killed within a few updates after each start, at a random instant of an update or of
    the save after it. If a run ends before it is killed, another run is started.
    """
    codes = [wait(fork(ROOT, lambda: train(ROOT / "straight")))]
    seconds = sorted(line["seconds"] for line in read_log(ROOT / "straight"))
    seconds_per_update = seconds[len(seconds) // 2]  # includes the save
    sample = random.Random(3)
    num_killed = 0
    reached: list[int] = []
    folders = [ROOT / "killed-0"]
    while num_killed < num_kills:
        folder = folders[-1]
        num_micro_steps = sample.randint(4, 9)
        code = start_and_kill(folder, num_micro_steps, sample.uniform(0, seconds_per_update))
        if code != -signal.SIGKILL:
            codes.append(code)
            folders.append(ROOT / f"killed-{len(folders)}")
            continue
        num_killed += 1
        reached.append(find_last_update(folder))
        if (folder / f"checkpoint-{NUM_UPDATES}" / "result.json").is_file():
            # The run had done all updates, so nothing is left to resume.
            folders[-1] = ROOT / f"killed-{num_killed}-anew"
    codes.append(wait(fork(ROOT, lambda: train(folders[-1]))))
    return {
        "codes": codes,
        "killed": num_killed,
        "reached": reached,
        "folders": [folder.name for folder in folders],
    }


CASES: dict[str, dict[str, Any]] = {
    "in_batch": {"method": "in_batch", "gradient_accumulation_steps": 1},
    "grad_accum": {"method": "grad_accum", "negatives": 1},
    "grad_cache": {"method": "grad_cache", "negatives": 1},
    "grad_cache, untied": {"method": "grad_cache", "tied": False},
    "contaccum_cached": {
        "method": "contaccum_cached",
        "negatives": 1,
        "gradient_accumulation_steps": 1,
    },
    "contaccum": {"max_grad_norm": 0.5},
    "contaccum, untied": {"tied": False, "negatives": 1, "max_grad_norm": 0.5},
    "passage bank alone": {"query_bank_size": 0, "negatives": 1},
}
SETTINGS_OF_CASES = {
    "rows": 48,
    "max_steps": 2,
    "save_strategy": "no",
    "optim": "sgd",
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
}


def make_case(name: str, num_ranks: int) -> tuple[Any, dict[str, Any]]:
    """Return model and settings of a case with 8 pairs per micro-step, on all ranks together."""
    settings = {**SETTINGS_OF_CASES, **CASES[name], "per_device_train_batch_size": 8 // num_ranks}
    if settings.get("method", "contaccum") not in WITH_BANK:
        settings["gather_across_devices"] = num_ranks > 1
    model = tiny_encoder(settings.pop("tied", True)).double()
    return model, settings


def train_cases() -> dict[str, list[int]]:
    """Train every case on one rank and on two, and one case on four; return the exit codes."""
    cases = {(name, num): make_case(name, num) for name in CASES for num in (1, 2, 4)}

    def train_case(name: str, num_ranks: int) -> None:
        model, settings = cases[name, num_ranks]
        folder = ROOT / f"{name}-{num_ranks}"
        backend = "gloo" if num_ranks > 1 else None
        trainer = make_run(folder, model=model, ddp_backend=backend, **settings)
        trainer.train()
        trainer.accelerator.wait_for_everyone()
        save_outcome(folder, trainer)

    def train_all(num_ranks: int) -> None:
        for name in CASES:
            train_case(name, num_ranks)

    return {
        "1": [wait(fork(ROOT, lambda: train_all(1)))],
        "2": run_on_ranks(ROOT, 2, lambda rank: train_all(2)),
        "4": run_on_ranks(ROOT, 4, lambda rank: train_case("contaccum, untied", 4)),
    }


def stop_and_resume_ranks() -> dict[str, list[int]]:
    """Stop a run of two ranks by a signal to one of them, and resume it on two ranks and on one.

    Returns:
        The exit codes, also those of a run that is not stopped.
    """
    settings = {
        "rows": 24,
        "total_train_batch_size": 12,
        "gradient_accumulation_steps": 1,
        "max_steps": 4,
        "gather_across_devices": True,
    }
    model = tiny_encoder()

    def train_rank(folder: Path, rank: int, stop_at: int | None = None) -> None:
        trainer = make_run(folder, model=model, ddp_backend="gloo", **settings)
        if rank == 1 and stop_at is not None:
            call_at_micro_step(trainer, stop_at, lambda _: signal.raise_signal(signal.SIGTERM))
        trainer.train(resume_from_checkpoint="auto")
        (folder / f"run_id-{rank}").write_text(str(trainer.run_id))
        save_outcome(folder, trainer)

    codes = {}
    codes["straight"] = run_on_ranks(ROOT, 2, lambda rank: train_rank(ROOT / "ranks", rank))
    codes["stopped"] = run_on_ranks(
        ROOT, 2, lambda rank: train_rank(ROOT / "stopped", rank, stop_at=4)
    )
    shutil.copytree(ROOT / "stopped", ROOT / "alone")
    codes["resumed"] = run_on_ranks(ROOT, 2, lambda rank: train_rank(ROOT / "stopped", rank))
    codes["alone"] = [wait(fork(ROOT, lambda: train(ROOT / "alone", model=model, **settings)))]
    return codes


def train_on_ranks() -> dict[str, Any]:
    """Train on several ranks; return the exit codes and the names of the cases."""
    contaccum.losses.probe.MIN_PAIRS_BETWEEN_PROBES = 20
    codes = train_cases() | stop_and_resume_ranks()
    return {"codes": codes, "cases": list(CASES)}


if __name__ == "__main__":
    if sys.argv[1] == "ranks":
        print(json.dumps(train_on_ranks()))
    else:
        print(json.dumps(kill(int(sys.argv[1]))))
