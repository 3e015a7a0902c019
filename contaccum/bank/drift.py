"""Statistics of drift: how far a tower has moved since the pairs in the bank were encoded.

Drift means that the encoder changes while the bank holds embeddings of its older versions. It has
two parts. The mean shift is a movement common to all texts of a tower; the residual is what remains
of each text's movement without it. The loss compensates for the mean shift by storing documents
relative to the mean of their tower,

    stored_j = d_j - mean at the time of storing,    used_j = stored_j + current mean,

and it retires entries whose residual has become too large. Without compensation an encoder can
lower the loss by moving every new embedding away from every old one, because "new or old" is easier
to learn than "relevant or not".

`RunningMean` estimates a tower's mean from the micro-batches. `DriftProbe` measures mean shift and
residual on a few fixed texts, which is far more exact. docs/drift.md has the reasons and the
measurements. `contaccum.bank.compensation` applies these statistics to the bank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from contaccum.bank.memory_bank import PAIRS_PER_MEAN

HORIZON = 128.0
"""Number of pairs after which the weight of an embedding in a running mean has fallen to 1/e."""

RESIDUAL_BOUND = 0.08
"""Largest residual of an entry in use, in units of the spread of its tower's embeddings.

The spread is the root mean squared distance of the probe's texts from their mean.
"""

PROBES = 32
"""Number of probes stored over the lifetime of an entry; they are wider apart in a larger bank."""


class MeanState(NamedTuple):
    """State of a `RunningMean`."""

    mean: Tensor  # (d,)
    weight: (
        Tensor  # (), total weight of the embeddings so far, in [0, 1]; the rest is the start at 0
    )
    variance: Tensor  # (), running mean of the squared distance from the mean, over all dimensions


class RunningMean(nn.Module):
    """Exponentially weighted mean of one tower's embeddings, (n, d)."""

    mean: Tensor
    weight: Tensor
    variance: Tensor

    def __init__(
        self, dim: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim, dtype=dtype, device=device))
        self.register_buffer("weight", torch.zeros((), dtype=dtype, device=device))
        self.register_buffer("variance", torch.zeros((), dtype=dtype, device=device))

    def compute_next_state(self, embeddings: Tensor) -> MeanState:
        """Compute the state after a micro-batch of embeddings, (n, d); `store` applies it.

        If the mean of the micro-batch is further away than sampling noise explains, the encoder has
        jumped, and the running mean moves to the new position at once. Otherwise pairs would be
        stored relative to a mean that lags behind, and would be shifted too far later. A single
        embedding is never treated as a jump, because it has no variance.
        """
        n = len(embeddings)
        variances, batch_mean = torch.var_mean(embeddings, 0, correction=0)
        batch_variance = variances.sum()
        difference = batch_mean - self.mean
        squared_distance = difference @ difference
        is_initialized = self.weight > 0

        # Expected squared distance of the two means if only sampling separates them: the sum of
        # their variances.
        noise = self.variance * (1 / n + 1 / (2 * HORIZON))
        jump = (1 - 2 * noise / squared_distance.clamp_min(1e-30)).clamp_min(0) * is_initialized
        if n == 1:
            jump = torch.zeros_like(jump)

        step = -math.expm1(-n / HORIZON)
        weight = self.weight * (1 - step) + step
        gain = step / weight
        is_continuous = is_initialized & (jump == 0)
        unbiased_batch_variance = batch_variance * (n / max(n - 1, 1))
        variance = torch.where(
            is_continuous, batch_variance + squared_distance, unbiased_batch_variance
        )
        return MeanState(
            mean=self.mean.lerp(batch_mean, torch.maximum(gain, jump)),
            weight=weight,
            variance=self.variance.lerp(variance, gain),
        )

    @torch.no_grad()
    def store(self, state: MeanState, condition: Tensor) -> None:
        """Store a state if the bool scalar ``condition`` is True."""
        self.mean.copy_(torch.where(condition, state.mean, self.mean))
        self.weight.copy_(torch.where(condition, state.weight, self.weight))
        self.variance.copy_(torch.where(condition, state.variance, self.variance))


class DriftProbe(nn.Module):
    """Embeddings (S, d) of a few fixed texts at several times of training, for both towers.

    The shift between the means of two probes is the mean shift of the tower. It is far more exact
    than the shift between the means of different texts. The stored probes reach back over the
    lifetime of an entry, so the residual can be measured for entries of any age.

    Args:
        shape: (S, d).
        bank_size: lifetime of an entry: number of pairs after which it is overwritten.
        dtype: dtype of the stored embeddings.
        device: device of the stored embeddings.

    Attributes:
        pairs: number of training pairs at the time of each probe, oldest first.
        updates: number of updates at the time of each probe.
    """

    embeddings: Tensor  # (probes, 2, S, d), queries and passages, oldest probe first

    def __init__(
        self,
        shape: Sequence[int],
        bank_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.spacing = max(PAIRS_PER_MEAN, bank_size // PROBES + 1)
        embeddings = torch.zeros(PROBES + 2, 2, *shape, dtype=dtype, device=device)
        self.register_buffer("embeddings", embeddings)
        self.pairs: list[int] = []
        self.updates: list[int] = []

    @torch.no_grad()
    def observe(self, queries: Tensor, passages: Tensor, update: int, pairs: int) -> Tensor:
        """Store embeddings, (S, d) each, and return the mean shift since the last probe, (2, d).

        Args:
            update: number of updates so far.
            pairs: number of training pairs so far.
        """
        new_probe = torch.stack([queries, passages]).to(self.embeddings)
        index = len(self.pairs)
        if index == 0:
            shift = torch.zeros_like(new_probe[:, 0])
        else:
            shift = (new_probe - self.embeddings[index - 1]).mean(1)
        if index > 1 and self.pairs[-1] - self.pairs[-2] < self.spacing:
            # The latest probe is too close to the one before it to be stored as well.
            index -= 1
        elif index == len(self.embeddings):
            # All places are occupied: drop the oldest probe.
            index -= 1
            self.embeddings.copy_(self.embeddings.roll(-1, 0))
            del self.pairs[0]
            del self.updates[0]
        self.pairs[index:] = [pairs]
        self.updates[index:] = [update]
        self.embeddings[index] = new_probe
        return shift

    def compute_residuals(self) -> Tensor:
        """Compute the residual drift since each earlier probe, (probes - 1, 2).

        With x a text's embedding at the latest probe and y at the earlier one, it is

            sqrt(var(x - y) / var(x)),    var(x) = mean over the texts of |x - mean(x)|^2,

        for queries and for passages.
        """
        probes = self.embeddings[: len(self.pairs)]
        latest = probes[-1]
        drift_variance = _compute_variance(latest - probes[:-1])
        variance = _compute_variance(latest).clamp_min(1e-24)
        return (drift_variance / variance).sqrt()

    def compute_age_limit(self, residuals: Tensor, bound: float = RESIDUAL_BOUND) -> float:
        """Compute the age in pairs at which a tower's residual reaches ``bound``.

        The age is interpolated between probes. It is infinite if no residual exceeds the bound.

        Args:
            residuals: (probes - 1,), the residuals of one tower.
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

    def measure_drift(self, bank_age: int) -> dict[str, float]:
        """Measure the drift over ``bank_age`` updates, the age of the oldest entry in use.

        It reads values from the device.

        Returns:
            ``drift_age``, the updates between the two probes that are compared, and for each tower
            ``drift_cosine_...`` (mean cosine of a text's old and new embedding),
            ``drift_shift_...`` (length of the mean shift, in units of the spread; see
            `RESIDUAL_BOUND`) and ``drift_residual_...`` (see `compute_residuals`). The record is
            empty before the second probe.
        """
        ages = [self.updates[-1] - update for update in self.updates[:-1]]
        if not ages:
            return {}
        old_index = len(ages) - 1
        for index, age in enumerate(ages):
            if age <= max(bank_age, 1):
                old_index = index
                break
        old = self.embeddings[old_index]
        new = self.embeddings[len(ages)]
        measures = {
            "cosine": nn.functional.cosine_similarity(new, old, dim=-1).mean(-1),
            "shift": (new - old).mean(1).norm(dim=-1) / _compute_variance(new).sqrt(),
            "residual": self.compute_residuals()[old_index],
        }
        record: dict[str, float] = {"drift_age": ages[old_index]}
        for name, (query_value, passage_value) in measures.items():
            record[f"drift_{name}_query"] = float(query_value)
            record[f"drift_{name}_passage"] = float(passage_value)
        return record

    def get_extra_state(self) -> Tensor:
        """Return pairs and updates at the time of each probe, int64 (2, probes), on the CPU."""
        return torch.tensor([self.pairs, self.updates])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore what `get_extra_state` returned."""
        self.pairs = state[0].tolist()
        self.updates = state[1].tolist()


def _compute_variance(embeddings: Tensor) -> Tensor:
    """Compute the mean squared distance of texts from their mean: (..., S, d) to (...)."""
    return (embeddings - embeddings.mean(-2, keepdim=True)).square().sum(-1).mean(-1)
