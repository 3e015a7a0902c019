"""Runs a tiny training in forks of one process, kills them, and lets several be ranks, for test_forked_runs.py.

A start of Python with torch and transformers takes seconds, a fork of one that has them none. Prints JSON.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import disable_progress_bars
from tiny_models import tiny_encoder
from tiny_runs import SAVES, call_at_micro_step, read_log, pairs, get_state, make_trainer
from transformers.utils import logging as transformers_logging

import contaccum.losses.contaccum
from contaccum import ContAccumTrainer
from contaccum.training.arguments import BANK_METHODS

torch.set_num_threads(1)
disable_progress_bars()
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()

UPDATES = 6
ROOT = Path(sys.argv[2])
GIVEN = {
    "per_device_train_batch_size": 2,
    "max_steps": UPDATES,
    "use_cpu": True,
    "save_total_limit": 2,
    **SAVES,
}


def run_in(
    folder: Path, rows: int = 23, negatives: int = 0, stream: bool = False, **given: Any
) -> ContAccumTrainer:
    data = make_pairs(rows, negatives)
    return make_trainer(folder, data.to_iterable_dataset() if stream else data, **{**GIVEN, **given})


def outcome(folder: Path, trainer: ContAccumTrainer) -> None:
    """All that a run came to, for comparison."""
    state, measured = get_state(trainer), ("seconds", "pairs_per_second", "peak_memory_mb")
    log = [{k: v for k, v in line.items() if k not in measured} for line in read_log(folder)]
    if trainer.args.process_index == 0:
        torch.save({"state": state, "log": log}, folder / "outcome.pt")


def train(folder: Path, **settings: Any) -> None:
    """Train on from the last checkpoint, if there is one, to the end."""
    trainer = run_in(folder, **settings)
    trainer.train(resume_from_checkpoint="auto")
    outcome(folder, trainer)


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with (
            open(os.devnull, "w") as null,
            contextlib.redirect_stdout(null),
            contextlib.redirect_stderr(null),
        ):
            work()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except Exception:
        (ROOT / f"error-{os.getpid()}.txt").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill(kills: int) -> dict[str, Any]:
    """One run to its end, and others that are killed again and again, each time within a few updates of its resume.

    When to kill is counted in micro-steps first, since a busy machine may take any time for one, and then in seconds:
    anywhere within an update and the save after it. A run that ends before it is killed makes room for another.
    """
    codes = [wait(fork(lambda: train(ROOT / "straight")))]
    log = read_log(ROOT / "straight")
    update = sorted(line["seconds"] for line in log)[len(log) // 2]  # the save after it included
    sample = random.Random(3)
    killed, reached, folders = 0, [], [ROOT / "killed-0"]
    while killed < kills:
        folder = folders[-1]
        reading, writing = os.pipe()

        def reporting(folder: Path = folder, writing: int = writing) -> None:
            step = ContAccumTrainer.micro_step

            def reported(*args: Any, **kwargs: Any) -> Any:
                os.write(writing, b"x")
                return step(*args, **kwargs)

            ContAccumTrainer.micro_step = reported  # type: ignore[method-assign]
            train(folder)

        child = fork(reporting)
        os.close(writing)
        for _ in range(sample.randint(4, 9)):
            os.read(reading, 1)  # one more micro-step begins, or all are done
        time.sleep(sample.uniform(0, update))
        os.kill(child, signal.SIGKILL)
        code = wait(child)
        os.close(reading)
        if code == -signal.SIGKILL:
            killed += 1
            reached.append(
                max((int(p.name.split("-")[1]) for p in folder.glob("checkpoint-*")), default=0)
            )
            if (
                folder / f"checkpoint-{UPDATES}" / "contaccum.json"
            ).is_file():  # it had ended: nothing is left to do
                folders[-1] = ROOT / f"killed-{killed}-anew"
        else:
            codes.append(code)
            folders.append(ROOT / f"killed-{len(folders)}")
    codes.append(wait(fork(lambda: train(folders[-1]))))
    return {
        "codes": codes,
        "killed": killed,
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
    "pre_batch": {"method": "pre_batch", "negatives": 1},
    "stream": {"stream": True},
}
SGD = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
COMMON = {"rows": 48, "max_steps": 2, "save_strategy": "no"} | SGD


def as_one(name: str, ranks: int) -> tuple[Any, dict[str, Any]]:
    """Model and settings of a case whose micro-batches on all ranks are the same eight pairs."""
    given = {**COMMON, **CASES[name], "per_device_train_batch_size": 8 // ranks}
    if given.get("method", "contaccum") not in BANK_METHODS:
        given["gather_across_devices"] = ranks > 1
    return tiny_encoder(given.pop("tied", True)).double(), given


def on_ranks(count: int, work: Callable[[int], None]) -> list[int]:
    """The same work in as many forks, which are the ranks of one group; returns their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def rank(number: int) -> None:
        # Models first: among ranks, transformers lets only the first write what it is loaded from.
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        work(number)

    return [
        wait(child)
        for child in [fork(lambda number=number: rank(number)) for number in range(count)]
    ]


def ranks() -> dict[str, Any]:
    """Every case on one rank, on two, and some on four; runs stopped by a signal to one rank, and resumed elsewhere."""
    contaccum.losses.contaccum.PAIRS_PER_PROBE = 20
    codes: dict[str, list[int]] = {}
    models = {name: {r: as_one(name, r) for r in (1, 2, 4)} for name in CASES}

    def case(name: str, count: int) -> None:
        model, given = models[name][count]
        folder = ROOT / f"{name}-{count}"
        trainer = run_in(folder, model=model, ddp_backend="gloo" if count > 1 else None, **given)
        trainer.train()
        trainer.accelerator.wait_for_everyone()
        outcome(folder, trainer)

    codes["1"] = [wait(fork(lambda: [case(name, 1) for name in CASES]))]  # type: ignore[arg-type]  # the list is no matter
    codes["2"] = on_ranks(2, lambda number: [case(name, 2) for name in CASES])  # type: ignore[arg-type]  # as above
    codes["4"] = on_ranks(4, lambda number: case("contaccum, untied", 4))

    sizes = {
        "rows": 24,
        "total_train_batch_size": 12,
        "gradient_accumulation_steps": 1,
        "max_steps": 4,
    }
    model = tiny_encoder()

    def several(folder: Path, number: int, stop_in: int | None = None, **more: Any) -> None:
        trainer = run_in(
            folder,
            model=model,
            ddp_backend="gloo",
            **{**sizes, "gather_across_devices": True, **more},
        )
        if number == 1 and stop_in is not None:
            call_at_micro_step(trainer, stop_in, lambda _: signal.raise_signal(signal.SIGTERM))
        trainer.train(resume_from_checkpoint="auto")
        (folder / f"run_id-{number}").write_text(str(trainer.run_id))
        outcome(folder, trainer)

    codes["straight"] = on_ranks(2, lambda number: several(ROOT / "ranks", number))
    codes["stopped"] = on_ranks(2, lambda number: several(ROOT / "stopped", number, stop_in=4))
    shutil.copytree(ROOT / "stopped", ROOT / "alone")
    codes["resumed"] = on_ranks(2, lambda number: several(ROOT / "stopped", number))
    codes["alone"] = [
        wait(fork(lambda: train(ROOT / "alone", model=model, gather_across_devices=True, **sizes)))
    ]
    return {"codes": codes, "cases": list(CASES)}


if __name__ == "__main__":
    print(json.dumps(ranks() if sys.argv[1] == "ranks" else kill(int(sys.argv[1]))))
