"""The running log-sums stay those of the dense block, over thousands of micro-steps of a wrapping bank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_reference import brute_force_mask, dense_loss
from torch import Tensor
from torch.nn.functional import normalize

from contaccum import BankedInfoNCE, bank_block
from contaccum.duplicates import PositivesTable
from contaccum.log_sums import RunningLogSums

D = 8
TOLD = [(q, p) for q in range(0, 40, 3) for p in range(q % 7, 40, 7)]  # pairs that a data set would tell of


def dense_of_bank(loss_fn: BankedInfoNCE, inputs: list[Tensor], ids: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The dense loss of a micro-batch against what the bank holds now, in ``dtype``."""
    n, h = inputs[0].shape[0], inputs[2].shape[1]
    unit = [normalize(x, dim=-1) if loss_fn.similarity == "cos" else x * 1 for x in inputs]
    entries = loss_fn.bank.entries()
    used = entries.usable[entries.positives]  # rows that have not retired
    shift = 0.0 if loss_fn.passage_mean is None else loss_fn.passage_mean.mean.to(dtype)
    rows = [unit[0], entries.queries.to(dtype)[used]]
    columns = [torch.cat([unit[1], unit[2].reshape(-1, D)])]
    aged = bool((loss_fn.bank.ages_in_updates()[entries.usable] > 0).any())
    if loss_fn.drift_compensation == "auto" and aged:
        for part in (rows[0], columns[0]):
            part.register_hook(lambda gradient: gradient - gradient.mean(0))
    columns += [entries.passages.to(dtype) + shift, entries.negatives.to(dtype).reshape(-1, D) + shift]
    positives = [*range(n), *(n + n * h + entries.positives[used]).tolist()]
    retired = torch.cat([~entries.usable, (~entries.usable).repeat_interleave(entries.negatives.shape[1])])
    masked = torch.cat([torch.zeros(n + n * h, dtype=torch.bool), retired]).expand(len(positives), -1)
    if ids:
        row_ids = ids[0].tolist() + entries.query_ids[entries.positives[used]].tolist()
        known = list(zip(ids[0].tolist(), ids[1].tolist(), strict=True))
        known += list(zip(entries.query_ids.tolist(), entries.passage_ids.tolist(), strict=True))
        known += TOLD if loss_fn.positives is not None else []
        column_ids = ids[1].tolist() + ids[2].reshape(-1).tolist()
        column_ids += entries.passage_ids.tolist() + entries.negative_ids.reshape(-1).tolist()
        masked = masked | brute_force_mask(row_ids, positives, column_ids, set(known))
    moved = None
    if loss_fn.query_frames is not None:
        frames = loss_fn.query_frames
        now = frames.origins[int(frames.moves) % len(frames.origins)]
        of_row = frames.of_row[: len(entries.queries)][used]
        moved = torch.cat([torch.zeros(n, D), now - frames.origins[of_row]]).to(dtype)
    return dense_loss(rows, columns, positives, n, loss_fn.temperature, "dot", masked=masked, moved=moved)


def relative(value: Tensor, tensors: list[Tensor], true_value: Tensor, true: list[Tensor]) -> list[float]:
    """Errors of a loss and of its gradient."""
    gradient, exact = (torch.cat([x.grad.flatten().double() for x in each]) for each in (tensors, true))
    loss_error = abs(value.item() - true_value.item()) / max(1.0, abs(true_value.item()))
    return [loss_error, ((gradient - exact).norm() / exact.norm()).item()]


def soak(
    steps: int,
    every: int,
    dtype: torch.dtype,
    size: float,
    with_ids: bool,
    limited: bool = False,
    told: bool = False,
    **settings: Any,
) -> list[list[float]]:
    """Errors of (loss, gradient) against float64, ours and those of the dense loss in ``dtype``, at every check."""
    n, h, m = 4, 1, 48
    generator = torch.Generator().manual_seed(2)
    loss_fn = BankedInfoNCE(bank_size=m, **settings)
    if told:
        loss_fn.know_positives(PositivesTable(*torch.tensor(TOLD).T))
    errors = []
    for step in range(steps):
        if limited and step and step % 37 == 0:  # some way up and down, entries of the present update staying
            loss_fn.bank.limit = [48, 20, 0, 33][step // 37 % 4]
            loss_fn.end_update()
        # The encoder drifts, and some texts come again and again.
        drift = size * 0.3 * torch.sin(torch.arange(D) + step / 200.0)
        shapes = ((n, D), (n, D), (n, h, D))
        inputs = [(size * torch.randn(*s, generator=generator, dtype=torch.float64) + drift).to(dtype) for s in shapes]
        ids = [torch.randint(40, s[:-1], generator=generator) for s in shapes] if with_ids else []
        leaves = [x.clone().requires_grad_() for x in inputs]
        check = step % every == every - 1
        if not check:
            loss_fn(*inputs, *ids)
            continue
        if loss_fn.passage_mean is not None:  # the dense loss needs the mean that this call will use
            before = loss_fn.passage_mean.snapshot()
            unit = normalize(inputs[1], dim=-1) if loss_fn.similarity == "cos" else inputs[1]
            loss_fn.passage_mean.observe(unit)
        exact, rough = ([x.to(t).clone().requires_grad_() for x in inputs] for t in (torch.float64, dtype))
        reference, dense = (dense_of_bank(loss_fn, tensors, ids, tensors[0].dtype) for tensors in (exact, rough))
        reference.backward()
        dense.backward()
        if loss_fn.passage_mean is not None:
            loss_fn.passage_mean.restore(before, unless=torch.tensor(False))
        loss = loss_fn(*leaves, *ids)
        loss.backward()

        errors.append([*relative(loss, leaves, reference, exact), *relative(dense, rough, reference, exact)])
    return errors


CASES = {
    "cosine 0.05": {"similarity": "cos", "temperature": 0.05, "size": 1.0},
    "cosine 0.01": {"similarity": "cos", "temperature": 0.01, "size": 1.0},
    "dot 1": {"similarity": "dot", "temperature": 1.0, "size": 1.0},
    "dot in the hundreds": {"similarity": "dot", "temperature": 1.0, "size": 6.0},
    "dot in the hundreds, 0.01": {"similarity": "dot", "temperature": 0.01, "size": 6.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("drift_compensation", ["mean", "none"])
@pytest.mark.parametrize("with_ids", [False, True], ids=["no ids", "ids"])
@pytest.mark.parametrize("case", CASES)
def test_errors_stay_at_rounding_over_thousands_of_micro_steps(
    case: str, with_ids: bool, drift_compensation: str
) -> None:
    settings = {**CASES[case], "drift_compensation": drift_compensation}
    errors = torch.tensor(soak(1500, 100, torch.float64, with_ids=with_ids, **settings))
    assert errors[:, :2].max() <= 1e-10
    # No growth: the last checks are no worse than the first, up to the noise of rounding.
    assert errors[-5:, :2].max() <= 20 * errors[:5, :2].max() + 1e-13


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "deferred"])
def test_pairs_told_beforehand_are_masked_in_batch_and_bank(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bank_block, "EAGER_CPU", eager)
    settings: dict[str, Any] = {"drift_compensation": "none", "temperature": 0.5}
    errors = torch.tensor(soak(300, 9, torch.float64, 1.0, True, told=True, **settings))
    assert errors[:, :2].max() <= 1e-10


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "deferred"])
@pytest.mark.parametrize("with_ids", [False, True], ids=["no ids", "ids"])
@pytest.mark.parametrize("drift_compensation", ["auto", "mean"])
@pytest.mark.parametrize("settings", [{"similarity": "cos", "temperature": 0.05}, {"query_bank_size": 20}])
def test_retired_entries_are_out_of_the_loss_to_the_last_digit(
    settings: dict[str, Any],
    drift_compensation: str,
    with_ids: bool,
    eager: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bank_block, "EAGER_CPU", eager)
    settings = {**settings, "drift_compensation": drift_compensation}
    errors = torch.tensor(soak(500, 9, torch.float64, 1.0, with_ids, limited=True, **settings))
    assert errors[:, :2].max() <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("with_ids", [False, True], ids=["no ids", "ids"])
@pytest.mark.parametrize("case", CASES)
def test_float32_is_as_good_as_the_dense_loss_in_float32(case: str, with_ids: bool) -> None:
    """1e-5, or where the scores alone are less exact than that, what the dense loss loses itself."""
    errors = torch.tensor(soak(1500, 100, torch.float32, with_ids=with_ids, **CASES[case]))
    loss, gradient, dense_loss_, dense_gradient = errors.max(0).values.tolist()
    assert loss <= 1e-5 + 3 * dense_loss_
    assert gradient <= 1e-5 + 3 * dense_gradient


def test_a_row_that_loses_most_of_its_mass_is_summed_afresh() -> None:
    sums = RunningLogSums(2)
    sums.set(slice(0, 2), torch.tensor([0.0, 0.0]))
    sums.add(torch.tensor([[40.0], [0.5]]))
    assert sums.worn(2).tolist() == [False, False]
    sums.remove(torch.tensor([[40.0], [0.5]]))  # row 0: exp(0) is left of exp(40): nothing of it survives
    assert sums.worn(2).tolist() == [True, False]
    assert sums.value(2)[1].item() == pytest.approx(0.0, abs=1e-12)


def test_scores_of_any_size_neither_overflow_nor_vanish() -> None:
    sums = RunningLogSums(1)
    sums.set(slice(0, 1), torch.tensor([-5e4]))
    for score in (-4e4, 0.0, 5e4):
        sums.add(torch.tensor([[score]]))
        assert sums.value(1).item() == score


@pytest.mark.parametrize("micro_batch", [4, 8])
def test_cost_grows_with_the_bank_and_not_with_its_square(micro_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: scores computed per micro-step once the bank is full and wrapping."""
    matmul, sizes = Tensor.__matmul__, []

    def counting(a: Tensor, b: Tensor) -> Tensor:
        result = matmul(a, b)
        sizes.append(result.numel())
        return result

    counts = {}
    for m in (256, 1024):
        loss_fn = BankedInfoNCE(bank_size=m, similarity="cos", temperature=0.05)
        for step in range(m // micro_batch + 50):
            if step == m // micro_batch:
                monkeypatch.setattr(Tensor, "__matmul__", counting)
            loss_fn(*batch_of(micro_batch, step))
        monkeypatch.undo()
        counts[m] = sum(sizes) / 50
        sizes.clear()
    assert 3 < counts[1024] / counts[256] < 4.5
    assert counts[1024] < 12 * micro_batch * 1024


def batch_of(n: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, D, generator=generator) for _ in range(2)]
