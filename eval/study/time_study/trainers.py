"""The trainers of the study by time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from contaccum import DualEncoder
from contaccum.training.config import parse
from contaccum.training.run import load_encoder, load_run_data, make_trainer
from time_study.plan import Settings


def make_contaccum_trainer(settings: Settings) -> Any:
    """Return the trainer of `contaccum train` with these settings."""
    options = [f"--{key}={value}" for key, value in settings.items()]
    model_args, data_args, args = parse(options)
    data = load_run_data(data_args, args)
    encoder = load_encoder(model_args, args)
    return make_trainer(encoder, model_args, args, data)


TRAINERS: dict[str, Callable[[Settings], Any]] = {
    "contaccum": make_contaccum_trainer,
}


def get_trained_model(trainer: Any) -> DualEncoder:
    """Return the model of a trainer, without the mixed precision of training."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    return model
