"""The duplicate mask against a loop over pairs, with ids anywhere in int64 and some missing."""

import pytest
import torch

from contaccum.bank.logits import NO_ID, PositivesTable, hidden


@pytest.mark.parametrize("with_table", [False, True])
def test_mask_equals_a_loop_with_any_int64_and_missing_ids(with_table):
    generator = torch.Generator().manual_seed(1)
    extremes = torch.tensor([NO_ID, NO_ID + 1, -1, 0, 1, 2**62, 2**63 - 1])

    def ids(*shape: int) -> torch.Tensor:
        return extremes[torch.randint(len(extremes), shape, generator=generator)]

    hits = 0
    for _ in range(50):
        rows, columns, known = ids(2, 6), ids(2, 9), ids(2, 5 if with_table else 0)
        table = PositivesTable(*known) if with_table else None
        mask = hidden(rows, columns, table, local_rows=True)
        assert torch.equal(mask, hidden(columns, rows, table, local_rows=False).T)
        pairs = {pair for pair in zip(*known.tolist(), strict=True) if NO_ID not in pair}
        for i, (query, passage) in enumerate(rows.T.tolist()):
            for j, (of, held) in enumerate(columns.T.tolist()):
                same = (held != NO_ID and held == passage) or (of != NO_ID and of == query)
                expected = same or (query, held) in pairs
                assert bool(mask[i, j]) == expected
                hits += expected
    assert hits > 500


def test_a_table_of_many_pairs_holds_those_and_no_others():
    generator = torch.Generator().manual_seed(2)
    known = torch.randint(-500, 500, (2, 3000), generator=generator)
    table, pairs = PositivesTable(*known), set(zip(*known.tolist(), strict=True))
    queries, passages = torch.randint(-600, 600, (2, 40), generator=generator)
    expected = torch.tensor([[(q, p) in pairs for p in passages.tolist()] for q in queries.tolist()])
    assert expected.sum() > 2
    assert torch.equal(table.of_queries.hold(queries, passages), expected)
    assert torch.equal(table.of_passages.hold(passages, queries), expected.T)
