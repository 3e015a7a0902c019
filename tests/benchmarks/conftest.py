"""Modules of the parts of benchmarks/gpu.py, and their cases in a dry run."""

import importlib
import math
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
    make = importlib.import_module("measuring.run").Run
    return lambda deadline=math.inf: make(torch.device("cpu"), deadline, is_tiny=True)


@pytest.fixture
def measure(part, make_run) -> Callable[[str], dict[str, Any]]:
    """Return a function that measures all cases of a part with tiny sizes."""

    def measure_cases(name: str) -> dict[str, Any]:
        module = part(name)
        return {case: get() for case, get in module.list_cases(module.TINY, make_run())}

    return measure_cases
