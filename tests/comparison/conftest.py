"""Training pairs, a BEIR folder, and the options of a short run."""

from pathlib import Path

import pytest
from small_data import write_training_and_beir_data


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    write_training_and_beir_data(folder, 43)
    return folder


@pytest.fixture(scope="session")
def tokens(data_folder, tiny_model_path) -> list[str]:
    """Options of a run of a second: 43 pairs, n=4, K=3, two epochs of 4 updates."""
    return [
        f"--model={tiny_model_path}",
        f"--train_data={data_folder / 'pairs.jsonl'}",
        "--num_train_epochs=2",
        "--learning_rate=1e-3",
        "--per_device_train_batch_size=4",
        "--gradient_accumulation_steps=3",
        "--bank_size=20",
        "--use_cpu=true",
    ]
