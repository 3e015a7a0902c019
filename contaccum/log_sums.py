"""Running log-sums: logsumexp of each banked row over the banked columns, kept up to date at linear cost.

The bank x bank block carries no gradient; all that the loss needs of it is one number per row. Here that number follows
the bank as entries come and go: a new column adds its term to every row, an evicted one takes its term away, and only
rows that are new, or whose sum has become small against the mass that passed through it, are summed afresh. Scores
between stored entries never change, so nothing is approximated; what subtraction costs in digits is bounded by
``MASS_LIMIT`` and by the life of a row, which is one turn of the bank.

It knows rows, columns and masks; it knows neither the loss nor what the scores mean.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MASS_LIMIT = 8.0
"""A row is summed afresh when the terms added to and taken from it exceed this many times what is left."""


class RunningLogSums(nn.Module):
    """For each row of a ring of ``size`` rows: ``reference + log(total)``, the logsumexp over its columns.

    Everything is kept in float64, whatever the scores are computed in: 32 bytes a row. ``positive`` is the score of a
    row's own positive, which does not change while the row lives.
    """

    reference: Tensor
    total: Tensor
    mass: Tensor
    positive: Tensor

    def __init__(self, size: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.register_buffer("reference", torch.zeros(size, dtype=torch.float64, device=device))
        self.register_buffer("total", torch.zeros(size, dtype=torch.float64, device=device))
        # Terms that went in or out since the row was last summed afresh: what rounding errors are relative to.
        self.register_buffer("mass", torch.zeros(size, dtype=torch.float64, device=device))
        self.register_buffer("positive", torch.zeros(size, dtype=torch.float64, device=device))

    def value(self, count: int) -> Tensor:
        """logsumexp of the first ``count`` rows, float64 (count,)."""
        return self.reference[:count] + self.total[:count].log()

    @torch.no_grad()
    def remove(self, scores: Tensor) -> None:
        """Take columns out of the rows: ``scores`` (r, c) of the first r rows against columns about to be evicted."""
        rows = slice(scores.shape[0])
        terms = self._terms(scores, rows)
        self.total[rows] -= terms
        self.mass[rows] += terms

    @torch.no_grad()
    def add(self, scores: Tensor) -> None:
        """Put new columns into the rows: ``scores`` (r, c) of the first r rows against them."""
        rows = slice(scores.shape[0])
        top = scores.amax(1).double() if scores.shape[1] else self.reference[rows]
        higher = torch.maximum(self.reference[rows], top)
        # Terms are kept relative to the greatest score seen, so that none overflows.
        fade = (self.reference[rows] - higher).exp()
        self.total[rows] *= fade
        self.mass[rows] *= fade
        self.reference[rows] = higher
        terms = self._terms(scores, rows)
        self.total[rows] += terms
        self.mass[rows] += terms

    @torch.no_grad()
    def set(self, rows: Tensor | slice, log_sums: Tensor) -> None:
        """Replace the value of ``rows`` by freshly summed ones."""
        empty = log_sums == -torch.inf  # a row without a column
        self.reference[rows] = log_sums.double().masked_fill(empty, 0.0)
        self.total[rows] = (~empty).double()
        self.mass[rows] = 1.0

    def worn(self, count: int) -> Tensor:
        """Bool (count,): rows whose sum has lost digits and must be summed afresh."""
        # Written so that a total of zero, or one that rounding made negative or NaN, is worn too.
        return ~(self.mass[:count] <= MASS_LIMIT * self.total[:count])

    def _terms(self, scores: Tensor, rows: slice) -> Tensor:
        return (scores - self.reference[rows, None]).exp_().sum(1)  # float64, as the reference is
