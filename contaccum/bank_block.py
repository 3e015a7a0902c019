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

from contaccum.distributed import gather_rows
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
    """What masks need of a block of columns."""

    slots: Tensor  # (c,) the passage slot of each column; -1 for hard negatives, which are nobody's positive
    query_ids: Tensor  # (c,) the query a passage came with; NO_ID for hard negatives
    passage_ids: Tensor  # (c,)
    exists: Tensor | None  # bool (c,), None: all do


class StoredColumns(NamedTuple):
    """A block of columns whose embeddings are kept here."""

    entries: StoredRows
    about: Columns

    def split(self, size: int) -> Iterator[StoredColumns]:
        """The same columns, at most ``size`` at a time."""
        for start in range(0, len(self.entries), size):
            part = slice(start, start + size)
            about = Columns(*(None if x is None else x[part] for x in self.about))  # type: ignore[arg-type]  # exists
            yield StoredColumns(StoredRows(self.entries.stored[part], self.entries.dtype), about)


class Rows(NamedTuple):
    """What masks need of banked rows."""

    query_ids: Tensor  # (r,)
    passage_ids: Tensor  # (r,) of their positives
    positives: Tensor  # (r,) the passage slots of their positives

    def at(self, rows: Tensor | slice) -> Rows:
        """Some of them."""
        return Rows(*(x[rows] for x in self))


class BankBlock:
    """The filled part of a bank, for one micro-step: rows and columns that are kept here, all of them unless sharded.

    With a sharded bank, every rank makes the same calls at the same time.

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
        self.shard = bank.shard
        entries = bank.entries()
        self.rows = StoredRows(entries.queries, dtype)
        positives = self.shard.of(entries.positives)
        self.row_facts = Rows(entries.query_ids[positives], entries.passage_ids[positives], positives)
        # Retired entries are left out of rows and columns; so is what is not finite, which a CPU never lets in.
        self.marked = bank.in_use < bank.fill or bank.passages.device.type != "cpu" or not EAGER_CPU
        self.usable_rows = entries.usable[positives] if self.marked else None
        about = self._about(None)
        stored = [entries.passages, entries.negatives.reshape(-1, bank.dim)]
        self.columns = [StoredColumns(StoredRows(x, dtype), y) for x, y in zip(stored, about, strict=False)]
        self.in_use = (bank.in_use * (1 + bank.hard_negatives), bank.queries_in_use)  # columns and rows

    @property
    def any_rows(self) -> bool:
        """Whether there are rows on any rank."""
        return self.bank.query_fill > 0

    def _about(self, slots: Tensor | None) -> list[Columns]:
        """The bank's columns in ``slots`` (None: those kept here): its passages and, if any, its hard negatives."""
        entries = self.bank.entries()

        def some(values: Tensor) -> Tensor:
            return self.shard.of(values) if slots is None else values[slots]

        places = some(torch.arange(self.bank.fill, device=entries.usable.device))
        usable = some(entries.usable) if self.marked else None
        blocks = [Columns(places, some(entries.query_ids), some(entries.passage_ids), usable)]
        h = self.bank.hard_negatives
        if h:
            ids = some(entries.negative_ids).reshape(-1)
            exists = torch.arange(h, device=ids.device) < some(entries.negative_counts)[:, None]
            if usable is not None:
                exists &= usable[:, None]
            blocks.append(Columns(torch.full_like(ids, -1), torch.full_like(ids, NO_ID), ids, exists.reshape(-1)))
        return blocks

    def local_scores(
        self, queries: Tensor, known: KnownPositives | None, query_ids: Tensor, passage_ids: Tensor
    ) -> list[Tensor]:
        """Masked scores of local queries (n, d) against each block of columns kept here: (n, c) each."""
        scores = []
        for block in self.columns:
            about, mask = block.about, None
            if known is not None:
                mask = known.mask(query_ids, passage_ids, about.query_ids, about.passage_ids)
            scores.append(_masked(block.entries.scores(queries).div_(self.temperature), mask, about.exists))
        return scores

    def row_scores(self, *columns: Tensor) -> list[Tensor]:
        """Scores of every banked row kept here against several sets of columns (c, d), in one pass: (mq', c) each.

        No masks. All that a micro-step asks of the banked queries goes through here, because a large bank costs as
        much to read for one column as for a few dozen.
        """
        scores = self.rows.scores(torch.cat(columns)).div_(self.temperature)
        return [part.T for part in scores.split([len(c) for c in columns])]

    def columns_in(self, slots: Tensor) -> list[Tensor]:
        """The bank's own columns in ``slots``, as :meth:`row_scores` and :meth:`remove` take them: (c, d) each."""
        entries = self.bank.entries()
        columns = [self.shard.take(entries.passages, slots, self.dtype)]
        if self.bank.hard_negatives:
            columns.append(self.shard.take(entries.negatives, slots, self.dtype).reshape(-1, self.bank.dim))
        return columns

    def log_sums(self, known: KnownPositives | None, local_query_ids: Tensor) -> Tensor:
        """logsumexp of every banked row kept here over all of the bank's columns, float64 (mq',).

        Args:
            known: the known positives of bank and micro-batch together.
            local_query_ids: the micro-batch's; rows of the same queries may leave out more columns than they did so
                far, and are summed for the occasion.
        """
        values = self.sums.value(len(self.rows))
        if known is not None:
            rows = _indices(self._rows_of(local_query_ids), limit=4 * local_query_ids.numel())
            if rows.numel() or not self.shard.whole:
                values[rows] = self._summed(rows, known)
        return values

    def positive_scores(self) -> Tensor:
        """The score of the own positive of every banked row kept here, float64 (mq',)."""
        return self.sums.positive[: len(self.rows)]

    def remove(self, slots: Tensor, scores: list[Tensor]) -> None:
        """Take the columns in ``slots`` out of the running sums, before they are overwritten.

        Args:
            scores: of the rows against :meth:`columns_in` these slots.
        """
        if slots.numel() and len(self.rows):
            for about, found in zip(self._about(slots), scores, strict=True):
                self.sums.remove(self._mask_own(found, self.row_facts, about, self.known))

    def add(self, slots: Tensor, scores: list[Tensor], new_rows: Tensor, changed_query_ids: Tensor | None) -> None:
        """Put the columns in ``slots`` into the running sums, after they were written.

        Args:
            scores: of the rows that were there before, against what :meth:`columns_in` gives for these slots now.
            new_rows: rows of the bank that were written, summed afresh.
            changed_query_ids: queries of pairs that came or went; their rows may leave out other columns now.
        """
        if not self.any_rows:
            return
        for about, found in zip(self._about(slots), scores, strict=False):  # no scores while there were no rows
            self.sums.add(self._mask_own(found, self.row_facts.at(slice(len(found))), about, self.known))
        stale = self.sums.worn(len(self.rows))
        if changed_query_ids is not None:
            stale |= self._rows_of(changed_query_ids)
        if self.usable_rows is not None:
            stale &= self.usable_rows
        new_rows = self.shard.places(new_rows)
        stale.index_fill_(0, new_rows, True)
        rows = _indices(stale, limit=new_rows.numel() + 4 * slots.numel(), first=new_rows)
        self._set(rows, new_rows)

    def refresh(self) -> None:
        """Sum every row afresh, after entries were written past the running sums."""
        rows = torch.arange(len(self.rows), device=self.row_facts.positives.device)
        self._set(rows, rows)

    def _set(self, rows: Tensor, new_rows: Tensor) -> None:
        """Sum ``rows`` afresh, and score the positives of ``new_rows``."""
        self.sums.set(rows, self._summed(rows, self.known))
        passages = self.bank.entries().passages
        for some in self._in_step(new_rows, self.rows.chunk_rows):
            wanted, mine = self._over_ranks(self.row_facts.positives[some])
            own = self.shard.take(passages, wanted, self.dtype)[mine]
            self.sums.positive[some] = ((self.rows.take(some) * own).sum(1) / self.temperature).double()

    def _rows_of(self, query_ids: Tensor) -> Tensor:
        """Bool (mq',): banked rows of any of these queries. (torch.isin may count on the host.)"""
        rows = self.row_facts.query_ids
        return (rows[:, None] == query_ids).any(1) & (rows != NO_ID)

    def _mask_own(self, scores: Tensor, rows: Rows, about: Columns, known: KnownPositives | None) -> Tensor:
        """``scores`` of banked rows against a block of the bank's own columns, masked in place."""
        mask = None
        named = self.marked or bool(((about.passage_ids != NO_ID) | (about.query_ids != NO_ID)).any())
        if known is not None and named:
            mask = known.mask(rows.query_ids, rows.passage_ids, about.query_ids, about.passage_ids)
            mask &= rows.positives[:, None] != about.slots
        return _masked(scores, mask, about.exists)

    def _summed(self, rows: Tensor, known: KnownPositives | None) -> Tensor:
        """logsumexp of some rows kept here over all of the bank's columns, from scratch: float64 (r,)."""
        # One result made beforehand: small tensors kept between large ones would hold the allocator's heap apart.
        result = torch.full((rows.numel(),), -torch.inf, dtype=torch.float64, device=rows.device)
        done = 0
        for some in self._in_step(rows, _BLOCK_ROWS):
            queries, mine = self._over_ranks(self.rows.take(some))
            facts = Rows(*(self._over_ranks(torch.stack(self.row_facts.at(some), dim=1))[0].unbind(1)))
            sums = torch.full((len(queries),), -torch.inf, dtype=torch.float64, device=rows.device)
            for block in self.columns:
                for chunk in block.split(block.entries.chunk_rows):
                    scores = chunk.entries.scores(queries).div_(self.temperature)
                    scores = self._mask_own(scores, facts, chunk.about, known)
                    torch.logaddexp(sums, scores.logsumexp(1).double(), out=sums)
            result[done : done + len(some)] = self.shard.log_sum(sums)[mine]
            done += len(some)
        return result

    def _in_step(self, rows: Tensor, size: int) -> tuple[Tensor, ...]:
        """``rows`` split into parts of ``size``: as many parts as on the rank that has most."""
        parts = rows.split(size) if len(rows) else ()
        if not self.shard.whole:
            most = int(self.shard.max(torch.tensor(len(parts), device=rows.device)))
            parts = (*parts, *[rows[:0]] * (most - len(parts)))
        return parts

    def _over_ranks(self, rows: Tensor) -> tuple[Tensor, slice]:
        """The rows of all ranks, if sharded, and where those from here are."""
        return (rows, slice(None)) if self.shard.whole else gather_rows(rows)


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
