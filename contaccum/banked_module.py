"""The lifetime of a bank inside a loss: its making, its drift and what is told of it, its state.

:class:`BankedModule` owns a :class:`MemoryBank` and what keeps it of use while the encoder moves (running log-sums,
means, probe). It computes no loss; :class:`contaccum.BankedInfoNCE` does, on top of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from contaccum.distributed import agree, gather_batch, rank, world_size
from contaccum.drift import MOVES_ENTRIES, DriftProbe, QueryFrames, RunningMean
from contaccum.duplicates import PositivesTable
from contaccum.errors import ConfigError
from contaccum.log_sums import RunningLogSums
from contaccum.loss_parts import softmax
from contaccum.memory_bank import NO_ID, MemoryBank, check_embeddings
from contaccum.shards import WHOLE, Shard

AGES = (0, 1, 2, 4, 8, 16, 32, 64)
"""Where the ranges of age begin by which the bank's share of the softmax is told, in updates."""


class BankedModule(nn.Module):
    """A bank that is made by the first micro-batch, follows the encoder, and lies whole in the ``state_dict``.

    Args and attributes are those of :class:`contaccum.BankedInfoNCE`.
    """

    def __init__(
        self,
        bank_size: int,
        query_bank_size: int | None,
        similarity: str,
        bank_hard_negatives: bool,
        drift_compensation: str,
        bank_dtype: torch.dtype | None,
        gather_across_devices: bool,
        bank_device: torch.device | str | None,
        shard_bank: bool = False,
    ) -> None:
        super().__init__()
        self.bank_size = bank_size
        self.query_bank_size = bank_size if query_bank_size is None else query_bank_size
        self.similarity = similarity
        self.bank_hard_negatives = bank_hard_negatives
        self.drift_compensation = drift_compensation
        self.bank_dtype = bank_dtype
        self.gather_across_devices = gather_across_devices
        self.shard_bank = shard_bank
        self.bank_device = None if bank_device is None else torch.device(bank_device)
        self.bank: MemoryBank | None = None
        self.log_sums: RunningLogSums | None = None
        self.passage_mean: RunningMean | None = None
        self.query_mean: RunningMean | None = None
        self.query_frames: QueryFrames | None = None
        self.probe: DriftProbe | None = None
        self.positives: PositivesTable | None = None
        self.last: dict[str, Any] = {}
        self._ids_seen = False
        self._summed_pairs = 0  # how many of the bank's pairs the running sums have followed

    def know_positives(self, table: PositivesTable) -> None:
        """Mask the pairs of ``table`` wherever they meet, as if the batch had told of them. Not part of the state."""
        self.positives = table
        self._summed_pairs = -1  # masks within the bank change with it

    def end_update(self) -> None:
        """Say that the optimizer has stepped: ages of entries are counted in updates. ``"fresh"`` needs it."""
        if self.bank is not None:
            self.bank.end_update()
            if self.drift_compensation == "fresh":
                self.bank.retire_all()

    @torch.no_grad()
    def observe_probe(self, queries: Tensor, passages: Tensor) -> None:
        """Embeddings of the same S pairs of texts as at the last call, encoded again now: (S, d) each.

        Call it before the first micro-batch, and again after updates, every 64 pairs at the most. Between two calls
        the mean of each tower is taken to have moved as the probe's has; with a first call the running mean is given
        up. Eight texts, without dropout, tell a mean shift better than hundreds of ever new ones, since what differs
        between texts falls out. With ``drift_compensation="auto"`` it sets how many entries are in use from now on, and
        reads one small tensor from the device for it. With ``"fresh"`` and ``"none"`` it only measures. Ranks that
        share a bank call it together, each with texts of its own (S may differ, and be 0): the probe is all of them.
        """
        check_embeddings(queries, passages, may_be_empty=self._shared)
        if self.bank_size == 0:
            return
        dtype = torch.promote_types(queries.dtype, torch.float32)
        fresh = [queries.detach(), passages.detach()]
        if self._shared:
            fresh, *_ = gather_batch(fresh, (None, None, None), NO_ID)
        fresh = [x.to(self.bank_device, dtype) for x in fresh]
        if self.similarity == "cos":
            fresh = [nn.functional.normalize(x, dim=-1) for x in fresh]
        self._prepare_bank(queries.shape[1], None, fresh[0])
        assert self.bank is not None
        if self.probe is None:
            texts, dim = fresh[0].shape
            self.probe = DriftProbe(texts, dim, dtype, fresh[0].device, self.bank_size)
        shift = self.probe.observe(fresh[0], fresh[1], self.bank.updates, self.bank.pairs)
        if self.passage_mean is not None and self.query_frames is not None:
            self.passage_mean.mean += shift[1].to(self.passage_mean.mean)
            self.query_frames.move(shift[0], self.bank.pairs)
        if self.drift_compensation == "auto":
            limit = int(min(self.probe.age_limit(self.probe.residuals()[:, 1]), self.bank_size))
            # The same on all ranks already, unless their devices round differently.
            self.bank.limit = agree(limit, queries.device) if self._shared else limit
            self.bank.encoder_moved()

    @property
    def _shared(self) -> bool:
        """Whether all ranks hold one and the same bank."""
        return self.gather_across_devices and world_size() > 1

    def drift_record(self) -> dict[str, float]:
        """What there is to know about the age of the bank, for a log line: reads the device.

        Returns:
            ``bank_age``: updates since the oldest entry was encoded (with :meth:`end_update`). ``bank_mass``: share of
            the local rows' softmax that falls on banked passages in the last micro-step; ``bank_mass_age_A``: the share
            of those A updates old, up to the next A (0, 1, 2, 4, ...); ``in_batch_mass``: that of the negatives in the
            batch. ``bank_mass_aged``: what a column from an earlier update gets, over a column of the present encoder:
            1 when age tells nothing, near 0 when the bank is out of reach. And :meth:`DriftProbe.record`. Only what is
            known.
        """
        if self.bank is None or self.bank.fill == 0:
            return {}
        oldest = int((self.bank.ages_in_updates() * self.bank.entries().usable).max())
        record: dict[str, float] = {"bank_age": oldest}
        for key in ("in_batch_mass", "bank_mass", "bank_mass_aged"):
            value = float(self.last.get(key, math.nan))
            if math.isfinite(value):
                record[key] = value
        masses = self.last["bank_mass_by_age"].tolist() if "bank_mass_by_age" in self.last else []
        record |= {f"bank_mass_age_{age}": mass for age, mass in zip(AGES, masses, strict=False) if age <= oldest}
        return {**record, **(self.probe.record(oldest) if self.probe is not None else {})}

    def _masses(self, passage_mass: Tensor, scores: Tensor, log_sum: Tensor, n: int) -> dict[str, Tensor]:
        """Where the local rows' softmax lies: the banked passages' share, and that of an aged column over a fresh one.

        Fresh columns are the in-batch negatives and entries of the same update; the positives do not count.
        """
        assert self.bank is not None
        shard = self.bank.shard
        usable = shard.of(self.bank.entries().usable).to(passage_mass.dtype)
        # The exponent of an age is the number of its range in AGES.
        ranges = torch.frexp(shard.of(self.bank.ages_in_updates()).double()).exponent.clamp_max(len(AGES) - 1)
        found = usable.new_zeros(2, len(AGES)).index_add_(1, ranges, torch.stack([usable, passage_mass]))
        columns, mass = shard.sum(found)
        local = softmax(scores[:, :n], log_sum)
        in_batch = local.sum() - local.diagonal().sum()
        fresh = (in_batch + mass[0]) / (n - 1 + columns[0])
        return {
            "bank_mass": mass.sum() / n,
            "bank_mass_aged": mass[1:].sum() / columns[1:].sum() / fresh,
            "bank_mass_by_age": mass / n,
            "in_batch_mass": in_batch / n,
        }

    def _prepare_bank(self, dim: int, negatives: Tensor | None, like: Tensor) -> None:
        if self.bank_size == 0:
            return
        h = negatives.shape[1] if negatives is not None and self.bank_hard_negatives else 0
        if self.bank is None:
            self._make_bank(dim, h, self.bank_dtype or like.dtype, like.dtype, like.device)
        assert self.bank is not None
        if self.bank.passages.device != like.device:
            self.to(like.device)  # the model moved, or a state was loaded elsewhere
        if dim != self.bank.dim:
            raise ValueError(
                f"embeddings of size {dim} do not fit the bank of size {self.bank.dim}: a loss belongs to one encoder. "
                "Make a new BankedInfoNCE for another embedding size."
            )
        if h > self.bank.hard_negatives:
            self.bank.grow_hard_negatives(h)

    def _make_bank(
        self, dim: int, h: int, dtype: torch.dtype, mean_dtype: torch.dtype, device: torch.device | None
    ) -> None:
        shard = Shard(rank(), world_size()) if self.shard_bank and self._shared else WHOLE
        self.bank = MemoryBank(self.bank_size, dim, h, dtype, self.query_bank_size, device, shard)
        self.log_sums = RunningLogSums(shard.size(self.query_bank_size), device)
        if self.drift_compensation in MOVES_ENTRIES:
            self.passage_mean = RunningMean(dim, dtype=mean_dtype, device=device)
            self.query_mean = RunningMean(dim, dtype=mean_dtype, device=device)
            self.query_frames = QueryFrames(self.query_bank_size, dim, mean_dtype, device)

    @property
    def _sharded(self) -> dict[str, int]:
        """Names in the state of what is sharded with the bank, and how many rows of each there are on all ranks."""
        rows = {f"bank.{name}": self.bank_size for name in ("passages", "negatives")}
        sums = () if self.log_sums is None else dict(self.log_sums.named_buffers())
        return rows | dict.fromkeys(("bank.queries", *(f"log_sums.{x}" for x in sums)), self.query_bank_size)

    def gathered_state_dict(self, keep: bool = True) -> dict[str, Tensor]:
        """``state_dict()``, but with a sharded bank whole: any number of ranks can load it, sharded or not.

        All ranks call it together where the bank is sharded. A ring at a time is whole on every rank, then on the CPU.

        Args:
            keep: whether this rank wants the result; otherwise it only takes part, and gets an empty one.
        """
        state = self.state_dict()
        if self.bank is not None and not self.bank.shard.whole:
            for name, rows in self._sharded.items():
                whole = self.bank.shard.gather(state[name], rows)
                state[name] = whole.cpu() if keep else whole[:0]
            del state["bank.shard_of"]
        return dict(state) if keep else {}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # The bank is made by the first call; a state that holds one makes it here instead.
        passages = state_dict.get(prefix + "bank.passages")
        if passages is not None:
            shard_of = state_dict.get(prefix + "bank.shard_of")
            if shard_of is not None:
                self._check_shard(*shard_of.tolist())
            mean = state_dict.get(prefix + "passage_mean.mean")
            if (mean is None) == (self.drift_compensation in MOVES_ENTRIES):
                raise ConfigError(
                    f"this state was written {'without' if mean is None else 'with'} compensation for drift, but this "
                    f"loss has drift_compensation={self.drift_compensation!r} and would misread its bank. Use the same "
                    "setting."
                )
            if shard_of is None and (
                passages.shape[0] != self.bank_size
                or state_dict[prefix + "bank.queries"].shape[0] != self.query_bank_size
            ):
                raise ConfigError(
                    f"this state holds a bank of {passages.shape[0]} passages and "
                    f"{state_dict[prefix + 'bank.queries'].shape[0]} queries, but this loss has bank_size="
                    f"{self.bank_size} and query_bank_size={self.query_bank_size}. Use the same sizes."
                )
            h = state_dict[prefix + "bank.negatives"].shape[1]
            device = self.bank.passages.device if self.bank is not None else passages.device
            mean_dtype = passages.dtype if mean is None else mean.dtype
            self._make_bank(passages.shape[1], h, passages.dtype, mean_dtype, device)
            assert self.bank is not None
            if shard_of is None and not self.bank.shard.whole:
                for name in self._sharded:
                    state_dict[prefix + name] = self.bank.shard.of(state_dict[prefix + name])
                state_dict[prefix + "bank.shard_of"] = self.bank.shard_of
            probe = state_dict.get(prefix + "probe.embeddings")
            self.probe = None
            if probe is not None:
                self.probe = DriftProbe(probe.shape[2], probe.shape[3], probe.dtype, device, self.bank_size)
            self._ids_seen = True
            self._summed_pairs = int(state_dict[prefix + "bank.enqueued"])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _check_shard(self, of_rank: int, ranks: int, bank_size: int, query_bank_size: int) -> None:
        here = (rank(), world_size()) if self.shard_bank and self._shared else (0, 1)
        if (of_rank, ranks) != here:
            place = f"rank {here[0]} of {here[1]}" if here[1] > 1 else "a bank in one piece"
            raise ConfigError(
                f"this state is that of rank {of_rank} of {ranks} that share a bank, but this is {place}: a shard fits "
                "nowhere else. Save gathered_state_dict() instead of state_dict(), which fits everywhere"
            )
        if (bank_size, query_bank_size) != (self.bank_size, self.query_bank_size):
            raise ConfigError(
                f"this state is a shard of a bank of {bank_size} passages and {query_bank_size} queries, but this loss "
                f"has bank_size={self.bank_size} and query_bank_size={self.query_bank_size}. Use the same sizes."
            )
