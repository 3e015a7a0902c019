"""Callbacks around updates: the order of data, the log, evaluation with early stopping, signals.

transformers decides when to evaluate, which model is best and when to save. An evaluation leaves no
trace in training: random numbers, clock and peak memory are as before it.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from transformers import (
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import IntervalStrategy

from contaccum.distributed import over_ranks
from contaccum.errors import ConfigError
from contaccum.losses.contaccum import ContAccumLoss
from contaccum.training import log
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.random_states import RandomStates
from contaccum.training.resources import peak_memory_mb, reset_peak_memory
from contaccum.training.updates import Updates

logger = logging.getLogger(__name__)

# Prefixes of the numbers in an update's record that transformers' logs and trackers get.
_TRACKED = (
    "grad_norm_",
    "bank_",
    "drift_",
    "in_batch_mass",
    "embedding_spread",
    "columns",
    "masked",
    "pairs_per_",
    "peak_mem",
)
# Numbers of the loss in an update's record.
_OF_THE_LOSS = ("masked", "embedding_spread", "distill_loss")


SignalHandler = Callable[[int, FrameType | None], Any] | int | None


class RunCallback(TrainerCallback):
    """The beginning of a run and of its epochs and updates.

    Args:
        begin: called when everything is ready for the first update.
        set_epoch: called with each epoch, counted from 0.
        refresh_negatives: called with the number of updates done, before each update; None without
            mining in training.
    """

    def __init__(
        self,
        begin: Callable[[], None],
        set_epoch: Callable[[int], None],
        refresh_negatives: Callable[[int], None] | None,
    ) -> None:
        self._begin = begin
        self._set_epoch = set_epoch
        self._refresh_negatives = refresh_negatives

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._begin()
        if state.is_world_process_zero:
            folder = Path(str(args.output_dir))
            log.keep_log_until(folder / log.TRAIN_LOG, state.global_step)
            log.keep_log_until(folder / log.EVAL_LOG, state.global_step or -1)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._set_epoch(int(state.epoch or 0))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._refresh_negatives is not None:
            self._refresh_negatives(state.global_step)


class UpdateLogCallback(TrainerCallback):
    """A line in the log for each update, and a warning when training collapses.

    Args:
        updates: the updates of the run.
        bank_losses: every ContAccumLoss that trains.
    """

    def __init__(self, updates: Updates, bank_losses: Sequence[ContAccumLoss]) -> None:
        self._updates = updates
        self._bank_losses = bank_losses
        self._collapse = log.CollapseWatch()
        self._last: log.Record = {}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        record = self._measure_update(args, state)
        losses = [loss for loss in self._bank_losses if loss.last]
        record["bank_fill"] = sum(int(loss.last.get("bank_fill", 0)) for loss in losses)
        if losses:
            record |= _numbers_of_loss(losses[0])
            for warning in self._collapse.observe(record):
                logger.warning(warning)
        self._last = record | self._updates.current.log_entries
        if state.is_world_process_zero:
            log.append_line(Path(str(args.output_dir)) / log.TRAIN_LOG, self._last)
        self._updates.begin(state.global_step + 1)

    def _measure_update(self, args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
        """Return the numbers of the current update that do not come from the loss."""
        update = self._updates.current
        num_pairs = update.num_pairs * args.world_size
        seconds = time.perf_counter() - update.started
        loss = over_ranks("SUM", torch.stack(update.losses).sum())
        return {
            "update": state.global_step,
            "epoch": round(float(state.epoch or 0), 6),
            "loss": float(loss) / args.world_size,
            "learning_rate": update.learning_rate,
            **update.grad_norms,
            "bank_fill": 0,
            "pairs": num_pairs,
            "seconds": seconds,
            "pairs_per_second": num_pairs / seconds,
            "peak_memory_mb": peak_memory_mb(args.device),
        }

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        tracked = {key: value for key, value in self._last.items() if key.startswith(_TRACKED)}
        logs.update(tracked)  # trackers and terminal are called later, and get them as well
        state.log_history[-1].update(tracked)


def _numbers_of_loss(loss: ContAccumLoss) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for key, value in loss.last.items():
        if key in _OF_THE_LOSS:
            numbers[key] = float(value)
    numbers["columns"] = int(loss.last["columns"])
    if loss.info_nce is not None:
        numbers |= loss.info_nce.drift_record()
    return numbers


def choose_metric(args: ContAccumTrainingArguments, evaluator: Any, has_eval_dataset: bool) -> None:
    """Set what the best model is measured by to the evaluator's metric, unless the user chose one.

    Raises:
        ConfigError: for a metric that the evaluator does not measure.
    """
    names = getattr(evaluator, "metrics", ())
    if not (args.keeps_best and names):
        return
    metric = str(args.metric_for_best_model).removeprefix("eval_")
    if metric == "None" or (metric == "loss" and not has_eval_dataset):
        args.metric_for_best_model = f"eval_{evaluator.primary_metric}"
        args.greater_is_better = True
    elif "@" in metric and metric not in names:
        raise ConfigError(
            f"metric_for_best_model={metric}: the evaluator measures {', '.join(names)}"
        )


class EvaluationCallback(EarlyStoppingCallback):
    """Early stopping that goes on in a resumed run, and a line in the log for each evaluation.

    With ``eval_strategy=steps`` there is an evaluation after the last update too.

    Args:
        patience: evaluations in a row without a better one before a run stops; None: it does not.
        updates: the updates of the run, whose clock an evaluation does not count in.
        is_in_train: returns whether the trainer trains; other evaluations are not logged.
    """

    def __init__(
        self, patience: int | None, updates: Updates, is_in_train: Callable[[], bool]
    ) -> None:
        super().__init__(patience or sys.maxsize)
        self._has_patience = patience is not None
        self._updates = updates
        self._is_in_train = is_in_train
        self._random_states: RandomStates | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        saved: dict[str, int] = {}
        name = type(self).__name__
        # A dictionary, once the state is made.
        states = cast(dict[str, dict], state.stateful_callbacks)
        if state.global_step:
            saved = states.get(name, {}).get("attributes", {})
        self.early_stopping_patience_counter = saved.get("early_stopping_patience_counter", 0)
        states[name] = self.state()
        self._random_states = RandomStates.capture()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        is_last = state.global_step >= state.max_steps
        if is_last and args.eval_strategy == IntervalStrategy.STEPS:
            control.should_evaluate = True
        self._random_states = RandomStates.capture()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._random_states = RandomStates.capture()

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not self._is_in_train():
            return
        if state.is_world_process_zero:
            record: log.Record = {"update": state.global_step}
            for key, value in (metrics or {}).items():
                if not key.startswith(("eval_samples_", "eval_steps_")):
                    record[key] = value
            log.append_line(Path(str(args.output_dir)) / log.EVAL_LOG, record)
        if self._has_patience and state.global_step:
            self._count_evaluation(args, state, control, metrics, **kwargs)
        if self._random_states is not None:
            self._random_states.restore()
        self._updates.current.started = time.perf_counter()
        reset_peak_memory(args.device)

    def _count_evaluation(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None,
        **kwargs: Any,
    ) -> None:
        """Stop the run after too many evaluations without a better one."""
        super().on_evaluate(args, state, control, metrics=metrics, **kwargs)
        stops = self.early_stopping_patience_counter >= self.early_stopping_patience
        if stops and state.is_world_process_zero:
            logger.warning(
                f"stopped early after update {state.global_step}: no better "
                f"{args.metric_for_best_model} than {state.best_metric:.4f} of update "
                f"{state.best_global_step}"
            )


class SignalCallback(TrainerCallback):
    """SIGTERM and SIGINT as requests to end the update, save a checkpoint and stop.

    `SystemExit` is raised then, with 128 plus the signal's number: 143 or 130. transformers' own
    callback saves inside an update, when its pairs are in the bank already, and ends with code 0.
    The handlers are installed within ``with``, and only in the main thread, because Python allows
    no other. A second signal does what it did before.
    """

    def __init__(self) -> None:
        self.received = 0
        self._previous_handlers: dict[int, SignalHandler] = {}

    def __enter__(self) -> SignalCallback:
        self.received = 0
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous_handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.__exit__()
        name = signal.Signals(number).name
        print(
            f"contaccum: {name}: saving a checkpoint after this update; a second ends at once",
            file=sys.stderr,
        )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Ranks stop together, even where only one of them received the signal.
        received = torch.tensor(self.received, device=args.device)
        self.received = int(over_ranks("MAX", received))
        if self.received:
            control.should_save = True
            control.should_training_stop = True
            control.should_evaluate = False

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.received and control.should_training_stop:
            folder = f"{args.output_dir}/checkpoint-{state.global_step}"
            if state.is_world_process_zero:
                print(f"stopped; saved {folder}: go on with --resume_from_checkpoint last")
            raise SystemExit(128 + self.received)
