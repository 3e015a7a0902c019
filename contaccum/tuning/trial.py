"""One trial: a run with some settings, scored on dev halfway and at its end, and not kept."""

from __future__ import annotations

import gc
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from contaccum.comparison.plan import as_tokens
from contaccum.distributed import rank, share
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.training.config import parse
from contaccum.training.run import load_encoder, load_run_data, make_trainer

Options = Mapping[str, Sequence[str]]
"""Key of `contaccum train` -> its values, as text."""

QueryScores = dict[str, float]
"""{query id: its score by the evaluator's primary metric}"""

_MEASURED_UPDATES = 2  # after which the time of a trial is known


class TooSlow(Exception):
    """A trial that would take longer than it may.

    Attributes:
        updates: that fit into the time; may be 0.
        seconds: that the whole trial would take.
        seconds_per_update: of them.
    """

    def __init__(self, updates: int, seconds: float, seconds_per_update: float) -> None:
        super().__init__(f"it would take {seconds:.0f} seconds")
        self.updates = updates
        self.seconds = seconds
        self.seconds_per_update = seconds_per_update


class Outcome(NamedTuple):
    """What a trial has found.

    Attributes:
        query_scores: at the end of training; None if the trial was stopped halfway.
        score: their mean.
        seconds: of the whole trial: loading, training and scoring.
    """

    query_scores: QueryScores | None
    score: float | None
    seconds: float
    updates: int


def run_trial(
    options: Options,
    evaluator: RetrievalEvaluator,
    folder: Path,
    most_seconds: float,
    is_hopeless: Callable[[QueryScores], bool],
) -> Outcome:
    """Train and score a model.

    Args:
        options: of the run, without an ``output_dir``.
        evaluator: scores the model halfway and at the end.
        folder: of the run; removed afterwards.
        most_seconds: that the trial may take.
        is_hopeless: called with the scores halfway; True stops the trial. Every process of a run
            on several calls it, and must get the same answer.

    Raises:
        TooSlow: after a few updates, if the trial would take longer than ``most_seconds``.
        UserError: for settings, data or a model that cannot be used.
    """
    started = time.perf_counter()
    evaluator.documents = (
        None  # those of an earlier trial; a trainer whose documents stand still sets its own
    )
    fixed = {"output_dir": [str(folder)], "save_strategy": ["no"], "disable_tqdm": ["true"]}
    fixed |= {"overwrite_output_dir": ["true"], "logging_strategy": ["no"]}
    model_args, data_args, args = parse(as_tokens({**options, **fixed}))
    data = load_run_data(data_args, args)._replace(evaluator=evaluator)
    updates = count_updates(len(data.training.dataset), args)
    args.eval_strategy = IntervalStrategy.STEPS
    args.eval_steps = math.ceil(updates / 2)
    watch = _Watch(evaluator, updates, most_seconds, is_hopeless)
    with _no_progress_bars():
        encoder = load_encoder(model_args, args)
    encoder.model_card_data.generate_widget_examples = False  # nobody reads the card of a trial
    trainer = make_trainer(encoder, model_args, args, data, callbacks=[watch])
    trainer.remove_callback(PrinterCallback)  # the search says what a trial has found
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
    if watch.was_stopped:
        return Outcome(None, None, seconds, updates)
    scores = share(evaluator.query_scores)  # of several processes, the first one scores
    return Outcome(scores, statistics.fmean(scores.values()), seconds, updates)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Hide the bars of transformers, which would stand between the lines of a search."""
    was_enabled = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers.utils.logging.enable_progress_bar()


def count_updates(rows: int, args: Any) -> int:
    """Return the updates of a run over so many rows."""
    if args.max_steps > 0:
        return int(args.max_steps)
    per_epoch = math.ceil(rows / args.total_train_batch_size)
    return max(1, math.ceil(per_epoch * args.num_train_epochs))


class _Watch(TrainerCallback):
    """Measures the time of updates, and stops a trial that is too slow or hopeless."""

    def __init__(
        self,
        evaluator: RetrievalEvaluator,
        updates: int,
        most_seconds: float,
        is_hopeless: Callable[[QueryScores], bool],
    ) -> None:
        self.was_stopped = False
        self._evaluator = evaluator
        self._updates = updates
        self._most_seconds = most_seconds
        self._is_hopeless = is_hopeless
        self._started = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._started = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step != _MEASURED_UPDATES:
            return
        # All processes must decide alike.
        seconds_per_update = share((time.perf_counter() - self._started) / state.global_step)
        seconds = seconds_per_update * self._updates
        if seconds > self._most_seconds:
            raise TooSlow(int(self._most_seconds / seconds_per_update), seconds, seconds_per_update)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        is_last = state.global_step >= state.max_steps
        if not is_last and self._is_hopeless(dict(self._evaluator.query_scores)):
            self.was_stopped = True
            control.should_training_stop = True
