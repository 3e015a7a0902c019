"""One trained run that many tests look at."""

from typing import Any

import pytest
from tiny_runs import RUN, SAVES, read_log, get_state, make_trainer


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Any:
    """One run of eight updates with a checkpoint each: its folder, its state at the end, its log."""
    folder = tmp_path_factory.mktemp("run")
    trainer = make_trainer(folder, **RUN, **SAVES)
    trainer.train()
    trainer.save_model()
    return folder, get_state(trainer), read_log(folder)
