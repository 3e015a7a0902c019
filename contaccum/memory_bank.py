"""The memory bank: FIFO ring buffers of past query, passage and hard-negative embeddings, with their ids.

A bank stores and returns; it knows no loss, no similarity and no model. Everything in it is detached, and
everything it needs to continue lies in its ``state_dict``. Letters in shapes: n pairs in a micro-batch, m rows
in the bank (``bank_size``), h hard negatives per query, d the embedding size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from contaccum.shards import WHOLE, Shard

RETIRED_AT_ONCE = 64
"""Pairs that a micro-step retires for their age beside as many as come, at most: bounds its cost when a limit falls."""

NO_ID = torch.iinfo(torch.int64).min
"""The id of an entry that came without one. It never equals anything, itself included."""


class BankEntries(NamedTuple):
    """The filled part of a bank, as views into its storage (m' = rows filled so far, oldest anywhere).

    Row i of ``queries`` came with row ``positives[i]`` of ``passages``. Embeddings of a sharded bank: those kept here.
    """

    queries: Tensor  # (mq', d)
    passages: Tensor  # (m', d)
    negatives: Tensor  # (m', h, d)
    query_ids: Tensor  # (m',) the query that each passage row came with
    passage_ids: Tensor  # (m',)
    negative_ids: Tensor  # (m', h)
    negative_counts: Tensor  # (m',) how many of a row's h hard negatives exist
    positives: Tensor  # (mq',)
    inserted_at: Tensor  # (m',) the micro-step, counted from 0, at which each passage row came
    usable: Tensor  # bool (m',); False: not finite (the row holds zeros), or past the age limit


class MemoryBank(nn.Module):
    """Ring buffers of the last ``bank_size`` (query, passage, hard negatives) entries; the newest overwrite the oldest.

    With a ``limit`` below ``bank_size`` the oldest entries retire before they are overwritten: they keep their rows,
    where ``usable`` is then False. Entries since the last :meth:`end_update` never retire.

    Args:
        bank_size: rows m of the passage bank. 0 gives a bank that accepts entries and keeps none.
        dim: the embedding size d.
        hard_negatives: hard negatives h kept per entry. A micro-batch may bring fewer.
        dtype: storage dtype of the embeddings.
        query_bank_size: rows of the query bank, at most ``bank_size`` (a banked query needs its passage in the
            passage bank). ``None``: as many as ``bank_size``. 0: no queries are kept.
        device: where the buffers live; ``.to()`` moves them.
        shard: the part of the rows whose embeddings are kept here; ids and counts are kept of all.

    Raises:
        ValueError: for sizes that are negative, not whole, or a query bank larger than the passage bank.

    Source: Kim, Lee and Kang, NeurIPS 2024 (arXiv 2406.12356), section 3.2: the query bank M_q and the passage
    bank M_p of N_memory rows each.
    """

    queries: Tensor
    passages: Tensor
    negatives: Tensor
    query_ids: Tensor
    passage_ids: Tensor
    negative_ids: Tensor
    negative_counts: Tensor
    inserted_at: Tensor
    inserted_in: Tensor
    usable: Tensor
    enqueued: Tensor
    micro_steps: Tensor
    updates: Tensor
    counts: Tensor
    shard_of: Tensor

    def __init__(
        self,
        bank_size: int,
        dim: int,
        hard_negatives: int = 0,
        dtype: torch.dtype = torch.float32,
        query_bank_size: int | None = None,
        device: torch.device | str | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        super().__init__()
        query_bank_size = bank_size if query_bank_size is None else query_bank_size
        sizes = {"bank_size": bank_size, "hard_negatives": hard_negatives, "query_bank_size": query_bank_size}
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be a whole number of at least 0, got {value!r}")
        if not isinstance(dim, int) or dim < 1:
            raise ValueError(f"dim must be a whole number of at least 1, got {dim!r}")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point dtype, got {dtype}")
        if query_bank_size > bank_size:
            raise ValueError(
                f"query_bank_size={query_bank_size} is larger than bank_size={bank_size}: a banked query needs the "
                "passage it came with. Raise bank_size or lower query_bank_size."
            )
        self.bank_size, self.dim, self.hard_negatives = bank_size, dim, hard_negatives
        self.query_bank_size = query_bank_size
        self.shard = shard

        def embeddings(rows: int, *shape: int) -> Tensor:
            return torch.zeros(shard.size(rows), *shape, dim, dtype=dtype, device=device)

        def ids(*shape: int) -> Tensor:
            return torch.full(shape, NO_ID, dtype=torch.int64, device=device)

        self.register_buffer("queries", embeddings(query_bank_size))
        self.register_buffer("passages", embeddings(bank_size))
        self.register_buffer("negatives", embeddings(bank_size, hard_negatives))
        self.register_buffer("query_ids", ids(bank_size))
        self.register_buffer("passage_ids", ids(bank_size))
        self.register_buffer("negative_ids", ids(bank_size, hard_negatives))
        self.register_buffer("negative_counts", torch.zeros(bank_size, dtype=torch.int64, device=device))
        self.register_buffer("inserted_at", torch.zeros(bank_size, dtype=torch.int64, device=device))
        self.register_buffer("inserted_in", torch.zeros(bank_size, dtype=torch.int64, device=device))
        self.register_buffer("usable", torch.ones(bank_size, dtype=torch.bool, device=device))
        # Pairs and micro-steps seen since the start. Pointer and fill count follow from the first, so one
        # number in the state restores both. The Python twin spares a device read at every micro-step.
        self.register_buffer("enqueued", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("micro_steps", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64, device=device))
        self._enqueued = 0
        # The limit, the first pair in use, the first of the present update: host numbers, here for the state.
        self.register_buffer("counts", torch.tensor([bank_size, 0, 0]))
        self._limit, self._first, self._update_began = bank_size, 0, 0
        if not shard.whole:  # so that a shard is never taken for a bank, or for another shard
            self.register_buffer("shard_of", torch.tensor([*shard, bank_size, query_bank_size]))

    @property
    def limit(self) -> int:
        """Entries in use at most, those of the present update apart."""
        return self._limit

    @limit.setter
    def limit(self, entries: int) -> None:
        self._limit = min(max(entries, 0), self.bank_size)

    @property
    def in_use(self) -> int:
        """Entries that have not retired, at most ``fill``."""
        return min(self._enqueued - self._first, self.fill)

    @property
    def queries_in_use(self) -> int:
        """Entries of the query bank that have not retired."""
        return min(self.in_use, self.query_fill)

    @property
    def aged(self) -> bool:
        """Whether entries in use are of an older encoder than the present one."""
        return min(self._update_began, self._enqueued) > self._enqueued - self.in_use

    @property
    def pairs(self) -> int:
        """Pairs seen since the start, evicted ones included."""
        return self._enqueued

    @property
    def pointer(self) -> int:
        """The passage row that the next entry goes to."""
        return self._enqueued % self.bank_size if self.bank_size else 0

    @property
    def fill(self) -> int:
        """Rows of the passage bank in use, m' <= bank_size."""
        return min(self._enqueued, self.bank_size)

    @property
    def query_fill(self) -> int:
        """Rows of the query bank in use, mq' <= query_bank_size."""
        return min(self._enqueued, self.query_bank_size)

    def __len__(self) -> int:
        return self.fill

    @torch.no_grad()
    def enqueue(
        self,
        queries: Tensor,
        passages: Tensor,
        negatives: Tensor | None = None,
        query_ids: Tensor | None = None,
        passage_ids: Tensor | None = None,
        negative_ids: Tensor | None = None,
        finite: Tensor | None = None,
    ) -> None:
        """Append a micro-batch, overwriting the oldest rows. Of a micro-batch larger than the bank the last rows stay.

        Args:
            queries, passages: (n, d), detached by this call and cast to the bank's dtype.
            negatives: (n, h', d) with h' <= ``hard_negatives``, or None.
            query_ids, passage_ids: int64 (n,), or None.
            negative_ids: int64 (n, h'), or None.
            finite: a bool scalar on the bank's device that says whether the micro-batch may be used, for a caller on an
                accelerator: looking at the values there would make the host wait. Where it is False the rows are
                written as zeros and marked in ``usable``. None: look, and refuse.

        Raises:
            ValueError: for a shape that does not fit, or a value that is NaN or infinite. Nothing is stored then.

        The write is in place: whoever keeps views of the bank for a backward pass must be done with them.
        """
        self._check_batch(queries, passages, negatives, query_ids, passage_ids, negative_ids, look=finite is None)
        if finite is not None:
            queries, passages = (torch.where(finite, x, torch.zeros_like(x)) for x in (queries, passages))
            negatives = None if negatives is None else torch.where(finite, negatives, torch.zeros_like(negatives))
            # Nor is the pair known from then on: masks would remember it.
            query_ids, passage_ids, negative_ids = (
                None if ids is None else torch.where(finite, ids.long(), NO_ID)
                for ids in (query_ids, passage_ids, negative_ids)
            )
        n = queries.shape[0]
        h = 0 if negatives is None else negatives.shape[1]
        if (first := self._first_after(n)) > self._first:
            self.usable[self._slots_of(self._first, min(first, self._enqueued))] = False
            self._first = first
        for slots, source in self._slots(n, self.bank_size):
            kept, part = self.shard.run(slots, source)
            self.passages[kept] = passages[part].to(self.passages)
            self.query_ids[slots] = NO_ID if query_ids is None else query_ids[source].to(self.query_ids)
            self.passage_ids[slots] = NO_ID if passage_ids is None else passage_ids[source].to(self.passage_ids)
            self.negative_ids[slots] = NO_ID
            self.negative_counts[slots] = h
            if negatives is not None:
                self.negatives[kept, :h] = negatives[part].to(self.negatives)
                if negative_ids is not None:
                    self.negative_ids[slots, :h] = negative_ids[source].to(self.negative_ids)
            self.inserted_at[slots] = self.micro_steps
            self.inserted_in[slots] = self.updates
            self.usable[slots] = True if finite is None else finite
        for slots, source in self._slots(n, self.query_bank_size):
            kept, part = self.shard.run(slots, source)
            self.queries[kept] = queries[part].to(self.queries)
        self._enqueued += n
        self.enqueued += n
        self.micro_steps += 1

    def next_slots(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the next ``n`` pairs will do: passage slots they take, those of entries in use that go, query slots."""

        def taken(size: int) -> Tensor:
            return self._slots_of(self._enqueued + n - min(n, size), self._enqueued + n, size)

        leaving = self._slots_of(max(self._first, self._enqueued - self.bank_size), self._first_after(n))
        return taken(self.bank_size), leaving, taken(self.query_bank_size)

    def _first_after(self, n: int) -> int:
        """The first pair in use once ``n`` more have come: after those overwritten, and after those past the limit."""
        overwritten = self._enqueued + n - self.bank_size
        past_limit = min(self._enqueued + n - self._limit, self._update_began, self._first + n + RETIRED_AT_ONCE)
        return max(self._first, overwritten, past_limit)

    def _slots_of(self, first: int, end: int, size: int | None = None) -> Tensor:
        """Slots of pairs ``first`` to ``end``, not included: of those seen so far, or of all in a ring of ``size``."""
        end = min(end, self._enqueued) if size is None else end
        pairs = torch.arange(first, max(end, first), device=self.passages.device)
        return pairs % max(self.bank_size if size is None else size, 1)

    def _slots(self, n: int, size: int) -> list[tuple[slice, slice]]:
        """(slots, rows of the micro-batch) to copy for a ring of ``size`` rows: at most two contiguous runs."""
        kept = min(n, size)
        if kept == 0:
            return []
        start = (self._enqueued + n - kept) % size
        first = min(kept, size - start)
        runs = [(slice(start, start + first), slice(n - kept, n - kept + first))]
        if first < kept:
            runs.append((slice(0, kept - first), slice(n - kept + first, n)))
        return runs

    def entries(self) -> BankEntries:
        """The filled rows, as views: read them before the next :meth:`enqueue`, or clone them."""
        m, mq = self.fill, self.query_fill
        if self.query_bank_size == self.bank_size:
            positives = torch.arange(mq, device=self.passages.device)
        else:
            # Slot s of the query ring holds the latest pair t with t % query_bank_size == s; its passage lies
            # in slot t % bank_size of the larger ring.
            slots = torch.arange(mq, device=self.passages.device)
            last = self._enqueued - 1
            positives = (last - (last - slots) % max(self.query_bank_size, 1)) % max(self.bank_size, 1)
        return BankEntries(
            self.queries[: self.shard.size(mq)],
            self.passages[: self.shard.size(m)],
            self.negatives[: self.shard.size(m)],
            self.query_ids[:m],
            self.passage_ids[:m],
            self.negative_ids[:m],
            self.negative_counts[:m],
            positives,
            self.inserted_at[:m],
            self.usable[:m],
        )

    def ages(self) -> Tensor:
        """Age of each filled row in micro-steps, int64 (m',): 1 for what the last micro-step brought."""
        return self.micro_steps - self.inserted_at[: self.fill]

    @torch.no_grad()
    def end_update(self) -> None:
        """Say that the encoder changed: what comes next belongs to another update."""
        self.updates += 1
        self.encoder_moved()

    def encoder_moved(self) -> None:
        """Say that the entries so far are of an older encoder, and may retire."""
        self._update_began = self._enqueued

    def ages_in_updates(self) -> Tensor:
        """Updates since each filled row was encoded, int64 (m',): 0 for those of the present encoder."""
        return self.updates - self.inserted_in[: self.fill]

    def retire_all(self) -> None:
        """Leave every entry out from now on, those of the present update included."""
        self._first = self._update_began = self._enqueued
        self.usable.fill_(False)

    @torch.no_grad()
    def grow_hard_negatives(self, hard_negatives: int) -> None:
        """Make room for more hard negatives per entry; what is stored stays. For data that mixes pairs and tuples."""
        more = hard_negatives - self.hard_negatives
        if more < 0:
            raise ValueError(f"a bank made for {self.hard_negatives} hard negatives cannot shrink to {hard_negatives}")
        room = self.negatives.new_zeros(len(self.negatives), more, self.dim)
        self.negatives = torch.cat([self.negatives, room], dim=1)
        ids = self.negative_ids.new_full((self.bank_size, more), NO_ID)
        self.negative_ids = torch.cat([self.negative_ids, ids], dim=1)
        self.hard_negatives = hard_negatives

    @torch.no_grad()
    def reset(self) -> None:
        """Empty the bank; the storage stays allocated."""
        self._enqueued, self._limit, self._first, self._update_began = 0, self.bank_size, 0, 0
        self.enqueued.zero_()
        self.micro_steps.zero_()
        self.updates.zero_()

    def _check_batch(
        self,
        queries: Tensor,
        passages: Tensor,
        negatives: Tensor | None,
        query_ids: Tensor | None,
        passage_ids: Tensor | None,
        negative_ids: Tensor | None,
        look: bool,
    ) -> None:
        check_embeddings(queries, passages, negatives, query_ids, passage_ids, negative_ids)
        if queries.shape[1] != self.dim:
            raise ValueError(
                f"embeddings of size {queries.shape[1]} do not fit a bank of size {self.dim}: a bank belongs to one "
                "encoder. Make a new one for another embedding size."
            )
        if negatives is not None and negatives.shape[1] > self.hard_negatives:
            raise ValueError(
                f"{negatives.shape[1]} hard negatives per query do not fit a bank made for {self.hard_negatives}: "
                f"make it with hard_negatives={negatives.shape[1]}, or pass the batch with the most of them first."
            )
        for name, tensor in (("queries", queries), ("passages", passages), ("negatives", negatives)):
            if look and tensor is not None and not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} hold NaN or infinite values; a bank would keep them for many updates.")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._enqueued = int(self.enqueued)
        self._limit, self._first, self._update_began = self.counts.tolist()

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.counts.copy_(torch.tensor([self._limit, self._first, self._update_began]))
        super()._save_to_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        return (
            f"bank_size={self.bank_size}, dim={self.dim}, hard_negatives={self.hard_negatives}, "
            f"query_bank_size={self.query_bank_size}, dtype={self.passages.dtype}"
        )


def check_embeddings(
    queries: Tensor,
    passages: Tensor,
    negatives: Tensor | None = None,
    query_ids: Tensor | None = None,
    passage_ids: Tensor | None = None,
    negative_ids: Tensor | None = None,
    may_be_empty: bool = False,
) -> None:
    """Refuse a micro-batch whose shapes do not agree: (n, d), (n, d), (n, h, d), int64 (n,), (n,), (n, h).

    Raises:
        ValueError: naming the argument, its shape and the shape it should have.
    """
    if queries.ndim != 2 or passages.ndim != 2:
        raise ValueError(
            f"queries and passages must be (n, d) matrices, got {tuple(queries.shape)} and {tuple(passages.shape)}"
        )
    if queries.shape != passages.shape:
        raise ValueError(
            f"queries {tuple(queries.shape)} and passages {tuple(passages.shape)} must have the same shape: row i of "
            "passages is the positive of row i of queries"
        )
    n, d = queries.shape
    if n == 0 and not may_be_empty:
        raise ValueError("the micro-batch is empty")
    if negatives is not None and (negatives.ndim != 3 or (negatives.shape[0], negatives.shape[2]) != (n, d)):
        raise ValueError(f"negatives must be (n, h, d) = ({n}, h, {d}), got {tuple(negatives.shape)}")
    if negative_ids is not None and negatives is None:
        raise ValueError("negative_ids came without negatives")
    shapes = {
        "query_ids": (query_ids, (n,)),
        "passage_ids": (passage_ids, (n,)),
        "negative_ids": (negative_ids, (n, 0 if negatives is None else negatives.shape[1])),
    }
    for name, (ids, shape) in shapes.items():
        if ids is None:
            continue
        if tuple(ids.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(ids.shape)}")
        if ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name} must be int64, got {ids.dtype}")
