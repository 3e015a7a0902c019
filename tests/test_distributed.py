"""Several ranks give the results of one process with all micro-batches in rank order.

The ranks use gloo on the CPU in float64. They are forks of this file run as a script; each runs all
cases and saves its results in a file.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forks import run_on_ranks
from programs import run_forking_script
from torch.nn.parallel import DistributedDataParallel

from contaccum import BankedInfoNCE, ContAccumLoss
from contaccum.bank.full_softmax import NO_ROW, DocumentBlock, compute_full_softmax_loss
from contaccum.errors import ConfigError
from contaccum.work import Budget

D = 6
WORLD = 3  # number of ranks; tests/training/test_forked_runs.py trains on two and four
SETTINGS: dict[str, dict[str, Any]] = {
    "in_batch": {"bank_size": 0},
    "contaccum": {"bank_size": 17, "similarity": "cos", "temperature": 0.1},
    "contaccum_as_published": {
        "bank_size": 17,
        "drift_compensation": "none",
        "normalize_by": "all",
    },
    "blocks, without a probe": {"bank_size": 70},
    "no_masks": {"bank_size": 9, "mask_duplicates": False},
    "passage bank alone": {"bank_size": 17, "query_bank_size": 0},
}
CASES = [*((name, 2) for name in SETTINGS), ("in_batch", 0), ("contaccum", 0)]
"""Names of the settings and number of hard negatives h."""

STEPS_PER_UPDATE = 3
NUM_PAIRS = [[3, 3, 3], [3, 3, 3], [3, 3, 1], [0, 2, 2], [1, 0, 0], [2, 2, 2]]
"""Number of pairs of each rank, by micro-step.

First the ranks have equally many, then different numbers, and some have none.
"""

PROBE_STEP = 99
PROBE_PAIRS = [2, 2, 2]


class Towers(torch.nn.Module):
    """A linear query tower and a linear passage tower."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        for name in ("query", "passage"):
            weight = torch.randn(D, D, generator=generator, dtype=torch.float64)
            self.register_parameter(name, torch.nn.Parameter(weight))

    def forward(self, columns: list[torch.Tensor]) -> list[torch.Tensor]:
        """Encode a column of queries, and further columns of passages and hard negatives."""
        return [columns[0] @ self.query.T, *(column @ self.passage.T for column in columns[1:])]


def draw_micro_batch(
    step: int, rank: int, n: int, num_negatives: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Draw inputs and ids of queries, passages and hard negatives, always the same for a rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    shapes: list[tuple[int, ...]] = [(n, D), (n, D)]
    if num_negatives > 0:
        shapes.append((n, num_negatives, D))
    inputs = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    # 9 ids are so few that texts repeat.
    ids = [torch.randint(9, shape[:-1], generator=generator) for shape in shapes]
    return inputs, ids


def draw_micro_batches(
    step: int, ranks: list[int], num_pairs: list[int], num_negatives: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Draw the micro-batches of several ranks, and concatenate them in rank order."""
    drawn = [draw_micro_batch(step, rank, num_pairs[rank], num_negatives) for rank in ranks]
    inputs, ids = zip(*drawn, strict=True)
    return concatenate_columns(inputs), concatenate_columns(ids)


def concatenate_columns(parts: Iterable[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def stack_gradients(towers: Towers) -> torch.Tensor:
    return torch.stack([parameter.grad for parameter in towers.parameters()])


def take_optimizer_step(towers: Towers) -> None:
    """Take a step of gradient descent and delete the gradients."""
    with torch.no_grad():
        for parameter in towers.parameters():
            parameter -= 0.05 * parameter.grad
            parameter.grad = None


def run_steps(case: tuple[str, int], ranks: list[int], **more_settings: Any) -> dict[str, Any]:
    """Run two updates of three micro-steps each, with a drift probe before each update.

    Returns:
        Gradients, losses, logged values, and the states of the loss and of the drift.
    """
    name, num_negatives = case
    settings = SETTINGS[name]
    loss_fn = BankedInfoNCE(**settings, **more_settings).double()
    towers: Any = Towers()
    model = DistributedDataParallel(towers) if dist.is_initialized() else towers
    has_probe = not name.endswith("without a probe")
    probe, _ = draw_micro_batches(PROBE_STEP, ranks, PROBE_PAIRS, num_negatives=0)
    gradients = []
    losses = []
    logged = []
    for step, num_pairs in enumerate(NUM_PAIRS):
        if has_probe and step % STEPS_PER_UPDATE == 0:
            with torch.no_grad():
                loss_fn.observe_probe(*towers(probe))
        inputs, ids = draw_micro_batches(step, ranks, num_pairs, num_negatives)
        # Without hard negatives, there is no third column of ids.
        id_names = ("query_ids", "passage_ids", "negative_ids")
        ids_by_name = dict(zip(id_names, ids, strict=False))
        loss = loss_fn(*model(inputs), **ids_by_name)
        (loss / STEPS_PER_UPDATE).backward()
        losses.append(loss.item())
        logged.append({key: float(value) for key, value in loss_fn.last.items()})
        if step % STEPS_PER_UPDATE == STEPS_PER_UPDATE - 1:
            gradients.append(stack_gradients(towers))
            if step < len(NUM_PAIRS) - 1:  # the last update needs no optimizer step
                take_optimizer_step(towers)
                loss_fn.end_update()
    state = {key: value.clone() for key, value in loss_fn.state_dict().items()}
    return {"gradients": gradients, "losses": losses, "logged": logged, "state": state}


def run_rank(rank: int, folder: Path) -> None:
    """Run everything on one rank and save the results; each rank is a process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[Any, Any] = {}
    for case in CASES:
        results[case] = run_steps(case, [rank], gather_across_devices=True)
    results["errors"] = collect_errors(rank)
    results["own banks"] = save_and_restore_own_bank(rank)
    results["full softmax"] = compute_full_softmax([rank])
    used_time = folder / f"rank-{rank}" / "used_time.json"
    used_time.parent.mkdir()
    used_time.write_text(json.dumps({"used_seconds": 1000.0 * rank, "stages": {}}))
    results["seconds left"] = Budget(2000.0, used_time.parent).left()
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


NUM_DOCUMENTS = 50
DOCUMENTS_PER_BLOCK = 7
NUM_QUERIES = [4, 0, 3]  # of each rank
NUM_EXCLUDED = [1, 2, 3]  # documents per query that are not negatives, which differs between ranks


def draw_queries(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw a rank's queries, the row of each query's positive, and excluded rows."""
    generator = torch.Generator().manual_seed(10 + rank)
    n = NUM_QUERIES[rank]
    queries = torch.randn(n, D, generator=generator, dtype=torch.float64)
    positive_rows = torch.arange(n) + 5 * rank
    shape = (n, NUM_EXCLUDED[rank] - 1)
    # Positives are in rows below 20.
    excluded_rows = torch.randint(20, NUM_DOCUMENTS, shape, generator=generator)
    excluded_rows = torch.cat([positive_rows[:, None], excluded_rows], 1)
    return queries, positive_rows, excluded_rows


def pad_to_widest(excluded_rows: torch.Tensor) -> torch.Tensor:
    """Pad the rows, so that those of all ranks can be concatenated."""
    n, width = excluded_rows.shape
    padding = torch.full((n, max(NUM_EXCLUDED) - width), NO_ROW)
    return torch.cat([excluded_rows, padding], 1)


def compute_full_softmax(ranks: list[int]) -> dict[str, Any]:
    """Return loss and gradient of a linear query tower over 50 documents.

    Each rank reads a part of the documents.
    """
    generator = torch.Generator().manual_seed(3)
    documents = torch.randn(NUM_DOCUMENTS, D, generator=generator, dtype=torch.float64)
    towers = Towers()
    towers.passage.requires_grad_(False)  # DDP would wait for its gradient
    model: Any = DistributedDataParallel(towers) if dist.is_initialized() else towers
    columns = []
    for rank in ranks:
        queries, positive_rows, excluded_rows = draw_queries(rank)
        if len(ranks) > 1:
            excluded_rows = pad_to_widest(excluded_rows)
        columns.append([queries, documents[positive_rows], excluded_rows])
    queries, positives, excluded_rows = concatenate_columns(columns)
    blocks = []
    for number, first in enumerate(range(0, NUM_DOCUMENTS, DOCUMENTS_PER_BLOCK)):
        if number % WORLD in ranks:
            blocks.append(DocumentBlock(first, documents[first : first + DOCUMENTS_PER_BLOCK]))
    embeddings, _ = model([queries, torch.zeros(0, D, dtype=torch.float64)])
    is_partitioned = dist.is_initialized()
    loss = compute_full_softmax_loss(
        embeddings, positives, excluded_rows, blocks, 0.5, is_partitioned
    )
    loss.backward()
    return {"loss": loss.item(), "gradient": towers.query.grad}


@pytest.mark.slow
def test_full_softmax_over_partitioned_documents_equals_one_process(ranks):
    expected = compute_full_softmax(list(range(WORLD)))
    assert expected["gradient"].abs().max() > 1e-3
    for results in ranks:
        result = results["full softmax"]
        assert result["loss"] == pytest.approx(expected["loss"], abs=1e-10)
        assert (result["gradient"] - expected["gradient"]).abs().max() < 1e-10


def save_and_restore_own_bank(rank: int) -> dict[str, Any]:
    """Train on a bank that no other rank has, save the banks of all ranks, and restore this one."""
    loss_fn = ContAccumLoss(Towers(), bank_size=8)
    embeddings, _ = draw_micro_batch(0, rank, 4, 0)
    loss_fn.compute_loss_from_embeddings([x.requires_grad_() for x in embeddings])
    state = loss_fn.bank_state_dict()
    assert loss_fn.bank_state_dict(keep=False) == {}
    restored = ContAccumLoss(Towers(), bank_size=8)
    restored.load_bank_state_dict(state)
    with pytest.raises(ConfigError, match="banks of 3 ranks"):
        ContAccumLoss(Towers(), gather_across_devices=True).load_bank_state_dict(state)
    states = [x.info_nces.state_dict() for x in (loss_fn, restored)]
    return {"saved": states[0], "restored": states[1], "of all ranks": state}


@pytest.mark.slow
def test_banks_that_ranks_do_not_share_are_saved_in_one_state_and_restored(ranks):
    queries = []
    for results in ranks:
        saved, restored, state = results["own banks"].values()
        assert state.keys() == ranks[0]["own banks"]["of all ranks"].keys()
        assert saved.keys() == restored.keys()
        assert all(torch.equal(value, restored[key]) for key, value in saved.items())
        queries.append(restored[f"{D}.bank.queries"])
    assert not torch.equal(queries[0], queries[1])
    with pytest.raises(ConfigError, match="banks of 3 ranks"):  # in one process
        ContAccumLoss(Towers()).load_bank_state_dict(state)


def collect_errors(rank: int) -> dict[str, str]:
    """Return the error messages of this rank for micro-batches that do not fit together."""
    num_negatives = 2 if rank == 1 else 1
    micro_batches = {
        "hard negatives": draw_micro_batch(0, rank, 2, num_negatives),
        "empty": draw_micro_batch(0, rank, 0, 1),
    }
    messages = {}
    for name, (inputs, _) in micro_batches.items():
        try:
            BankedInfoNCE(bank_size=4, gather_across_devices=True)(*inputs)
        except ValueError as error:
            messages[name] = str(error)
    return messages


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """Run all ranks; return the results of each."""
    folder = tmp_path_factory.mktemp("ranks")
    assert run_forking_script(Path(__file__), "ranks", folder) == [0] * WORLD
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_equal_one_process_with_all_micro_batches(case, ranks):
    """Losses and states are also equal bit for bit between the ranks."""
    expected = run_steps(case, list(range(WORLD)))
    first_rank = ranks[0][case]
    for results in ranks:
        result = results[case]
        assert result["losses"] == first_rank["losses"]
        assert result["losses"] == pytest.approx(expected["losses"], abs=1e-10)
        for gradient, expected_gradient in zip(
            result["gradients"], expected["gradients"], strict=True
        ):
            assert expected_gradient.abs().max() > 1e-3
            assert (gradient - expected_gradient).abs().max() < 1e-10
        for values, expected_values in zip(result["logged"], expected["logged"], strict=True):
            assert values == pytest.approx(expected_values, rel=1e-9, abs=1e-9, nan_ok=True)
        assert result["state"].keys() == expected["state"].keys()
        for key, expected_value in expected["state"].items():
            value = result["state"][key]
            assert torch.equal(value, first_rank["state"][key]), key
            assert torch.allclose(value.double(), expected_value.double(), atol=1e-10), key


@pytest.mark.slow
def test_times_by_which_ranks_decide_are_those_of_the_first_rank(ranks):
    seconds = {results["seconds left"] for results in ranks}
    assert len(seconds) == 1
    assert seconds.pop() == pytest.approx(2000.0, abs=100.0)


@pytest.mark.slow
def test_invalid_micro_batch_of_one_rank_raises_on_every_rank(ranks):
    for results in ranks:
        errors = results["errors"]
        assert "differ in shape or dtype" in errors["hard negatives"]
        assert "empty on every rank" in errors["empty"]


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    print(json.dumps(run_on_ranks(folder, WORLD, lambda rank: run_rank(rank, folder))))
