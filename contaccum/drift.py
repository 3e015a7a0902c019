"""Drift: bank entries were made by an older encoder. This module estimates how far the towers moved since, and
brings the entries up to date.

Without that, an encoder can lower the loss by moving every new embedding away from every old one, because "new or
old" is easier to learn than "relevant or not". It measures and shifts embeddings; it knows neither the loss nor
the bank's storage. docs/drift.md tells the story and its figures.
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

    def __init__(
        self, dim: int, horizon: float = 128.0, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.horizon = horizon
        self.register_buffer("mean", torch.zeros(dim, dtype=dtype, device=device))
        # Total weight seen so far, in [0, 1]: divides out the zeros that the average starts from.
        self.register_buffer("weight", torch.zeros((), dtype=dtype, device=device))

    @torch.no_grad()
    def observe(self, embeddings: Tensor) -> None:
        """Take in a micro-batch of embeddings, (n, d)."""
        step = -math.expm1(-embeddings.shape[0] / self.horizon)
        self.weight += step * (1 - self.weight)
        self.mean += (step / self.weight) * (embeddings.mean(0).to(self.mean) - self.mean)


class Compensated:
    """Bank rows as they would look today: ``(stored + shift)``, scaled to unit length for cosine similarity.

    Never materialises the shifted rows: a shift adds one number per score, a unit length divides by one.

    Args:
        stored: (r, d) as kept in the bank; any floating dtype, computed in ``dtype``.
        shift: (d,) or None.
        unit: scale rows to length 1.
    """

    def __init__(self, stored: Tensor, shift: Tensor | None, unit: bool, dtype: torch.dtype) -> None:
        self.stored = stored.to(dtype)
        self.shift = shift
        self.inverse_norm: Tensor | None = None
        if unit and shift is not None:
            # |stored + shift|^2 without the (r, d) sum. The floor is that of torch.nn.functional.normalize.
            square = self.stored.square().sum(1) + 2 * (self.stored @ shift) + shift @ shift
            self.inverse_norm = square.clamp_min(1e-24).rsqrt()

    def __len__(self) -> int:
        return self.stored.shape[0]

    def rows(self, which: Tensor | slice) -> Tensor:
        """The compensated rows of a slice or of indices (k,): (k, d)."""
        rows = self.stored[which]
        if self.shift is not None:
            rows = rows + self.shift
        if self.inverse_norm is not None:
            rows = rows * self.inverse_norm[which, None]
        return rows

    def scores(self, embeddings: Tensor) -> Tensor:
        """Inner products of (k, d) embeddings with every row: (k, r)."""
        scores = embeddings @ self.stored.T
        if self.shift is not None:
            scores = scores + (embeddings @ self.shift)[:, None]
        if self.inverse_norm is not None:
            scores = scores * self.inverse_norm
        return scores

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """(k, r) weights times the rows: (k, d)."""
        if self.inverse_norm is not None:
            weights = weights * self.inverse_norm
        total = weights @ self.stored
        if self.shift is not None:
            total = total + weights.sum(1, keepdim=True) * self.shift
        return total
