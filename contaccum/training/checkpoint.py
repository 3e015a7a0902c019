"""Which checkpoints are whole, and what a run that goes on from one may change.

transformers writes a checkpoint; ``contaccum.json`` is written last, with the size of every file. A folder without it,
or with another file than it says, is not whole and is never loaded.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import sort_checkpoints

from contaccum import __version__
from contaccum.errors import DataError, UserError
from contaccum.files import read_json, write_json
from contaccum.training.arguments import LOSS_SETTINGS, ContAccumTrainingArguments

logger = logging.getLogger(__name__)

MARKER = "contaccum.json"
BANK_FILE = "contaccum_bank.safetensors"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

SAME = ("method", "optim", "seed", "data_seed", "batch_sampler", "multi_dataset_batch_sampler", *LOSS_SETTINGS)
SAME += ("matryoshka_dims", "metric_for_best_model", "refresh_negatives_every", "refresh_pool")
"""Arguments that a run which goes on must have as before: what bank and optimizer were made with, and what the position
in the data is counted in."""


def seal(folder: Path, facts: Mapping[str, Any]) -> None:
    """Force every file to the disk, and write the marker that makes the folder a whole checkpoint."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            files[path.relative_to(folder).as_posix()] = path.stat().st_size
    write_json(folder / MARKER, {"contaccum": __version__, **facts, "files": files})


def fault_of(folder: Path) -> str | None:
    """Why a checkpoint cannot be used, in a phrase; None: every file is there, and as long as it was written."""
    try:
        files = facts_of(folder)["files"]
    except (DataError, KeyError):
        return f"it has no whole {MARKER}"
    for name, size in files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != size:
            return f"{name} is not what was written"
    return None


def refuse_code(folder: Path) -> None:
    """Raise `UserError` for a file that holds more than tensors and records of DeepSpeed, which would unpickle it."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
        for path in sorted(folder.rglob("*.pt")):
            try:
                torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            except Exception as error:  # of many kinds
                mend = f"train from its weights with --model {folder}"
                raise UserError(f"{path}: there is more in it than tensors, or it is damaged: {mend}") from error


def facts_of(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What `seal` was given of the run that wrote a checkpoint."""
    return read_json(Path(folder) / MARKER)


def find_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints of a run, whole or not, newest first."""
    return [Path(path) for path in reversed(sort_checkpoints(str(folder)))]


def choose_checkpoint(asked: str, args: ContAccumTrainingArguments, settings: Mapping[str, Any]) -> str | None:
    """The checkpoint to go on from: ``last`` (or ``True``), ``auto`` or a folder; None for ``auto`` without any.

    Raises `UserError` when there is none, none is whole, or it has not the ``settings`` of the run that is to go on.
    """
    by_word = asked.lower() in ("true", "last", "auto")
    found = find_checkpoints(str(args.output_dir)) if by_word else [Path(asked)]
    if not found and asked.lower() == "auto":
        return None
    path = next((path for path in found if fault_of(path) is None), None)
    passed = [f"{one}: {fault_of(one)}" for one in found[: None if path is None else found.index(path)]]
    if path is None:
        raise UserError(f"{args.output_dir}: no checkpoint to resume from ({'; '.join(passed) or 'there is none'})")
    facts = facts_of(path)
    if not facts["resumable"]:
        raise UserError(f"{path}: written with save_only_model: train from its weights with --model {path}")
    for line in passed:
        logger.warning(f"passed over {line}")
    before, now = facts["settings"], json.loads(json.dumps(settings, default=str))
    changed = [f"{key}: {before.get(key)} -> {value}" for key, value in now.items() if before.get(key) != value]
    if changed:
        raise UserError(
            f"{path}: bank, optimizer or place in the data would mean nothing with {'; '.join(changed)}. Set them "
            f"back, or train from its weights with --model {path}"
        )
    if args.process_index == 0:
        print(f"resuming from         {path} (after {facts['update']:,} updates)", flush=True)
    return str(path)


def ended_with(checkpoint: str, state: Any, args: ContAccumTrainingArguments) -> str | None:
    """The model of a run that ended with a checkpoint and its state, where transformers would do another update; None:
    it did not end."""
    kept = state.stateful_callbacks.get("EvaluationCallback", {}).get("attributes", {})
    lost = kept.get("early_stopping_patience_counter", 0)
    stopped = args.early_stopping_patience is not None and lost >= args.early_stopping_patience
    if not stopped and not 0 < args.max_steps <= state.global_step:
        return None
    why = "stopped early: raise early_stopping_patience to go on" if stopped else "has all of max_steps"
    logger.warning(f"this run ended after update {state.global_step}; it {why}")
    best = state.best_model_checkpoint if args.load_best_model_at_end else None
    return best if best is not None and fault_of(Path(best)) is None else checkpoint


def is_no_room(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is a full disk or quota; torch and safetensors have words of their own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return True
        if any(f"os error {number}" in str(error) for number in _NO_ROOM) or "PytorchStreamWriter" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
