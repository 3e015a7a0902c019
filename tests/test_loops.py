"""docs/loops.md: each loop, interrupted and resumed, gives the weights of an uninterrupted run."""

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.multiprocessing as mp
from accelerate.state import AcceleratorState
from datasets import Dataset
from forks import find_free_port
from sample_texts import sentences
from tiny_models import tiny_encoder
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler

from contaccum import ContAccumTrainer, ContAccumTrainingArguments, DualEncoder

PAGE = (Path(__file__).parents[1] / "docs" / "loops.md").read_text(encoding="utf-8")
SHARED = "What all loops share"
LOOPS = [
    section
    for section in re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    if not section.startswith("What ")
]


def extract_code(section: str) -> str:
    """Return the Python code blocks of a section of the page."""
    pattern = rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)"
    (body,) = re.findall(pattern, PAGE, re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```python\n(.*?)^```$", body, re.MULTILINE | re.DOTALL)
    assert blocks, f"no code under {section}"
    return "\n".join(blocks)


def extract_shared_code(line: str, changed_line: str) -> str:
    """Return the code that all loops share, with a changed line."""
    source = extract_code(SHARED)
    assert source.count(line) == 1
    return source.replace(line, changed_line)


def run_loop(
    section: str, model: DualEncoder, dataset: Dataset, shared_code: str | None = None
) -> dict[str, Any]:
    """Run the code of a section after the shared code; return its global variables."""
    namespace: dict[str, Any] = {"model": model, "dataset": dataset, "__name__": "page"}
    source = (shared_code or extract_code(SHARED)) + "\n" + extract_code(section)
    exec(compile(source, f"docs/loops.md ({section})", "exec"), namespace)
    return namespace


def run_to_the_end(section: str, model: DualEncoder, dataset: Dataset) -> dict[str, Tensor]:
    """Run the code of a section; return weights and banked passages."""
    namespace = run_loop(section, model, dataset)
    if "loss" in namespace:
        bank = namespace["loss"].info_nce.bank
    elif "loss_fn" in namespace:
        bank = namespace["loss_fn"].bank
    else:
        bank = namespace["trainer"].lightning_module.loss_fn.bank
    return {**model.state_dict(), "banked passages": bank.documents}


class Interrupted(Exception):
    """An interruption of the process."""


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return make_dataset()


def make_dataset() -> Dataset:
    return Dataset.from_dict({"query": sentences(330, 1), "positive": sentences(330, 2, 9)})


@pytest.fixture(scope="module")
def make_model() -> Callable[..., DualEncoder]:
    """Return a function that makes a model, which may raise `Interrupted` at a forward pass."""

    def make(interrupt_at: int | None = None) -> DualEncoder:
        model = tiny_encoder(dropout=0.1)
        num_passes = 0

        def before_forward(module: torch.nn.Module, inputs: tuple[dict[str, Tensor], ...]) -> None:
            nonlocal num_passes
            if not module.training:
                return
            num_passes += 1
            if num_passes == interrupt_at:
                raise Interrupted
            # The loops draw different random numbers outside of the model, for example in loaders.
            # With this seed, the dropout of a text depends on the text only.
            tokens = inputs[0]["input_ids"] * inputs[0]["attention_mask"]
            torch.manual_seed(int(tokens.sum()))

        model.register_forward_pre_hook(before_forward)
        return model

    return make


@pytest.fixture(autouse=True)
def _reset_accelerator() -> None:
    """Reset the precision, which a trainer of another test file may have set for the process."""
    # A private method, but accelerate's own tests use the same one.
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def expected(make_model, dataset, tmp_path_factory) -> dict[str, Tensor]:
    """Return weights and banked passages of the PyTorch loop without an interruption."""
    model = make_model()
    initial_weights = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("plain"))
        namespace = run_loop("PyTorch", model, dataset)
    assert namespace["K"] > 1
    assert namespace["UPDATES"] == 20
    assert namespace["loss_fn"].settings.drift_compensation == "auto"
    weights = model.state_dict()
    changed = [
        name for name, value in initial_weights.items() if not torch.equal(value, weights[name])
    ]
    assert len(changed) > len(initial_weights) // 2
    # Some entries were retired. So a loop without end_update or without the probe ends differently.
    bank = namespace["loss_fn"].bank
    assert 0 < bank.in_use < bank.bank_size
    return {**weights, "banked passages": bank.documents}


def assert_all_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert different == []


@pytest.mark.slow  # twenty updates and a restart, in each of four loops
@pytest.mark.parametrize("section", LOOPS)
def test_interrupted_loop_ends_with_the_weights_of_the_plain_loop(
    section, make_model, dataset, expected, tmp_path, monkeypatch
):
    if section == "Lightning" and importlib.util.find_spec("lightning") is None:
        pytest.skip("the lightning extra is not installed: pip install contaccum[lightning]")
    monkeypatch.chdir(tmp_path)
    # A micro-batch has two forward passes and an update has two micro-batches, so this interrupts
    # the loop in the middle of the 13th update.
    with pytest.raises(Interrupted):
        run_loop(section, make_model(interrupt_at=12 * 4 + 3), dataset)
    assert_all_equal(run_to_the_end(section, make_model(), dataset), expected)


@pytest.mark.slow  # twenty updates and a restart, in each of two loops
@pytest.mark.parametrize("section", ["Accelerate", "sentence-transformers"])
def test_loop_that_is_killed_while_it_writes_the_bank_continues_from_a_complete_checkpoint(
    section, make_model, dataset, expected, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write = safetensors.torch.save_file
    num_banks = 0

    def write_part_of_second_bank(tensors: dict[str, Tensor], file: Any, *args: Any) -> None:
        nonlocal num_banks
        num_banks += "bank" in str(file)
        if num_banks == 2:
            Path(file).write_bytes(b"the first bytes")
            raise Interrupted
        write(tensors, file, *args)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", write_part_of_second_bank)
        with pytest.raises(Interrupted):
            run_loop(section, make_model(), dataset)
    assert_all_equal(run_to_the_end(section, make_model(), dataset), expected)


def run_accelerate_loop_in_group(rank: int, folder: Path, port: int) -> None:
    """Run ten updates of the Accelerate loop as one of two processes; save what they did."""
    os.chdir(folder)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_num_threads(1)
    rates = []
    register_optimizer_step_pre_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    shared_code = extract_shared_code("CLIP = 20, 4, 1e-3", "CLIP = 10, 4, 1e-3")
    model = tiny_encoder()
    assert any("pooler" in name for name, _ in model.named_parameters())
    namespace = run_loop("Accelerate", model, make_dataset(), shared_code)
    assert namespace["ranks"] == 2
    result = {
        "rates": rates,
        "weights": model.state_dict(),
        "bank": namespace["loss_fn"].bank.documents,
    }
    torch.save(result, folder / f"{rank}.pt")


@pytest.mark.long  # two processes
def test_accelerate_loop_of_two_processes_has_the_learning_rates_of_one_process(tmp_path):
    """DDP also accepts an encoder with a pooler, which gets no gradient."""
    mp.spawn(run_accelerate_loop_in_group, args=(tmp_path, find_free_port()), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    expected_rates = [1e-3 * min(update / 4, (10 - update) / 6) for update in range(10)]
    for rank in ranks:
        assert rank["rates"] == pytest.approx(expected_rates)
        assert_all_equal(rank["weights"], ranks[0]["weights"])
        assert torch.equal(rank["bank"], ranks[0]["bank"])
    (checkpoint,) = (tmp_path / "accelerated").iterdir()
    assert checkpoint.name == "10"
    for file in ("bank.safetensors", "random_states_0.pkl", "random_states_1.pkl"):
        assert (checkpoint / file).is_file()


def test_drift_is_probed_after_every_update_that_has_more_than_128_pairs():
    constants: dict[str, Any] = {"model": tiny_encoder(), "dataset": make_dataset()}
    exec(extract_shared_code("N, K = 8, 2", "N, K = 8, 32"), constants)
    assert constants["PROBE_EVERY"] == 1


def test_trainer_ends_with_the_weights_of_the_plain_loop(make_model, dataset, expected, tmp_path):
    constants: dict[str, Any] = {"model": make_model(), "dataset": dataset}
    exec(extract_code(SHARED), constants)
    model = make_model()

    def make_sampler(dataset: Dataset, batch_size: int, **_: Any) -> BatchSampler:
        return BatchSampler(constants["order"], batch_size, drop_last=True)

    args = ContAccumTrainingArguments(
        output_dir=str(tmp_path),
        batch_sampler=make_sampler,
        save_strategy="no",
        disable_tqdm=True,
        per_device_train_batch_size=constants["N"],
        gradient_accumulation_steps=constants["K"],
        max_steps=constants["UPDATES"],
        warmup_steps=constants["WARMUP"],
        learning_rate=constants["LEARNING_RATE"],
        max_grad_norm=constants["CLIP"],
        bank_size=constants["BANK"]["bank_size"],
        temperature=constants["BANK"]["temperature"],
    )
    trainer = ContAccumTrainer(model=model, args=args, train_dataset=dataset)
    trainer.train()
    bank = trainer.loss.info_nce.bank
    assert_all_equal({**model.state_dict(), "banked passages": bank.documents}, expected)
