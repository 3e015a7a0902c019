"""Drift: bank entries were made by an older encoder. This module estimates how far a tower has moved as a whole.

Without that, an encoder can lower the loss by moving every new embedding away from every old one, because "new or
old" is easier to learn than "relevant or not". It knows neither the loss nor the bank. docs/drift.md tells the story.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from contaccum.memory_bank import PAIRS_PER_ORIGIN

DRIFT_COMPENSATIONS = ("auto", "mean", "fresh", "none")
MOVES_ENTRIES = ("auto", "mean")
"""Those that follow the encoder; the others need no measurement of it."""

RESIDUAL_BOUND = 0.08
"""What may be left of an entry's drift once the mean shift is taken off, in units of its tower's spread."""

PROBES_KEPT = 32
"""Probes over the life of a bank; a larger bank keeps them further apart."""


class RunningMean(nn.Module):
    """Exponentially weighted mean of one tower's embeddings, the compensation ``"mean"`` of drift.

    An entry is stored as ``x - mean then`` and used as ``stored + mean now``: it moves along with its tower, at the
    cost of one vector instead of one per entry.

    Args:
        dim: the embedding size d.
        horizon: pairs after which an old embedding's weight has fallen to 1/e. Shorter follows faster, longer is
            less noisy; the same number means the same thing at any micro-batch size.
    """

    mean: Tensor
    weight: Tensor
    variance: Tensor

    def __init__(
        self, dim: int, horizon: float = 128.0, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.horizon = horizon
        self.register_buffer("mean", torch.zeros(dim, dtype=dtype, device=device))
        # Total weight seen so far, in [0, 1]: divides out the zeros that the averages start from.
        self.register_buffer("weight", torch.zeros((), dtype=dtype, device=device))
        # Running squared distance of embeddings from the mean, summed over dimensions.
        self.register_buffer("variance", torch.zeros((), dtype=dtype, device=device))

    def after(self, embeddings: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The state (mean, weight, variance) once a micro-batch of embeddings, (n, d), is seen; :meth:`set` takes it.

        A micro-batch whose mean lies further off than sampling explains is a jump of the encoder, and the running
        mean goes there at once: entries stored while it still lags would be shifted too far later on. A micro-batch of
        one tells nothing of how samples vary, and never counts as a jump.
        """
        n = embeddings.shape[0]
        embeddings = embeddings.to(self.mean)
        fresh = embeddings.mean(0)
        seen = self.weight > 0
        distance = (fresh - self.mean).square().sum()
        # What |fresh - mean|^2 is on average when nothing moved: the variances of the two means.
        noise = self.variance * (1 / n + 1 / (2 * self.horizon))
        jump = (1 - 2 * noise / distance.clamp_min(1e-30)).clamp_min(0) * (seen & (n > 1))
        step = -math.expm1(-n / self.horizon)
        weight = self.weight + step * (1 - self.weight)
        gain = step / weight
        within = (embeddings - fresh).square().sum() / max(n - 1, 1)
        spread = torch.where(seen & (jump == 0), (embeddings - self.mean).square().sum(1).mean(), within)
        variance = self.variance + gain * (spread - self.variance)
        return self.mean + torch.maximum(gain, jump) * (fresh - self.mean), weight, variance

    @torch.no_grad()
    def set(self, state: tuple[Tensor, ...], where: Tensor) -> None:
        """Go to a state if the bool scalar ``where`` is True."""
        for buffer, value in zip((self.mean, self.weight, self.variance), state, strict=True):
            buffer.copy_(torch.where(where, value, buffer))


class DriftProbe(nn.Module):
    """What the embeddings of a few fixed texts did while the encoder learned, for both towers.

    The texts are encoded again every so often. Their mean shift is that of the tower, far more exact than from means of
    ever new texts, because the texts do not change; and what they did beyond it is what compensation leaves: it tells
    how old is too old.

    Args:
        texts: probe pairs S.
        dim: the embedding size d.
        life: pairs that the bank holds: how far back probes are kept.
    """

    embeddings: Tensor
    update: Tensor
    pairs: Tensor

    def __init__(
        self, texts: int, dim: int, dtype: torch.dtype, device: torch.device | None = None, life: int = 1024
    ) -> None:
        super().__init__()
        self.spacing = max(PAIRS_PER_ORIGIN, life // PROBES_KEPT + 1)
        self.register_buffer("embeddings", torch.zeros(PROBES_KEPT + 2, 2, texts, dim, dtype=dtype, device=device))
        self.register_buffer("update", torch.zeros(PROBES_KEPT + 2, dtype=torch.int64, device=device))
        # Pairs of training seen at each probe kept, oldest first, then -1: on the host, but for the state.
        self.register_buffer("pairs", torch.full((PROBES_KEPT + 2,), -1, dtype=torch.int64))
        self._pairs: list[int] = []

    @torch.no_grad()
    def observe(self, queries: Tensor, passages: Tensor, update: Tensor, pairs: int) -> Tensor:
        """Take in embeddings, (S, d) each, as of ``update`` and ``pairs``: the mean shift since the last, (2, d)."""
        fresh = torch.stack([queries, passages]).to(self.embeddings)
        known = len(self._pairs)
        shift = (fresh - self.embeddings[max(known - 1, 0)]).mean(1) * (known > 0)
        # The latest probe stays beside the others once it is far enough from the one before it.
        if known > 1 and self._pairs[-1] - self._pairs[-2] < self.spacing:
            known -= 1
        elif known == len(self.embeddings):
            known -= 1
            for buffer in (self.embeddings, self.update):
                buffer.copy_(buffer.roll(-1, 0))
            del self._pairs[0]
        self._pairs[known:] = [pairs]
        self.embeddings[known] = fresh
        self.update[known] = update
        return shift

    def residuals(self) -> Tensor:
        """What the mean shift leaves of the drift since each probe but the latest, for both towers: (kept - 1, 2).

        Root mean square over the texts, in units of the root mean squared distance of the texts from their mean.
        """
        then, now = self.embeddings[: len(self._pairs) - 1], self.embeddings[len(self._pairs) - 1]
        moved = now - then
        left = (moved - moved.mean(2, keepdim=True)).square().sum(-1).mean(-1)
        return (left / _variance(now)).sqrt()

    def age_limit(self, residuals: Tensor, bound: float = RESIDUAL_BOUND) -> float:
        """Pairs of training after which an entry has drifted further than ``bound``; infinite when none kept has.

        Args:
            residuals: of one tower, (kept - 1,), as :meth:`residuals` gives them. Between probes they are interpolated.
        """
        ages = [self._pairs[-1] - pairs for pairs in self._pairs[-2::-1]]
        before, less = 0.0, 0.0
        for age, residual in zip(ages, reversed(residuals.tolist()), strict=True):
            if residual > bound:
                return before + (age - before) * (bound - less) / (residual - less)
            before, less = age, residual
        return math.inf

    def record(self, oldest: int) -> dict[str, float]:
        """Drift over the life of the bank, or over as much of it as is kept; empty before the second probe.

        Args:
            oldest: age in updates of the bank's oldest entry.

        Returns:
            ``drift_age`` (updates between the two probes compared); for each tower ``drift_cosine_query`` and
            ``drift_cosine_passage`` (mean cosine of a text's embeddings then and now), ``drift_shift_...`` (length of
            the mean shift, in units of the texts' root mean squared distance from their mean) and
            ``drift_residual_...`` (what is left without the mean shift, in the same units). Reads the device.
        """
        last = len(self._pairs) - 1
        if last < 1:
            return {}
        updates = self.update.tolist()
        then = next((i for i in range(last) if updates[last] - updates[i] <= max(oldest, 1)), last - 1)
        record: dict[str, float] = {"drift_age": updates[last] - updates[then]}
        residuals = self.residuals()
        for tower, name in enumerate(("query", "passage")):
            new, old = self.embeddings[last, tower], self.embeddings[then, tower]
            shift = (new - old).mean(0).norm() / _variance(new).sqrt()
            record[f"drift_cosine_{name}"] = nn.functional.cosine_similarity(new, old).mean().item()
            record[f"drift_shift_{name}"] = shift.item()
            record[f"drift_residual_{name}"] = residuals[then, tower].item()
        return record

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.pairs.fill_(-1)
        self.pairs[: len(self._pairs)] = torch.tensor(self._pairs, dtype=torch.int64)
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._pairs = [pairs for pairs in self.pairs.tolist() if pairs >= 0]


def _variance(embeddings: Tensor) -> Tensor:
    """Mean squared distance of texts from their mean: (..., S, d) to (...)."""
    return (embeddings - embeddings.mean(-2, keepdim=True)).square().sum(-1).mean(-1).clamp_min(1e-24)
