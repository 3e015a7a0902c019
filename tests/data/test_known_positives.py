"""Known positives are exactly the pairs of queries with several, whatever the order and however often they occur."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from contaccum.data.known_positives import count_distinct, positives_of, several_positives


@pytest.mark.parametrize("n", [0, 1, 2, 5, 40, 300])
@pytest.mark.parametrize("queries", [1, 7, 1000])
def test_pairs_of_queries_with_several_positives_are_found(n: int, queries: int) -> None:
    rng = np.random.default_rng(n * queries)
    names = rng.integers(-(2**63), 2**63 - 1, size=queries)
    for passages in (1, 3, 1000):
        q, p = names[rng.integers(queries, size=n)], rng.integers(passages, size=n) - 2
        by_query = defaultdict(set)
        for query, positive in zip(q.tolist(), p.tolist(), strict=True):
            by_query[query].add(positive)
        expected = sorted((query, one) for query, ones in by_query.items() if len(ones) > 1 for one in ones)
        known = several_positives(q, p)
        assert known.dtype == np.int64 and [tuple(pair) for pair in known.tolist()] == expected
        assert count_distinct(q, p) == sum(map(len, by_query.values()))
        for query, ones in by_query.items():
            assert positives_of(query, known) == (sorted(ones) if len(ones) > 1 else [])


def test_no_pair_is_known_where_there_are_none() -> None:
    assert positives_of(3, None) == []
