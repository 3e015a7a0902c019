"""Losses and gradients that are not finite: told by their rows, never applied, enqueued or averaged; fp16 scaling."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer import log_of

from contaccum.errors import UserError
from contaccum.training.checkpoints import SCALER_FILE
from contaccum.training.numerics import SkippedUpdates, poisoned
from contaccum.training.window import WindowedTrainer


def at_micro_step(monkeypatch: pytest.MonkeyPatch, trainer: Any, number: int, act: Callable[[Any], Any]) -> None:
    """Call ``act`` with the texts before micro-step ``number`` of the run, from 1."""
    done, step = 0, WindowedTrainer.micro_step

    def counted(self: Any, model: Any, inputs: Any, share: float) -> Any:
        nonlocal done
        done += 1
        if done == number:
            act(inputs)
        return step(self, model, inputs, share)

    monkeypatch.setattr(WindowedTrainer, "micro_step", counted)


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])


def spoil_embeddings(trainer: Any, factor: float) -> Callable[[Any], None]:
    """The next passages that are encoded are multiplied by ``factor``."""

    def spoil(_: Any) -> None:
        compute = trainer.loss.compute_loss_from_embeddings

        def once(embeddings: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
            trainer.loss.compute_loss_from_embeddings = compute
            return compute([embeddings[0], embeddings[1] * factor], *args, **kwargs)

        trainer.loss.compute_loss_from_embeddings = once

    return spoil


def spoil_gradient(trainer: Any, factor: float) -> Callable[[Any], None]:
    """The next gradient of one weight is multiplied by ``factor``."""

    def spoil(_: Any) -> None:
        parameter = next(p for p in trainer.model.parameters() if p.requires_grad)

        def once(gradient: torch.Tensor) -> torch.Tensor:
            handle.remove()
            return gradient * factor

        handle = parameter.register_hook(once)

    return spoil


@pytest.mark.parametrize("factor", [math.nan, math.inf], ids=["nan", "inf"])
def test_loss_that_is_not_finite_is_told_and_neither_applied_nor_enqueued(
    trainer_in: Any, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_in(tmp_path, logging_steps=3)
    blamed: list[str] = []
    before: list[torch.Tensor] = []

    def spoil(inputs: Any) -> None:  # micro-step 5: the second of update 2
        before.append(weights(trainer))
        blamed.extend(trainer.model.tokenizer.batch_decode(inputs["query_input_ids"], skip_special_tokens=True))
        spoil_embeddings(trainer, factor)(inputs)

    at_micro_step(monkeypatch, trainer, 5, spoil)
    at_micro_step(monkeypatch, trainer, 7, lambda _: before.append(weights(trainer)))
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert torch.equal(before[0], before[1]) and not torch.equal(before[1], weights(trainer))
    assert torch.isfinite(weights(trainer)).all()
    first, second, third = log_of(tmp_path)
    assert second["skipped"] == "loss" and second["loss"] is None and second["micro_steps"] == [1]
    assert sorted(trainer.train_dataset[second["rows"]]["query"]) == sorted(blamed) and len(blamed) == 4
    rows = ", ".join(map(str, second["rows"]))
    assert f"update 2: the loss is not finite (rows {rows} of the training data, scale 1)" in caplog.text
    assert "skipped, 1 of max_skipped_updates=10" in caplog.text
    # 36 pairs less the four; all of the bank can be used.
    bank = trainer.loss.info_nce.bank
    assert bank.pairs == 32 and torch.isfinite(bank.passages).all() and bool(bank.usable.all())
    (logged,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logged["loss"] == pytest.approx((first["loss"] + third["loss"]) / 2) and logged["skipped_updates"] == 1
    (ended,) = [entry for entry in trainer.state.log_history if "train_loss" in entry]
    assert ended["train_loss"] == pytest.approx(logged["loss"]) and ended["skipped_updates"] == 1


def test_gradient_that_is_not_finite_skips_the_update_and_blames_all_of_it(
    trainer_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_in(tmp_path)
    before: list[torch.Tensor] = []
    at_micro_step(monkeypatch, trainer, 4, lambda _: before.append(weights(trainer)))
    at_micro_step(monkeypatch, trainer, 5, spoil_gradient(trainer, math.nan))
    at_micro_step(monkeypatch, trainer, 7, lambda _: before.append(weights(trainer)))
    trainer.train()
    assert torch.equal(before[0], before[1])
    line = log_of(tmp_path)[1]
    assert line["skipped"] == "gradient" and line["micro_steps"] == [0, 1, 2] and len(set(line["rows"])) == 12
    assert line["loss"] is not None and trainer.skips.count == 1
    # Its embeddings were fine, and are in the bank.
    assert trainer.loss.info_nce.bank.pairs == 36


def test_skipped_updates_end_at_their_budget_with_the_weights_of_before(
    trainer_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_in(tmp_path, max_skipped_updates=1)
    before: list[torch.Tensor] = []
    at_micro_step(monkeypatch, trainer, 2, spoil_embeddings(trainer, math.inf))
    at_micro_step(monkeypatch, trainer, 7, lambda _: before.append(weights(trainer)))
    at_micro_step(monkeypatch, trainer, 8, spoil_embeddings(trainer, math.inf))
    with pytest.raises(UserError, match=r"update 3: the loss is not finite .* max_skipped_updates=1 are skipped"):
        trainer.train()
    assert torch.equal(before[0], weights(trainer))


def test_baseline_loss_that_is_not_finite_is_not_applied(
    trainer_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_in(tmp_path, method="grad_accum")
    at_micro_step(monkeypatch, trainer, 1, spoil_embeddings(trainer, math.inf))
    trainer.train()
    assert log_of(tmp_path)[0]["skipped"] == "loss" and torch.isfinite(weights(trainer)).all()


def test_finite_loss_is_left_as_it_is() -> None:
    weight = torch.tensor([0.1, 0.7], requires_grad=True)
    for loss in (weight.square().sum(), poisoned(weight.square().sum())):
        (gradient,) = torch.autograd.grad(loss, weight)
        assert torch.equal(gradient, 2 * weight)
    (gradient,) = torch.autograd.grad(poisoned(weight.sum() / 0.0), weight)
    assert gradient.isnan().all()  # where inf alone would give inf or, behind a maximum, something finite


def test_overflow_under_a_scaler_costs_no_budget_until_the_scale_is_spent() -> None:
    skips = SkippedUpdates(0)
    losses = [torch.tensor(0.5)]
    assert skips.judge(1, math.inf, losses, 1024.0) is None
    assert skips.present == {"skipped": "overflow", "scale": 1024.0} and skips.count == 0
    assert skips.judge(2, math.inf, losses, 1.0) == [0] and skips.count == 1


class Scaled:
    """A gradient scaler on the CPU in the place that accelerate has one for fp16, watched."""

    def __init__(self, trainer: Any, scale: float) -> None:
        self.trainer = trainer
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        self.unscaled_after: list[int] = []  # micro-steps of the update by then
        trainer.accelerator.scaler = self.scaler
        trainer.accelerator.unscale_gradients = self.unscale

    def unscale(self, optimizer: Any = None) -> None:
        self.unscaled_after.append(len(self.trainer._window.losses))
        self.scaler.unscale_(self.trainer.optimizer.optimizer)  # raises where it was done already


@pytest.mark.parametrize("max_grad_norm", [0.0, 1e-2])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_scaled_run_equals_the_unscaled_one_and_unscales_once_an_update(
    trainer_in: Any, max_grad_norm: float, tied: bool, tmp_path: Path
) -> None:
    settings = {"tied": tied, "max_grad_norm": max_grad_norm}
    plain = trainer_in(tmp_path / "plain", **settings)
    plain.train()
    trainer = trainer_in(tmp_path / "scaled", **settings)
    scaled = Scaled(trainer, 2.0**10)
    trainer.train()
    assert scaled.unscaled_after == [3, 3, 3]
    assert scaled.scaler.state_dict()["_growth_tracker"] == 3  # updates, not micro-steps
    assert torch.equal(weights(plain), weights(trainer))  # a power of two rounds nothing
    for key in ("grad_norm_query", "grad_norm_passage", "loss"):
        assert [line[key] for line in log_of(tmp_path / "plain")] == pytest.approx(
            [line[key] for line in log_of(tmp_path / "scaled")], rel=1e-6
        )


def test_overflow_in_one_micro_step_skips_the_update_halves_the_scale_once_and_resumes(
    trainer_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1}
    trainer = trainer_in(tmp_path / "a", **settings)
    scaled = Scaled(trainer, 2.0**10)
    before: list[torch.Tensor] = []
    with monkeypatch.context() as patch:
        at_micro_step(patch, trainer, 4, lambda _: before.append(weights(trainer)))
        at_micro_step(patch, trainer, 5, spoil_gradient(trainer, math.inf))
        at_micro_step(patch, trainer, 7, lambda _: before.append(weights(trainer)))
        trainer.train()
    assert torch.equal(before[0], before[1])
    assert scaled.scaler.get_scale() == 2.0**9 and scaled.scaler.state_dict()["_growth_tracker"] == 1
    line = log_of(tmp_path / "a")[1]
    assert line["skipped"] == "overflow" and line["scale"] == 2.0**10 and trainer.skips.count == 0
    assert (tmp_path / "a" / "checkpoint-2" / SCALER_FILE).is_file()
    resumed = trainer_in(tmp_path / "b", **settings)
    again = Scaled(resumed, 2.0**16)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert again.scaler.state_dict() == scaled.scaler.state_dict()
    assert torch.equal(weights(trainer), weights(resumed))
