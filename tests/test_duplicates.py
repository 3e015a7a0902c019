"""The duplicate mask against a loop over pairs, with ids anywhere in int64 and some missing."""

from __future__ import annotations

import pytest
import torch

from contaccum.duplicates import KnownPositives, PositivesTable, mix64
from contaccum.memory_bank import NO_ID


@pytest.mark.parametrize("with_table", [False, True])
def test_mask_equals_a_loop_with_any_int64_and_missing_ids(with_table: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    extremes = torch.tensor([NO_ID, NO_ID + 1, -1, 0, 1, 2**62, 2**63 - 1])

    def ids(count: int) -> torch.Tensor:
        return extremes[torch.randint(len(extremes), (count,), generator=generator)]

    hits = 0
    for _ in range(50):
        pair_queries, pair_passages = ids(6), ids(6)
        column_queries, column_passages = ids(9), ids(9)
        told = (ids(4), ids(4)) if with_table else (ids(0), ids(0))
        table = PositivesTable(*told) if with_table else None
        mask = KnownPositives(pair_queries, pair_passages, table).mask(
            pair_queries, pair_passages, column_queries, column_passages
        )
        known = {(q, p) for q, p in zip(pair_queries.tolist(), pair_passages.tolist(), strict=True)}
        known |= set(zip(*(x.tolist() for x in told), strict=True))
        for i, (query, passage) in enumerate(zip(pair_queries.tolist(), pair_passages.tolist(), strict=True)):
            for j, (of, held) in enumerate(zip(column_queries.tolist(), column_passages.tolist(), strict=True)):
                expected = (
                    (held != NO_ID and held == passage)
                    or (of != NO_ID and of == query)
                    or (NO_ID not in (query, held) and (query, held) in known)
                )
                assert bool(mask[i, j]) == expected
                hits += expected
    assert hits > 500


def test_mix64_is_splitmix64_s_finaliser() -> None:
    def finalise(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        return x ^ (x >> 31)

    values = [0, 1, -1, NO_ID, NO_ID + 1, 2**63 - 1, 123456789, -987654321]
    mixed = mix64(torch.tensor(values)).tolist()
    assert [x % 2**64 for x in mixed] == [finalise(x % 2**64) for x in values]
    assert len(set(mixed)) == len(values)
