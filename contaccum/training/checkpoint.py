"""Checkpoints: which are whole, which one a run resumes from, what is saved and removed.

transformers writes a checkpoint; ``contaccum.json`` is written last, with the size of every file. A
folder without it, or with a file of another size, is not whole and is never loaded. Every run has
an id, which ``run.json`` and each of its checkpoints record. A run resumes from a checkpoint of
another run only where the user names that folder.

Whether a run resumes is decided by `parse_resume_request`, and from which checkpoint by
`choose_checkpoint`. `require_free_folder` refuses to replace another run.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerState
from transformers.trainer_utils import sort_checkpoints

from contaccum import __version__
from contaccum.distributed import over_ranks
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.files import read_json, write_json
from contaccum.training.arguments import (
    LOSS_SETTINGS,
    OVERWRITES_EACH_START,
    ContAccumTrainingArguments,
)
from contaccum.training.log import read_run_record

logger = logging.getLogger(__name__)

MARKER = "contaccum.json"
BANK_FILE = "contaccum_bank.safetensors"

SAME = (
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
    "refresh_negatives_every",
    "refresh_pool",
)
"""Arguments that a resumed run must have as before.

Bank and optimizer were made with them, or the position in the data is counted in them.
"""


def seal(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write every file to the disk, and the marker that makes the folder a whole checkpoint."""
    sizes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    write_json(folder / MARKER, {"contaccum": __version__, **facts, "files": sizes})


def read_facts(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the facts that `seal` wrote of the run."""
    return read_json(Path(folder) / MARKER)


def fault_of(folder: Path) -> str | None:
    """Return a phrase that says why a checkpoint cannot be used; None for a whole one."""
    try:
        sizes = read_facts(folder)["files"]
    except (DataError, KeyError):
        return f"it has no whole {MARKER}"
    for name, size in sizes.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != size:
            return f"{name} is not what was written"
    return None


def fault_for_run(folder: Path, run_id: str | None) -> str | None:
    """Return a phrase that says why the run ``run_id`` cannot use a checkpoint; None if it can."""
    fault = fault_of(folder)
    if fault is None and read_facts(folder).get("run_id") != run_id:
        return "it is of another run"
    return fault


def find_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints in a folder, whole or not, newest first."""
    paths = [Path(path) for path in reversed(sort_checkpoints(str(folder)))]
    # transformers also lists checkpoint-6-copy, which is the user's.
    return [path for path in paths if re.fullmatch(r"checkpoint-\d+", path.name)]


def new_run_id(device: torch.device) -> str:
    """Return a random id that is the same on every rank.

    The random numbers of training are not used for it.
    """
    # Every rank gets the maximum over all ranks; 62 bits fit into a signed integer.
    number = torch.tensor(uuid4().int >> 66, device=device)
    return f"{int(over_ranks('MAX', number)):016x}"


# Resuming ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from, with the facts and the state in it."""

    folder: Path
    facts: Mapping[str, Any]
    state: TrainerState

    @property
    def run_id(self) -> str | None:
        """The id of the run that wrote the checkpoint."""
        return self.facts.get("run_id")

    def position_in_stream(self) -> tuple[int, int]:
        """Return the complete passes over a stream, and the updates in the pass after them."""
        # transformers counts a pass over a stream as an epoch of max_steps updates, and starts the
        # next pass at the stream's end.
        epoch = float(self.state.epoch or 0)
        passes = int(epoch)
        return passes, round((epoch - passes) * self.state.max_steps)

    def final_model(self, args: ContAccumTrainingArguments) -> str | None:
        """Return the folder of the final model if the run has ended here; None if it goes on.

        transformers would do another update of a run that has ended.
        """
        # A dictionary, once the state is made.
        callbacks = cast(dict[str, dict], self.state.stateful_callbacks)
        saved = callbacks.get("EvaluationCallback", {}).get("attributes", {})
        evaluations_without_gain = saved.get("early_stopping_patience_counter", 0)
        patience = args.early_stopping_patience
        if patience is not None and evaluations_without_gain >= patience:
            reason = "stopped early: raise early_stopping_patience to go on"
        elif 0 < args.max_steps <= self.state.global_step:
            reason = "has all of max_steps"
        else:
            return None
        logger.warning(f"this run ended after update {self.state.global_step}; it {reason}")
        best = self.state.best_model_checkpoint if args.load_best_model_at_end else None
        if best is not None and fault_for_run(Path(best), self.run_id) is None:
            return best
        return str(self.folder)


def drop_lost_best(state: TrainerState, run_id: str | None) -> None:
    """Remove the best checkpoint from a state where the run ``run_id`` cannot use it."""
    best = state.best_model_checkpoint
    if best is None:
        return
    fault = fault_for_run(Path(best), run_id)
    if fault is not None:
        logger.warning(f"the best checkpoint so far, {best}, is left out: {fault}")
        state.best_model_checkpoint = None


def parse_resume_request(value: str | bool | None) -> str | None:
    """Return ``"last"``, ``"auto"`` or a folder to resume from; None to start anew.

    ``value`` is ``resume_from_checkpoint`` as a user writes it: True is ``"last"``.
    """
    text = str(value or "")
    word = text.lower()
    if word in ("", "false", "none"):
        return None
    if word in ("true", "last"):
        return "last"
    return "auto" if word == "auto" else text


def newest_checkpoint(folder: str | os.PathLike[str]) -> tuple[Path | None, list[str]]:
    """Return the newest whole checkpoint of the run that ``run.json`` in a folder describes.

    The second value says of each newer checkpoint why it is passed over.
    """
    run_id = read_run_record(folder).get("run_id")
    passed_over: list[str] = []
    for path in find_checkpoints(folder):
        fault = fault_for_run(path, run_id)
        if fault is None:
            return path, passed_over
        passed_over.append(f"{path}: {fault}")
    return None, passed_over


def require_free_folder(args: ContAccumTrainingArguments) -> None:
    """Raise `ConfigError` where a run would replace another one in its output_dir."""
    if args.overwrite_output_dir:
        return
    folder = Path(str(args.output_dir))
    request = parse_resume_request(args.resume_from_checkpoint)
    record = read_run_record(folder)
    has_model = bool(record) and (folder / "modules.json").is_file()
    checkpoints = find_checkpoints(folder)
    starts_anew = request is None
    if request == "auto" and newest_checkpoint(folder)[0] is None:
        # The model may be an earlier run's, which the run of run.json was to replace before it was
        # killed.
        starts_anew = has_model and record.get("finished", True)
    if not starts_anew:
        return
    if has_model:
        reason = "a finished run lies there, which this one would replace"
    elif checkpoints:
        reason = f"an unfinished run lies there, with {checkpoints[0].name}"
    else:
        return
    raise ConfigError(
        f"{folder}: {reason}. Set resume_from_checkpoint=last to go on with it, "
        "overwrite_output_dir=true to replace it, or name another output_dir"
    )


def choose_checkpoint(
    request: str, args: ContAccumTrainingArguments, settings: Mapping[str, Any]
) -> ResumePoint | None:
    """Return the checkpoint to resume from, None to start anew.

    A run starts anew for ``"auto"`` where it has no checkpoint yet.

    Args:
        request: of `parse_resume_request`. ``"last"`` and ``"auto"`` are the newest whole
            checkpoint of the run that ``run.json`` in the folder describes.
        args: the arguments of the run.
        settings: of this run; those in the checkpoint must be the same.

    Raises:
        ConfigError: for ``"auto"`` in a folder that is overwritten.
        UserError: where there is no checkpoint, none is whole, or it has other settings.
    """
    if request == "auto" and args.overwrite_output_dir:
        raise ConfigError(OVERWRITES_EACH_START)
    path, passed_over = _find_requested(request, args)
    for line in passed_over:
        logger.warning(f"passed over {line}")
    if path is None:
        return None
    facts = read_facts(path)
    _require_same_settings(path, facts, settings)
    if args.process_index == 0:
        print(f"resuming from         {path} (after {facts['update']:,} updates)", flush=True)
    state = TrainerState.load_from_json(str(path / "trainer_state.json"))
    return ResumePoint(path, facts, state)


def _find_requested(
    request: str, args: ContAccumTrainingArguments
) -> tuple[Path | None, list[str]]:
    """Return the requested checkpoint, and why newer ones are passed over."""
    passed_over: list[str] = []
    path: Path | None
    if request in ("last", "auto"):
        path, passed_over = newest_checkpoint(str(args.output_dir))
    else:
        path = Path(request)
        fault = fault_of(path)
        if fault is not None:
            path = None
            passed_over = [f"{request}: {fault}"]
    # A run that was killed before its first checkpoint was whole starts anew. Without run.json,
    # nobody can say which run the checkpoints belong to.
    has_record = bool(read_run_record(str(args.output_dir)))
    may_start_anew = request == "auto" and (not passed_over or has_record)
    if path is None and not may_start_anew:
        reasons = "; ".join(passed_over) or "there is none"
        raise UserError(
            f"{args.output_dir}: no checkpoint to resume from ({reasons}). Name the folder of a "
            "whole one, or start anew without resume_from_checkpoint"
        )
    return path, passed_over


def _require_same_settings(
    path: Path, facts: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Raise `UserError` for a checkpoint that a run with these settings cannot resume from."""
    if not facts["resumable"]:
        raise UserError(
            f"{path}: written with save_only_model: train from its weights with --model {path}"
        )
    saved = facts["settings"]
    changed = []
    for key, value in json.loads(json.dumps(settings, default=str)).items():
        if saved.get(key) != value:
            changed.append(f"{key}: {saved.get(key)} -> {value}")
    if changed:
        raise UserError(
            f"{path}: bank, optimizer or place in the data would mean nothing with "
            f"{'; '.join(changed)}. Set them back, or train from its weights with --model {path}"
        )


# States beside model and optimizer ---------------------------------------------------------------


@dataclass(frozen=True)
class StatePart:
    """A state that a checkpoint holds beside model and optimizer, such as a bank's."""

    prefix: str  # of its names in the file
    get: Callable[[], Mapping[str, Tensor]]  # every rank calls it
    load: Callable[[dict[str, Tensor]], object]


@contextmanager
def removed_on_failure(folder: Path, is_writer: bool) -> Iterator[None]:
    """Remove a folder before it is written within a block, and after an error in the block.

    A run that was killed while it wrote may have left the folder.
    """
    if is_writer:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        yield
    except BaseException:
        if is_writer:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def collect_states(parts: Iterable[StatePart]) -> dict[str, Tensor]:
    """Return the states of all parts by name; every rank calls it."""
    states = {}
    for part in parts:
        for key, value in part.get().items():
            states[f"{part.prefix}{key}"] = value
    return states


def save_states(folder: Path, states: Mapping[str, Tensor]) -> None:
    """Write what `collect_states` returned into a checkpoint."""
    on_cpu = {}
    for key, value in states.items():
        on_cpu[key] = value.detach().cpu().clone().contiguous()
    save_file(on_cpu, folder / BANK_FILE)


def load_states(folder: Path, parts: Iterable[StatePart]) -> None:
    """Load what `save_states` wrote."""
    states = load_file(folder / BANK_FILE)
    for part in parts:
        state = {}
        for key, value in states.items():
            if key.startswith(part.prefix):
                state[key.removeprefix(part.prefix)] = value
        part.load(state)


# Removing ----------------------------------------------------------------------------------------


def remove_replaced(args: ContAccumTrainingArguments, run_id: str | None, update: int) -> None:
    """Remove the checkpoints that a run replaces when it starts after ``update`` updates.

    A run that overwrites its folder replaces every checkpoint there. A run that resumes replaces
    its own later ones, because it does their updates again, perhaps with another result, and
    ``last`` would resume from them.

    Raises:
        UserError: for a folder that cannot be removed.
    """
    for path in find_checkpoints(str(args.output_dir)):
        is_overwritten = args.overwrite_output_dir and update == 0
        if not is_overwritten:
            try:
                facts = read_facts(path)
            except DataError:  # it is not whole, and will never be loaded
                continue
            if facts.get("run_id") != run_id or facts["update"] <= update:
                continue
            logger.warning(
                f"removed {path}: the run goes on from update {update}, and does its updates again"
            )
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be removed ({error.strerror}); remove it, or name another "
                "output_dir"
            ) from error


def remove_oldest(folder: str, run_id: str | None, limit: int | None, best: str | None) -> None:
    """Remove checkpoints until ``limit`` are left (None: all stay), those of other runs first.

    The newest checkpoint of the run ``run_id`` and the ``best`` one always stay.
    """
    if limit is None or limit < 1:
        return
    # transformers goes by time or number alone, where an earlier run's checkpoint may come last.
    own_first = sorted(
        find_checkpoints(folder),
        key=lambda path: fault_for_run(path, run_id) is not None,
    )
    removable = []
    for path in own_first[1:]:
        if not best or path != Path(best):
            removable.append(path)
    num_protected = len(own_first) - len(removable)
    for path in removable[max(limit - num_protected, 0) :]:
        shutil.rmtree(path, ignore_errors=True)
