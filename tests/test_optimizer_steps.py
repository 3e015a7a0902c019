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
        draw = torch.Generator().manual_seed(update)
        yield [(torch.randn(n, 6, generator=draw), torch.randn(n, 6, generator=draw)) for _ in range(k)]


def run(model: nn.Module, loss_fn: BankedInfoNCE, step: Callable[[], None], said: str = "no", updates: int = 6) -> list:
    """Losses of a loop that calls `end_update` after the step, before it, or not at all."""
    losses = []
    for micro_batches in pairs(updates):
        for queries, passages in micro_batches:
            loss = loss_fn(model(queries), model(passages)) / K
            loss.backward()
            losses.append(loss.item())
        if said == "before":
            loss_fn.end_update()
        step()
        if said == "after":
            loss_fn.end_update()
        model.zero_grad()
    return losses


def adam(model: nn.Module, fused: bool = False) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    return lambda: optimizer.step() and None


def copies(model: nn.Module, flat: bool, each: bool = False) -> Callable[[], None]:
    """As engines do that keep float32 copies of half-precision weights, as they are or in one flat piece.

    With ``each``, groups of weights are stepped one by one, by an optimizer that shows one at a time, as in ZeRO.
    """
    parameters = [*model.parameters()]
    held = [torch.cat([p.detach().flatten() for p in parameters])] if flat else [p.detach().clone() for p in parameters]
    held = [nn.Parameter(x) for x in held]
    optimizer = torch.optim.AdamW([{"params": [x]} for x in held], lr=1e-2)

    def step() -> None:
        gradients = [p.grad for p in parameters]
        gradients = [torch.cat([g.flatten() for g in gradients])] if flat else gradients
        for mine, gradient in zip(held, gradients, strict=True):
            mine.grad = gradient.clone()
        groups = optimizer.param_groups
        for some in [[group] for group in groups] if each else [groups]:
            optimizer.param_groups = some
            optimizer.step()
        optimizer.param_groups = groups
        new = held[0].split([p.numel() for p in parameters]) if flat else held
        with torch.no_grad():
            for p, x in zip(parameters, new, strict=True):
                p.copy_(x.view_as(p))

    return step


@pytest.mark.parametrize("drift", ["auto", "mean", "fresh", "none"])
@pytest.mark.parametrize("said", ["after", "before"])
def test_a_loop_that_forgets_end_update_does_what_one_does_that_calls_it(drift, said):
    found = []
    for each in ("no", said):
        model, loss_fn = encoder(), BankedInfoNCE(bank_size=40, temperature=0.5, drift_compensation=drift)
        losses = run(model, loss_fn, adam(model), each)
        loss_fn(torch.randn(N, D), torch.randn(N, D))
        found.append((losses, loss_fn.bank.updates, loss_fn.bank.age, [*model.parameters()]))
    assert found[0][1:3] == found[1][1:3] and found[0][1] == 6
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][3], found[1][3], strict=True))


COPIES = [partial(copies, flat=False), partial(copies, flat=True), partial(copies, flat=False, each=True)]


@pytest.mark.parametrize("kind", [adam, partial(adam, fused=True), *COPIES])
def test_every_step_counts_once_of_an_optimizer_over_the_weights_or_copies_of_them(kind):
    model, loss_fn = encoder(), BankedInfoNCE(bank_size=64)
    run(model, loss_fn, kind(model))
    state = loss_fn.state_dict()  # which ends the last
    assert loss_fn.bank.updates == 6
    again = BankedInfoNCE(bank_size=64)
    again.load_state_dict(state)
    assert again.bank.updates == 6


def test_steps_of_other_models_do_not_count():
    model, loss_fn = encoder(), BankedInfoNCE(bank_size=64)
    other = nn.Parameter(torch.ones(300))  # fewer numbers than the encoder trains
    own, others = adam(model), torch.optim.SGD([other], lr=0.1)
    run(model, loss_fn, lambda: others.step() and None)
    assert loss_fn.bank.updates == 0
    run(model, loss_fn, own)
    larger = nn.Linear(1000, 100)  # more numbers; but an optimizer is known by now that holds the encoder's own
    run(model, loss_fn, adam(larger))
    loss_fn.state_dict()
    assert loss_fn.bank.updates == 6


def test_copies_of_parameters_that_are_left_empty_count_when_all_have_stepped():
    model, loss_fn = encoder(), BankedInfoNCE(bank_size=64)
    held = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    loss_fn(*(model(x) for x in next(pairs(1))[0]))
    for p in model.parameters():  # as ZeRO-3 does
        p.ds_numel, p.data = p.numel(), torch.empty(0)
    for some, updates in ((held[:2], 0), (held[2:], 1)):
        torch.optim.SGD(some, lr=0.1).step()
        loss_fn.state_dict()
        assert loss_fn.bank.updates == updates


def test_part_of_an_encoder_in_one_optimizer_counts_too():
    model, loss_fn = encoder(), BankedInfoNCE(bank_size=64)
    model[0].requires_grad_(False)
    frozen = torch.optim.SGD(model[0].parameters(), lr=0.1)  # somebody's optimizer may hold what is frozen
    run(model, loss_fn, lambda: frozen.step() and None)
    run(model, loss_fn, adam(model[2]))
    loss_fn.state_dict()
    assert loss_fn.bank.updates == 6


def test_a_copy_of_a_loss_holds_no_model_and_counts_its_own_updates():
    model, loss_fn = encoder(), BankedInfoNCE(bank_size=64)
    run(model, loss_fn, adam(model), updates=2)
    other = copy.deepcopy(loss_fn)
    twin = copy.deepcopy(model)
    run(twin, other, adam(twin), updates=3)
    other.state_dict()
    loss_fn.state_dict()
    assert (loss_fn.bank.updates, other.bank.updates) == (2, 5)


def test_where_no_step_can_be_seen_one_warning_says_so_and_entries_count_as_old(caplog):
    model, loss_fn = encoder(), BankedInfoNCE(bank_size=256)
    with caplog.at_level(logging.WARNING):
        for micro_batches in pairs(5, k=8, n=128):
            for queries, passages in micro_batches:
                loss_fn(model(queries), model(passages)).backward()
            for p in model.parameters():
                p.data -= 1e-2 * p.grad
    assert [record.message for record in caplog.records] == [next(r.message for r in caplog.records)]
    assert "no update was seen in 4,096 pairs" in caplog.text and "end_update()" in caplog.text
    assert loss_fn.bank.aged == 256 - 128
