"""Which checkpoints are whole, and what a run that goes on from one may change.

transformers writes a checkpoint; ``contaccum.json`` is written last, with the size of every file. A folder without it,
or with another file than it says, is not whole and is never loaded. Every run has an id, which ``run.json`` and each of
its checkpoints record: a run is only resumed from a checkpoint of another one where the user names that folder.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from transformers import TrainerState
from transformers.trainer_utils import sort_checkpoints

from contaccum import __version__
from contaccum.distributed import over_ranks
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.files import read_json, write_json
from contaccum.training.arguments import LOSS_SETTINGS, OVERWRITES_EACH_START, ContAccumTrainingArguments
from contaccum.training.log import read_run_record

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
    paths = [Path(path) for path in reversed(sort_checkpoints(str(folder)))]
    # transformers takes checkpoint-6-copy for one, too, which is the user's.
    return [path for path in paths if re.fullmatch(r"checkpoint-\d+", path.name)]


def new_run_id(device: torch.device) -> str:
    """Return a random id that is the same on every rank, and leave the random numbers of training as they are."""
    # The greatest of all ranks' numbers: each rank learns it, and 62 bits fit into a signed integer.
    number = torch.tensor(uuid4().int >> 66, device=device)
    return f"{int(over_ranks('MAX', number)):016x}"


def fault_for_run(folder: Path, run_id: str | None) -> str | None:
    """Return why the run ``run_id`` cannot use a checkpoint, in a phrase; None: the checkpoint is whole and its own."""
    fault = fault_of(folder)
    if fault is None and facts_of(folder).get("run_id") != run_id:
        return "it is of another run"
    return fault


def newest_checkpoint(folder: str | os.PathLike[str]) -> tuple[Path | None, list[str]]:
    """Return the newest whole checkpoint of the run that ``run.json`` describes, and why newer ones are passed over."""
    run_id = read_run_record(folder).get("run_id")
    passed_over: list[str] = []
    for path in find_checkpoints(folder):
        fault = fault_for_run(path, run_id)
        if fault is None:
            return path, passed_over
        passed_over.append(f"{path}: {fault}")
    return None, passed_over


def choose_checkpoint(asked: str, args: ContAccumTrainingArguments, settings: Mapping[str, Any]) -> str | None:
    """Return the checkpoint to resume from: ``last`` (or ``True``), ``auto`` or a folder.

    ``last`` and ``auto`` are the newest whole checkpoint of the run that ``run.json`` in the folder describes. The
    result is None for ``auto`` where this run has no checkpoint yet.

    Raises `UserError` when there is none, none is whole, or it has not the ``settings`` of the run that is to go on.
    """
    word = asked.lower()
    if word == "auto" and args.overwrite_output_dir:
        raise ConfigError(OVERWRITES_EACH_START)
    path: Path | None = Path(asked)
    passed_over: list[str] = []
    if word in ("true", "last", "auto"):
        path, passed_over = newest_checkpoint(str(args.output_dir))
    elif (fault := fault_of(Path(asked))) is not None:
        path = None
        passed_over = [f"{asked}: {fault}"]
    # A run that was killed before its first checkpoint was whole starts again. Without run.json nobody can say whose
    # the checkpoints are.
    restarts = word == "auto" and (not passed_over or bool(read_run_record(str(args.output_dir))))
    if path is None and not restarts:
        reasons = "; ".join(passed_over) or "there is none"
        mend = "Name the folder of a whole one, or start anew without resume_from_checkpoint"
        raise UserError(f"{args.output_dir}: no checkpoint to resume from ({reasons}). {mend}")
    for line in passed_over:
        logger.warning(f"passed over {line}")
    if path is None:
        return None
    facts = facts_of(path)
    if not facts["resumable"]:
        raise UserError(f"{path}: written with save_only_model: train from its weights with --model {path}")
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


def position_in_stream(checkpoint: str) -> tuple[int, int]:
    """Return the passes over a stream that were complete at a checkpoint, and the updates in the pass after them."""
    state = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))
    # transformers counts a pass over a stream as an epoch of max_steps updates, and starts the next one at its end.
    passes = int(state.epoch or 0)
    return passes, round((float(state.epoch or 0) - passes) * state.max_steps)


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
    run_id = facts_of(checkpoint).get("run_id")
    return best if best is not None and fault_for_run(Path(best), run_id) is None else checkpoint


def remove_replaced(args: ContAccumTrainingArguments, run_id: str | None, update: int) -> None:
    """Remove the checkpoints that a run replaces when it starts after ``update`` updates.

    A run that overwrites its folder replaces every checkpoint there. One that resumes replaces its own later ones, as
    their updates are done again, perhaps otherwise: `last` would go on from them. Raises `UserError` for a folder that
    cannot be removed.
    """
    for path in find_checkpoints(str(args.output_dir)):
        overwritten = args.overwrite_output_dir and update == 0
        if not overwritten:
            try:
                facts = facts_of(path)
            except DataError:  # it is not whole, and will never be loaded
                continue
            if facts.get("run_id") != run_id or facts["update"] <= update:
                continue
            logger.warning(f"removed {path}: the run goes on from update {update}, and does its updates again")
        try:
            shutil.rmtree(path)
        except OSError as error:
            mend = "remove it, or name another output_dir"
            raise UserError(f"{path}: cannot be removed ({error.strerror}); {mend}") from error


def remove_oldest(folder: str, run_id: str | None, limit: int | None, best: str | None) -> None:
    """Remove checkpoints until ``limit`` are left (None: all stay), those of other runs first.

    The newest checkpoint of the run ``run_id`` and the ``best`` one always stay.
    """
    if limit is None or limit < 1:
        return
    # transformers goes by time or number alone, where an earlier run's checkpoint may come last.
    newest_first = sorted(find_checkpoints(folder), key=lambda path: fault_for_run(path, run_id) is not None)
    protected = [path for path in newest_first if path == newest_first[0] or (best and path == Path(best))]
    others = [path for path in newest_first if path not in protected]
    for path in others[max(limit - len(protected), 0) :]:
        shutil.rmtree(path, ignore_errors=True)


def is_no_room(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is a full disk or quota; torch and safetensors have words of their own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return True
        if any(f"os error {number}" in str(error) for number in _NO_ROOM) or "PytorchStreamWriter" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
