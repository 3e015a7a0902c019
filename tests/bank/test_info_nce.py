"""BankedInfoNCE against a dense float64 reference, and its guarantees for a training loop."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from dense_reference import DenseReference, compute_relative_errors
from micro_batches import call_loss, draw_embeddings, draw_ids, make_leaves
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import cos_sim, dot_score
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from contaccum import BankedInfoNCE
from contaccum.bank.ids import NO_ID, PositivesTable
from contaccum.errors import ConfigError


@pytest.mark.parametrize("drift_compensation", ["none", "auto"])
@pytest.mark.parametrize("similarity", ["cos", "dot"])
@pytest.mark.parametrize(
    ("rows", "n", "h", "scale"),
    [(4, 4, 2, 1.0), (12, 3, 2, 20.0), (64, 4, 0, 20.0), (200, 40, 1, 1.0)],
)
def test_accumulated_gradient_equals_full_batch_when_nothing_drifts(
    rows, n, h, scale, similarity, drift_compensation, monkeypatch
):
    """The bank holds the rest of the batch; with ``auto``, both towers' means are far from zero."""
    # Larger products are computed in parts.
    monkeypatch.setattr("contaccum.bank.logits.ROWS_PER_PRODUCT", 64)
    batch = draw_embeddings(rows, h, seed=rows)
    batch[1] = batch[1] + batch[0]  # passages lie near their queries
    loss_fn = BankedInfoNCE(
        bank_size=rows - n,
        temperature=1 / scale,
        similarity=similarity,
        drift_compensation=drift_compensation,
    )
    probe = draw_embeddings(4)
    loss_fn.observe_probe(probe[0], probe[1])
    loss_fn.observe_probe(probe[0] + 0.7, probe[1] - 0.4)
    ours = make_leaves(batch)
    loss_sum = 0.0
    num_steps = rows // n
    for step in range(2 * num_steps):
        start = step % num_steps * n
        loss = loss_fn(*(x[start : start + n] for x in ours))
        if step >= num_steps:  # the first pass fills the bank
            (loss * n / rows).backward()
            loss_sum += loss_fn.last["local_loss"].item() * n / rows

    full_batch = make_leaves(batch)
    columns = [full_batch[0], full_batch[1]]
    if h > 0:
        columns.extend(full_batch[2].unbind(1))
    similarity_function = cos_sim if similarity == "cos" else dot_score
    published = MultipleNegativesRankingLoss(None, scale, similarity_function)
    expected = published.compute_loss_from_embeddings(columns, None)
    expected.backward()
    assert loss_sum == pytest.approx(expected.item(), abs=1e-12, rel=1e-12)
    _, gradient_error = compute_relative_errors(loss, ours, expected, full_batch)
    assert gradient_error <= 1e-12


@pytest.mark.parametrize("bank_size", [0, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_solved_pairs_are_exact(dtype, bank_size):
    """The loss is below 1e-6: softmax(positive) - 1 would be nothing but rounding error."""
    queries, noise = draw_embeddings(8 + bank_size, d=64)
    passages = queries + 0.02 * noise
    batch = [normalize(x, dim=1).to(dtype) for x in (queries, passages)]
    loss_fn = BankedInfoNCE(bank_size, temperature=0.04, drift_compensation="none")
    ours = make_leaves(batch)
    micro_batches = list(zip(*(x.split(8) for x in ours), strict=True))
    for micro_batch in micro_batches:  # the first pass fills the bank
        loss_fn(*micro_batch)
    for micro_batch in micro_batches:
        (loss_fn(*micro_batch) / len(micro_batches)).backward()

    full_batch = make_leaves([x.double() for x in batch])
    logits = full_batch[0] @ full_batch[1].T / 0.04
    expected = cross_entropy(logits, torch.arange(len(logits)))
    expected.backward()
    assert 1e-9 < expected < 1e-6
    for leaf, expected_leaf in zip(ours, full_batch, strict=True):
        error = (leaf.grad - expected_leaf.grad).norm() / expected_leaf.grad.norm()
        assert error < {torch.float32: 1e-5, torch.bfloat16: 4e-3}[dtype]


STATIC = {"drift_compensation": "none"}
SETTINGS = {
    "cos": {"similarity": "cos", "temperature": 0.05, **STATIC},
    "large dot products": {"temperature": 0.05, **STATIC},
    "normalized by all": {"normalize_by": "all", **STATIC},
    "passage bank alone": {"query_bank_size": 0, **STATIC},
    "no masks": {"mask_duplicates": False, **STATIC},
    "no banked hard negatives": {"bank_hard_negatives": False, **STATIC},
    "auto, dot product": {},
    "auto": {"drift_compensation": "auto", "similarity": "cos", "temperature": 0.1},
}


@pytest.mark.parametrize(
    ("bank_size", "ids", "has_probe"),
    [(12, "table", True), (70, "ids", False), (128, "none", True)],
)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_micro_step_equals_the_dense_loss(settings, bank_size, ids, has_probe):
    """The ring buffer wraps; micro-batches differ in size, and some are not finite."""
    generator = torch.Generator().manual_seed(bank_size)
    loss_fn = BankedInfoNCE(bank_size, **settings)
    known_positives: list[tuple[int, int]] = []
    if ids == "table":
        for query_id in range(0, 30, 3):
            for passage_id in range(query_id % 7, 30, 7):
                known_positives.append((query_id, passage_id))
        table = torch.tensor(known_positives)
        loss_fn.positives = PositivesTable(table[:, 0], table[:, 1])
    reference = DenseReference(bank_size, positives=known_positives, **settings)
    probe = draw_embeddings(4, seed=9)
    largest_error = 0.0
    sizes = [4, 4, 3, 4, 1, 7, 4, 30, 4, 2, 5, 4, 140, 4, 3, 1]
    for step, n in enumerate(sizes):
        if step % 3 == 2:
            loss_fn.end_update()
            reference.end_update()
        if has_probe and step % 4 == 1:
            spread = torch.linspace(0.99, 1.01, 4, dtype=torch.float64)[:, None] ** step
            queries = spread * probe[0] + 0.1 * step
            passages = spread * probe[1] - 0.2 * step
            loss_fn.observe_probe(queries, passages)
            reference.observe_probe(queries, passages)
        is_finite = step not in (0, 5, 13)
        batch = [x + 0.05 * step for x in draw_embeddings(n, step % 3, seed=generator)]
        if not is_finite:
            batch[step % 2][0, 0] = math.inf if step == 5 else math.nan
        batch_ids = [] if ids == "none" else draw_ids(batch, 30, generator)
        if batch_ids and step % 5 == 4:
            batch_ids[0][0] = NO_ID
            batch_ids[1][-1] = NO_ID
        ours = make_leaves(batch)
        dense = make_leaves(batch)
        loss = call_loss(loss_fn, ours, batch_ids)
        expected = reference.micro_step(dense, batch_ids)
        assert bool(loss.isfinite()) == bool(expected.isfinite()) == is_finite
        assert loss_fn.last["bank_fill"] == len(reference.history) - reference.oldest_in_use
        if is_finite:
            assert loss_fn.last["masked"].item() == pytest.approx(reference.masked_share, abs=1e-6)
            loss.backward()
            expected.backward()
            errors = compute_relative_errors(loss, ours, expected, dense)
            largest_error = max(largest_error, *errors)
    assert reference.oldest_in_use > 0
    assert largest_error <= 1e-12


def test_eval_mode_or_no_gradients_give_the_same_loss_and_enqueue_nothing():
    loss_fn = BankedInfoNCE(bank_size=8, drift_compensation="none")
    loss_fn(*draw_embeddings(3))
    before = {key: value.clone() for key, value in loss_fn.state_dict().items()}
    batch = draw_embeddings(3, seed=1)
    loss_fn.eval()
    loss_in_eval_mode = loss_fn(*batch).item()
    loss_fn.train()
    with torch.no_grad():
        loss_without_gradients = loss_fn(*batch).item()
    for key, value in loss_fn.state_dict().items():
        assert torch.equal(value, before[key])
    loss_in_training = loss_fn(*batch).item()
    assert loss_in_eval_mode == loss_without_gradients == loss_in_training
    assert loss_fn.bank.total_enqueued == 6


def test_an_infinite_positive_does_not_pass_for_a_solved_row():
    loss_fn = BankedInfoNCE(bank_size=4, drift_compensation="none")
    loss = loss_fn(*make_leaves([torch.ones(1, 2), torch.full((1, 2), math.inf)]))
    assert not torch.isfinite(loss)
    assert loss_fn.last["enqueued"] == 0


class HostReadDetector(TorchDispatchMode):
    """Mode that refuses float64, and operations that make the host wait for the device."""

    WAITING = (
        "_local_scalar_dense",
        "nonzero",
        "_unique",
        "masked_select",
        "is_nonzero",
        "equal",
        "isin",
    )

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        assert not name.startswith(self.WAITING), f"{name} would make the host wait"
        if name.startswith(("index", "_index_put")):
            # An index of booleans is a nonzero inside the operation.
            indices = [x for x in args[1] if x is not None] if isinstance(args[1], list) else []
            has_booleans = any(x.dtype == torch.bool for x in indices)
            assert not has_booleans, f"{name} with booleans would make the host wait"
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            assert result.dtype != torch.float64, f"{name} made float64"
        return result


class HostCopyDetector(TorchFunctionMode):
    """Mode that refuses copies between the host and a device, for which the host waits on a GPU.

    `HostReadDetector` cannot see them: on a CPU, they start no operation.
    """

    READING = (
        Tensor.cpu,
        Tensor.numpy,
        Tensor.tolist,
        Tensor.item,
        Tensor.__bool__,
        Tensor.__int__,
        Tensor.__float__,
    )

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert function not in (torch.tensor, torch.as_tensor), "a copy from the host"
        assert function not in self.READING, "a copy to the host"
        if function is Tensor.__setitem__:
            _, index, value = args
            indices = index if isinstance(index, tuple) else (index,)
            if any(isinstance(i, Tensor) for i in indices):
                assert isinstance(value, Tensor), "a number from the host, assigned by index"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("ids", ["none", "ids", "table"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"normalize_by": "all", "drift_compensation": "none", "query_bank_size": 0},
        {"pairs_per_update": 20},
    ],
    ids=["default", "passage bank alone", "centred over updates"],
)
def test_a_micro_step_copies_nothing_from_or_to_the_host_and_needs_no_float64(settings, ids):
    loss_fn = BankedInfoNCE(bank_size=70, similarity="cos", temperature=0.05, **settings)
    if ids == "table":
        loss_fn.positives = PositivesTable(torch.arange(9), torch.arange(9))
    generator = torch.Generator().manual_seed(0)
    for step in range(17):
        inputs = make_leaves(draw_embeddings(5, h=step % 2, seed=step, dtype=torch.float32))
        batch_ids = [] if ids == "none" else draw_ids(inputs, 20, generator)
        with HostReadDetector(), HostCopyDetector():
            call_loss(loss_fn, inputs, batch_ids).backward()
            if step % 4 == 3:
                loss_fn.end_update()


def test_the_detectors_of_the_test_above_refuse_what_waits():
    numbers = torch.ones(2)
    for read in (numbers[0].item, lambda: numbers[numbers > 0], lambda: numbers.nonzero()):
        with pytest.raises(AssertionError, match="would make the host wait"), HostReadDetector():
            read()
    for copy in (numbers.cpu, numbers.numpy, numbers.tolist, lambda: int(numbers[0])):
        with pytest.raises(AssertionError, match="a copy to the host"), HostCopyDetector():
            copy()
    with pytest.raises(AssertionError, match="assigned by index"), HostCopyDetector():
        numbers[torch.arange(1)] = 0.0


def test_float32_stays_exact_when_a_dominant_passage_leaves_the_bank():
    bank_size = 256
    generator = torch.Generator().manual_seed(0)
    single = BankedInfoNCE(bank_size, drift_compensation="none")
    double = BankedInfoNCE(bank_size, drift_compensation="none")
    for step in range(2 * bank_size // 8 + 30):
        queries, passages = draw_embeddings(8, d=32, seed=generator, dtype=torch.float32)
        queries = queries + 0.5
        if step == 5:
            passages[0] = 1.5 + 0.1 * passages[0]
        loss = single(*make_leaves([queries, passages])).item()
        exact_loss = double(queries.double(), passages.double()).item()
        assert loss == pytest.approx(exact_loss, rel=1e-4)


def train_with_probe(loss_fn: BankedInfoNCE, steps: range) -> list[Tensor]:
    """Return losses and gradients; updates of four micro-steps end with an optimizer step."""
    weight = torch.nn.Parameter(torch.eye(8, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    probe = draw_embeddings(4, seed=99)
    results = []
    for step in steps:
        if step % 8 == 0:
            loss_fn.observe_probe(probe[0] + 0.1 * step, probe[1] * (1 + 0.005 * step))
        generator = torch.Generator().manual_seed(step)
        inputs = make_leaves(draw_embeddings(3, h=step % 2, seed=generator))
        ids = draw_ids(inputs, 4, generator)
        loss = call_loss(loss_fn, [inputs[0] @ weight, *inputs[1:]], ids)
        loss.backward()
        results.append(loss.detach())
        results.extend(x.grad for x in inputs)
        if step % 4 == 3:
            weight.grad.zero_()  # a resumed run has the same weights
            optimizer.step()
    return results


@pytest.mark.parametrize("bank_size", [7, 70])
def test_a_loaded_state_continues_bit_for_bit(bank_size):
    settings = {"similarity": "cos", "temperature": 0.1}
    uninterrupted = BankedInfoNCE(bank_size, **settings)
    resumed = BankedInfoNCE(bank_size, **settings)
    train_with_probe(uninterrupted, range(28))
    state = {key: value.clone() for key, value in uninterrupted.state_dict().items()}
    resumed.load_state_dict(state)
    expected = train_with_probe(uninterrupted, range(28, 44))
    results = train_with_probe(resumed, range(28, 44))
    for result, expected_result in zip(results, expected, strict=True):
        assert torch.equal(result, expected_result)
    expected_state = uninterrupted.state_dict()
    resumed_state = resumed.state_dict()
    assert resumed_state.keys() == expected_state.keys()
    for key, value in expected_state.items():
        assert torch.equal(resumed_state[key], value), key


@pytest.mark.parametrize(
    "settings",
    [
        {"bank_size": 5},
        {"bank_size": 66},  # with as many slots as a bank of 65
        {"bank_size": 65, "query_bank_size": 0},
        {"bank_size": 65, "drift_compensation": "none"},
        {"bank_size": 65, "temperature": 0.05},
    ],
)
def test_a_state_of_other_settings_is_refused(settings):
    loss_fn = BankedInfoNCE(bank_size=65)
    loss_fn(*draw_embeddings(3))
    other = BankedInfoNCE(**settings)
    message = "another bank_size, query_bank_size, temperature or drift_compensation"
    with pytest.raises(ConfigError, match=message):
        other.load_state_dict(loss_fn.state_dict())


def test_evaluation_in_inference_mode_may_come_before_training():
    loss_fn = BankedInfoNCE(bank_size=8)
    probe = draw_embeddings(4, seed=9)
    with torch.inference_mode():
        loss_fn.eval()
        loss_fn(*draw_embeddings(3))
        loss_fn.observe_probe(probe[0], probe[1])
    loss_fn.train()
    expected = BankedInfoNCE(bank_size=8)
    expected.observe_probe(probe[0], probe[1])
    for step in range(4):
        losses = []
        for tested in (loss_fn, expected):
            inputs = make_leaves(draw_embeddings(3, seed=step))
            loss = tested(*inputs)
            loss.backward()
            tested.end_update()
            losses.append(loss.item())
            if step == 1:
                # More hard negatives than before, in an evaluation.
                with torch.inference_mode():
                    tested.eval()
                    tested(*draw_embeddings(3, h=2))
                    tested.observe_probe(probe[0] + 0.1, probe[1])
                    tested.train()
        assert losses[0] == losses[1]
    assert loss_fn.bank.in_use == 8 - 8 % loss_fn.bank.block_size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_embeddings_under_autocast_are_scored_in_float32(dtype):
    inputs = make_leaves([x.to(dtype) for x in draw_embeddings(6, dtype=torch.float32)])
    loss_fn = BankedInfoNCE(bank_size=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_fn(*inputs)
    loss.backward()
    assert loss.dtype == torch.float32
    assert inputs[0].grad.dtype == dtype
    assert loss_fn.bank.documents.dtype == torch.float32
    queries = inputs[0].detach().float()
    passages = inputs[1].detach().float()
    expected = cross_entropy(queries @ passages.T, torch.arange(6))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_small_gradients_of_float16_embeddings_survive_under_a_gradient_scaler():
    """Before scaling, they are below the smallest float16 number, 6e-8."""
    scale = 2.0**16
    batch = draw_embeddings(32, d=1024, dtype=torch.float32)
    embeddings = [10 * normalize(x, dim=-1).half() for x in batch]
    exact = make_leaves([x.double() for x in embeddings])
    cosines = normalize(exact[0], dim=-1) @ normalize(exact[1], dim=-1).T
    cross_entropy(cosines / 5000.0, torch.arange(32)).backward()
    assert max(x.grad.abs().max() for x in exact) < 3e-7
    inputs = make_leaves(embeddings)
    loss = BankedInfoNCE(16, similarity="cos", temperature=5000.0)(*inputs)
    (loss * scale).backward()
    for x, exact_x in zip(inputs, exact, strict=True):
        assert x.grad.dtype == torch.float16
        error = (x.grad.double() / scale - exact_x.grad).norm() / exact_x.grad.norm()
        assert error < 0.02  # float16 resolves no more


def test_a_compiled_loss_equals_the_loss():
    loss_fn = BankedInfoNCE(64)
    compiled = torch.compile(BankedInfoNCE(64), backend="eager")
    for seed in range(3):
        inputs = make_leaves(draw_embeddings(4, seed=seed))
        compiled_inputs = make_leaves(inputs)
        loss = loss_fn(*inputs)
        compiled_loss = compiled(*compiled_inputs)
        loss.backward()
        compiled_loss.backward()
        assert torch.equal(loss, compiled_loss)
        for x, compiled_x in zip(inputs, compiled_inputs, strict=True):
            assert torch.equal(x.grad, compiled_x.grad)


def test_inputs_that_do_not_agree_are_refused():
    queries, passages, negatives = draw_embeddings(3, h=2)
    loss_fn = BankedInfoNCE(bank_size=4)
    loss_fn(queries, passages)
    cases: list[tuple[str, list[Tensor], dict[str, Any]]] = [
        ("size 9", draw_embeddings(3, d=9), {}),
        ("same shape", [queries, passages[:2]], {}),
        ("negatives", [queries, passages, negatives[:, 0]], {}),
        ("ids of queries", [queries, passages], {"query_ids": torch.zeros(1, dtype=torch.int64)}),
        ("ids of queries", [queries, passages], {"query_ids": torch.zeros(3)}),
    ]
    for message, inputs, settings in cases:
        with pytest.raises(ValueError, match=message):
            loss_fn(*inputs, **settings)
    with pytest.raises(ValueError, match="one pair"):
        loss_fn.observe_probe(queries[:1], passages[:1])


def test_memory_is_flat_once_the_bank_is_full():
    loss_fn = BankedInfoNCE(bank_size=32, similarity="cos", temperature=0.05)

    def count_tensors() -> tuple[int, int]:
        gc.collect()
        tensors = [x for x in gc.get_objects() if isinstance(x, Tensor)]
        return len(tensors), sum(x.numel() * x.element_size() for x in tensors)

    counts = []
    for seed in range(60):
        loss_fn(*make_leaves(draw_embeddings(4, h=1, seed=seed))).backward()
        if seed % 20 == 19:
            counts.append(count_tensors())
    assert counts[0] == counts[1] == counts[2]


class ProductCounter(TorchDispatchMode):
    """Counter of multiplications in matrix products, and of the largest tensor's size."""

    def __init__(self) -> None:
        super().__init__()
        self.num_multiplications = 0
        self.largest_tensor = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.largest_tensor = max(self.largest_tensor, result.numel())
            if function.overloadpacket.__name__ in ("mm", "addmm", "bmm"):
                self.num_multiplications += result.numel() * args[-2].shape[-1]
        return result


@pytest.mark.parametrize("n", [4, 8])
def test_cost_grows_with_the_bank_and_not_with_its_square(n):
    """Counted, not timed, once the bank is full: no score of a bank x bank block is computed."""
    counts = []
    for bank_size in (128, 512):
        loss_fn = BankedInfoNCE(bank_size)
        loss_fn(*draw_embeddings(bank_size))
        with ProductCounter() as counter:
            for step in range(10):
                loss_fn(*make_leaves(draw_embeddings(n, seed=step)))
        # In forward n m d each for local x bank and bank x local; as much again for the gradient.
        # The rest is in_batch, and the drift of runs of banked queries.
        assert counter.num_multiplications / 10 < 6 * n * bank_size * 8
        assert counter.largest_tensor <= 32 * bank_size  # the table of log-sums
        counts.append(counter.num_multiplications)
    assert counts[1] < 4.1 * counts[0]
