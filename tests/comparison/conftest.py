"""Training pairs and a BEIR folder, made once."""

from pathlib import Path

import pytest
from small_data import write_training_and_beir_data


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    write_training_and_beir_data(folder, 43)
    return folder


@pytest.fixture(scope="session")
def tokens(place, tiny_model_path) -> list[str]:
    """Options of a run that takes a second: 43 pairs, n=4, K=3, two epochs of 4 updates."""
    settings = f"model={tiny_model_path} train_data={place / 'pairs.jsonl'} num_train_epochs=2 learning_rate=1e-3"
    settings += (
        " per_device_train_batch_size=4 gradient_accumulation_steps=3 bank_size=20 use_cpu=true"
    )
    return [f"--{setting}" for setting in settings.split()]
