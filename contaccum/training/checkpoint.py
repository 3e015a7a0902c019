"""Checkpoints: which are complete, which a run resumes from, and which are removed.

transformers writes the files of a checkpoint (a folder ``checkpoint-N`` after update N), and the
trainer adds the banks. Then `write_marker` writes ``contaccum.json`` with the size of every file
and properties of the run. A folder without this marker, or with a file of another size, is
incomplete and is never loaded.

Every run has an id, which the markers of its checkpoints record. ``run.json`` in ``output_dir``
records the id of the latest run there, and whether it has finished. A run resumes from a checkpoint
of another run only if the user names that folder.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.sampler import BatchSamplers
from torch import Tensor
from transformers import TrainerState
from transformers.trainer_utils import sort_checkpoints

from contaccum import __version__
from contaccum.data.sampling import first_texts
from contaccum.encoders.adapters import describe_adapters, find_adapter_bases, has_adapter
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.files import (
    Fingerprint,
    list_changes,
    provenance,
    read_json,
    write_json,
)
from contaccum.losses.contaccum import ContAccumLoss
from contaccum.retrieval.encode import (
    hash_tensors,
    model_fingerprint,
    tokenisation_fingerprint,
)
from contaccum.settings import find
from contaccum.training.arguments import ContAccumTrainingArguments, get_name
from contaccum.training.log import is_finished, read_run_record
from contaccum.training.losses import get_store_documents, list_bank_losses, list_parts

logger = logging.getLogger(__name__)

MARKER = "contaccum.json"
BANK_FILE = "contaccum_bank.safetensors"
"""File of a checkpoint with the banks."""


def write_marker(folder: Path, record: Mapping[str, Any]) -> None:
    """Flush every file to the disk, then write the marker that makes the checkpoint complete.

    The marker has the properties of the run in ``record``, the version and the size of each file.
    """
    sizes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    write_json(folder / MARKER, {"contaccum": __version__, **record, "files": sizes})


def read_marker(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's marker, as `write_marker` wrote it."""
    return read_json(folder / MARKER)


def explain_incomplete(folder: Path) -> str | None:
    """Return why a checkpoint is incomplete, as a phrase; None for a complete one."""
    try:
        sizes = read_marker(folder)["files"]
    except (DataError, KeyError):
        return f"{MARKER} is missing or damaged"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{name} is missing or has another size than when it was written"
    return None


def explain_unusable(folder: Path, run_id: str | None) -> str | None:
    """Return why the run ``run_id`` cannot resume from a checkpoint; None if it can."""
    reason = explain_incomplete(folder)
    if reason is None and read_marker(folder)["run_id"] != run_id:
        return "it belongs to another run"
    return reason


def find_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Return all checkpoints in a folder, complete or not, newest first."""
    paths = [Path(path) for path in reversed(sort_checkpoints(str(folder)))]
    # transformers also lists names such as checkpoint-6-copy, which the user has made.
    return [path for path in paths if re.fullmatch(r"checkpoint-\d+", path.name)]


def collect_banks(losses: Iterable[ContAccumLoss], keep: bool) -> dict[str, Tensor]:
    """Return the states of the banks of all losses, by name, on the CPU.

    Every rank must call this function, because a loss may gather its bank from all ranks.
    A rank without ``keep`` takes part in gathering, and gets empty states.
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
        state = {}
        for key, value in states.items():
            if key.startswith(prefix):
                state[key.removeprefix(prefix)] = value
        loss.load_bank_state_dict(state)


# Removing ----------------------------------------------------------------------------------------


def remove_replaced(args: ContAccumTrainingArguments, run_id: str | None, update: int) -> None:
    """Remove the checkpoints that the run ``run_id`` replaces when it continues after an update.

    ``update`` is 0 for a new run. A new run with ``overwrite_output_dir`` replaces every checkpoint
    in its folder. A resumed run replaces its own later checkpoints, because it trains their updates
    again, perhaps with other results. If they remained, ``resume_from_checkpoint=last`` would
    resume from the old results.
    """
    replaces_all = args.overwrite_output_dir and update == 0
    for path in find_checkpoints(str(args.output_dir)):
        if not replaces_all:
            if explain_unusable(path, run_id) or read_marker(path)["update"] <= update:
                continue
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
    checkpoints = []
    for path in find_checkpoints(folder):
        if explain_unusable(path, run_id) is None:
            checkpoints.append(path)
    # An earlier start may have written the path of the best checkpoint in another way.
    best_path = Path(best).resolve() if best else None
    removable = [path for path in checkpoints[1:] if path.resolve() != best_path]
    num_protected = len(checkpoints) - len(removable)
    for path in removable[max(limit - num_protected, 0) :]:
        shutil.rmtree(path, ignore_errors=True)


# The description of a run: ``run.json``, and the settings that a resumed run must share -----------


def count_rows(dataset: Any) -> int | None:
    """Return the number of rows in all parts of a training set; None for a stream."""
    total = 0
    for part in list_parts(dataset):
        if not hasattr(part, "__len__"):
            return None
        total += len(part)
    return total


@dataclass
class RunDescription:
    """The description of a run, for ``run.json`` and for the markers of its checkpoints.

    Attributes:
        args: the arguments in use.
        user_arguments: the arguments as the user wrote them.
        model: the encoder.
        loss: the training loss, or a dictionary with one loss for each data set.
        engine: name of the engine that shards the model; None without one.
        train_dataset: the training set, or a dictionary of training sets.
        data_record: properties of the data for ``run.json``; a missing ``fingerprint`` is computed
            when needed.
        evaluator: the evaluator of the run; None without evaluation.
    """

    args: ContAccumTrainingArguments
    user_arguments: Mapping[str, Any]
    model: SentenceTransformer
    loss: Any
    engine: str | None
    train_dataset: Any
    data_record: Mapping[str, Any]
    evaluator: Any

    def __post_init__(self) -> None:
        # Now, because parameters are empty once ZeRO-3 has sharded them.
        self._num_parameters = 0
        self._num_trained_parameters = 0
        frozen_parameters = {}
        for name, parameter in self.model.named_parameters():
            self._num_parameters += parameter.numel()
            if parameter.requires_grad:
                self._num_trained_parameters += parameter.numel()
            elif "lora_" not in name:
                frozen_parameters[name] = parameter
        self._base_of_adapters = None
        if has_adapter(self.model):
            self._base_of_adapters = hash_tensors(frozen_parameters)
        guides = [bank_loss.guide for bank_loss in list_bank_losses(self.loss) if bank_loss.guide]
        self._guide = guides[0] if guides else None
        self._documents = get_store_documents(self.loss)

    @cached_property
    def _fingerprint(self) -> str | None:
        """The hash of the training texts; None for a stream."""
        if "fingerprint" in self.data_record:
            return self.data_record["fingerprint"]
        if count_rows(self.train_dataset) is None:
            return None
        fingerprint = Fingerprint()
        for part in list_parts(self.train_dataset):
            for batch in first_texts(part):
                for row in zip(*batch.values(), strict=True):
                    fingerprint.add(*row)
        return fingerprint.hex()

    def make_run_record(self, run_id: str | None, max_steps: int) -> dict[str, Any]:
        """Return the content of ``run.json``, for a run of ``max_steps`` updates."""
        args = self.args
        record = {
            "run_id": run_id,
            "finished": False,
            "method": args.method,
            "seed": args.seed,
            "pairs_per_update": args.total_train_batch_size,
            "micro_batch": None if args.has_auto_micro_batch else args.pairs_per_micro_batch,
            "updates": max_steps,
            "data": {
                "fingerprint": self._fingerprint,
                "rows": count_rows(self.train_dataset),
                **self.data_record,
            },
            "model": {
                "base": getattr(self.model.model_card_data, "base_model", None),
                "parameters": self._num_parameters,
                "adapters": describe_adapters(self.model),
                "guide": None if self._guide is None else self._guide.name,
            },
        }
        if self._documents is not None:
            record["documents"] = self._documents.describe()
        if hasattr(self.evaluator, "describe"):
            record["evaluation"] = self.evaluator.describe()
        return {**record, "arguments": self.user_arguments, **provenance()}

    @cached_property
    def resume_settings(self) -> dict[str, Any]:
        """The settings that a resumed run must share with its checkpoint, by name.

        An error message shows the names, so those that are not arguments are in plain words.
        """
        args = self.args
        settings: dict[str, Any] = {}
        # With another value of one of these, the saved states of bank and optimizer, or the saved
        # position in the data, would not be valid. Files are compared by their content below, and
        # the pairs per update by their number, which also depends on the number of ranks.
        compared_below = {*find("is_path"), "total_train_batch_size"}
        for name in find("on_change", "restart"):
            if (
                name in ContAccumTrainingArguments.__dataclass_fields__
                and name not in compared_below
            ):
                settings[name] = self.user_arguments.get(name)
        settings["pairs per update"] = args.total_train_batch_size
        settings["rows"] = count_rows(self.train_dataset)
        settings["trained parameters"] = self._num_trained_parameters
        settings["engine"] = self.engine
        settings["adapters"] = describe_adapters(self.model)
        # A checkpoint holds neither the base of an adapter nor the guide, and their files may have
        # changed. The settings of the tokenizer are read from the folder of the model, too.
        settings["base of the adapters"] = self._base_of_adapters
        settings["tokenizer, prompts, lengths or pooling"] = tokenisation_fingerprint(self.model)
        settings["guide"] = self._guide and model_fingerprint(self._guide.model)
        settings["documents of the store"] = self._documents and self._documents.fingerprint
        if self._fingerprint is not None:
            settings["data fingerprint"] = self._fingerprint
        # With another sampler than the default, or several data sets, the order of the rows also
        # depends on the batch size.
        settings["batch_sampler"] = get_name(args.batch_sampler)
        is_default_sampler = settings["batch_sampler"] == BatchSamplers.BATCH_SAMPLER.value
        if not is_default_sampler or isinstance(self.train_dataset, dict):
            settings["pairs per batch of the sampler"] = args.train_batch_size
        return settings


# Resuming: whether a run resumes, and from which checkpoint ---------------------------------------

_LENGTH_SETTINGS = ("max_steps", "num_train_epochs", "early_stopping_patience")
"""Arguments that decide when a run ends."""


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint that a run resumes from.

    Attributes:
        folder: the checkpoint.
        marker: the content of its marker, as `write_marker` wrote it.
        state: the state of transformers' trainer, which the checkpoint contains.
        is_newest: True if the user asked for the newest checkpoint, and no newer folder was skipped
            as incomplete or as one of another run.
    """

    folder: Path
    marker: Mapping[str, Any]
    state: TrainerState
    is_newest: bool

    def require_same_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise `UserError` if a run with these `RunDescription.resume_settings` cannot resume."""
        saved = self.marker["settings"]
        # A checkpoint of an earlier version may have further settings.
        changes = list_changes({name: saved.get(name) for name in settings}, settings)
        if changes:
            raise UserError(
                f"{self.folder}: a run cannot resume from it with changed settings "
                f"({', '.join(changes)}), because its bank, optimizer or position in the data "
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
        is the best checkpoint (with ``load_best_model_at_end``), else this checkpoint if it is of
        the last update, else the saved model in ``output_dir``.

        Args:
            args: the arguments of the run.
            user_arguments: the arguments as the user wrote them.
        """
        output_dir = Path(str(args.output_dir))
        record = read_run_record(output_dir)
        has_same_length = record.get("run_id") == self.marker["run_id"] and all(
            record["arguments"].get(name) == user_arguments.get(name) for name in _LENGTH_SETTINGS
        )
        num_updates = self.state.global_step
        # stateful_callbacks may be a list by its type, but TrainerState makes it a dictionary.
        callbacks = cast(dict[str, dict], self.state.stateful_callbacks)
        attributes = callbacks.get("EvaluationCallback", {}).get("attributes", {})
        evaluations_without_gain = attributes.get("early_stopping_patience_counter", 0)
        patience = args.early_stopping_patience
        # ``num_train_epochs`` may be a fraction, so a run may end in the middle of an epoch. The
        # number of updates is in run.json; that in the state may be of an earlier, shorter start.
        ended_here = (
            (patience is not None and evaluations_without_gain >= patience)
            or 0 < args.max_steps <= num_updates
            or (has_same_length and num_updates >= record["updates"])
        )
        # If only the best checkpoints are kept, a finished run may have gone on after this one.
        ended_later = self.is_newest and has_same_length and is_finished(output_dir)
        if not (ended_here or ended_later):
            return None
        best = self.state.best_model_checkpoint if args.load_best_model_at_end else None
        if best is not None and explain_incomplete(Path(best)) is None:
            final_model = best
        elif ended_here:
            final_model = str(self.folder)
        elif bool(find_adapter_bases(output_dir)) == bool(find_adapter_bases(self.folder)):
            final_model = str(output_dir)
        else:
            # With merge_adapter, the saved model has no adapter, but the run's model has one. So
            # the last updates are trained again.
            return None
        if not ended_here:
            num_updates = record["updates"]
        logger.warning(
            f"nothing is left to train after update {num_updates}: the run has ended. Raise "
            "max_steps, num_train_epochs or early_stopping_patience to train on"
        )
        return final_model


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
        reason = explain_unusable(path, run_id)
        if reason is None:
            return path, skipped
        skipped.append(f"{path}: {reason}")
    return None, skipped


def require_free_folder(args: ContAccumTrainingArguments) -> None:
    """Raise `ConfigError` if a new run would overwrite another run in ``output_dir``."""
    request = parse_resume_request(args.resume_from_checkpoint)
    if args.overwrite_output_dir or request == "last":
        return
    folder = Path(str(args.output_dir))
    record = read_run_record(folder)
    has_model = bool(record) and (folder / "modules.json").is_file()
    if request == "auto":
        is_resumed = find_newest_checkpoint(folder)[0] is not None
        # An unfinished run without a checkpoint was killed before its first one, and starts again.
        # A model there is of an older run, and the killed run was allowed to overwrite it.
        if is_resumed or not (has_model and is_finished(folder)):
            return
    elif request is not None:
        if explain_incomplete(Path(request)) is not None:
            return  # `choose_checkpoint` refuses it
        # A run keeps its id when it resumes, so a checkpoint of another run would replace the run
        # in the folder, if there is one.
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
    is_named = request not in ("last", "auto")
    folder = request if is_named else str(args.output_dir)
    if is_named:
        path = None
        skipped = []
        reason = explain_incomplete(Path(folder))
        if reason is None:
            path = Path(folder)
        else:
            skipped.append(reason)
    else:
        path, skipped = find_newest_checkpoint(folder)
    # "auto" may start a new run if the latest run was killed before its first complete checkpoint.
    # With run.json, this is certain: the skipped checkpoints are incomplete, or of another run.
    # Without run.json, the user may want to continue from one of them.
    may_start_new = request == "auto" and (not skipped or bool(read_run_record(folder)))
    if path is None and not may_start_new:
        reasons = "; ".join(skipped) or "there is none"
        raise UserError(
            f"{folder}: no checkpoint to resume from ({reasons}). Set resume_from_checkpoint to "
            "the folder of a complete checkpoint, or drop it to start a new run"
        )
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
    return ResumePoint(path, marker, state, not is_named and not skipped)
