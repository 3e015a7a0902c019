"""Hardness: negatives that score high count for more, as in sentence-transformers' MultipleNegativesRankingLoss.

To the logit of such a negative comes its similarity times a strength, of which no gradient is taken: in all it is its
score times 1 + strength * temperature, with the gradient of the score alone. It knows no bank.

Columns are relative to the mean of their tower, where entries move along with it. That lowers all scores of a row by
one number, its score with the mean, which no row loss sees; but penalties do. So a row is taken to be lower by the
penalty of that number too (:meth:`Hardness.off`): nothing has to be added to the columns of other pairs, which are
nearly all, and the tables hold numbers that stay true while the mean moves.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

HARDNESS_MODES = ("in_batch_negatives", "hard_negatives", "all_negatives")


class Hardness(NamedTuple):
    """What penalties multiply scores by, over and above 1: strength times temperature, or 0."""

    own: float | Tensor  # those of a row with the hard negatives of its own pair
    others: float | Tensor  # and with all columns of other pairs

    @classmethod
    def of(cls, mode: str | None, strength: float, temperature: float | Tensor) -> Hardness | None:
        """That of a setting; None: no penalties."""
        if mode is None:
            return None
        penalty = strength * temperature
        return cls(penalty if mode != "in_batch_negatives" else 0.0, penalty if mode != "hard_negatives" else 0.0)

    def penalised(self, x: Tensor) -> Tensor:
        """Vectors or scores of other pairs' columns, times what they are to be; with their own gradient."""
        return x + self.others * x.detach()

    def off(self, of_mean: Tensor) -> Tensor:
        """How much lower a row is taken to be, (k,), whose scores with the mean are ``of_mean`` (k,)."""
        return self.others * of_mean.detach()

    def off_own(self, of_mean: Tensor) -> Tensor:
        """What a row's own hard negatives then still lack, (k,)."""
        return (self.own - self.others) * of_mean.detach()

    def of_local(self, scores: Tensor, of_mean: Tensor) -> Tensor:
        """Those of a micro-batch with itself, (n, n (1 + h)), with the penalties."""
        n = len(of_mean)
        hard = self.penalised(scores).view(n, n, -1)
        own, found = hard.diagonal(dim1=0, dim2=1), scores.detach().view(n, n, -1).diagonal(dim1=0, dim2=1)
        own[0] -= self.others * found[0] + self.off(of_mean)
        own[1:] += (self.own - self.others) * found[1:] + self.off_own(of_mean)
        return hard.view(n, -1)
