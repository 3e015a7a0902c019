"""Ids of texts, by which duplicates and known positives are masked, and the table of positives.

A text has up to two ids: for example one from the data set and a hash of its tokens. Two texts are
the same if their first ids are equal or their second ids are equal.

Letters in shapes: n pairs in the micro-batch, r queries, c pairs whose documents are compared with
them, h hard negatives per query, d the embedding size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

NO_ID = torch.iinfo(torch.int64).min
"""Id of a text that came without one. Such a text is never the same as another text."""

IDS_PER_TEXT = 2
"""Number of ids per text. A text with one id has `NO_ID` as the other."""


def stack_ids(
    query_ids: Tensor | None,
    passage_ids: Tensor | None,
    negative_ids: Tensor | None,
    embeddings: Tensor,
) -> Tensor:
    """Stack the ids of each pair's texts, int64 (n, 2 + h, IDS_PER_TEXT).

    Args:
        query_ids, passage_ids, negative_ids: integers (n,), (n,) and (n, h), or with one more
            dimension at the end, of size `IDS_PER_TEXT`; None where texts have no ids, which
            become `NO_ID`.
        embeddings: (n, 2 + h, d), from `stack_embeddings`.

    Raises:
        ValueError: for ids of another shape, or that are not integers.
    """
    n, num_texts, _ = embeddings.shape
    columns: list[tuple[str, tuple[int, ...], Tensor | None]] = [
        ("queries", (n,), query_ids),
        ("passages", (n,), passage_ids),
    ]
    if num_texts > 2 or negative_ids is not None:
        columns.append(("negatives", (n, num_texts - 2), negative_ids))
    stacked = []
    for name, shape, ids in columns:
        if ids is None:
            ids = torch.full((*shape, IDS_PER_TEXT), NO_ID, device=embeddings.device)
        if ids.shape not in (shape, (*shape, IDS_PER_TEXT)) or ids.is_floating_point():
            raise ValueError(
                f"ids of {name} must be integers {shape} or {(*shape, IDS_PER_TEXT)}, "
                f"got {ids.dtype} {tuple(ids.shape)}"
            )
        ids = ids.to(embeddings.device, torch.int64)
        if ids.shape == shape:  # one id per text
            ids = pad(ids[..., None], (0, 1), value=NO_ID)
        if ids.ndim == 2:  # queries or passages, one text per pair
            ids = ids[:, None]
        stacked.append(ids)
    return torch.cat(stacked, dim=1)


class PositivesTable:
    """Table of relevant pairs (query id, passage id), such as all positives of a data set.

    The ids are the first ids of the texts. The table takes 64 bytes per pair.

    Args:
        query_ids, passage_ids: int64 (p,) each; pairs with a `NO_ID` are left out.
    """

    def __init__(self, query_ids: Tensor, passage_ids: Tensor) -> None:
        has_ids = (query_ids != NO_ID) & (passage_ids != NO_ID)
        query_ids = query_ids[has_ids].long()
        passage_ids = passage_ids[has_ids].long()
        self.passages_by_query = _SortedLists(query_ids, passage_ids)
        self.queries_by_passage = _SortedLists(passage_ids, query_ids)

    def contains(self, query_ids: Tensor, document_ids: Tensor) -> Tensor:
        """Find the documents that the table lists as positives of a query: bool (r, c, 1 + h).

        Args:
            query_ids: int64 (r,).
            document_ids: int64 (c, 1 + h).
        """
        documents = document_ids.flatten()
        # A lookup copies one list per key, so the side with fewer texts provides the keys.
        if len(query_ids) <= len(documents):
            is_listed = self.passages_by_query.contains(query_ids, documents)
        else:
            is_listed = self.queries_by_passage.contains(documents, query_ids).T
        return is_listed.unflatten(1, document_ids.shape)


class _SortedLists:
    """Mapping of each key to a sorted list of values, in tensors.

    All lists stand one after the other in one tensor, ordered by key.

    Args:
        keys, values: int64 (p,) each; pair i adds ``values[i]`` to the list of ``keys[i]``.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        by_value = values.argsort()
        by_key_then_value = by_value[keys[by_value].argsort(stable=True)]
        self.values = values[by_key_then_value]
        sorted_keys = keys[by_key_then_value]
        self.keys, self.lengths = sorted_keys.unique_consecutive(return_counts=True)
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.max_length = int(self.lengths.max()) if len(self.keys) > 0 else 0

    def contains(self, keys: Tensor, values: Tensor) -> Tensor:
        """Return bool (k, v), True where the list of a key, int64 (k,), has a value, int64 (v,)."""
        if self.max_length == 0:
            return torch.zeros(len(keys), len(values), dtype=torch.bool, device=keys.device)
        if self.keys.device != keys.device:
            self.keys = self.keys.to(keys.device)
            self.lengths = self.lengths.to(keys.device)
            self.starts = self.starts.to(keys.device)
            self.values = self.values.to(keys.device)
        key_index = torch.searchsorted(self.keys, keys.contiguous())
        key_index = key_index.clamp_(max=len(self.keys) - 1)
        is_listed_key = self.keys[key_index] == keys
        lengths = torch.where(is_listed_key, self.lengths[key_index], 0)[:, None]

        # (k, max_length): the list of each key, padded with the largest integer, so that it stays
        # sorted for the binary search.
        offsets = torch.arange(self.max_length, device=keys.device)
        value_index = (self.starts[key_index][:, None] + offsets).clamp_(max=len(self.values) - 1)
        lists = self.values[value_index]
        lists = torch.where(offsets < lengths, lists, torch.iinfo(torch.int64).max)

        position = torch.searchsorted(lists, values.expand(len(keys), -1).contiguous())
        candidates = lists.gather(1, position.clamp(max=self.max_length - 1))
        return (position < lengths) & (candidates == values)
