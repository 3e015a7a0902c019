"""MemoryBank against a Python list."""

from __future__ import annotations

import pytest
import torch

from contaccum import MemoryBank
from contaccum.memory_bank import NO_ID, RETIRED_AT_ONCE


def rows(n: int, start: int, d: int = 3) -> torch.Tensor:
    return (start + torch.arange(n, dtype=torch.float32))[:, None].expand(n, d)


@pytest.mark.parametrize("bank_size", [1, 5, 8])
@pytest.mark.parametrize("sizes", [[2, 2, 2, 2, 2], [3, 1, 4, 1, 5], [9, 2], [1] * 20])
def test_bank_keeps_the_last_rows_in_slots_that_wrap(bank_size: int, sizes: list[int]) -> None:
    bank = MemoryBank(bank_size, 3)
    kept: list[int] = []
    for n in sizes:
        start = kept[-1] + 1 if kept else 0
        ids = torch.arange(start, start + n)
        bank.enqueue(rows(n, start), rows(n, start) + 0.5, query_ids=ids, passage_ids=ids + 100)
        kept += range(start, start + n)
        entries = bank.entries()
        assert sorted(entries.query_ids.tolist()) == kept[-bank_size:]
        assert len(bank) == bank.fill == min(len(kept), bank_size)
        assert bank.pointer == len(kept) % bank_size
        # Aligned: whatever slot a pair is in, its parts are together.
        assert torch.equal(entries.queries[:, 0], entries.query_ids.float())
        assert torch.equal(entries.passages, entries.queries + 0.5)
        assert torch.equal(entries.passage_ids, entries.query_ids + 100)


@pytest.mark.parametrize("query_bank_size", [10, 6])
def test_entries_past_the_limit_retire_but_never_those_of_the_present_update(query_bank_size: int) -> None:
    """Against a list of the pairs in use."""
    bank = MemoryBank(10, 3, query_bank_size=query_bank_size)
    in_use: list[int] = []
    seen = began = limit = 0
    limit = 10
    for step in range(200):
        n = 1 + step * 7 % 4
        if step % 6 == 5:
            bank.end_update()
            began = seen
        if step % 9 == 8:
            limit = bank.limit = [10, 3, 0, 7][step // 9 % 4]
        expected = [t for t in [*in_use, *range(seen, seen + n)] if t >= seen + n - 10]
        expected = [t for t in expected if t >= min(seen + n - limit, began)]
        slots, leaving, _ = bank.next_slots(n)
        gone = sorted(bank.query_ids[leaving].tolist())
        assert gone == sorted(set(in_use) - set(expected))
        assert slots.tolist() == [t % 10 for t in range(seen, seen + n)]
        ids = torch.arange(seen, seen + n)
        bank.enqueue(rows(n, seen), rows(n, seen), query_ids=ids, passage_ids=ids)
        in_use, seen = expected, seen + n
        entries = bank.entries()
        assert sorted(entries.query_ids[entries.usable].tolist()) == in_use
        assert bank.in_use == len(in_use)
        used_rows = entries.usable[entries.positives]
        assert bank.queries_in_use == used_rows.sum()
        assert torch.equal(entries.queries[:, 0], entries.query_ids[entries.positives].float())
        again = MemoryBank(10, 3, query_bank_size=query_bank_size)
        again.load_state_dict(bank.state_dict())
        assert [x.tolist() for x in again.next_slots(3)] == [x.tolist() for x in bank.next_slots(3)]


def test_a_limit_that_falls_retires_a_few_entries_at_a_time() -> None:
    bank = MemoryBank(1000, 3)
    bank.enqueue(rows(1000, 0), rows(1000, 0))
    bank.end_update()
    bank.limit = 100
    sizes = []
    for start in range(1000, 1200, 8):
        bank.enqueue(rows(8, start), rows(8, start))
        bank.encoder_moved()
        sizes.append(bank.in_use)
    assert sizes[:2] == [1000 - RETIRED_AT_ONCE, 1000 - 2 * RETIRED_AT_ONCE] and sizes[-1] == 100


def test_age_counts_micro_steps() -> None:
    bank = MemoryBank(5, 3)
    for start in (0, 2, 4, 6):
        bank.enqueue(rows(2, start), rows(2, start))
    assert sorted(bank.ages().tolist()) == [1, 1, 2, 2, 3]


def test_entries_are_detached_and_copied() -> None:
    bank = MemoryBank(4, 3)
    queries = torch.ones(2, 3, requires_grad=True)
    bank.enqueue(queries * 2, queries * 3)
    queries.data.zero_()
    entries = bank.entries()
    assert not entries.queries.requires_grad
    assert torch.equal(entries.queries, torch.full((2, 3), 2.0))


def test_missing_ids_and_negatives_are_marked() -> None:
    bank = MemoryBank(4, 3, hard_negatives=2)
    negatives = torch.ones(1, 1, 3)
    bank.enqueue(rows(1, 0), rows(1, 0))
    bank.enqueue(rows(1, 1), rows(1, 1), negatives, negative_ids=torch.tensor([[7]]))
    entries = bank.entries()
    assert entries.query_ids.tolist() == entries.passage_ids.tolist() == [NO_ID, NO_ID]
    assert entries.negative_counts.tolist() == [0, 1]
    assert entries.negative_ids.tolist() == [[NO_ID, NO_ID], [7, NO_ID]]


def test_a_slot_used_again_forgets_its_old_ids() -> None:
    bank = MemoryBank(1, 3, hard_negatives=1)
    one = torch.tensor([1])
    bank.enqueue(rows(1, 0), rows(1, 0), torch.ones(1, 1, 3), one, one, one[None])
    bank.enqueue(rows(1, 1), rows(1, 1))
    entries = bank.entries()
    assert entries.query_ids.item() == entries.passage_ids.item() == entries.negative_ids.item() == NO_ID
    assert entries.negative_counts.item() == 0


def test_state_dict_restores_pointer_and_fill() -> None:
    bank, copy = MemoryBank(5, 3, hard_negatives=1), MemoryBank(5, 3, hard_negatives=1)
    for start in (0, 3, 6):
        bank.enqueue(rows(3, start), rows(3, start))
    copy.load_state_dict(bank.state_dict())
    assert (copy.pointer, copy.fill) == (bank.pointer, bank.fill) == (4, 5)
    for each in (bank, copy):
        each.enqueue(rows(2, 9), rows(2, 9))
    for a, b in zip(bank.state_dict().values(), copy.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_storage_dtype(dtype: torch.dtype) -> None:
    bank = MemoryBank(2, 3, dtype=dtype)
    bank.enqueue(rows(1, 1), rows(1, 2))
    assert bank.passages.dtype == dtype
    assert bank.entries().passages.float().tolist() == [[2.0] * 3]


def test_empty_bank_accepts_and_keeps_nothing() -> None:
    bank = MemoryBank(0, 3)
    bank.enqueue(rows(2, 0), rows(2, 0))
    assert len(bank) == 0
    assert bank.entries().passages.shape == (0, 3)


def test_reset_empties() -> None:
    bank = MemoryBank(3, 3)
    bank.enqueue(rows(2, 0), rows(2, 0))
    bank.reset()
    assert (bank.fill, bank.pointer, int(bank.enqueued)) == (0, 0, 0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_refused_and_nothing_stored(bad: float) -> None:
    bank = MemoryBank(4, 3)
    passages = rows(2, 0).clone()
    passages[1, 1] = bad
    with pytest.raises(ValueError, match="passages hold NaN or infinite"):
        bank.enqueue(rows(2, 0), passages)
    assert bank.fill == 0


def test_what_does_not_fit_is_refused() -> None:
    bank = MemoryBank(4, 3, hard_negatives=1)
    with pytest.raises(ValueError, match="size 5"):
        bank.enqueue(rows(2, 0, 5), rows(2, 0, 5))
    with pytest.raises(ValueError, match="2 hard negatives"):
        bank.enqueue(rows(2, 0), rows(2, 0), torch.zeros(2, 2, 3))
    with pytest.raises(ValueError, match="needs the passage"):
        MemoryBank(4, 3, query_bank_size=5)
    with pytest.raises(ValueError, match="bank_size"):
        MemoryBank(-1, 3)
    assert bank.fill == 0
