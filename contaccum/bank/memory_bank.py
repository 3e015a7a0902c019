"""A ring buffer of past pairs, and the log-sums of its queries over its documents.

The loss of a banked query i depends on its scores s(i, j) against all banked documents j. They have
no gradient, so one number per query is enough, its log-sum

    L_i = logsumexp of s(i, j) / temperature over the banked negatives j of query i.

`MemoryBank` keeps L_i exact without computing any score again. A table, with a row per block of the
ring and a column per banked query, holds the logsumexp of the query's logits over the documents of
the block. L_i is the logsumexp of a column, and is kept beside the table. The loss computes all
these logits anyway: it scores new queries against old documents, and old queries against new
documents. Old pairs retire a whole block at a time, which resets one row of the table and sums the
columns anew. Nothing is ever subtracted, which would lose precision. The host never waits for a
GPU.

Letters in shapes: n pairs and h hard negatives per query in the micro-batch; M slots and b hard
negatives per query in the bank, Q slots for its queries (M, or 0 without a query bank), m slots
that are filled (all of the blocks that have been reached, also if some are empty or have retired);
d the embedding size. A pair's documents are its passage, then its hard negatives.

Source: Kim, Lee and Kang, NeurIPS 2024 (arXiv 2406.12356), section 3.2; the table is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from contaccum.bank.ids import IDS_PER_TEXT, NO_ID, PositivesTable
from contaccum.bank.logits import MASKED, Pairs, masked_logits
from contaccum.settings import InfoNCESettings

MIN_BLOCKS = 32
"""Minimum number of blocks, so that a block that retires is at most 1/32 of a full bank.

A bank with fewer pairs has one block per pair.
"""

PAIRS_PER_MEAN = 64
"""Maximum size of a group: consecutive pairs that share one stored mean of the query embeddings.

`contaccum.bank.drift` computes from the mean how far banked queries have drifted.
"""


class LogitQuadrants(NamedTuple):
    """Logits of a micro-batch: three quadrants of the score matrix, and their banked pairs."""

    banked: Pairs | None  # the bank's pairs; None without a bank
    in_batch: Tensor  # (n, n, 1 + h), local queries against local documents, own positives masked
    against_bank: Tensor  # (n, m, 1 + b), local queries against banked documents
    from_bank: Tensor  # (m, n, 1 + h), banked queries against local documents, or (0, n, 1 + h)
    against_bank_sums: Tensor  # (n, filled blocks), logsumexp of against_bank over each block


def score_quadrants(
    local: Pairs,
    bank: MemoryBank | None,
    settings: InfoNCESettings,
    positives: PositivesTable | None = None,
) -> LogitQuadrants:
    """Score three quadrants of the score matrix (see `contaccum.bank.info_nce`)."""
    in_batch = masked_logits(local, local, settings, positives)
    n, num_documents = in_batch.shape[1:]
    if bank is None:
        against_bank = in_batch.new_zeros(n, 0, num_documents)
        from_bank = in_batch.new_zeros(0, n, num_documents)
        return LogitQuadrants(None, in_batch, against_bank, from_bank, in_batch.new_zeros(n, 0))
    banked = bank.pairs
    against_bank = masked_logits(local, banked, settings, positives)
    # (n, filled blocks, block_size * (1 + b))
    logits_by_block = against_bank.unflatten(1, (-1, bank.block_size)).flatten(2)
    if bank.has_queries:
        from_bank = masked_logits(banked, local, settings, positives)
    else:
        from_bank = in_batch.new_zeros(0, n, num_documents)
    return LogitQuadrants(banked, in_batch, against_bank, from_bank, logits_by_block.logsumexp(2))


class MemoryBank(nn.Module):
    """Ring buffer of the last ``bank_size`` pairs, which retire a block at a time.

    The number of pairs in a block is the largest power of two up to ``bank_size`` / 32, at least 1;
    num_slots = num_blocks * block_size is ``bank_size``, rounded up to whole blocks.
    A full bank has at most ``bank_size`` pairs and at least 31/32 of them. It has all of them if
    ``bank_size`` and the sizes of all micro-batches are multiples of the block size.

    Pairs are numbered from the start of training. Pair i is at the position i - total_enqueued of
    the new micro-batch, in the slot i % num_slots, and in the block i // block_size, whose index in
    the ring is modulo num_blocks. A pair is in use until it retires. A document is valid (takes
    part in the loss) if its pair is in use and its micro-batch was finite.

    The bank stores embeddings as they are given. With drift compensation, `BankedInfoNCE` passes
    documents minus the passage mean (see `contaccum.bank.drift`). Consecutive queries, a group of
    at most `PAIRS_PER_MEAN`, share one stored mean of the query tower.

    Args:
        bank_size: maximum number of pairs in use, at least 1.
        dim: the embedding size d.
        hard_negatives: hard negatives b per pair; `ensure_shape` makes room for more.
        dtype: dtype of embeddings and log-sums, float32 or float64.
        query_bank_size: None for as many queries as passages, or 0 for a bank of passages alone.
        temperature: the temperature of the logits that are stored; part of the state.

    Attributes:
        total_enqueued: number of pairs enqueued since the start of training.
        oldest_in_use: pairs with smaller numbers have retired. Blocks retire as a whole, so it can
            exceed ``total_enqueued``: if pair 520 must go, and a block has 16 pairs, pairs up to
            527 retire. New pairs below it are counted, but not stored.
    """

    queries: Tensor  # (Q, d)
    documents: Tensor  # (M, 1 + b, d): a passage, then its hard negatives
    query_ids: Tensor  # int64 (IDS_PER_TEXT, M)
    document_ids: Tensor  # int64 (IDS_PER_TEXT, M, 1 + b)
    positive_logits: Tensor  # (Q,), logit of each query and its own passage
    valid: Tensor  # bool (M, 1 + b)
    block_log_sums: Tensor  # (blocks, Q), logsumexp of each query over the negatives of each block
    total_log_sums: Tensor  # (Q,), logsumexp of `block_log_sums` over the blocks
    query_means: Tensor  # (Q / pairs_per_mean, d), the query mean at the start of each group

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
        self.bank_size = bank_size
        self.dim = dim
        self.temperature = temperature
        max_block_size = max(bank_size // MIN_BLOCKS, 1)
        # Rounded down to a power of two, as micro-batches usually are: they then end with a block.
        self.block_size = 1 << (max_block_size.bit_length() - 1)
        self.num_blocks = _divide_rounding_up(bank_size, self.block_size)
        self.num_slots = self.num_blocks * self.block_size
        self.pairs_per_mean = min(self.block_size, PAIRS_PER_MEAN)
        num_queries = 0 if query_bank_size == 0 else self.num_slots
        num_documents = 1 + hard_negatives

        def add_buffer(name: str, shape: tuple[int, ...], value: float, dtype: torch.dtype) -> None:
            self.register_buffer(name, torch.full(shape, value, dtype=dtype, device=device))

        add_buffer("queries", (num_queries, dim), 0, dtype)
        add_buffer("documents", (self.num_slots, num_documents, dim), 0, dtype)
        add_buffer("query_ids", (IDS_PER_TEXT, self.num_slots), NO_ID, torch.int64)
        ids_shape = (IDS_PER_TEXT, self.num_slots, num_documents)
        add_buffer("document_ids", ids_shape, NO_ID, torch.int64)
        add_buffer("positive_logits", (num_queries,), 0, dtype)
        add_buffer("valid", (self.num_slots, num_documents), False, torch.bool)
        add_buffer("block_log_sums", (self.num_blocks, num_queries), MASKED, dtype)
        add_buffer("total_log_sums", (num_queries,), MASKED, dtype)
        add_buffer("query_means", (num_queries // self.pairs_per_mean, dim), 0, dtype)
        self.total_enqueued = 0
        self.oldest_in_use = 0

    @property
    def pairs_in_use(self) -> range:
        """The numbers of the stored pairs that have not retired."""
        return range(self.oldest_in_use, self.total_enqueued)

    @property
    def in_use(self) -> int:
        """The number of stored pairs that have not retired, valid or not."""
        return len(self.pairs_in_use)

    @property
    def has_queries(self) -> bool:
        """True if the bank stores queries."""
        return len(self.queries) > 0

    @property
    def num_filled_slots(self) -> int:
        """The number of slots in the blocks that have been reached so far; at least one block."""
        num_filled_blocks = _divide_rounding_up(max(self.total_enqueued, 1), self.block_size)
        return min(num_filled_blocks, self.num_blocks) * self.block_size

    @property
    def pairs(self) -> Pairs:
        """The pairs of the filled slots. Apart from ``invalid``, they are views of the bank."""
        num_slots = self.num_filled_slots
        return Pairs(
            queries=self.queries[:num_slots],
            documents=self.documents[:num_slots],
            query_ids=self.query_ids[:, :num_slots],
            document_ids=self.document_ids[:, :num_slots],
            positive_logits=self.positive_logits[:num_slots],
            invalid=~self.valid[:num_slots],
        )

    @property
    def log_sums(self) -> Tensor:
        """Logsumexp of each filled slot's query over all banked negatives in use."""
        return self.total_log_sums[: self.num_filled_slots]

    def ensure_shape(self, dim: int, hard_negatives: int) -> None:
        """Make room for the hard negatives per pair of the next micro-batch, if there are more.

        Raises:
            ValueError: for an embedding size other than d.
        """
        if dim != self.dim:
            raise ValueError(
                f"embeddings of size {dim} do not fit a bank of size {self.dim}: "
                "make a separate loss or bank for each embedding size"
            )
        missing = 1 + hard_negatives - self.documents.shape[1]
        if missing <= 0:
            return
        self.documents = pad(self.documents, (0, 0, 0, missing))
        self.document_ids = pad(self.document_ids, (0, missing), value=NO_ID)
        self.valid = pad(self.valid, (0, missing))

    @torch.no_grad()
    def append(
        self,
        local: Pairs,
        quadrants: LogitQuadrants,
        not_finite: Tensor,
        oldest_allowed: int = 0,
        query_mean: Tensor | None = None,
    ) -> None:
        """Store a micro-batch in place of the oldest blocks.

        Of a micro-batch larger than the bank, the last pairs are stored. Hard negatives beyond the
        bank's b are dropped. New pairs below ``oldest_in_use`` are not stored.

        Args:
            quadrants: logits of the micro-batch, from `score_quadrants`.
            not_finite: bool scalar on the bank's device; True stores zeros that are not valid.
            oldest_allowed: pairs with a smaller number retire, even if there is room for them.
            query_mean: (d,), the current query mean.
        """
        num_scored_slots = self.num_filled_slots  # m of ``quadrants``
        end = self.total_enqueued + len(local.queries)
        retired_blocks = self.retire_before(max(oldest_allowed, end - self.bank_size))
        first = max(self.total_enqueued, self.oldest_in_use)  # skip new pairs that have retired
        first = min(first, end)  # all of them may have retired; see `oldest_in_use`
        positions = slice(first - self.total_enqueued, None)
        # int64 (pairs to store,)
        slots = torch.arange(first, end, device=self.documents.device) % self.num_slots
        if self.has_queries:
            # The table grows by three kinds of sums: of the old queries over the new documents, and
            # of the new queries over the old and over the new documents. Hard negatives that the
            # bank does not store are not in its log-sums either.
            num_documents = self.documents.shape[1]
            in_batch = quadrants.in_batch[:, :, :num_documents]  # (n, n, <= 1 + b)
            from_bank = quadrants.from_bank[:, :, :num_documents]  # (m, n, <= 1 + b)
            # New queries, old documents: without those that have just retired. (blocks, n)
            new_log_sums = self.block_log_sums.new_full((self.num_blocks, len(in_batch)), MASKED)
            new_log_sums[: num_scored_slots // self.block_size] = quadrants.against_bank_sums.T
            for block in retired_blocks:
                new_log_sums[block] = MASKED
            for block, positions_of_block in self._split_into_blocks(first, end):
                # Old queries, new documents.
                sums = from_bank[:, positions_of_block].flatten(1).logsumexp(1)  # (m,)
                sums = sums.masked_fill(not_finite, MASKED)
                for log_sums in (self.block_log_sums[block], self.total_log_sums):
                    of_old_queries = log_sums[:num_scored_slots]
                    torch.logaddexp(of_old_queries, sums, out=of_old_queries)
                # New queries, new documents.
                sums = in_batch[:, positions_of_block].flatten(1).logsumexp(1)  # (n,)
                torch.logaddexp(new_log_sums[block], sums, out=new_log_sums[block])
            new_log_sums = new_log_sums[:, positions].masked_fill(not_finite, MASKED)
            self.block_log_sums.index_copy_(1, slots, new_log_sums)
            self.total_log_sums.index_copy_(0, slots, new_log_sums.logsumexp(0))
        self._write_pairs(local, not_finite, positions, slots)
        if self.has_queries and query_mean is not None:
            # Every group whose first pair is new gets the mean; see `PAIRS_PER_MEAN`.
            first_group = _divide_rounding_up(first, self.pairs_per_mean)
            end_group = _divide_rounding_up(end, self.pairs_per_mean)
            for group in range(first_group, end_group)[-len(self.query_means) :]:  # one lap at most
                self.query_means[group % len(self.query_means)] = query_mean
        self.total_enqueued = end

    def _write_pairs(
        self, local: Pairs, not_finite: Tensor, positions: slice, slots: Tensor
    ) -> None:
        """Write the pairs of the micro-batch at ``positions`` into their ``slots``, int64."""
        # A stored NaN would reach later gradients, although its softmax is 0: 0 * NaN is NaN.
        documents = local.documents[positions].masked_fill(not_finite, 0)
        document_ids = local.document_ids[:, positions]
        is_valid = (~not_finite).expand(documents.shape[:2])
        num_missing = self.documents.shape[1] - documents.shape[1]
        if num_missing != 0:  # fewer documents than the bank stores, or more
            documents = pad(documents, (0, 0, 0, num_missing))
            document_ids = pad(document_ids, (0, num_missing), value=NO_ID)
            is_valid = pad(is_valid, (0, num_missing))
        self.documents.index_copy_(0, slots, documents)
        self.query_ids.index_copy_(1, slots, local.query_ids[:, positions])
        self.document_ids.index_copy_(1, slots, document_ids)
        self.valid.index_copy_(0, slots, is_valid)
        if self.has_queries:
            queries = local.queries[positions].masked_fill(not_finite, 0)
            positive_logits = local.positive_logits[positions].masked_fill(not_finite, 0)
            self.queries.index_copy_(0, slots, queries)
            self.positive_logits.index_copy_(0, slots, positive_logits)

    @torch.no_grad()
    def retire_before(self, number: int) -> list[int]:
        """Retire every block that holds a pair with a smaller number; return their ring indices.

        With blocks of 2 pairs, ``retire_before(3)`` retires pairs 0 to 3.
        """
        first_block = self.oldest_in_use // self.block_size
        end_block = max(_divide_rounding_up(number, self.block_size), first_block)
        self.oldest_in_use = end_block * self.block_size
        end_of_ring = min(end_block, first_block + self.num_blocks)
        retired = [block % self.num_blocks for block in range(first_block, end_of_ring)]
        for block in retired:
            start = block * self.block_size
            self.valid[start : start + self.block_size] = False
            self.block_log_sums[block] = MASKED
        if retired:
            torch.logsumexp(self.block_log_sums, 0, out=self.total_log_sums)
        return retired

    def _split_into_blocks(self, first: int, end: int) -> Iterator[tuple[int, slice]]:
        """Yield a block's index in the ring, and its positions in the micro-batch, block by block.

        The new pairs have the numbers ``first`` to ``end`` - 1.
        """
        while first < end:
            block = first // self.block_size
            end_of_block = min(end, (block + 1) * self.block_size)
            positions = slice(first - self.total_enqueued, end_of_block - self.total_enqueued)
            yield block % self.num_blocks, positions
            first = end_of_block

    def get_extra_state(self) -> Tensor:
        """Return bank_size and temperature, then the counters, float64, on the CPU."""
        numbers = [self.bank_size, self.temperature, self.total_enqueued, self.oldest_in_use]
        return torch.tensor(numbers, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the counters; `BankedInfoNCE` compares the other numbers."""
        self.total_enqueued, self.oldest_in_use = map(int, state[2:])


def _divide_rounding_up(number: int, divisor: int) -> int:
    return -(-number // divisor)
