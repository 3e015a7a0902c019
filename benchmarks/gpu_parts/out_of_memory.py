"""Training that runs out of GPU memory, and the recovery of `ContAccumTrainer`.

The memory of this process is limited to a value between the peaks of two micro-batches, so that the
larger one raises a real out-of-memory error. Training must then go on with smaller micro-batches
and the same pairs per update, and its weights must be those of a run that had the smaller
micro-batches from the start. SGD is used, because Adam takes a full step even if a gradient
contains only rounding errors.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from measuring.encoders import BACKBONES, make_encoder, make_texts, make_words

from contaccum import ContAccumTrainer, ContAccumTrainingArguments
from gpu_parts.settings import NotMeasured, Run

MAX_DIFFERENCE = 1e-3  # of the changes of the weights, relative; rounding gives about 1e-5

MemoryLimit = Callable[[ContAccumTrainer], AbstractContextManager[None]]
"""A function that returns a context in which a trainer runs out of memory."""


@dataclass(frozen=True)
class MemorySizes:
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


TINY = MemorySizes("tiny", 16, 2, 8, 2, 16, 5, 8, 50)


@dataclass
class TrainedRun:
    """Result of a training run."""

    initial_weights: torch.Tensor
    weights: torch.Tensor
    micro_batch: int  # rows of a micro-step at the end
    pairs_per_update: list[int]
    seconds: float
    warnings: list[str]


class WarningRecorder(logging.Handler):
    """A handler that records the warnings about memory."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Record a message."""
        self.messages.append(record.getMessage())


def measure(run: Run) -> dict[str, Any]:
    """Limit the memory of the GPU, train with micro-batches that do not fit, and compare."""
    if not run.is_cuda:
        raise NotMeasured(
            "torch can limit the memory of a GPU only; the tests simulate the error on a CPU"
        )
    sizes = TINY if run.is_tiny else MemorySizes()
    peaks: dict[int, float] = {}
    for local in (sizes.small, sizes.large):
        run.free_memory()
        run.reset_peak()
        train(run, sizes, "grad_accum", local)
        peaks[local] = run.read_peak_mb() or 0.0
    limit_mb = (peaks[sizes.small] + peaks[sizes.large]) / 2
    cases = check_recovery(run, sizes, lambda trainer: limit_memory(run, limit_mb))
    if not cases:
        raise NotMeasured("the time was over before the first case; increase --minutes")
    result = {
        "passed": all(case["passed"] for case in cases.values()),
        "sizes": asdict(sizes),
        "peak_mb": {str(local): peak for local, peak in peaks.items()},
        "limit_mb": limit_mb,
        "cases": cases,
    }
    missing = [name for name in CHECKS if name not in cases]
    if missing:
        result["not_run"] = "; ".join(missing)
    return result


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


def check_recovery(run: Run, sizes: MemorySizes, limit: MemoryLimit) -> dict[str, Any]:
    """Train with too little memory in several ways, as far as the time goes, and check the runs.

    Returns:
        {name of the case: what the run did, and "passed"}.
    """
    cases = {}
    for name, check in CHECKS.items():
        if not run.has_time():
            break
        cases[name] = check(run, sizes, limit)
    return cases


def check_weights(run: Run, sizes: MemorySizes, limit: MemoryLimit) -> dict[str, Any]:
    """Check that halving the micro-batch without a bank changes the weights by rounding only."""
    halved = train(run, sizes, "grad_accum", sizes.large, limit)
    # Without a limit, from the start with the micro-batch that the halved run ended with.
    reference = train(run, sizes, "grad_accum", halved.micro_batch)
    reference_change = (reference.weights - reference.initial_weights).norm()
    difference = float((halved.weights - reference.weights).norm() / reference_change)
    return describe(halved, sizes, sizes.large, difference)


def check_halving(run: Run, sizes: MemorySizes, limit: MemoryLimit) -> dict[str, Any]:
    """Check that a run with a bank goes on with smaller micro-batches."""
    trained = train(run, sizes, "contaccum", sizes.large, limit)
    return describe(trained, sizes, sizes.large)


def check_auto(run: Run, sizes: MemorySizes, limit: MemoryLimit) -> dict[str, Any]:
    """Check that a run with the micro-batch "auto" looks for one that fits."""
    trained = train(run, sizes, "contaccum", "auto", limit)
    return describe(trained, sizes, sizes.pairs)


CHECKS = {
    "halving, grad_accum": check_weights,
    "halving, contaccum": check_halving,
    "auto, contaccum": check_auto,
}


def describe(
    trained: TrainedRun, sizes: MemorySizes, too_large: int, difference: float | None = None
) -> dict[str, Any]:
    """Describe a run that ran out of memory, and check it.

    Args:
        trained: the run.
        sizes: sizes of this part.
        too_large: pairs of the micro-batch that does not fit.
        difference: relative difference of the changes of the weights from those of a run with
            smaller micro-batches; None: not compared, because after an update has started again,
            some of its pairs are in the bank twice.
    """
    has_same_pairs = trained.pairs_per_update == [sizes.pairs] * sizes.updates
    passed = has_same_pairs and trained.micro_batch < too_large
    if difference is not None:
        passed = passed and difference <= MAX_DIFFERENCE
    return {
        "too_large": too_large,
        "micro_batch": trained.micro_batch,
        "pairs_per_update": trained.pairs_per_update,
        "relative_difference": difference,
        "seconds": trained.seconds,
        "warnings": trained.warnings,
        "passed": passed,
    }


def train(
    run: Run,
    sizes: MemorySizes,
    method: str,
    micro_batch: int | str,
    limit: MemoryLimit | None = None,
) -> TrainedRun:
    """Train a model with random weights on random texts.

    Args:
        run: the device.
        sizes: sizes of this part.
        method: the method of the trainer.
        micro_batch: ``per_device_train_batch_size``.
        limit: returns the context in which memory is too small; None for no limit.
    """
    recorder = WarningRecorder()
    logger = logging.getLogger("contaccum.training.update")
    logger.addHandler(recorder)
    run.free_memory()
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(run, sizes, method, micro_batch, folder)
            initial_weights = copy_weights(trainer)
            started = time.perf_counter()
            with nullcontext() if limit is None else limit(trainer):
                trainer.train()
            run.synchronize()
            seconds = time.perf_counter() - started
            log_lines = Path(folder, "train_log.jsonl").read_text(encoding="utf-8").splitlines()
    finally:
        logger.removeHandler(recorder)
    rows = trainer.updates.max_rows
    if rows is None:
        rows = trainer.args.per_device_train_batch_size
    pairs_per_update = [json.loads(line)["pairs"] for line in log_lines]
    return TrainedRun(
        initial_weights, copy_weights(trainer), rows, pairs_per_update, seconds, recorder.messages
    )


def make_trainer(
    run: Run, sizes: MemorySizes, method: str, micro_batch: int | str, folder: str
) -> ContAccumTrainer:
    """Create a trainer; the model and the data are the same in every call."""
    torch.manual_seed(0)
    model = make_encoder(
        BACKBONES[sizes.backbone],
        run.device,
        words=make_words(sizes.num_words),
        normalize=True,
        query_max_length=sizes.query_length,
        passage_max_length=sizes.passage_length,
    )
    num_pairs = sizes.pairs * sizes.updates
    columns = {
        "query": make_texts(num_pairs, sizes.query_length, sizes.num_words, seed=1),
        "positive": make_texts(num_pairs, sizes.passage_length, sizes.num_words, seed=2),
    }
    settings: dict[str, Any] = {}
    if method == "contaccum":
        settings["bank_size"] = sizes.bank_size
    args = ContAccumTrainingArguments(
        output_dir=folder,
        method=method,
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
        **settings,
    )
    return ContAccumTrainer(model, args, Dataset.from_dict(columns))


def copy_weights(trainer: ContAccumTrainer) -> torch.Tensor:
    """Return a copy of all weights as one vector on the CPU."""
    vectors = [weight.detach().flatten().cpu() for weight in trainer.model.parameters()]
    return torch.cat(vectors)
