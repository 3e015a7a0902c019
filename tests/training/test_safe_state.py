"""States written without pickles come back bit for bit, and nothing else is read."""

from __future__ import annotations

import math
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contaccum.errors import UserError
from contaccum.training.safe_state import load_state, random_states, save_state, set_random_states


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))


def test_any_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        0: {"step": torch.tensor(3.0), "bf16": torch.randn(3).bfloat16(), "int": torch.tensor([2**62])},
        "betas": (0.9, 0.999, (1, None)),
        "flags": [True, False, None, "text", 2**70, -1],
        "floats": [0.1, math.inf, -math.inf, math.nan, 1e-320],
        "$tuple": {"$tensor": "no tensor"},
        "views": [base[1], base.T, base],
        "empty": [{}, [], (), torch.empty(0, 3)],
    }
    save_state(tmp_path / "state.safetensors", state)
    assert same(state, load_state(tmp_path / "state.safetensors"))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor", "RMSprop"])
def test_optimizer_and_schedule_go_on_exactly(name: str, tmp_path: Path) -> None:
    def start() -> tuple[torch.nn.Linear, Any, Any]:
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def steps(model: torch.nn.Linear, optimizer: Any, schedule: Any, count: int) -> None:
        for _ in range(count):
            model(torch.ones(3)).square().sum().backward()
            optimizer.step()
            schedule.step()

    straight, resumed = start(), start()
    steps(*straight, 2)
    for index, file in ((1, "optimizer.safetensors"), (2, "scheduler.json")):
        save_state(tmp_path / file, straight[index].state_dict())
        resumed[index].load_state_dict(load_state(tmp_path / file))
    resumed[0].load_state_dict(straight[0].state_dict())
    for run in (straight, resumed):
        run[0].zero_grad()
        steps(*run, 3)
    assert torch.equal(straight[0].weight, resumed[0].weight)
    assert straight[2].get_last_lr() == resumed[2].get_last_lr()


def test_gradient_scaler_goes_on_exactly(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    save_state(tmp_path / "scaler.json", scaler.state_dict())
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(load_state(tmp_path / "scaler.json"))
    assert other.state_dict() == scaler.state_dict() and other.state_dict()["_growth_tracker"] == 2


def test_random_numbers_go_on_exactly(tmp_path: Path) -> None:
    random.gauss(0, 1), np.random.standard_normal(), torch.randn(3)  # halves of pairs are kept by generators
    save_state(tmp_path / "random.safetensors", random_states())
    draws = [random.gauss(0, 1), random.random(), np.random.standard_normal(3).tolist(), torch.randn(3).tolist()]
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    set_random_states(load_state(tmp_path / "random.safetensors"))
    again = [random.gauss(0, 1), random.random(), np.random.standard_normal(3).tolist(), torch.randn(3).tolist()]
    assert draws == again


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(Runs.trace),)

    trace: Path


@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
def test_pickle_in_the_place_of_a_state_does_not_run(name: str, tmp_path: Path) -> None:
    Runs.trace = tmp_path / "ran"
    (tmp_path / name).write_bytes(pickle.dumps(Runs()))
    with pytest.raises(UserError, match="cannot be read as a state"):
        load_state(tmp_path / name)
    assert not Runs.trace.exists()


def test_what_cannot_be_said_is_refused_by_its_place(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"a state holds a set at groups\.1\.params"):
        save_state(tmp_path / "state.safetensors", {"groups": [1, {"params": {1}}]})
    with pytest.raises(TypeError, match="a tensor at weight, which JSON cannot say"):
        save_state(tmp_path / "state.json", {"weight": torch.ones(1)})
