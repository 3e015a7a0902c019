"""BankedInfoNCE against the dense loss, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from dense_reference import brute_force_mask, dense_loss
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from contaccum import BankedInfoNCE
from contaccum.errors import ConfigError

SIMILARITIES = ["dot", "cos"]


def batch(n: int, d: int = 8, h: int = 0, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(n, d), (n, d)] + ([(n, h, d)] if h else [])
    return [torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes]


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


def gradients_apart(left: list[Tensor], right: list[Tensor]) -> float:
    return max((a.grad - b.grad).abs().max().item() for a, b in zip(left, right, strict=True))


def accumulate(loss_fn: BankedInfoNCE, tensors: list[Tensor], n: int) -> list[Tensor]:
    """Gradients of the second pass over the micro-batches: by then the bank holds exactly the rest of the batch."""
    inputs = leaves(tensors)
    starts = range(0, len(tensors[0]), n)
    for round_ in range(2):
        for start in starts:
            loss = loss_fn(*(x[start : start + n] for x in inputs))
            if round_ == 1:
                (loss / len(starts)).backward()
    return inputs


def full_batch(tensors: list[Tensor], temperature: float, similarity: str) -> list[Tensor]:
    inputs = leaves(tensors)
    n, d = inputs[0].shape
    columns = torch.cat([inputs[1], *(x.reshape(-1, d) for x in inputs[2:])])
    rows = inputs[0]
    if similarity == "cos":
        rows, columns = normalize(rows, dim=-1), normalize(columns, dim=-1)
    cross_entropy(rows @ columns.T / temperature, torch.arange(n)).backward()
    return inputs


@pytest.mark.parametrize("hard_negatives", [0, 2])
@pytest.mark.parametrize("micro_batches", [1, 2, 16])
@pytest.mark.parametrize("temperature", [1.0, 0.05])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_accumulated_gradient_equals_full_batch_when_nothing_drifts(
    similarity: str, temperature: float, micro_batches: int, hard_negatives: int
) -> None:
    n = 4
    tensors = batch(n * micro_batches, h=hard_negatives)
    loss_fn = BankedInfoNCE(
        bank_size=n * (micro_batches - 1), temperature=temperature, similarity=similarity, drift_compensation="none"
    )
    accumulated = accumulate(loss_fn, tensors, n)
    assert gradients_apart(accumulated, full_batch(tensors, temperature, similarity)) <= 1e-12


def test_passage_bank_alone_is_exact_for_queries_and_wrong_for_passages() -> None:
    n, k = 4, 3
    tensors = batch(n * k)
    loss_fn = BankedInfoNCE(bank_size=n * (k - 1), query_bank_size=0, drift_compensation="none")
    queries, passages = accumulate(loss_fn, tensors, n)
    full_queries, full_passages = full_batch(tensors, 1.0, "dot")
    assert (queries.grad - full_queries.grad).abs().max() <= 1e-12
    # What is missing: the repulsion of the other micro-batches' queries, sum_i p(i, j) q_i over rows i of others.
    probabilities = (full_queries.detach() @ full_passages.detach().T).softmax(1)
    others = torch.ones(n * k, n * k, dtype=torch.bool)
    for start in range(0, n * k, n):
        others[start : start + n, start : start + n] = False
    missing = (probabilities * others).T @ full_queries.detach() / (n * k)
    assert missing.abs().max() > 1e-3
    assert (passages.grad + missing - full_passages.grad).abs().max() <= 1e-12


@pytest.mark.parametrize("bank_size", [0, 3, 7])
def test_all_normalisation_is_n_over_n_plus_m_of_local(bank_size: int) -> None:
    n = 4
    results = []
    for normalize_by in ("local", "all"):
        loss_fn = BankedInfoNCE(bank_size=bank_size, normalize_by=normalize_by, drift_compensation="none")
        loss_fn(*batch(5, seed=1))
        inputs = leaves(batch(n))
        loss = loss_fn(*inputs)
        loss.backward()
        results.append((loss, inputs))
    (local, local_inputs), (all_, all_inputs) = results
    factor = n / (n + min(5, bank_size))
    assert all_.item() == pytest.approx(local.item() * factor, rel=1e-14)
    for a, b in zip(all_inputs, local_inputs, strict=True):
        assert torch.allclose(a.grad, b.grad * factor, rtol=1e-12, atol=1e-15)


def bank_after(loss_fn: BankedInfoNCE, count: int, n: int, h: int) -> tuple[Tensor, Tensor, Tensor]:
    """Feed ``count`` micro-batches; returns what a bank of loss_fn.bank_size must now hold, oldest first."""
    batches = [batch(n, h=h, seed=100 + i) for i in range(count)]
    for tensors in batches:
        loss_fn(*tensors)
    m = loss_fn.bank_size
    queries, passages = (torch.cat([b[i] for b in batches])[-m:] for i in (0, 1))
    negatives = torch.cat([b[2] for b in batches])[-m:] if h else torch.empty(len(passages), 0, 8, dtype=torch.float64)
    return queries, passages, negatives


@pytest.mark.parametrize("hard_negatives", [0, 2])
@pytest.mark.parametrize("count", [1, 4, 9], ids=["half full", "full", "wrapped"])
@pytest.mark.parametrize("normalize_by", ["local", "all"])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_block_form_equals_dense_loss_and_its_gradient(
    similarity: str, normalize_by: str, count: int, hard_negatives: int
) -> None:
    n, m, temperature, d = 3, 8, 0.3, 8
    loss_fn = BankedInfoNCE(
        bank_size=m,
        temperature=temperature,
        similarity=similarity,
        normalize_by=normalize_by,
        drift_compensation="none",
    )
    bank_queries, bank_passages, bank_negatives = bank_after(loss_fn, count, n, hard_negatives)
    tensors = batch(n, h=hard_negatives)
    ours, dense = leaves(tensors), leaves(tensors)
    loss = loss_fn(*ours)
    loss.backward()
    expected = dense_loss(
        rows=[dense[0], bank_queries],
        columns=[dense[1], bank_passages, *(x.reshape(-1, d) for x in dense[2:]), bank_negatives.reshape(-1, d)],
        positives=list(range(n + len(bank_queries))),
        local_rows=n,
        temperature=temperature,
        similarity=similarity,
        normalize_by=normalize_by,
    )
    expected.backward()
    assert abs(loss.item() - expected.item()) <= 1e-12
    assert gradients_apart(ours, dense) <= 1e-12


@pytest.mark.parametrize("query_bank_size", [1, 3, 5])
def test_smaller_query_bank_holds_the_newest_queries_with_their_passages(query_bank_size: int) -> None:
    n, m = 3, 7
    loss_fn = BankedInfoNCE(bank_size=m, query_bank_size=query_bank_size, drift_compensation="none")
    bank_queries, bank_passages, _ = bank_after(loss_fn, 6, n, 0)
    tensors = batch(n)
    ours, dense = leaves(tensors), leaves(tensors)
    loss = loss_fn(*ours)
    loss.backward()
    offset = n + len(bank_passages) - query_bank_size
    expected = dense_loss(
        [dense[0], bank_queries[-query_bank_size:]],
        [dense[1], bank_passages],
        [*range(n), *range(offset, offset + query_bank_size)],
        n,
        1.0,
        "dot",
    )
    expected.backward()
    assert abs(loss.item() - expected.item()) <= 1e-12
    assert gradients_apart(ours, dense) <= 1e-12


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_masks_equal_a_brute_force_loop(similarity: str) -> None:
    n, m, h, d = 4, 10, 2, 8
    generator = torch.Generator().manual_seed(5)
    loss_fn = BankedInfoNCE(bank_size=m, similarity=similarity, temperature=0.5, drift_compensation="none")
    history: list[tuple[list[Tensor], list[Tensor]]] = []
    masked_anything = 0
    for step in range(12):
        tensors = batch(n, h=h, seed=step)
        # Few distinct ids, of both signs: several positives of a query, shared passages, positives as negatives.
        ids = [torch.randint(-4, 4, shape, generator=generator) for shape in ((n,), (n,), (n, h))]
        bank = (
            [[torch.cat([old[part][i] for old in history])[-m:] for i in range(3)] for part in (0, 1)]
            if history
            else None
        )
        ours, dense = leaves(tensors), leaves(tensors)
        loss = loss_fn(*ours, *ids)
        loss.backward()

        rows, columns = [dense[0]], [dense[1], dense[2].reshape(-1, d)]
        row_ids, pair_passages = ids[0].tolist(), ids[1].tolist()
        column_ids = ids[1].tolist() + ids[2].reshape(-1).tolist()
        positives = list(range(n))
        if bank is not None:
            (queries, passages, negatives), (query_ids, passage_ids, negative_ids) = bank
            rows.append(queries)
            positives += [len(column_ids) + i for i in range(len(queries))]
            columns += [passages, negatives.reshape(-1, d)]
            row_ids += query_ids.tolist()
            pair_passages += passage_ids.tolist()
            column_ids += passage_ids.tolist() + negative_ids.reshape(-1).tolist()
        mask = brute_force_mask(row_ids, positives, column_ids, list(zip(row_ids, pair_passages, strict=True)))
        masked_anything += int(mask.sum())
        expected = dense_loss(rows, columns, positives, n, 0.5, similarity, masked=mask)
        expected.backward()
        assert abs(loss.item() - expected.item()) <= 1e-12
        assert gradients_apart(ours, dense) <= 1e-12
        history.append((tensors, ids))
    assert masked_anything > 100


def test_a_perfect_row_reaches_zero_only_with_the_mask() -> None:
    queries = torch.eye(4, dtype=torch.float64) * 100
    ids = torch.arange(4)
    floors = {}
    for mask_duplicates in (True, False):
        loss_fn = BankedInfoNCE(bank_size=4, mask_duplicates=mask_duplicates, drift_compensation="none")
        for _ in range(2):
            loss_fn(queries, queries, query_ids=ids, passage_ids=ids)
        floors[mask_duplicates] = loss_fn.last["local_loss"].item()
    assert floors[True] < 1e-12
    assert floors[False] == pytest.approx(math.log(2))  # its twin in the bank is a "negative"


def test_without_ids_nothing_is_masked() -> None:
    queries = torch.eye(4, dtype=torch.float64) * 100
    loss_fn = BankedInfoNCE(bank_size=4, drift_compensation="none")
    for _ in range(2):
        loss_fn(queries, queries)
    assert loss_fn.last["local_loss"].item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_bank_size_zero_is_plain_info_nce(similarity: str) -> None:
    tensors = batch(6, h=1)
    inputs = leaves(tensors)
    loss_fn = BankedInfoNCE(bank_size=0, similarity=similarity, temperature=0.1)
    for _ in range(3):
        loss_fn(*inputs)
    loss_fn(*inputs).backward()
    assert gradients_apart(inputs, full_batch(tensors, 0.1, similarity)) <= 1e-13
    assert loss_fn.bank is None


def test_bank_larger_than_the_data_uses_what_it_has() -> None:
    loss_fn = BankedInfoNCE(bank_size=1000, drift_compensation="none")
    for step in range(3):
        loss_fn(*batch(2, seed=step))
    assert loss_fn.last["bank_rows"] == 4  # before the third call's own pairs
    assert loss_fn.last["bank_fill"] == 6
    assert loss_fn.last["columns"] == 2 + 4


@pytest.mark.parametrize(
    "sizes", [[4, 4, 1], [2, 5, 3], [9, 1, 9]], ids=["ragged last", "changing", "larger than bank"]
)
def test_micro_batches_of_any_size_equal_the_dense_loss(sizes: list[int]) -> None:
    m = 6
    loss_fn = BankedInfoNCE(bank_size=m, drift_compensation="none")
    seen: list[list[Tensor]] = []
    for step, n in enumerate(sizes):
        tensors = batch(n, seed=step)
        bank = [torch.cat([old[i] for old in seen])[-m:] for i in (0, 1)] if seen else [torch.empty(0, 8).double()] * 2
        ours, dense = leaves(tensors), leaves(tensors)
        loss = loss_fn(*ours)
        loss.backward()  # after the bank was overwritten in place
        rows = n + len(bank[0])
        expected = dense_loss([dense[0], bank[0]], [dense[1], bank[1]], list(range(rows)), n, 1.0, "dot")
        expected.backward()
        assert abs(loss.item() - expected.item()) <= 1e-12
        assert gradients_apart(ours, dense) <= 1e-12
        seen.append(tensors)


def test_enqueueing_before_backward_leaves_the_gradient_alone() -> None:
    n = 4
    tensors = batch(n)
    loss_fn = BankedInfoNCE(bank_size=n, drift_compensation="none")
    loss_fn(*batch(n, seed=1))
    at_once, later = leaves(tensors), leaves(tensors)
    state = {key: value.clone() for key, value in loss_fn.state_dict().items()}
    loss_fn(*at_once).backward()
    loss_fn.load_state_dict(state)
    loss = loss_fn(*later)
    for step in range(5):  # overwrites every row that the loss has seen
        loss_fn(*batch(n, seed=10 + step))
    loss.backward()
    assert gradients_apart(at_once, later) == 0.0


def test_nothing_is_enqueued_in_eval_mode_or_without_gradients() -> None:
    loss_fn = BankedInfoNCE(bank_size=8)
    loss_fn(*batch(3))
    before = {key: value.clone() for key, value in loss_fn.state_dict().items()}
    loss_fn.eval()
    loss_fn(*batch(3, seed=1))
    loss_fn.train()
    with torch.no_grad():
        loss_fn(*batch(3, seed=2))
    after = loss_fn.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    loss_fn(*batch(3, seed=3))
    assert loss_fn.bank is not None and loss_fn.bank.fill == 6


def test_eval_mode_gives_the_loss_of_training_mode() -> None:
    loss_fn = BankedInfoNCE(bank_size=8, drift_compensation="none")
    loss_fn(*batch(3))
    loss_fn.eval()
    evaluated = loss_fn(*batch(3, seed=1))
    loss_fn.train()
    assert evaluated.item() == loss_fn(*batch(3, seed=1)).item()


def test_nan_is_refused_and_the_bank_untouched() -> None:
    loss_fn = BankedInfoNCE(bank_size=8)
    loss_fn(*batch(3))
    before = {key: value.clone() for key, value in loss_fn.state_dict().items()}
    queries, passages = batch(3)
    queries[1, 2] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        loss_fn(queries, passages)
    assert all(torch.equal(before[key], value) for key, value in loss_fn.state_dict().items())


@pytest.mark.parametrize("drift_compensation", ["mean", "none"])
def test_a_loss_that_is_not_finite_is_not_enqueued(drift_compensation: str) -> None:
    loss_fn = BankedInfoNCE(bank_size=8, drift_compensation=drift_compensation)
    loss_fn(*batch(3, dtype=torch.float32))
    before = {key: value.clone() for key, value in loss_fn.state_dict().items()}
    queries, passages = batch(3, dtype=torch.float32)
    loss = loss_fn(queries * 1e30, passages * 1e30)
    assert not torch.isfinite(loss)
    assert loss_fn.last["enqueued"] == 0
    assert all(torch.equal(before[key], value) for key, value in loss_fn.state_dict().items())
    assert torch.isfinite(loss_fn(queries, passages))


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_state_dict_continues_bit_for_bit(similarity: str) -> None:
    def make() -> BankedInfoNCE:
        return BankedInfoNCE(bank_size=7, similarity=similarity, temperature=0.1)

    def step(loss_fn: BankedInfoNCE, number: int) -> list[Tensor]:
        inputs = leaves(batch(3, h=1, seed=number))
        ids = [
            torch.randint(4, shape, generator=torch.Generator().manual_seed(number)) for shape in ((3,), (3,), (3, 1))
        ]
        loss = loss_fn(*inputs, *ids)
        loss.backward()
        return [loss.detach(), *(x.grad for x in inputs)]

    straight, broken_off = make(), make()
    for number in range(5):
        step(straight, number)
        step(broken_off, number)
    resumed = make()
    resumed.load_state_dict(broken_off.state_dict())
    for number in range(5, 10):
        for a, b in zip(step(straight, number), step(resumed, number), strict=True):
            assert torch.equal(a, b)
    for a, b in zip(straight.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_a_state_of_other_settings_is_refused() -> None:
    loss_fn = BankedInfoNCE(bank_size=4)
    loss_fn(*batch(3))
    with pytest.raises(ConfigError, match="bank_size=5"):
        BankedInfoNCE(bank_size=5).load_state_dict(loss_fn.state_dict())
    with pytest.raises(ConfigError, match="drift_compensation"):
        BankedInfoNCE(bank_size=4, drift_compensation="none").load_state_dict(loss_fn.state_dict())


@pytest.mark.parametrize(
    ("bank_dtype", "tolerance"),
    [(torch.float64, 1e-6), (torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)],
)
def test_any_storage_dtype_scores_in_float32(bank_dtype: torch.dtype, tolerance: float) -> None:
    losses = []
    for dtype in (bank_dtype, None):
        loss_fn = BankedInfoNCE(bank_size=16, similarity="cos", temperature=0.1, bank_dtype=dtype)
        for step in range(4):
            inputs = leaves(batch(6, seed=step, dtype=torch.float32))
            loss = loss_fn(*inputs)
        loss.backward()
        assert loss_fn.bank.passages.dtype == (dtype or torch.float32)
        assert loss.dtype == inputs[0].grad.dtype == torch.float32
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)


def test_half_precision_embeddings_under_autocast_are_scored_in_float32() -> None:
    tensors = [x.bfloat16() for x in batch(6, dtype=torch.float32)]
    plain, autocast = leaves(tensors), leaves(tensors)
    expected = BankedInfoNCE(bank_size=4)(*plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = BankedInfoNCE(bank_size=4)(*autocast)
    assert loss.dtype == torch.float32
    assert loss.item() == expected.item()
    loss.backward()
    assert autocast[0].grad.dtype == torch.bfloat16
    reference = leaves([x.float() for x in tensors])
    assert loss.item() == pytest.approx(cross_entropy(reference[0] @ reference[1].T, torch.arange(6)).item(), rel=1e-6)


def test_hard_negatives_may_come_and_go_between_micro_batches() -> None:
    loss_fn = BankedInfoNCE(bank_size=12, drift_compensation="none")
    bank_queries, bank_passages, bank_negatives = [], [], []
    for step, h in enumerate([0, 2, 1, 0, 3]):
        tensors = batch(3, h=h, seed=step)
        ours, dense = leaves(tensors), leaves(tensors)
        loss = loss_fn(*ours)
        loss.backward()
        rows = [dense[0], *bank_queries]
        columns = [dense[1], *bank_passages, *(x.reshape(-1, 8) for x in dense[2:]), *bank_negatives]
        expected = dense_loss(rows, columns, list(range(sum(map(len, rows)))), 3, 1.0, "dot")
        expected.backward()
        assert abs(loss.item() - expected.item()) <= 1e-12
        assert gradients_apart(ours, dense) <= 1e-12
        bank_queries.append(tensors[0])
        bank_passages.append(tensors[1])
        bank_negatives += [x.reshape(-1, 8) for x in tensors[2:]]


def test_hard_negatives_stay_out_of_the_bank_when_asked() -> None:
    loss_fn = BankedInfoNCE(bank_size=8, bank_hard_negatives=False)
    for step in range(3):
        loss_fn(*batch(3, h=2, seed=step))
    assert loss_fn.last["columns"] == 3 + 3 * 2 + 6
    assert loss_fn.bank.negatives.shape == (8, 0, 8)


def test_mean_compensation_undoes_a_shift_of_the_towers() -> None:
    """Every new embedding moves by one vector: compensated entries move along, uncompensated ones stay behind."""
    generator = torch.Generator().manual_seed(3)
    centre = torch.randn(16, 8, generator=generator, dtype=torch.float64)
    shift = 3 * torch.randn(2, 8, generator=generator, dtype=torch.float64)

    def local_loss(drift_compensation: str, moved: bool) -> float:
        loss_fn = BankedInfoNCE(bank_size=256, temperature=1.0, drift_compensation=drift_compensation)
        noise = torch.Generator().manual_seed(4)
        for step in range(400):
            rows = torch.randint(16, (8,), generator=noise)
            queries, passages = (
                centre[rows] + 0.1 * torch.randn(8, 8, generator=noise, dtype=torch.float64) for _ in "qp"
            )
            if moved and step >= 16:
                passages = passages + shift[1]
            loss_fn(queries, passages)
            if step == 46:  # the shift is 31 micro-steps old; the bank still holds entries from before
                return loss_fn.last["local_loss"].item()
        raise AssertionError

    still = local_loss("none", moved=False)
    assert abs(local_loss("mean", moved=True) - still) < 0.25 * abs(local_loss("none", moved=True) - still)


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_compensated_loss_equals_the_dense_loss_on_shifted_passages(similarity: str) -> None:
    n, m = 3, 8
    loss_fn = BankedInfoNCE(bank_size=m, similarity=similarity, temperature=0.3)
    empty = torch.empty(0, 8, dtype=torch.float64)
    bank_queries, bank_passages = empty, empty
    for step in range(6):
        tensors = [x + 0.2 * step for x in batch(n, seed=step)]
        ours, dense = leaves(tensors), leaves(tensors)
        loss = loss_fn(*ours)
        loss.backward()
        mean = loss_fn.passage_mean.mean.clone()
        unit = [normalize(x, dim=-1) if similarity == "cos" else x for x in dense]
        rows, columns = [unit[0], bank_queries[-m:]], [unit[1], bank_passages[-m:] + mean]
        count = sum(map(len, rows))
        expected = dense_loss(rows, columns, list(range(count)), n, 0.3, "dot")
        expected.backward()
        assert abs(loss.item() - expected.item()) <= 1e-12
        assert gradients_apart(ours, dense) <= 1e-12
        bank_queries = torch.cat([bank_queries, unit[0].detach()])
        bank_passages = torch.cat([bank_passages, unit[1].detach() - mean])


def test_shapes_and_settings_that_cannot_work_are_refused() -> None:
    loss_fn = BankedInfoNCE(bank_size=4)
    loss_fn(*batch(3, d=8))
    with pytest.raises(ValueError, match="size 9"):
        loss_fn(*batch(3, d=9))
    queries, passages, negatives = batch(3, h=2)
    with pytest.raises(ValueError, match="same shape"):
        loss_fn(queries, passages[:2])
    with pytest.raises(ValueError, match="negatives must be"):
        loss_fn(queries, passages, negatives[:, 0])
    with pytest.raises(ValueError, match="query_ids must have shape"):
        loss_fn(queries, passages, query_ids=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="int64"):
        loss_fn(queries, passages, query_ids=torch.zeros(3))
    for settings in (
        {"bank_size": -1},
        {"bank_size": 4, "query_bank_size": 5},
        {"temperature": 0.0},
        {"similarity": "euclidean"},
        {"normalize_by": "rows"},
        {"drift_compensation": "median"},
    ):
        with pytest.raises(ConfigError):
            BankedInfoNCE(**settings)


def test_gradcheck() -> None:
    loss_fn = BankedInfoNCE(bank_size=5, similarity="cos", temperature=0.2)
    loss_fn(*batch(4, h=1, seed=1))
    loss_fn.eval()  # the same bank at every call
    assert torch.autograd.gradcheck(loss_fn, tuple(leaves(batch(3, h=1))))


@pytest.mark.parametrize("query_bank_size", [None, 6])
def test_pairs_written_straight_into_the_bank_count_from_the_next_micro_batch(query_bank_size: int | None) -> None:
    loss_fn = BankedInfoNCE(bank_size=12, query_bank_size=query_bank_size, drift_compensation="none")
    loss_fn(*batch(3, seed=1))
    assert loss_fn.bank is not None
    for seed in (2, 3, 4):
        loss_fn.bank.enqueue(*batch(4, seed=seed))
    queries, passages = leaves(batch(3, seed=5))
    loss = loss_fn(queries, passages)
    loss.backward()
    banked = [torch.cat(x) for x in zip(*(batch(4, seed=seed) for seed in (2, 3, 4)), strict=True)]
    q, p = leaves(batch(3, seed=5))
    kept = query_bank_size or 12
    positives = [0, 1, 2, *range(3 + 12 - kept, 3 + 12)]
    expected = dense_loss([q, banked[0][-kept:]], [p, banked[1]], positives, 3, 1.0, "dot")
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert gradients_apart([queries, passages], [q, p]) <= 1e-12
