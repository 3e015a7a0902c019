"""Resuming: whether a run resumes, and from which checkpoint.

`parse_resume_request` reads the user's request, and `choose_checkpoint` finds the checkpoint. A run
resumes from a checkpoint of another run only if the user names that folder. `require_free_folder`
refuses to overwrite another run. ``run.json`` in ``output_dir`` records the id of the latest run
there, and whether it has finished. The marker of each checkpoint (see
`contaccum.training.checkpoint`) records the id of the run that wrote it.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transformers import TrainerState

from contaccum.encoders.adapters import find_adapter_bases
from contaccum.errors import ConfigError, UserError
from contaccum.training.arguments import LOSS_SETTINGS, ContAccumTrainingArguments
from contaccum.training.checkpoint import (
    find_checkpoints,
    find_defect,
    find_defect_for_run,
    read_marker,
)
from contaccum.training.log import read_run_record

logger = logging.getLogger(__name__)

RESUME_SETTINGS = (
    "method",
    "optim",
    "seed",
    "data_seed",
    "batch_sampler",
    "multi_dataset_batch_sampler",
    *LOSS_SETTINGS,
    "matryoshka_dims",
    "missing",
    "metric_for_best_model",
)
"""Arguments that a resumed run must not change.

With other values, the saved states of bank and optimizer, or the saved position in the data, would
not be valid.
"""
PAIRS_PER_BATCH = "pairs per batch of the sampler"
"""Setting that a resumed run must not change if the order of the rows depends on it."""

_LENGTH_SETTINGS = ("max_steps", "num_train_epochs", "early_stopping_patience")
"""Arguments that decide when a run ends."""


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint that a run resumes from.

    Attributes:
        folder: the checkpoint.
        marker: the content of its marker, from `RunDescription.make_marker`.
        state: the state of transformers' trainer, which the checkpoint contains.
        is_newest: True if the user asked for the newest checkpoint, and no newer folder was skipped
            as incomplete or as one of another run.
    """

    folder: Path
    marker: Mapping[str, Any]
    state: TrainerState
    is_newest: bool

    @property
    def run_id(self) -> str | None:
        """The id of the run that wrote the checkpoint."""
        return self.marker["run_id"]

    @property
    def num_trained_updates(self) -> int:
        """The number of updates that have trained; see `Update.has_trained`."""
        # Markers of earlier versions have no such entry.
        return self.marker.get("trained_updates", self.marker["update"])

    def require_same_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise `UserError` if a run with these settings cannot resume from the checkpoint.

        Args:
            settings: the result of `RunDescription.get_resume_settings`.
        """
        saved = self.marker["settings"]
        # The saved settings were read from JSON, so those of this run are converted in the same
        # way.
        current = json.loads(json.dumps(settings, default=str))
        changed = []
        for key, value in current.items():
            if saved.get(key) != value:
                changed.append(f"{key}: {saved.get(key)} -> {value}")
        if changed:
            raise UserError(
                f"{self.folder}: a run cannot resume from it with changed settings "
                f"({'; '.join(changed)}), because its bank, optimizer or position in the data "
                "would not be valid. Set them back, or start a new run from its weights with "
                f"--model {self.folder}"
            )

    def get_stream_position(self, batches_per_update: int) -> tuple[int, int]:
        """Return the position in a stream: complete passes, and micro-batches of the next pass."""
        # For a stream, transformers starts a new epoch at each pass, and counts an update as
        # 1 / max_steps of an epoch. With max_steps=100, epoch 2.07 means: two complete passes, and
        # 7 updates of the third. Epoch 1.0 means: no complete pass, and all 100 updates of the
        # first, because a checkpoint is saved after an update, never at the start of a pass.
        epoch = float(self.state.epoch or 0)
        num_passes = max(math.ceil(epoch) - 1, 0)
        num_updates = round((epoch - num_passes) * self.state.max_steps)
        return num_passes, num_updates * batches_per_update

    def find_final_model(
        self, args: ContAccumTrainingArguments, user_arguments: Mapping[str, Any]
    ) -> str | None:
        """Return the folder of the final model if the run has ended, else None.

        Without this check, transformers would train another update after the end. The final model
        is the first of these that can be loaded: the best checkpoint (with
        ``load_best_model_at_end``), the saved model in ``output_dir``, or this checkpoint, if it is
        of the last update. If there is none of them, the run trains its last updates again.

        Args:
            args: the arguments of the run.
            user_arguments: the arguments as the user wrote them.
        """
        output_dir = Path(str(args.output_dir))
        record = read_run_record(output_dir)
        has_same_length = record.get("run_id") == self.run_id and all(
            record["arguments"].get(name) == user_arguments.get(name) for name in _LENGTH_SETTINGS
        )
        is_finished = self.is_newest and has_same_length and record["finished"]
        num_updates = self.state.global_step
        # stateful_callbacks may be a list by its type, but TrainerState makes it a dictionary.
        callbacks = cast(dict[str, dict], self.state.stateful_callbacks)
        attributes = callbacks.get("EvaluationCallback", {}).get("attributes", {})
        evaluations_without_gain = attributes.get("early_stopping_patience_counter", 0)
        patience = args.early_stopping_patience
        # ``num_train_epochs`` may be a fraction, so a run may end in the middle of an epoch.
        # (``state.max_steps`` may be that of an earlier, shorter start.)
        ended_here = (
            (patience is not None and evaluations_without_gain >= patience)
            or 0 < args.max_steps <= num_updates
            or (has_same_length and num_updates >= record["updates"])
        )
        # If only the best checkpoints are kept, a finished run may have gone on after this one.
        if not ended_here and not is_finished:
            return None
        final_model = self._find_best_checkpoint(args)
        if final_model is None and is_finished and self._holds_same_model(output_dir):
            final_model = output_dir
        if final_model is None and ended_here:
            final_model = self.folder
        if final_model is None:
            return None
        if not ended_here:
            num_updates = record["updates"]
        logger.warning(
            f"nothing is left to train after update {num_updates}: the run has ended. Raise "
            "max_steps, num_train_epochs or early_stopping_patience to train on"
        )
        return str(final_model)

    def _find_best_checkpoint(self, args: ContAccumTrainingArguments) -> Path | None:
        """Return the best checkpoint if the run loads it at its end and can use it, else None."""
        best = self.state.best_model_checkpoint
        if not args.load_best_model_at_end or best is None:
            return None
        is_usable = find_defect_for_run(Path(best), self.run_id) is None
        return Path(best) if is_usable else None

    def _holds_same_model(self, folder: Path) -> bool:
        """Return True if a folder holds a saved model that the run's model can load."""
        if not (folder / "modules.json").is_file():
            return False
        # With merge_adapter, the saved model has no adapter, but the run's model has one.
        return bool(find_adapter_bases(folder)) == bool(find_adapter_bases(self.folder))


def drop_unusable_best(state: TrainerState, point: ResumePoint) -> None:
    """Remove the best checkpoint from a trainer's state if the resumed run cannot use it.

    It may have been removed from the disk, or belong to another run.

    Args:
        state: the trainer's state, which is changed.
        point: the checkpoint that the run resumes from.
    """
    # transformers has removed the name of a missing folder from ``state``, but not its metric.
    best = point.state.best_model_checkpoint
    if best is None:
        return
    defect = find_defect_for_run(Path(best), point.run_id)
    if defect is not None:
        logger.warning(
            f"the best checkpoint so far, {best}, cannot be used: {defect}. The final model will "
            "be the best of the later evaluations"
        )
        # transformers would take the folder for the best checkpoint again as long as it exists and
        # no later evaluation is better.
        state.best_model_checkpoint = None
        state.best_global_step = None
        state.best_metric = None


def parse_resume_request(value: str | bool | None) -> str | None:
    """Return ``"last"``, ``"auto"`` or the folder to resume from; None for a new run.

    Args:
        value: ``resume_from_checkpoint`` as the user wrote it; True means ``"last"``.
    """
    text = str(value or "")
    word = text.lower()
    if word in ("", "false", "none"):
        return None
    if word in ("true", "last"):
        return "last"
    if word == "auto":
        return "auto"
    return text


def find_newest_checkpoint(folder: str | os.PathLike[str]) -> tuple[Path | None, list[str]]:
    """Find the newest complete checkpoint of the run that ``run.json`` in a folder describes.

    Returns:
        The checkpoint (None if there is none), and a line for each newer checkpoint that explains
        why it is skipped.
    """
    run_id = read_run_record(folder).get("run_id")
    skipped: list[str] = []
    for path in find_checkpoints(folder):
        defect = find_defect_for_run(path, run_id)
        if defect is None:
            return path, skipped
        skipped.append(f"{path}: {defect}")
    return None, skipped


def require_free_folder(args: ContAccumTrainingArguments) -> None:
    """Raise `ConfigError` if a new run would overwrite another run in ``output_dir``."""
    if args.overwrite_output_dir:
        return
    folder = Path(str(args.output_dir))
    request = parse_resume_request(args.resume_from_checkpoint)
    record = read_run_record(folder)
    has_model = bool(record) and (folder / "modules.json").is_file()
    if request == "last":
        return
    if request == "auto":
        if find_newest_checkpoint(folder)[0] is not None:
            return  # the run in the folder is resumed
        # "auto" would start a new run here. That is allowed if the latest run has not finished: it
        # was killed before its first checkpoint. If there is a model nevertheless, it is from an
        # older run, which the user has already allowed the latest run to overwrite.
        if not (has_model and record["finished"]):
            return
    elif request is not None:
        if find_defect(Path(request)) is not None:
            return  # `choose_checkpoint` refuses this checkpoint
        # A run keeps its id when it resumes, so a checkpoint of another run would replace this one.
        if not record or record["run_id"] == read_marker(Path(request))["run_id"]:
            return
    checkpoints = find_checkpoints(folder)
    if has_model:
        reason = "the folder contains a finished run, which this run would overwrite"
    elif checkpoints:
        reason = f"the folder contains an unfinished run with {checkpoints[0].name}"
    else:
        return
    raise ConfigError(
        f"{folder}: {reason}. Set resume_from_checkpoint=last to continue it, "
        "overwrite_output_dir=true to replace it, or another output_dir"
    )


def choose_checkpoint(
    resume_from_checkpoint: str | bool | None, args: ContAccumTrainingArguments
) -> ResumePoint | None:
    """Choose the checkpoint to resume from; None for a new run.

    `ResumePoint.require_same_settings` then compares the settings.

    Args:
        resume_from_checkpoint: the user's request. ``"last"`` and ``"auto"`` mean the newest
            complete checkpoint of the run that ``run.json`` in ``output_dir`` describes; for
            ``"auto"`` without one, the run starts from the beginning.
        args: the arguments of the run.

    Raises:
        UserError: if there is no complete checkpoint, or a run cannot resume from it.
    """
    request = parse_resume_request(resume_from_checkpoint)
    if request is None:
        return None
    path, skipped = _find_requested(request, args)
    for line in skipped:
        logger.warning(f"skipped {line}")
    if path is None:
        return None
    marker = read_marker(path)
    if not marker["resumable"]:
        raise UserError(
            f"{path}: written with save_only_model, so a run cannot resume from it. Start a new "
            f"run from its weights with --model {path}"
        )
    if args.process_index == 0:
        print(f"resuming from         {path} (after {marker['update']:,} updates)", flush=True)
    state = TrainerState.load_from_json(str(path / "trainer_state.json"))
    return ResumePoint(path, marker, state, request in ("last", "auto") and not skipped)


def _find_requested(
    request: str, args: ContAccumTrainingArguments
) -> tuple[Path | None, list[str]]:
    """Return the requested checkpoint, and a line for each newer one that is skipped.

    Raises:
        UserError: if there is no complete checkpoint, unless ``"auto"`` may start a new run.
    """
    skipped: list[str] = []
    path: Path | None
    if request in ("last", "auto"):
        path, skipped = find_newest_checkpoint(str(args.output_dir))
    else:
        path = Path(request)
        defect = find_defect(path)
        if defect is not None:
            path = None
            skipped = [f"{request}: {defect}"]
    # "auto" may start a new run if the latest run was killed before its first complete checkpoint.
    # With run.json, this is certain: the skipped checkpoints are incomplete, or of another run.
    # Without run.json, the user may want to continue from one of the skipped checkpoints.
    has_record = bool(read_run_record(str(args.output_dir)))
    may_start_new = request == "auto" and (not skipped or has_record)
    if path is None and not may_start_new:
        reasons = "; ".join(skipped) or "there is none"
        place = args.output_dir if request in ("last", "auto") else request
        raise UserError(
            f"{place}: no checkpoint to resume from ({reasons}). Set "
            "resume_from_checkpoint to the folder of a complete checkpoint, or drop it to start a "
            "new run"
        )
    return path, skipped
