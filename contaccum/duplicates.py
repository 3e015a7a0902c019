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


class PositivesTable:
    """(query id, passage id) pairs known beforehand, such as all positives of a data set: r of them, in 16 bytes each.

    A pair is found by a 64-bit hash: among ten million, a pair that is not one of them is taken for one with a
    probability of 5e-13.

    Args:
        query_ids, passage_ids: int64 (r,) each, ``NO_ID`` where an id is missing.
    """

    def __init__(self, query_ids: Tensor, passage_ids: Tensor) -> None:
        if query_ids.shape != passage_ids.shape or query_ids.ndim != 1:
            raise ValueError(
                f"query_ids and passage_ids must be (r,) both, got {tuple(query_ids.shape)} and "
                f"{tuple(passage_ids.shape)}"
            )
        known = (query_ids != NO_ID) & (passage_ids != NO_ID)
        self._queries = query_ids[known].long().unique()
        self._keys = self._key(query_ids[known].long(), passage_ids[known].long()).unique()

    @staticmethod
    def _key(query_ids: Tensor, passage_ids: Tensor) -> Tensor:
        return mix64(mix64(query_ids) + passage_ids)

    @staticmethod
    def _among(ids: Tensor, ordered: Tensor) -> Tensor:
        place = torch.searchsorted(ordered, ids.contiguous()).clamp_(max=max(ordered.numel() - 1, 0))
        return ordered[place] == ids if ordered.numel() else torch.zeros_like(ids, dtype=torch.bool)

    def to(self, device: torch.device) -> PositivesTable:
        """The table, now on ``device``."""
        self._queries, self._keys = self._queries.to(device), self._keys.to(device)
        return self

    def mark(self, mask: Tensor, query_ids: Tensor, passage_ids: Tensor) -> None:
        """Set ``mask`` (r, c) where a column's passage (c,) is a known positive of a row's query (r, 1)."""
        if mask.device.type == "cpu":  # few queries have several positives; an accelerator would stop to count them
            rows = self._among(query_ids[:, 0], self._queries).nonzero()[:, 0]
            if rows.numel():
                mask[rows] |= self._among(self._key(query_ids[rows], passage_ids), self._keys)
        else:
            mask |= self._among(self._key(query_ids, passage_ids), self._keys)


class KnownPositives:
    """The (query id, passage id) pairs known from the micro-batch and the bank together, and from a table.

    Args:
        query_ids, passage_ids: int64 (r,) each, ``NO_ID`` where an id is missing.
        table: of pairs known beforehand.
    """

    def __init__(self, query_ids: Tensor, passage_ids: Tensor, table: PositivesTable | None = None) -> None:
        self._table = table
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
        if self._table is not None:
            self._table.mark(known, queries, column_passages)
        result.copy_(known)


def mix64(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele et al., 2014), a bijection, on int64, whose products wrap around."""
    # int64 shifts repeat the sign, where the finaliser shifts in zeros: with the sign, -1 and 0 would be one.
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685
    return x ^ (x >> 31 & (1 << 33) - 1)
