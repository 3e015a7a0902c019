"""The bank as rows and columns of the similarity matrix: its scores, its running log-sums, and its growth.

Between a :class:`MemoryBank`, which only stores, and the loss, which only wants numbers: what a banked row scores
against the bank's own columns, which columns a row leaves out, and how both follow when entries come and go. All scores
here are between stored entries; a common shift of the columns (drift) adds ``row . shift`` to a whole row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from contaccum.duplicates import KnownPositives
from contaccum.log_sums import RunningLogSums
from contaccum.memory_bank import NO_ID, MemoryBank

_CHUNK_ROWS, _ACCELERATOR_CHUNK_ROWS = 4096, 16384  # rows of the bank that one product takes at most
_BLOCK_ROWS = 128  # rows summed afresh at once: half a million scores with a chunk, 2 MB in float32, and copies

EAGER_CPU = True
"""On a CPU, look at values and count what they ask for. Tests turn it off, to run there what accelerators do."""


class StoredRows:
    """Rows of a bank, (r, d), in whatever dtype they are stored; products are computed in ``dtype``."""

    def __init__(self, stored: Tensor, dtype: torch.dtype) -> None:
        self.stored, self.dtype = stored, dtype
        self.chunk_rows = _CHUNK_ROWS if stored.device.type == "cpu" else _ACCELERATOR_CHUNK_ROWS

    def __len__(self) -> int:
        return self.stored.shape[0]

    def take(self, rows: Tensor | slice) -> Tensor:
        """The rows themselves, for a few at a time."""
        return self.stored[rows].to(self.dtype)

    def scores(self, embeddings: Tensor) -> Tensor:
        """Inner products of (k, d) embeddings with every row: (k, r)."""
        # In chunks: a half-precision bank converted whole, or the copy of a large matrix that a CPU's matrix
        # library packs for itself, would cost more memory than the bank.
        scores = torch.empty(len(embeddings), len(self), dtype=self.dtype, device=embeddings.device)
        parts = zip(self.stored.split(self.chunk_rows), scores.split(self.chunk_rows, dim=1), strict=True)
        for part, place in parts if len(self) else ():
            place.copy_(embeddings @ part.to(self.dtype).T)
        return scores

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """(k, r) weights times the rows: (k, d)."""
        total = weights.new_zeros(weights.shape[0], self.stored.shape[1])
        for part, share in zip(self.stored.split(self.chunk_rows), weights.split(self.chunk_rows, dim=1), strict=True):
            total.addmm_(share, part.to(self.dtype))
        return total


class Columns(NamedTuple):
    """A block of columns, with what masks need of them."""

    entries: StoredRows
    slots: Tensor  # (c,) the passage slot of each column; -1 for hard negatives, which are nobody's positive
    query_ids: Tensor  # (c,) the query a passage came with; NO_ID for hard negatives
    passage_ids: Tensor  # (c,)
    exists: Tensor | None  # bool (c,), None: all do

    def split(self, size: int) -> Iterator[Columns]:
        """The same columns, at most ``size`` at a time."""
        for start in range(0, len(self.entries), size):
            part = slice(start, start + size)
            exists = None if self.exists is None else self.exists[part]
            entries = StoredRows(self.entries.stored[part], self.entries.dtype)
            yield Columns(entries, self.slots[part], self.query_ids[part], self.passage_ids[part], exists)


class BankBlock:
    """The filled part of a bank, for one micro-step.

    Args:
        bank: the storage.
        sums: its running log-sums, one row per banked query.
        temperature: divides the scores.
        dtype: of the computation.
        known: the known positives among the banked pairs, None when nothing is masked.
    """

    def __init__(
        self,
        bank: MemoryBank,
        sums: RunningLogSums,
        temperature: float,
        dtype: torch.dtype,
        known: KnownPositives | None,
    ) -> None:
        self.bank, self.sums, self.temperature, self.dtype, self.known = bank, sums, temperature, dtype, known
        entries = bank.entries()
        self.rows = StoredRows(entries.queries, dtype)
        self.positives = entries.positives
        self.row_query_ids = entries.query_ids[entries.positives]
        self.row_passage_ids = entries.passage_ids[entries.positives]
        # Retired entries are left out of rows and columns; so is what is not finite, which a CPU never lets in.
        self.marked = bank.in_use < bank.fill or bank.passages.device.type != "cpu" or not EAGER_CPU
        self.usable_rows = entries.usable[entries.positives] if self.marked else None
        self.columns = self._columns(slice(0, bank.fill))
        self.in_use = (bank.in_use * (1 + bank.hard_negatives), bank.queries_in_use)  # columns and rows

    def _columns(self, slots: Tensor | slice) -> list[Columns]:
        entries = self.bank.entries()
        passages = entries.passages[slots]
        places = torch.arange(self.bank.fill, device=passages.device)[slots]
        blocks = [
            Columns(
                StoredRows(passages, self.dtype),
                places,
                entries.query_ids[slots],
                entries.passage_ids[slots],
                entries.usable[slots] if self.marked else None,
            )
        ]
        h = entries.negatives.shape[1]
        if h:
            ids = entries.negative_ids[slots].reshape(-1)
            exists = torch.arange(h, device=ids.device) < entries.negative_counts[slots][:, None]
            if self.marked:
                exists &= entries.usable[slots][:, None]
            exists = exists.reshape(-1)
            nobody = torch.full_like(ids, -1)
            negatives = StoredRows(entries.negatives[slots].reshape(-1, self.bank.dim), self.dtype)
            blocks.append(Columns(negatives, nobody, torch.full_like(ids, NO_ID), ids, exists))
        return blocks

    def local_scores(
        self, queries: Tensor, known: KnownPositives | None, query_ids: Tensor, passage_ids: Tensor
    ) -> list[Tensor]:
        """Masked scores of local queries (n, d) against each block of columns: (n, c) each."""
        scores = []
        for block in self.columns:
            mask = None if known is None else known.mask(query_ids, passage_ids, block.query_ids, block.passage_ids)
            scores.append(_masked(block.entries.scores(queries).div_(self.temperature), mask, block.exists))
        return scores

    def row_scores(self, *columns: Tensor) -> list[Tensor]:
        """Scores of every banked row against several sets of columns (c, d), in one pass over the rows: (mq', c) each.

        No masks. All that a micro-step asks of the banked queries goes through here, because a large bank costs as
        much to read for one column as for a few dozen.
        """
        scores = self.rows.scores(torch.cat(columns)).div_(self.temperature)
        return [part.T for part in scores.split([len(c) for c in columns])]

    def columns_in(self, slots: Tensor) -> list[Tensor]:
        """The bank's own columns in ``slots``, as :meth:`row_scores` and :meth:`remove` take them: (c, d) each."""
        return [block.entries.take(slice(None)) for block in self._columns(slots)]

    def log_sums(self, known: KnownPositives | None, local_query_ids: Tensor) -> Tensor:
        """logsumexp of every banked row over the bank's columns, float64 (mq',).

        Args:
            known: the known positives of bank and micro-batch together.
            local_query_ids: the micro-batch's; rows of the same queries may leave out more columns than they did so
                far, and are summed for the occasion.
        """
        values = self.sums.value(len(self.rows))
        if known is not None:
            touched = self._rows_of(local_query_ids)
            rows = _indices(touched, limit=4 * local_query_ids.numel())
            if rows.numel():
                values[rows] = self._summed(rows, known)
        return values

    def positive_scores(self) -> Tensor:
        """The score of every banked row's own positive, float64 (mq',)."""
        return self.sums.positive[: len(self.rows)]

    def remove(self, slots: Tensor, scores: list[Tensor]) -> None:
        """Take the columns in ``slots`` out of the running sums, before they are overwritten.

        Args:
            scores: of the rows against :meth:`columns_in` these slots.
        """
        if slots.numel() and len(self.rows):
            for block, found in zip(self._columns(slots), scores, strict=True):
                self.sums.remove(self._mask_own(found, slice(None), block, self.known))

    def add(self, slots: Tensor, scores: list[Tensor], new_rows: Tensor, changed_query_ids: Tensor | None) -> None:
        """Put the columns in ``slots`` into the running sums, after they were written.

        Args:
            scores: of the rows that were there before, against what :meth:`columns_in` gives for these slots now.
            new_rows: rows that were written, summed afresh.
            changed_query_ids: queries of pairs that came or went; their rows may leave out other columns now.
        """
        count = len(self.rows)
        if not count:
            return
        for block, found in zip(self._columns(slots), scores, strict=False):  # no scores while there were no rows
            self.sums.add(self._mask_own(found, slice(len(found)), block, self.known))
        stale = self.sums.worn(count)
        if changed_query_ids is not None:
            stale |= self._rows_of(changed_query_ids)
        if self.usable_rows is not None:
            stale &= self.usable_rows
        stale.index_fill_(0, new_rows, True)
        rows = _indices(stale, limit=new_rows.numel() + 4 * slots.numel(), first=new_rows)
        self._set(rows, new_rows)

    def refresh(self) -> None:
        """Sum every row afresh, after entries were written past the running sums."""
        rows = torch.arange(len(self.rows), device=self.positives.device)
        self._set(rows, rows)

    def _set(self, rows: Tensor, new_rows: Tensor) -> None:
        """Sum ``rows`` afresh, and score the positives of ``new_rows``."""
        self.sums.set(rows, self._summed(rows, self.known))
        for some in new_rows.split(self.rows.chunk_rows):
            own = self.columns[0].entries.take(self.positives[some])
            self.sums.positive[some] = ((self.rows.take(some) * own).sum(1) / self.temperature).double()

    def _rows_of(self, query_ids: Tensor) -> Tensor:
        """Bool (mq',): banked rows of any of these queries. (torch.isin may count on the host.)"""
        rows = self.row_query_ids
        return (rows[:, None] == query_ids).any(1) & (rows != NO_ID)

    def _scores(self, rows: Tensor, block: Columns, known: KnownPositives | None) -> Tensor:
        """Masked scores of some banked rows against a block of the bank's own columns."""
        return self._mask_own(block.entries.scores(self.rows.take(rows)).div_(self.temperature), rows, block, known)

    def _mask_own(self, scores: Tensor, rows: Tensor | slice, block: Columns, known: KnownPositives | None) -> Tensor:
        """``scores`` of banked rows against a block of the bank's own columns, masked in place."""
        mask = None
        named = self.marked or bool(((block.passage_ids != NO_ID) | (block.query_ids != NO_ID)).any())
        if known is not None and named:
            mask = known.mask(self.row_query_ids[rows], self.row_passage_ids[rows], block.query_ids, block.passage_ids)
            mask &= self.positives[rows][:, None] != block.slots
        return _masked(scores, mask, block.exists)

    def _summed(self, rows: Tensor, known: KnownPositives | None) -> Tensor:
        """logsumexp of some banked rows over all of the bank's columns, from scratch: float64 (r,)."""
        # One result made beforehand: small tensors kept between large ones would hold the allocator's heap apart.
        result = torch.full((rows.numel(),), -torch.inf, dtype=torch.float64, device=rows.device)
        for some, sums in zip(rows.split(_BLOCK_ROWS), result.split(_BLOCK_ROWS), strict=True):
            for block in self.columns:
                for chunk in block.split(block.entries.chunk_rows):
                    torch.logaddexp(sums, self._scores(some, chunk, known).logsumexp(1).double(), out=sums)
        return result


def _masked(scores: Tensor, mask: Tensor | None, exists: Tensor | None) -> Tensor:
    """``scores``, in place, with -inf where ``mask`` says so and in columns that do not exist."""
    if mask is not None:
        scores.masked_fill_(mask, -torch.inf)
    if exists is not None:
        scores.masked_fill_(~exists, -torch.inf)
    return scores


def _indices(mask: Tensor, limit: int, first: Tensor | None = None) -> Tensor:
    """Where ``mask`` is True.

    On an accelerator, asking how many there are would stop the host until the device answers, so there the result has
    a fixed length: ``limit`` rows, ``first`` among them, masked ones before others. A row too many does no harm.
    """
    if mask.device.type == "cpu" and EAGER_CPU:
        return mask.nonzero().squeeze(1)
    priority = mask.to(torch.float32)
    if first is not None:
        priority.index_fill_(0, first, 2.0)
    return priority.topk(min(limit, mask.numel())).indices
