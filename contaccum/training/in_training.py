"""Evaluation while training: it leaves no trace in what is trained, and a resumed run knows what was best so far.

When to evaluate, what is best and what is saved is transformers' machinery. What is added: random numbers, clock and
memory are as before, a line per evaluation in ``eval_log.jsonl``, the last update is evaluated too, patience lasts
through restarts, and a best checkpoint that cannot be used is not loaded.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils.memory import clear_device_cache
from sentence_transformers import SentenceTransformerTrainer
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from contaccum.distributed import agree
from contaccum.errors import ConfigError
from contaccum.evaluation.retrieval_evaluator import RetrievalEvaluator
from contaccum.training.callbacks import EVAL_LOG, keep_log_until
from contaccum.training.checkpoint_folder import fault_of
from contaccum.training.undisturbed import forget_peak_memory, unchanged_random_states

logger = logging.getLogger(__name__)

# Of a record of an update, what trackers get beside loss, learning rate and gradient norm. On a terminal, the first.
_SHOWN = (
    "grad_norm_query",
    "grad_norm_passage",
    "grad_norm_ratio",
    "bank_fill",
    "pairs_per_second",
    "bank_age",
    "bank_mass_aged",
    "drift_shift_passage",
    "drift_residual_passage",
)
_TRACKED = ("grad_norm_", "bank_", "drift_", "in_batch_mass", "embedding_spread", "columns", "pairs_per_", "peak_mem")


class EvaluatedTrainer(SentenceTransformerTrainer):
    """SentenceTransformerTrainer that trains on as if it had not been evaluated."""

    quiet: bool = False
    _update_started = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.eval_strategy == IntervalStrategy.NO:
            return
        self._settle_metric()
        given: Any = self.args
        self.add_callback(
            EvaluationCallback(given.early_stopping_patience, given.early_stopping_threshold, self._measured_by())
        )

    def _settle_metric(self) -> None:
        """What is best is told by the evaluator, where there is one; its names are known beforehand."""
        args: Any = self.args
        if not isinstance(self.evaluator, RetrievalEvaluator) or not args.keeps_best:
            return
        metric = args.metric_for_best_model
        if metric is None or (metric.removeprefix("eval_") == "loss" and self.eval_dataset is None):
            args.metric_for_best_model, args.greater_is_better = f"eval_{self.evaluator.primary_metric}", True
        elif "@" in metric and metric.removeprefix("eval_") not in self.evaluator.metrics:
            raise ConfigError(
                f"metric_for_best_model={metric}: the evaluator measures {', '.join(self.evaluator.metrics)}. Use one "
                "of them, or give it among the evaluator's metrics"
            )

    def _measured_by(self) -> dict[str, Any]:
        """What figures must have in common to be compared."""
        own = self.evaluator
        data = own.dataset.fingerprint if isinstance(own, RetrievalEvaluator) else type(own).__name__
        return {"metric": str(self.args.metric_for_best_model).removeprefix("eval_"), "data": data}

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        if skip_scheduler and self.state.global_step:
            return {}  # eval_on_start in a resumed run, which had its start
        started = time.perf_counter()
        with unchanged_random_states():  # a DataLoader draws a seed, even over nothing
            metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        if self.is_world_process_zero():
            with contextlib.suppress(OSError):  # sentence-transformers makes it for evaluators that write
                os.rmdir(os.path.join(str(self.args.output_dir), "eval"))
            self._write_figures(metrics)
        clear_device_cache()
        forget_peak_memory(self.args.device)
        if self._update_started:
            # The next update starts after the evaluation, not before it.
            self._update_started += time.perf_counter() - started
        return metrics

    def _write_figures(self, metrics: Mapping[str, Any]) -> None:
        args, best = self.args, self.state.best_metric
        record: dict[str, Any] = {"update": self.state.global_step}
        for key, value in without_empty_speeds(metrics).items():
            record[key] = None if isinstance(value, float) and not math.isfinite(value) else value
        value = metrics.get(f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}")
        if value is not None and self.state.global_step:
            record["best"] = best is None or bool(value > best if args.greater_is_better else value < best)
        os.makedirs(str(args.output_dir), exist_ok=True)
        with open(os.path.join(str(args.output_dir), EVAL_LOG), "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if not self.control.should_training_stop:  # a run that had stopped early, and is resumed
            super()._run_epoch(*args, **kwargs)

    def _load_best_model(self) -> None:
        checkpoint = str(self.state.best_model_checkpoint)
        fault = fault_of(Path(checkpoint))
        if fault is not None:
            logger.warning(f"{checkpoint}: the best model cannot be loaded ({fault}); this is that of the last update")
        if not agree(int(fault is None), self.args.device):  # or ranks would have different models
            return
        super()._load_best_model()
        if self.is_world_process_zero() and not self.quiet:
            metric, value = self.args.metric_for_best_model, self.state.best_metric
            print(f"best                  {Path(checkpoint).name} ({metric} {value:.4f}), and so the model", flush=True)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(without_empty_speeds(logs), start_time)


class EvaluationCallback(EarlyStoppingCallback):
    """Early stopping that outlives restarts, and an evaluation after the last update.

    Args:
        patience, threshold: `early_stopping_patience` (None: never stop) and `early_stopping_threshold`.
        measured_by: what figures must have in common with those of a checkpoint, or the best so far means nothing.
    """

    def __init__(self, patience: int | None, threshold: float, measured_by: Mapping[str, Any]) -> None:
        super().__init__(patience or 0, threshold)
        self.patience, self.measured_by = patience, dict(measured_by)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {
            "args": {
                "patience": self.patience,
                "threshold": self.early_stopping_threshold,
                "measured_by": self.measured_by,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        name = type(self).__name__
        of_callbacks: Any = state.stateful_callbacks  # a dict by now
        kept = of_callbacks.get(name) if state.global_step else None
        self.early_stopping_patience_counter = 0
        if kept is not None and kept["args"]["measured_by"] == self.measured_by:
            self.early_stopping_patience_counter = kept["attributes"]["early_stopping_patience_counter"]
        elif state.best_metric is not None:
            logger.warning(
                f"the best so far ({state.best_metric:.4f} after update {state.best_global_step}) was measured by "
                "another metric or on other data: the best is sought from here on"
            )
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        of_callbacks[name] = self.state()
        if state.is_world_process_zero:
            keep_log_until(os.path.join(str(args.output_dir), EVAL_LOG), state.global_step or -1)
        if self._has_lost_patience():
            logger.warning(
                f"this run stopped early after update {state.global_step}: raise early_stopping_patience to go on"
            )
            control.should_training_stop = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if args.eval_strategy == IntervalStrategy.STEPS and state.global_step >= state.max_steps:
            control.should_evaluate = True

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        if self.patience is None:
            return
        super().on_evaluate(args, state, control, metrics=metrics or {}, **kwargs)
        if self._has_lost_patience() and state.is_world_process_zero:
            times = "an evaluation" if self.patience == 1 else f"{self.patience} evaluations in a row"
            logger.warning(
                f"stopped early after update {state.global_step}: {times} without a better "
                f"{args.metric_for_best_model} than {state.best_metric:.4f}, that of update {state.best_global_step}"
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not args.load_best_model_at_end or not state.best_global_step or not state.is_world_process_zero:
            return
        loaded = None if state.best_model_checkpoint is None else Path(state.best_model_checkpoint).name
        if loaded != f"checkpoint-{state.best_global_step}":
            logger.warning(
                f"the best update, {state.best_global_step}, was not saved, so that the model is "
                f"{'the last one' if loaded is None else f'that of {loaded}'}: set save_strategy=best, or save_steps "
                "to eval_steps"
            )

    def _has_lost_patience(self) -> bool:
        return self.patience is not None and self.early_stopping_patience_counter >= self.patience


def without_empty_speeds(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures without the speed of the loop over an eval_dataset where there is none, and nothing but an evaluator."""
    return {key: x for key, x in figures.items() if x or not key.startswith(("eval_samples_", "eval_steps_"))}


def figures_to_track(record: Mapping[str, Any], all_of_them: bool) -> dict[str, float]:
    """What a log of transformers gets of the record of an update: a few for a terminal, or all of them for trackers."""
    return {
        key: value
        for key, value in record.items()
        if (key in _SHOWN or (all_of_them and key.startswith(_TRACKED)))
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
    }


def evaluation_line(trainer: EvaluatedTrainer) -> str | None:
    """What will be evaluated, for the start of a run; None if nothing will."""
    args: Any = trainer.args
    if args.eval_strategy == IntervalStrategy.NO:
        return None
    when = "every epoch" if args.eval_strategy == IntervalStrategy.EPOCH else f"every {args.eval_steps:,} updates"
    if not isinstance(trainer.evaluator, RetrievalEvaluator):
        return when
    about = trainer.evaluator.describe()
    of = about.get("of_documents", about["documents"])
    part = f"a sample of {about['documents']:,} of" if of > about["documents"] else "all"
    best = f", best by {args.metric_for_best_model.removeprefix('eval_')}" if args.keeps_best else ""
    return f"{when} on {about['name']} ({about['split']}): {about['queries']:,} queries, {part} {of:,} documents{best}"
