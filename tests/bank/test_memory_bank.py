"""MemoryBank: which pairs are in use, and its log-sums against those of the dense block."""

from __future__ import annotations

import math

import pytest
import torch
from micro_batches import draw_embeddings, enqueue
from torch import Tensor

from contaccum import MemoryBank


def make_numbered_rows(n: int, start: int, d: int = 3) -> Tensor:
    """Make rows (n, d) whose values are the number of the row."""
    return (start + torch.arange(n, dtype=torch.float32))[:, None].expand(n, d)


def get_slots_in_use(bank: MemoryBank) -> Tensor:
    """Return the slots of the pairs in use, oldest first."""
    return torch.arange(bank.oldest_in_use, bank.total_enqueued) % bank.num_slots


@pytest.mark.parametrize(("bank_size", "block_size"), [(1, 1), (5, 1), (8, 1), (100, 2), (128, 4)])
@pytest.mark.parametrize(
    "sizes", [[2, 2, 2, 2, 2], [3, 1, 4, 1, 5], [9, 2], [1] * 20, [150, 30, 30, 77]]
)
def test_the_bank_holds_the_last_pairs_in_slots_that_wrap(bank_size, block_size, sizes):
    bank = MemoryBank(bank_size, 3)
    assert bank.block_size == block_size
    total = 0
    for n in sizes:
        ids = torch.arange(total, total + n)
        queries = make_numbered_rows(n, total)
        enqueue(bank, [queries, queries + 0.5], [ids, ids + 1000])
        total += n
        slots = get_slots_in_use(bank)
        assert min(total, bank_size - block_size + 1) <= bank.in_use <= min(total, bank_size)
        assert bank.query_ids[0, slots].tolist() == list(range(total - bank.in_use, total))
        assert int(bank.valid.sum()) == bank.in_use
        assert bank.valid[slots].all()
        # The parts of a pair lie in one slot.
        assert torch.equal(bank.queries[slots][:, 0], bank.query_ids[0, slots].float())
        assert torch.equal(bank.documents[slots, 0], bank.queries[slots] + 0.5)
        assert torch.equal(bank.document_ids[0, slots, 0], bank.query_ids[0, slots] + 1000)


@pytest.mark.parametrize("bank_size", [7, 90, 300])
def test_log_sums_equal_those_of_the_dense_block(bank_size):
    bank = MemoryBank(bank_size, 4, hard_negatives=1, dtype=torch.float64, temperature=0.5)
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        n = 1 + step * 5 % 13
        enqueue(bank, draw_embeddings(n, step % 2, 4, generator))
        if step == 30:
            bank.retire_before(bank.total_enqueued - bank.total_enqueued % bank.block_size)
        if step == 45:
            bank.retire_before(bank.total_enqueued - bank_size // 2)
        slots = get_slots_in_use(bank)
        num_rows = len(slots)
        logits = bank.queries[slots] @ bank.documents[slots].flatten(0, 1).T / 0.5
        logits = logits.masked_fill(~bank.valid[slots].flatten(), -math.inf)
        logits = logits.unflatten(1, (num_rows, 2))
        logits[:, :, 0].fill_diagonal_(-math.inf)  # a row's positive is none of its negatives
        exact = logits.flatten(1).logsumexp(1)
        log_sums = bank.log_sums[slots]
        has_negatives = exact > -math.inf
        assert torch.allclose(log_sums[has_negatives], exact[has_negatives], rtol=1e-13, atol=0)
        assert (log_sums[~has_negatives] < -1e29).all()
        positive_logits = (bank.queries[slots] * bank.documents[slots, 0]).sum(1) / 0.5
        assert torch.allclose(bank.positive_logits[slots], positive_logits, rtol=1e-12, atol=1e-13)


def test_pairs_of_a_retired_block_are_not_stored():
    bank = MemoryBank(128, 4)  # blocks of four pairs
    queries = torch.randn(6, 4)
    enqueue(bank, [queries[:1]] * 2)
    bank.retire_before(1)
    for row in range(1, 6):
        enqueue(bank, [queries[row : row + 1]] * 2)
    assert bank.total_enqueued == 6 and bank.in_use == 2
    assert bank.valid[:8, 0].tolist() == [False] * 4 + [True] * 2 + [False] * 2
    assert torch.equal(bank.documents[4:6, 0], queries[4:])
