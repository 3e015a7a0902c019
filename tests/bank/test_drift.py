"""Drift: what running means and probes measure, and what the loss makes of it."""

from itertools import pairwise

import pytest
import torch
from dense_reference import dense_loss
from torch import Tensor

from contaccum import BankedInfoNCE
from contaccum.bank.drift import PROBES, DriftProbe, RunningMean

D = 6


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_translation_of_the_passages_leaves_the_gradient_that_of_the_full_batch():
    """Known by a probe, a common shift is undone exactly: bank entries of four encoders, and the fresh full batch."""
    n, k = 32, 4
    queries, base = randn(n * k, D, seed=0), randn(n * k, D, seed=1)
    shifts = [torch.zeros(D, dtype=torch.float64), *(3 * randn(D, seed=10 + i) for i in range(k))]
    loss_fn = BankedInfoNCE(bank_size=n * (k - 1), temperature=0.5, drift_compensation="mean")
    probe = (randn(8, D, seed=2), randn(8, D, seed=3))
    total = torch.stack(shifts).cumsum(0)
    for i in range(k - 1):  # an update after each: the passage tower moves as a whole
        loss_fn.observe_probe(probe[0], probe[1] + total[i])
        loss_fn(queries[i * n : i * n + n], base[i * n : i * n + n] + total[i])
        loss_fn.end_update()
    loss_fn.observe_probe(probe[0], probe[1] + total[k - 1])
    local = [x.clone().requires_grad_() for x in (queries[-n:], base[-n:] + total[k - 1])]
    loss_fn(*local).backward()
    full = [x.clone().requires_grad_() for x in (queries, base + total[k - 1])]
    dense_loss([full[0]], [full[1]], list(range(n * k)), n, 0.5).backward()
    for mine, whole in zip(local, full, strict=True):
        assert (mine.grad - whole.grad[-n:]).abs().max() < 1e-12
    assert loss_fn.drift_record()["bank_age"] == 2  # the first encoder's entries have just made room


@pytest.mark.parametrize(("bank_size", "n"), [(64, 16), (256, 16), (1024, 64)])
def test_a_banked_query_pushes_from_where_it_is_now_whatever_wraps(bank_size, n):
    """Against a list of where the query tower was when each pair came, by a probe after every fourth micro-batch."""
    loss_fn = BankedInfoNCE(bank_size=bank_size, drift_compensation="mean")
    probe, position, then = randn(4, D, seed=1), torch.zeros(D), []
    loss_fn.observe_probe(probe, probe)
    steps = 3 * bank_size // (2 * n)
    for step in range(steps):
        if step % 4 == 0:
            position = position + 0.3 * randn(D, seed=step)
            loss_fn.observe_probe(probe + position, probe)
        inputs = [randn(n, D, seed=1000 + 2 * step + i).requires_grad_() for i in range(2)]
        if step % (steps // 3) == steps // 3 - 1:
            bank, seen = loss_fn.bank, then[loss_fn.bank.first :]
            slots = torch.arange(bank.first, bank.pairs) % bank.slots
            exact = [x.detach().clone().requires_grad_() for x in inputs]
            moved = torch.cat([torch.zeros(n, D), position - torch.stack(seen)])
            rows, columns = [exact[0], bank.queries[slots]], [exact[1], bank.passages[slots]]
            dense_loss(rows, columns, [*range(n + len(seen))], n, 1.0, moved=moved).backward()
            loss_fn(*inputs).backward()
            assert all((a.grad - b.grad).abs().max() < 1e-11 for a, b in zip(inputs, exact, strict=True))
        else:
            loss_fn(*inputs)
        then += [position] * n


def test_running_mean_of_single_embeddings_does_not_follow_each_of_them():
    """Or every banked passage would be moved onto the present one, and the bank would tell nothing apart."""
    mean = RunningMean(D, dtype=torch.float64)
    texts = randn(256, D, seed=0)
    for text in texts:
        mean.set(mean.after(text[None]), torch.tensor(True))
    assert (mean.mean - texts.mean(0)).norm() < 0.3
    assert mean.variance.item() == pytest.approx(D, rel=0.15)


def test_probe_tells_shift_from_what_is_left():
    probe = DriftProbe((8, D), 1024, torch.float64)
    queries, passages = randn(8, D, seed=0), randn(8, D, seed=1)
    step = torch.full((D,), 0.5, dtype=torch.float64)
    noise = randn(8, D, seed=2) * 0.1
    for update in range(6):
        shift = probe.observe(queries, passages + update * step + (update == 5) * noise, update, 64 * update)
        assert shift[0].abs().max() < 1e-12
        expected = torch.zeros(D) if update == 0 else step + (noise.mean(0) if update == 5 else 0)
        assert (shift[1] - expected).abs().max() < 1e-12
    record = probe.record(oldest=2)
    spread = (passages + noise - (passages + noise).mean(0)).square().sum(1).mean().sqrt()
    assert record["drift_age"] == 2
    assert record["drift_cosine_query"] == pytest.approx(1.0) and record["drift_cosine_passage"] < 0.99
    assert record["drift_shift_passage"] == pytest.approx(((2 * step + noise.mean(0)).norm() / spread).item())
    left = (noise - noise.mean(0)).square().sum(1).mean().sqrt() / spread
    assert record["drift_residual_passage"] == pytest.approx(left.item())
    assert record["drift_residual_query"] == pytest.approx(0.0, abs=1e-9)


def test_probes_are_kept_over_the_life_of_the_bank_and_the_latest_is_always_there():
    life = 40 * PROBES
    probe = DriftProbe((2, D), 100 * life, torch.float64)
    every = 1000
    assert probe.spacing > 3 * every
    for i in range(1000):
        position = torch.full((2, D), float(i), dtype=torch.float64)
        shift = probe.observe(position, -position, i, i * every)
        assert shift.flatten().tolist() == ([1.0] * D + [-1.0] * D if i else [0.0] * 2 * D)
        kept = probe.pairs
        gaps = [b - a for a, b in pairwise(kept)]
        assert kept[-1] == i * every and all(probe.spacing <= gap <= probe.spacing + every for gap in gaps[:-1])
        assert probe.embeddings[: len(kept), 0, 0, 0].tolist() == [pairs / every for pairs in kept]
        assert kept[0] == 0 or kept[-1] - kept[0] >= 100 * life
        if i == 499:
            again = DriftProbe((2, D), 100 * life, torch.float64)
            again.load_state_dict(probe.state_dict())
            probe = again


def test_age_limit_is_where_the_residual_passes_the_bound():
    """Texts that move apart at a constant rate: the residual grows linearly with age, whatever the mean does."""
    passages, turn = randn(8, D, seed=1), 1e-4 * randn(8, D, seed=2)
    probe = DriftProbe((8, D), 2000, torch.float64)
    for i in range(21):
        now = passages + i * turn + i
        probe.observe(now, now, i, 100 * i)
    spread = (now - now.mean(0)).square().sum(1).mean().sqrt()
    rate = (turn - turn.mean(0)).square().sum(1).mean().sqrt() / spread / 100  # per pair
    residuals = probe.residuals()
    assert torch.allclose(residuals[:, 0], rate * torch.arange(2000, 0, -100))
    for age in (30.0, 777.0, 1990.0):
        assert probe.age_limit(residuals[:, 1], bound=float(rate) * age) == pytest.approx(age)
    assert probe.age_limit(residuals[:, 1], bound=float(rate) * 2001) == float("inf")


def test_auto_retires_what_drifted_too_far_and_takes_more_again_when_the_encoder_settles():
    n, texts = 32, randn(8, D, seed=1)
    loss_fn = BankedInfoNCE(bank_size=1024)
    passages = texts
    in_use = []
    for update in range(100):
        loss_fn.observe_probe(texts, passages)
        for i in range(4):
            loss_fn(randn(n, D, seed=2 * i), randn(n, D, seed=2 * i + 1))
            if update:
                assert loss_fn.bank.in_use >= n * (i + 1)  # the present update's, whatever the drift
        in_use.append(loss_fn.bank.in_use)
        # First it moves as a whole, then every text goes its own way, then it settles.
        passages = passages + (1.0 if update < 20 else randn(8, D, seed=100 + update) * (update < 50))
    assert in_use[:8] == [128 * (i + 1) for i in range(8)] and in_use[19] == 1024
    assert in_use[49] == 128
    assert in_use[-1] == 1024

    paper, mean = BankedInfoNCE(bank_size=64, drift_compensation="none"), BankedInfoNCE(64, drift_compensation="mean")
    for fn in (paper, mean):
        for update in range(4):
            fn.observe_probe(texts, texts + 10 * randn(8, D, seed=update))
            fn(randn(n, D, seed=2 * update), randn(n, D, seed=2 * update + 1))
        assert fn.bank.in_use == 64


def test_older_entries_count_less_by_what_the_probe_says_of_their_age():
    texts, turn = (x - x.mean(0) for x in (randn(8, D, seed=1), randn(8, D, seed=2)))
    loss_fn = BankedInfoNCE(bank_size=1024, bank_weight="auto")
    for update in range(12):
        now = texts + 0.03 * update * turn
        loss_fn.observe_probe(texts, now)
        for i in range(4 if update < 11 else 1):
            loss_fn(randn(32, D, seed=2 * i), randn(32, D, seed=2 * i + 1))
        loss_fn.end_update()
    bank = loss_fn.bank
    ages = 11 - torch.arange(bank.first, bank.pairs, bank.block) // 128
    residuals = 0.03 * ages * (turn.square().sum() / now.square().sum()).sqrt()
    expected = -0.5 * (residuals / 0.08) ** 2
    blocks = torch.arange(bank.first, bank.pairs, bank.block) // bank.block % len(bank.log_weights)
    partly_retired = ages == ages[0]  # where that update began is forgotten
    assert torch.allclose(bank.log_weights[blocks][~partly_retired], expected.to(bank.log_weights)[~partly_retired])
    assert ages[-1] == 0 and expected[-1] == 0 and -3.2 < expected.min() < -0.5  # kept beyond 0.08, to 0.2


@pytest.mark.parametrize(("bank_size", "scale"), [(100, 1), (640, 6)])
def test_the_limit_retires_blocks_to_the_nearest_but_none_of_the_present_update(bank_size, scale):
    loss_fn = BankedInfoNCE(bank_size, drift_compensation="none")
    seen = began = 0
    for step in range(200):
        n, limit = scale * (1 + step * 7 % 15), [bank_size, bank_size // 3, 0, bank_size // 2][step // 25 % 4]
        if step % 6 == 5 and loss_fn.bank is not None:
            loss_fn.end_update()
            loss_fn.bank.limit, began = limit, seen
        loss_fn(randn(n, D, seed=2 * step), randn(n, D, seed=2 * step + 1))
        seen, bank = seen + n, loss_fn.bank
        assert min(seen - began, bank_size - bank.block) <= bank.in_use <= min(seen, bank_size)
        oldest = max(min(bank.limit + bank.block / 2, bank_size), seen - began + bank.block)
        assert bank.in_use <= oldest
        assert int((bank.absent == 0).sum()) == bank.in_use
        assert loss_fn.last["bank_fill"] == bank.in_use


def test_shares_of_the_softmax_are_those_of_the_dense_softmax():
    n, d, steps = 4, 5, 10
    loss_fn = BankedInfoNCE(bank_size=4 * n * steps, temperature=0.7)
    stored: list[Tensor] = []
    for step in range(steps):  # two micro-batches an update
        queries, passages = randn(n, d, seed=2 * step), randn(n, d, seed=2 * step + 1)
        loss_fn(queries.clone().requires_grad_(), passages)
        stored.append(passages - loss_fn.passage_mean.mean)
        if step % 2 == 1 and step < steps - 1:
            loss_fn.end_update()
    columns = torch.cat([passages, *(entry + loss_fn.passage_mean.mean for entry in stored[:-1])])
    share = (queries @ columns.T / 0.7).softmax(1)
    share[torch.arange(n), torch.arange(n)] = 0
    record = loss_fn.drift_record()
    assert record["in_batch_mass"] == pytest.approx(float(share[:, :n].sum()) / n)
    assert record["bank_mass"] == pytest.approx(float(share[:, n:].sum()) / n)
    aged = n * (steps - 2)
    of_fresh = (share[:, :n].sum() + share[:, n + aged :].sum()) / (2 * n - 1)
    assert record["bank_mass_aged"] == pytest.approx(float(share[:, n : n + aged].sum() / aged / of_fresh))
