"""One trained run that many tests look at."""

from typing import Any

import pytest
from tiny_runs import RUN, SAVES, log_of, state_of, trainer_in


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Any:
    """One run of eight updates with a checkpoint each: its folder, its state at the end, its log."""
    folder = tmp_path_factory.mktemp("run")
    trainer = trainer_in(folder, **RUN, **SAVES)
    trainer.train()
    trainer.save_model()
    return folder, state_of(trainer), log_of(folder)
