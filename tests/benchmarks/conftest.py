"""Modules of the parts of benchmarks/gpu.py, and settings to run them."""

import importlib
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from programs import ROOT


@pytest.fixture
def part(monkeypatch) -> Callable[[str], ModuleType]:
    """Return a function that imports a module of the parts by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return lambda name: importlib.import_module(f"gpu_parts.{name}")


@pytest.fixture
def make_run(part) -> Callable[..., Any]:
    """Return a function that makes the settings of a dry run."""
    settings = part("settings")

    def make(deadline: float | None = None) -> Any:
        if deadline is None:
            deadline = time.monotonic() + 60
        return settings.Run(settings.TINY, torch.device("cpu"), deadline, is_tiny=True)

    return make
