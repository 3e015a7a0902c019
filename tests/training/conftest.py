"""A trained run that many tests of this folder use."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tiny_runs import RUN_SETTINGS, SAVE_EVERY_UPDATE, get_state, make_trainer, read_log
from torch import Tensor


class Run(NamedTuple):
    """A finished run: its folder, its state at the end, and its log."""

    folder: Path
    state: dict[str, Tensor]
    log: list[dict[str, Any]]


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Run:
    """A run of eight updates with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("run")
    trainer = make_trainer(folder, **RUN_SETTINGS, **SAVE_EVERY_UPDATE)
    trainer.train()
    trainer.save_model()
    return Run(folder, get_state(trainer), read_log(folder))
