"""The memory bank: a ring buffer of past pairs, and the log-sums of its queries over its documents.

The bank x bank block of the score matrix has no gradient, so it enters the loss as one number per
banked query: the logsumexp of its logits over the bank's negatives. `MemoryBank` keeps these
numbers exact without computing the block again. A table has one log-sum for each banked query and
each block of documents. A new query was scored against the old documents as a local row; old
queries were scored against the new documents as banked rows. The ring overwrites a whole block at a
time, so forgetting documents means resetting one row of the table. Nothing is ever subtracted,
and no value is read on the host.

The bank stores embeddings as they are: it normalises nothing and encodes no text.

Source: Kim, Lee and Kang, NeurIPS 2024 (arXiv 2406.12356), section 3.2; the table of log-sums is
ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from contaccum.bank.false_negatives import is_same_text
from contaccum.bank.logits import (
    IDS_PER_TEXT,
    MASKED,
    NO_ID,
    FalseNegativeRule,
    GuideEmbeddings,
    Pairs,
    masked_logits,
)
from contaccum.bank.micro_batch import (
    TextIds,
    collect_micro_batch,
    join_documents,
    make_pairs,
)
from contaccum.bank.settings import check_bank_sizes

BLOCKS_PER_BANK = 32
PAIRS_PER_MEAN = 64
"""One mean of the query tower is stored for at most so many pairs."""


class LogitBlocks(NamedTuple):
    """The logits of a micro-batch: three blocks of the score matrix, and log-sums of one."""

    in_batch: Tensor  # (n, n, 1 + h), local queries against local documents
    against_bank: Tensor  # (n, m, 1 + h), local queries against banked documents
    from_bank: Tensor  # (m, n, 1 + h), banked queries against local documents; m = 0 without any
    against_bank_sums: Tensor  # (n, blocks), logsumexp of against_bank over each block of the bank


class MemoryBank(nn.Module):
    """Ring buffer of the last ``bank_size`` pairs, overwritten a block at a time.

    A block has the largest power of two of pairs that is at most ``bank_size`` / 32, and at least
    one. A full bank uses at most ``bank_size`` rows and at least 31/32 of them; it uses all of them
    if micro-batches are whole blocks, of which ``bank_size`` is a multiple. Pairs are numbered from
    the start of training; pair i lies in slot i % num_slots.

    Args:
        bank_size: rows m, at least 1.
        dim: the embedding size d.
        hard_negatives: hard negatives h per pair. A micro-batch may bring fewer.
        dtype: dtype of embeddings and log-sums, float32 or float64.
        query_bank_size: None for as many queries as passages, or 0 for a bank of passages alone.
        device: the device of the buffers.
        temperature: divides similarities in `enqueue`.

    Attributes:
        total_enqueued: pairs enqueued since the start of training.
        oldest_in_use: number of the oldest pair that is in use.

    Raises:
        ConfigError (a ValueError): for sizes that no bank can have.
    """

    queries: Tensor  # (m, d), or (0, d) without a query bank
    documents: Tensor  # (m, 1 + h, d): a passage, then its hard negatives
    query_ids: Tensor  # int64 (IDS_PER_TEXT, m)
    document_ids: Tensor  # int64 (IDS_PER_TEXT, m, 1 + h)
    positive_logits: Tensor  # (m,), of each query and its own passage
    valid: Tensor  # bool (m, 1 + h), whether a document is in use
    block_log_sums: Tensor  # (blocks, m), logsumexp of each query over the negatives in each block
    total_log_sums: Tensor  # (m,), logsumexp of `block_log_sums` over the blocks
    query_means: Tensor  # (m / pairs_per_mean, d), of the query tower when pairs were stored

    def __init__(
        self,
        bank_size: int,
        dim: int,
        hard_negatives: int = 0,
        dtype: torch.dtype = torch.float32,
        query_bank_size: int | None = None,
        device: torch.device | str | None = None,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        check_bank_sizes(bank_size, query_bank_size, least=1)
        self.bank_size = bank_size
        self.dim = dim
        self.temperature = temperature
        largest_block = max(bank_size // BLOCKS_PER_BANK, 1)
        self.block_size = 1 << (largest_block.bit_length() - 1)
        self.num_blocks = -(-bank_size // self.block_size)
        self.num_slots = self.num_blocks * self.block_size
        self.pairs_per_mean = min(self.block_size, PAIRS_PER_MEAN)
        num_rows = 0 if query_bank_size == 0 else self.num_slots
        num_documents = 1 + hard_negatives

        def add(name: str, shape: tuple[int, ...], value: float, dtype: torch.dtype) -> None:
            self.register_buffer(name, torch.full(shape, value, dtype=dtype, device=device))

        add("queries", (num_rows, dim), 0, dtype)
        add("documents", (self.num_slots, num_documents, dim), 0, dtype)
        add("query_ids", (IDS_PER_TEXT, self.num_slots), NO_ID, torch.int64)
        add("document_ids", (IDS_PER_TEXT, self.num_slots, num_documents), NO_ID, torch.int64)
        add("positive_logits", (num_rows,), 0, dtype)
        add("valid", (self.num_slots, num_documents), False, torch.bool)
        add("block_log_sums", (self.num_blocks, num_rows), MASKED, dtype)
        add("total_log_sums", (num_rows,), MASKED, dtype)
        add("query_means", (num_rows // self.pairs_per_mean, dim), 0, dtype)
        self.guide: GuideRing | None = None
        self.total_enqueued = 0
        self.oldest_in_use = 0

    @property
    def passages(self) -> Tensor:
        """(m, d), a view; drift compensation stores them relative to the mean of their tower."""
        return self.documents[:, 0]

    @property
    def negatives(self) -> Tensor:
        """(m, h, d), a view."""
        return self.documents[:, 1:]

    @property
    def fill(self) -> int:
        """The number of rows that hold a pair, retired ones included."""
        return min(self.total_enqueued, self.bank_size)

    @property
    def in_use(self) -> int:
        """The number of pairs that are neither overwritten nor retired."""
        return max(self.total_enqueued - self.oldest_in_use, 0)

    @property
    def has_queries(self) -> bool:
        """True if the bank stores queries."""
        return len(self.queries) > 0

    @property
    def num_used_slots(self) -> int:
        """The number of slots that have ever held a pair, in whole blocks and at least one."""
        used_blocks = -(-max(self.total_enqueued, 1) // self.block_size)
        return min(used_blocks, self.num_blocks) * self.block_size

    @property
    def pairs(self) -> Pairs:
        """The pairs of all slots that were ever used, as views; those not in use are not valid."""
        used = self.num_used_slots
        guide = None
        if self.guide is not None:
            guide = self.guide.embeddings(used)
        return Pairs(
            queries=self.queries[:used],
            documents=self.documents[:used],
            query_ids=self.query_ids[:, :used],
            document_ids=self.document_ids[:, :used],
            positive_logits=self.positive_logits[:used],
            valid=self.valid[:used],
            guide=guide,
        )

    @property
    def log_sums(self) -> Tensor:
        """(m,), logsumexp of each banked query's logits over all banked negatives in use."""
        return self.total_log_sums[: self.num_used_slots]

    def fit(self, dim: int, hard_negatives: int, guide_dim: int | None = None) -> None:
        """Make room for that many hard negatives per pair; what is stored stays.

        Args:
            guide_dim: size g of the embeddings of a guide, 0 without one, None if that is not
                known.

        Raises:
            ValueError: for embeddings of another size than d, or if a guide comes, goes or changes
                its size while pairs are stored.
        """
        if dim != self.dim:
            raise ValueError(
                f"embeddings of size {dim} do not fit a bank of size {self.dim}: "
                "make one for each size"
            )
        self._fit_guide(guide_dim)
        missing = 1 + hard_negatives - self.documents.shape[1]
        if missing <= 0:
            return
        pad = nn.functional.pad
        self.documents = pad(self.documents, (0, 0, 0, missing))
        self.document_ids = pad(self.document_ids, (0, missing), value=NO_ID)
        self.valid = pad(self.valid, (0, missing))
        if self.guide is not None:
            self.guide.documents = pad(self.guide.documents, (0, 0, 0, missing))

    def _fit_guide(self, guide_dim: int | None) -> None:
        present_dim = 0 if self.guide is None else self.guide.documents.shape[2]
        if guide_dim in (None, present_dim):
            return
        if self.total_enqueued:
            raise ValueError(
                f"a guide's embeddings of size {guide_dim} do not fit a bank with those of size "
                f"{present_dim} (0: none): begin with an empty bank"
            )
        self.guide = GuideRing(self, guide_dim) if guide_dim else None

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
        """Append pairs without a loss: (n, d), (n, d), (n, h, d), and int64 ids (n,), (n,), (n, h).

        Raises:
            ValueError: for a shape that does not fit.
        """
        embeddings = [queries, passages]
        if negatives is not None:
            embeddings.append(negatives)
        ids = TextIds(query_ids, passage_ids, negative_ids)
        batch = collect_micro_batch(embeddings, ids)
        queries = batch.embeddings[0].to(self.documents)
        documents = join_documents(batch.embeddings).to(self.documents)
        self.fit(queries.shape[1], documents.shape[1] - 1, 0)
        local = make_pairs(queries, documents, batch, self.temperature)
        blocks = score_blocks(local, self, self.temperature, [is_same_text])
        largest = queries.abs().amax() + documents.abs().amax()
        self.append(local, blocks, largest.isfinite())

    @torch.no_grad()
    def append(
        self,
        local: Pairs,
        blocks: LogitBlocks,
        is_finite: Tensor,
        first_kept: int = 0,
        query_mean: Tensor | None = None,
    ) -> None:
        """Store a micro-batch in place, and overwrite the oldest blocks.

        Of a micro-batch larger than the bank the last pairs stay, of hard negatives as many as the
        bank has room for. Pairs that would fill up a retired block are not stored.

        Args:
            is_finite: bool scalar on the bank's device; if it is False, the pairs are stored as
                zeros that are not valid.
            first_kept: retire pairs with a number below this one as well.
            query_mean: (d,), present mean of the query tower.
        """
        end = self.total_enqueued + len(local.queries)
        used_before = self.num_used_slots
        self.retire(max(first_kept, end - self.bank_size))
        first = min(max(self.total_enqueued, self.oldest_in_use), end)
        if self.has_queries:
            self._extend_table(local, blocks, is_finite, first, end, used_before)
        self._write_pairs(local, is_finite, first, end)
        if query_mean is not None and self.has_queries:
            self._write_query_mean(query_mean, first, end)
        self.total_enqueued = end

    def _extend_table(
        self,
        local: Pairs,
        blocks: LogitBlocks,
        is_finite: Tensor,
        first: int,
        end: int,
        used: int,
    ) -> None:
        """Write a column of the table for each new query, and add the new documents to all columns.

        ``used`` is the number of slots that the logits of ``blocks`` cover.
        """
        num_documents = min(blocks.in_batch.shape[2], self.documents.shape[1])
        num_used_blocks = used // self.block_size

        # New queries over the old documents, without the blocks that have just been forgotten.
        new_columns = self.block_log_sums.new_full((self.num_blocks, len(local.queries)), MASKED)
        in_use = self.valid.unflatten(0, (self.num_blocks, -1)).flatten(1).any(1)[:num_used_blocks]
        old_sums = blocks.against_bank_sums.T
        new_columns[:num_used_blocks] = torch.where(in_use[:, None], old_sums, MASKED)

        in_batch = blocks.in_batch[:, :, :num_documents].clone()
        in_batch[:, :, 0].fill_diagonal_(MASKED)  # a row's positive is none of its negatives
        from_bank = blocks.from_bank[:, :, :num_documents]
        for block, rows in self._blocks_of(first, end):
            local_sums = in_batch[:, rows].flatten(1).logsumexp(1)
            new_columns[block] = torch.logaddexp(new_columns[block], local_sums)
            banked_sums = from_bank[:, rows].flatten(1).logsumexp(1)
            banked_sums = torch.where(is_finite, banked_sums, MASKED)
            for stored_sums in (self.block_log_sums[block, :used], self.total_log_sums[:used]):
                stored_sums.copy_(torch.logaddexp(stored_sums, banked_sums))
        kept = slice(first - self.total_enqueued, None)
        slots = self._slots(first, end)
        new_columns = torch.where(is_finite, new_columns[:, kept], MASKED)
        self.block_log_sums[:, slots] = new_columns
        self.total_log_sums[slots] = new_columns.logsumexp(0)

    def _write_pairs(self, local: Pairs, is_finite: Tensor, first: int, end: int) -> None:
        kept = slice(first - self.total_enqueued, None)
        slots = self._slots(first, end)
        width = min(local.documents.shape[1], self.documents.shape[1])
        self.documents[slots, :width] = torch.where(is_finite, local.documents[kept, :width], 0)
        self.query_ids[:, slots] = local.query_ids[:, kept]
        self.document_ids[:, slots] = NO_ID
        self.document_ids[:, slots, :width] = local.document_ids[:, kept, :width]
        self.valid[slots] = False
        self.valid[slots, :width] = local.valid[kept, :width] & is_finite
        if self.has_queries:
            self.queries[slots] = torch.where(is_finite, local.queries[kept], 0)
            self.positive_logits[slots] = torch.where(is_finite, local.positive_logits[kept], 0)
        if self.guide is not None and local.guide is not None:
            self.guide.write(local.guide, kept, slots, width)

    def _write_query_mean(self, query_mean: Tensor, first: int, end: int) -> None:
        """Store the mean for every run of pairs that begins among the new ones."""
        first_run = -(-first // self.pairs_per_mean)
        end_run = -(-end // self.pairs_per_mean)
        runs = torch.arange(first_run, end_run, device=self.query_means.device)
        self.query_means[runs % len(self.query_means)] = query_mean

    @torch.no_grad()
    def retire(self, first_kept: int) -> None:
        """Forget every block that holds a pair with a number below ``first_kept``.

        With blocks of 2 pairs, for example, ``retire(3)`` forgets pairs 0 to 3, and pair 4 is the
        oldest.
        """
        end_block = -(-first_kept // self.block_size)
        self._forget_blocks(end_block)
        self.oldest_in_use = max(self.oldest_in_use, end_block * self.block_size)

    def retire_all(self) -> None:
        """Forget every pair that is stored now."""
        self._forget_blocks(-(-self.total_enqueued // self.block_size))
        self.oldest_in_use = self.total_enqueued

    def _forget_blocks(self, end_block: int) -> None:
        """Forget all blocks in use before ``end_block``, counted from the start of training."""
        first_block = self.oldest_in_use // self.block_size
        if end_block <= first_block:
            return
        for block in range(first_block, min(end_block, first_block + self.num_blocks)):
            index = block % self.num_blocks
            start = index * self.block_size
            self.valid[start : start + self.block_size] = False
            self.block_log_sums[index] = MASKED
        self.total_log_sums.copy_(self.block_log_sums.logsumexp(0))

    def _slots(self, first: int, end: int) -> Tensor:
        """Return the slots of pairs ``first`` to ``end``."""
        return torch.arange(first, end, device=self.documents.device) % self.num_slots

    def _blocks_of(self, first: int, end: int) -> Iterator[tuple[int, slice]]:
        """Split pairs ``first`` to ``end`` at the bounds of blocks.

        Yields:
            The index of a block, and the rows of the micro-batch whose documents belong to it.
        """
        while first < end:
            stop = min(end, (first // self.block_size + 1) * self.block_size)
            rows = slice(first - self.total_enqueued, stop - self.total_enqueued)
            yield first // self.block_size % self.num_blocks, rows
            first = stop

    def get_extra_state(self) -> Tensor:
        """Return the counters, int64, on the CPU; reading them never waits for a device."""
        return torch.tensor([self.bank_size, self.total_enqueued, self.oldest_in_use])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore what `get_extra_state` returned."""
        _, self.total_enqueued, self.oldest_in_use = state.tolist()


def score_blocks(
    local: Pairs,
    bank: MemoryBank | None,
    temperature: float,
    rules: Sequence[FalseNegativeRule],
    query_drift: Tensor | None = None,
) -> LogitBlocks:
    """Score a micro-batch against itself and the bank; the other arguments are `masked_logits`'."""
    in_batch = masked_logits(local, local, temperature, rules)
    n, width = local.valid.shape
    against_bank = in_batch.new_zeros(n, 0, width)
    against_bank_sums = in_batch.new_zeros(n, 0)
    from_bank = in_batch.new_zeros(0, n, width)
    if bank is not None:
        stored = bank.pairs
        against_bank = masked_logits(local, stored, temperature, rules)
        by_block = against_bank.unflatten(1, (-1, bank.block_size)).flatten(2)
        against_bank_sums = by_block.logsumexp(2)
        if bank.has_queries:
            from_bank = masked_logits(stored, local, temperature, rules, query_drift)
    return LogitBlocks(in_batch, against_bank, from_bank, against_bank_sums)


class GuideRing(nn.Module):
    """A guide's embeddings of the pairs in a bank, in the same slots; see `GuideEmbeddings`."""

    queries: Tensor  # (m, g), or (0, g) without a query bank
    documents: Tensor  # (m, 1 + h, g)
    ceilings: Tensor  # (m,)

    def __init__(self, bank: MemoryBank, guide_dim: int) -> None:
        super().__init__()
        documents = bank.documents.new_zeros(*bank.documents.shape[:2], guide_dim)
        self.register_buffer("queries", bank.queries.new_zeros(len(bank.queries), guide_dim))
        self.register_buffer("documents", documents)
        self.register_buffer("ceilings", torch.zeros_like(bank.positive_logits))

    def embeddings(self, used: int) -> GuideEmbeddings:
        """Return the embeddings of the first ``used`` slots, as views."""
        return GuideEmbeddings(self.queries[:used], self.documents[:used], self.ceilings[:used])

    def write(self, local: GuideEmbeddings, kept: slice, slots: Tensor, width: int) -> None:
        """Write rows of a micro-batch, with ``width`` documents each."""
        self.documents[slots, :width] = local.documents[kept, :width].to(self.documents)
        if len(self.queries):
            self.queries[slots] = local.queries[kept].to(self.queries)
            self.ceilings[slots] = local.ceilings[kept].to(self.ceilings)
