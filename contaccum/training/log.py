"""The log of a run, with a line per update and per evaluation, and the callbacks of the trainer."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from transformers import EarlyStoppingCallback, ProgressCallback, TrainerCallback, TrainerState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from contaccum.bank.diagnostics import measure_drift
from contaccum.distributed import over_ranks
from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.files import write_text
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.losses import list_bank_losses
from contaccum.training.micro_batch import peak_memory_mb
from contaccum.training.update import REMEDY_WITHOUT_NEGATIVES, Updates

logger = logging.getLogger(__name__)

TRAIN_LOG = "train_log.jsonl"  # one record per update
EVAL_LOG = "eval_log.jsonl"  # one record per evaluation during training
Record = dict[str, Any]
"""A line of a log: numbers and texts by name."""


def read_log(path: str | os.PathLike[str]) -> list[Record]:
    """Return the records of a log.

    Raises:
        DataError: for a file that cannot be read, or a line that is not a record.
    """
    records = []
    try:
        texts = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    for number, line in enumerate(texts, start=1):
        try:
            # Readers rely on these two keys. A line about an evaluation has no loss.
            records.append({"update": None, "loss": None, **json.loads(line)})
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}:{number}: not a log record") from error
    return records


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record to a log as a line of JSON; a number that is not finite becomes null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    finite_record = {}
    for key, value in record.items():
        is_finite = not isinstance(value, float) or math.isfinite(value)
        finite_record[key] = value if is_finite else None
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(finite_record) + "\n")


def truncate_log(path: Path, update: int) -> None:
    """Drop the lines after update number ``update``, because the run will repeat these updates."""
    if not path.is_file():
        return
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if line.endswith("\n") and json.loads(line)["update"] <= update:
                lines.append(line)
        except (ValueError, KeyError):  # a kill or a full disk has cut the line short
            continue
    write_text(path, lines)


_MIN_SPREAD = 1e-3
_MIN_AGED_MASS = 0.02  # softmax mass of an old banked negative / mass of a fresh negative
_SYMPTOM_UPDATES = {"spread": 3, "bank": 3, "masked": 1}
"""Number of updates in a row with a symptom of `CollapseWatch` before the warning."""


class CollapseWatch:
    """Detector of collapses, which returns one warning for each kind."""

    def __init__(self) -> None:
        self._streaks = dict.fromkeys(_SYMPTOM_UPDATES, 0)  # updates in a row with the symptom

    def observe(self, record: Mapping[str, Any]) -> list[str]:
        """Return the warnings after an update, one line each; ``record`` is its line of the log."""
        remedy = "Lower learning_rate"
        if "bank_age" in record:  # the run has a bank
            remedy += ", or set a smaller bank_size; keep drift_compensation=auto"
        symptoms = {}
        spread = record.get("embedding_spread", math.inf)
        if spread < _MIN_SPREAD:
            symptoms["spread"] = (
                "collapse: all passages of a micro-batch have nearly the same embedding (spread "
                f"{spread:.1e}). {remedy}"
            )
        # With little aged mass, the loss only separates new embeddings from old ones.
        aged_mass = record.get("bank_mass_aged", math.inf)
        if aged_mass < _MIN_AGED_MASS:
            symptoms["bank"] = (
                f"collapse: banked negatives from earlier updates get {aged_mass:.1%} of the "
                f"softmax mass of a fresh negative. {remedy}"
            )
        if record.get("masked") == 1:
            symptoms["masked"] = (
                "every negative of a micro-step is masked as a false negative, so its queries have "
                f"no negatives. {REMEDY_WITHOUT_NEGATIVES}"
            )
        warnings = []
        for name, num_updates in _SYMPTOM_UPDATES.items():
            if self._streaks[name] >= num_updates:  # this warning was returned before
                continue
            self._streaks[name] = self._streaks[name] + 1 if name in symptoms else 0
            if self._streaks[name] == num_updates:
                warnings.append(f"update {record.get('update')}: {symptoms[name]}.")
        return warnings


# Callbacks ----------------------------------------------------------------------------------------


class UpdateLogCallback(TrainerCallback):
    """Callback that starts a run, writes a line for each update, and warns of a collapse.

    Args:
        start_run: called before the first update, when transformers has prepared everything.
        set_epoch: called at the start of each epoch with its number, from 0.
    """

    def __init__(
        self,
        updates: Updates,
        loss: Any,
        start_run: Callable[[], None],
        set_epoch: Callable[[int], None],
    ) -> None:
        self._updates = updates
        self._start_run = start_run
        self._set_epoch = set_epoch
        self._bank_losses = list_bank_losses(loss)
        self._collapse_watch = CollapseWatch()
        self._last_record: Record = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._start_run()
        if state.is_world_process_zero:
            # A resumed run repeats the updates after its checkpoint, and logs them again.
            folder = Path(str(args.output_dir))
            truncate_log(folder / TRAIN_LOG, state.global_step)
            # An evaluation before the first update has the number 0. A new run drops it too.
            truncate_log(folder / EVAL_LOG, state.global_step or -1)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._set_epoch(int(state.epoch or 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        update = self._updates.current
        num_pairs = sum(update.pairs) * args.world_size
        seconds = time.perf_counter() - update.started
        loss_of_ranks = over_ranks("SUM", torch.stack([loss for _, loss in update.losses]).sum())
        losses = [loss for loss in self._bank_losses if loss.last]  # that have been called
        record: Record = {
            "update": state.global_step,
            "epoch": round(float(state.epoch or 0), 6),
            "loss": float(loss_of_ranks) / args.world_size,
            "learning_rate": update.learning_rate,
            **update.grad_norms,
            "bank_fill": sum(int(loss.last.get("bank_fill", 0)) for loss in losses),
            "pairs": num_pairs,
            "seconds": seconds,
            "pairs_per_second": num_pairs / seconds,
            "peak_memory_mb": peak_memory_mb(args.device),
        }
        if losses:
            loss = losses[0]
            for key, value in loss.last.items():
                number = value.item() if isinstance(value, torch.Tensor) else value
                if key not in (*record, "local_loss") and math.isfinite(number):
                    record[key] = number
            assert loss.info_nce is not None  # the loss has been called
            probe = loss.info_nce.compensation.probe
            if probe is not None:
                record |= measure_drift(probe, record["bank_age"])
        for warning in self._collapse_watch.observe(record):
            logger.warning(warning)
        self._last_record = record | update.log_entries
        if state.is_world_process_zero:
            append_line(Path(str(args.output_dir)) / TRAIN_LOG, self._last_record)
        self._updates.end_update()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # The time of the checkpoint is not that of the next update.
        self._updates.current.started = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs is None or "loss" not in logs:
            return
        new = {key: x for key, x in self._last_record.items() if key not in logs}
        tracked = {key: x for key, x in new.items() if isinstance(x, (int, float))}
        # The callbacks of trackers and of the terminal output run later, with the same ``logs``.
        logs.update(tracked)
        state.log_history[-1].update(tracked)


def choose_metric(args: ContAccumTrainingArguments, evaluator: Any, has_eval_dataset: bool) -> None:
    """Set ``metric_for_best_model`` if the run needs a metric and the user has set none.

    It becomes the main metric of a `RetrievalEvaluator`, or the loss without an evaluator.

    Raises:
        ConfigError: for an evaluator that chooses its main metric only in its first evaluation.
    """
    saves_best = args.save_strategy == SaveStrategy.BEST
    stops_early = args.early_stopping_patience is not None
    if not (args.load_best_model_at_end or saves_best or stops_early):
        return
    # transformers' default is "loss", which exists only with an evaluation data set.
    metric = (args.metric_for_best_model or "").removeprefix("eval_")
    if metric and (metric != "loss" or has_eval_dataset):
        return
    if evaluator is None:
        args.metric_for_best_model = "loss"
        args.greater_is_better = False
    elif isinstance(evaluator, RetrievalEvaluator):
        args.metric_for_best_model = f"eval_{evaluator.primary_metric}"
        args.greater_is_better = True
    else:
        raise ConfigError(
            f"metric_for_best_model is not set: set it to a metric of {type(evaluator).__name__}"
        )


def count_evaluations_without_gain(state: TrainerState) -> int:
    """Return the count of `EvaluationCallback` in the state of a checkpoint; 0 for a new run."""
    # stateful_callbacks may be a list by its type, but TrainerState makes it a dictionary.
    states = cast(dict[str, dict], state.stateful_callbacks) if state.global_step else {}
    attributes = states.get(EvaluationCallback.__name__, {}).get("attributes", {})
    return attributes.get("early_stopping_patience_counter", 0)


class EvaluationCallback(EarlyStoppingCallback):
    """Early stopping, also across resumed runs, if ``patience`` is not None.

    With ``eval_strategy=steps``, the model is also evaluated after the last update.
    """

    def __init__(self, patience: int | None) -> None:
        super().__init__(patience or sys.maxsize)
        self._has_patience = patience is not None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # transformers saves the states of callbacks in checkpoints, but restores them only with the
        # argument restore_callback_states_from_checkpoint.
        self.early_stopping_patience_counter = count_evaluations_without_gain(state)
        # transformers needs the entry when it saves a checkpoint. That of a run without evaluation,
        # which may be resumed with it, has none.
        cast(dict[str, dict], state.stateful_callbacks)[type(self).__name__] = self.state()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        is_last = state.global_step >= state.max_steps
        if is_last and args.eval_strategy == IntervalStrategy.STEPS:
            control.should_evaluate = True

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any
    ) -> None:
        if not (self._has_patience and state.global_step):
            return
        super().on_evaluate(args, state, control, metrics=metrics)
        is_stopping = self.early_stopping_patience_counter >= self.early_stopping_patience
        if is_stopping and state.is_world_process_zero:
            logger.warning(
                f"stopped early after update {state.global_step}: no better "
                f"{args.metric_for_best_model} than {state.best_metric:.4f} of update "
                f"{state.best_global_step}. To train on, raise early_stopping_patience and resume"
            )


class ProgressLine(ProgressCallback):
    """transformers' progress bar with the loss in it, and a line for each evaluation."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{float(logs['loss']):.3f}")

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """Show no bar of the batches of an evaluation."""

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any
    ) -> None:
        metric = str(args.metric_for_best_model).removeprefix("eval_")
        value = (metrics or {}).get(f"eval_{metric}")
        if self.training_bar is not None and value is not None:
            self.training_bar.write(f"update {state.global_step}: {metric} {value:.4f}")


class SignalCallback(TrainerCallback):
    """Callback that stops on SIGTERM and SIGINT: finish the update, save, raise SystemExit.

    The exit code is 128 plus the signal's number. transformers' JITCheckpointCallback saves within
    an update, when pairs of that update are already in the bank. Signals are handled in a ``with``
    block; after the first one, the previous handlers are back, and a second one stops at once.
    """

    def __init__(self) -> None:
        self.received = 0  # number of the signal
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> SignalCallback:
        self.received = 0
        # Python allows handlers only in the main thread.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous_handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            # None stands for a handler that was not set by Python, and cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous_handlers = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.__exit__()
        name = signal.Signals(number).name
        print(
            f"contaccum: {name}: saving a checkpoint after this update. Send it again to stop at "
            "once",
            file=sys.stderr,
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # All ranks must stop after the same update, even if only one of them received the signal.
        received = torch.tensor(self.received, device=args.device)
        self.received = int(over_ranks("MAX", received))
        if not self.received:
            return
        control.should_save = True
        control.should_training_stop = True
        control.should_evaluate = False  # so that the process stops soon

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.received and control.should_training_stop:
            folder = f"{args.output_dir}/checkpoint-{state.global_step}"
            hint = "Continue with --resume_from_checkpoint last"
            if args.resume_from_checkpoint == "auto":  # as `contaccum fit` does by itself
                hint = "Start the same command again to continue"
            if state.is_world_process_zero:
                print(f"stopped; saved {folder}. {hint}")
            raise SystemExit(128 + self.received)
