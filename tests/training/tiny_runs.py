"""Shared code of the training tests: data, a trainer of a tiny model, and states to compare."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sample_texts import sentences
from small_data import read_lines
from tiny_models import tiny_encoder

from contaccum import ContAccumTrainer, ContAccumTrainingArguments
from contaccum.settings import WITH_BANK

DEFAULTS = {
    "method": "contaccum",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 3,
    "seed": 5,
    "num_train_epochs": 1,
    "learning_rate": 1e-3,
    "weight_decay": 0.01,
    "warmup_steps": 0,
    "save_strategy": "no",
    "logging_steps": 1000,
    "disable_tqdm": True,
}
"""Arguments of every run here, unless a test sets others."""

TRAINER_OPTIONS = ("evaluator", "eval_dataset", "loss", "callbacks", "data_record")
"""Settings of `make_trainer` that are passed to the trainer itself."""
AUTO = {
    "per_device_train_batch_size": "auto",
    "gradient_accumulation_steps": 1,
    "total_train_batch_size": 12,
}
"""The batch sizes of `DEFAULTS`, of which the trainer finds the micro-batch."""

EVERY_CALL = set(range(999))
"""Calls of `simulate_out_of_memory`."""


def make_pairs(num_pairs: int, negatives: int = 0) -> Dataset:
    """Return pairs with the given number of hard negatives per query."""
    columns = {"query": sentences(num_pairs, 1), "positive": sentences(num_pairs, 2, 9)}
    for index in range(negatives):
        columns[f"negative_{index + 1}"] = sentences(num_pairs, 3 + index)
    return Dataset.from_dict(columns)


def make_arguments(folder: Path, **settings: Any) -> ContAccumTrainingArguments:
    """Return the arguments of a run: `DEFAULTS`, a bank of 20 rows, and ``settings``."""
    settings = {**DEFAULTS, **settings}
    if settings["method"] in WITH_BANK:
        settings.setdefault("bank_size", 20)
    return ContAccumTrainingArguments(output_dir=str(folder), **settings)


make_encoder = cache(tiny_encoder)  # which writes and reads the files of a model


def make_trainer(
    folder: Path,
    data: Any = 36,
    tied: bool = True,
    dropout: float = 0.0,
    model: Any = None,
    **settings: Any,
) -> ContAccumTrainer:
    """Return a trainer of a tiny model.

    By default it trains on 36 pairs in 3 updates of 3 micro-batches of 4 pairs, without dropout.
    ``data`` is a data set, or the number of pairs to make; ``model`` replaces ``tied`` and
    ``dropout``; ``settings`` are training arguments, and `TRAINER_OPTIONS`.
    """
    if model is None:
        model = copy.deepcopy(make_encoder(tied, dropout))
    if isinstance(data, int):
        data = make_pairs(data)
    options = {name: settings.pop(name) for name in TRAINER_OPTIONS if name in settings}
    return ContAccumTrainer(model, make_arguments(folder, **settings), data, **options)


def read_log(folder: Path, name: str = "train_log.jsonl") -> list[dict[str, Any]]:
    """Return the records of a run's log."""
    return read_lines(folder / name)


def record_texts(
    trainer: Any, before_step: Callable[[Any], Any] = lambda inputs: None
) -> list[list[tuple[str, ...]]]:
    """Return a list that training fills with the rows of decoded texts of each micro-batch.

    ``before_step`` is called with the inputs of each micro-batch.
    """
    texts: list[list[tuple[str, ...]]] = []
    micro_step = trainer.micro_step

    def record(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        before_step(inputs)
        columns = []
        for name, token_ids in inputs.items():
            if name.endswith("_input_ids"):
                tokenizer = trainer.processing_class
                columns.append(tokenizer.batch_decode(token_ids, skip_special_tokens=True))
        texts.append(list(zip(*columns, strict=True)))
        return micro_step(model, inputs, *args, **kwargs)

    trainer.micro_step = record
    return texts


def get_state(trainer: ContAccumTrainer) -> dict[str, torch.Tensor]:
    """Return everything that determines how training continues."""
    state = {}
    for key, value in trainer.model.state_dict().items():
        state[f"model.{key}"] = value.clone()
    for index, group in trainer.optimizer.state_dict()["state"].items():
        for key, value in group.items():
            state[f"optimizer.{index}.{key}"] = torch.as_tensor(value)
    for loss in trainer.bank_losses():
        for key, value in loss.bank_state_dict().items():
            state[f"bank.{key}"] = value
    state["learning_rate"] = torch.tensor(trainer.lr_scheduler.get_last_lr())
    state["random"] = torch.get_rng_state()
    return state


def list_differences(
    expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]
) -> list[str]:
    """Return the keys whose values are not equal bit for bit."""
    assert expected.keys() == actual.keys()
    return [key for key, value in expected.items() if not torch.equal(value, actual[key])]


def assert_resumes(
    make: Callable[..., ContAccumTrainer], folder: Path, *updates: int
) -> ContAccumTrainer:
    """Assert that runs resumed after the given updates end bit for bit as an uninterrupted run.

    ``make`` returns a trainer for an output folder and further settings. The result is the trainer
    of the uninterrupted run, whose folder is ``straight``.
    """
    straight = make(folder / "straight", **SAVE_EVERY_UPDATE)
    straight.train()
    losses = [line["loss"] for line in read_log(folder / "straight")]
    for update in updates:
        resumed = make(folder / f"from-{update}")
        resumed.train(resume_from_checkpoint=str(folder / "straight" / f"checkpoint-{update}"))
        assert list_differences(get_state(straight), get_state(resumed)) == []
        resumed_losses = [line["loss"] for line in read_log(folder / f"from-{update}")]
        assert resumed_losses == losses[update:]
    return straight


def call_at_micro_step(trainer: Any, number: int, action: Callable[[Any], Any]) -> None:
    """Call ``action`` with the inputs before micro-step ``number`` of the run, from 1."""
    micro_step = trainer.micro_step
    num_calls = 0

    def counted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == number:
            action(inputs)
        return micro_step(model, inputs, *args, **kwargs)

    trainer.micro_step = counted


SAVE_EVERY_UPDATE = {"save_strategy": "steps", "save_steps": 1}

RUN_SETTINGS = {
    "data": make_pairs(43, negatives=1),
    "dropout": 0.1,
    "num_train_epochs": 2,
    "warmup_steps": 2,
}
"""43 pairs in 11 micro-batches, the last of 3 pairs, and two epochs with dropout and a warmup.

The updates of an epoch have 3, 3, 3 and 2 micro-batches.
"""


def simulate_out_of_memory(trainer: Any, stage: str, calls: set[int], max_rows: int) -> None:
    """Make some calls of a stage, from 1, raise out-of-memory errors for more than ``max_rows``.

    The stages are the forward passes of "queries" and "passages", and "backward".
    """
    num_calls = 0

    def check(num_rows: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_rows > max_rows and num_calls in calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def before_forward(module: Any, arguments: Any) -> None:
        features = arguments[0]
        task = {"queries": "query", "passages": "document"}.get(stage)
        if torch.is_grad_enabled() and module.training and features.get("task") == task:
            check(len(features["input_ids"]))

    def after_forward(module: Any, arguments: Any, output: Any) -> None:
        is_query = arguments[0].get("task") == "query"
        if stage == "backward" and torch.is_grad_enabled() and is_query:
            # The backward pass of queries comes last: the weights have the passages' gradients.
            output["sentence_embedding"].register_hook(lambda gradient: check(len(gradient)))

    trainer.model.register_forward_pre_hook(before_forward)
    trainer.model.register_forward_hook(after_forward)
