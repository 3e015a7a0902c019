"""BankedInfoNCE against the dense loss, in float64."""

import gc
import math
from typing import Any

import pytest
import torch
from dense_reference import History, errors
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from torch.utils._python_dispatch import TorchDispatchMode

from contaccum import BankedInfoNCE
from contaccum.bank.logits import PositivesTable
from contaccum.errors import ConfigError


def batch(n: int, d: int = 8, h: int = 0, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(n, d), (n, d)] + ([(n, h, d)] if h else [])
    return [torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes]


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


COS: dict[str, Any] = {"similarity": "cos", "temperature": 0.1}
IN_BATCH, HARD, EVERY = (
    {"hardness_mode": f"{which}_negatives", "hardness_strength": strength}
    for which, strength in (("in_batch", 9.0), ("hard", 5.0), ("all", 3.0))
)
BOTH = ("query_to_doc", "doc_to_query")
ALL = (*BOTH, "query_to_query", "doc_to_doc")
SETTINGS: dict[str, dict[str, Any]] = {
    "cos": {"similarity": "cos", "temperature": 0.05},
    "dot in the hundreds": {"temperature": 0.05},
    "normalised by all": {"normalize_by": "all"},
    "passages alone": {"query_bank_size": 0},
    "no masks, as published": {"mask_duplicates": False},
    "no banked hard negatives": {"bank_hard_negatives": False},
    "mean": {"drift_compensation": "mean"},
    "auto": {"drift_compensation": "auto", "similarity": "cos", "temperature": 0.1},
    "probed": {"drift_compensation": "auto", "similarity": "cos", "temperature": 0.1},
    "fresh": {"drift_compensation": "fresh"},
    "a third": {"drift_compensation": "auto", "similarity": "cos", "bank_weight": 1 / 3, "normalize_by": "all"},
    "counts as five": {"bank_weight": 5, "query_bank_size": 0},
    "counts as nine": {"bank_weight": 9, "temperature": 0.5},
    "in-batch negatives": {**COS, **IN_BATCH, "drift_compensation": "auto"},
    "as old as they are, probed": {**COS, "drift_compensation": "auto", "bank_weight": "auto", "normalize_by": "all"},
    "hard negatives": {**HARD, "bank_weight": 0.5},
    "hard negatives, probed": {**COS, **HARD, "drift_compensation": "auto", "directions": BOTH},
    "all negatives, passages alone": {**COS, **EVERY, "query_bank_size": 0, "drift_compensation": "mean"},
    "symmetric": {"directions": BOTH, "partition_mode": "per_direction", **COS, "drift_compensation": "auto"},
    "GTE": {"directions": ALL, **COS, **IN_BATCH, "bank_weight": 1 / 3, "drift_compensation": "auto"},
    "GTE, probed": {"directions": ALL, **COS, **EVERY, "bank_weight": "auto", "drift_compensation": "auto"},
}


@pytest.mark.parametrize("bank_size", [12, 128])
@pytest.mark.parametrize("named", ["no ids", "ids", "table"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_micro_step_equals_the_dense_loss_of_what_the_ring_holds(setting, named, bank_size):
    """Over wraps, masks, hard negatives, ragged micro-batches, some larger than the bank, retirement and drift.

    With ids and masks each row's twins in the bank are left out. A loss has enqueued before its backward: of a
    micro-batch larger than the bank, every row that it has seen is overwritten by then.
    """
    generator = torch.Generator().manual_seed(bank_size)
    loss_fn = BankedInfoNCE(bank_size, **{"drift_compensation": "none", **SETTINGS[setting]})
    history = History(loss_fn)
    if named == "table":
        history.table = {(q, p) for q in range(0, 30, 3) for p in range(q % 7, 30, 7)}
        loss_fn.positives = PositivesTable(*torch.tensor(list(history.table)).T)
    sizes = [4, 4, 3, 4, 1, 7, 4, 30, 4, 2, 4, 4, 13, 4, 4, 5] * 2
    worst = 0.0
    for step, n in enumerate(sizes):
        if step % 3 == 2:
            loss_fn.end_update()
        if "probed" in setting and step % 6 == 0:
            texts = torch.randn(4, 8, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
            apart = torch.linspace(0.99, 1.01, 4, dtype=torch.float64)[:, None] ** step
            loss_fn.observe_probe(apart * texts + 0.1 * step, apart * texts - 0.2 * step)
            for bank in loss_fn.banks.values():
                bank.limit = [bank_size, bank_size // 2, 0][step // 6 % 3]
        shapes = [(n, 8), (n, 8), (n, step % 3, 8)][: 2 + (step % 3 > 0)]
        tensors = [torch.randn(s, generator=generator, dtype=torch.float64) + 0.05 * step for s in shapes]
        ids = [] if named == "no ids" else [torch.randint(30, s[:-1], generator=generator) for s in shapes]
        ours, dense = leaves(tensors), leaves(tensors)
        expected = history.dense(dense, ids)
        loss = loss_fn(*ours, **named_ids(ids))
        loss.backward()
        expected.backward()
        worst = max(worst, *errors(loss, ours, expected, dense))
        history.add(tensors, ids)
        assert loss_fn.bank is None or loss_fn.bank.in_use <= bank_size
    assert worst <= 1e-12


def named_ids(ids: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(("query_ids", "passage_ids", "negative_ids"), ids, strict=False))


def test_eval_mode_or_no_gradients_give_the_same_loss_and_enqueue_nothing():
    loss_fn = BankedInfoNCE(bank_size=8, drift_compensation="none")
    loss_fn(*batch(3))
    before = {key: value.clone() for key, value in loss_fn.state_dict().items()}
    loss_fn.eval()
    losses = [loss_fn(*batch(3, seed=1)).item()]
    loss_fn.train()
    with torch.no_grad():
        losses.append(loss_fn(*batch(3, seed=1)).item())
    after = loss_fn.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert losses == [loss_fn(*batch(3, seed=1)).item()] * 2
    assert loss_fn.bank is not None and loss_fn.bank.fill == 6


@pytest.mark.parametrize("drift_compensation", ["mean", "none"])
@pytest.mark.parametrize("spoil", ["nan", "inf", "overflow"])
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
def test_a_micro_batch_that_is_not_finite_leaves_no_trace_but_empty_rows(first, spoil, drift_compensation):
    def run(with_spoiled: bool) -> tuple[BankedInfoNCE, list[Tensor]]:
        loss_fn = BankedInfoNCE(bank_size=64, normalize_by="all", drift_compensation=drift_compensation)
        results = []
        for step in range(8):
            if with_spoiled and step == (0 if first else 4):
                bad = batch(3, h=1, seed=99, dtype=torch.float32)
                bad[1][2, 3] = {"nan": math.nan, "inf": math.inf, "overflow": 3e38}[spoil]
                loss = loss_fn(*leaves(bad), torch.arange(3), torch.arange(3), torch.ones(3, 1, dtype=torch.int64))
                assert not torch.isfinite(loss) and loss_fn.last["enqueued"] == 0
            inputs = leaves(batch(3, h=1, seed=step, dtype=torch.float32))
            ids = [torch.arange(3) + step // 4, torch.arange(3) + step, torch.ones(3, 1, dtype=torch.int64)]
            loss = loss_fn(*inputs, *ids)
            loss.backward()
            results += [loss.detach(), *(x.grad for x in inputs)]
        return loss_fn, results

    (_, clean), (loss_fn, spoiled) = run(False), run(True)
    for a, b in zip(clean, spoiled, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    assert loss_fn.bank is not None
    assert int((loss_fn.bank.absent[:, 0] == 0).sum()) == 24 and loss_fn.bank.in_use == 27
    assert int(loss_fn.last["bank_rows"]) == 24


def test_a_bank_in_half_precision_takes_nothing_that_it_cannot_hold():
    loss_fn = BankedInfoNCE(bank_size=8, bank_dtype=torch.float16, drift_compensation="none")
    queries, passages = batch(2, dtype=torch.float32)
    assert torch.isfinite(loss_fn(queries, passages * 1e6))
    assert loss_fn.last["enqueued"] == 0
    assert torch.isfinite(loss_fn(queries, passages)) and loss_fn.last["enqueued"] == 2


class NoHostReads(TorchDispatchMode):
    """Refuses the operations that make a host wait for its device, and numbers that some devices do not have."""

    WAITING = ("_local_scalar_dense", "nonzero", "_unique", "masked_select", "is_nonzero", "equal", "isin")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert not name.startswith(self.WAITING), f"{name} would make the host wait"
        result = function(*args, **(kwargs or {}))
        assert not (isinstance(result, Tensor) and result.dtype == torch.float64), f"{name} made float64"
        return result


@pytest.mark.parametrize("named", ["no ids", "ids", "table"])
@pytest.mark.parametrize(
    "settings", [{}, {"normalize_by": "all", "drift_compensation": "fresh"}, {"false_negative_margin": 0.1}]
)
def test_a_micro_step_reads_nothing_on_the_host_and_needs_no_float64(settings, named):
    loss_fn = BankedInfoNCE(bank_size=100, similarity="cos", temperature=0.05, **settings)
    if named == "table":
        loss_fn.positives = PositivesTable(torch.arange(9), torch.arange(9))
    for step in range(30):
        inputs = leaves(batch(5, h=step % 2, seed=step, dtype=torch.float32))
        ids = [] if named == "no ids" else [torch.randint(20, x.shape[:-1]) for x in inputs]
        guide = [x.detach()[..., :5] for x in inputs] if "false_negative_margin" in settings else []
        with NoHostReads():
            loss_fn(*inputs, **named_ids(ids), guide=guide).backward()
            if step % 4 == 3:
                loss_fn.end_update()
    with pytest.raises(AssertionError, match="would make the host wait"), NoHostReads():
        torch.ones(1).item()


def test_float32_stays_exact_when_a_passage_close_to_all_queries_leaves_the_bank():
    m, d = 512, 32
    generator = torch.Generator().manual_seed(0)
    single, double = (BankedInfoNCE(m, drift_compensation="none") for _ in range(2))
    for step in range(2 * m // 8 + 30):
        queries, passages = (torch.randn(8, d, generator=generator) for _ in range(2))
        queries += 0.5
        if step == 5:
            passages[0] = 1.5 + 0.1 * passages[0]
        loss = single(*leaves([queries, passages])).item()
        assert loss == pytest.approx(double(queries.double(), passages.double()).item(), rel=1e-4)


@pytest.mark.parametrize("more", [{}, {"guide_margin": 0.1}], ids=["plain", "guide"])
@pytest.mark.parametrize("bank_size", [7, 70])
def test_state_dict_continues_bit_for_bit(bank_size, more):
    def run(loss_fn: BankedInfoNCE, steps: range) -> list[Tensor]:
        found = []
        for step in steps:
            inputs = leaves(batch(3, h=step % 2, seed=step))
            generator = torch.Generator().manual_seed(step)
            ids = named_ids([torch.randint(4, x.shape[:-1], generator=generator) for x in inputs])
            loss = loss_fn(*inputs, **ids, guide=[x.detach()[..., :5] for x in inputs] if more else [])
            loss.backward()
            found += [loss.detach(), *(x.grad for x in inputs)]
            if step % 4 == 3:
                loss_fn.end_update()
                loss_fn.bank.limit = 2 * bank_size // 3
        return found

    straight, resumed = (BankedInfoNCE(bank_size, similarity="cos", temperature=0.1, **more) for _ in range(2))
    run(straight, range(28))
    resumed.load_state_dict({key: value.clone() for key, value in straight.state_dict().items()})
    about = [(x.bank.first, x.bank.age, x.bank.limit) for x in (straight, resumed)]
    assert about[0] == about[1]
    found, again = ([*run(x, range(28, 44)), *x.state_dict().values()] for x in (straight, resumed))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_a_state_of_other_settings_is_refused():
    loss_fn = BankedInfoNCE(bank_size=4)
    loss_fn(*batch(3))
    for settings in ({"bank_size": 5}, {"query_bank_size": 0}, {"drift_compensation": "none"}):
        with pytest.raises(ConfigError, match="another bank_size, query_bank_size, drift_compensation"):
            BankedInfoNCE(**{"bank_size": 4, **settings}).load_state_dict(loss_fn.state_dict())


def test_half_precision_embeddings_under_autocast_are_scored_in_float32():
    inputs = leaves([x.bfloat16() for x in batch(6, dtype=torch.float32)])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = BankedInfoNCE(bank_size=4)(*inputs)
    loss.backward()
    assert (loss.dtype, inputs[0].grad.dtype) == (torch.float32, torch.bfloat16)
    queries, passages = (x.detach().float() for x in inputs)
    assert loss.item() == pytest.approx(cross_entropy(queries @ passages.T, torch.arange(6)).item(), rel=1e-6)


@pytest.mark.parametrize(
    ("bank_dtype", "tolerance"),
    [(torch.float64, 1e-6), (torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)],
)
def test_any_storage_dtype_scores_in_float32(bank_dtype, tolerance):
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


def test_shapes_and_settings_that_cannot_work_are_refused():
    loss_fn = BankedInfoNCE(bank_size=4)
    loss_fn(*batch(3, d=8))
    with pytest.raises(ValueError, match="size 9"):
        loss_fn(*batch(3, d=9))
    queries, passages, negatives = batch(3, h=2)
    with pytest.raises(ValueError, match="same shape"):
        loss_fn(queries, passages[:2])
    with pytest.raises(ValueError, match="negatives must be"):
        loss_fn(queries, passages, negatives[:, 0])
    for ids in (torch.zeros(2, dtype=torch.int64), torch.zeros(3)):
        with pytest.raises(ValueError, match=r"query_ids must be int64 \(3,\)"):
            loss_fn(queries, passages, query_ids=ids)
    for message, settings in {
        "bank_size": {"bank_size": -1},
        "query_bank_size": {"bank_size": 4, "query_bank_size": 2},
        "temperature": {"temperature": 0.0},
        "similarity": {"similarity": "euclidean"},
        "normalize_by": {"normalize_by": "rows"},
        "drift_compensation": {"drift_compensation": "median"},
        "center_gradients": {"center_gradients": "queriess"},
        "false_negative_margin": {"false_negative_margin": -0.1},
        "guide_margin_strategy": {"guide_margin_strategy": "percentage"},
        "hardness_mode": {"hardness_mode": "hard"},
        "hardness_strength must be above 0": {"hardness_mode": "hard_negatives"},
        "add query_to_doc": {"directions": ["doc_to_query"]},
        "partition_mode must be": {"partition_mode": "separate"},
        "per_direction with query_to_query": {"directions": ALL, "partition_mode": "per_direction"},
        "learn_temperature with temperature=0.001": {"learn_temperature": True, "temperature": 0.001},
    }.items():
        with pytest.raises(ConfigError, match=message):
            BankedInfoNCE(**settings)


def test_bank_loss_is_the_mean_over_the_rows_in_use():
    loss_fn = BankedInfoNCE(bank_size=8, drift_compensation="fresh")
    for seed in range(3):
        loss_fn(*batch(3, seed=seed))
    loss_fn.end_update()  # eight rows are filled, and none of them is in use
    loss_fn(*batch(2, seed=3))
    loss = loss_fn(*batch(4, seed=4))
    total = 4 * loss.item() - 4 * loss_fn.last["local_loss"].item()
    assert loss_fn.last["bank_rows"] == 2
    assert loss_fn.last["bank_loss"].item() == pytest.approx(total / 2, rel=1e-12)


def test_bank_memory_is_flat_once_it_is_full():
    loss_fn = BankedInfoNCE(bank_size=32, similarity="cos", temperature=0.05)

    def live() -> tuple[int, int]:
        gc.collect()
        tensors = [x for x in gc.get_objects() if isinstance(x, Tensor)]
        return len(tensors), sum(x.numel() * x.element_size() for x in tensors)

    counts = []
    for seed in range(120):
        loss_fn(*leaves(batch(4, h=1, seed=seed))).backward()
        if seed % 30 == 29:
            counts.append(live())
    assert counts[1] == counts[2] == counts[3]


@pytest.mark.parametrize("micro_batch", [4, 8])
def test_cost_grows_with_the_bank_and_not_with_its_square(micro_batch, monkeypatch):
    """Counted, not timed: scores computed per micro-step once the bank is full and wrapping: two products of n m."""
    addmm, sizes = torch.addmm, []

    def counting(*args: Any, out: Tensor) -> Tensor:
        sizes.append(out.numel())
        return addmm(*args, out=out)

    monkeypatch.setattr(torch, "addmm", counting)
    for m in (256, 1024):
        loss_fn = BankedInfoNCE(bank_size=m)
        loss_fn(*batch(m))
        sizes.clear()
        for step in range(20):
            loss_fn(*batch(micro_batch, seed=step))
        assert sum(sizes) / 20 == 2 * micro_batch * m


def test_small_gradients_of_float16_embeddings_survive_under_a_gradient_scaler():
    """Unscaled they are below the smallest float16, 6e-8; the scaler's factor must multiply them in float32."""
    scale = 2.0**16
    embeddings = [10 * normalize(x, dim=-1).half() for x in batch(32, d=1024, dtype=torch.float32)]
    exact = leaves([x.double() for x in embeddings])
    cosines = normalize(exact[0], dim=-1) @ normalize(exact[1], dim=-1).T
    cross_entropy(cosines / 5000.0, torch.arange(32)).backward()
    assert max(x.grad.abs().max() for x in exact) < 3e-7
    inputs = leaves(embeddings)
    (BankedInfoNCE(16, similarity="cos", temperature=5000.0)(*inputs) * scale).backward()
    for x, reference in zip(inputs, exact, strict=True):
        assert x.grad.dtype == torch.float16
        error = (x.grad.double() / scale - reference.grad).norm() / reference.grad.norm()
        assert error < 0.02  # float16's own


@pytest.mark.parametrize("bank_size", [0, 64])
def test_a_compiled_loss_runs_and_equals_the_loss(bank_size):
    plain, to_compile = BankedInfoNCE(bank_size), BankedInfoNCE(bank_size)
    compiled = torch.compile(to_compile, backend="eager")
    for seed in range(3):
        inputs, others = leaves(batch(4, seed=seed)), leaves(batch(4, seed=seed))
        loss, expected = compiled(*inputs), plain(*others)
        loss.backward()
        expected.backward()
        assert torch.equal(loss, expected)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, others, strict=True))


@pytest.mark.parametrize("equal", [0, 1], ids=["first ids", "second ids"])
def test_of_two_ids_of_a_text_either_masks_a_duplicate(equal):
    """The same queries and passages come twice; the ids of one kind are equal, those of the other are not."""
    inputs = batch(4)
    same, first_time, second_time = torch.arange(4), torch.arange(10, 14), torch.arange(20, 24)
    loss_fn = BankedInfoNCE(64, drift_compensation="none")
    unmasked = BankedInfoNCE(64, drift_compensation="none")
    for other in (first_time, second_time):
        ids = torch.stack([same, other] if equal == 0 else [other, same], dim=1)
        loss = loss_fn(*leaves(inputs), query_ids=ids, passage_ids=ids + 100)
        unmasked_loss = unmasked(*leaves(inputs))
    # A dense matrix of both micro-batches, in which each row leaves out the copy of its own positive.
    rows = torch.cat([inputs[0], inputs[0]])
    scores = rows @ torch.cat([inputs[1], inputs[1]]).T
    twins = torch.eye(4, dtype=torch.bool).repeat(2, 2) & ~torch.eye(8, dtype=torch.bool)
    targets = torch.arange(8)
    expected = cross_entropy(scores.masked_fill(twins, -torch.inf), targets, reduction="sum") / 4
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert unmasked_loss.item() == pytest.approx(cross_entropy(scores, targets, reduction="sum").item() / 4, abs=1e-12)
    assert unmasked_loss > loss
