"""FSDP2 and DeepSpeed's ZeRO train, skip, save and resume as DDP does."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import is_deepspeed_available
from programs import run_forking_script
from safetensors.torch import load_file
from tiny_runs import read_log

from contaccum.errors import UserError
from contaccum.training.engines import MIN_DEEPSPEED, refuse_unsafe_files

pytestmark = pytest.mark.long
needs_deepspeed = pytest.mark.skipif(
    not is_deepspeed_available(), reason="DeepSpeed is not installed"
)
ENGINES = [
    "fsdp",
    pytest.param("zero2", marks=needs_deepspeed),
    pytest.param("zero3", marks=needs_deepspeed),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folder of all runs of engine_runs.py."""
    folder = tmp_path_factory.mktemp("engines")
    exit_codes = run_forking_script(Path(__file__).with_name("engine_runs.py"), "engines", folder)
    assert all(codes == [0, 0] for codes in exit_codes.values()), exit_codes
    return folder


def load_state(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a model or checkpoint, and its bank."""
    files = [*folder.rglob("model.safetensors"), *folder.glob("contaccum_bank.safetensors")]
    state = {}
    for file in files:
        for name, value in load_file(file).items():
            state[f"{file.relative_to(folder)} {name}"] = value
    return state


def load_weights(folder: Path) -> torch.Tensor:
    """Return the weights of a model or checkpoint as one vector."""
    state = sorted(load_state(folder).items())
    return torch.cat([x.flatten() for name, x in state if "model.safetensors" in name])


def get_norms(line: dict[str, Any]) -> list[float]:
    """Return the gradient norms of both towers in a line of the log."""
    return [line["grad_norm_query"], line["grad_norm_passage"]]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", ["tied", "untied", "float64"])
def test_weights_and_bank_equal_those_of_ddp(runs, engine, case):
    """The case untied trains with gradient checkpointing."""
    if case == "float64" and engine != "fsdp":
        pytest.skip("DeepSpeed has no float64")
    ddp_folder = runs / f"ddp-{case}" / "checkpoint-2"
    folder = runs / f"{engine}-{case}" / "checkpoint-2"
    tolerance = 1e-10 if case == "float64" else 1e-6
    assert (load_weights(ddp_folder) - load_weights(folder)).abs().max() < tolerance
    if case == "tied":
        first_checkpoint = load_weights(runs / "ddp-tied" / "checkpoint-1")
        assert (load_weights(ddp_folder) - first_checkpoint).abs().max() > 1e-4
    ddp_state = load_state(ddp_folder)
    state = load_state(folder)
    assert ddp_state.keys() == state.keys()
    for name, value in ddp_state.items():
        if value.numel():
            assert (value.double() - state[name].double()).abs().max() < 1e-5, name
    wrapper = "FSDPDualEncoder" if engine == "fsdp" else "DeepSpeedEngine"
    for rank in (0, 1):
        record = json.loads((runs / f"{engine}-{case}" / f"rank-{rank}.json").read_text())
        assert record == {"wrapped": wrapper, "updates": 2}


@pytest.mark.parametrize("engine", ENGINES)
def test_gradient_norms_are_those_of_the_embeddings(runs, engine):
    """With an engine, the norms of both towers are measured on embeddings, not on weights."""
    tied_log = read_log(runs / f"{engine}-tied")
    untied_log = read_log(runs / f"{engine}-untied")
    for line, expected in zip(tied_log, read_log(runs / "ddp-tied"), strict=True):
        assert get_norms(line) == pytest.approx(get_norms(expected), rel=1e-5)
    # Tied and untied towers start with the same weights, and so with the same embeddings.
    assert get_norms(tied_log[0]) == pytest.approx(get_norms(untied_log[0]), rel=1e-5)
    # DDP measures the norms of untied towers on their weights, which gives other numbers.
    ddp_norm = read_log(runs / "ddp-untied")[0]["grad_norm_query"]
    assert ddp_norm != pytest.approx(untied_log[0]["grad_norm_query"], rel=0.1)


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_of_an_earlier_checkpoint_are_loaded_after_training(runs, engine):
    folder = runs / f"{engine}-tied"
    assert torch.equal(load_weights(folder / "first"), load_weights(folder / "checkpoint-1"))
    assert not torch.equal(load_weights(folder / "first"), load_weights(folder / "checkpoint-2"))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_resumed_run_continues_exactly_and_skips_nonfinite_updates(runs, engine):
    straight = load_state(runs / f"{engine}-tied" / "checkpoint-2")
    resumed = load_state(runs / f"{engine}-resumed" / "checkpoint-2")
    assert straight.keys() == resumed.keys()
    assert [name for name, x in straight.items() if not torch.equal(x, resumed[name])] == []
    folder = runs / f"{engine}-resumed"
    # The third update is not finite, so it changes no weight.
    assert torch.equal(load_weights(folder / "checkpoint-2"), load_weights(folder / "checkpoint-3"))
    line = read_log(folder)[-1]
    assert line["update"] == 3
    assert line["skipped"] == "loss"
    assert line["micro_steps"] == [0]
    assert len(line["rows"]) == 4


@needs_deepspeed
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_checkpoint_that_would_run_code_is_refused(protocol, tmp_path):
    """It is refused before DeepSpeed unpickles it."""

    class MakesFolder:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "was run"),)

    torch.save({"module": torch.ones(2)}, tmp_path / "mp_rank_00_model_states.pt")
    refuse_unsafe_files(tmp_path)
    torch.save({"module": MakesFolder()}, tmp_path / "optim_states.pt", pickle_protocol=protocol)
    with pytest.raises(UserError, match=r"optim_states.pt: it holds more than tensors"):
        refuse_unsafe_files(tmp_path)
    assert not (tmp_path / "was run").exists()


def test_the_extra_requires_the_checked_version_of_deepspeed():
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert re.findall(r"deepspeed>=([\d.]+)", project.read_text()) == [MIN_DEEPSPEED]
