"""The update clock: every kind of optimizer step ends one update; an import installs no hook."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from contaccum import BankedInfoNCE
from contaccum.errors import warn_once

K = 3  # micro-steps per update
N = 8  # pairs per micro-batch
D = 16


def make_encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, D))


def draw_updates(
    num_updates: int, micro_steps: int = K, n: int = N
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield the micro-batches of each update: inputs of queries and of passages, (n, 6) each."""
    for update in range(num_updates):
        generator = torch.Generator().manual_seed(update)
        micro_batches = []
        for _ in range(micro_steps):
            queries = torch.randn(n, 6, generator=generator)
            passages = torch.randn(n, 6, generator=generator)
            micro_batches.append((queries, passages))
        yield micro_batches


def train(
    model: nn.Module,
    loss_fn: BankedInfoNCE,
    step: Callable[[], object],
    end_update: str = "never",
    num_updates: int = 6,
) -> list[float]:
    """Return losses of a loop that calls `end_update` "before" or "after" the step, or "never"."""
    losses = []
    for micro_batches in draw_updates(num_updates):
        for queries, passages in micro_batches:
            loss = loss_fn(model(queries), model(passages)) / K
            loss.backward()
            losses.append(loss.item())
        if end_update == "before":
            loss_fn.end_update()
        step()
        if end_update == "after":
            loss_fn.end_update()
        model.zero_grad()
    return losses


def make_adam_step(model: nn.Module, fused: bool = False) -> Callable[[], object]:
    """Return a function that steps AdamW over all weights."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused).step


def make_adam_step_by_group(model: nn.Module) -> Callable[[], None]:
    """Return a function that steps the same AdamW once for each weight, as ZeRO does."""
    optimizer = torch.optim.AdamW([{"params": [x]} for x in model.parameters()], lr=1e-2)
    groups = optimizer.param_groups

    def step() -> None:
        for group in groups:
            optimizer.param_groups = [group]
            optimizer.step()

    return step


@pytest.mark.parametrize("end_update", ["after", "before"])
def test_a_loop_without_end_update_equals_one_that_calls_it(end_update):
    results = []
    for calls in ("never", end_update):
        model = make_encoder()
        loss_fn = BankedInfoNCE(bank_size=40, temperature=0.5)
        losses = train(model, loss_fn, make_adam_step(model), calls)
        loss_fn(torch.randn(N, D), torch.randn(N, D))
        assert loss_fn.clock.num_updates == 6
        results.append((losses, loss_fn.last["bank_age"], list(model.parameters())))
    losses, bank_age, parameters = results[0]
    expected_losses, expected_age, expected_parameters = results[1]
    assert losses == expected_losses
    assert bank_age == expected_age
    for parameter, expected in zip(parameters, expected_parameters, strict=True):
        assert torch.equal(parameter, expected)


@pytest.mark.parametrize(
    "make_step",
    [make_adam_step, partial(make_adam_step, fused=True), make_adam_step_by_group],
    ids=["all weights", "fused", "one group at a time"],
)
def test_every_update_counts_once_however_the_optimizer_steps(make_step):
    model = make_encoder()
    loss_fn = BankedInfoNCE(bank_size=64)
    train(model, loss_fn, make_step(model))
    assert loss_fn.clock.num_updates == 6
    restored = BankedInfoNCE(bank_size=64)
    restored.load_state_dict(loss_fn.state_dict())
    assert restored.clock.num_updates == 6


def test_steps_without_a_training_forward_before_them_do_not_count():
    model = make_encoder()
    loss_fn = BankedInfoNCE(bank_size=64)
    step = make_adam_step(model)
    train(model, loss_fn, step, num_updates=2)
    for _ in range(3):
        step()
    loss_fn.eval()
    loss_fn(torch.randn(N, D, requires_grad=True), torch.randn(N, D))
    step()
    assert loss_fn.clock.num_updates == 2


def test_an_update_counts_if_a_probe_comes_before_the_optimizer_step():
    model = make_encoder()
    loss_fn = BankedInfoNCE(bank_size=64)
    step = make_adam_step(model)
    probe = torch.randn(4, D)  # does not move, so nothing retires

    def observe_probe_and_step() -> None:
        loss_fn.observe_probe(probe, probe)
        step()

    train(model, loss_fn, observe_probe_and_step)
    assert loss_fn.clock.num_updates == 6
    loss_fn(torch.randn(N, D), torch.randn(N, D))
    # 56 of the bank's 64 pairs came before: in three updates of 24.
    assert loss_fn.last["bank_age"] == 3


def test_the_state_does_not_grow_with_the_number_of_updates():
    model = make_encoder()
    loss_fn = BankedInfoNCE(bank_size=16)
    step = make_adam_step(model)
    lengths = []
    for _ in range(3):
        train(model, loss_fn, step)
        lengths.append(len(loss_fn.clock.get_state()))
    assert lengths[0] == lengths[1] == lengths[2]


def test_a_copy_of_a_loss_counts_its_own_updates():
    model = make_encoder()
    loss_fn = BankedInfoNCE(bank_size=64)
    train(model, loss_fn, make_adam_step(model), num_updates=2)
    copied_loss_fn = copy.deepcopy(loss_fn)
    copied_model = copy.deepcopy(model)
    train(copied_model, copied_loss_fn, make_adam_step(copied_model), num_updates=3)
    assert loss_fn.clock.num_updates == 2
    assert copied_loss_fn.clock.num_updates == 5


def test_a_long_first_update_is_no_reason_for_a_warning(caplog):
    model = make_encoder()
    loss_fn = BankedInfoNCE(bank_size=64, pairs_per_update=4096)
    with caplog.at_level(logging.WARNING):
        [micro_batches] = draw_updates(1, micro_steps=33, n=128)
        for queries, passages in micro_batches:
            loss_fn(model(queries), model(passages)).backward()
    assert not caplog.records


def test_without_a_detected_step_one_warning_is_logged_and_entries_are_aged(caplog):
    warn_once.cache_clear()
    model = make_encoder()
    loss_fn = BankedInfoNCE(bank_size=256)
    probe_texts = torch.randn(8, 6)
    loss_fn.observe_probe(model(probe_texts), model(probe_texts))
    with caplog.at_level(logging.WARNING):
        for micro_batches in draw_updates(5, micro_steps=8, n=128):
            for queries, passages in micro_batches:
                loss_fn(model(queries), model(passages)).backward()
            for parameter in model.parameters():
                parameter.data -= 1e-2 * parameter.grad
    assert len(caplog.records) == 1
    assert "no optimizer step was detected in 4,096 pairs" in caplog.text
    assert "end_update()" in caplog.text
    passages = model(torch.randn(128, 6)).detach().requires_grad_()
    loss_fn(model(torch.randn(128, 6)), passages).backward()
    assert passages.grad.sum(0).abs().max() < 1e-6  # centred, as against older entries


HOOKED = """
from torch.optim import optimizer
hooks = []
optimizer.register_optimizer_step_post_hook = hooks.append
import torch
from contaccum import BankedInfoNCE
loss_fn = BankedInfoNCE(8)
loss_fn.eval()(torch.ones(2, 3), torch.ones(2, 3))
assert not hooks
for _ in range(2):
    loss_fn.train()(torch.ones(2, 3), torch.ones(2, 3))
assert len(hooks) == 1
"""


def test_only_a_training_installs_the_hook_of_optimizers():
    """In another process, because a training of another test has installed it in this one."""
    subprocess.run([sys.executable, "-c", HOOKED], check=True)
