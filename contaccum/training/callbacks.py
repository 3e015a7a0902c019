"""What happens around updates: the order of data by epoch, the start-up summary, the log and the run record."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from contaccum.redaction import redact_record
from contaccum.training.checkpoint_folder import replace_file, write_json

if TYPE_CHECKING:
    from contaccum.data.draws import Draws
    from contaccum.training.trainer import ContAccumTrainer

TRAIN_LOG = "train_log.jsonl"
EVAL_LOG = "eval_log.jsonl"
RUN_RECORD = "run.json"


class EpochOrderCallback(TrainerCallback):
    """Tells the batch samplers the epoch, through whatever wraps them, and what is drawn from rows, the seed too.

    A resumed run reaches its sampler through two wrappers, and transformers looks through one only.
    """

    def __init__(self, samplers: Iterable[Any], draws: Iterable[Draws] = (), seed: int = 0) -> None:
        self.samplers, self.draws, self.seed = samplers, draws, seed

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for sampler in self.samplers:
            sampler.set_epoch(int(state.epoch or 0))
        for draws in self.draws:
            draws.set_epoch(int(state.epoch or 0), self.seed)


class TrainLogCallback(TrainerCallback):
    """Prints what the run will do, writes ``run.json`` once and ``train_log.jsonl`` a line per update."""

    def __init__(self, trainer: ContAccumTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        from contaccum.training.description import describe_run
        from contaccum.training.run_record import run_record

        self.trainer.update, self.trainer._update_started = {}, 0.0
        if not state.is_world_process_zero:
            return
        if not self.trainer.quiet:
            print(describe_run(self.trainer), flush=True)
        os.makedirs(str(args.output_dir), exist_ok=True)
        write_json(os.path.join(str(args.output_dir), RUN_RECORD), redact_record(run_record(self.trainer)))
        keep_log_until(self._path, state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        record = self.trainer.take_update_record()
        if state.is_world_process_zero:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    @property
    def _path(self) -> str:
        return os.path.join(str(self.trainer.args.output_dir), TRAIN_LOG)


def keep_log_until(path: str, update: int) -> None:
    """Drop lines of updates that are about to be done again: those after the checkpoint, or an earlier run's."""
    if not os.path.isfile(path):
        return
    with open(path, encoding="utf-8") as file:
        lines = file.readlines()
    kept = []
    for line in lines:
        try:
            if json.loads(line)["update"] <= update and line.endswith("\n"):
                kept.append(line)
        except (ValueError, KeyError):  # a line cut short by a kill or a full disk
            continue
    replace_file(path, "".join(kept))
