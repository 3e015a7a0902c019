"""Drift compensation of a loss: the means of its towers, the probe, and the age limit."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from contaccum.bank.drift import DriftProbe, MeanState, RunningMean
from contaccum.bank.memory_bank import PAIRS_PER_MEAN, MemoryBank
from contaccum.bank.settings import LossSettings
from contaccum.bank.update_clock import UpdateClock
from contaccum.distributed import over_ranks


class TowerMeans(NamedTuple):
    """Means of the towers' embeddings, (d,), or None without compensation."""

    queries: Tensor | None = None
    passages: Tensor | None = None
    states: tuple[MeanState, ...] = ()  # of queries and passages, to store with the micro-batch


class DriftCompensation(nn.Module):
    """Means of the two towers, measured by a probe or followed from micro-batch to micro-batch.

    Attributes:
        query_mean, passage_mean: None unless ``drift_compensation`` is ``"auto"`` or ``"mean"``, or
            before the first micro-batch.
        probe: None before the first `observe`.
        expects_probe: whether `observe` will be called soon; until then the means stay as they are.
            It is not part of the state.
        age_limit: pairs in use at most, in whole blocks; those of the present update never retire.
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
        """Make the means, if the settings ask for them."""
        if self.settings.moves_entries:
            self.query_mean = RunningMean(dim, dtype, device)
            self.passage_mean = RunningMean(dim, dtype, device)

    @property
    def follows_micro_batches(self) -> bool:
        """Whether micro-batches estimate the means, while no probe measures them."""
        return self.probe is None and not self.expects_probe

    def present_means(self, queries: Tensor, passages: Tensor, is_training: bool) -> TowerMeans:
        """Return the means as they will be once a micro-batch, (n, d) each, is enqueued."""
        if self.query_mean is None or self.passage_mean is None:
            return TowerMeans()
        if not is_training or not self.follows_micro_batches:
            return TowerMeans(self.query_mean.mean, self.passage_mean.mean)
        query_state = self.query_mean.after(queries.detach())
        passage_state = self.passage_mean.after(passages.detach())
        return TowerMeans(query_state.mean, passage_state.mean, (query_state, passage_state))

    def query_drift(self, bank: MemoryBank) -> Tensor | None:
        """Return how far the mean of the query tower has moved since banked queries were stored.

        Returns:
            (runs, d), for each run of pairs that share a stored mean; None without compensation.
        """
        if self.query_mean is None:
            return None
        num_runs = bank.num_used_slots // bank.pairs_per_mean
        return self.query_mean.mean - bank.query_means[:num_runs]

    def store(self, means: TowerMeans, is_finite: Tensor) -> Tensor | None:
        """Store the means of a finite micro-batch; return the present mean of the queries."""
        if self.query_mean is None or self.passage_mean is None:
            return None
        if means.states:
            query_state, passage_state = means.states
            self.query_mean.set(query_state, is_finite)
            self.passage_mean.set(passage_state, is_finite)
        return self.query_mean.mean

    def settle_first_means(self, bank: MemoryBank) -> None:
        """Let all entries share the present mean: the mean of few pairs moves by chance."""
        if self.query_mean is None or not self.follows_micro_batches:
            return
        if bank.total_enqueued <= PAIRS_PER_MEAN:
            bank.query_means.copy_(self.query_mean.mean.expand_as(bank.query_means))

    def first_kept(self, bank: MemoryBank, num_new: int, clock: UpdateClock) -> int:
        """Return the number of the first pair that may stay when ``num_new`` pairs are enqueued."""
        too_old = bank.total_enqueued + num_new - self.age_limit
        blocks_too_old = round(too_old / bank.block_size)
        blocks_of_past_updates = clock.update_start // bank.block_size
        return min(blocks_too_old, blocks_of_past_updates) * bank.block_size

    def observe(
        self, queries: Tensor, passages: Tensor, clock: UpdateClock, is_shared: bool
    ) -> None:
        """Move the means as the probe's embeddings, (S, d) each, have moved.

        With ``"auto"`` it sets the age limit too.
        """
        is_first = self.probe is None
        if self.probe is None:
            bank_size = self.settings.bank_size
            self.probe = DriftProbe(queries.shape, bank_size, queries.dtype, queries.device)
        shifts = self.probe.observe(queries, passages, clock.num_updates, clock.num_pairs)
        if self.query_mean is not None and self.passage_mean is not None:
            self.query_mean.mean += shifts[0]
            self.passage_mean.mean += shifts[1]
        if self.settings.drift_compensation != "auto":
            return
        passage_residuals = self.probe.residuals()[:, 1]
        limit = self.probe.age_limit(passage_residuals)
        self.age_limit = int(min(limit, self.settings.bank_size))
        if is_shared:  # devices may round differently
            agreed = over_ranks("MIN", torch.tensor(self.age_limit, device=queries.device))
            self.age_limit = int(agreed)
        if not is_first:  # the first may come within an update, before the encoder has moved
            clock.age_entries()

    def make_probe_like(self, embeddings: Tensor) -> None:
        """Make a probe for a state with these ``embeddings`` (probes, 2, S, d)."""
        shape = embeddings.shape[2:]
        bank_size = self.settings.bank_size
        self.probe = DriftProbe(shape, bank_size, embeddings.dtype, embeddings.device)

    def get_extra_state(self) -> Tensor:
        """Return the age limit, int64, on the CPU."""
        return torch.tensor(self.age_limit)

    def set_extra_state(self, state: Any) -> None:
        """Restore what `get_extra_state` returned."""
        self.age_limit = int(state)
