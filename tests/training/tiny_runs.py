"""What tests of training share: data, a trainer of a tiny model, states to compare."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sample_texts import sentences
from small_data import read_lines
from tiny_models import tiny_encoder

from contaccum import ContAccumTrainer, ContAccumTrainingArguments
from contaccum.training.arguments import BANK_METHODS

SETTINGS = {
    "method": "contaccum",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 3,
    "seed": 5,
}
SETTINGS |= {"num_train_epochs": 1, "learning_rate": 1e-3, "weight_decay": 0.01, "warmup_steps": 2}
SETTINGS |= {"save_strategy": "no", "logging_steps": 1000, "disable_tqdm": True}
OF_THE_TRAINER = (
    "evaluator",
    "eval_dataset",
    "loss",
    "callbacks",
    "mining_data",
    "data_record",
    "guide",
)


def make_pairs(n: int, negatives: int = 0) -> Dataset:
    columns = {"query": sentences(n, 1), "positive": sentences(n, 2, 9)}
    return Dataset.from_dict(
        {**columns, **{f"negative_{i + 1}": sentences(n, 3 + i) for i in range(negatives)}}
    )


def make_arguments(folder: Path, **settings: Any) -> ContAccumTrainingArguments:
    settings = {**SETTINGS, **settings}
    if settings["method"] in BANK_METHODS:
        settings.setdefault("bank_size", 20)
    return ContAccumTrainingArguments(output_dir=str(folder), **settings)


def make_trainer(
    folder: Path,
    data: Any = 36,
    tied: bool = True,
    dropout: float = 0.0,
    model: Any = None,
    **settings: Any,
) -> ContAccumTrainer:
    """Micro-batches of 4, 3 an update, 12 pairs to each of 3 updates; dropout off unless asked for."""
    model = tiny_encoder(tied, dropout) if model is None else model
    given = {name: settings.pop(name) for name in OF_THE_TRAINER if name in settings}
    data = make_pairs(data) if isinstance(data, int) else data
    return ContAccumTrainer(model, make_arguments(folder, **settings), data, **given)


def read_log(folder: Path, name: str = "train_log.jsonl") -> list[dict[str, Any]]:
    return read_lines(folder / name)


def record_texts(
    trainer: Any, before: Callable[[Any], Any] = lambda inputs: None
) -> list[list[tuple[str, ...]]]:
    """The rows of every micro-batch that is trained on, as decoded texts, in order; filled by training.

    Args:
        before: called with the inputs of each.
    """
    seen: list[list[tuple[str, ...]]] = []
    step = trainer.micro_step

    def spy(model: Any, inputs: dict[str, Any], *others: Any, **more: Any) -> Any:
        before(inputs)
        columns = [inputs[name] for name in inputs if name.endswith("_input_ids")]
        decoded = [
            trainer.processing_class.batch_decode(column, skip_special_tokens=True)
            for column in columns
        ]
        seen.append(list(zip(*decoded, strict=True)))
        return step(model, inputs, *others, **more)

    trainer.micro_step = spy
    return seen


def get_state(trainer: ContAccumTrainer) -> dict[str, torch.Tensor]:
    """Everything that decides how training goes on."""
    state = {f"model.{key}": value.clone() for key, value in trainer.model.state_dict().items()}
    for index, group in trainer.optimizer.state_dict()["state"].items():
        state |= {
            f"optimizer.{index}.{key}": torch.as_tensor(value) for key, value in group.items()
        }
    for loss in trainer.bank_losses():
        state |= {f"bank.{key}": value for key, value in loss.bank_state_dict().items()}
    state["learning_rate"] = torch.tensor(trainer.lr_scheduler.get_last_lr())
    return {**state, "random": torch.get_rng_state()}


def list_differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Keys whose values are not bit for bit the same."""
    assert one.keys() == other.keys()
    return [key for key in one if not torch.equal(one[key], other[key])]


def assert_resumes(
    make: Callable[..., ContAccumTrainer], folder: Path, *updates: int
) -> ContAccumTrainer:
    """Runs resumed after each of the updates end bit for bit as the straight one, which is returned."""
    straight = make(folder / "straight", **SAVES)
    straight.train()
    losses = [line["loss"] for line in read_log(folder / "straight")]
    for update in updates:
        resumed = make(folder / f"from-{update}")
        resumed.train(resume_from_checkpoint=str(folder / "straight" / f"checkpoint-{update}"))
        assert list_differences(get_state(straight), get_state(resumed)) == []
        assert [line["loss"] for line in read_log(folder / f"from-{update}")] == losses[update:]
    return straight


def call_at_micro_step(trainer: Any, number: int, act: Callable[[Any], Any]) -> None:
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

RUN = {"data": make_pairs(43, negatives=1), "dropout": 0.1, "num_train_epochs": 2}
"""43 pairs: 11 micro-batches (the last of 3) in updates of 3, 3, 3 and 2; two epochs; dropout on."""
