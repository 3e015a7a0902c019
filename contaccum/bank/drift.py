"""Drift: how far a tower has moved since bank entries were encoded by an older encoder.

Without that, an encoder can lower the loss by moving every new embedding away from every old one,
because "new or old" is easier to learn than "relevant or not". `RunningMean` follows the mean of a
tower from micro-batch to micro-batch. `DriftProbe` measures it on a few fixed texts, far more
exactly, and says how old an entry may be. docs/drift.md has the reasons and the figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from contaccum.bank.memory_bank import PAIRS_PER_MEAN

HORIZON = 128.0
"""Pairs after which the weight of an old embedding in a running mean has fallen to 1/e."""

RESIDUAL_BOUND = 0.08
"""An entry retires when its drift beyond the mean shift exceeds so many spreads of its tower."""

PROBES = 32
"""Probes stored over the life of a bank; for a larger bank they are further apart."""


class MeanState(NamedTuple):
    """The state of a `RunningMean`."""

    mean: Tensor  # (d,)
    weight: Tensor  # (), total weight seen so far, in [0, 1]: divides out the zeros at the start
    variance: Tensor  # (), running squared distance from the mean, summed over dimensions


class RunningMean(nn.Module):
    """Exponentially weighted mean of one tower's embeddings, (n, d).

    An entry is stored as ``x - mean then`` and used as ``stored + mean now``. So it moves along
    with its tower, at the cost of one vector instead of one per entry.
    """

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

    def after(self, embeddings: Tensor) -> MeanState:
        """Return the state after a micro-batch of embeddings, (n, d); `set` stores it.

        A micro-batch whose mean is further away than sampling explains is a jump of the encoder.
        The running mean then moves there at once: entries stored while it lags behind would be
        shifted too far later on. A single embedding never counts as a jump, because it has no
        variance.
        """
        n = len(embeddings)
        variances, batch_mean = torch.var_mean(embeddings, 0, correction=0)
        batch_variance = variances.sum()
        difference = batch_mean - self.mean
        distance = difference @ difference
        has_seen = self.weight > 0

        # The squared distance of two means that only sampling separates: the sum of their
        # variances.
        noise = self.variance * (1 / n + 1 / (2 * HORIZON))
        jump = (1 - 2 * noise / distance.clamp_min(1e-30)).clamp_min(0) * has_seen
        if n == 1:
            jump = torch.zeros_like(jump)

        step = -math.expm1(-n / HORIZON)
        weight = self.weight * (1 - step) + step
        gain = step / weight
        unbiased = batch_variance * (n / max(n - 1, 1))
        continues = has_seen & (jump == 0)
        variance = torch.where(continues, batch_variance + distance, unbiased)
        return MeanState(
            mean=self.mean.lerp(batch_mean, torch.maximum(gain, jump)),
            weight=weight,
            variance=self.variance.lerp(variance, gain),
        )

    @torch.no_grad()
    def set(self, state: MeanState, condition: Tensor) -> None:
        """Store a state if the bool scalar ``condition`` is True."""
        self.mean.copy_(torch.where(condition, state.mean, self.mean))
        self.weight.copy_(torch.where(condition, state.weight, self.weight))
        self.variance.copy_(torch.where(condition, state.variance, self.variance))


class DriftProbe(nn.Module):
    """Embeddings (S, d) of a few fixed texts at several times of training, for both towers.

    The shift of their mean is that of the tower. It is far more exact than a shift between means of
    new texts, because the texts do not change. Their movement beyond it, the residual, is what
    compensation leaves; it tells how old an entry may be. The probes reach back over the life of a
    bank.

    Args:
        shape: (S, d).
        bank_size: the life of a bank, in pairs.
    """

    embeddings: Tensor  # (probes, 2, S, d), oldest first

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
        self.pairs: list[int] = []  # pairs of training at each probe, oldest first
        self.updates: list[int] = []  # updates of training at each probe

    @torch.no_grad()
    def observe(self, queries: Tensor, passages: Tensor, update: int, pairs: int) -> Tensor:
        """Store embeddings, (S, d) each, and return the mean shift since the last probe, (2, d)."""
        fresh = torch.stack([queries, passages]).to(self.embeddings)
        count = len(self.pairs)
        if count == 0:
            shift = torch.zeros_like(fresh[:, 0])
        else:
            shift = (fresh - self.embeddings[count - 1]).mean(1)
        # The latest probe stays beside the others once it is far enough from the one before it.
        if count > 1 and self.pairs[-1] - self.pairs[-2] < self.spacing:
            count -= 1
        elif count == len(self.embeddings):
            count -= 1
            self.embeddings.copy_(self.embeddings.roll(-1, 0))
            del self.pairs[0]
            del self.updates[0]
        self.pairs[count:] = [pairs]
        self.updates[count:] = [update]
        self.embeddings[count] = fresh
        return shift

    def residuals(self) -> Tensor:
        """Return the drift beyond the mean shift since each earlier probe, (probes - 1, 2).

        It is a root mean square over the texts, in units of their root mean squared distance from
        their mean, for queries and passages.
        """
        probes = self.embeddings[: len(self.pairs)]
        latest = probes[-1]
        drift = _variance(latest - probes[:-1])
        spread = _variance(latest).clamp_min(1e-24)
        return (drift / spread).sqrt()

    def age_limit(self, residuals: Tensor, bound: float = RESIDUAL_BOUND) -> float:
        """Return the age in pairs at which a tower's ``residuals`` (probes - 1,) reach ``bound``.

        It is interpolated between probes, and infinite if no residual exceeds the bound.
        """
        younger_age = 0.0
        younger_residual = 0.0
        ages = [self.pairs[-1] - pairs for pairs in reversed(self.pairs[:-1])]
        for age, residual in zip(ages, reversed(residuals.tolist()), strict=True):
            if residual > bound:
                share = (bound - younger_residual) / (residual - younger_residual)
                return younger_age + (age - younger_age) * share
            younger_age = age
            younger_residual = residual
        return math.inf

    def record(self, oldest: int) -> dict[str, float]:
        """Return the drift over the life of a bank whose oldest entry is ``oldest`` updates old.

        Reads the device.

        Returns:
            ``drift_age`` (updates between the two probes compared); for each tower
            ``drift_cosine_...`` (of a text's embeddings then and now), ``drift_shift_...`` (length
            of the mean shift, in units of the texts' root mean squared distance from their mean)
            and ``drift_residual_...`` (the drift without it).
        """
        ages = [self.updates[-1] - update for update in self.updates[:-1]]
        if not ages:
            return {}
        then = len(ages) - 1
        for index, age in enumerate(ages):
            if age <= max(oldest, 1):
                then = index
                break
        old = self.embeddings[then]
        new = self.embeddings[len(ages)]
        values = {
            "cosine": nn.functional.cosine_similarity(new, old, dim=-1).mean(-1),
            "shift": (new - old).mean(1).norm(dim=-1) / _variance(new).sqrt(),
            "residual": self.residuals()[then],
        }
        record: dict[str, float] = {"drift_age": ages[then]}
        for name, (query_value, passage_value) in values.items():
            record[f"drift_{name}_query"] = float(query_value)
            record[f"drift_{name}_passage"] = float(passage_value)
        return record

    def get_extra_state(self) -> Tensor:
        """Return when the probes were, int64 (2, probes), on the CPU."""
        return torch.tensor([self.pairs, self.updates])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore what `get_extra_state` returned."""
        self.pairs = state[0].tolist()
        self.updates = state[1].tolist()


def _variance(embeddings: Tensor) -> Tensor:
    """Return the mean squared distance of texts from their mean: (..., S, d) to (...)."""
    return (embeddings - embeddings.mean(-2, keepdim=True)).square().sum(-1).mean(-1)
