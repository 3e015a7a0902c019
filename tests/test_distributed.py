"""Two gloo processes on the CPU equal one process that sees the same micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import cross_entropy

from contaccum import BankedInfoNCE

D = 6


def linear_towers() -> torch.nn.ModuleList:
    generator = torch.Generator().manual_seed(11)
    towers = torch.nn.ModuleList([torch.nn.Linear(D, D, bias=False, dtype=torch.float64) for _ in range(2)])
    for tower in towers:
        tower.weight.data = torch.randn(D, D, generator=generator, dtype=torch.float64)
    return towers


def micro_batch(step: int, rank: int, n: int, h: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    shapes = [(n, D), (n, D)] + ([(n, h, D)] if h else [])
    inputs = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    ids = [torch.randint(6, shape[:-1], generator=generator) for shape in shapes]
    return inputs, ids


def run_steps(loss_fn: BankedInfoNCE, sizes: list[list[int]], ranks: list[int], h: int) -> tuple[Any, list[float]]:
    towers, losses = linear_towers(), []
    for step, counts in enumerate(sizes):
        parts = [micro_batch(step, rank, counts[rank], h) for rank in ranks]
        inputs = [torch.cat(column) for column in zip(*(part[0] for part in parts), strict=True)]
        ids = [torch.cat(column) for column in zip(*(part[1] for part in parts), strict=True)]
        embeddings = [towers[min(index, 1)](x) for index, x in enumerate(inputs)]
        loss = loss_fn(*embeddings, **dict(zip(("query_ids", "passage_ids", "negative_ids"), ids, strict=False)))
        loss.backward()
        losses.append(loss.item())
    return torch.stack([tower.weight.grad for tower in towers]), losses


def worker(rank: int, world: int, folder: str, sizes: list[list[int]], h: int, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    loss_fn = BankedInfoNCE(gather_across_devices=True, **settings)
    gradient, losses = run_steps(loss_fn, sizes, [rank], h)
    dist.all_reduce(gradient)
    bank = {} if loss_fn.bank is None else dict(loss_fn.bank.state_dict())
    torch.save({"gradient": gradient / world, "losses": losses, "bank": bank}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("hard_negatives", [0, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"bank_size": 0},
        {"bank_size": 7, "similarity": "cos", "temperature": 0.1},
        {"bank_size": 7, "query_bank_size": 0, "drift_compensation": "none"},
    ],
    ids=["in_batch", "contaccum", "pre_batch"],
)
def test_two_processes_equal_one(settings: dict[str, Any], hard_negatives: int, tmp_path: Path) -> None:
    # Ranks see micro-batches of different sizes in the last step, as at the end of an epoch.
    sizes = [[3, 3], [3, 3], [3, 1]]
    mp.spawn(worker, args=(2, str(tmp_path), sizes, hard_negatives, settings), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    alone = BankedInfoNCE(**settings)
    gradient, losses = run_steps(alone, sizes, [0, 1], hard_negatives)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(losses, abs=1e-12)
        assert (rank["gradient"] - gradient).abs().max() < 1e-10
        for key, value in ({} if alone.bank is None else alone.bank.state_dict()).items():
            assert torch.allclose(rank["bank"][key].double(), value.double(), atol=1e-12), key


def test_gathering_alone_changes_nothing() -> None:
    inputs, _ = micro_batch(0, 0, 4, 0)
    loss = BankedInfoNCE(bank_size=0, gather_across_devices=True)(*inputs)
    assert loss.item() == pytest.approx(cross_entropy(inputs[0] @ inputs[1].T, torch.arange(4)).item())
