"""docs/loops.md: each loop, run as the page shows it and killed on the way, ends as if never killed."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from sample_texts import sentences
from tiny_models import tiny_encoder
from torch.utils.data import BatchSampler

from contaccum import DualEncoder

PAGE = (Path(__file__).parents[1] / "docs" / "loops.md").read_text(encoding="utf-8")
SHARED = "What all loops share"


def code(section: str) -> str:
    """The fenced Python of a section of the page, as it stands there."""
    (body,) = re.findall(
        rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL
    )
    blocks = re.findall(r"^```python\n(.*?)^```$", body, re.MULTILINE | re.DOTALL)
    assert blocks, f"no code under {section}"
    return "\n".join(blocks)


class Killed(Exception):
    """The process went away."""


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return Dataset.from_dict({"query": sentences(330, 1), "positive": sentences(330, 2, 9)})


@pytest.fixture(scope="module")
def build() -> Callable[..., DualEncoder]:
    def make(dies_at: int | None = None) -> DualEncoder:
        model, passes = tiny_encoder(dropout=0.1), 0

        def before(module: torch.nn.Module, inputs: tuple[dict[str, torch.Tensor], ...]) -> None:
            nonlocal passes
            if not module.training:
                return
            passes += 1
            if passes == dies_at:
                raise Killed
            # Loops draw different numbers beside dropout's (loaders do): here a text's dropout hangs on the text alone.
            torch.manual_seed(int((inputs[0]["input_ids"] * inputs[0]["attention_mask"]).sum()))

        model.register_forward_pre_hook(before)
        return model

    return make


@pytest.fixture(autouse=True)
def _no_accelerator_of_another_test() -> None:
    """Forget the precision that a trainer of another test file has set for the whole process."""
    AcceleratorState._reset_state(
        reset_partial_state=True
    )  # private, but accelerate's own tests use nothing else


@pytest.fixture(scope="module")
def expected(build, dataset, tmp_path_factory) -> dict[str, torch.Tensor]:
    """Weights and bank of the plainest loop, never killed."""
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("plain"))
        names = run("PyTorch", model, dataset)
    assert (
        names["K"] > 1
        and names["UPDATES"] == 20
        and names["loss_fn"].settings.drift_compensation == "auto"
    )
    after = model.state_dict()
    moved = [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert len(moved) > len(before) // 2
    # Entries have retired, so that a loop that forgets end_update or the probe ends elsewhere.
    bank = names["loss_fn"].bank
    assert 0 < bank.in_use < bank.bank_size
    return {**after, "banked passages": bank.passages}


LOOPS = [
    section
    for section in re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    if not section.startswith("What ")
]


def run(section: str, model: DualEncoder, dataset: Dataset) -> dict[str, Any]:
    """The names that the code of the page leaves behind."""
    names: dict[str, Any] = {"model": model, "dataset": dataset, "__name__": "page"}
    exec(compile(code(SHARED) + "\n" + code(section), f"docs/loops.md ({section})", "exec"), names)
    return names


def bank_of(names: dict[str, Any]) -> Any:
    if "loss" in names:
        return names["loss"].info_nce.bank
    return (
        names["loss_fn"] if "loss_fn" in names else names["trainer"].lightning_module.loss_fn
    ).bank


@pytest.mark.slow  # twenty updates and a start anew, in each of four loops
@pytest.mark.parametrize("section", LOOPS)
def test_loop_of_the_page_ends_with_the_weights_of_the_plain_loop_though_killed_on_the_way(
    section, build, dataset, expected, tmp_path, monkeypatch
):
    if section == "Lightning" and importlib.util.find_spec("lightning") is None:
        pytest.skip("the lightning extra is not installed: pip install contaccum[lightning]")
    monkeypatch.chdir(tmp_path)
    # Two passes of the encoder a micro-batch, two micro-batches an update: in the middle of the 13th update.
    with pytest.raises(Killed):
        run(section, build(dies_at=12 * 4 + 3), dataset)
    model = build()
    ended = {
        **model.state_dict(),
        "banked passages": bank_of(run(section, model, dataset)).passages,
    }
    assert ended.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(ended[name], expected[name])] == []


def test_the_trainer_ends_with_the_weights_of_the_plain_loop(build, dataset, expected, tmp_path):
    from contaccum import ContAccumTrainer, ContAccumTrainingArguments

    names: dict[str, Any] = {"model": build(), "dataset": dataset}
    exec(code(SHARED), names)
    model = build()
    called = {
        "per_device_train_batch_size": "N",
        "gradient_accumulation_steps": "K",
        "max_steps": "UPDATES",
    }
    called |= {"warmup_steps": "WARMUP", "learning_rate": "LEARNING_RATE", "max_grad_norm": "CLIP"}
    args = ContAccumTrainingArguments(
        output_dir=str(tmp_path),
        batch_sampler=lambda dataset, batch_size, **_: BatchSampler(
            names["order"], batch_size, drop_last=True
        ),
        save_strategy="no",
        disable_tqdm=True,
        **{key: names[name] for key, name in called.items()},
        **{key: names["BANK"][key] for key in ("bank_size", "temperature")},
    )
    trainer = ContAccumTrainer(model=model, args=args, train_dataset=dataset)
    trainer.train()
    ended = {**model.state_dict(), "banked passages": trainer.loss.info_nce.bank.passages}
    assert [name for name in expected if not torch.equal(ended[name], expected[name])] == []
