"""One training in a folder, and the question whether a folder has the result of the same work.

`run` is all that tuning and `contaccum fit` know about trainings. `once` does a piece of work in a
folder, unless the folder has its result already. An identity is everything that decides a result;
here it is compared with that of an earlier start. (`contaccum.training.checkpoint` compares the
settings of a training that resumes from a checkpoint.) With several processes, the first one
compares and writes, and all processes get the same result.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import IntervalStrategy

from contaccum import __version__
from contaccum.distributed import RANK_TIMEOUT, broadcast, rank, world_size
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.errors import ConfigError, UserError
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.files import fingerprint, hash_file, list_changes, lock_folder, read_json, write_json
from contaccum.retrieval.encode import model_fingerprint, tokenisation_fingerprint
from contaccum.retrieval.store import EmbeddingStore
from contaccum.settings import Settings, find, replace, to_dict
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.checkpoint import count_rows
from contaccum.training.log import EVAL_LOG, TRAIN_LOG, is_finished, read_log
from contaccum.training.setup import load_encoder, load_guide, load_run_data
from contaccum.training.trainer import make_trainer, train_and_save

QueryScores = dict[str, float]
"""{query id: its score by the evaluator's primary metric}"""

Identity = Mapping[str, Any]
"""{name: JSON value} of everything that decides the result of some work."""

IDENTITY_FILE = "identity.json"
RESULT_FILE = "result.json"
MODEL_FOLDER = "model"

# A speed is measured in so many updates, each of so many micro-batches at most.
_MEASURED_UPDATES = 2
_MEASURED_MICRO_BATCHES = 1


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


# Runs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        score: the mean of the evaluator's primary metric; None if the run failed.
        query_scores: the scores at the end of the training.
        updates: the number of updates.
        seconds: the time of loading, training and scoring.
        seconds_per_update: the median time of the updates in the second half of the run.
        scoring_seconds: the time of scoring.
        note: the reason if there is no score.
        point: what the caller varied, {setting: value}.
    """

    score: float | None = None
    query_scores: QueryScores = field(default_factory=dict)
    updates: int = 0
    seconds: float = 0.0
    seconds_per_update: float = 0.0
    scoring_seconds: float = 0.0
    note: str = ""
    point: dict[str, Any] = field(default_factory=dict)


def run(
    settings: Settings,
    evaluator: RetrievalEvaluator,
    folder: Path,
    *,
    point: Mapping[str, Any] | None = None,
    keeps_error: bool = False,
    keeps_model: bool = False,
) -> Result:
    """Train by the settings in a folder, and score the model.

    A finished run is not repeated.

    Args:
        settings: the settings; ``output_dir`` and ``eval_data`` are not used here.
        evaluator: scores the model at the end.
        point: what the caller varied; it is kept with the result.
        keeps_error: True: an error of the user is the result, in ``note``.
        keeps_model: True: the model is saved in the folder `MODEL_FOLDER` there.

    Raises:
        UserError: for settings, data or a model that cannot be used.
    """
    varied = dict(point or {})

    def work() -> dict[str, Any]:
        try:
            result = _train_and_score(settings, evaluator, folder, keeps_model)
        except UserError as error:
            if not keeps_error:
                raise
            result = Result(note=str(error))
        return asdict(dataclasses.replace(result, point=varied))

    evaluation = [evaluator.dataset.fingerprint, evaluator.primary_metric]
    identity = {**describe_settings(replace(settings, eval_data=None)), "evaluation": evaluation}
    return Result(**once(folder, identity, work, all_ranks=True))


def run_and_keep(settings: Settings, folder: Path) -> Result:
    """Train as `contaccum train` does in a folder, which then has the model.

    A finished run is not repeated. A run that was killed goes on from its last checkpoint; if the
    settings have changed, it starts anew. The checkpoints are removed at the end.

    Args:
        settings: the settings; ``eval_data`` decides the best checkpoint.

    Returns:
        The best score on ``eval_data``, and the times.

    Raises:
        UserError: for settings, data or a model that cannot be used.
    """

    def work() -> dict[str, Any]:
        if not is_finished(folder):
            train_and_save(replace(settings, output_dir=str(folder), resume_from_checkpoint="auto"))
        times = [line["seconds"] for line in read_log(folder / TRAIN_LOG)]
        scores = []
        for record in read_log(folder / EVAL_LOG):
            scores += [value for name, value in record.items() if name == "eval_ndcg@10"]
        result = Result(
            score=max(scores),
            updates=len(times),
            seconds=sum(times),
            seconds_per_update=_summarise(times),
        )
        return asdict(result)

    result = Result(**once(folder, describe_settings(settings), work, all_ranks=True))
    if rank() == 0:
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    return result


def measure_speed(settings: Settings, folder: Path) -> float:
    """Return the present seconds per update of a training with the settings.

    They are measured in two updates of a single micro-batch. The folder is removed.

    Raises:
        UserError: for settings, data or a model that cannot be used.
    """
    micro_batch = settings.per_device_train_batch_size
    changes: dict[str, Any] = {}
    scale = 1.0
    if micro_batch != "auto":  # else the trainer divides an update itself
        pairs_per_update = ContAccumTrainingArguments.from_settings(settings).total_train_batch_size
        assert pairs_per_update is not None  # computed when the arguments are created
        num_micro_batches = pairs_per_update // (micro_batch * world_size())
        few = min(_MEASURED_MICRO_BATCHES, num_micro_batches)
        changes = {"total_train_batch_size": None, "gradient_accumulation_steps": few}
        scale = num_micro_batches / few
    # The first update is slower, because it allocates memory.
    settings = replace(settings, **changes, max_steps=_MEASURED_UPDATES + 1, warmup_steps=0)
    try:
        update_seconds = _train(settings, folder).seconds[1:]
    finally:
        if rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    # All processes use the time of the first process, so that they make the same decisions.
    return broadcast(scale * statistics.fmean(update_seconds))


def read_results(folder: Path) -> list[Result]:
    """Return the results of the finished runs in ``folder``/0, 1, 2, ..."""

    def read() -> list[Any]:
        contents: list[Any] = []
        while (file := folder / str(len(contents)) / RESULT_FILE).is_file():
            contents.append(read_json(file))
        return contents

    return [Result(**content) for content in on_first_rank(read)]


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


def _train_and_score(
    settings: Settings, evaluator: RetrievalEvaluator, folder: Path, keeps_model: bool
) -> Result:
    """Train, and score the model at the end."""
    started = time.perf_counter()
    clock = _train(settings, folder, evaluator, keeps_model)
    ended = time.perf_counter()
    query_scores = broadcast(evaluator.query_scores)  # only the first process has scores
    return Result(
        score=statistics.fmean(query_scores.values()),
        query_scores=query_scores,
        updates=len(clock.seconds),
        seconds=round(ended - started, 1),
        seconds_per_update=_summarise(clock.seconds),
        scoring_seconds=round(ended - clock.last_end, 1),
    )


def _train(
    settings: Settings,
    folder: Path,
    evaluator: RetrievalEvaluator | None = None,
    keeps_model: bool = False,
) -> _UpdateTimes:
    """Train in a folder without checkpoints, and let the evaluator score the model at the end."""
    settings = replace(
        settings,
        output_dir=str(folder),
        eval_data=None,
        eval_strategy="no",
        load_best_model_at_end=False,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        overwrite_output_dir=True,
    )
    args = ContAccumTrainingArguments.from_settings(settings)
    data = load_run_data(settings, args)._replace(evaluator=evaluator)
    if evaluator is not None:
        # An earlier run may have left document embeddings here. A query-side trainer sets the
        # embeddings of its own store, and in other runs the evaluator encodes the documents.
        evaluator.documents = None
        args.eval_strategy = IntervalStrategy.STEPS
        args.eval_steps = count_updates(data.training.dataset, args)
    bars_were_shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()  # it would appear between the lines printed
    try:
        encoder = load_encoder(settings, args)
    finally:
        if bars_were_shown:
            transformers.utils.logging.enable_progress_bar()
    encoder.model_card_data.generate_widget_examples = False  # the model card is not kept
    clock = _UpdateTimes()
    trainer = make_trainer(encoder, settings, args, data, callbacks=[clock])
    trainer.remove_callback(PrinterCallback)  # the caller prints the score
    trainer.signals.saves_checkpoint = False
    try:
        trainer.train()
        if keeps_model:
            trainer.save_model(str(folder / MODEL_FOLDER))
    finally:
        del trainer, encoder
        gc.collect()  # a trainer and its model refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return clock


class _UpdateTimes(TrainerCallback):
    """The seconds of each update of a training, and when the last one ended."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.last_end = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.last_end = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.last_end)
        self.last_end = now


def _summarise(update_seconds: Sequence[float]) -> float:
    """Return the median time of an update in the second half of a run, when the caches are warm."""
    return statistics.median(update_seconds[len(update_seconds) // 2 :])
