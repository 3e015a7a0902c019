"""What an accelerator runs, run on a CPU: nothing is read on the host, and the numbers are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from contaccum import BankedInfoNCE, bank_block

D = 8


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bank_block, "EAGER_CPU", False)


def micro_batch(seed: int, n: int = 4, h: int = 1) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((n, D), (n, D), (n, h, D))
    inputs = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return inputs, [torch.randint(60, shape[:-1], generator=generator) for shape in shapes]


def run(loss_fn: BankedInfoNCE, batches: list[Any], with_ids: bool) -> list[Tensor]:
    results = []
    for inputs, ids in batches:
        leaves = [x.clone().requires_grad_() for x in inputs]
        loss = loss_fn(*leaves, *(ids if with_ids else []))
        loss.backward()
        results += [loss.detach(), *(x.grad for x in leaves)]
    return results


@pytest.mark.parametrize("with_ids", [False, True], ids=["no ids", "ids"])
@pytest.mark.parametrize("settings", [{"similarity": "cos", "temperature": 0.05}, {"normalize_by": "all"}])
def test_deferred_checks_change_no_number(
    settings: dict[str, Any], with_ids: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [micro_batch(seed) for seed in range(60)]
    eager = run(BankedInfoNCE(bank_size=48, **settings), batches, with_ids)
    monkeypatch.setattr(bank_block, "EAGER_CPU", False)
    deferred = run(BankedInfoNCE(bank_size=48, **settings), batches, with_ids)
    assert max((a - b).abs().max().item() for a, b in zip(eager, deferred, strict=True)) < 1e-10


class NoHostReads(TorchDispatchMode):
    """Refuses the operations that make a host wait for its device."""

    WAITING = ("_local_scalar_dense", "nonzero", "_unique", "masked_select", "is_nonzero", "equal", "isin")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert not name.startswith(self.WAITING), f"{name} would make the host wait"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_ids", [False, True], ids=["no ids", "ids"])
@pytest.mark.parametrize("normalize_by", ["local", "all"])
def test_a_micro_step_reads_nothing_on_the_host(with_ids: bool, normalize_by: str, deferred: None) -> None:
    loss_fn = BankedInfoNCE(bank_size=24, similarity="cos", temperature=0.05, normalize_by=normalize_by)
    for seed in range(20):
        inputs, ids = micro_batch(seed)
        leaves = [x.clone().requires_grad_() for x in inputs]
        with NoHostReads():
            loss_fn(*leaves, *(ids if with_ids else [])).backward()


def test_the_watch_sees_a_host_read() -> None:
    with pytest.raises(AssertionError, match="would make the host wait"), NoHostReads():
        torch.ones(1).item()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("normalize_by", ["local", "all"])
def test_a_micro_batch_that_is_not_finite_leaves_no_trace(
    bad: float, first: bool, normalize_by: str, deferred: None
) -> None:
    batches = [micro_batch(seed) for seed in range(8)]
    spoiled = micro_batch(99)
    spoiled[0][1][2, 3] = bad
    place = 0 if first else 4
    settings = {"bank_size": 64, "normalize_by": normalize_by}
    clean = run(BankedInfoNCE(**settings), batches, with_ids=True)
    loss_fn = BankedInfoNCE(**settings)
    results = run(loss_fn, [*batches[:place], spoiled, *batches[place:]], with_ids=True)
    assert not torch.isfinite(results[4 * place])
    kept = results[: 4 * place] + results[4 * (place + 1) :]
    assert max((a - b).abs().max().item() for a, b in zip(clean, kept, strict=True)) < 1e-12
    assert int(loss_fn.bank.usable[: loss_fn.bank.fill].sum()) == 32


def test_bank_memory_is_flat_once_it_is_full() -> None:
    import gc

    loss_fn = BankedInfoNCE(bank_size=32, similarity="cos", temperature=0.05)

    def live() -> tuple[int, int]:
        gc.collect()
        tensors = [x for x in gc.get_objects() if isinstance(x, Tensor)]
        return len(tensors), sum(x.numel() * x.element_size() for x in tensors)

    counts = []
    for seed in range(120):
        inputs, ids = micro_batch(seed)
        loss_fn(*[x.requires_grad_() for x in inputs], *ids).backward()
        del inputs, ids
        if seed % 30 == 29:
            counts.append(live())
    assert counts[1] == counts[2] == counts[3]


def test_bank_stays_on_its_own_device() -> None:
    loss_fn = BankedInfoNCE(bank_size=8, bank_device="cpu")
    inputs, ids = micro_batch(0)
    loss_fn(*[x.requires_grad_() for x in inputs], *ids).backward()
    assert loss_fn.bank.passages.device.type == "cpu"
    assert inputs[0].grad is not None


def test_works_with_a_compiled_backbone(tiny_config: Any, tiny_tokenizer: Any) -> None:
    from sample_texts import sentences

    from contaccum import ContAccumLoss, DualEncoder

    model = DualEncoder.from_backbone(tiny_config, tokenizer=tiny_tokenizer, pooling="mean").eval()
    features = [model.preprocess(sentences(4, i), task=task) for i, task in enumerate(("query", "document"))]
    losses = []
    for compiled in (False, True):
        if compiled:
            model[0].auto_model.compile(backend="aot_eager")
        loss_fn = ContAccumLoss(model, bank_size=8).train()
        model.eval()
        for _ in range(3):
            loss = loss_fn([dict(x) for x in features])
            loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
