"""FSDP2 and DeepSpeed's ZeRO train as DDP does: weights, bank, norms, what is skipped, what is saved and resumed."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import is_deepspeed_available
from safetensors.torch import load_file
from test_forked_runs import run_script
from tiny_runs import read_log

from contaccum.errors import UserError
from contaccum.training.arguments import MIN_DEEPSPEED
from contaccum.training.engines import refuse_unsafe_files

pytestmark = pytest.mark.long
needs_deepspeed = pytest.mark.skipif(
    not is_deepspeed_available(), reason="DeepSpeed is not installed"
)
ZERO = [pytest.param(name, marks=needs_deepspeed) for name in ("zero2", "zero3")]
NORMS = ("grad_norm_query", "grad_norm_passage")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    codes = run_script("engines", folder, "engine_runs.py")
    assert all(found == [0, 0] for found in codes.values()), codes
    return folder


def state(folder: Path) -> dict[str, torch.Tensor]:
    """Weights of a model or checkpoint, and its bank."""
    files = [*folder.rglob("model.safetensors"), *folder.glob("contaccum_bank.safetensors")]
    return {
        f"{file.relative_to(folder)} {name}": x
        for file in files
        for name, x in load_file(file).items()
    }


def weights(folder: Path) -> torch.Tensor:
    return torch.cat(
        [x.flatten() for name, x in sorted(state(folder).items()) if "model.safetensors" in name]
    )


@pytest.mark.parametrize("engine", ["fsdp", *ZERO])
@pytest.mark.parametrize(
    "case", ["tied", "untied", "float64"]
)  # the second with gradient checkpointing
def test_weights_and_bank_are_those_of_ddp_and_every_update_is_counted(runs, engine, case):
    if case == "float64" and engine != "fsdp":
        pytest.skip("DeepSpeed has no float64")
    expected, found = (runs / f"{name}-{case}" / "checkpoint-2" for name in ("ddp", engine))
    assert (weights(expected) - weights(found)).abs().max() < (1e-10 if case == "float64" else 1e-6)
    if case == "tied":
        assert (weights(expected) - weights(runs / "ddp-tied" / "checkpoint-1")).abs().max() > 1e-4
    bank, other = state(expected), state(found)
    assert bank.keys() == other.keys()
    assert (
        max(
            (x.double() - other[name].double()).abs().max().item()
            for name, x in bank.items()
            if x.numel()
        )
        < 1e-5
    )
    for rank in (0, 1):
        about = json.loads((runs / f"{engine}-{case}" / f"rank-{rank}.json").read_text())
        assert about == {
            "wrapped": "FSDPDualEncoder" if engine == "fsdp" else "DeepSpeedEngine",
            "updates": 2,
        }


@pytest.mark.parametrize("engine", ["fsdp", *ZERO])
def test_norms_of_both_kinds_of_towers_are_those_of_their_embeddings(runs, engine):
    logs = {case: read_log(runs / f"{engine}-{case}") for case in ("tied", "untied")}
    for line, expected in zip(logs["tied"], read_log(runs / "ddp-tied"), strict=True):
        assert [line[key] for key in NORMS] == pytest.approx(
            [expected[key] for key in NORMS], rel=1e-5
        )
    # The towers start alike, whether they share their weights or not: so do their embeddings.
    first = [[log[0][key] for key in NORMS] for log in logs.values()]
    assert first[0] == pytest.approx(first[1], rel=1e-5)
    assert read_log(runs / "ddp-untied")[0][NORMS[0]] != pytest.approx(
        first[1][0], rel=0.1
    )  # where weights tell it


@pytest.mark.parametrize("engine", ["fsdp", *ZERO])
def test_weights_of_an_earlier_checkpoint_are_loaded_after_training(runs, engine):
    folder = runs / f"{engine}-tied"
    assert torch.equal(weights(folder / "first"), weights(folder / "checkpoint-1"))
    assert not torch.equal(weights(folder / "first"), weights(folder / "checkpoint-2"))


@pytest.mark.parametrize("engine", ["fsdp", *ZERO])
def test_a_resumed_run_goes_on_as_it_would_have_and_skips_what_is_not_finite(runs, engine):
    straight, resumed = (
        state(runs / f"{engine}-{case}" / "checkpoint-2") for case in ("tied", "resumed")
    )
    assert straight.keys() == resumed.keys()
    assert [name for name, x in straight.items() if not torch.equal(x, resumed[name])] == []
    folder = runs / f"{engine}-resumed"
    assert torch.equal(weights(folder / "checkpoint-2"), weights(folder / "checkpoint-3"))
    line = read_log(folder)[-1]
    assert (line["update"], line["skipped"], line["micro_steps"], len(line["rows"])) == (
        3,
        "loss",
        [0],
        4,
    )


@needs_deepspeed
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_checkpoint_that_would_run_code_is_refused_before_deepspeed_reads_it(protocol, tmp_path):
    class Planted:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "was run"),)

    torch.save({"module": torch.ones(2)}, tmp_path / "mp_rank_00_model_states.pt")
    refuse_unsafe_files(tmp_path)
    torch.save({"module": Planted()}, tmp_path / "optim_states.pt", pickle_protocol=protocol)
    with pytest.raises(UserError, match=r"optim_states.pt: there is more in it than tensors"):
        refuse_unsafe_files(tmp_path)
    assert not (tmp_path / "was run").exists()


def test_the_extra_asks_for_the_version_that_is_required():
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert re.findall(r"deepspeed>=([\d.]+)", project.read_text()) == [MIN_DEEPSPEED]
