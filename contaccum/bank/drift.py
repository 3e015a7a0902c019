"""Drift: bank entries were made by an older encoder. This module estimates how far a tower has moved as a whole.

Without that, an encoder can lower the loss by moving every new embedding away from every old one, because "new or
old" is easier to learn than "relevant or not". It knows neither the loss nor the bank. docs/drift.md tells the story.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from contaccum.bank.memory_bank import PAIRS_PER_ORIGIN

MOVES_ENTRIES = ("auto", "mean")  # these follow the encoder; the others need no measurement of it
HORIZON = 128.0  # pairs after which an old embedding's weight in a running mean has fallen to 1/e
RESIDUAL_BOUND = 0.08  # of an entry's drift without the mean shift, in units of its tower's spread: beyond, it retires
WEIGHED_BOUND = 0.2  # the same where older entries count less: at this one, by a factor of 20
PROBES = 32  # over the life of a bank; for a larger bank they are further apart


class RunningMean(nn.Module):
    """Exponentially weighted mean of one tower's embeddings (n, d), the compensation ``"mean"`` of drift.

    An entry is stored as ``x - mean then`` and used as ``stored + mean now``: it moves along with its tower, at the
    cost of one vector instead of one per entry.
    """

    mean: Tensor  # (d,)
    weight: Tensor  # total seen so far, in [0, 1]: divides out the zeros that the averages start from
    variance: Tensor  # running squared distance of embeddings from the mean, summed over dimensions

    def __init__(self, dim: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> None:
        super().__init__()
        for name, shape in (("mean", (dim,)), ("weight", ()), ("variance", ())):
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device))

    def after(self, embeddings: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The state (mean, weight, variance) once a micro-batch of embeddings, (n, d), is seen; `set` takes it.

        A micro-batch whose mean lies further off than sampling explains is a jump of the encoder, and the running
        mean goes there at once: entries stored while it still lags would be shifted too far later on. A micro-batch of
        one tells nothing of how samples vary, and never counts as a jump.
        """
        n = embeddings.shape[0]
        variances, fresh = torch.var_mean(embeddings, 0, correction=0)
        within, away, seen = variances.sum(), fresh - self.mean, self.weight > 0
        distance = away @ away
        # What |fresh - mean|^2 is on average when nothing moved: the variances of the two means.
        noise = self.variance * (1 / n + 1 / (2 * HORIZON))
        jump = (1 - 2 * noise / distance.clamp_min(1e-30)).clamp_min(0) * (seen if n > 1 else 0)
        step = -math.expm1(-n / HORIZON)
        weight = self.weight * (1 - step) + step
        gain = step / weight
        spread = torch.where(seen & (jump == 0), within + distance, within * (n / max(n - 1, 1)))
        mean = self.mean.lerp(fresh, torch.maximum(gain, jump))
        return mean, weight, self.variance.lerp(spread, gain)

    @torch.no_grad()
    def set(self, state: tuple[Tensor, ...], where: Tensor) -> None:
        """Go to a state if the bool scalar ``where`` is True."""
        for buffer, value in zip((self.mean, self.weight, self.variance), state, strict=True):
            buffer.copy_(torch.where(where, value, buffer))


class DriftProbe(nn.Module):
    """What the embeddings (S, d) of a few fixed texts did while the encoder learned, for both towers.

    Their mean shift is that of the tower, far more exact than from means of ever new texts, because the texts do not
    change; and what they did beyond it is what compensation leaves: it tells how old is too old. Probes reach back over
    the ``life`` of a bank, in pairs.
    """

    embeddings: Tensor

    def __init__(self, shape: Sequence[int], life: int, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__()
        self.spacing = max(PAIRS_PER_ORIGIN, life // PROBES + 1)
        self.register_buffer("embeddings", torch.zeros(PROBES + 2, 2, *shape, dtype=dtype, device=device))
        self.pairs: list[int] = []  # of training, seen at each probe, oldest first
        self.updates: list[int] = []

    @torch.no_grad()
    def observe(self, queries: Tensor, passages: Tensor, update: int, pairs: int) -> Tensor:
        """Take in embeddings, (S, d) each, as of ``update`` and ``pairs``: the mean shift since the last, (2, d)."""
        fresh = torch.stack([queries, passages]).to(self.embeddings)
        known = len(self.pairs)
        shift = (fresh - self.embeddings[max(known - 1, 0)]).mean(1) * (known > 0)
        # The latest probe stays beside the others once it is far enough from the one before it.
        if known > 1 and self.pairs[-1] - self.pairs[-2] < self.spacing:
            known -= 1
        elif known == len(self.embeddings):
            known -= 1
            self.embeddings.copy_(self.embeddings.roll(-1, 0))
            del self.pairs[0], self.updates[0]
        self.pairs[known:], self.updates[known:] = [pairs], [update]
        self.embeddings[known] = fresh
        return shift

    def residuals(self) -> Tensor:
        """What the mean shift leaves of the drift since each probe but the latest, for both towers: (probes - 1, 2).

        Root mean square over the texts, in units of the root mean squared distance of the texts from their mean.
        """
        *_, now = probes = self.embeddings[: len(self.pairs)]
        return (_variance(now - probes[:-1]) / _variance(now).clamp_min(1e-24)).sqrt()

    def age_limit(self, residuals: Tensor, bound: float = RESIDUAL_BOUND) -> float:
        """Pairs of training after which an entry has drifted further than ``bound``, infinite when none has, by the
        `residuals` (probes - 1,) of one tower, interpolated."""
        before, less = 0.0, 0.0
        for pairs, residual in zip(self.pairs[-2::-1], reversed(residuals.tolist()), strict=True):
            age = self.pairs[-1] - pairs
            if residual > bound:
                return before + (age - before) * (bound - less) / (residual - less)
            before, less = age, residual
        return math.inf

    def log_weight(self, residuals: Sequence[float], age: int) -> float:
        """Logarithm of what an entry of an ``age`` in pairs counts, exp(-(r / 0.08)^2 / 2) for a residual drift r."""
        ages = [self.pairs[-1] - pairs for pairs in self.pairs[::-1]]
        return -0.5 * (float(np.interp(age, ages, [0.0, *reversed(residuals)])) / RESIDUAL_BOUND) ** 2

    def record(self, oldest: int) -> dict[str, float]:
        """Drift over the life of a bank whose oldest entry is ``oldest`` updates old, or as much of it as is known.

        Returns:
            ``drift_age`` (updates between the two probes compared); for each tower ``drift_cosine_...`` (of a text's
            embeddings then and now), ``drift_shift_...`` (length of the mean shift, in units of the texts' root mean
            squared distance from their mean) and ``drift_residual_...`` (what is left without it). Reads the device.
        """
        ages = [self.updates[-1] - update for update in self.updates[:-1]]
        if not ages:
            return {}
        then = next((i for i, age in enumerate(ages) if age <= max(oldest, 1)), len(ages) - 1)
        old, new = self.embeddings[then], self.embeddings[len(ages)]
        cosines = nn.functional.cosine_similarity(new, old, dim=-1).mean(-1)
        shifts = (new - old).mean(1).norm(dim=-1) / _variance(new).sqrt()
        record: dict[str, float] = {"drift_age": ages[then]}
        for key, values in (("cosine", cosines), ("shift", shifts), ("residual", self.residuals()[then])):
            record |= {f"drift_{key}_query": values[0].item(), f"drift_{key}_passage": values[1].item()}
        return record

    def get_extra_state(self) -> Tensor:
        """When the probes were, int64 (2, probes), on the CPU."""
        return torch.tensor([self.pairs, self.updates])

    def set_extra_state(self, state: Tensor) -> None:
        self.pairs, self.updates = state.tolist()


def _variance(embeddings: Tensor) -> Tensor:
    """Mean squared distance of texts from their mean: (..., S, d) to (...)."""
    return (embeddings - embeddings.mean(-2, keepdim=True)).square().sum(-1).mean(-1)
