"""What happens around updates: the order of data by epoch, the log, evaluation and early stopping, signals.

When to evaluate, what is best and what is saved is transformers' machinery. Evaluation leaves no trace in what is
trained: random numbers, clock and memory are as before.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from contaccum.distributed import sum_over_ranks, world_size
from contaccum.files import write_json
from contaccum.training.log import (
    EVAL_LOG,
    RUN_RECORD,
    TRAIN_LOG,
    CollapseWatch,
    append_line,
    describe_run,
    keep_log_until,
    run_record,
)
from contaccum.training.memory import forget_peak_memory, peak_memory_mb, random_states, set_random_states

logger = logging.getLogger(__name__)

# Of an update's record, what logs of transformers get; on a terminal, without trackers, the first alone.
_SHOWN = ("grad_norm_query", "grad_norm_passage", "grad_norm_ratio", "bank_fill", "bank_age", "pairs_per_second")
_TRACKED = ("grad_norm_", "bank_", "drift_", "in_batch_mass", "embedding_spread", "columns", "pairs_per_", "peak_mem")


class UpdateCallback(TrainerCallback):
    """Sets the epoch of the data, mines negatives when they are due, and writes ``run.json`` and a line per update."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.collapse = CollapseWatch()
        self.last: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, folder = self.trainer, Path(str(args.output_dir))
        trainer.begin()
        if not state.is_world_process_zero:
            return
        if not trainer.quiet:
            print(describe_run(trainer), flush=True)
        write_json(folder / RUN_RECORD, run_record(trainer))
        keep_log_until(folder / TRAIN_LOG, state.global_step)
        keep_log_until(folder / EVAL_LOG, state.global_step or -1)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A resumed run reaches its sampler through two wrappers, and transformers looks through one only.
        epoch = int(state.epoch or 0)
        if hasattr(self.trainer.batch_sampler, "set_epoch"):
            self.trainer.batch_sampler.set_epoch(epoch)
        for sampling in self.trainer.samplings:
            sampling.set_epoch(epoch, self.trainer.args.order_seed)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        refresh = self.trainer.refresh
        if refresh is not None and refresh.due(state.global_step):
            model = self.trainer.accelerator.unwrap_model(self.trainer.model_wrapped)
            self.trainer.update.about |= refresh.mine(model, state.global_step, state.is_world_process_zero)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, update, now = self.trainer, self.trainer.update, time.perf_counter()
        losses = [x for x in trainer.bank_losses() if x.last]
        pairs, seconds = update.pairs * trainer.args.world_size, now - update.started
        record: dict[str, Any] = {
            "update": state.global_step,
            "epoch": round(float(state.epoch or 0), 6),
            "loss": float(sum_over_ranks(torch.stack(update.losses).sum())) / trainer.args.world_size,
            "learning_rate": update.learning_rate,
            **update.norms,
            "bank_fill": sum(int(loss.last.get("bank_fill", 0)) for loss in losses),
            "pairs": pairs,
            "seconds": seconds,
            "pairs_per_second": pairs / seconds,
            "peak_memory_mb": peak_memory_mb(trainer.args.device),
        }
        for loss in losses[:1]:
            record |= {"columns": int(loss.last["columns"]), "embedding_spread": float(loss.last["embedding_spread"])}
            record |= loss.info_nce.drift_record() if loss.info_nce is not None else {}
            for warning in self.collapse.observe(record):
                logger.warning(warning)
        self.last = record | update.about
        if state.is_world_process_zero:
            append_line(Path(str(args.output_dir)) / TRAIN_LOG, self.last)
        trainer.updates.begin()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" not in (logs or {}):
            return
        shown = {
            key: value
            for key, value in self.last.items()
            if key in _SHOWN or (args.report_to and key.startswith(_TRACKED))
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        logs.update(shown)  # which the trackers and the terminal, called later, get as well
        state.log_history[-1].update(shown)


class EvaluationCallback(EarlyStoppingCallback):
    """Early stopping that outlives restarts, a line per evaluation, and an evaluation after the last update.

    Args:
        trainer: whose arguments give patience (None: never stop) and threshold.
        measured_by: what figures must have in common with those of a checkpoint, or the best so far means nothing.
    """

    def __init__(self, trainer: Any, measured_by: str) -> None:
        super().__init__(trainer.args.early_stopping_patience or 0, trainer.args.early_stopping_threshold)
        self.trainer, self.patience, self.measured_by = trainer, trainer.args.early_stopping_patience, measured_by
        self._before: tuple[Any, float, float] = ((), 0.0, 0.0)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        kept = ("early_stopping_patience_counter", "measured_by")
        return {"args": {}, "attributes": {name: getattr(self, name) for name in kept}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        callbacks: Any = state.stateful_callbacks  # a dict by now
        kept = callbacks.get(type(self).__name__, {}).get("attributes", {}) if state.global_step else {}
        self.early_stopping_patience_counter = 0
        if kept.get("measured_by") == self.measured_by:
            self.early_stopping_patience_counter = kept["early_stopping_patience_counter"]
        elif state.best_metric is not None:
            logger.warning(
                f"the best so far ({state.best_metric:.4f} after update {state.best_global_step}) was measured by "
                "another metric or on other data: the best is sought from here on"
            )
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        callbacks[type(self).__name__] = self.state()
        self._remember()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.eval_strategy == IntervalStrategy.STEPS and state.global_step >= state.max_steps:
            control.should_evaluate = True
        if control.should_evaluate:
            self._remember()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._remember()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if not self.trainer.is_in_train:
            return
        if state.is_world_process_zero:
            with contextlib.suppress(OSError):  # sentence-transformers makes it for evaluators that write
                (Path(str(args.output_dir)) / "eval").rmdir()
            append_line(Path(str(args.output_dir)) / EVAL_LOG, self._line(args, state, metrics or {}))
        if self.patience is not None and state.global_step:
            super().on_evaluate(args, state, control, metrics=metrics or {}, **kwargs)
            if self.early_stopping_patience_counter >= self.patience and state.is_world_process_zero:
                logger.warning(
                    f"stopped early after update {state.global_step}: {self.patience} evaluations in a row without a "
                    f"better {args.metric_for_best_model} than {state.best_metric:.4f}, that of update "
                    f"{state.best_global_step}"
                )
        states, clock, started = self._before
        set_random_states(states)
        self.trainer.update.started = started + time.perf_counter() - clock
        forget_peak_memory(args.device)

    def _line(self, args: Any, state: Any, metrics: Mapping[str, Any]) -> dict[str, Any]:
        # Where there is an evaluator alone, the speed of the loop over an eval_dataset is 0.
        found = {key: x for key, x in metrics.items() if x or not key.startswith(("eval_samples_", "eval_steps_"))}
        value = metrics.get(f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}")
        if value is not None and state.global_step:
            best = state.best_metric
            found["best"] = best is None or bool(value > best if args.greater_is_better else value < best)
        return {"update": state.global_step, **found}

    def _remember(self) -> None:
        self._before = (random_states(), time.perf_counter(), self.trainer.update.started)


class SignalCallback(TrainerCallback):
    """SIGTERM and SIGINT as requests: the update ends, a checkpoint is saved, and `SystemExit` is raised.

    Its code is 128 and the signal's number, as shells have it: 143 after SIGTERM, 130 after SIGINT.

    Handlers are in place within ``with``; a second signal does what it did before. In another thread than the main
    one, which alone may set handlers, nothing is noted.
    """

    numbers = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalCallback:
        self.received = 0
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self.numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.__exit__()
        name = signal.Signals(number).name
        print(f"contaccum: {name}: saving a checkpoint after this update; a second ends at once", file=sys.stderr)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if world_size() > 1:  # ranks must agree on where to stop
            flags = torch.tensor([self.received == number for number in self.numbers], device=args.device).int()
            found = sum_over_ranks(flags).tolist()
            self.received = next((number for number, count in zip(self.numbers, found, strict=True) if count), 0)
        if self.received:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.received and control.should_training_stop:
            checkpoint = f"{args.output_dir}/checkpoint-{state.global_step}"
            if state.is_world_process_zero:
                print(f"stopped; saved {checkpoint}: go on with --resume_from_checkpoint last")
            raise SystemExit(128 + self.received)
