"""Callbacks of the trainer: start of a run, log, evaluation with early stopping, signals.

transformers decides when to evaluate, which model is best and when to save. An evaluation must
not change the training or its measurements. So after an evaluation, the states of the random
number generators are restored, and the clock and the measurement of peak memory start again.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
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
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.log import (
    EVAL_LOG,
    TRAIN_LOG,
    CollapseWatch,
    Record,
    append_line,
    truncate_log,
)
from contaccum.training.losses import iter_bank_losses, list_losses
from contaccum.training.random_states import RandomStates
from contaccum.training.resources import peak_memory_mb, reset_peak_memory
from contaccum.training.update import Updates

logger = logging.getLogger(__name__)

# Entries of an update's record with these prefixes are also passed to transformers' log, and so to
# trackers such as TensorBoard.
_TRACKED_PREFIXES = (
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
# Entries of ContAccumLoss.last (the measurements of its last micro-step) that an update's record
# contains, if the loss has them.
_LOSS_ENTRIES = ("masked", "embedding_spread", "distill_loss")

SignalHandler = Callable[[int, FrameType | None], Any] | int | None
"""A signal handler, as `signal.signal` returns it."""


class RunCallback(TrainerCallback):
    """Callback that calls functions of the trainer at the start of a run and of an epoch.

    Args:
        start_run: called before the first update, when transformers has prepared everything.
        set_epoch: called at the start of each epoch with its number, from 0.
    """

    def __init__(self, start_run: Callable[[], None], set_epoch: Callable[[int], None]) -> None:
        self._start_run = start_run
        self._set_epoch = set_epoch

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._start_run()
        if state.is_world_process_zero:
            # A resumed run repeats the updates after its checkpoint, and logs them again.
            folder = Path(str(args.output_dir))
            truncate_log(folder / TRAIN_LOG, state.global_step)
            # An evaluation before the first update has the number 0. A new run drops it too.
            last_evaluation = state.global_step or -1
            truncate_log(folder / EVAL_LOG, last_evaluation)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._set_epoch(int(state.epoch or 0))


class UpdateLogCallback(TrainerCallback):
    """Callback that writes a line in the log for each update, and warns when training collapses.

    Args:
        updates: the updates of the run.
        loss: the training loss, or a dictionary with one loss for each data set.
    """

    def __init__(self, updates: Updates, loss: Any) -> None:
        self._updates = updates
        self._bank_losses = list(iter_bank_losses(loss))
        # A random guess among all documents that a query is compared with has the loss
        # log(columns). The logged loss of a ContAccumLoss is the mean over the update's own
        # queries, so it can be compared with that. Other losses may have further terms.
        # With several of them, the logged loss is that of all, and the columns are of one.
        self._is_loss_comparable_to_guess = len(self._bank_losses) == 1 and all(
            isinstance(part, ContAccumLoss) for part in list_losses(loss)
        )
        self._collapse_watch = CollapseWatch()
        self._last_record: Record = {}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        record = self._measure_update(args, state)
        # With several data sets, some losses have not been called yet, and have no measurements.
        losses = [loss for loss in self._bank_losses if loss.last]
        record["bank_fill"] = sum(int(loss.last.get("bank_fill", 0)) for loss in losses)
        if losses:
            # Of several losses, the first one's: its last micro-step may be of an earlier update.
            record |= _measure_loss(losses[0])
            if not self._is_loss_comparable_to_guess:
                record["loss_has_other_terms"] = True
        for warning in self._collapse_watch.observe(record):
            logger.warning(warning)
        self._last_record = record | self._updates.current.log_entries
        if state.is_world_process_zero:
            append_line(Path(str(args.output_dir)) / TRAIN_LOG, self._last_record)
        self._updates.end_update()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._updates.restart_clock()  # the time of the checkpoint is not that of the next update

    def _measure_update(self, args: TrainingArguments, state: TrainerState) -> Record:
        """Return the measurements of the current update, without those of banks and losses."""
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
            "bank_fill": 0,  # its place in the line; `on_step_end` sets it
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
        tracked = {}
        for key, value in self._last_record.items():
            if key.startswith(_TRACKED_PREFIXES):
                tracked[key] = value
        # The callbacks of trackers and of the terminal output run later, with the same ``logs``.
        logs.update(tracked)
        state.log_history[-1].update(tracked)


def _measure_loss(loss: ContAccumLoss) -> dict[str, float]:
    """Return the measurements of a loss and its bank in its last micro-step."""
    measurements: dict[str, float] = {}
    for key, value in loss.last.items():
        if key in _LOSS_ENTRIES:
            measurements[key] = float(value)
    measurements["columns"] = int(loss.last["columns"])
    if loss.info_nce is not None:
        measurements |= loss.info_nce.drift_record()
    return measurements


def choose_metric(args: ContAccumTrainingArguments, evaluator: Any, has_eval_dataset: bool) -> None:
    """Set ``metric_for_best_model`` if the run needs a metric and the user has set none.

    It becomes the main metric of the evaluator, or the loss if there is only an evaluation data
    set. transformers' default is "loss", which exists only with an evaluation data set.

    Args:
        args: the arguments of the run, which are changed.
        evaluator: an evaluator of contaccum or sentence-transformers, or None.
        has_eval_dataset: whether the loss of an evaluation data set is computed.

    Raises:
        ConfigError: for a metric that the evaluator does not compute, or if the main metric of the
            evaluator is not known yet.
    """
    if not args.needs_best_checkpoint:
        return
    metric = (args.metric_for_best_model or "").removeprefix("eval_")
    metrics = getattr(evaluator, "metrics", ())  # only evaluators of contaccum list their metrics
    is_unset = not metric or (metric == "loss" and not has_eval_dataset)
    if not is_unset:
        # Names without "@", such as "loss", are not those of the evaluator's metrics.
        if metrics and "@" in metric and metric not in metrics:
            raise ConfigError(
                f"metric_for_best_model={metric}: the evaluator computes {', '.join(metrics)}. Set "
                "one of them"
            )
        return
    if evaluator is None:
        args.metric_for_best_model = "loss"
        args.greater_is_better = False
        return
    primary_metric = getattr(evaluator, "primary_metric", None)
    if primary_metric is None:
        raise ConfigError(
            f"metric_for_best_model is not set, and {type(evaluator).__name__} chooses its main "
            "metric only in its first evaluation. Set metric_for_best_model to one of its metrics"
        )
    # An evaluator of sentence-transformers puts its name before its metrics when it is called.
    name = getattr(evaluator, "name", "")
    if name and not metrics and not primary_metric.startswith(f"{name}_"):
        primary_metric = f"{name}_{primary_metric}"
    args.metric_for_best_model = f"eval_{primary_metric}"
    args.greater_is_better = getattr(evaluator, "greater_is_better", True)


class EvaluationCallback(EarlyStoppingCallback):
    """Callback for early stopping, also across resumed runs, and for the log of evaluations.

    With ``eval_strategy=steps``, the model is also evaluated after the last update. The states of
    the random number generators are captured after every update, because the next event may be an
    evaluation.

    Args:
        patience: number of evaluations in a row without improvement after which the run stops;
            None disables early stopping.
        updates: the updates of the run. The clock of the current one starts again after an
            evaluation.
        is_in_train: returns whether the trainer is training. An evaluation that the user starts
            outside of training is not logged.
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
        # transformers saves the states of callbacks in checkpoints, but restores them only with the
        # argument restore_callback_states_from_checkpoint.
        saved_attributes: dict[str, int] = {}
        name = type(self).__name__
        # stateful_callbacks may be a list by its type, but TrainerState makes it a dictionary.
        callback_states = cast(dict[str, dict], state.stateful_callbacks)
        if state.global_step:  # the run is resumed
            saved_attributes = callback_states.get(name, {}).get("attributes", {})
        counter = saved_attributes.get("early_stopping_patience_counter", 0)
        self.early_stopping_patience_counter = counter
        # transformers needs the entry when it saves a checkpoint. That of a run without evaluation,
        # which may be resumed with it, has none.
        callback_states[name] = self.state()
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
            record: Record = {"update": state.global_step}
            for key, value in (metrics or {}).items():
                if not key.startswith(("eval_samples_", "eval_steps_")):
                    record[key] = value
            append_line(Path(str(args.output_dir)) / EVAL_LOG, record)
        if self._has_patience and state.global_step:
            super().on_evaluate(args, state, control, metrics=metrics, **kwargs)
            is_stopping = self.early_stopping_patience_counter >= self.early_stopping_patience
            if is_stopping and state.is_world_process_zero:
                logger.warning(
                    f"stopped early after update {state.global_step}: no better "
                    f"{args.metric_for_best_model} than {state.best_metric:.4f} of update "
                    f"{state.best_global_step}. To train on, raise early_stopping_patience and "
                    "resume"
                )
        if self._random_states is not None:
            self._random_states.restore()
        self._updates.restart_clock()
        reset_peak_memory(args.device)


class SignalCallback(TrainerCallback):
    """Callback that stops on SIGTERM and SIGINT: finish the update, save, raise SystemExit.

    The exit code is 128 plus the signal's number, 143 or 130. transformers' JITCheckpointCallback
    cannot be used: it saves within an update, when pairs of that update are already in the bank,
    and exits with code 0.

    The signal handlers are installed within a ``with`` block, and only in the main thread, because
    Python allows no other. After the first signal, the previous handlers are restored, so that a
    second signal stops the process at once.

    Attributes:
        received: number of the received signal; 0 before any.
        saves_checkpoint: False for a run that no later start resumes, such as a trial of a search.
            It stops after the update without a checkpoint.
    """

    def __init__(self) -> None:
        self.received = 0
        self.saves_checkpoint = True
        self._previous_handlers: dict[int, SignalHandler] = {}

    def __enter__(self) -> SignalCallback:
        self.received = 0
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous_handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._previous_handlers.items():
            # None stands for a handler that was not set by Python, and cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous_handlers = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore_handlers()
        name = signal.Signals(number).name
        plan = "stopping after this update. Send it again to stop at once"
        if self.saves_checkpoint:
            plan = (
                "saving a checkpoint after this update. Send it again to stop without a checkpoint"
            )
        print(f"contaccum: {name}: {plan}", file=sys.stderr)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # All ranks must stop after the same update, even if only one of them received the signal.
        received = torch.tensor(self.received, device=args.device)
        self.received = int(over_ranks("MAX", received))
        if not self.received:
            return
        if not self.saves_checkpoint:
            if state.is_world_process_zero:
                print("stopped. Start the same command again to continue")
            raise SystemExit(128 + self.received)
        control.should_save = True
        control.should_training_stop = True
        control.should_evaluate = False  # so that the process stops soon

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.received and control.should_training_stop:
            folder = f"{args.output_dir}/checkpoint-{state.global_step}"
            hint = "Continue with --resume_from_checkpoint last"
            # The final training of `contaccum fit`, a command without --resume_from_checkpoint,
            # resumes with "auto".
            if str(args.resume_from_checkpoint).lower() == "auto":
                hint = "Start the same command again to continue"
            if state.is_world_process_zero:
                print(f"stopped; saved {folder}. {hint}")
            raise SystemExit(128 + self.received)
