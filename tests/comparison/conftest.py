"""A tiny encoder, training pairs and a BEIR folder, made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from comparison_data import write_tiny_training


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("comparison")


@pytest.fixture(scope="session")
def tokens(place: Path, tiny_config: Any, tiny_tokenizer: Any) -> list[str]:
    return write_tiny_training(place, tiny_config, tiny_tokenizer)


@pytest.fixture(scope="session")
def beir(place: Path, tokens: list[str]) -> str:
    return str(place / "beir")
