"""The duplicate mask against a loop over pairs, with ids anywhere in int64 and some missing."""

from __future__ import annotations

import torch

from contaccum.duplicates import KnownPositives
from contaccum.memory_bank import NO_ID


def test_mask_equals_a_loop_with_any_int64_and_missing_ids() -> None:
    generator = torch.Generator().manual_seed(1)
    extremes = torch.tensor([NO_ID, NO_ID + 1, -1, 0, 1, 2**62, 2**63 - 1])

    def ids(count: int) -> torch.Tensor:
        return extremes[torch.randint(len(extremes), (count,), generator=generator)]

    hits = 0
    for _ in range(50):
        pair_queries, pair_passages = ids(6), ids(6)
        column_queries, column_passages = ids(9), ids(9)
        mask = KnownPositives(pair_queries, pair_passages).mask(
            pair_queries, pair_passages, column_queries, column_passages
        )
        known = {(q, p) for q, p in zip(pair_queries.tolist(), pair_passages.tolist(), strict=True)}
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
