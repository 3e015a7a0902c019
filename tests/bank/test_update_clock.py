"""Updates are counted whatever steps the encoder: optimizers of all or a part of it, of copies, of flat pieces."""

import copy
import logging
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from contaccum import BankedInfoNCE

K, N, D = 3, 8, 16


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, D))


def pairs(updates: int, k: int = K, n: int = N) -> Iterator[list[tuple[Tensor, Tensor]]]:
    for update in range(updates):
        generator = torch.Generator().manual_seed(update)
        yield [(torch.randn(n, 6, generator=generator), torch.randn(n, 6, generator=generator)) for _ in range(k)]


def train(
    model: nn.Module, loss_fn: BankedInfoNCE, step: Callable[[], None], end_update: str = "never", updates: int = 6
) -> list[float]:
    """Losses of a loop that calls `end_update` "before" the optimizer's step, "after" it, or "never"."""
    losses = []
    for micro_batches in pairs(updates):
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


def count_updates(loss_fn: BankedInfoNCE) -> int:
    """The number of updates, the last of them included, which the next micro-step would notice."""
    loss_fn.state_dict()
    return loss_fn.bank.updates


def adam(model: nn.Module, fused: bool = False) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    return lambda: optimizer.step() and None


def adam_over_copies(model: nn.Module, flat: bool, one_by_one: bool = False) -> Callable[[], None]:
    """An optimizer over float32 copies of the weights, or over one flat copy, as engines keep them.

    With ``one_by_one``, each group of weights is stepped by itself, as in ZeRO.
    """
    parameters = [*model.parameters()]
    copies = [p.detach().clone() for p in parameters]
    if flat:
        copies = [torch.cat([p.flatten() for p in copies])]
    copies = [nn.Parameter(x) for x in copies]
    optimizer = torch.optim.AdamW([{"params": [x]} for x in copies], lr=1e-2)

    def step() -> None:
        gradients = [p.grad for p in parameters]
        if flat:
            gradients = [torch.cat([g.flatten() for g in gradients])]
        for held, gradient in zip(copies, gradients, strict=True):
            held.grad = gradient.clone()
        groups = optimizer.param_groups
        for stepped_at_once in [[group] for group in groups] if one_by_one else [groups]:
            optimizer.param_groups = stepped_at_once
            optimizer.step()
        optimizer.param_groups = groups
        new = copies[0].split([p.numel() for p in parameters]) if flat else copies
        with torch.no_grad():
            for p, x in zip(parameters, new, strict=True):
                p.copy_(x.view_as(p))

    return step


@pytest.mark.parametrize("drift", ["auto", "mean", "fresh", "none"])
@pytest.mark.parametrize("end_update", ["after", "before"])
def test_a_loop_without_end_update_equals_one_that_calls_it(drift, end_update):
    results = []
    for calls in ("never", end_update):
        model = encoder()
        loss_fn = BankedInfoNCE(bank_size=40, temperature=0.5, drift_compensation=drift)
        losses = train(model, loss_fn, adam(model), calls)
        loss_fn(torch.randn(N, D), torch.randn(N, D))
        results.append((losses, loss_fn.bank.updates, loss_fn.bank.age, [*model.parameters()]))
    without, with_calls = results
    assert without[1] == 6
    assert without[:3] == with_calls[:3]
    assert all(torch.equal(a, b) for a, b in zip(without[3], with_calls[3], strict=True))


OVER_COPIES = [
    partial(adam_over_copies, flat=False),
    partial(adam_over_copies, flat=True),
    partial(adam_over_copies, flat=False, one_by_one=True),
]


@pytest.mark.parametrize("make_step", [adam, partial(adam, fused=True), *OVER_COPIES])
def test_every_update_counts_once_of_an_optimizer_over_the_weights_or_copies_of_them(make_step):
    model, loss_fn = encoder(), BankedInfoNCE(bank_size=64)
    train(model, loss_fn, make_step(model))
    assert count_updates(loss_fn) == 6
    restored = BankedInfoNCE(bank_size=64)
    restored.load_state_dict(loss_fn.state_dict())
    assert restored.bank.updates == 6


def test_updates_of_a_single_trained_number_count():
    model, loss_fn = encoder(), BankedInfoNCE(bank_size=64)
    model.requires_grad_(False)
    scale = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([scale], lr=0.1)
    for micro_batches in pairs(6):
        for queries, passages in micro_batches:
            loss_fn(model(queries) * scale, model(passages)).backward()
        optimizer.step()
    assert count_updates(loss_fn) == 6


def test_steps_without_a_training_forward_before_them_do_not_count():
    model, loss_fn = encoder(), BankedInfoNCE(bank_size=64)
    step = adam(model)
    train(model, loss_fn, step, updates=2)
    for _ in range(3):
        step()
    loss_fn.eval()
    loss_fn(torch.randn(N, D, requires_grad=True), torch.randn(N, D))
    step()
    assert count_updates(loss_fn) == 2


def test_a_copy_of_a_loss_counts_its_own_updates():
    model, loss_fn = encoder(), BankedInfoNCE(bank_size=64)
    train(model, loss_fn, adam(model), updates=2)
    assert count_updates(loss_fn) == 2
    copied_loss, copied_model = copy.deepcopy(loss_fn), copy.deepcopy(model)
    train(copied_model, copied_loss, adam(copied_model), updates=3)
    assert (count_updates(loss_fn), count_updates(copied_loss)) == (2, 5)


def test_where_no_step_can_be_seen_one_warning_says_so_and_entries_count_as_old(caplog):
    model, loss_fn = encoder(), BankedInfoNCE(bank_size=256)
    with caplog.at_level(logging.WARNING):
        for micro_batches in pairs(5, k=8, n=128):
            for queries, passages in micro_batches:
                loss_fn(model(queries), model(passages)).backward()
            for p in model.parameters():
                p.data -= 1e-2 * p.grad
    assert len(caplog.records) == 1
    assert "no update was seen in 4,096 pairs" in caplog.text and "end_update()" in caplog.text
    assert loss_fn.bank.aged == 256 - 128
