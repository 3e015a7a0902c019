"""Which columns a row must not treat as negatives: its own positive again, or another positive of its query.

Works on ids alone and knows no embeddings. Cost is linear in rows x columns of the block asked for (times the
logarithm of the number of known pairs), never pairs x pairs, so that a large bank stays affordable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contaccum.memory_bank import NO_ID


class KnownPositives:
    """The (query id, passage id) pairs known from the micro-batch and the bank together.

    Args:
        query_ids, passage_ids: int64 (r,) each, ``NO_ID`` where an id is missing.
    """

    def __init__(self, query_ids: Tensor, passage_ids: Tensor) -> None:
        # Ids may be any int64 (content hashes), so a pair cannot be packed into one integer as it is. Ranks can.
        self._queries = query_ids.sort().values
        self._passages = passage_ids.sort().values
        self._base = passage_ids.numel() + 1
        keys = self._rank(self._queries, query_ids) * self._base + self._rank(self._passages, passage_ids)
        known = (query_ids != NO_ID) & (passage_ids != NO_ID)
        self._keys = torch.where(known, keys, -1).sort().values

    @staticmethod
    def _rank(ordered: Tensor, ids: Tensor) -> Tensor:
        return torch.searchsorted(ordered, ids.contiguous())

    def mask(
        self, row_query_ids: Tensor, row_passage_ids: Tensor, column_query_ids: Tensor, column_passage_ids: Tensor
    ) -> Tensor:
        """Bool (rows, columns): True where the column's passage is a known positive of the row's query.

        Args:
            row_query_ids, row_passage_ids: (rows,), the row's query and its own positive.
            column_query_ids: (columns,), the query a positive column came with; ``NO_ID`` for hard negatives.
            column_passage_ids: (columns,).

        The row's own positive column is True as well: the caller, who knows where it lies, takes it out.
        """
        own_again = (row_passage_ids[:, None] == column_passage_ids) & (column_passage_ids != NO_ID)
        same_query = (row_query_ids[:, None] == column_query_ids) & (column_query_ids != NO_ID)
        rows = self._rank(self._queries, row_query_ids)
        columns = self._rank(self._passages, column_passage_ids)
        exists = self._passages[columns.clamp(max=self._passages.numel() - 1)] == column_passage_ids
        keys = torch.where(
            (row_query_ids != NO_ID)[:, None] & exists & (column_passage_ids != NO_ID),
            rows[:, None] * self._base + columns,
            -2,
        )
        place = torch.searchsorted(self._keys, keys).clamp(max=self._keys.numel() - 1)
        return own_again | same_query | (self._keys[place] == keys)
