"""Checkpoints: completeness, saving and removing.

transformers writes the files of a checkpoint (a folder ``checkpoint-N`` after update N), and
`save_banks` adds the banks. Then `write_marker` writes ``contaccum.json`` with the size of every
file and properties of the run. A folder without this marker, or with a file of another size, is
incomplete and is never loaded. Every run has an id, which ``run.json`` and the markers of its
checkpoints record. `contaccum.training.resuming` chooses the checkpoint that a run resumes from.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.trainer_utils import sort_checkpoints

from contaccum import __version__
from contaccum.distributed import over_ranks
from contaccum.errors import DataError
from contaccum.files import read_json, write_json
from contaccum.losses.contaccum import ContAccumLoss
from contaccum.training.arguments import ContAccumTrainingArguments

logger = logging.getLogger(__name__)

MARKER = "contaccum.json"
BANK_FILE = "contaccum_bank.safetensors"
"""File of a checkpoint with the banks."""


def write_marker(folder: Path, record: Mapping[str, Any]) -> None:
    """Flush every file to the disk, then write the marker that makes the checkpoint complete.

    Args:
        folder: the checkpoint.
        record: properties of the run for the marker, from `RunDescription.make_marker`. The version
            and the file sizes are added.
    """
    sizes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    write_json(folder / MARKER, {"contaccum": __version__, **record, "files": sizes})


def read_marker(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a checkpoint's marker, as `write_marker` wrote it."""
    return read_json(Path(folder) / MARKER)


def find_defect(folder: Path) -> str | None:
    """Return a phrase that explains why a checkpoint is incomplete; None for a complete one."""
    try:
        sizes = read_marker(folder)["files"]
    except (DataError, KeyError):
        return f"{MARKER} is missing or damaged"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{name} is missing or has another size than when it was written"
    return None


def find_defect_for_run(folder: Path, run_id: str | None) -> str | None:
    """Return a phrase that explains why the run ``run_id`` cannot use a checkpoint.

    The result is None if the checkpoint is complete and belongs to this run.
    """
    defect = find_defect(folder)
    if defect is None and read_marker(folder)["run_id"] != run_id:
        return "it belongs to another run"
    return defect


def find_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Return all checkpoints in a folder, complete or not, newest first."""
    paths = [Path(path) for path in reversed(sort_checkpoints(str(folder)))]
    # transformers also lists names such as checkpoint-6-copy, which the user has made.
    return [path for path in paths if re.fullmatch(r"checkpoint-\d+", path.name)]


def new_run_id(device: torch.device) -> str:
    """Return a random id that is the same on every rank.

    It does not use the random number generators of training, whose seed may be the same in many
    runs.
    """
    # Every rank proposes a number, and all use the largest. 62 bits fit into a signed integer.
    number = torch.tensor(uuid4().int >> 66, device=device)
    return f"{int(over_ranks('MAX', number)):016x}"


@contextmanager
def remove_on_failure(folder: Path, is_writer: bool) -> Iterator[None]:
    """Remove a folder that a ``with`` block writes: before the block, and if the block fails.

    The folder may exist before the block if an earlier start of the run was killed while it wrote.
    """
    if is_writer:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        yield
    except BaseException:
        if is_writer:
            shutil.rmtree(folder, ignore_errors=True)
        raise


# Banks --------------------------------------------------------------------------------------------


def collect_banks(losses: Iterable[ContAccumLoss], keep: bool) -> dict[str, Tensor]:
    """Return the states of the banks of all losses, by name.

    Every rank must call this function, because a loss may gather its bank from all ranks.

    Args:
        losses: the losses with banks of a run.
        keep: see `ContAccumLoss.bank_state_dict`.
    """
    states = {}
    for index, loss in enumerate(losses):
        for key, value in loss.bank_state_dict(keep=keep).items():
            states[f"{index}.{key}"] = value
    return states


def save_banks(folder: Path, states: Mapping[str, Tensor]) -> None:
    """Write the result of `collect_banks` into a checkpoint."""
    on_cpu = {}
    for key, value in states.items():
        on_cpu[key] = value.detach().cpu().clone().contiguous()
    save_file(on_cpu, folder / BANK_FILE)


def load_banks(folder: Path, losses: Iterable[ContAccumLoss]) -> None:
    """Load the banks that `save_banks` wrote."""
    states = load_file(folder / BANK_FILE)
    for index, loss in enumerate(losses):
        prefix = f"{index}."
        state = {}
        for key, value in states.items():
            if key.startswith(prefix):
                state[key.removeprefix(prefix)] = value
        loss.load_bank_state_dict(state)


# Removing ----------------------------------------------------------------------------------------


def remove_replaced(args: ContAccumTrainingArguments, run_id: str | None, update: int) -> None:
    """Remove the checkpoints that a run replaces when it starts after ``update`` updates.

    A new run with ``overwrite_output_dir`` replaces every checkpoint in its folder. A resumed run
    replaces its own later checkpoints, because it trains their updates again, perhaps with other
    results. If they remained, ``resume_from_checkpoint=last`` would resume from the old results.

    Args:
        args: the arguments of the run.
        run_id: id of the run.
        update: number of updates before the start; 0 for a new run.
    """
    replaces_all = args.overwrite_output_dir and update == 0
    for path in find_checkpoints(str(args.output_dir)):
        if not replaces_all:
            try:
                marker = read_marker(path)
            except DataError:  # an incomplete checkpoint is never loaded
                continue
            if marker["run_id"] != run_id or marker["update"] <= update:
                continue
            logger.warning(
                f"removed {path}: the run continues after update {update} and trains the later "
                "updates again"
            )
        shutil.rmtree(path)


def remove_oldest(
    folder: str,
    run_id: str | None,
    limit: int | None,
    best: str | None,
    has_ended: bool = False,
) -> None:
    """Remove checkpoints until ``limit`` remain, first those that this run cannot use.

    The best checkpoint always remains. The newest one remains too while the run is training,
    because it may have to resume from it. transformers would remove older checkpoints before the
    new one is complete, and also folders that the user has made, such as checkpoint-6-copy.

    Args:
        folder: the folder with the checkpoints.
        run_id: id of this run.
        limit: ``save_total_limit``; None removes nothing.
        best: folder of the best checkpoint so far, if there is one.
        has_ended: whether the training has ended.
    """
    if limit is None or limit < 1:
        return
    # transformers orders checkpoints by time or number only, and could remove checkpoints of this
    # run while those of an earlier run remain. Here the usable checkpoints come first (False sorts
    # before True), and among them the newest, because the sort is stable.
    checkpoints = sorted(
        find_checkpoints(folder),
        key=lambda path: find_defect_for_run(path, run_id) is not None,
    )
    protected = set() if best and has_ended else set(checkpoints[:1])
    if best:
        protected.add(Path(best))
    # An earlier start may have written the path of the best checkpoint in another way.
    protected = {path.resolve() for path in protected}
    removable = [path for path in checkpoints if path.resolve() not in protected]
    num_protected = len(checkpoints) - len(removable)
    num_not_removed = max(limit - num_protected, 0)
    for path in removable[num_not_removed:]:
        shutil.rmtree(path, ignore_errors=True)
