"""What happens around updates: the order of data by epoch, the log, evaluation and early stopping, signals.

When to evaluate, what is best and what is saved is transformers' machinery. Evaluation leaves no trace in what is
trained: random numbers, clock and memory are as before.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from contaccum.distributed import over_ranks
from contaccum.files import write_json
from contaccum.training import checkpoint, log
from contaccum.training.updates import forget_peak_memory, peak_memory_mb, random_states, set_random_states

logger = logging.getLogger(__name__)

# Of an update's record, what transformers' logs and trackers get.
_LOGGED = (
    *("grad_norm_", "bank_", "drift_", "in_batch_mass", "embedding_spread"),
    *("columns", "masked", "pairs_per_", "peak_mem"),
)


class UpdateCallback(TrainerCallback):
    """Sets the epoch of the data, mines negatives when they are due, and writes ``run.json`` and a line per update."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.collapse = log.CollapseWatch()
        self.last: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, folder = self.trainer, Path(str(args.output_dir))
        trainer.begin()
        if args.should_save:  # the first rank; with save_on_each_node the first rank of each host
            # First the record: where a kill comes between the two, old checkpoints are those of another run already.
            write_json(folder / log.RUN_RECORD, log.run_record(trainer))
            checkpoint.remove_replaced(args, trainer.run_id, state.global_step)
        if not state.is_world_process_zero:
            return
        log.keep_log_until(folder / log.TRAIN_LOG, state.global_step)
        log.keep_log_until(folder / log.EVAL_LOG, state.global_step or -1)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A resumed run reaches its sampler through two wrappers, and transformers looks through one only.
        epoch = int(state.epoch or 0)
        if hasattr(self.trainer.batch_sampler, "set_epoch"):
            self.trainer.batch_sampler.set_epoch(epoch)
        for sampling in self.trainer.samplings:
            sampling.set_epoch(epoch, self.trainer.args.order_seed)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        refresh = self.trainer.refresh
        if refresh is not None and refresh.is_due(state.global_step):
            model = self.trainer.accelerator.unwrap_model(self.trainer.model_wrapped, keep_torch_compile=False)
            about = refresh.mine(model, state.global_step, state.is_world_process_zero)
            self.trainer.updates.present.about |= about

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, update = self.trainer, self.trainer.updates.present
        losses = [x for x in trainer.bank_losses() if x.last]
        pairs, seconds = update.pairs * trainer.args.world_size, time.perf_counter() - update.started
        record: dict[str, Any] = {
            "update": state.global_step,
            "epoch": round(float(state.epoch or 0), 6),
            "loss": float(over_ranks("SUM", torch.stack(update.losses).sum())) / trainer.args.world_size,
            "learning_rate": update.learning_rate,
            **update.norms,
            "bank_fill": sum(int(loss.last.get("bank_fill", 0)) for loss in losses),
            "pairs": pairs,
            "seconds": seconds,
            "pairs_per_second": pairs / seconds,
            "peak_memory_mb": peak_memory_mb(trainer.args.device),
        }
        for loss in losses[:1]:
            named = ("masked", "embedding_spread", "distill_loss")
            record |= {key: float(value) for key, value in loss.last.items() if key in named}
            record["columns"] = int(loss.last["columns"])
            record |= loss.info_nce.drift_record() if loss.info_nce is not None else {}
            for warning in self.collapse.observe(record):
                logger.warning(warning)
        self.last = record | update.about
        if state.is_world_process_zero:
            log.append_line(Path(str(args.output_dir)) / log.TRAIN_LOG, self.last)
        trainer.updates.begin()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in (logs or {}):
            shown = {key: value for key, value in self.last.items() if key.startswith(_LOGGED)}
            logs.update(shown)  # which the trackers and the terminal, called later, get as well
            state.log_history[-1].update(shown)


class EvaluationCallback(EarlyStoppingCallback):
    """Early stopping that outlives restarts, a line per evaluation, and an evaluation after the last update."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer.args.early_stopping_patience or sys.maxsize)
        self.trainer = trainer
        self._random: tuple[Any, ...] = ()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kept = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {}) if state.global_step else {}
        self.early_stopping_patience_counter = kept.get("early_stopping_patience_counter", 0)
        state.stateful_callbacks[type(self).__name__] = self.state()
        self._random = random_states()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.eval_strategy == IntervalStrategy.STEPS and state.global_step >= state.max_steps:
            control.should_evaluate = True
        self._random = random_states()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._random = random_states()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if not self.trainer.is_in_train:
            return
        if state.is_world_process_zero:
            found = {key: x for key, x in metrics.items() if not key.startswith(("eval_samples_", "eval_steps_"))}
            log.append_line(Path(str(args.output_dir)) / log.EVAL_LOG, {"update": state.global_step, **found})
        if args.early_stopping_patience is not None and state.global_step:
            super().on_evaluate(args, state, control, metrics=metrics, **kwargs)
            if self.early_stopping_patience_counter >= self.early_stopping_patience and state.is_world_process_zero:
                logger.warning(
                    f"stopped early after update {state.global_step}: no better {args.metric_for_best_model} than "
                    f"{state.best_metric:.4f} of update {state.best_global_step}"
                )
        set_random_states(self._random)
        self.trainer.updates.present.started = time.perf_counter()
        forget_peak_memory(args.device)


class SignalCallback(TrainerCallback):
    """SIGTERM and SIGINT as requests: the update ends, a checkpoint is saved, and `SystemExit` is raised.

    Its code is 128 and the signal's number: 143, 130. (transformers' own callback saves inside an update, whose pairs
    are in the bank by then, and ends with code 0.) Handlers are in place within ``with``, in the main thread, which
    alone may set them; a second signal does what it did before.
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalCallback:
        self.received = 0
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
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
        # Ranks stop together, where one was asked to.
        self.received = int(over_ranks("MAX", torch.tensor(self.received, device=args.device)))
        if self.received:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.received and control.should_training_stop:
            folder = f"{args.output_dir}/checkpoint-{state.global_step}"
            if state.is_world_process_zero:
                print(f"stopped; saved {folder}: go on with --resume_from_checkpoint last")
            raise SystemExit(128 + self.received)
