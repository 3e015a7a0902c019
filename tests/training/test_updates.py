"""Updates that run out of memory or are not finite.

An update always trains on all of its pairs, and an update that is not finite changes no weight.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from sample_texts import sentences
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from tiny_models import tiny_encoder
from tiny_runs import (
    EVERY_CALL,
    SAVE_EVERY_UPDATE,
    assert_resumes,
    call_at_micro_step,
    get_state,
    make_pairs,
    make_trainer,
    read_log,
    record_texts,
    simulate_out_of_memory,
)
from transformers import TrainerCallback

from contaccum.errors import UserError
from contaccum.training import update


@pytest.mark.parametrize("method", ["grad_accum", "contaccum"])
def test_each_pair_has_the_same_weight_if_the_last_micro_batch_is_short(method, tmp_path):
    """13 pairs in micro-batches of 4, 4, 4 and 1, against the losses weighted by hand."""
    trainer = make_trainer(
        tmp_path,
        make_pairs(13, negatives=1),
        method=method,
        gradient_accumulation_steps=4,
        max_grad_norm=0.0,
    )
    batches: list[Any] = []
    record_texts(trainer, batches.append)
    gradients: dict[str, torch.Tensor] = {}

    class RecordGradients(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            for name, parameter in trainer.model.named_parameters():
                if parameter.grad is not None:
                    gradients[name] = parameter.grad.clone()

    trainer.add_callback(RecordGradients())
    trainer.train()
    assert [len(batch["query_input_ids"]) for batch in batches] == [4, 4, 4, 1]
    reference = make_trainer(tmp_path / "reference", 13, method=method)
    reference.model.train()
    total = torch.zeros(())
    logged_loss = 0.0
    for batch in batches:
        weight = len(batch["query_input_ids"]) / 13
        loss = reference.loss(*reference.collect_features(dict(batch)))
        total = total + weight * loss
        logged_loss += weight * float(reference.loss.last["local_loss"])  # without banked rows
    total.backward()
    for name, parameter in reference.model.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6), name
    assert math.isclose(read_log(tmp_path)[0]["loss"], logged_loss, rel_tol=1e-5)


SMALL = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 6}
"""Half as large micro-batches as by default, with as many pairs per update."""


@pytest.mark.parametrize("stage", ["queries", "passages", "backward"])
def test_after_out_of_memory_updates_equal_those_of_smaller_micro_batches(stage, tmp_path, caplog):
    """Without a bank, the gradient is that of smaller micro-batches, whichever stage ran out."""
    settings = {"data": make_pairs(36, 1), "method": "grad_accum"}
    expected = make_trainer(tmp_path / "small", **settings, **SMALL)
    expected.train()
    trainer = make_trainer(tmp_path / "halved", **settings)
    # sentence-transformers encodes positives and hard negatives together: 4 rows for 2 pairs.
    max_rows = 4 if stage == "passages" else 2
    simulate_out_of_memory(trainer, stage, EVERY_CALL, max_rows)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    (warning,) = [message for message in caplog.messages if "out of memory" in message]
    assert "update 1: out of memory at a micro-batch of 4 (CUDA out of memory" in warning
    assert "From now on at most 2 rows are encoded at once" in warning
    assert "pairs per update stay" in warning
    expected_state = get_state(expected)
    for key, value in get_state(trainer).items():
        if key.startswith("model"):
            assert (value.float() - expected_state[key].float()).abs().max() < 1e-6, key
    log = read_log(tmp_path / "halved")
    for line, expected_line in zip(log, read_log(tmp_path / "small"), strict=True):
        assert line["pairs"] == expected_line["pairs"] == 12
        assert line["loss"] == pytest.approx(expected_line["loss"], rel=1e-5)
        expected_norm = expected_line["grad_norm_query"]
        assert line["grad_norm_query"] == pytest.approx(expected_norm, rel=1e-4)


def test_after_out_of_memory_in_a_later_micro_batch_each_pair_counts_once_in_the_log(tmp_path):
    settings = {"data": make_pairs(12, 1), "method": "grad_accum"}
    make_trainer(tmp_path / "small", **settings, **SMALL).train()
    trainer = make_trainer(tmp_path / "halved", **settings)
    simulate_out_of_memory(trainer, "queries", {2}, max_rows=2)
    trainer.train()
    [line] = read_log(tmp_path / "halved")
    [expected_line] = read_log(tmp_path / "small")
    assert line["pairs"] == 12
    assert line["loss"] == pytest.approx(expected_line["loss"], rel=1e-5)


def test_the_bank_gets_every_pair_and_a_resumed_run_keeps_the_smaller_micro_batch(tmp_path):
    def make(folder, **saves):
        trainer = make_trainer(folder, dropout=0.1, **saves)
        is_straight = bool(saves)
        if is_straight:
            # In the second micro-batch of the second update, before its loss.
            simulate_out_of_memory(trainer, "passages", {5}, max_rows=2)
        return trainer

    trainer = assert_resumes(make, tmp_path, 2)
    assert trainer.updates.max_rows == 2
    # The update started again, so the four pairs of its first micro-batch are in the bank twice.
    assert trainer.loss.info_nce.bank.total_enqueued == 36 + 4


def test_a_gradient_cache_encodes_fewer_rows_also_when_resumed_and_updates_stay_the_same(tmp_path):
    weights = []
    for name, calls in (("fits", set()), ("runs out", {1})):
        trainer = make_trainer(tmp_path / name, method="grad_cache", **SAVE_EVERY_UPDATE)
        simulate_out_of_memory(trainer, "passages", calls, max_rows=2)
        trainer.train()
        weights.append(get_weights(trainer))
    assert trainer.loss.mini_batch_size == 2
    assert (weights[0] - weights[1]).abs().max() < 1e-6
    resumed = make_trainer(tmp_path / "resumed", method="grad_cache")
    resumed.train(resume_from_checkpoint=str(tmp_path / "runs out" / "checkpoint-2"))
    assert resumed.loss.mini_batch_size == resumed.updates.max_rows == 2


def test_a_cached_loss_of_the_user_halves_its_own_mini_batches(tmp_path, caplog):
    """The batch is larger, but memory runs out at a mini-batch."""
    model = tiny_encoder()
    loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=4)
    trainer = make_trainer(
        tmp_path,
        model=model,
        loss=loss,
        per_device_train_batch_size=12,
        gradient_accumulation_steps=1,
    )
    simulate_out_of_memory(trainer, "passages", {1}, max_rows=2)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "out of memory at a micro-batch of 4" in caplog.text
    assert loss.mini_batch_size == 2


def test_if_the_smallest_micro_batch_does_not_fit_the_error_names_remedies(tmp_path):
    trainer = make_trainer(tmp_path / "a")
    simulate_out_of_memory(trainer, "queries", EVERY_CALL, max_rows=0)
    message = r"out of memory at a micro-batch of 1 \(CUDA .*gradient_checkpointing=true"
    with pytest.raises(UserError, match=message):
        trainer.train()
    # Without a bank and hard negatives, a single pair has no negative, so 2 is the smallest.
    trainer = make_trainer(tmp_path / "b", method="grad_accum")
    simulate_out_of_memory(trainer, "queries", EVERY_CALL, max_rows=1)
    with pytest.raises(UserError, match="out of memory at a micro-batch of 2"):
        trainer.train()


def get_weights(trainer: Any) -> torch.Tensor:
    """Return a copy of the weights as one vector."""
    return torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])


def record_weights(trainer: Any, *steps: int) -> list[torch.Tensor]:
    """Return a list that training fills with the weights before each of these micro-steps."""
    weights: list[torch.Tensor] = []
    for step in steps:
        call_at_micro_step(trainer, step, lambda _: weights.append(get_weights(trainer)))
    return weights


def multiply_embeddings(trainer: Any, factor: float) -> Callable[[Any], None]:
    """Return an action after which the next passage embeddings are multiplied by ``factor``."""

    def action(_: Any) -> None:
        def multiply_once(module: Any, arguments: Any, output: Any) -> Any:
            if arguments[0].get("task") == "document" and torch.is_grad_enabled():
                handle.remove()
                output["sentence_embedding"] = output["sentence_embedding"] * factor
            return output

        handle = trainer.model.register_forward_hook(multiply_once)

    return action


def multiply_gradient(trainer: Any, factor: float) -> Callable[[Any], None]:
    """Return an action after which the next gradient of a weight is multiplied by ``factor``."""

    def action(_: Any) -> None:
        def multiply_once(gradient: torch.Tensor) -> torch.Tensor:
            handle.remove()
            return gradient * factor

        weight = next(p for p in trainer.model.parameters() if p.requires_grad)
        handle = weight.register_hook(multiply_once)

    return action


@pytest.mark.parametrize(
    ("method", "factor"),
    [("contaccum", math.nan), ("contaccum", math.inf), ("grad_accum", math.nan)],
)
def test_a_nonfinite_loss_changes_no_weight_and_its_rows_are_named(
    method, factor, tmp_path, caplog
):
    trainer = make_trainer(tmp_path, method=method)
    queries: list[str] = []  # of the micro-batch whose loss is not finite

    def record_queries(inputs: Any) -> None:
        token_ids = inputs["query_input_ids"]
        queries.extend(trainer.model.tokenizer.batch_decode(token_ids, skip_special_tokens=True))

    # Update 2 has the micro-steps 4 to 6.
    weights = record_weights(trainer, 5, 7)
    call_at_micro_step(trainer, 5, record_queries)
    call_at_micro_step(trainer, 5, multiply_embeddings(trainer, factor))
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], get_weights(trainer))
    assert torch.isfinite(get_weights(trainer)).all()
    line = read_log(tmp_path)[1]
    assert line["skipped"] == "loss"
    assert line["loss"] is None
    assert line["micro_steps"] == [1]
    assert sorted(trainer.train_dataset[line["rows"]]["query"]) == sorted(queries)
    assert len(queries) == 4
    rows = ", ".join(map(str, line["rows"]))
    assert f"update 2: the loss is not finite (rows {rows} of the training" in caplog.text
    assert "skipped, 1 of max_skipped_updates=10" in caplog.text
    if method == "contaccum":
        assert torch.isfinite(trainer.loss.info_nce.bank.documents).all()


class WeightedLoss(MultipleNegativesRankingLoss):
    """A user's loss that has a parameter."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.weight * super().forward(*args, **kwargs)


def test_parameters_of_a_loss_do_not_change_in_an_update_that_is_not_finite(tmp_path):
    model = tiny_encoder()
    loss = WeightedLoss(model)
    trainer = make_trainer(tmp_path, model=model, loss=loss, method="grad_accum", weight_decay=0.0)
    values: list[float] = []
    for step in (4, 7):  # the first micro-steps of updates 2 and 3
        call_at_micro_step(trainer, step, lambda _: values.append(loss.weight.item()))
    call_at_micro_step(trainer, 5, multiply_embeddings(trainer, math.nan))
    trainer.train()
    assert read_log(tmp_path)[1]["skipped"] == "loss"
    assert values[0] == values[1]
    assert math.isfinite(loss.weight.item())
    assert loss.weight.item() != values[1]  # update 3 changes it


def test_gradients_of_a_loss_are_dropped_when_an_update_starts_again(tmp_path):
    settings = {"method": "grad_accum", "optim": "sgd", "learning_rate": 0.1, "max_steps": 1}
    data = make_pairs(36, 1)
    values = []
    for name, sizes in (("small", SMALL), ("halved", {})):
        model = tiny_encoder()
        loss = WeightedLoss(model)
        trainer = make_trainer(tmp_path / name, data, model=model, loss=loss, **settings, **sizes)
        if name == "halved":
            # In the last micro-batch of the update.
            simulate_out_of_memory(trainer, "backward", {3}, max_rows=2)
        trainer.train()
        values.append(loss.weight.item())
    assert values[0] == pytest.approx(values[1], abs=1e-6)
    assert values[0] != 1.0


def test_a_nonfinite_gradient_skips_the_update_and_names_all_of_its_rows(tmp_path):
    trainer = make_trainer(tmp_path)
    weights = record_weights(trainer, 4, 7)
    call_at_micro_step(trainer, 5, multiply_gradient(trainer, math.nan))
    trainer.train()
    assert torch.equal(weights[0], weights[1])
    line = read_log(tmp_path)[1]
    assert line["skipped"] == "gradient"
    assert line["micro_steps"] == [0, 1, 2]
    assert len(set(line["rows"])) == 12
    assert line["loss"] is not None
    assert trainer.updates.num_skipped == 1
    # Its embeddings were finite, so they are in the bank.
    assert trainer.loss.info_nce.bank.total_enqueued == 36


def test_a_nonfinite_loss_on_another_rank_is_not_blamed_on_rows_of_this_rank(
    tmp_path, monkeypatch, caplog
):
    trainer = make_trainer(tmp_path)
    call_at_micro_step(trainer, 5, multiply_gradient(trainer, math.nan))
    # The largest number of micro-batches with a loss that is not finite, over two ranks.
    monkeypatch.setattr(update, "over_ranks", lambda op, value: torch.ones_like(value))
    monkeypatch.setattr(update, "world_size", lambda: 2)
    trainer.train()
    line = read_log(tmp_path)[1]
    assert (line["skipped"], line["micro_steps"], line["rows"]) == ("loss", [], [])
    assert "rank 0: update 2: the loss is not finite (on another rank)" in caplog.text


def test_a_run_ends_after_too_many_skipped_updates_with_the_weights_before(tmp_path):
    trainer = make_trainer(tmp_path, max_skipped_updates=1)
    weights = record_weights(trainer, 7)
    call_at_micro_step(trainer, 2, multiply_embeddings(trainer, math.inf))
    call_at_micro_step(trainer, 8, multiply_embeddings(trainer, math.inf))
    message = r"update 3: the loss is not finite .* max_skipped_updates=1 updates were skipped"
    with pytest.raises(UserError, match=message):
        trainer.train()
    assert torch.equal(weights[0], get_weights(trainer))


EQUAL_POSITIVES = Dataset.from_dict({"query": sentences(24, 1), "positive": ["the cat"] * 24})
"""Pairs with one positive, so that every negative is masked."""
DROP_LAST = {"dataloader_drop_last": True}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"warmup_steps": 3, "max_steps": 1}, "Set warmup_steps below"),
        ({"data": 3, **DROP_LAST}, "give no batch"),
        ({"data": EQUAL_POSITIVES, "batch_sampler": "no_duplicates", **DROP_LAST}, "give no batch"),
    ],
    ids=["learning rate of 0", "no batch", "no batch of different texts"],
)
def test_a_run_that_trains_nothing_is_an_error_and_saves_no_model(settings, named, tmp_path):
    trainer = make_trainer(tmp_path, **settings)
    with pytest.raises(UserError, match=named):
        trainer.train()
    assert not (tmp_path / "modules.json").exists()


def test_a_run_whose_updates_are_all_skipped_is_an_error(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2, gradient_accumulation_steps=1)
    call_at_micro_step(trainer, 1, multiply_embeddings(trainer, math.inf))
    call_at_micro_step(trainer, 2, multiply_embeddings(trainer, math.inf))
    with pytest.raises(UserError, match="trained nothing: in each of its 2 updates"):
        trainer.train()


def test_without_negatives_a_run_warns_at_once_and_is_an_error_also_when_it_is_resumed(
    tmp_path, caplog
):
    for request in (None, "last"):
        trainer = make_trainer(tmp_path, EQUAL_POSITIVES, save_strategy="epoch")
        with pytest.raises(UserError, match="each of its 2 updates the gradient"):
            trainer.train(resume_from_checkpoint=request)
    [warning] = [text for text in caplog.messages if text.startswith("update 1:")]
    assert "every negative of a micro-step is masked" in warning


class ScaledTraining:
    """A gradient scaler on the CPU, installed where accelerate has its scaler for fp16."""

    def __init__(self, trainer: Any, scale: float) -> None:
        self.trainer = trainer
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        self.steps_before_unscaling: list[int] = []  # micro-steps of the update, at each call
        trainer.accelerator.scaler = self.scaler
        trainer.accelerator.unscale_gradients = self.unscale

    def unscale(self, optimizer: Any = None) -> None:
        self.steps_before_unscaling.append(len(self.trainer.updates.current.losses))
        # It raises an error if the gradients are unscaled already.
        self.scaler.unscale_(self.trainer.optimizer.optimizer)


@pytest.mark.parametrize(("max_grad_norm", "tied"), [(0.0, True), (1e-2, False)])
def test_a_scaled_run_equals_the_unscaled_one_and_unscales_once_per_update(
    max_grad_norm, tied, tmp_path
):
    plain = make_trainer(tmp_path / "plain", tied=tied, max_grad_norm=max_grad_norm)
    plain.train()
    trainer = make_trainer(tmp_path / "scaled", tied=tied, max_grad_norm=max_grad_norm)
    scaled = ScaledTraining(trainer, 2.0**10)
    trainer.train()
    assert scaled.steps_before_unscaling == [3, 3, 3]
    # Scaling by a power of two does not round.
    assert torch.equal(get_weights(plain), get_weights(trainer))
    plain_log = read_log(tmp_path / "plain")
    scaled_log = read_log(tmp_path / "scaled")
    for key in ("grad_norm_query", "grad_norm_passage", "loss"):
        plain_values = [line[key] for line in plain_log]
        scaled_values = [line[key] for line in scaled_log]
        assert plain_values == pytest.approx(scaled_values, rel=1e-6)


def test_an_overflow_of_the_scaler_skips_the_update_but_is_not_counted(tmp_path):
    trainer = make_trainer(tmp_path, max_skipped_updates=0)
    scaled = ScaledTraining(trainer, 2.0**10)
    weights = record_weights(trainer, 4, 7)
    call_at_micro_step(trainer, 5, multiply_gradient(trainer, math.inf))
    trainer.train()
    assert torch.equal(weights[0], weights[1])
    assert trainer.updates.num_skipped == 0
    assert scaled.scaler.get_scale() == 2.0**9
    assert scaled.scaler.state_dict()["_growth_tracker"] == 1
    line = read_log(tmp_path)[1]
    assert line["skipped"] == "overflow"
    assert line["scale"] == 2.0**10
