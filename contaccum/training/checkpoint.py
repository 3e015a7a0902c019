"""Checkpoints: what they hold, from which one a run resumes, and which are removed.

transformers writes the files of a checkpoint (a folder ``checkpoint-N`` after update N), and the
trainer adds the banks. `contaccum.work` then finishes it, with the sizes of all files. A checkpoint
that is not finished is incomplete, and is never loaded.

Every run has an id, which is in the identity of the run's folder and in the results of its
checkpoints. A run resumes from a checkpoint of another run only if the user names that folder.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from transformers.trainer_utils import sort_checkpoints

from contaccum import work
from contaccum.errors import ConfigError, UserError
from contaccum.files import AnyPath
from contaccum.losses.contaccum import ContAccumLoss
from contaccum.training.arguments import ContAccumTrainingArguments

logger = logging.getLogger(__name__)

TRAINING = "a training"
"""The kind of work; see `contaccum.work`."""

BANK_FILE = "contaccum_bank.safetensors"
"""File of a checkpoint with the banks."""

Saved = dict[str, Any]
"""The result of a checkpoint: its run and update, and what transformers' files do not hold."""


def find_checkpoints(folder: AnyPath) -> list[Path]:
    """Return all checkpoints in a folder, complete or not, newest first."""
    paths = [Path(path) for path in reversed(sort_checkpoints(os.fspath(folder)))]
    # transformers also lists names such as checkpoint-6-copy, which the user has made.
    return [path for path in paths if re.fullmatch(r"checkpoint-\d+", path.name)]


def read_checkpoint(folder: Path) -> Saved | None:
    """Return the result of a complete checkpoint; None for an incomplete one or another folder."""
    saved = work.read_result(folder)
    return saved if saved and "update" in saved else None


def find_complete(folder: AnyPath, run_id: str | None) -> dict[Path, Saved]:
    """Return {checkpoint: its result} of the complete checkpoints of a run, newest first."""
    found = {}
    for path in find_checkpoints(folder):
        saved = read_checkpoint(path)
        if saved is not None and saved["run_id"] == run_id:
            found[path] = saved
    return found


def collect_banks(losses: Iterable[ContAccumLoss], keep: bool) -> dict[str, Tensor]:
    """Return the states of the banks of all losses, by name, on the CPU.

    Every rank must call this function, because a loss may gather its bank from all ranks. A rank
    without ``keep`` gets empty states.
    """
    states = {}
    for index, loss in enumerate(losses):
        for key, value in loss.bank_state_dict(keep=keep).items():
            states[f"{index}.{key}"] = value.detach().cpu().clone().contiguous()
    return states


def load_banks(folder: Path, losses: Iterable[ContAccumLoss]) -> None:
    """Load the banks of a checkpoint."""
    states = load_file(folder / BANK_FILE)
    for index, loss in enumerate(losses):
        prefix = f"{index}."
        names = [name for name in states if name.startswith(prefix)]
        loss.load_bank_state_dict({name.removeprefix(prefix): states[name] for name in names})


# Removing ----------------------------------------------------------------------------------------


def remove_replaced(args: ContAccumTrainingArguments, run_id: str | None, update: int) -> None:
    """Remove the checkpoints that the run ``run_id`` replaces when it continues after an update.

    ``update`` is 0 for a new run. A new run with ``overwrite_output_dir`` replaces every checkpoint
    in its folder. A resumed run replaces its own later checkpoints, because it trains their updates
    again, perhaps with other results. If they remained, ``resume_from_checkpoint=last`` would
    resume from the old results.
    """
    folder = str(args.output_dir)
    if args.overwrite_output_dir and update == 0:
        for path in find_checkpoints(folder):
            shutil.rmtree(path)
    for path, saved in find_complete(folder, run_id).items():
        if saved["update"] > update:
            logger.warning(
                f"removed {path}: the run continues after update {update} and trains the later "
                "updates again"
            )
            shutil.rmtree(path)


def remove_oldest(folder: str, run_id: str | None, limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints of a run until ``limit`` remain; None removes nothing.

    The newest and the best checkpoint always remain. transformers would remove older checkpoints
    before the new one is complete, and also folders of the user, such as checkpoint-6-copy.
    """
    if limit is None or limit < 1:
        return
    checkpoints = list(find_complete(folder, run_id))
    # An earlier start may have written the path of the best checkpoint in another way.
    best_path = Path(best).resolve() if best else None
    removable = [path for path in checkpoints[1:] if path.resolve() != best_path]
    num_protected = len(checkpoints) - len(removable)
    for path in removable[max(limit - num_protected, 0) :]:
        shutil.rmtree(path, ignore_errors=True)


# Resuming ----------------------------------------------------------------------------------------


def parse_resume_request(value: str | bool | None) -> str | None:
    """Return ``"last"``, ``"auto"`` or the folder to resume from; None for a new run."""
    text = str(value or "")
    word = text.lower()
    if word in ("", "false", "none"):
        return None
    if word in ("true", "last"):
        return "last"
    return "auto" if word == "auto" else text


def require_free_folder(args: ContAccumTrainingArguments) -> None:
    """Raise `ConfigError` if a run would overwrite other work, or another run, in its folder."""
    folder = Path(str(args.output_dir))
    work.require_own_folder(folder, TRAINING, allows_files=True)
    request = parse_resume_request(args.resume_from_checkpoint)
    if args.overwrite_output_dir or request == "last":
        return
    run_id = work.read_identity(folder).get("run_id")
    is_finished = work.read_result(folder) is not None
    if request == "auto":
        # An unfinished run without a checkpoint was killed before its first one, and starts again.
        is_free = not is_finished or bool(find_complete(folder, run_id))
    elif request is not None:
        # A run keeps its id when it resumes, so a checkpoint of another run would replace the run
        # in the folder, if there is one. `choose_checkpoint` refuses an incomplete one.
        saved = read_checkpoint(Path(request))
        is_free = saved is None or run_id in (None, saved["run_id"])
    else:
        is_free = not is_finished and not find_checkpoints(folder)
    if not is_free:
        found = "a finished run" if is_finished else "an unfinished run"
        raise ConfigError(
            f"{folder}: the folder contains {found}. Set resume_from_checkpoint=last to continue "
            "it, overwrite_output_dir=true to replace it, or another output_dir"
        )


def choose_checkpoint(
    resume_from_checkpoint: str | bool | None, args: ContAccumTrainingArguments
) -> tuple[Path, Saved] | None:
    """Return the checkpoint to resume from, and its result; None for a new run.

    ``"last"`` and ``"auto"`` mean the newest complete checkpoint of the run in ``output_dir``; for
    ``"auto"`` without one, the run starts from the beginning.

    Raises:
        UserError: if there is no complete checkpoint, or it has no state of the optimizer.
    """
    request = parse_resume_request(resume_from_checkpoint)
    if request is None:
        return None
    is_named = request not in ("last", "auto")
    folder = Path(request if is_named else str(args.output_dir))
    run_id = work.read_identity(folder).get("run_id")
    paths = [folder] if is_named else find_checkpoints(folder)
    for path in paths:
        saved = read_checkpoint(path)
        if saved is None or not (is_named or saved["run_id"] == run_id):
            logger.warning(f"skipped {path}: it is incomplete, or belongs to another run")
            continue
        if not saved["resumable"]:
            raise UserError(
                f"{path}: written with save_only_model, so a run cannot resume from it. Start a "
                f"new run from its weights with --model {path}"
            )
        if args.process_index == 0:
            updates = f"{saved['update']:,} updates"
            print(f"resuming from         {path} (after {updates})", flush=True)
        return path, saved
    # "auto" starts a new run if the run in the folder was killed before its first complete
    # checkpoint. Without a run, the user may want to continue from one of the checkpoints.
    if request == "auto" and (not paths or run_id is not None):
        return None
    raise UserError(
        f"{folder}: no complete checkpoint to resume from. Set resume_from_checkpoint to the "
        "folder of one, or drop it to start a new run"
    )
