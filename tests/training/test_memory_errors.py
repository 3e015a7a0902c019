"""Running out of memory in training: the update is done over in smaller micro-steps, and nothing is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer import log_of, state_of
from transformers import TrainerCallback

from contaccum import ContAccumLoss
from contaccum.bank_undo import BankUndo
from contaccum.errors import UserError
from contaccum.training.memory_errors import is_out_of_memory, split_rows


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class RunsOut:
    """Makes a trainer run out of memory at one place, at its nth visit there with more rows than fit."""

    def __init__(self, trainer: Any, place: str, visits: list[int], fits: int) -> None:
        self.place, self.visits, self.fits, self.count = place, visits, fits, 0
        self.trainer = trainer
        getattr(self, f"_in_{place}")()

    def check(self, rows: int) -> None:
        if rows > self.fits:
            self.count += 1
            if self.count in self.visits:
                raise out_of_memory()

    def _encoding(self, task: str) -> None:
        def before(module: Any, arguments: Any) -> None:
            if torch.is_grad_enabled() and arguments[0].get("task") == task:
                self.check(len(arguments[0]["input_ids"]))

        self.trainer.model.register_forward_pre_hook(before)

    def _in_queries(self) -> None:
        self._encoding("query")

    def _in_passages(self) -> None:
        self._encoding("document")

    def _in_loss(self) -> None:
        compute = self.trainer.loss.compute_loss_from_embeddings

        def after(embeddings: Any, *args: Any, **kwargs: Any) -> Any:
            loss = compute(embeddings, *args, **kwargs)  # enqueued by then
            self.check(len(embeddings[0]))
            return loss

        self.trainer.loss.compute_loss_from_embeddings = after

    def _in_backward(self) -> None:
        compute = self.trainer.loss.compute_loss_from_embeddings

        def watched(embeddings: Any, *args: Any, **kwargs: Any) -> Any:
            rows = len(embeddings[0])
            # The queries' part comes last: the passages' gradients are in the weights by then.
            embeddings[0].register_hook(lambda _: self.check(rows))
            return compute(embeddings, *args, **kwargs)

        self.trainer.loss.compute_loss_from_embeddings = watched


class SmallSecondUpdate(TrainerCallback):
    """The second update in micro-steps of two from its start: what running out of memory in it comes to."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._rows_fit = 2 if state.global_step == 1 else None


@pytest.fixture(scope="module")
def planned(trainer_in: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("planned")
    trainer = trainer_in(folder, dropout=0.1)
    trainer.add_callback(SmallSecondUpdate(trainer))
    trainer.train()
    return state_of(trainer), log_of(folder)


@pytest.mark.parametrize("micro_step", [1, 3])
@pytest.mark.parametrize("place", ["queries", "passages", "loss", "backward"])
def test_wherever_memory_runs_out_the_update_is_that_of_smaller_micro_steps(
    trainer_in: Any, planned: Any, place: str, micro_step: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, expected_log = planned
    trainer = trainer_in(tmp_path, dropout=0.1)
    RunsOut(trainer, place, visits=[3 + micro_step], fits=2)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "update 2: out of memory at a micro-batch of 4 (CUDA out of memory." in caplog.text
    assert "it is done over at 2, this one alone" in caplog.text
    state = state_of(trainer)
    assert state.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(state[key], expected[key])] == []
    for key in ("loss", "pairs", "grad_norm_query", "grad_norm_passage", "bank_fill"):
        assert [line[key] for line in log_of(tmp_path)] == [line[key] for line in expected_log]


def test_every_pair_is_enqueued_once_and_in_its_order(trainer_in: Any, tmp_path: Path) -> None:
    banks = []
    for folder, visits in (("fits", []), ("runs_out", [2, 4, 5, 9])):
        trainer = trainer_in(tmp_path / folder)
        RunsOut(trainer, "backward", visits, fits=1)
        trainer.train()
        banks.append(trainer.loss.info_nce.bank)
    for name in ("query_ids", "passage_ids", "enqueued", "updates"):
        assert torch.equal(getattr(banks[0], name), getattr(banks[1], name))


def test_smaller_micro_batch_stays_after_three_updates_that_ran_out(
    trainer_in: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_in(tmp_path, rows=72)
    run = RunsOut(trainer, "passages", list(range(1, 99)), fits=2)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert run.count == 3 and "done over at 2, as is all that follows" in caplog.text
    assert trainer.state.global_step == 6 and trainer.loss.info_nce.bank.pairs == 72


def test_nothing_smaller_than_one_pair_says_what_else_to_turn(trainer_in: Any, tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    RunsOut(trainer, "loss", list(range(1, 99)), fits=0)
    with pytest.raises(UserError, match="out of memory at a micro-batch of 1") as line:
        trainer.train()
    for turn in ("bf16=true", "gradient_checkpointing=true", "passage_max_length", "bank_device=cpu"):
        assert turn in str(line.value)


def test_memory_that_runs_out_in_the_optimizers_step_is_told_and_not_tried_again(
    trainer_in: Any, tmp_path: Path
) -> None:
    trainer = trainer_in(tmp_path)
    steps = 0

    def full(*_: Any) -> None:
        nonlocal steps
        steps += 1
        raise out_of_memory()

    trainer.create_optimizer()
    trainer.optimizer.register_step_pre_hook(full)
    with pytest.raises(UserError, match=r"out of memory in the optimizer's step: .*adafactor"):
        trainer.train()
    assert steps == 1


def test_grad_cache_encodes_fewer_at_once_and_its_update_stays_the_same(trainer_in: Any, tmp_path: Path) -> None:
    runs = []
    for folder, visits in (("fits", []), ("runs_out", [1, 7])):
        trainer = trainer_in(tmp_path / folder, method="grad_cache", learning_rate=1e-2)
        RunsOut(trainer, "passages", visits, fits=2)
        trainer.train()
        assert trainer.loss.mini_batch_size == 4
        runs.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert (runs[0] - runs[1]).abs().max() < 1e-5


def test_batches_are_split_by_rows_with_their_shares() -> None:
    inputs = {"a": torch.arange(10).reshape(5, 2), "label": torch.arange(5), "length": 3, "scalar": torch.tensor(1.0)}
    parts = split_rows(inputs, 2)
    assert parts is not None and [share for _, share in parts] == [0.4, 0.4, 0.2]
    assert torch.equal(torch.cat([part["a"] for part, _ in parts]), inputs["a"])
    assert all(part["length"] == 3 and part["scalar"] == 1 for part, _ in parts)
    assert split_rows(inputs, 5) == [(inputs, 1.0)]
    assert split_rows({**inputs, "pixels": torch.zeros(7)}, 2) is None


def host() -> None:
    torch.empty(2**58)


def python() -> None:
    raise MemoryError


def accelerator() -> None:
    raise out_of_memory()


def other() -> None:
    raise RuntimeError("shapes do not agree")


@pytest.mark.parametrize(("fails", "expected"), [(host, True), (python, True), (accelerator, True), (other, False)])
def test_memory_errors_of_host_and_accelerator_are_told_from_others(fails: Callable[[], None], expected: bool) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as error:
        fails()
    assert is_out_of_memory(error.value) is expected


def test_bank_is_whole_again_after_any_micro_steps() -> None:
    loss = ContAccumLoss(torch.nn.Identity(), bank_size=9, query_bank_size=5)  # type: ignore[arg-type]  # not called
    loss.train()

    def micro_steps(count: int, negatives: int) -> list[float]:
        losses = []
        for _ in range(count):
            embeddings = [torch.randn(3, 4, requires_grad=True) for _ in range(2 + negatives)]
            losses.append(loss.compute_loss_from_embeddings(embeddings).item())
        return losses

    micro_steps(4, 0)
    undo = BankUndo(loss, pairs=6)
    before = {key: value.clone() for key, value in loss.bank_state_dict().items()}
    for _ in range(2):
        torch.manual_seed(4)
        first = micro_steps(2, 1)  # the bank makes room for hard negatives
        undo.restore()
        after = loss.bank_state_dict()
        assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
        torch.manual_seed(4)
        assert micro_steps(2, 1) == first
        undo.restore()
