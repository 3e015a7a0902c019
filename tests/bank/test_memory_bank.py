"""MemoryBank against a Python list, and its sums against those of the dense block."""

import pytest
import torch
from torch import Tensor

from contaccum import MemoryBank
from contaccum.bank.memory_bank import NO_ID


def rows(n: int, start: int, d: int = 3) -> Tensor:
    return (start + torch.arange(n, dtype=torch.float32))[:, None].expand(n, d)


def in_use(bank: MemoryBank) -> Tensor:
    """Slots of the pairs in use, oldest first."""
    return torch.arange(bank.first, bank.pairs) % bank.slots


@pytest.mark.parametrize("bank_size", [1, 5, 8, 100, 128])
@pytest.mark.parametrize("sizes", [[2, 2, 2, 2, 2], [3, 1, 4, 1, 5], [9, 2], [1] * 20, [150, 30, 30, 77]])
def test_bank_keeps_the_last_pairs_in_slots_that_wrap(bank_size, sizes):
    bank, seen = MemoryBank(bank_size, 3), 0
    for n in sizes:
        ids = torch.arange(seen, seen + n)
        bank.enqueue(rows(n, seen), rows(n, seen) + 0.5, query_ids=ids, passage_ids=ids + 1000)
        seen += n
        slots = in_use(bank)
        assert bank.block == {100: 2, 128: 4}.get(bank_size, 1)
        assert min(seen, bank_size - bank.block + 1) <= bank.in_use <= min(seen, bank_size)
        assert bank.ids[0, slots, 0].tolist() == list(range(seen - bank.in_use, seen))
        assert int((bank.absent == 0).sum()) == bank.in_use
        # Aligned: whatever slot a pair is in, its parts are together.
        assert torch.equal(bank.queries[slots][:, 0], bank.ids[0, slots, 0].float())
        assert torch.equal(bank.passages[slots], bank.queries[slots] + 0.5)
        assert torch.equal(bank.ids[1, slots], bank.ids[0, slots] + 1000)


@pytest.mark.parametrize("bank_size", [7, 90, 300])
def test_sums_are_those_of_the_dense_block_without_a_loss(bank_size):
    bank = MemoryBank(bank_size, 4, hard_negatives=1, dtype=torch.float64, temperature=0.5)
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        n, h = 1 + step * 5 % 13, step % 2
        shapes = [(n, 4), (n, 4), (n, h, 4)][: 2 + h]
        inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        bank.enqueue(*inputs)
        if step == 30:
            bank.retire_all()
        slots = in_use(bank)
        scores = bank.queries[slots] @ bank.columns[slots].flatten(0, 1).T / 0.5
        scores = scores.masked_fill(bank.absent[slots].flatten() < 0, -torch.inf).view(len(scores), len(scores), 2)
        scores[:, :, 0].fill_diagonal_(-torch.inf)  # of negatives alone
        exact = scores.flatten(1).logsumexp(1).clamp_min(bank.low)
        assert torch.allclose(bank.log_sum[slots], exact, rtol=1e-13, atol=0)
        own = (bank.queries[slots] * bank.passages[slots]).sum(1) / 0.5
        assert torch.allclose(bank.positive[slots], own, rtol=1e-12, atol=1e-13)


def test_pairs_count_from_the_update_that_they_came_in():
    bank = MemoryBank(6, 3)
    for start in (0, 2, 4, 6):
        bank.enqueue(rows(2, start), rows(2, start))
        bank.end_update()
    assert (bank.updates, bank.age, bank.in_use, bank.aged) == (4, 3, 6, 6)
    bank.enqueue(rows(2, 8), rows(2, 8))
    assert (bank.age, bank.in_use, bank.aged) == (2, 6, 4)


def test_missing_ids_and_negatives_are_marked_and_a_slot_used_again_forgets_its_old_ones():
    bank, one = MemoryBank(2, 3, hard_negatives=2), torch.tensor([1])
    bank.enqueue(rows(1, 0), rows(1, 0), torch.ones(1, 1, 3), one, one, torch.tensor([[7]]))
    bank.enqueue(rows(1, 1), rows(1, 1))
    assert bank.ids[1].tolist() == [[1, 7, NO_ID], [NO_ID] * 3]
    assert (bank.absent == 0).tolist() == [[True, True, False], [True, False, False]]
    bank.enqueue(rows(1, 2), rows(1, 2))
    assert (bank.ids[:, 0] == NO_ID).all()
    assert (bank.absent[0] == 0).tolist() == [True, False, False]
