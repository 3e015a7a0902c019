"""Several ranks give the results of one process with all micro-batches in rank order.

The ranks use gloo on the CPU in float64. Starting processes takes seconds, so each process runs all
cases and saves its results in a file.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from contaccum import BankedInfoNCE
from contaccum.bank.full_softmax import DocumentBlock, compute_full_softmax_loss
from contaccum.bank.settings import DIRECTIONS

D = 6
WORLD = 3  # two and four train in tests/training/test_forked_runs.py
SETTINGS: dict[str, dict[str, Any]] = {
    "in_batch": {"bank_size": 0},
    "contaccum": {"bank_size": 17, "similarity": "cos", "temperature": 0.1},
    "contaccum_as_published": {
        "bank_size": 17,
        "drift_compensation": "none",
        "normalize_by": "all",
    },
    "blocks": {"bank_size": 70, "drift_compensation": "mean"},
    "no_masks": {"bank_size": 9, "mask_duplicates": False, "drift_compensation": "fresh"},
    "pre_batch": {"bank_size": 17, "query_bank_size": 0},
    "filters": {
        "bank_size": 17,
        "similarity": "cos",
        "false_negative_margin": 0.1,
        "guide_margin": 0.1,
    },
    "hardness": {
        "bank_size": 17,
        "similarity": "cos",
        "hardness_mode": "all_negatives",
        "hardness_strength": 2.0,
    },
    "directions": {"bank_size": 17, "directions": tuple(DIRECTIONS), "similarity": "cos"},
}
CASES = [(name, h) for name in SETTINGS for h in (0, 2)]


# Pairs by micro-step and rank: equal ones, then ragged ones, and ranks with none.
SIZES = [[3, 3, 3], [3, 3, 3], [3, 3, 1], [0, 2, 2], [1, 0, 0], [2, 2, 2]]


class Towers(torch.nn.Module):
    """A linear query tower and a linear passage tower."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        for name in ("query", "passage"):
            weight = torch.randn(D, D, generator=generator, dtype=torch.float64)
            self.register_parameter(name, torch.nn.Parameter(weight))

    def forward(self, columns: list[torch.Tensor]) -> list[torch.Tensor]:
        return [x @ (self.passage if index else self.query).T for index, x in enumerate(columns)]


def micro_batch(
    step: int, rank: int, n: int, h: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    shapes = [(n, D), (n, D)] + ([(n, h, D)] if h else [])
    inputs = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    ids = [torch.randint(9, shape[:-1], generator=generator) for shape in shapes]
    return inputs, ids


def run_steps(case: tuple[str, int], ranks: list[int], **more: Any) -> dict[str, Any]:
    """Run two updates of three micro-steps each, with a drift probe before each update.

    Returns:
        Gradients, losses, logged values, and the states of the loss and of the drift.
    """
    settings, h = case
    loss_fn = BankedInfoNCE(**SETTINGS[settings], **more).double()
    towers: Any = Towers()
    model = DistributedDataParallel(towers) if dist.is_initialized() else towers
    probe = [micro_batch(99, rank, 2, 0)[0] for rank in ranks]
    texts = [torch.cat(column) for column in zip(*probe, strict=True)]
    gradients, losses, logged = [], [], []
    for step, counts in enumerate(SIZES):
        if step in (0, 3) and SETTINGS[settings].get("drift_compensation") != "mean":
            with torch.no_grad():
                loss_fn.observe_probe(*towers(texts))
        parts = [micro_batch(step, rank, counts[rank], h) for rank in ranks]
        inputs = [torch.cat(column) for column in zip(*(part[0] for part in parts), strict=True)]
        ids = [torch.cat(column) for column in zip(*(part[1] for part in parts), strict=True)]
        names = ("query_ids", "passage_ids", "negative_ids")
        guide = [x[..., :4] for x in inputs] if "guide_margin" in SETTINGS[settings] else []
        loss = loss_fn(*model(inputs), **dict(zip(names, ids, strict=False)), guide=guide)
        (loss / 3).backward()
        losses.append(loss.item())
        logged.append({key: float(value) for key, value in loss_fn.last.items()})
        if step == 2:
            gradients.append(torch.stack([p.grad for p in towers.parameters()]))
            with torch.no_grad():
                for p in towers.parameters():
                    p -= 0.05 * p.grad
                    p.grad = None
            loss_fn.end_update()
    gradients.append(torch.stack([p.grad for p in towers.parameters()]))
    state = {key: value.clone() for key, value in loss_fn.state_dict().items()}
    drift = loss_fn.drift_record()
    return {
        "gradients": gradients,
        "losses": losses,
        "logged": logged,
        "state": state,
        "drift": drift,
    }


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD
    )
    results: dict[Any, Any] = {
        case: run_steps(case, [rank], gather_across_devices=True) for case in CASES
    }
    results["errors"] = collect_errors(rank)
    results["full softmax"] = softmax_over_documents([rank])
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


DOCUMENTS_PER_BLOCK = 7


def softmax_over_documents(ranks: list[int]) -> dict[str, Any]:
    """Return loss and gradient of a linear query tower over 50 documents.

    Each rank reads a part of the documents.
    """
    generator = torch.Generator().manual_seed(3)
    documents = torch.randn(50, D, generator=generator, dtype=torch.float64)
    towers = Towers()
    towers.passage.requires_grad_(False)  # DDP would wait for its gradient
    model: Any = DistributedDataParallel(towers) if dist.is_initialized() else towers
    sizes = [4, 0, 3]
    widths = [1, 2, 3]  # of the lists of known positives, which differ from rank to rank
    queries = []
    positive_rows = []
    excluded_rows = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(10 + rank)
        queries.append(torch.randn(sizes[rank], D, generator=generator, dtype=torch.float64))
        positive_rows.append(torch.arange(sizes[rank]) + 5 * rank)
        excluded = torch.full((sizes[rank], 3), -1)
        shape = (sizes[rank], widths[rank])
        excluded[:, : widths[rank]] = torch.randint(20, 50, shape, generator=generator)
        excluded_rows.append(excluded[:, : widths[rank]] if len(ranks) == 1 else excluded)
    blocks = []
    for number, first in enumerate(range(0, 50, DOCUMENTS_PER_BLOCK)):
        if len(ranks) > 1 or number % WORLD == ranks[0]:
            blocks.append(DocumentBlock(first, documents[first : first + DOCUMENTS_PER_BLOCK]))
    embeddings, _ = model([torch.cat(queries), torch.zeros(0, D, dtype=torch.float64)])
    positives = documents[torch.cat(positive_rows)]
    excluded = torch.cat(excluded_rows)
    is_partitioned = dist.is_initialized()
    loss = compute_full_softmax_loss(embeddings, positives, excluded, blocks, 0.5, is_partitioned)
    loss.backward()
    return {"loss": loss.item(), "gradient": towers.query.grad}


@pytest.mark.slow
def test_full_softmax_over_partitioned_documents_equals_one_process(ranks):
    alone = softmax_over_documents(list(range(WORLD)))
    for result in (rank["full softmax"] for rank in ranks):
        assert result["loss"] == pytest.approx(alone["loss"], abs=1e-10)
        assert (result["gradient"] - alone["gradient"]).abs().max() < 1e-10
    assert alone["gradient"].abs().max() > 1e-3


def collect_errors(rank: int) -> dict[str, str]:
    """Return the error messages of this rank for micro-batches that do not fit together."""
    messages = {}
    for name in ("hard negatives", "empty"):
        inputs, _ = micro_batch(
            0, rank, 0 if name == "empty" else 2, 1 + (rank == 1 and name == "hard negatives")
        )
        try:
            BankedInfoNCE(bank_size=4, gather_across_devices=True)(*inputs)
        except ValueError as error:
            messages[name] = str(error)
    return messages


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker, args=(str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_equal_one_process_with_all_micro_batches(case, ranks):
    """Losses and states are also equal bit for bit between the ranks."""
    alone = run_steps(case, list(range(WORLD)))
    for result in (rank[case] for rank in ranks):
        assert result["losses"] == ranks[0][case]["losses"]
        assert all(
            torch.equal(value, result["state"][key])
            for key, value in ranks[0][case]["state"].items()
        )
        assert result["losses"] == pytest.approx(alone["losses"], abs=1e-10)
        for ours, theirs in zip(result["gradients"], alone["gradients"], strict=True):
            assert theirs.abs().max() > 1e-3
            assert (ours - theirs).abs().max() < 1e-10
        for ours, theirs in zip(result["logged"], alone["logged"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9, nan_ok=True)
        assert result["drift"] == pytest.approx(alone["drift"], rel=1e-9, abs=1e-9)
        assert result["state"].keys() == alone["state"].keys()
        for key, value in alone["state"].items():
            assert torch.allclose(result["state"][key].double(), value.double(), atol=1e-10), key


@pytest.mark.slow
def test_invalid_micro_batch_of_one_rank_raises_on_every_rank(ranks):
    for rank in ranks:
        assert "differ in shape or in bytes per number" in rank["errors"]["hard negatives"]
        assert "(n, 1, 6) of 8 bytes" in rank["errors"]["hard negatives"]
        assert "(n, 2, 6) of 8 bytes" in rank["errors"]["hard negatives"]
        assert "empty on every rank" in rank["errors"]["empty"]
