"""A trainer of a tiny model, ready to run, and one trained run that many tests look at."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_encoder
from tiny_runs import RUN, SAVES, log_of, pairs, state_of

from contaccum import ContAccumTrainer, ContAccumTrainingArguments
from contaccum.training.arguments import BANK_METHODS

Maker = Callable[..., ContAccumTrainer]


@pytest.fixture(scope="session")
def trainer_in() -> Maker:
    """Makes a trainer: micro-batches of 4, 3 an update, 12 pairs to each of 3 updates; dropout off unless asked for."""

    def make(
        folder: Path, data: Any = 36, tied: bool = True, dropout: float = 0.0, model: Any = None, **settings: Any
    ) -> ContAccumTrainer:
        model = tiny_encoder(tied, dropout) if model is None else model
        trainer_names = ("evaluator", "eval_dataset", "loss", "callbacks", "mining_data", "data_record", "guide")
        given = {name: settings.pop(name) for name in trainer_names if name in settings}
        settings = {
            "method": "contaccum",
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 3,
            "learning_rate": 1e-3,
            "weight_decay": 0.01,
            "warmup_steps": 2,
            "num_train_epochs": 1,
            "save_strategy": "no",
            "logging_steps": 1000,
            "seed": 5,
            "disable_tqdm": True,
        } | settings
        if settings["method"] in BANK_METHODS:
            settings.setdefault("bank_size", 20)
        args = ContAccumTrainingArguments(output_dir=str(folder), **settings)
        data = pairs(data) if isinstance(data, int) else data
        return ContAccumTrainer(model, args, data, **given)

    return make


@pytest.fixture(scope="session")
def run(trainer_in, tmp_path_factory) -> Any:
    """One run of eight updates with a checkpoint each: its folder, its state at the end, its log."""
    folder = tmp_path_factory.mktemp("run")
    trainer = trainer_in(folder, **RUN, **SAVES)
    trainer.train()
    trainer.save_model()
    return folder, state_of(trainer), log_of(folder)
