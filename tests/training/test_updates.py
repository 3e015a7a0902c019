"""Updates that run out of memory or are not finite: pairs per update stay, nothing is lost, nothing bad is applied."""

import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from tiny_models import tiny_encoder
from tiny_runs import (
    SAVE_EVERY_UPDATE,
    assert_resumes,
    call_at_micro_step,
    get_state,
    list_differences,
    make_pairs,
    make_trainer,
    read_log,
)

from contaccum.errors import UserError
from contaccum.training import out_of_memory


def runs_out(trainer: Any, place: str, visits: set[int], fits: int) -> None:
    """Memory runs out at the given visits of a place with more rows than fit."""
    count = 0

    def check(rows: int) -> None:
        nonlocal count
        count += 1
        if rows > fits and count in visits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def before(module: Any, arguments: Any) -> None:
        task = {"queries": "query", "passages": "document"}.get(place)
        if torch.is_grad_enabled() and module.training and arguments[0].get("task") == task:
            check(len(arguments[0]["input_ids"]))

    def after(module: Any, arguments: Any, output: Any) -> None:
        if place == "backward" and torch.is_grad_enabled() and arguments[0].get("task") == "query":
            # The queries' part comes last: the passages' gradients are in the weights by then.
            output["sentence_embedding"].register_hook(lambda gradient: check(len(gradient)))

    trainer.model.register_forward_pre_hook(before)
    trainer.model.register_forward_hook(after)


ALWAYS = set(range(999))


@pytest.mark.parametrize("place", ["queries", "passages", "backward"])
def test_after_memory_ran_out_updates_are_those_of_half_the_micro_batch_and_twice_the_steps(
    place, tmp_path, caplog
):
    """Losses without a bank: the gradient is then that of the smaller micro-batches, wherever memory ran out."""
    settings = {"data": make_pairs(36, 1), "method": "grad_accum"}
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 6}
    expected = make_trainer(tmp_path / "small", **settings, **sizes)
    expected.train()
    trainer = make_trainer(tmp_path / "out", **settings)
    # sentence-transformers encodes positives and hard negatives together.
    runs_out(trainer, place, ALWAYS, fits=4 if place == "passages" else 2)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    (line,) = [x for x in caplog.messages if "out of memory" in x]
    assert "update 1: out of memory at a micro-batch of 4 (CUDA out of memory" in line
    assert "From now on a micro-batch has 2 rows" in line and "pairs per update stay" in line
    one, other = get_state(expected), get_state(trainer)
    assert (
        max(
            (one[key].float() - other[key].float()).abs().max()
            for key in one
            if key.startswith("model")
        )
        < 1e-6
    )
    for ours, theirs in zip(read_log(tmp_path / "out"), read_log(tmp_path / "small"), strict=True):
        assert ours["pairs"] == theirs["pairs"] == 12
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm_query"] == pytest.approx(theirs["grad_norm_query"], rel=1e-4)


def test_no_pair_is_missing_from_the_bank_and_a_resumed_run_keeps_the_smaller_size(tmp_path):
    def make(folder, **saves):
        trainer = make_trainer(folder, dropout=0.1, **saves)
        if (
            saves
        ):  # the straight run; in the second micro-batch of the second update, before its loss
            runs_out(trainer, "passages", {5}, fits=2)
        return trainer

    trainer = assert_resumes(make, tmp_path, 2)
    assert trainer.updates.limit.rows == 2
    # The update began again: the four pairs before are in the bank twice, and none is missing.
    assert trainer.loss.info_nce.bank.total_enqueued == 36 + 4


def test_grad_cache_encodes_fewer_at_once_and_its_update_stays(tmp_path):
    ended = []
    for name, visits in (("fits", set()), ("runs_out", {1})):
        trainer = make_trainer(tmp_path / name, method="grad_cache")
        runs_out(trainer, "passages", visits, fits=2)
        trainer.train()
        ended.append(weights(trainer))
    assert trainer.loss.mini_batch_size == 2
    assert (ended[0] - ended[1]).abs().max() < 1e-6


def test_what_no_smaller_micro_batch_helps_ends_with_what_else_to_turn(tmp_path):
    trainer = make_trainer(tmp_path / "a")
    runs_out(trainer, "queries", ALWAYS, fits=0)
    with pytest.raises(
        UserError, match=r"out of memory at a micro-batch of 1 \(CUDA .*gradient_checkpointing=true"
    ):
        trainer.train()
    trainer = make_trainer(tmp_path / "b", method="grad_accum")
    runs_out(trainer, "queries", ALWAYS, fits=1)  # where a pair alone would have no negative
    with pytest.raises(UserError, match="out of memory at a micro-batch of 2"):
        trainer.train()


AUTO = {
    "per_device_train_batch_size": "auto",
    "gradient_accumulation_steps": 1,
    "total_train_batch_size": 12,
}


@pytest.mark.parametrize("place", ["passages", "backward"])
def test_largest_micro_batch_that_fits_is_found_without_a_trace_and_kept(place, tmp_path):
    given = make_trainer(tmp_path / "given", dropout=0.1)
    given.train()
    found = make_trainer(tmp_path / "found", dropout=0.1, **AUTO, **SAVE_EVERY_UPDATE)
    runs_out(found, place, ALWAYS, fits=5)  # of 12, 6, 4, 3, 2 and 1
    found.train()
    assert (found.args.per_device_train_batch_size, found.args.gradient_accumulation_steps) == (
        4,
        3,
    )
    assert found.args.total_train_batch_size == 12
    assert list_differences(get_state(given), get_state(found)) == []
    resumed = make_trainer(tmp_path / "found", dropout=0.1, **AUTO, **SAVE_EVERY_UPDATE)
    resumed.train(
        resume_from_checkpoint=str(tmp_path / "found" / "checkpoint-2")
    )  # where 12 would fit now
    assert resumed.args.per_device_train_batch_size == 4
    assert list_differences(get_state(given), get_state(resumed)) == []


def test_grad_cache_finds_what_it_encodes_at_once(tmp_path):
    trainer = make_trainer(tmp_path, method="grad_cache", **AUTO)
    runs_out(trainer, "passages", ALWAYS, fits=5)
    trainer.train()
    assert trainer.args.pairs_per_micro_batch == trainer.loss.mini_batch_size == 4
    assert trainer.args.per_device_train_batch_size == trainer.args.total_train_batch_size == 12


def test_a_host_is_never_asked_for_more_than_it_has(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, **AUTO)
    trainer.args.gradient_accumulation_steps = 12
    sizes: list[int] = []
    monkeypatch.setattr(out_of_memory, "try_micro_batch", lambda size, *_: sizes.append(size))
    # Memory grows by 100 MB a pair, and 600 MB of the 750 MB may be taken.
    monkeypatch.setattr(out_of_memory, "peak_memory_mb", lambda device: 100.0 * sum(sizes))
    free = SimpleNamespace(available=750 * 2**20)
    monkeypatch.setattr(out_of_memory.psutil, "virtual_memory", lambda: free)
    trainer.get_train_dataloader()
    assert sizes == [1, 2, 3, 4, 6]
    assert trainer.args.per_device_train_batch_size == 6  # though 12 would not have failed


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])


def weights_before(trainer: Any, *steps: int) -> list[torch.Tensor]:
    """The weights before each of these micro-steps; filled by training."""
    found: list[torch.Tensor] = []
    for step in steps:
        call_at_micro_step(trainer, step, lambda _: found.append(weights(trainer)))
    return found


def spoil_embeddings(trainer: Any, factor: float) -> Callable[[Any], None]:
    """The next passages that are encoded are multiplied by ``factor``."""

    def spoil(_: Any) -> None:
        def once(module: Any, arguments: Any, output: Any) -> Any:
            if arguments[0].get("task") == "document" and torch.is_grad_enabled():
                handle.remove()
                output["sentence_embedding"] = output["sentence_embedding"] * factor
            return output

        handle = trainer.model.register_forward_hook(once)

    return spoil


def spoil_gradient(
    trainer: Any, factor: float, parameter: torch.nn.Parameter | None = None
) -> Callable[[Any], None]:
    """The next gradient of one weight, or of a given parameter, is multiplied by ``factor``."""

    def spoil(_: Any) -> None:
        def once(gradient: torch.Tensor) -> torch.Tensor:
            handle.remove()
            return gradient * factor

        weight = (
            next(p for p in trainer.model.parameters() if p.requires_grad)
            if parameter is None
            else parameter
        )
        handle = weight.register_hook(once)

    return spoil


@pytest.mark.parametrize("method", ["contaccum", "grad_accum"])
@pytest.mark.parametrize("factor", [math.nan, math.inf], ids=["nan", "inf"])
def test_a_loss_that_is_not_finite_is_shown_by_its_rows_and_not_applied(
    method, factor, tmp_path, caplog
):
    trainer = make_trainer(tmp_path, method=method)
    blamed: list[str] = []

    def blame(inputs: Any) -> None:
        blamed.extend(
            trainer.model.tokenizer.batch_decode(
                inputs["query_input_ids"], skip_special_tokens=True
            )
        )

    before = weights_before(trainer, 5, 7)
    call_at_micro_step(trainer, 5, blame)  # the second of update 2
    call_at_micro_step(trainer, 5, spoil_embeddings(trainer, factor))
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert torch.equal(before[0], before[1]) and not torch.equal(before[1], weights(trainer))
    assert torch.isfinite(weights(trainer)).all()
    second = read_log(tmp_path)[1]
    assert second["skipped"] == "loss" and second["loss"] is None and second["micro_steps"] == [1]
    assert (
        sorted(trainer.train_dataset[second["rows"]]["query"]) == sorted(blamed)
        and len(blamed) == 4
    )
    rows = ", ".join(map(str, second["rows"]))
    assert f"update 2: the loss is not finite (rows {rows} of the training" in caplog.text
    assert "skipped, 1 of max_skipped_updates=10" in caplog.text
    if method == "contaccum":
        assert torch.isfinite(trainer.loss.info_nce.bank.passages).all()


class WeightedLoss(MultipleNegativesRankingLoss):
    """A user's loss with a parameter of its own."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.weight * super().forward(*args, **kwargs)


@pytest.mark.parametrize("spoilt", ["loss", "gradient"])
def test_parameters_of_a_loss_stay_as_they_were_in_an_update_that_is_not_finite(spoilt, tmp_path):
    model = tiny_encoder()
    loss = WeightedLoss(model)
    trainer = make_trainer(tmp_path, model=model, loss=loss, method="grad_accum", weight_decay=0.0)
    values: list[float] = []
    for step in (4, 7):  # the first of updates 2 and 3
        call_at_micro_step(trainer, step, lambda _: values.append(loss.weight.item()))
    if spoilt == "loss":
        call_at_micro_step(trainer, 5, spoil_embeddings(trainer, math.nan))
    else:  # that of the parameter alone: the model's gradients are finite
        call_at_micro_step(trainer, 5, spoil_gradient(trainer, math.nan, loss.weight))
    trainer.train()
    assert read_log(tmp_path)[1]["skipped"] == spoilt
    assert values[0] == values[1] and math.isfinite(loss.weight.item())
    assert loss.weight.item() != values[1]  # the next update is applied


def test_gradients_of_a_loss_begin_again_when_memory_runs_out_in_an_update(tmp_path):
    ended = []
    small = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 6}
    for name, sizes in (("small", small), ("halved", {})):
        model = tiny_encoder()
        loss = WeightedLoss(model)
        settings = {
            "method": "grad_accum",
            "optim": "sgd",
            "learning_rate": 0.1,
            "warmup_steps": 0,
            "max_steps": 1,
        }
        trainer = make_trainer(
            tmp_path / name, make_pairs(36, 1), model=model, loss=loss, **settings, **sizes
        )
        if name == "halved":
            runs_out(trainer, "backward", {3}, fits=2)  # in the last micro-batch of the update
        trainer.train()
        ended.append(loss.weight.item())
    assert ended[0] == pytest.approx(ended[1], abs=1e-6) and ended[0] != 1.0


def test_a_gradient_that_is_not_finite_skips_the_update_and_blames_all_of_it(tmp_path):
    trainer = make_trainer(tmp_path)
    before = weights_before(trainer, 4, 7)
    call_at_micro_step(trainer, 5, spoil_gradient(trainer, math.nan))
    trainer.train()
    assert torch.equal(before[0], before[1])
    line = read_log(tmp_path)[1]
    assert (
        line["skipped"] == "gradient"
        and line["micro_steps"] == [0, 1, 2]
        and len(set(line["rows"])) == 12
    )
    assert line["loss"] is not None and trainer.nonfinite_updates.num_skipped == 1
    assert trainer.loss.info_nce.bank.total_enqueued == 36  # its embeddings were fine


def test_skipped_updates_end_at_their_budget_with_the_weights_of_before(tmp_path):
    trainer = make_trainer(tmp_path, max_skipped_updates=1)
    before = weights_before(trainer, 7)
    call_at_micro_step(trainer, 2, spoil_embeddings(trainer, math.inf))
    call_at_micro_step(trainer, 8, spoil_embeddings(trainer, math.inf))
    with pytest.raises(
        UserError,
        match=r"update 3: the loss is not finite .* max_skipped_updates=1 updates were skipped",
    ):
        trainer.train()
    assert torch.equal(before[0], weights(trainer))


class Scaled:
    """A gradient scaler on the CPU in the place that accelerate has one for fp16."""

    def __init__(self, trainer: Any, scale: float) -> None:
        self.trainer = trainer
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        self.unscaled_after: list[int] = []  # micro-steps of the update by then
        trainer.accelerator.scaler = self.scaler
        trainer.accelerator.unscale_gradients = self.unscale

    def unscale(self, optimizer: Any = None) -> None:
        self.unscaled_after.append(len(self.trainer.updates.current.losses))
        self.scaler.unscale_(self.trainer.optimizer.optimizer)  # raises where it was done already


@pytest.mark.parametrize("max_grad_norm", [0.0, 1e-2])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_scaled_run_equals_the_unscaled_one_and_unscales_once_an_update(
    max_grad_norm, tied, tmp_path
):
    plain = make_trainer(tmp_path / "plain", tied=tied, max_grad_norm=max_grad_norm)
    plain.train()
    trainer = make_trainer(tmp_path / "scaled", tied=tied, max_grad_norm=max_grad_norm)
    scaled = Scaled(trainer, 2.0**10)
    trainer.train()
    assert scaled.unscaled_after == [3, 3, 3]
    assert torch.equal(weights(plain), weights(trainer))  # a power of two rounds nothing
    for key in ("grad_norm_query", "grad_norm_passage", "loss"):
        ours, theirs = (
            [line[key] for line in read_log(tmp_path / name)] for name in ("plain", "scaled")
        )
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_overflow_under_a_scaler_skips_the_update_costs_no_budget(tmp_path):
    trainer = make_trainer(tmp_path, max_skipped_updates=0)
    scaled = Scaled(trainer, 2.0**10)
    before = weights_before(trainer, 4, 7)
    call_at_micro_step(trainer, 5, spoil_gradient(trainer, math.inf))
    trainer.train()
    assert torch.equal(before[0], before[1]) and trainer.nonfinite_updates.num_skipped == 0
    assert (
        scaled.scaler.get_scale() == 2.0**9 and scaled.scaler.state_dict()["_growth_tracker"] == 1
    )
    line = read_log(tmp_path)[1]
    assert line["skipped"] == "overflow" and line["scale"] == 2.0**10
