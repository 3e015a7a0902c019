"""One trial of a search: a training with some settings, scored on dev halfway and at its end.

A trial is given up after two updates if it would take too long, and halfway if its scores are bad.
Only the scores of a trial are used; its model is not saved.
"""

from __future__ import annotations

import gc
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import (
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import IntervalStrategy

from contaccum.distributed import rank, share
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.checkpoint import count_rows
from contaccum.training.run import load_encoder, load_run_data, make_trainer
from contaccum.tuning.options import Options, parse, to_command_line

QueryScores = dict[str, float]
"""{query id: its score by the evaluator's primary metric}"""

_OPTIONS_OF_TRIAL: Options = {
    "save_strategy": ["no"],
    "disable_tqdm": ["true"],
    "overwrite_output_dir": ["true"],
    "logging_strategy": ["no"],
}

_MEASURED_UPDATES = 2  # the time of all updates is estimated from the time of the first ones


class TooSlow(Exception):
    """The error of a trial that would take longer than ``max_seconds`` of `run_trial`.

    Attributes:
        updates: the number of updates that are possible in ``max_seconds``; may be 0.
        seconds: the estimated time of all updates.
        seconds_per_update: the measured time of an update.
    """

    def __init__(self, updates: int, seconds: float, seconds_per_update: float) -> None:
        super().__init__(f"it would take {seconds:.0f} seconds")
        self.updates = updates
        self.seconds = seconds
        self.seconds_per_update = seconds_per_update


class Outcome(NamedTuple):
    """The result of a trial.

    Attributes:
        query_scores: the scores at the end of training; None if the trial was stopped halfway.
        score: the mean of ``query_scores``; None if the trial was stopped halfway.
        seconds: the time of the whole trial: loading, training and scoring.
        updates: the number of updates that the trial has if it is not stopped.
        seconds_per_update: the time of an update near the end of the trial, without evaluations.
    """

    query_scores: QueryScores | None
    score: float | None
    seconds: float
    updates: int
    seconds_per_update: float


def run_trial(
    options: Options,
    evaluator: RetrievalEvaluator,
    folder: Path,
    max_seconds: float,
    is_hopeless: Callable[[QueryScores], bool],
) -> Outcome:
    """Train and score a model.

    Args:
        options: the options of the run, without ``output_dir``.
        evaluator: scores the model halfway and at the end.
        folder: the output folder of the run, which is removed afterwards.
        max_seconds: the time that the updates may take.
        is_hopeless: is called with the scores halfway; the trial is stopped if it returns True. In
            distributed training every process calls it, and it must return the same on all.

    Raises:
        TooSlow: after a few updates, if the trial would take longer than ``max_seconds``.
        UserError: for settings, data or a model that cannot be used.
    """
    started = time.perf_counter()
    # An earlier trial may have left document embeddings here. A query-side trainer sets the
    # embeddings of its own store, and in other trials the evaluator encodes the documents.
    evaluator.documents = None
    all_options = {**options, **_OPTIONS_OF_TRIAL, "output_dir": [str(folder)]}
    settings, args = parse(to_command_line(all_options))
    data = load_run_data(settings, args)._replace(evaluator=evaluator)
    num_updates = count_updates(data.training.dataset, args)
    args.eval_strategy = IntervalStrategy.STEPS
    args.eval_steps = math.ceil(num_updates / 2)
    monitor = _TrialMonitor(evaluator, num_updates, max_seconds, is_hopeless)
    with _hide_progress_bars():
        encoder = load_encoder(settings, args)
    encoder.model_card_data.generate_widget_examples = False  # the model card is not kept
    trainer = make_trainer(encoder, settings, args, data, callbacks=[monitor])
    trainer.remove_callback(PrinterCallback)  # the search prints the score of the trial
    trainer.signals.saves_checkpoint = False  # the folder is removed below
    try:
        trainer.train()
    finally:
        del trainer, encoder
        gc.collect()  # a trainer and its model refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    seconds = time.perf_counter() - started
    seconds_per_update = monitor.get_latest_speed()
    if monitor.was_stopped:
        return Outcome(None, None, seconds, num_updates, seconds_per_update)
    query_scores = share(evaluator.query_scores)  # only the first process has scores
    score = statistics.fmean(query_scores.values())
    return Outcome(query_scores, score, seconds, num_updates, seconds_per_update)


@contextmanager
def _hide_progress_bars() -> Iterator[None]:
    """Hide the progress bars of transformers, which would appear between the lines of a search."""
    was_enabled = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers.utils.logging.enable_progress_bar()


def count_updates(dataset: Any, args: ContAccumTrainingArguments) -> int:
    """Return the number of updates of a run on a training set, or a dictionary of training sets."""
    if args.max_steps > 0:
        return int(args.max_steps)
    num_rows = count_rows(dataset)
    assert num_rows is not None  # streams have no length, but they need max_steps
    assert args.total_train_batch_size is not None  # computed when the arguments are created
    updates_per_epoch = math.ceil(num_rows / args.total_train_batch_size)
    return max(1, math.ceil(updates_per_epoch * args.num_train_epochs))


class _TrialMonitor(TrainerCallback):
    """A callback that measures the time of updates, and stops a slow or hopeless trial."""

    def __init__(
        self,
        evaluator: RetrievalEvaluator,
        num_updates: int,
        max_seconds: float,
        is_hopeless: Callable[[QueryScores], bool],
    ) -> None:
        self.was_stopped = False
        self._evaluator = evaluator
        self._num_updates = num_updates
        self._max_seconds = max_seconds
        self._is_hopeless = is_hopeless
        self._started = 0.0
        self._last_end = 0.0  # of an update, or of the evaluation after it
        self._update_seconds: list[float] = []

    def get_latest_speed(self) -> float:
        """Return the median time of an update in the second half of the updates."""
        return statistics.median(self._update_seconds[len(self._update_seconds) // 2 :])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._started = self._last_end = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        now = time.perf_counter()
        self._update_seconds.append(now - self._last_end)
        self._last_end = now
        if state.global_step != _MEASURED_UPDATES:
            return
        elapsed = now - self._started
        # All processes use the time of the first process, so that they make the same decision.
        seconds_per_update = share(elapsed / state.global_step)
        seconds = seconds_per_update * self._num_updates
        if seconds > self._max_seconds:
            possible_updates = int(self._max_seconds / seconds_per_update)
            raise TooSlow(possible_updates, seconds, seconds_per_update)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        is_last = state.global_step >= state.max_steps
        if not is_last and self._is_hopeless(dict(self._evaluator.query_scores)):
            self.was_stopped = True
            control.should_training_stop = True
        self._last_end = time.perf_counter()
