"""A call of `contaccum fit`: what its parts share, and one training in a folder."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from contaccum import work
from contaccum.progress import StatusLine
from contaccum.settings import Settings, replace
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.log import TRAIN_LOG, read_log
from contaccum.training.trainer import train_and_save

TRAINING_FOLDER = "training"


class Job(NamedTuple):
    """A call of `fit`: what all its parts share.

    Attributes:
        folder: the output folder, an absolute path.
        request: everything that decides the results: the identity of all work in the folder.
        given: the user's settings of a training.
        args: training arguments with these settings: the device and the batch sizes.
        budget: the time of all starts.
        status: prints lines for the user, on the first process only, and shows what is done now.
    """

    folder: Path
    request: work.Identity
    given: Mapping[str, Any]
    args: ContAccumTrainingArguments
    budget: work.Budget
    status: StatusLine

    @property
    def print_line(self) -> Callable[[str], None]:
        return self.status.print_line

    @property
    def data(self) -> Path:
        """The folder of the split."""
        return self.folder / "data"

    @property
    def store(self) -> Path:
        """The folder of the training documents' vectors by the base model."""
        return self.folder / "documents" / "store"

    @property
    def batch_size(self) -> int:
        """The number of texts per forward pass outside of trainings."""
        return self.args.per_device_eval_batch_size


class Trained(NamedTuple):
    """A finished training: the number of its updates, their time, and the rate of each."""

    updates: int
    seconds: float
    rates: list[float]


class UpdateStatus(TrainerCallback):
    """Callback that shows the updates of a training in the status line."""

    def __init__(self, status: StatusLine) -> None:
        self._status = status

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._status.step = f"update {state.global_step} of {state.max_steps}"


def train(
    settings: Settings, folder: Path, status: StatusLine, seconds: float | None = None
) -> Trained:
    """Train as `contaccum train` does, in the folder `TRAINING_FOLDER`, which then has the model.

    A finished training is not repeated. One that was killed goes on from its last checkpoint.

    Args:
        seconds: the time for the updates; see `ContAccumTrainer`. None: as long as they take.

    Raises:
        UserError: for settings, data or a model that cannot be used.
    """
    output = folder / TRAINING_FOLDER
    if work.on_first_rank(work.read_result, output) is None:
        settings = replace(
            settings,
            output_dir=str(output),
            resume_from_checkpoint="auto",
            save_strategy="no",
            logging_strategy="no",
        )
        callbacks = [UpdateStatus(status)]
        train_and_save(settings, seconds, print_line=lambda line: None, callbacks=callbacks)
        gc.collect()  # a trainer and its model refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def read() -> Trained:
        for checkpoint in output.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
        lines = read_log(output / TRAIN_LOG)
        rates = [line["learning_rate"] for line in lines]
        return Trained(len(lines), sum(line["seconds"] for line in lines), rates)

    return work.on_first_rank(read)
