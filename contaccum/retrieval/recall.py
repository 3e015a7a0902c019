"""How much of the exact answer an approximate index finds, on a sample of the queries that it was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from contaccum.retrieval.exact import exact_search
from contaccum.retrieval.index import DenseIndex

SAMPLE = 100
K_VALUES = (10, 100, 1000)


def recall_of_rows(found: np.ndarray, exact: np.ndarray) -> float:
    """The share of the rows in `exact` (n, k) that `found` (n, any) has, line by line; -1 is no row."""
    hits = [np.isin(line, other).sum() for line, other in zip(exact, found, strict=True)]
    return float(np.sum(hits) / exact.size)


def recall_against_exact(
    index: DenseIndex, queries: np.ndarray, rows: np.ndarray, k_values: Sequence[int] = K_VALUES
) -> dict[str, Any] | None:
    """{"queries": size of the sample, "recall@10": ...} of what `search` found; None for an exact index.

    Args:
        queries, rows: all queries (n, d) and the rows (n, k) found for them. The sample is spread evenly over them.
        k_values: those up to k are reported, and k.
    """
    k = rows.shape[1]
    if index.is_exact or not len(queries):
        return None
    sample = np.unique(np.linspace(0, len(queries) - 1, SAMPLE).astype(np.int64))
    _, exact = exact_search(index.corpus, queries[sample], k, index.metric)
    cuts = sorted({cut for cut in k_values if cut < k} | {k})
    recalls = {f"recall@{cut}": recall_of_rows(rows[sample, :cut], exact[:, :cut]) for cut in cuts}
    return {"queries": len(sample), **recalls}
