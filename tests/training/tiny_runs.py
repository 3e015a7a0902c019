"""What tests of training share: data, states to compare, settings of a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sample_texts import sentences

from contaccum import ContAccumTrainer


def pairs(n: int, negatives: int = 0) -> Dataset:
    columns = {"query": sentences(n, 1), "positive": sentences(n, 2, 9)}
    return Dataset.from_dict({**columns, **{f"negative_{i + 1}": sentences(n, 3 + i) for i in range(negatives)}})


def log_of(folder: Path, name: str = "train_log.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def state_of(trainer: ContAccumTrainer) -> dict[str, torch.Tensor]:
    """Everything that decides how training goes on."""
    state = {f"model.{key}": value.clone() for key, value in trainer.model.state_dict().items()}
    for index, group in trainer.optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{index}.{key}": torch.as_tensor(value) for key, value in group.items()}
    for loss in trainer.bank_losses():
        state |= {f"bank.{key}": value for key, value in loss.bank_state_dict().items()}
    state["learning_rate"] = torch.tensor(trainer.lr_scheduler.get_last_lr())
    return {**state, "random": torch.get_rng_state()}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Keys whose values are not bit for bit the same."""
    assert one.keys() == other.keys()
    return [key for key in one if not torch.equal(one[key], other[key])]


def at_micro_step(trainer: Any, number: int, act: Callable[[Any], Any]) -> None:
    """Call ``act`` with the inputs before micro-step ``number`` of the run, from 1."""
    done, step = 0, trainer.micro_step

    def counted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal done
        done += 1
        if done == number:
            act(inputs)
        return step(model, inputs, *args, **kwargs)

    trainer.micro_step = counted


SAVES = {"save_strategy": "steps", "save_steps": 1}
"""A checkpoint after every update."""

RUN = {"data": pairs(43, negatives=1), "dropout": 0.1, "num_train_epochs": 2}
"""43 pairs: 11 micro-batches (the last of 3) in updates of 3, 3, 3 and 2; two epochs; dropout on."""
