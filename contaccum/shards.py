"""Which part of a ring of rows one of several ranks keeps, and how parts of a sum become the whole."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from contaccum.distributed import gather_rows, sum_over_ranks


class Shard(NamedTuple):
    """What one of ``ranks`` keeps of a ring of rows: every ``ranks``-th, from ``rank`` on. (0, 1) is all of it.

    The rows that are filled first are spread evenly this way, and a row has its place at whatever length the ring is.
    The sums and log-sums over ranks are the identity for a ring that is whole.
    """

    rank: int = 0
    ranks: int = 1

    @property
    def whole(self) -> bool:
        """Whether nothing is sharded."""
        return self.ranks == 1

    def size(self, rows: int) -> int:
        """How many of the first ``rows`` rows are kept here."""
        return len(range(self.rank, rows, self.ranks))

    def of(self, rows: Tensor) -> Tensor:
        """Those of (r, ...) rows that are kept here, as a view."""
        return rows if self.whole else rows[self.rank :: self.ranks]

    def places(self, slots: Tensor) -> Tensor:
        """Where among the rows kept here those of ``slots`` lie that are."""
        return slots if self.whole else slots[slots % self.ranks == self.rank] // self.ranks

    def take(self, kept: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows in ``slots`` of the whole ring, (s, ...), from what every rank has ``kept`` of it."""
        if self.whole:
            return kept[slots].to(dtype)
        taken = torch.zeros(len(slots), *kept.shape[1:], dtype=dtype, device=kept.device)
        if len(kept):
            here = (slots % self.ranks == self.rank).reshape(-1, *[1] * (kept.ndim - 1))
            taken = torch.where(here, kept[(slots // self.ranks).clamp_max(len(kept) - 1)].to(dtype), taken)
        return self.sum(taken)

    def gather(self, kept: Tensor, rows: int) -> Tensor:
        """The whole ring of ``rows`` rows on every rank, from what each has kept."""
        if self.whole:
            return kept
        whole = kept.new_empty(rows, *kept.shape[1:])
        parts = gather_rows(kept)[0].split([Shard(rank, self.ranks).size(rows) for rank in range(self.ranks)])
        for rank, part in enumerate(parts):
            whole[rank :: self.ranks] = part
        return whole

    def run(self, slots: slice, source: slice) -> tuple[slice, slice]:
        """Of a contiguous run of slots and the rows to be copied there: what is kept here, and its rows."""
        if self.whole:
            return slots, source
        skipped = (self.rank - slots.start) % self.ranks
        kept = len(range(slots.start + skipped, slots.stop, self.ranks))
        first = (slots.start + skipped) // self.ranks
        return slice(first, first + kept), slice(source.start + skipped, source.stop, self.ranks)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over ranks."""
        return value if self.whole else sum_over_ranks(value)

    def max(self, value: Tensor) -> Tensor:
        """The greatest over ranks."""
        if not self.whole:
            value = value.clone()
            dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value

    def log_sum(self, value: Tensor) -> Tensor:
        """log(sum(exp(value))) over ranks, from the greatest and a sum: two collectives of its size."""
        if self.whole:
            return value
        top = self.max(value)
        top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
        return top + self.sum((value - top).exp()).log()


WHOLE = Shard()
