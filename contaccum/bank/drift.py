"""Drift: how far a tower has moved since the entries were encoded, and what is done about it.

A tower is the encoder in one of its two roles: for queries or for passages (documents); an entry is
a banked pair. Drift has two parts: the mean shift is a movement common to all texts of a tower; the
residual is what remains of each text's movement without it. Without compensation an encoder can
lower the loss by moving every new embedding away from every old one, because "new or old" is easier
to learn than "relevant or not". docs/study.md has the measurements.

- Documents are stored relative to the mean of the passage tower, so they move along with it:
  stored_j = d_j - mean at the time of storing, used_j = stored_j + current mean. (The code
  subtracts the current mean from new documents instead, which gives the same loss.) Only
  differences of means count: with a probe, the "mean" starts at 0, and is the sum of all shifts.
- Queries stay as they were stored, and so do their logits. Only the gradient that banked queries
  give to local documents is computed as if they had moved along with the mean of the query tower.
- Entries retire when the residual of the passages has become too large: about `age_limit` entries
  are in use, rounded to whole blocks of the bank.

`RunningMean` estimates a tower's mean from the micro-batches. `DriftProbe` measures mean shift and
residual on a few fixed texts, which is far more exact. `DriftCompensation` applies them to the
bank.

Letters in shapes: n pairs in the micro-batch, S pairs of texts in the probe, d the embedding size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from contaccum.bank.memory_bank import PAIRS_PER_MEAN, MemoryBank
from contaccum.bank.update_clock import UpdateClock
from contaccum.distributed import over_ranks
from contaccum.settings import InfoNCESettings

HORIZON = 128.0
"""Age in pairs at which the weight of an embedding in a running mean has fallen to 1/e."""

RESIDUAL_BOUND = 0.08
"""Residual above which an entry retires, in units of the spread of its tower's embeddings.

The spread is the root mean squared distance of the probe's embeddings from their mean.
"""

NUM_INTERVALS = 32
"""Number of intervals between measurements of the probe that cover the lifetime of an entry."""


class RunningMean(nn.Module):
    """Exponentially weighted mean of one tower's embeddings, (n, d)."""

    mean: Tensor  # (d,)
    weight: Tensor  # (), 1 - exp(-embeddings so far / HORIZON), which corrects the start at 0
    variance: Tensor  # (), running mean of the squared distance of embeddings from the mean

    def __init__(
        self, dim: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim, dtype=dtype, device=device))
        self.register_buffer("weight", torch.zeros((), dtype=dtype, device=device))
        self.register_buffer("variance", torch.zeros((), dtype=dtype, device=device))

    def compute_next(self, embeddings: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute mean, weight and variance after a micro-batch (n, d); `store` stores them.

        If the mean of the micro-batch is further away than sampling noise explains, the encoder has
        jumped, and the running mean moves most of the way at once: pairs that are stored relative
        to a mean that lags behind would be shifted too far later. One embedding is never a jump:
        its own variance is 0, so the noise of a mean that starts with it would be underestimated.
        """
        n = len(embeddings)
        variances, batch_mean = torch.var_mean(embeddings, 0, correction=0)  # (d,) each
        batch_variance = variances.sum()
        difference = batch_mean - self.mean
        squared_distance = difference @ difference
        is_initialized = self.weight > 0

        # Expected squared distance of the two means if only sampling separates them: the sum of
        # their variances. The running mean is as exact as a mean of 2 * HORIZON embeddings.
        noise = self.variance * (1 / n + 1 / (2 * HORIZON))
        # Fraction of the distance that a jump explains: 0 up to twice the noise, then towards 1.
        jump = (1 - 2 * noise / squared_distance.clamp_min(1e-30)).clamp_min(0) * is_initialized
        if n == 1:
            jump = torch.zeros_like(jump)

        decay_step = -math.expm1(-n / HORIZON)  # 1 - exp(-n / HORIZON)
        weight = self.weight * (1 - decay_step) + decay_step
        gain = decay_step / weight
        # The variance around the running mean, or around the batch mean after a jump.
        is_continuous = is_initialized & (jump == 0)
        unbiased_batch_variance = batch_variance * (n / max(n - 1, 1))
        new_variance = torch.where(
            is_continuous, batch_variance + squared_distance, unbiased_batch_variance
        )
        mean = self.mean.lerp(batch_mean, torch.maximum(gain, jump))
        return mean, weight, self.variance.lerp(new_variance, gain)

    @torch.no_grad()
    def store(self, mean: Tensor, weight: Tensor, variance: Tensor, condition: Tensor) -> None:
        """Store new values if the bool scalar ``condition`` is True; the host does not wait."""
        torch.where(condition, mean, self.mean, out=self.mean)
        torch.where(condition, weight, self.weight, out=self.weight)
        torch.where(condition, variance, self.variance, out=self.variance)


class DriftProbe(nn.Module):
    """Measurements of a few fixed texts: their embeddings at several times of training.

    They reach back over the lifetime of an entry (``bank_size`` pairs), so the residual can be
    computed for entries of any age. ``shape`` is (S, d).
    """

    embeddings: Tensor  # (measurements, 2, S, d), queries and passages, oldest first

    def __init__(
        self,
        shape: Sequence[int],
        bank_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        # Least number of pairs between stored measurements, except before the latest.
        self.spacing = max(PAIRS_PER_MEAN, bank_size // NUM_INTERVALS + 1)
        # The intervals have one more end than their number; the latest measurement comes on top.
        num_measurements = NUM_INTERVALS + 2
        embeddings = torch.zeros(num_measurements, 2, *shape, dtype=dtype, device=device)
        self.register_buffer("embeddings", embeddings)
        self.pairs: list[int] = []  # number of training pairs at each measurement, oldest first
        self.updates: list[int] = []  # number of updates at each measurement

    @torch.no_grad()
    def observe(self, queries: Tensor, passages: Tensor, update: int, pairs: int) -> Tensor:
        """Store a measurement, and return each tower's mean shift since the last one, (2, d).

        Queries and passages are (S, d), the current embeddings of the texts.
        """
        measurement = torch.stack([queries, passages]).to(self.embeddings)  # (2, S, d)
        index = len(self.pairs)
        if index == 0:
            shift = torch.zeros_like(measurement[:, 0])
        else:
            shift = (measurement - self.embeddings[index - 1]).mean(1)  # (2, d)
        if index > 1 and self.pairs[-1] - self.pairs[-2] < self.spacing:
            # The last measurement is too close to the one before it: overwrite the last.
            index -= 1
        elif index == len(self.embeddings):
            # The buffer is full: drop the oldest measurement.
            index -= 1
            self.embeddings.copy_(self.embeddings.roll(-1, 0))
            del self.pairs[0]
            del self.updates[0]
        self.pairs[index:] = [pairs]
        self.updates[index:] = [update]
        self.embeddings[index] = measurement
        return shift

    def compute_residuals(self) -> Tensor:
        """Compute the residual since each earlier measurement, (measurements - 1, 2).

        With x a text's embedding at the latest measurement and y at the earlier one, it is

            sqrt(var(x - y) / var(x)),    var(x) = mean over the texts of |x - mean(x)|^2,

        for queries (column 0) and for passages (column 1).
        """
        measurements = self.embeddings[: len(self.pairs)]
        latest = measurements[-1]  # (2, S, d)
        drift_variance = compute_variance(latest - measurements[:-1])  # (measurements - 1, 2)
        # Equal embeddings of all texts have no spread; the residual must not be NaN then.
        variance = compute_variance(latest).clamp_min(1e-24)  # (2,)
        return (drift_variance / variance).sqrt()

    def compute_age_limit(self, residuals: Tensor, bound: float = RESIDUAL_BOUND) -> float:
        """Compute the age in pairs at which a tower's residual reaches ``bound``.

        The age is interpolated between the residuals of one tower, (measurements - 1,), oldest
        first. It is infinite if none exceeds the bound.
        """
        younger_age = 0.0
        younger_residual = 0.0
        ages = [self.pairs[-1] - pairs for pairs in reversed(self.pairs[:-1])]
        for age, residual in zip(ages, reversed(residuals.tolist()), strict=True):
            if residual > bound:
                fraction = (bound - younger_residual) / (residual - younger_residual)
                return younger_age + (age - younger_age) * fraction
            younger_age = age
            younger_residual = residual
        return math.inf

    def get_extra_state(self) -> Tensor:
        """Return `pairs` and `updates` as int64 (2, measurements) on the CPU."""
        return torch.tensor([self.pairs, self.updates])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore `pairs` and `updates`."""
        self.pairs = state[0].tolist()
        self.updates = state[1].tolist()


def compute_variance(embeddings: Tensor) -> Tensor:
    """Compute the mean squared distance (...) of embeddings (..., S, d) from their mean."""
    return (embeddings - embeddings.mean(-2, keepdim=True)).square().sum(-1).mean(-1)


class DriftCompensation(nn.Module):
    """Means of the two towers, from a probe or from the micro-batches, and the age limit."""

    def __init__(self, settings: InfoNCESettings) -> None:
        super().__init__()
        self.settings = settings
        # None before the bank is made, and always with drift_compensation="none".
        self.query_mean: RunningMean | None = None
        self.passage_mean: RunningMean | None = None
        self.probe: DriftProbe | None = None  # before the first call of `observe`
        # True if the means come from `observe` alone; they stay 0 until its second call. The text
        # loss, which encodes the probe, sets it. It is not part of the state.
        self.expects_probe = False
        # Maximum number of entries in use, before it is rounded to whole blocks of the bank. It
        # never retires entries of the current update; a full bank does.
        self.age_limit = settings.bank_size
        # Mean, weight and variance of each tower with the current micro-batch included.
        self._next_states: list[tuple[Tensor, Tensor, Tensor]] = []

    def make_means(self, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make the running means, at 0, if the settings let entries move."""
        if self.settings.drift_compensation == "auto":
            self.query_mean = RunningMean(dim, dtype, device)
            self.passage_mean = RunningMean(dim, dtype, device)

    @property
    def follows_micro_batches(self) -> bool:
        """True if the means are estimated from micro-batches, because there is no probe."""
        return self.probe is None and not self.expects_probe

    def compute_means(
        self, queries: Tensor, passages: Tensor, is_training: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute the means (d,) of both towers with the micro-batch (n, d) included.

        `store_means` stores them later, if the loss turns out to be finite. They are None if
        entries do not move. Without ``is_training``, the micro-batch does not count.
        """
        if self.query_mean is None or self.passage_mean is None:
            return None, None
        if not is_training or not self.follows_micro_batches:
            return self.query_mean.mean, self.passage_mean.mean
        query_state = self.query_mean.compute_next(queries)
        passage_state = self.passage_mean.compute_next(passages)
        self._next_states = [query_state, passage_state]
        return query_state[0], passage_state[0]

    def compute_query_drift(
        self, bank: MemoryBank | None, query_mean: Tensor | None
    ) -> Tensor | None:
        """Compute the movement of the query tower's mean since the banked queries were stored.

        Args:
            query_mean: (d,), from `compute_means`, with the micro-batch included.

        Returns:
            (groups, d), for each group of pairs that share a stored mean. None without a bank or
            compensation; without a probe, also for the first `PAIRS_PER_MEAN` pairs, when the
            running mean still moves by sampling noise.
        """
        if bank is None or query_mean is None:
            return None
        if self.follows_micro_batches and bank.total_enqueued <= PAIRS_PER_MEAN:
            return None
        num_groups = bank.num_filled_slots // bank.pairs_per_mean
        return query_mean - bank.query_means[:num_groups]

    def store_means(self, bank: MemoryBank, num_new: int, not_finite: Tensor) -> Tensor | None:
        """Store the means from `compute_means`, and return the query tower's mean, (d,).

        The bank is about to store ``num_new`` pairs with this mean. If the bool scalar
        ``not_finite`` is True, the means stay as they are.
        """
        if self.query_mean is None or self.passage_mean is None:
            return None
        if not self.follows_micro_batches:
            return self.query_mean.mean
        query_state, passage_state = self._next_states
        is_finite = ~not_finite
        self.query_mean.store(*query_state, is_finite)
        self.passage_mean.store(*passage_state, is_finite)
        if bank.total_enqueued + num_new <= PAIRS_PER_MEAN:
            # A mean of so few pairs moves by sampling noise, which must not count as drift. So the
            # pairs so far get the new mean too.
            bank.query_means.copy_(self.query_mean.mean.expand_as(bank.query_means))
        return self.query_mean.mean

    def compute_oldest_allowed(self, bank: MemoryBank, num_new: int, clock: UpdateClock) -> int:
        """Compute the number of the oldest pair that stays in use once ``num_new`` are enqueued.

        The bank retires whole blocks, so the number is the start of a block. It is 0 or negative if
        no pair is too old. Clock and bank number the pairs alike.
        """
        num_too_old = bank.total_enqueued + num_new - self.age_limit
        num_blocks_too_old = round(num_too_old / bank.block_size)
        num_blocks_of_past_updates = clock.update_start // bank.block_size
        return min(num_blocks_too_old, num_blocks_of_past_updates) * bank.block_size

    def observe(
        self, queries: Tensor, passages: Tensor, clock: UpdateClock, is_shared: bool
    ) -> None:
        """Measure the drift; unless ``"none"``, move the means, and set the age limit.

        Queries and passages are (S, d), current embeddings of the probe's texts.
        """
        if not (queries.isfinite().all() and passages.isfinite().all()):
            return  # means that are not finite would never recover
        probe = self.probe
        is_first = probe is None
        if probe is None:
            probe = self.make_probe(queries.shape, queries.dtype, queries.device)
        shifts = probe.observe(queries, passages, clock.num_updates, clock.num_pairs)
        if self.query_mean is None or self.passage_mean is None:
            return
        self.query_mean.mean += shifts[0]
        self.passage_mean.mean += shifts[1]
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
        with torch.inference_mode(False):  # as for the bank; see `BankedInfoNCE`
            probe = DriftProbe(shape, self.settings.bank_size, dtype, device)
        self.probe = probe
        return probe

    def get_extra_state(self) -> Tensor:
        """Return the age limit, int64, on the CPU."""
        return torch.tensor(self.age_limit)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the age limit."""
        self.age_limit = int(state)
