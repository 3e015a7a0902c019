"""Which checkpoints are whole, and what a run that goes on from one may change.

transformers writes a checkpoint; ``contaccum.json`` is written last, with the size and SHA-256 of every file. A folder
without it, or with another file than it says, is not whole and is never loaded. Checksums find damage, not forgery.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerState

from contaccum.errors import DataError, UserError
from contaccum.files import read_json, write_json
from contaccum.training.arguments import LOSS_SETTINGS, ContAccumTrainingArguments
from contaccum.version import __version__

logger = logging.getLogger(__name__)

MARKER = "contaccum.json"
BANK_FILE = "contaccum_bank.safetensors"
_OLD_MARKER = "manifest.json"  # of version 0.1
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

NEVER = ("method", "optim", "trained parameters", *LOSS_SETTINGS)
"""What the state of a bank or an optimizer was made with: there is no going on with another value."""

_ORDER = ("seed", "data_seed", "batch_sampler", "multi_dataset_batch_sampler", "sampling_temperature")
BY_FLAG = ("pairs per update", "data fingerprint", "rows", *_ORDER, "sampling_weights")
"""What the position in the data is counted in: another value leaves out or repeats some of it."""


def seal(folder: Path, facts: Mapping[str, Any]) -> None:
    """Force every file to the disk, and write the marker that makes the folder a whole checkpoint."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MARKER:
            files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path, True)}
    write_json(folder / MARKER, {"contaccum": __version__, **facts, "files": files})


def fault_of(folder: Path) -> str | None:
    """Why a checkpoint cannot be used, in a phrase; None: every file is as it was written."""
    if not (folder / MARKER).is_file():
        if (folder / _OLD_MARKER).is_file():
            version = read_json(folder / _OLD_MARKER).get("contaccum", "an earlier version")
            return (
                f"it was written by contaccum {version}, whose checkpoints this version cannot go on from; train from "
                f"its weights with --model {folder}"
            )
        return f"it has no {MARKER}: it is not whole"
    try:
        files = {str(name): (entry["bytes"], entry["sha256"]) for name, entry in facts_of(folder)["files"].items()}
    except (DataError, KeyError, TypeError, AttributeError):
        return f"its {MARKER} cannot be read"
    for name, (size, checksum) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size or _sha256(path) != checksum:
            return f"{name} is not what was written"
    return None


def facts_of(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What :func:`seal` was given of the run that wrote a checkpoint."""
    return read_json(Path(folder) / MARKER)


def find_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints of a run, whole or not, newest first."""
    found = {path: re.fullmatch(r"checkpoint-(\d+)", path.name) for path in Path(folder).glob("checkpoint-*")}
    return sorted((p for p, match in found.items() if match), key=lambda p: int(p.name.split("-")[1]), reverse=True)


def state_of(folder: str | os.PathLike[str]) -> TrainerState:
    """transformers' own state of the run that wrote a checkpoint."""
    return TrainerState.load_from_json(os.path.join(folder, "trainer_state.json"))


def choose_checkpoint(
    asked: str, args: ContAccumTrainingArguments, settings: Mapping[str, Any], quiet: bool
) -> str | None:
    """The checkpoint to go on from: ``last`` (or ``True``), ``auto`` or a folder. What was passed over is logged.

    Args:
        settings: ``NEVER`` and ``BY_FLAG`` of the run that is to go on.

    Returns:
        None for ``auto`` where there is none yet: the run starts anew.

    Raises:
        UserError: when there is none, none is whole, or the run cannot go on from it.
    """
    passed: list[str] = []
    path = Path(asked)
    if asked.lower() in ("true", "last", "auto"):
        found = find_checkpoints(str(args.output_dir))
        if not found and asked.lower() == "auto":
            return None
        for path in found:
            fault = fault_of(path)
            if fault is None:
                break
            passed.append(f"{path}: {fault}")
        else:
            what = f"can be resumed from ({'; '.join(passed)})" if passed else "to resume from"
            raise UserError(f"{args.output_dir}: no checkpoint {what}; drop --resume_from_checkpoint to start anew")
    elif not path.is_dir():
        raise UserError(f"{asked}: no such checkpoint; name a folder, or last for the newest that is whole")
    elif (fault := fault_of(path)) is not None:
        raise UserError(f"{asked}: cannot be resumed from: {fault}")
    facts = facts_of(path)
    if not facts["resumable"]:
        raise UserError(
            f"{path}: written with save_only_model, so that training cannot go on from it. Train from its weights with "
            f"--model {path}"
        )
    for line in passed:
        logger.warning(f"passed over {line}")
    _refuse_changes(path, facts["settings"], settings, args.resume_with_changes)
    line = f"resuming from         {path} (after {facts['update']:,} updates)"
    logger.info(line) if quiet else print(line, flush=True)
    return str(path)


def ended_with(checkpoint: str, args: ContAccumTrainingArguments) -> str | None:
    """The model of a run that has ended with a checkpoint, by updates or by patience; None: there is more to do.

    transformers would do another update.
    """
    state = state_of(checkpoint)
    kept: Any = state.stateful_callbacks
    lost = kept.get("EvaluationCallback", {}).get("attributes", {}).get("early_stopping_patience_counter", 0)
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


def _refuse_changes(checkpoint: Path, old: Mapping[str, Any], new: Mapping[str, Any], allowed: bool) -> None:
    new = json.loads(json.dumps(new, default=str))
    changed = {key: f"{key}: {old.get(key)} -> {value}" for key, value in new.items() if old.get(key) != value}
    if None in (old["data fingerprint"], new["data fingerprint"]):  # a stream's, of which nothing is known
        changed.pop("data fingerprint", None)
    never, by_flag = ("; ".join(changed[key] for key in names if key in changed) for names in (NEVER, BY_FLAG))
    if never:
        raise UserError(
            f"{checkpoint}: cannot go on with other settings than its bank and optimizer were made with: {never}. So "
            f"set them back, or train from its weights with --model {checkpoint}"
        )
    if by_flag and not allowed:
        raise UserError(
            f"{checkpoint}: its place in the data means nothing with {by_flag}. So set them back, or go on all the "
            "same with --resume_with_changes true"
        )


def _sha256(path: Path, force: bool = False) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if force:
            os.fsync(file.fileno())
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
