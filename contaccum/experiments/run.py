"""One training in a folder, and the question whether a folder has the result of the same work.

`train` is all that `contaccum fit` knows about trainings. `once` does a piece of work in a folder,
unless the folder has its result already. An identity is everything that decides a result;
here it is compared with that of an earlier start. (`contaccum.training.checkpoint` compares the
settings of a training that resumes from a checkpoint.) With several processes, the first one
compares and writes, and all processes get the same result.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from contaccum import __version__
from contaccum.distributed import RANK_TIMEOUT, broadcast, rank
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.errors import ConfigError, UserError
from contaccum.experiments.budget import Budget
from contaccum.files import fingerprint, hash_file, list_changes, lock_folder, read_json, write_json
from contaccum.retrieval.encode import model_fingerprint, tokenisation_fingerprint
from contaccum.retrieval.store import EmbeddingStore
from contaccum.settings import Settings, find, replace, to_dict
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.checkpoint import count_rows
from contaccum.training.log import TRAIN_LOG, is_finished, read_log
from contaccum.training.setup import load_guide
from contaccum.training.trainer import train_and_save

Identity = Mapping[str, Any]
"""{name: JSON value} of everything that decides the result of some work."""

IDENTITY_FILE = "identity.json"
RESULT_FILE = "result.json"
TRAINING_FOLDER = "training"


class Job(NamedTuple):
    """A call of `fit`: what all its parts share.

    Attributes:
        folder: the output folder, an absolute path.
        request: everything that decides the results, as JSON: the identity of all work in it.
        given: the user's settings of a training.
        args: training arguments with these settings: the device and the batch sizes.
        budget: the time of all starts.
        print_line: prints a line for the user, on the first process only.
    """

    folder: Path
    request: Identity
    given: Mapping[str, Any]
    args: ContAccumTrainingArguments
    budget: Budget
    print_line: Callable[[str], None]

    @property
    def data(self) -> Path:
        """The folder of the split."""
        return self.folder / "data"

    @property
    def store(self) -> Path:
        """The folder of the training documents' vectors by the base model."""
        return self.folder / "store"

    @property
    def batch_size(self) -> int:
        """The number of texts per forward pass outside of trainings."""
        return self.args.per_device_eval_batch_size


# A piece of work in a folder ----------------------------------------------------------------------


def once(
    folder: Path,
    identity: Identity,
    work: Callable[[], dict[str, Any]],
    *,
    all_ranks: bool = False,
) -> dict[str, Any]:
    """Return the result of some work in a folder, which is done unless it is done already.

    The folder has ``identity.json`` from the start of the work on, and ``result.json`` from its end
    on. Work that a kill has interrupted goes on with the files that it left. If the identity has
    changed, the folder is emptied first.

    Args:
        identity: everything that decides the result.
        work: does the work in the folder, and returns its result as a JSON object.
        all_ranks: True if all processes do the work together. Otherwise the first one does it, and
            the others wait.

    Raises:
        UserError: if another process works in the folder, and for the errors of the work.
    """
    finished = on_first_rank(lambda: find_result(folder, identity, may_restart=True))
    if finished is not None:
        return finished
    with begin(folder, identity, "run", may_restart=True):
        result = work() if all_ranks or rank() == 0 else None
        result = broadcast(json.loads(json.dumps(result)))  # as it will be read, without tuples
        if rank() == 0:
            write_json(folder / RESULT_FILE, result)
    return result


def find_result(folder: Path, identity: Identity, may_restart: bool) -> dict[str, Any] | None:
    """Return the result of the same work in a folder; None if there is none.

    Raises:
        ConfigError: for the result of other work, unless the work may restart.
    """
    if not (folder / RESULT_FILE).is_file():
        return None
    if may_restart and _list_changes(folder / IDENTITY_FILE, identity):
        return None
    require_same_work(folder, identity)
    return read_json(folder / RESULT_FILE)


@contextmanager
def begin(folder: Path, identity: Identity, command: str, may_restart: bool) -> Iterator[None]:
    """Hold the lock of a folder in a ``with`` block, and write the identity of the work.

    Args:
        command: the name of the command in the error if another process works in the folder.
        may_restart: True: a folder with another identity is emptied. False: it is refused.

    Raises:
        ConfigError: if the folder has other work, or another process works in it.
    """
    with lock_folder(folder, command) if rank() == 0 else nullcontext():
        if rank() == 0 and may_restart and _list_changes(folder / IDENTITY_FILE, identity):
            for path in folder.iterdir():  # not the folder itself, which is locked
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        require_same_work(folder, identity)
        if rank() == 0:
            (folder / RESULT_FILE).unlink(missing_ok=True)
        broadcast(None)  # the other processes wait for the first one
        try:
            yield
        except UserError:
            # Nothing was done: the user corrects the mistake, and may use the folder.
            if rank() == 0 and [path.name for path in folder.iterdir()] == [IDENTITY_FILE]:
                (folder / IDENTITY_FILE).unlink()
            raise


def require_same_work(folder: Path, identity: Identity, file_name: str = IDENTITY_FILE) -> None:
    """Write an identity to a file of a folder, or check that it is that of an earlier start.

    Raises:
        ConfigError: if the identity differs.
    """
    if rank() != 0:
        return
    changes = _list_changes(folder / file_name, identity)
    if changes:
        raise ConfigError(
            f"{folder}: this folder has work with another {', '.join(changes)}; name another "
            "output folder, or remove this one"
        )
    write_json(folder / file_name, identity)


def _list_changes(file: Path, identity: Identity) -> list[str]:
    return list_changes(read_json(file), identity) if file.is_file() else []


def on_first_rank(work: Callable[[], Any]) -> Any:
    """Return on all processes what the first one computes, as JSON; the others wait for it."""
    return broadcast(work() if rank() == 0 else None)


def only_first_rank(print_line: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that prints lines on the first process only."""
    return print_line if rank() == 0 else lambda line: None


# Identities ---------------------------------------------------------------------------------------


def describe_settings(settings: Settings) -> dict[str, Any]:
    """Return {name: value} of the settings that decide the result of a run, and the version.

    A file or folder is described by its content, so that it may be moved.
    """
    ignored = find("on_change", "ignore")
    paths = find("is_path")
    identity: dict[str, Any] = {"version": __version__}
    for name, value in to_dict(settings).items():
        if name in ignored:
            continue
        if name == "passage_store":  # its embeddings are large, and have a hash already
            value = EmbeddingStore.open(value).fingerprint
        elif name in paths:
            items = value if isinstance(value, list) else [value]
            value = [hash_path(item) for item in items]
        identity[name] = value
    return identity


def describe_models(
    encoder: DualEncoder, settings: Settings, args: ContAccumTrainingArguments
) -> dict[str, str | None]:
    """Return hashes of the base model, its tokenisation and the guide, by name."""
    return {
        "model": model_fingerprint(encoder),
        "tokenisation (tokenizer, prompts, lengths or pooling)": tokenisation_fingerprint(encoder),
        "guide": model_fingerprint(load_guide(settings, args)),
    }


def hash_path(name: str, left_out: Path | None = None) -> str:
    """Return a hash of a file or folder; the name itself of anything else, as on the hub.

    Args:
        name: the path or name, or a JSON object with a ``path``, as in ``train_data``.
        left_out: a folder whose files do not count.

    Raises:
        ConfigError: if a file cannot be read.
    """
    if name.lstrip().startswith("{"):
        options = json.loads(name)
        return json.dumps({**options, "path": hash_path(str(options.get("path")))})
    path = Path(name).expanduser()
    contents = []
    try:
        for file in sorted([path, *path.rglob("*")] if path.is_dir() else [path]):
            if left_out is not None and file.resolve().is_relative_to(left_out.resolve()):
                continue
            if file.is_file():
                state = file.stat()
                content = _hash_file(file, state.st_size, state.st_mtime_ns)
                contents += ["" if file == path else str(file.relative_to(path)), content]
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read ({error.strerror})") from error
    return fingerprint(*contents) if contents else name


@functools.cache  # all runs of a search have the same model, which may be large
def _hash_file(file: Path, size: int, time_changed: int) -> str:
    return hash_file(file)


# Trainings ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """The result of a training.

    Attributes:
        updates: the number of updates.
        seconds: the time of the updates.
        rates: the learning rate of each update.
    """

    updates: int
    seconds: float
    rates: list[float]


def train(settings: Settings, folder: Path, seconds: float | None = None) -> Trained:
    """Train as `contaccum train` does, in the folder `TRAINING_FOLDER`, which then has the model.

    A finished training is not repeated. One that was killed goes on from its last checkpoint.

    Args:
        settings: the settings, without those of checkpoints.
        seconds: the time for the updates; see `ContAccumTrainer`. None: as long as they take.

    Raises:
        UserError: for settings, data or a model that cannot be used.
    """
    output = folder / TRAINING_FOLDER
    if not on_first_rank(lambda: is_finished(output)):
        settings = replace(
            settings,
            output_dir=str(output),
            resume_from_checkpoint="auto",
            save_strategy="no",
            logging_strategy="no",
        )
        bars_were_shown = transformers.utils.logging.is_progress_bar_enabled()
        transformers.utils.logging.disable_progress_bar()  # it would appear between printed lines
        try:
            train_and_save(settings, seconds, print_line=lambda line: None)
        finally:
            if bars_were_shown:
                transformers.utils.logging.enable_progress_bar()
        gc.collect()  # a trainer and its model refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def read() -> dict[str, Any]:
        for checkpoint in output.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
        lines = read_log(output / TRAIN_LOG)
        return {
            "updates": len(lines),
            "seconds": sum(line["seconds"] for line in lines),
            "rates": [line["learning_rate"] for line in lines],
        }

    return Trained(**on_first_rank(read))


def start_ranks(settings: Settings) -> ContAccumTrainingArguments:
    """Return the arguments of a training; with several processes, they can communicate from now on.

    One process may have much more work than the others, so they wait for it for a long time.

    Raises:
        ConfigError: for settings that cannot work on this machine.
    """
    settings = replace(settings, ddp_timeout=int(RANK_TIMEOUT.total_seconds()))
    return ContAccumTrainingArguments.from_settings(settings)


def count_updates(dataset: Any, args: ContAccumTrainingArguments) -> int:
    """Return the number of updates of a run on a training set, or a dictionary of training sets."""
    if args.max_steps > 0:
        return int(args.max_steps)
    num_rows = count_rows(dataset)
    assert num_rows is not None  # streams have no length, but they need max_steps
    assert args.total_train_batch_size is not None  # computed when the arguments are created
    updates_per_epoch = math.ceil(num_rows / args.total_train_batch_size)
    return max(1, math.ceil(updates_per_epoch * args.num_train_epochs))
