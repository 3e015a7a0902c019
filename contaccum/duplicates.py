"""Which columns a row must not treat as negatives: its own positive again, or another positive of its query.

Works on ids alone and knows no embeddings. Cost is linear in rows x columns of the block asked for (times the
logarithm of the number of known pairs), never pairs x pairs, so that a large bank stays affordable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contaccum.memory_bank import NO_ID

# Elements of a mask worked out at once: temporaries of a megabyte each, where blocks cost nothing. An accelerator
# is told each operation one by one, and would rather have few.
_BLOCK, _ACCELERATOR_BLOCK = 1 << 17, 1 << 21


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
        rows, columns = row_query_ids.numel(), column_passage_ids.numel()
        result = torch.zeros(rows, columns, dtype=torch.bool, device=row_query_ids.device)
        row_ranks = self._rank(self._queries, row_query_ids) * self._base
        row_ranks.masked_fill_(row_query_ids == NO_ID, -2 * self._base)  # below every key
        column_ranks = self._rank(self._passages, column_passage_ids)
        exists = self._passages[column_ranks.clamp(max=self._passages.numel() - 1)] == column_passage_ids
        exists &= column_passage_ids != NO_ID
        row_ids = (row_query_ids, row_passage_ids, row_ranks)
        column_ids = (column_query_ids, column_passage_ids, column_ranks, exists)
        # In blocks: keys are eight bytes an element and their copies as much again, the mask itself is one.
        size = _BLOCK if result.device.type == "cpu" else _ACCELERATOR_BLOCK
        height = max(1, size // max(columns, 1))
        width = max(1, size // min(max(rows, 1), height))
        for top in range(0, rows, height):
            for left in range(0, columns, width):
                block = (slice(top, top + height), slice(left, left + width))
                self._fill(result[block], *(x[block[0], None] for x in row_ids), *(x[block[1]] for x in column_ids))
        return result

    def _fill(
        self,
        result: Tensor,
        queries: Tensor,
        passages: Tensor,
        ranks: Tensor,
        column_queries: Tensor,
        column_passages: Tensor,
        column_ranks: Tensor,
        exists: Tensor,
    ) -> None:
        """One block of the mask: (r, 1) of its rows, (c,) of its columns."""
        place = torch.searchsorted(self._keys, ranks + column_ranks)
        known = self._keys[place.clamp_(max=self._keys.numel() - 1)] == ranks + column_ranks
        known &= exists
        known |= (passages == column_passages) & (column_passages != NO_ID)
        known |= (queries == column_queries) & (column_queries != NO_ID)
        result.copy_(known)
