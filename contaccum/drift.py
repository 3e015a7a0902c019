"""Drift: bank entries were made by an older encoder. This module estimates how far a tower has moved as a whole.

Without that, an encoder can lower the loss by moving every new embedding away from every old one, because "new or
old" is easier to learn than "relevant or not". It knows neither the loss nor the bank. docs/drift.md tells the story.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

DRIFT_COMPENSATIONS = ("mean", "none")


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

    @torch.no_grad()
    def observe(self, embeddings: Tensor) -> None:
        """Take in a micro-batch of embeddings, (n, d).

        A micro-batch whose mean lies further off than sampling explains is a jump of the encoder, and the running
        mean goes there at once: entries stored while it still lags would be shifted too far later on.
        """
        n = embeddings.shape[0]
        embeddings = embeddings.to(self.mean)
        fresh = embeddings.mean(0)
        seen = self.weight > 0
        distance = (fresh - self.mean).square().sum()
        # What |fresh - mean|^2 is on average when nothing moved: the variances of the two means.
        noise = self.variance * (1 / n + 1 / (2 * self.horizon))
        jump = torch.where(seen, (1 - 2 * noise / distance.clamp_min(1e-30)).clamp_min(0), torch.zeros_like(distance))
        step = -math.expm1(-n / self.horizon)
        self.weight += step * (1 - self.weight)
        gain = step / self.weight
        spread = (embeddings - torch.where(jump > 0, fresh, self.mean)).square().sum(1).mean()
        spread = torch.where(seen, spread, (embeddings - fresh).square().sum(1).mean())
        self.variance += gain * (spread - self.variance)
        self.mean += torch.maximum(gain, jump) * (fresh - self.mean)

    def snapshot(self) -> list[Tensor]:
        """Copies of the state, for :meth:`restore`."""
        return [buffer.clone() for buffer in self.buffers()]

    @torch.no_grad()
    def restore(self, state: list[Tensor], unless: Tensor) -> None:
        """Go back to a :meth:`snapshot`, unless the bool scalar ``unless`` is True."""
        for buffer, value in zip(self.buffers(), state, strict=True):
            buffer.copy_(torch.where(unless, buffer, value))
