"""Drift compensation of a loss: the means of its towers, the probe and the age limit.

`contaccum.bank.drift` explains towers and drift, and computes the statistics. This module applies
them to the bank:

- Documents are stored relative to the mean of the passage tower, so they move along with it.
- Queries stay as they were stored, and so do their logits. Only the gradient that banked queries
  give to local documents is computed as if they had moved along with the mean of the query tower
  (`compute_query_drift`).
- With ``drift_compensation="auto"``, entries (banked pairs) that have drifted too far retire: about
  `age_limit` entries are in use, rounded to whole blocks of the bank.

Letters in shapes: n pairs in the micro-batch, S pairs of texts in the probe, d the embedding size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from contaccum.bank.drift import DriftProbe, MeanState, RunningMean
from contaccum.bank.memory_bank import PAIRS_PER_MEAN, MemoryBank
from contaccum.bank.settings import LossSettings
from contaccum.bank.update_clock import UpdateClock
from contaccum.distributed import over_ranks


class TowerMeans(NamedTuple):
    """Means of the towers' embeddings, (d,), for one micro-step; None without a mean shift."""

    queries: Tensor | None = None
    passages: Tensor | None = None
    states: tuple[MeanState, ...] = ()  # new states of both running means, if they change


class DriftCompensation(nn.Module):
    """Means of the two towers, from a probe or from the micro-batches, and the age limit.

    Attributes:
        query_mean, passage_mean: `RunningMean` of each tower; None before the first micro-batch.
            They stay None unless ``drift_compensation`` is ``"auto"`` or ``"mean"``.
        probe: `DriftProbe`; None before the first call of `observe`.
        expects_probe: True if `observe` will be called soon; until then the means stay as they
            are. The text loss, which encodes the probe, sets it. It is not part of the state.
        age_limit: maximum number of entries in use, before it is rounded to whole blocks of the
            bank. It never retires entries of the current update; a full bank does.
    """

    def __init__(self, settings: LossSettings) -> None:
        super().__init__()
        self.settings = settings
        self.query_mean: RunningMean | None = None
        self.passage_mean: RunningMean | None = None
        self.probe: DriftProbe | None = None
        self.expects_probe = False
        self.age_limit = settings.bank_size

    def make_means(self, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make the running means, at 0, if the settings let entries move."""
        if self.settings.moves_entries:
            self.query_mean = RunningMean(dim, dtype, device)
            self.passage_mean = RunningMean(dim, dtype, device)

    @property
    def follows_micro_batches(self) -> bool:
        """True if the means are estimated from micro-batches, because no probe measures them."""
        return self.probe is None and not self.expects_probe

    def compute_means(self, queries: Tensor, passages: Tensor, is_training: bool) -> TowerMeans:
        """Compute the means with the micro-batch included; `store_means` stores them later.

        Args:
            queries, passages: (n, d), the micro-batch.
            is_training: False if the micro-batch must not change the means.
        """
        if self.query_mean is None or self.passage_mean is None:
            return TowerMeans()
        if not is_training or not self.follows_micro_batches:
            return TowerMeans(self.query_mean.mean, self.passage_mean.mean)
        query_state = self.query_mean.compute_next_state(queries.detach())
        passage_state = self.passage_mean.compute_next_state(passages.detach())
        return TowerMeans(query_state.mean, passage_state.mean, (query_state, passage_state))

    def compute_query_drift(self, bank: MemoryBank | None, means: TowerMeans) -> Tensor | None:
        """Compute the movement of the query tower's mean since the banked queries were stored.

        Args:
            means: the means from `compute_means`, with the micro-batch included.

        Returns:
            (runs, d), for each run of pairs that share a stored mean. None without a bank or
            compensation; without a probe, also for the first `PAIRS_PER_MEAN` pairs, when the
            running mean still moves by sampling noise.
        """
        if bank is None or means.queries is None:
            return None
        if self.follows_micro_batches and bank.total_enqueued <= PAIRS_PER_MEAN:
            return None
        num_runs = bank.num_filled_slots // bank.pairs_per_mean
        return means.queries - bank.query_means[:num_runs]

    def store_means(self, means: TowerMeans, not_finite: Tensor) -> Tensor | None:
        """Store the means from `compute_means`, and return the query tower's mean, (d,).

        Args:
            not_finite: bool scalar; if it is True, the means stay as they are.
        """
        if self.query_mean is None or self.passage_mean is None:
            return None
        if means.states:
            query_state, passage_state = means.states
            is_finite = ~not_finite
            self.query_mean.store(query_state, is_finite)
            self.passage_mean.store(passage_state, is_finite)
        return self.query_mean.mean

    def replace_first_query_means(self, bank: MemoryBank) -> None:
        """Replace the query means that were stored with the first `PAIRS_PER_MEAN` pairs.

        They become the current mean. A running mean of few pairs moves by sampling noise, which
        must not count as drift.
        """
        if self.query_mean is None or not self.follows_micro_batches:
            return
        if bank.total_enqueued <= PAIRS_PER_MEAN:
            bank.query_means.copy_(self.query_mean.mean.expand_as(bank.query_means))

    def compute_oldest_allowed(self, bank: MemoryBank, num_new: int, clock: UpdateClock) -> int:
        """Compute the number of the oldest pair that stays in use; older pairs must retire.

        Pairs are numbered from the start of training, by clock and bank alike, because all pairs of
        the bank have passed through the loss. The bank retires whole blocks, so the number is the
        start of a block. It is 0 or negative if no pair is too old.

        Args:
            num_new: number of pairs that are about to be enqueued.
        """
        num_too_old = bank.total_enqueued + num_new - self.age_limit
        num_blocks_too_old = round(num_too_old / bank.block_size)
        num_blocks_of_past_updates = clock.update_start // bank.block_size
        return min(num_blocks_too_old, num_blocks_of_past_updates) * bank.block_size

    def observe(
        self, queries: Tensor, passages: Tensor, clock: UpdateClock, is_shared: bool
    ) -> None:
        """Move the means by the mean shift of the probe, and set the age limit with ``"auto"``.

        The age limit is the age at which the residual of the passages becomes too large. Embeddings
        that are not finite are ignored, because means that are not finite would never recover.

        Args:
            queries, passages: (S, d), current embeddings of the probe's texts.
            clock: the update clock of the loss.
            is_shared: True if all ranks share one bank.
        """
        if not (queries.isfinite().all() and passages.isfinite().all()):
            return
        probe = self.probe
        is_first = probe is None
        if probe is None:
            probe = self.make_probe(queries.shape, queries.dtype, queries.device)
        shifts = probe.observe(queries, passages, clock.num_updates, clock.num_pairs)
        if self.query_mean is not None and self.passage_mean is not None:
            self.query_mean.mean += shifts[0]
            self.passage_mean.mean += shifts[1]
        if self.settings.drift_compensation != "auto":
            return
        age_limit = probe.compute_age_limit(probe.compute_residuals()[:, 1])
        self.age_limit = int(min(age_limit, self.settings.bank_size))
        if is_shared:
            # The devices of the ranks may round differently, but the ring buffers must stay equal.
            age_limit_on_device = torch.tensor(self.age_limit, device=queries.device)
            self.age_limit = int(over_ranks("MIN", age_limit_on_device))
        if not is_first:
            # Later calls come after an update, so an older encoder encoded all entries. The first
            # call may come within an update, before the encoder has changed.
            clock.age_entries()

    def make_probe(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> DriftProbe:
        """Make the probe, without measurements; ``shape`` is (S, d)."""
        with torch.inference_mode(False):  # as for the bank; see `BankedModule`
            probe = DriftProbe(shape, self.settings.bank_size, dtype, device)
        self.probe = probe
        return probe

    def get_extra_state(self) -> Tensor:
        """Return the age limit, int64, on the CPU."""
        return torch.tensor(self.age_limit)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore what `get_extra_state` returned."""
        self.age_limit = int(state)
