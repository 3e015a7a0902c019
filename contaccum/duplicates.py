"""Which columns a row must not treat as negatives: its own positive again, or another positive of its query.

The ids of a row and of a column alone decide, and a table of pairs known beforehand: what is hidden stays hidden,
whatever comes and goes beside it. It works on ids and knows neither embeddings nor the bank.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_ID = torch.iinfo(torch.int64).min
"""The id of an entry that came without one. It never equals anything, itself included."""


class PositivesTable:
    """(query id, passage id) pairs known beforehand, such as all positives of a data set: r of them, in 64 bytes each.

    Args:
        query_ids, passage_ids: int64 (r,) each, ``NO_ID`` where an id is missing.

    Raises:
        ValueError: for shapes that differ.
    """

    def __init__(self, query_ids: Tensor, passage_ids: Tensor) -> None:
        if query_ids.shape != passage_ids.shape or query_ids.ndim != 1:
            shapes = f"{tuple(query_ids.shape)} and {tuple(passage_ids.shape)}"
            raise ValueError(f"query_ids and passage_ids must be (r,) both, got {shapes}")
        known = (query_ids != NO_ID) & (passage_ids != NO_ID)
        query_ids, passage_ids = query_ids[known].long(), passage_ids[known].long()
        self.of_queries, self.of_passages = _Lists(query_ids, passage_ids), _Lists(passage_ids, query_ids)

    def to(self, device: torch.device) -> PositivesTable:
        """The table, now on ``device``."""
        for lists in (self.of_queries, self.of_passages):
            lists.tensors = [x.to(device) for x in lists.tensors]
        return self


class _Lists:
    """For each of many keys the list of its values, in order: int64 (r,) both."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        order = values.argsort()
        order = order[keys[order].argsort(stable=True)]
        keys, lengths = keys[order].unique_consecutive(return_counts=True)
        self.longest = int(lengths.max()) if len(lengths) else 0
        self.tensors = [keys, lengths.cumsum(0) - lengths, lengths, values[order]]

    def hold(self, keys: Tensor, values: Tensor) -> Tensor:
        """Bool (k, c): whether the lists of a few ``keys`` (k,) hold ``values`` (c,)."""
        if not self.longest:
            return torch.zeros(len(keys), len(values), dtype=torch.bool, device=keys.device)
        known, starts, lengths, listed = self.tensors
        place = torch.searchsorted(known, keys.contiguous()).clamp_(max=len(known) - 1)
        length = torch.where(known[place] == keys, lengths[place], 0)[:, None]
        step = torch.arange(self.longest, device=keys.device)
        lists = listed[(starts[place][:, None] + step).clamp_(max=len(listed) - 1)]
        lists = torch.where(step < length, lists, torch.iinfo(torch.int64).max)  # in order, for the search
        place = torch.searchsorted(lists, values.expand(len(keys), -1).contiguous())
        return (place < length) & (lists.gather(1, place.clamp(max=self.longest - 1)) == values)


def hidden(row_ids: Tensor, column_ids: Tensor, positives: PositivesTable | None, local_rows: bool) -> Tensor:
    """Where a column is no negative of a row, own positives included: bool (r, c), or (c, r) unless rows are local.

    Args:
        row_ids: int64 (2, r): of each row's query, and of the passage that came with it.
        column_ids: int64 (2, c): of the query that each passage came with (``NO_ID`` at hard negatives), and its own.
        positives: pairs known beforehand.
        local_rows: whether rows are the few of the micro-batch; otherwise columns are.
    """
    known = None
    if positives is not None and local_rows:
        known = positives.of_queries.hold(row_ids[0], column_ids[1])
    elif positives is not None:
        known = positives.of_passages.hold(column_ids[1], row_ids[0])
    rows, columns = row_ids[:, None], column_ids[:, :, None]
    if local_rows:
        rows, columns = row_ids[:, :, None], column_ids[:, None]
    same = (rows == columns).logical_and_(rows != NO_ID)
    return same[0] | same[1] if known is None else same[0] | same[1] | known


def mix64(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele et al., 2014), a bijection, on int64, whose products wrap around."""
    # int64 shifts repeat the sign, where the finaliser shifts in zeros: with the sign, -1 and 0 would be one.
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685
    return x ^ (x >> 31 & (1 << 33) - 1)
