"""Drift: running means and probes, and the entries that the loss moves or retires."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from micro_batches import make_leaves, make_loss_without_centring
from torch import Tensor
from torch.nn.functional import cross_entropy

from contaccum import BankedInfoNCE
from contaccum.bank.diagnostics import measure_drift
from contaccum.bank.drift import NUM_INTERVALS, DriftProbe, RunningMean

D = 6


def randn(*shape: int, seed: int) -> Tensor:
    """Draw standard normal numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compute_spread(texts: Tensor) -> Tensor:
    """Return the root mean squared distance of texts (S, d) from their mean."""
    return (texts - texts.mean(0)).square().sum(1).mean().sqrt()


def test_a_shift_of_all_passages_does_not_change_the_gradient():
    """Entries of older encoders give the full batch's gradient; a probe measures the shift."""
    n = 32
    num_encoders = 4
    queries = randn(n * num_encoders, D, seed=0)
    passages = randn(n * num_encoders, D, seed=1)
    probe_queries = randn(8, D, seed=2)
    probe_passages = randn(8, D, seed=3)
    loss_fn = make_loss_without_centring(n * (num_encoders - 1), temperature=0.5)
    shift = torch.zeros(D, dtype=torch.float64)
    for encoder in range(num_encoders):
        if encoder > 0:  # an update: the passage tower moves as a whole
            loss_fn.end_update()
            shift = shift + 3 * randn(D, seed=10 + encoder)
        loss_fn.observe_probe(probe_queries, probe_passages + shift)
        part = slice(encoder * n, encoder * n + n)
        local = make_leaves([queries[part], passages[part] + shift])
        loss = loss_fn(*local)
    loss.backward()
    full_batch = make_leaves([queries, passages + shift])
    logits = full_batch[0] @ full_batch[1].T / 0.5
    (cross_entropy(logits, torch.arange(n * num_encoders), reduction="sum") / n).backward()
    for x, full_x in zip(local, full_batch, strict=True):
        assert (x.grad - full_x.grad[-n:]).abs().max() < 1e-12
    assert loss_fn.last["bank_age"] == 2  # the first encoder's entries are overwritten


def test_a_running_mean_of_single_embeddings_does_not_jump():
    """Otherwise every banked passage would be moved onto the latest one."""
    mean = RunningMean(D, dtype=torch.float64)
    texts = randn(256, D, seed=0)
    for text in texts:
        mean.store(*mean.compute_next(text[None]), torch.tensor(True))
    assert (mean.mean - texts.mean(0)).norm() < 0.3
    assert mean.variance.item() == pytest.approx(D, rel=0.15)


def test_a_probe_separates_the_shift_from_the_residual():
    probe = DriftProbe((8, D), 1024, torch.float64)
    queries = randn(8, D, seed=0)
    passages = randn(8, D, seed=1)
    step = torch.full((D,), 0.5, dtype=torch.float64)
    noise = randn(8, D, seed=2) * 0.1
    for update in range(6):
        present = passages + update * step
        expected_shift = step if update > 0 else torch.zeros(D, dtype=torch.float64)
        if update == 5:
            present = present + noise
            expected_shift = step + noise.mean(0)
        shift = probe.observe(queries, present, update, 64 * update)
        assert shift[0].abs().max() < 1e-12
        assert (shift[1] - expected_shift).abs().max() < 1e-12
    record = measure_drift(probe, bank_age=2)
    spread = compute_spread(present)
    assert record["drift_age"] == 2
    assert record["drift_cosine_query"] == pytest.approx(1.0)
    assert record["drift_cosine_passage"] < 0.99
    expected_shift_length = (2 * step + noise.mean(0)).norm() / spread
    assert record["drift_shift_passage"] == pytest.approx(expected_shift_length.item())
    expected_residual = compute_spread(noise) / spread
    assert record["drift_residual_passage"] == pytest.approx(expected_residual.item())
    assert record["drift_residual_query"] == pytest.approx(0.0, abs=1e-9)


def test_probes_cover_the_lifetime_of_an_entry_and_include_the_latest():
    bank_size = 4000 * NUM_INTERVALS
    probe = DriftProbe((2, D), bank_size, torch.float64)
    pairs_between = 1000
    assert probe.spacing > 3 * pairs_between
    for i in range(1000):
        position = torch.full((2, D), float(i), dtype=torch.float64)
        shift = probe.observe(position, -position, i, i * pairs_between)
        expected_shift = 1.0 if i > 0 else 0.0
        assert (shift[0] == expected_shift).all()
        assert (shift[1] == -expected_shift).all()
        gaps = [later - earlier for earlier, later in pairwise(probe.pairs)]
        assert probe.pairs[-1] == i * pairs_between
        for gap in gaps[:-1]:
            assert probe.spacing <= gap <= probe.spacing + pairs_between
        positions = probe.embeddings[: len(probe.pairs), 0, 0, 0].tolist()
        assert positions == [pairs / pairs_between for pairs in probe.pairs]
        assert probe.pairs[0] == 0 or probe.pairs[-1] - probe.pairs[0] >= bank_size
        if i == 499:
            loaded = DriftProbe((2, D), bank_size, torch.float64)
            loaded.load_state_dict(probe.state_dict())
            probe = loaded


def test_the_age_limit_is_the_age_at_which_the_residual_reaches_the_bound():
    """Texts move apart at a constant rate, so the residual grows linearly with age."""
    passages = randn(8, D, seed=1)
    movement = 1e-4 * randn(8, D, seed=2)
    probe = DriftProbe((8, D), 2000, torch.float64)
    for i in range(21):
        present = passages + i * movement + i
        probe.observe(present, present, i, 100 * i)
    residual_per_pair = float(compute_spread(movement) / compute_spread(present) / 100)
    residuals = probe.compute_residuals()
    ages = torch.arange(2000, 0, -100)
    assert torch.allclose(residuals[:, 0], residual_per_pair * ages.double())
    for age in (30.0, 777.0, 1990.0):
        limit = probe.compute_age_limit(residuals[:, 1], bound=residual_per_pair * age)
        assert limit == pytest.approx(age)
    assert probe.compute_age_limit(residuals[:, 1], bound=residual_per_pair * 2001) == float("inf")


def test_auto_retires_entries_only_while_their_residual_is_too_large():
    n = 32
    probe_queries = randn(8, D, seed=1)
    probe_passages = probe_queries
    loss_fn = BankedInfoNCE(bank_size=1024)
    in_use = []
    for update in range(60):
        loss_fn.observe_probe(probe_queries, probe_passages)
        for i in range(4):
            loss_fn(randn(n, D, seed=2 * i), randn(n, D, seed=2 * i + 1))
            if update > 0:  # pairs of the present update never retire
                assert loss_fn.bank.in_use >= n * (i + 1)
        in_use.append(loss_fn.bank.in_use)
        loss_fn.end_update()
        # The tower moves as a whole, then every text moves by itself, then all settle.
        if update < 20:
            probe_passages = probe_passages + 1.0
        elif update < 40:
            probe_passages = probe_passages + randn(8, D, seed=100 + update)
    assert in_use[:8] == [128, 256, 384, 512, 640, 768, 896, 1024]
    assert in_use[19] == 1024
    assert in_use[39] == 128
    assert in_use[-1] == 1024


def test_a_probe_that_is_not_finite_is_ignored():
    losses = []
    for is_finite in (True, False):
        loss_fn = BankedInfoNCE(bank_size=64)
        texts = randn(8, D, seed=1)
        loss_fn.observe_probe(texts, texts)
        loss_fn(randn(32, D, seed=2), randn(32, D, seed=3))
        if not is_finite:
            broken = texts.clone()
            broken[3, 2] = torch.inf
            loss_fn.observe_probe(texts, broken)
        loss_fn.observe_probe(texts, texts + 0.1)
        losses.append(loss_fn(randn(32, D, seed=4), randn(32, D, seed=5)).item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("bank_size", "scale"), [(100, 1), (640, 6)])
def test_the_age_limit_retires_whole_blocks_but_none_of_the_current_update(bank_size, scale):
    loss_fn = BankedInfoNCE(bank_size, drift_compensation="none")
    limits = [bank_size, bank_size // 3, 0, bank_size // 2]
    num_pairs = 0
    update_start = 0
    for step in range(120):
        n = scale * (1 + step * 7 % 15)
        if step > 0 and step % 6 == 5:
            loss_fn.end_update()
            loss_fn.compensation.age_limit = limits[step // 15 % 4]
            update_start = num_pairs
        loss_fn(randn(n, D, seed=2 * step), randn(n, D, seed=2 * step + 1))
        num_pairs += n
        bank = loss_fn.bank
        pairs_of_update = num_pairs - update_start
        fewest = min(pairs_of_update, bank_size - bank.block_size)
        age_limit = min(loss_fn.compensation.age_limit + bank.block_size / 2, bank_size)
        most = max(age_limit, pairs_of_update + bank.block_size)
        assert fewest <= bank.in_use <= min(num_pairs, bank_size, most)
        assert int(bank.valid.sum()) == bank.in_use
        assert loss_fn.last["bank_fill"] == bank.in_use


@pytest.mark.parametrize("bank_size", [160, 20])
def test_softmax_masses_equal_those_of_the_dense_softmax(bank_size):
    """The smaller bank has replaced its oldest entries."""
    n = 4
    num_steps = 10
    loss_fn = BankedInfoNCE(bank_size, temperature=0.7)
    stored = []  # relative to the mean of their tower
    for step in range(num_steps):
        queries = randn(n, 5, seed=2 * step)
        passages = randn(n, 5, seed=2 * step + 1)
        loss_fn(queries.clone().requires_grad_(), passages)
        passage_mean = loss_fn.compensation.passage_mean.mean
        stored.append(passages - passage_mean)
        if step % 2 == 1 and step < num_steps - 1:  # two micro-batches an update
            loss_fn.end_update()
    num_banked_steps = min(num_steps - 1, bank_size // n)
    banked = [entry + passage_mean for entry in stored[-1 - num_banked_steps : -1]]
    columns = torch.cat([passages, *banked])
    logits = queries @ columns.T / 0.7
    shares = logits.softmax(1)
    shares[:, :n].fill_diagonal_(0)
    num_aged = n * (num_banked_steps - 1)
    in_batch = shares[:, :n].sum()
    aged = shares[:, n : n + num_aged].sum()
    fresh = shares[:, n + num_aged :].sum()
    mean_fresh = (in_batch + fresh) / (2 * n - 1)
    record = {key: float(value) for key, value in loss_fn.last.items()}
    assert record["in_batch_mass"] == pytest.approx(float(in_batch / n))
    assert record["bank_mass"] == pytest.approx(float((aged + fresh) / n))
    assert record["bank_mass_aged"] == pytest.approx(float(aged / num_aged / mean_fresh))


def test_embedding_spread_is_that_of_the_passages_before_centring():
    loss_fn = BankedInfoNCE(bank_size=64)
    for step in range(3):
        passages = randn(8, D, seed=2 * step) + 10
        loss_fn(randn(8, D, seed=2 * step + 1), passages)
    distances = (passages - passages.mean(0)).square().sum(1)
    expected = distances.mean() / passages.square().sum(1).mean()
    assert float(loss_fn.last["embedding_spread"]) == pytest.approx(float(expected))
