"""Centring of gradients: over an update in one pass, over a micro-batch by itself, of one tower or both."""

from typing import Any

import pytest
import torch
from torch import Tensor

from contaccum import BankedInfoNCE

N, K, D = 8, 16, 32
Gradients = list[list[Tensor]]  # of each micro-step: queries (n, d), passages (n, d), hard negatives (n, h, d)


def updates(loss_fn: BankedInfoNCE, sizes: list[int], count: int = 2, h: int = 2, seed: int = 3) -> list[Gradients]:
    """Gradients of the micro-steps of the last of some updates, after others that filled the bank."""
    generator, found = torch.Generator().manual_seed(seed), []
    for update in range(count):
        found.append([])
        for n in sizes:
            shapes = [(n, D), (n, D)] + ([(n, h, D)] if h else [])
            inputs = [torch.randn(s, generator=generator, dtype=torch.float64) + update for s in shapes]
            inputs = [x.requires_grad_() for x in inputs]
            loss_fn(*inputs).backward()
            found[-1].append([x.grad for x in inputs])
        loss_fn.end_update()
    return found


def towers(step: list[Tensor]) -> tuple[Tensor, Tensor]:
    return step[0], torch.cat([x.flatten(0, -2) for x in step[1:]])


def settled(update: Gradients, tower: int) -> list[Tensor]:
    """What the micro-steps have left over is spread over the rows still to come, those of the present one too."""
    rows = [towers(step)[tower] for step in update]
    to_come, left_over, found = sum(map(len, rows)), torch.zeros(D, dtype=torch.float64), []
    for own in rows:
        corrected = own - (left_over + own.sum(0)) / to_come
        found.append(corrected)
        left_over = left_over + corrected.sum(0)
        to_come -= len(own)
    return found


@pytest.mark.parametrize(
    ("setting", "centred"), [("both", (0, 1)), ("passages", (1,)), ("queries", (0,)), ("none", ())]
)
@pytest.mark.parametrize("h", [0, 2])
def test_over_an_update_what_is_left_over_is_spread_over_the_rows_to_come(setting, centred, h):
    given: dict[str, Any] = {"bank_size": 200, "drift_compensation": "none", "temperature": 5.0}
    ours = updates(BankedInfoNCE(**given, center_gradients=setting, pairs_per_update=N * K), [N] * K, 3, h)
    plain = updates(BankedInfoNCE(**given, center_gradients="none"), [N] * K, 3, h)
    for update, as_it_is in zip(ours, plain, strict=True):
        for tower in (0, 1):
            found = [towers(step)[tower] for step in update]
            raw = [towers(step)[tower] for step in as_it_is]
            expected = settled(as_it_is, tower) if tower in centred else raw
            assert max((a - b).abs().max() for a, b in zip(found, expected, strict=True)) < 1e-13
            left_over = torch.cat(found).sum(0).abs().max()
            assert left_over < 1e-12 if tower in centred else left_over > 1e-3


@pytest.mark.parametrize("sizes", [[5, 8, 1, 3], [1] * 6, [17]])
def test_updates_of_any_sizes_sum_to_zero_when_their_pairs_are_said_beforehand(sizes):
    loss_fn = BankedInfoNCE(0, center_gradients="both", similarity="dot")
    generator = torch.Generator().manual_seed(0)
    for update in range(3):
        own = sizes[update:] + sizes[:update]
        loss_fn.begin_update(sum(own))
        total = torch.zeros(2, D, dtype=torch.float64)
        for n in own:
            inputs = [
                torch.randn(s, generator=generator).double().requires_grad_() for s in ((n, D), (n, D), (n, 1, D))
            ]
            loss_fn(*inputs).backward()
            total += torch.stack([x.sum(0) for x in towers([x.grad for x in inputs])])
        assert total.abs().max() < 1e-14


def test_where_nobody_says_how_many_pairs_an_update_has_each_micro_batch_sums_to_zero():
    found = updates(BankedInfoNCE(64, center_gradients="both", drift_compensation="none"), [N, N, 3, 1])
    for step in (step for update in found for step in update):
        queries, columns = towers(step)
        assert columns.sum(0).abs().max() < 1e-14 and queries.abs().max() > 0
        assert len(queries) == 1 or queries.sum(0).abs().max() < 1e-14  # one alone would take itself out


def test_an_update_that_ends_early_leaves_nothing_over_to_the_next():
    losses = [BankedInfoNCE(0, center_gradients="both", pairs_per_update=N * K) for _ in range(2)]
    updates(losses[0], [N] * (K - 3), 1, seed=8)
    first, second = (updates(loss_fn, [N] * K, 1) for loss_fn in losses)
    assert all(torch.equal(a, b) for x, y in zip(first[0], second[0], strict=True) for a, b in zip(x, y, strict=True))


def test_auto_centres_passages_while_older_entries_are_in_use_and_no_baseline():
    for given, expected in (
        ({"bank_size": 64}, [False, True]),  # in the first update nothing is old
        ({"bank_size": 64, "drift_compensation": "mean"}, [False, False]),
    ):
        found = updates(BankedInfoNCE(**given, pairs_per_update=2 * N), [N, N])
        for update, centred in zip(found, expected, strict=True):
            queries, passages = (torch.cat([towers(step)[tower] for step in update]).sum(0) for tower in (0, 1))
            assert bool(passages.abs().max() < 1e-14) == centred and queries.abs().max() > 1e-6
    plain, auto = (
        updates(BankedInfoNCE(0, center_gradients=x, pairs_per_update=2 * N), [N, N]) for x in ("none", "auto")
    )
    assert torch.equal(plain[1][1][0], auto[1][1][0])


@pytest.mark.parametrize("bad", [0, 3, K - 1])
def test_a_micro_batch_that_is_not_finite_leaves_the_centring_of_the_others_whole(bad):
    """Its own backward is left out; the gradients of all others still sum to zero over the update."""
    loss_fn = BankedInfoNCE(64, center_gradients="both", drift_compensation="none", pairs_per_update=N * K)
    generator = torch.Generator().manual_seed(0)
    totals = torch.zeros(2, D, dtype=torch.float64)
    for step in range(K):
        inputs = [torch.randn(N, D, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)]
        if step == bad:
            inputs[0].data[0] = torch.inf
        loss = loss_fn(*inputs)
        assert bool(loss.isfinite()) == (step != bad)
        if step != bad:
            loss.backward()
            totals += torch.stack([x.grad.sum(0) for x in inputs])
    if bad == K - 1:  # what the last micro-batch would have taken out is left
        assert totals.isfinite().all() and totals.abs().max() > 1e-6
    else:
        assert totals.abs().max() < 1e-14


def test_a_forward_in_eval_mode_with_gradients_changes_no_training_update():
    def gradients(evaluates: bool) -> Tensor:
        loss_fn = BankedInfoNCE(64, center_gradients="both", drift_compensation="none", pairs_per_update=3 * N)
        generator = torch.Generator().manual_seed(0)
        collected = []
        for step in range(3):
            inputs = [torch.randn(N, D, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)]
            loss_fn(*inputs).backward()
            collected += [x.grad for x in inputs]
            if evaluates and step == 1:
                loss_fn.eval()
                loss_fn(*(x.detach().requires_grad_() for x in inputs)).backward()
                loss_fn.train()
        return torch.cat(collected)

    assert torch.equal(gradients(evaluates=True), gradients(evaluates=False))


def test_gradients_in_eval_mode_are_those_of_plain_info_nce():
    inputs = [torch.randn(N, D, dtype=torch.float64).requires_grad_() for _ in range(2)]
    loss_fn = BankedInfoNCE(0, center_gradients="both").eval()
    loss_fn(*inputs).backward()
    found = [x.grad.clone() for x in inputs]
    queries, passages = (x.detach().requires_grad_() for x in inputs)
    torch.nn.functional.cross_entropy(queries @ passages.T, torch.arange(N)).backward()
    assert torch.allclose(found[0], queries.grad, atol=1e-14) and torch.allclose(found[1], passages.grad, atol=1e-14)
