"""Runs a tiny training again and again in forks of one process, and kills them: a script for test_killed_runs.py.

A start of Python with torch and transformers takes seconds, a fork of one that has them none. Prints JSON.
"""

from __future__ import annotations

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
from datasets import Dataset, disable_progress_bars
from sample_texts import WORDS, sentences
from transformers import BertConfig, BertTokenizerFast, set_seed
from transformers.utils import logging as transformers_logging

from contaccum import ContAccumTrainer, ContAccumTrainingArguments, DualEncoder
from contaccum.errors import UserError
from contaccum.training.window import WindowedTrainer

UPDATES = 16
TIMES = ("seconds", "pairs_per_second", "peak_memory_mb")


def build() -> DualEncoder:
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{x}" for x in letters), *WORDS]
    tokenizer = BertTokenizerFast(vocab={t: i for i, t in enumerate(dict.fromkeys(tokens))}, model_max_length=64)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
    )
    set_seed(7)
    return DualEncoder.from_backbone(config, pooling="mean", normalize=True, tokenizer=tokenizer)


def trainer_in(folder: Path, model: DualEncoder | None = None, rows: int = 23, **settings: Any) -> ContAccumTrainer:
    columns = {"query": sentences(rows, 1), "positive": sentences(rows, 2, 9)}
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "bank_size": 10,
        "max_steps": UPDATES,
        "learning_rate": 1e-3,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 2,
        "logging_steps": 1000,
        "disable_tqdm": True,
        "seed": 5,
    }
    args = ContAccumTrainingArguments(output_dir=str(folder), **{**given, **settings})
    return ContAccumTrainer(model=model or build(), args=args, train_dataset=Dataset.from_dict(columns), quiet=True)


def train(folder: Path, **settings: Any) -> ContAccumTrainer:
    """Train on from the last checkpoint, if there is one."""
    trainer = trainer_in(folder, **settings)
    trainer.train(resume_from_checkpoint="auto")
    return trainer


def outcome(folder: Path, trainer: ContAccumTrainer) -> None:
    """All that a run came to, for comparison."""
    optimizer: Any = trainer.optimizer
    state = {f"model.{k}": v for k, v in trainer.model.state_dict().items()} | trainer.bank_state()
    for index, values in optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{index}.{k}": torch.as_tensor(v) for k, v in values.items()}
    state["random"] = torch.get_rng_state()
    log = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    for line in log:
        for key in TIMES:
            del line[key]
    torch.save({"state": state, "log": log}, folder / "outcome.pt")


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
            work()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except Exception:
        (Path(sys.argv[2]) / f"error-{os.getpid()}.txt").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def finish(folder: Path) -> int:
    return wait(fork(lambda: outcome(folder, train(folder))))


def kill_at_random(root: Path, kills: int) -> dict[str, Any]:
    """One run to its end, and others that are killed again and again, each time within a few updates of its resume.

    When to kill is told in micro-steps first, since a busy machine may take any time for one, and then in seconds:
    anywhere within an update and the save after it. A run that ends before it is killed makes room for another.
    """
    codes = [finish(root / "straight")]
    log = [json.loads(line) for line in (root / "straight" / "train_log.jsonl").read_text().splitlines()]
    update = sorted(line["seconds"] for line in log)[len(log) // 2]  # the save after it included
    draws = random.Random(3)
    killed, reached, folders = 0, [], [root / "killed-0"]
    while killed < kills:
        folder = folders[-1]
        reading, writing = os.pipe()

        def telling(folder: Path = folder, writing: int = writing) -> None:
            step = WindowedTrainer.training_step

            def telling_step(*args: Any) -> Any:
                os.write(writing, b"x")
                return step(*args)

            WindowedTrainer.training_step = telling_step  # type: ignore[method-assign]
            outcome(folder, train(folder))

        child = fork(telling)
        os.close(writing)
        for _ in range(draws.randint(1, 5)):
            os.read(reading, 1)  # one more micro-step begins, or all are done
        time.sleep(draws.uniform(0, update))
        os.kill(child, signal.SIGKILL)
        code = wait(child)
        os.close(reading)
        if code == -signal.SIGKILL:
            killed += 1
            reached.append(max((int(p.name.split("-")[1]) for p in folder.glob("checkpoint-*")), default=0))
        else:
            codes.append(code)
            folders.append(root / f"killed-{len(folders)}")
    codes.append(finish(folders[-1]))
    return {"codes": codes, "killed": killed, "reached": reached, "folders": [folder.name for folder in folders]}


def signal_at(root: Path, number: int, micro_steps: list[int]) -> dict[str, Any]:
    """Runs that get a signal in a micro-step, and go on."""
    codes = [finish(root / "straight")]
    stops = []
    for at in micro_steps:
        folder = root / f"signal-{at}"

        def stopped(folder: Path = folder, at: int = at) -> None:
            done, step = 0, WindowedTrainer.micro_step

            def counted(self: Any, *args: Any) -> Any:
                nonlocal done
                done += 1
                if done == at:
                    signal.raise_signal(number)
                return step(self, *args)

            WindowedTrainer.micro_step = counted  # type: ignore[method-assign]
            outcome(folder, train(folder))

        stops.append(wait(fork(stopped)))
        codes.append(finish(folder))
    return {"codes": codes, "stops": stops}


def on_ranks(count: int, folder: Path, stop_in: int | None = None, **settings: Any) -> list[int]:
    """A run on several ranks; one of them gets SIGTERM in its micro-step ``stop_in``. Returns their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def rank(number: int) -> None:
        model = build()  # alone: among ranks, transformers lets only the first write what it is loaded from
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        done, step = 0, WindowedTrainer.micro_step

        def counted(self: Any, *args: Any) -> Any:
            nonlocal done
            done += 1
            if done == stop_in and number == count - 1:
                signal.raise_signal(signal.SIGTERM)
            return step(self, *args)

        WindowedTrainer.micro_step = counted  # type: ignore[method-assign]
        trainer = train(folder, model=model, ddp_backend="gloo", **{"gather_across_devices": True, **settings})
        if number == 0 and trainer.args.gathers:  # banks of their own come together with all ranks at work
            outcome(folder, trainer)

    return [wait(child) for child in [fork(lambda number=number: rank(number)) for number in range(count)]]


def other_ranks(root: Path) -> dict[str, Any]:
    """Runs on two ranks: uninterrupted; stopped by a signal to one; resumed on one rank, and refused there."""
    sizes = {"rows": 24, "total_train_batch_size": 12, "gradient_accumulation_steps": 1, "max_steps": 4}
    codes = {"straight": on_ranks(2, root / "straight", **sizes)}
    codes["stopped"] = on_ranks(2, root / "stopped", stop_in=4, **sizes)
    shutil.copytree(root / "stopped", root / "one")
    codes["resumed"] = on_ranks(2, root / "stopped", **sizes)
    codes["one"] = [wait(fork(lambda: outcome(root / "one", train(root / "one", gather_across_devices=True, **sizes))))]
    codes["own"] = on_ranks(2, root / "own", **{**sizes, "gather_across_devices": False, "max_steps": 2})

    def alone() -> None:
        try:
            train(root / "own", **sizes)
        except UserError as error:
            assert "holds the banks of 2 ranks" in str(error)
        else:
            raise AssertionError

    codes["alone"] = [wait(fork(alone))]
    return codes


if __name__ == "__main__":
    torch.set_num_threads(1)
    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    what, root = sys.argv[1], Path(sys.argv[2])
    if what == "random":
        result = kill_at_random(root, int(sys.argv[3]))
    elif what == "ranks":
        result = other_ranks(root)
    else:
        result = signal_at(root, int(sys.argv[3]), json.loads(sys.argv[4]))
    print(json.dumps(result))
