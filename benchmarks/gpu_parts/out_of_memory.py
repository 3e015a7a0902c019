"""Training that runs out of GPU memory, and the recovery of `ContAccumTrainer`.

The memory of this process is limited to a value between the peaks of two micro-batches, so that the
larger one raises a real out-of-memory error. Training must then go on with smaller micro-batches
and the same pairs per update, and its weights must be those of a run that had the smaller
micro-batches from the start. SGD is used, because Adam takes a full step even if a gradient
contains only rounding errors.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from measuring.encoders import make_encoder, make_texts
from measuring.run import Cases, NotMeasured, Run

from contaccum import ContAccumTrainer, ContAccumTrainingArguments
from contaccum.training.log import TRAIN_LOG, read_log

MAX_DIFFERENCE = 1e-3  # of the changes of the weights, relative; rounding gives about 1e-5

MemoryLimit = Callable[[ContAccumTrainer], AbstractContextManager[None]]
"""A function that returns a context in which a trainer runs out of memory."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of this part."""

    backbone: str = "minilm"
    pairs: int = 256  # pairs per update
    small: int = 16  # pairs of a micro-batch that fits
    large: int = 64  # pairs of a micro-batch that does not fit
    updates: int = 3
    bank_size: int = 512
    query_length: int = 32
    passage_length: int = 256
    num_words: int = 2000  # vocabulary


SIZES = Sizes()
TINY = Sizes("tiny", 16, 2, 8, 2, 16, 5, 8, 50)


class TrainedRun(NamedTuple):
    """Result of a training run."""

    change: torch.Tensor  # of all weights, as one vector on the CPU
    micro_batch: int  # rows of a micro-step at the end
    pairs_per_update: list[int]


def list_cases(sizes: Sizes, run: Run) -> Cases:
    """Limit the memory of the GPU, and yield trainings with micro-batches that do not fit."""
    if not run.is_cuda:
        raise NotMeasured(
            "torch can limit the memory of a GPU only; the tests simulate the error on a CPU"
        )
    peaks = []
    for local in (sizes.small, sizes.large):
        run.free_memory()
        run.reset_peak()
        train(sizes, run, "grad_accum", local)
        peaks.append(run.read_peak_mb())
    yield from list_recoveries(sizes, run, lambda trainer: limit_memory(run, fmean(peaks)))


@contextmanager
def limit_memory(run: Run, limit_mb: float) -> Iterator[None]:
    """Limit the memory that torch may reserve on the GPU within a ``with`` block."""
    run.free_memory()
    total_mb = torch.cuda.get_device_properties(run.device).total_memory / 2**20
    torch.cuda.set_per_process_memory_fraction(limit_mb / total_mb, run.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, run.device)


def list_recoveries(sizes: Sizes, run: Run, limit: MemoryLimit) -> Cases:
    """Yield trainings with too little memory, of which the last looks for a micro-batch itself."""
    for name, method, micro_batch in (
        ("halving", "grad_accum", sizes.large),
        ("halving", "contaccum", sizes.large),
        ("auto", "contaccum", "auto"),
    ):
        yield f"{name}, {method}", partial(check, sizes, run, method, micro_batch, limit)


def check(
    sizes: Sizes, run: Run, method: str, micro_batch: int | str, limit: MemoryLimit
) -> dict[str, Any]:
    """Train with too little memory, and check what the run did.

    Without a bank, the weights must also be those of a run without a limit, from the start with the
    micro-batch that the limited run ended with. (With a bank, some pairs of an update that has
    started again are in it twice.)
    """
    trained = train(sizes, run, method, micro_batch, limit)
    too_large = sizes.pairs if isinstance(micro_batch, str) else micro_batch
    has_same_pairs = trained.pairs_per_update == [sizes.pairs] * sizes.updates
    passed = has_same_pairs and trained.micro_batch < too_large
    difference = None
    if method == "grad_accum":
        reference = train(sizes, run, method, trained.micro_batch).change
        difference = float((trained.change - reference).norm() / reference.norm())
        passed = passed and difference <= MAX_DIFFERENCE
    return {
        "too_large": too_large,
        "micro_batch": trained.micro_batch,
        "pairs_per_update": trained.pairs_per_update,
        "relative_difference": difference,
        "passed": passed,
    }


def train(
    sizes: Sizes,
    run: Run,
    method: str,
    micro_batch: int | str,
    limit: MemoryLimit = lambda trainer: nullcontext(),
) -> TrainedRun:
    """Train a model with random weights on random texts, the same in every call.

    Args:
        micro_batch: ``per_device_train_batch_size``.
        limit: returns the context in which memory is too small.
    """
    run.free_memory()
    torch.manual_seed(0)
    model = make_encoder(
        sizes.backbone,
        run.device,
        num_words=sizes.num_words,
        normalize=True,
        query_max_length=sizes.query_length,
        passage_max_length=sizes.passage_length,
    )
    num_pairs = sizes.pairs * sizes.updates
    columns = {
        "query": make_texts(num_pairs, sizes.query_length, sizes.num_words, seed=1),
        "positive": make_texts(num_pairs, sizes.passage_length, sizes.num_words, seed=2),
    }
    with tempfile.TemporaryDirectory() as folder:
        args = ContAccumTrainingArguments(
            output_dir=folder,
            method=method,
            bank_size=sizes.bank_size if method == "contaccum" else None,
            per_device_train_batch_size=micro_batch,
            total_train_batch_size=sizes.pairs,
            max_steps=sizes.updates,
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not run.is_cuda,
        )
        trainer = ContAccumTrainer(model, args, Dataset.from_dict(columns))
        initial_weights = copy_weights(trainer)
        with limit(trainer):
            trainer.train()
        pairs_per_update = [line["pairs"] for line in read_log(Path(folder, TRAIN_LOG))]
    rows = trainer.updates.max_rows or trainer.args.per_device_train_batch_size
    return TrainedRun(copy_weights(trainer) - initial_weights, rows, pairs_per_update)


def copy_weights(trainer: ContAccumTrainer) -> torch.Tensor:
    """Return a copy of all weights as one vector on the CPU."""
    return torch.cat([weight.detach().flatten().cpu() for weight in trainer.model.parameters()])
