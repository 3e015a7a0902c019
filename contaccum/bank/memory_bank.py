"""The memory bank: ring buffers of past query, passage and hard-negative embeddings, and their part of the loss.

The bank x bank block of the similarity matrix has no gradient. It enters the loss as one number per banked query, its
logsumexp over the bank's columns, and the bank keeps that number exact at no cost: the ring forgets a block at a time,
and a table holds each row's logsumexp block by block. All scores that the table needs are scores of some micro-step: a
new row meets the old columns as a local row, old rows meet the new columns as bank rows. Nothing is ever subtracted or
summed again, and no value is read on the host. The module knows no model, no normalisation and no optimizer.

Letters in shapes: n pairs in the micro-batch, h hard negatives per query, m rows in the bank, d the embedding size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from contaccum.bank.autograd import Product
from contaccum.bank.logits import (
    IDS_PER_TEXT,
    NO_ID,
    Guided,
    Ids,
    Pairs,
    PositivesTable,
    Scores,
    check_embeddings,
    hidden,
    low,
)
from contaccum.errors import ConfigError

PAIRS_PER_ORIGIN = 64  # that share one note of where their tower's mean was, at most


class MemoryBank(nn.Module):
    """Ring buffers of the last ``bank_size`` (query, passage, hard negatives) entries, forgotten a block at a time.

    A block is the largest power of two within 1/32 of ``bank_size``, and one pair below 64 rows: a full bank uses at
    most ``bank_size`` rows, at least 31/32 of them, and all of them where micro-batches are whole blocks. Everything in
    it is detached, and everything that it needs to go on lies in its ``state_dict``.

    Args:
        bank_size: rows m at most, at least 1; for ``query_bank_size`` as many (None) or 0, which stores passages alone.
        dim: the embedding size d.
        hard_negatives: hard negatives h per entry. A micro-batch may bring fewer.
        dtype: storage dtype of the embeddings; ``score_dtype`` that of sums, by default the same, float32 at least.
        temperature: divides similarities.

    Raises:
        ConfigError (a ValueError): for sizes that there are no banks of.

    Source: Kim, Lee and Kang, NeurIPS 2024 (arXiv 2406.12356), section 3.2; the table of log-sums is ours.
    """

    queries: Tensor  # (m, d), or (0, d) without a query bank; rows of what follows are as many
    columns: Tensor  # (m, 1 + h, d): a passage, then its hard negatives
    ids: Tensor  # int64 (2 * IDS_PER_TEXT, m, 1 + h), as in `Pairs`
    absent: Tensor  # (m, 1 + h), added to the scores of a column: 0 where it is in use, else vanishingly low
    log_sums: Tensor  # (blocks, m), logsumexp of each row over the negatives in the columns of each block
    log_sum: Tensor  # (m,), and over all of them, each counted as often as its weight says
    log_weights: Tensor  # (blocks,), logarithms of how often what lies in each counts, as negatives and as rows
    positive: Tensor  # (m,), score of each row's own passage
    own_sum: Tensor  # (m,) with penalties, which log-sums are without then: that of a row's own hard negatives
    origins: Tensor  # (m / note, d), where the mean of the query tower was when rows came

    def __init__(
        self,
        bank_size: int,
        dim: int,
        hard_negatives: int = 0,
        dtype: torch.dtype = torch.float32,
        query_bank_size: int | None = None,
        device: torch.device | str | None = None,
        temperature: float = 1.0,
        score_dtype: torch.dtype | None = None,
        penalties: bool = False,
    ) -> None:
        super().__init__()
        check_bank_sizes(bank_size, query_bank_size, least=1)
        self.bank_size, self.dim, self.temperature = bank_size, dim, temperature
        self.block = 1 << max(bank_size // 32, 1).bit_length() - 1
        self.note = min(self.block, PAIRS_PER_ORIGIN)  # pairs that share one of the origins: that of their first
        blocks = -(-bank_size // self.block)
        self.slots, width = blocks * self.block, 1 + hard_negatives
        rows = 0 if query_bank_size == 0 else self.slots
        scores = score_dtype or torch.promote_types(dtype, torch.float32)
        self.low = low(scores)

        def buffer(name: str, value: float, *shape: int, dtype: torch.dtype = scores) -> None:
            self.register_buffer(name, torch.full(shape, value, dtype=dtype, device=device))

        buffer("queries", 0, rows, dim, dtype=dtype)
        buffer("columns", 0, self.slots, width, dim, dtype=dtype)
        buffer("ids", NO_ID, 2 * IDS_PER_TEXT, self.slots, width, dtype=torch.int64)
        buffer("absent", self.low, self.slots, width)
        buffer("log_sums", self.low, blocks, rows)
        buffer("log_sum", self.low, rows)
        buffer("log_weights", 0, blocks)
        buffer("positive", 0, rows)
        self._penalties = penalties
        if penalties:
            buffer("own_sum", self.low, rows)
        buffer("origins", 0, rows // self.note, dim)
        self.guide: _GuideRing | None = None
        self.pairs = self.first = 0  # seen since the start, and the oldest of them in use, which only rises
        self.limit = bank_size  # in use at most, in whole blocks; those since the last update are never too many
        self.updates = self._update_began = 0  # calls of end_update, and the first pair of the present encoder
        self._update_ends: list[int] = []  # pairs seen by then, for each update since the oldest entry in use

    @property
    def passages(self) -> Tensor:
        """(m, d), a view; as stored, which drift compensation makes relative to the mean of their tower."""
        return self.columns[:, 0]

    @property
    def negatives(self) -> Tensor:
        """(m, h, d), a view."""
        return self.columns[:, 1:]

    @property
    def fill(self) -> int:
        """Rows that hold an entry, retired ones included."""
        return min(self.pairs, self.bank_size)

    @property
    def in_use(self) -> int:
        """Entries that are neither overwritten nor retired."""
        return self.pairs - self.first

    @property
    def aged(self) -> int:
        """Entries in use that are of an older encoder than the present one."""
        return max(self._update_began - self.first, 0)

    @property
    def age(self) -> int:
        """Updates since the oldest entry in use was encoded."""
        return len(self._update_ends)

    @property
    def span(self) -> int:
        """Slots that any entry lies in, in whole blocks and at least one: what a micro-step looks at."""
        return min(-(-max(self.pairs, 1) // self.block) * self.block, self.slots)

    # The bank's part of the loss -------------------------------------------------------------------------------------

    def scores(self, pairs: Pairs, positives: PositivesTable | None = None, origin: Tensor | None = None) -> Scores:
        """All scores of a micro-batch against itself and the bank, with masks that know ``positives`` beforehand.

        With an ``origin`` (d,), the mean of the query tower by now, a banked query pushes on local columns from where
        it would be had it moved along; its scores stay those that it was stored with.
        """
        m, (n, width, _) = self.span, pairs.columns.shape
        rows = self.queries[:m]
        row_mask = column_mask = row_ceiling = column_ceiling = moved = None
        if pairs.named:
            column_mask = hidden(pairs.ids[:, :, 0], self.ids[:, :m].flatten(1), positives, local_rows=True)
            row_mask = hidden(pairs.ids.flatten(1), self.ids[:, : len(rows), 0], positives, local_rows=False)
        if origin is not None and len(rows):
            moved = origin - self.origins[: m // self.note]
        queries, columns = pairs.queries / pairs.temperature, pairs.columns.flatten(0, 1) / pairs.still_temperature
        absent, local = self.absent[:m].flatten(), pairs.scores(queries, positives)
        if pairs.margin is not None:
            known = (
                (local.positive.detach(), self.positive[: len(rows)]) if pairs.positives is None else pairs.positives
            )
            column_ceiling, row_ceiling = known[0][:, None] + pairs.margin, known[1] + pairs.margin
        if pairs.guide is not None and self.guide is not None:
            by_rows, by_columns = self.guide.rejected(pairs.guide, m)
            column_mask = by_rows if column_mask is None else column_mask | by_rows
            row_mask = by_columns if row_mask is None else row_mask | by_columns
        if (hardness := pairs.hardness) is not None:
            queries, columns = hardness.penalised(queries), hardness.penalised(columns)
            if column_ceiling is not None and row_ceiling is not None:
                column_ceiling, row_ceiling = hardness.penalised(column_ceiling), hardness.penalised(row_ceiling)
        of_columns = Product.apply(queries, self.columns[:m].flatten(0, 1), absent, column_mask, column_ceiling, None)
        of_rows = Product.apply(columns, rows, absent.new_zeros(()), row_mask, row_ceiling, moved)
        return local._replace(
            of_columns=of_columns,
            by_block=of_columns.view(n, m // self.block, -1).logsumexp(2),
            of_rows=of_rows.view(n, width, len(rows)),
            on_rows=of_rows.logsumexp(0),
        )

    def row_sums(self, pairs: Pairs, scores: Scores, log_weight: float = 0.0) -> tuple[Tensor, Tensor]:
        """Of the banked rows, in use or not: their logsumexp over all columns, (m,), and their positives' scores, (m,).

        A banked negative counts ``exp(log_weight)`` times; a row's own positive and local columns once.
        """
        m = len(scores.on_rows)
        positive, log_sum = self.positive[:m], self.log_sum[:m]
        if (hardness := pairs.hardness) is not None:
            of_mean = self.of_mean(pairs)
            own_sum = self.own_sum[:m] + self.log_weights.repeat_interleave(self.block)[:m]
            log_sum = torch.logaddexp(log_sum, own_sum + hardness.off_own(of_mean))
            positive = positive - hardness.off(of_mean)
        banked = log_sum + log_weight if pairs.alike else torch.logaddexp(positive, log_sum + log_weight)
        return torch.logaddexp(banked, scores.on_rows), positive

    def row_weights(self) -> Tensor:
        """(m,): how often the loss of a banked row counts; 0: it is not in use."""
        m = min(self.span, len(self.queries))
        return (self.absent[:m, 0] == 0) * self.log_weights.repeat_interleave(self.block)[:m].exp()

    def of_mean(self, pairs: Pairs) -> Tensor:
        """What the mean that columns of a micro-batch are relative to adds to all scores of the banked rows, (m,)."""
        rows = self.queries[: self.span]
        if pairs.mean is None:
            return self.positive.new_zeros(len(rows))
        mean = pairs.mean[None] / pairs.still_temperature
        return Product.apply(mean, rows, mean.new_zeros(()), None, None, None)[0]

    # Entries come and go ---------------------------------------------------------------------------------------------

    def fit(self, dim: int, hard_negatives: int, guide: int | None = None) -> None:
        """Make room for that many hard negatives per entry, where data has pairs and tuples; what is stored stays.

        ``guide`` is the size g of the embeddings that a guide gives beside them; 0: there is none.

        Raises:
            ValueError: for embeddings of another size than d, and for a guide that comes, goes or changes its size.
        """
        if dim != self.dim:
            raise ValueError(f"embeddings of size {dim} do not fit a bank of size {self.dim}: make one for each size")
        known = 0 if self.guide is None else self.guide.columns.shape[2]
        if guide not in (None, known):
            if self.pairs:
                said = f"a guide's embeddings of size {guide} do not fit a bank with those of size {known} (0: none)"
                raise ValueError(f"{said}: begin with an empty bank")
            self.guide = _GuideRing(self, guide) if guide else None
        more = 1 + hard_negatives - self.columns.shape[1]
        if more > 0:
            if self.guide is not None:
                self.guide.columns = nn.functional.pad(self.guide.columns, (0, 0, 0, more))
            self.columns = nn.functional.pad(self.columns, (0, 0, 0, more))
            self.ids = nn.functional.pad(self.ids, (0, more), value=NO_ID)
            self.absent = nn.functional.pad(self.absent, (0, more), value=self.low)

    @torch.no_grad()
    def enqueue(
        self,
        queries: Tensor,
        passages: Tensor,
        negatives: Tensor | None = None,
        query_ids: Tensor | None = None,
        passage_ids: Tensor | None = None,
        negative_ids: Tensor | None = None,
    ) -> None:
        """Append pairs without a loss: (n, d), (n, d), (n, h, d), and int64 ids (n,), (n,), (n, h) where there are any.

        Raises:
            ValueError: for a shape that does not fit.
        """
        ids = Ids(query_ids, passage_ids, negative_ids)
        check_embeddings(queries, passages, negatives, ids)
        columns = passages[:, None] if negatives is None else torch.cat([passages[:, None], negatives], dim=1)
        self.fit(queries.shape[1], columns.shape[1] - 1, 0)
        pairs = Pairs.of(queries.to(self.positive), columns.to(self.positive), ids)
        pairs = pairs._replace(temperature=self.temperature)
        self.append(pairs, self.scores(pairs), self.greatest(pairs).isfinite())

    def greatest(self, pairs: Pairs) -> Tensor:
        """Scalar: the largest magnitudes of the embeddings in the bank's dtype; not finite where one of them is not."""
        queries, columns = (x.detach().to(self.columns.dtype).abs().amax() for x in (pairs.queries, pairs.columns))
        return queries.to(self.positive.dtype) + columns

    @torch.no_grad()
    def append(self, pairs: Pairs, scores: Scores, finite: Tensor, origin: Tensor | None = None) -> None:
        """Let a micro-batch into the ring, in place, and its scores of just now into the table; the oldest make room.

        Of a micro-batch larger than the bank the last pairs stay, of hard negatives as many as there is room for. Where
        ``finite``, a bool scalar on the bank's device, is False, the entries hold zeros and are never used.
        """
        end = self.pairs + len(pairs.queries)
        overwritten = -(-(end - self.bank_size) // self.block)
        past_limit = min(round((end - self.limit) / self.block), self._update_began // self.block)
        forgotten = self._forget(max(self.first, self.block * max(overwritten, past_limit)))
        runs = list(self._runs(max(self.first, self.pairs), end))
        sums = self._extend_sums(scores, runs, forgotten, finite) if len(self.queries) else None
        own_sum = None
        if pairs.hardness is not None:
            off = pairs.hardness.off_own(pairs.of_mean(pairs.queries / pairs.temperature))
            own = scores.own.diagonal(dim1=0, dim2=1)[1 : self.columns.shape[1]]  # those that there is room for
            own_sum = torch.where(finite, own.logsumexp(0).clamp_min(self.low) - off, self.low)
        width = min(pairs.columns.shape[1], self.columns.shape[1])
        columns, queries, positive = (
            torch.where(finite, x, 0) for x in (pairs.columns, pairs.queries, scores.positive)
        )
        for _, slots, at in runs:
            self.columns[slots, :width] = columns[at, :width].to(self.columns)
            self.ids[:, slots] = NO_ID
            self.ids[:, slots, :width] = pairs.ids[:, at, :width]
            self.absent[slots] = self.low
            self.absent[slots, :width] = torch.where(finite, self.absent.new_zeros(()), self.low)
            if pairs.guide is not None and self.guide is not None:
                self.guide.put(pairs.guide, at, slots, width)
            if sums is not None:
                self.queries[slots], self.positive[slots] = queries[at].to(self.queries), positive[at]
                weighted = sums[:, at] + self.log_weights[:, None]
                self.log_sums[:, slots], self.log_sum[slots] = sums[:, at], weighted.logsumexp(0)
                if own_sum is not None:
                    self.own_sum[slots] = own_sum[at]
                if origin is not None:
                    self.origins[-(-slots.start // self.note) : -(-slots.stop // self.note)] = origin
        self.pairs = end

    def _extend_sums(
        self, scores: Scores, runs: list[tuple[slice, slice, slice]], forgotten: list[slice], finite: Tensor
    ) -> Tensor:
        """Add new columns to the sums of old rows; returns (blocks, n), the sums of the new rows."""
        (n, width), m = scores.of_rows.shape[:2], self.span
        room, own = min(width, self.columns.shape[1]), scores.own.clone()
        (own if self._penalties else own[:, :, :1]).diagonal(dim1=0, dim2=1).fill_(self.low)
        sums = self.log_sums.new_full((len(self.log_sums), n), self.low)
        sums[: m // self.block] = scores.by_block.T
        for blocks in forgotten:
            sums[blocks] = self.low
        for blocks, _, at in runs:
            count = blocks.stop - blocks.start
            new = own[:, at, :room].reshape(n, count, -1).logsumexp(2).T
            sums[blocks] = torch.logaddexp(sums[blocks], new)
            old = scores.on_rows[None]
            if count > 1 or room < width or at != slice(0, n):
                old = scores.of_rows[at, :room].reshape(count, -1, m).logsumexp(1)
            old = torch.where(finite, old, self.low)
            for stored, more in ((self.log_sums[blocks, :m], old), (self.log_sum[:m], old.logsumexp(0))):
                torch.logaddexp(stored, more, out=stored)
        return torch.where(finite, sums, self.low)

    def _runs(self, first: int, end: int) -> Iterator[tuple[slice, slice, slice]]:
        """Blocks, slots and rows of the micro-batch of pairs ``first`` to ``end``: whole blocks in a row, or in one."""
        while first < end:
            slot, inside = first % self.slots, first % self.block
            stop = min(end - end % self.block, first - slot + self.slots)
            if inside or stop <= first:
                stop = min(end, first - inside + self.block)
            blocks = slice(slot // self.block, -(-(slot + stop - first) // self.block))
            yield blocks, slice(slot, slot + stop - first), slice(first - self.pairs, stop - self.pairs)
            first = stop

    @torch.no_grad()
    def _forget(self, first: int) -> list[slice]:
        """Leave the blocks before pair ``first`` out of rows and columns; returns where in the ring they are."""
        if first == self.first:
            return []
        forgotten = [blocks for blocks, *_ in self._runs(self.first, min(first, self.pairs))]
        for blocks in forgotten:
            self.absent[blocks.start * self.block : blocks.stop * self.block] = self.low
            self.log_sums[blocks] = self.low
            self.log_weights[blocks] = 0
        self._sum_up()
        self.first = first
        self._update_ends = [pairs for pairs in self._update_ends if pairs > first]
        return forgotten

    def _sum_up(self) -> None:
        torch.logsumexp(self.log_sums + self.log_weights[:, None], 0, out=self.log_sum)

    @torch.no_grad()
    def weigh(self, log_weight: Callable[[int], float]) -> None:
        """Let what is in use count as its age says, in pairs since its update began; a block under way counts once.

        Of an update that is partly forgotten, the age is that of the oldest pair that is left.
        """
        for first in range(self.first, self.pairs - self.block + 1, self.block):
            began = max((end for end in self._update_ends if end <= first), default=self.first)
            self.log_weights[first % self.slots // self.block] = log_weight(self.pairs - began)
        self._sum_up()

    # Updates and ages ------------------------------------------------------------------------------------------------

    def end_update(self) -> None:
        """Say that the encoder changed: what comes next belongs to another update."""
        self.updates += 1
        self.encoder_moved()
        if self.pairs > self.first:
            self._update_ends.append(self.pairs)

    def encoder_moved(self) -> None:
        """Say that the entries so far are of an older encoder, and may retire, though no update has ended."""
        self._update_began = self.pairs

    def retire_all(self) -> None:
        """Leave every entry out from now on, those of the present update included."""
        self._forget(self.pairs)
        self.encoder_moved()

    def get_extra_state(self) -> Tensor:
        """The counters, int64, on the CPU: reading them never waits for a device."""
        counts = [self.bank_size, self.pairs, self.first, self.limit, self.updates, self._update_began]
        return torch.tensor(counts + self._update_ends)

    def set_extra_state(self, state: Tensor) -> None:
        _, self.pairs, self.first, self.limit, self.updates, self._update_began, *self._update_ends = state.tolist()


class _GuideRing(nn.Module):
    """What a guide sees in the entries of a bank, in the same slots; as in `Guided`."""

    queries: Tensor  # (m, g), or (0, g) without a query bank
    columns: Tensor  # (m, 1 + h, g)
    ceiling: Tensor  # (m,)

    def __init__(self, bank: MemoryBank, size: int) -> None:
        super().__init__()
        self.register_buffer("queries", bank.queries.new_zeros(len(bank.queries), size))
        self.register_buffer("columns", bank.columns.new_zeros(*bank.columns.shape[:2], size))
        self.register_buffer("ceiling", torch.zeros_like(bank.positive))

    def rejected(self, local: Guided, m: int) -> tuple[Tensor, Tensor]:
        """Which of the first m banked columns are no negatives of local rows, bool (n, m (1 + h)); and which local
        columns are none of banked rows, bool (n (1 + h), m)."""
        none = local.ceiling.new_zeros(())
        for_rows = Product.apply(local.queries, self.columns[:m].flatten(0, 1), none, None, None, None)
        for_banked = Product.apply(local.columns.flatten(0, 1), self.queries[:m], none, None, None, None)
        return for_rows > local.ceiling[:, None], for_banked > self.ceiling[:m]

    def put(self, local: Guided, at: slice, slots: slice, width: int) -> None:
        """Write rows of a micro-batch, with ``width`` columns each."""
        self.columns[slots, :width] = local.columns[at, :width].to(self.columns)
        if len(self.queries):
            self.queries[slots], self.ceiling[slots] = local.queries[at].to(self.queries), local.ceiling[at]


def check_bank_sizes(bank_size: int, query_bank_size: int | None, least: int = 0) -> None:
    """Refuse sizes that there are no banks of, by a ConfigError."""
    if not isinstance(bank_size, int) or bank_size < least:
        raise ConfigError(f"bank_size must be a whole number of at least {least}, got {bank_size!r}")
    if query_bank_size not in (None, 0, bank_size):
        raise ConfigError(f"query_bank_size must be 0 (no query bank) or {bank_size}, got {query_bank_size!r}")
