"""Exact search of a store by all R ranks of a distributed run.

The shards of the store are divided among the ranks. Each rank searches all queries in its own
shards, and rank 0 merges the results of all ranks. They are the same as in a search by one process,
except that scores may differ by float32 rounding if the number of threads per process differs.
"""

from __future__ import annotations

import numpy as np
import torch
from accelerate import PartialState

from contaccum.distributed import gather_rows, rank, world_size
from contaccum.retrieval.encode import Similarity
from contaccum.retrieval.index import build_index, find_gpus, order_ties_by_id, search
from contaccum.retrieval.store import EmbeddingStore

# Results are sent and merged for this many queries at a time, to limit the memory that the results
# of all ranks need before they are merged.
_QUERIES_PER_GATHER = 4096


def share_queries(embeddings: np.ndarray | None, dimension: int) -> np.ndarray:
    """Return rank 0's query embeddings, float32 (n, d), on every rank.

    Every rank must call this function.

    Args:
        embeddings: float32 (n, d) with n >= 1 on rank 0; None on other ranks.
        dimension: d.
    """
    if embeddings is None:
        embeddings = np.empty((0, dimension), dtype=np.float32)
    if world_size() == 1:
        return embeddings
    # The other ranks have 0 rows, so the concatenation over all ranks is what rank 0 has.
    rows = torch.from_numpy(embeddings).to(PartialState().device)
    gathered, _ = gather_rows([rows])
    return gathered[0].cpu().numpy()


def search_with_all_ranks(
    store: EmbeddingStore,
    queries: np.ndarray,
    k: int,
    metric: Similarity,
    show_progress: bool = False,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Find the k best documents of n queries exactly, in all shards of a store.

    Every rank must call this function. A rank searches its part of the shards on its own GPU if
    FAISS can use GPUs, and otherwise on the CPU. Then the results are sent to all ranks, and rank 0
    merges them.

    Args:
        store: the store of N documents, the same on every rank.
        queries: float32 (n, d), the same on every rank.
        k: number of documents per query.
        metric: "cos" or "dot".
        show_progress: show a progress bar of this rank's search.

    Returns:
        On rank 0, the scores, float32 (n, min(k, N)), and the documents' row numbers in the store,
        int64 (n, min(k, N)). The documents of a query are in descending order of their scores, and
        with equal scores of their ids. None on other ranks.

    Raises:
        UserError: a vector holds NaN or infinity.
    """
    index = build_index(store, metric=metric)
    local_rank = PartialState().local_process_index
    # An empty list, if there is no GPU of this number, stands for the CPU.
    index.gpus = find_gpus()[local_rank : local_rank + 1]
    scores, rows = search(index, queries, k, show_progress, rank(), world_size())
    merged_scores = []
    merged_rows = []
    for start in range(0, len(queries), _QUERIES_PER_GATHER):
        end = start + _QUERIES_PER_GATHER
        group_scores, group_rows = _gather_results(scores[start:end], rows[start:end])
        if rank() == 0:
            best_scores, best_rows = _merge_results(store, group_scores, group_rows, k)
            merged_scores.append(best_scores)
            merged_rows.append(best_rows)
    if rank() != 0:
        return None
    return np.concatenate(merged_scores), np.concatenate(merged_rows)


def _gather_results(scores: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores and rows of all R ranks for n queries side by side, (n, R * k) each.

    Args:
        scores, rows: (n, k), the results of this rank.
    """
    device = PartialState().device
    # `gather_rows` concatenates along the first axis, so the axis of the results, k, comes first.
    columns = [torch.from_numpy(values).T.contiguous().to(device) for values in (scores, rows)]
    gathered, _ = gather_rows(columns)
    all_scores, all_rows = [values.T.contiguous().cpu().numpy() for values in gathered]
    return all_scores, all_rows


def _merge_results(
    store: EmbeddingStore, scores: np.ndarray, rows: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k best of the results of all R ranks, in the order of `search_with_all_ranks`.

    Args:
        store: the store of N documents.
        scores, rows: (n, R * k), the results of all ranks for n queries.
        k: number of documents per query.

    Returns:
        Scores and rows, (n, min(k, N)) each.
    """
    k = min(k, len(store))
    order = np.argsort(-scores, axis=1, kind="stable")
    scores = np.take_along_axis(scores, order, axis=1)
    rows = np.take_along_axis(rows, order, axis=1)
    order_ties_by_id(store.ids, scores, rows)
    return scores[:, :k], rows[:, :k]
