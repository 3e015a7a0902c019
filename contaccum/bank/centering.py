"""Centring of gradients, so that no update moves the document embeddings as a whole.

In a full batch the gradients of all documents sum to zero, because the softmax pulls as much as it
pushes. In a micro-batch against a bank they do not, because banked documents get no gradient. Their
sum, called the remainder, drives new embeddings away from old ones. (The gradients of queries do
not sum to zero in a full batch either, so they are left as they are.)

`GradientCentering` removes the remainder of the whole update, although it gets the micro-batches
one after another. The loss of a micro-batch is a mean over its n pairs, and has the weight n in the
update. Let R be the weighted sum of the centred gradients of the update's earlier micro-batches,
g_1 ... g_r the gradients of the r = n (1 + h) documents of the current micro-batch, with h hard
negatives per query, S = R + n (g_1 + ... + g_r), and f = n / (number of pairs in this micro-batch
and in those that follow in the update). Then

    centred g_i = g_i - f S / (n r),    R <- (1 - f) S.

The last micro-batch of an update has f = 1, so the weighted sum of the centred gradients of the
update is zero. The state is one vector R. docs/study.md has the measurements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contaccum.errors import warn_once


class GradientCentering:
    """The remainder of the current update, which is subtracted from the gradients of documents.

    Args:
        pairs_per_update: number of pairs in every update, until `begin_update` is called; None
            centres each micro-batch by itself.

    Attributes:
        num_pairs: number of pairs in the current update, or None.
    """

    def __init__(self, pairs_per_update: int | None) -> None:
        self.pairs_per_update = pairs_per_update
        self._update = 0  # number of the current update
        self._num_unexpected = 0  # latest updates in a row without `pairs_per_update` pairs
        self.begin_update(pairs_per_update)

    def begin_update(self, num_pairs: int | None) -> None:
        """Drop the remainder, and set the number of pairs of the update that begins."""
        self.num_pairs = num_pairs
        self._num_pairs_so_far = 0
        self._num_remaining_pairs = num_pairs or 0
        self._remainder: Tensor | None = None  # (d,)

    def centre(
        self, gradient: Tensor, update: int, is_drift_expected: bool, not_finite: Tensor
    ) -> None:
        """Centre the gradient of a micro-batch in place.

        An update of a single document is not centred, because its gradient would become zero. The
        gradient of a micro-batch that is not finite is not centred either, and the next micro-batch
        gets the remainder of the micro-batches before it.

        Args:
            gradient: (n, 2 + h, d), of each pair's query, then of its documents.
            update: number of the update, which differs from that of the last call if a new update
                begins.
            is_drift_expected: True if the bank uses pairs of an older encoder. Only then centring
                begins; it goes on to the end of the update, because the remainder so far is spread
                over the micro-batches that follow.
            not_finite: bool scalar, True for a micro-batch that is not finite.
        """
        n = len(gradient)
        if update != self._update:
            self._check_number_of_pairs()
            self._update = update
            self.begin_update(self.num_pairs)
        if self._num_remaining_pairs < n:
            # The number of pairs is None or too small: centring begins anew.
            self._num_remaining_pairs = max(self.num_pairs or 0, n)
            self._remainder = None
        documents = gradient[:, 1:]  # (n, 1 + h, d), a view
        num_documents = n * documents.shape[1]
        is_only_document = num_documents == 1 and self._num_remaining_pairs == 1
        if self._remainder is None and is_drift_expected and not is_only_document:
            self._remainder = gradient.new_zeros(gradient.shape[2])
        if self._remainder is not None:
            fraction = n / self._num_remaining_pairs
            remainder = self._remainder.add(documents.sum((0, 1)), alpha=n)  # (d,), S
            correction = remainder * (fraction / (n * num_documents))
            documents -= correction.masked_fill(not_finite, 0)
            new_remainder = remainder * (1 - fraction)
            self._remainder = torch.where(not_finite, self._remainder, new_remainder)
        self._num_pairs_so_far += n
        self._num_remaining_pairs -= n

    def _check_number_of_pairs(self) -> None:
        """Warn if the update that ends, and others before it, had not `pairs_per_update` pairs."""
        expected = self.pairs_per_update
        num_pairs = self._num_pairs_so_far
        # If `begin_update` was called, its number counts.
        if expected is None or num_pairs in (0, expected) or self.num_pairs != expected:
            self._num_unexpected = 0
            return
        # Not at once, because the last update of an epoch is shorter, and a gradient scaler that
        # skips a step joins two updates. The first update cannot be shorter.
        is_certain = self._update == 0 and num_pairs < expected
        self._num_unexpected += 2 if is_certain else 1
        if self._num_unexpected == 2:
            warn_once(
                f"pairs_per_update={expected}, but an update has {num_pairs} pairs: gradients are "
                f"not centred over whole updates. Set pairs_per_update={num_pairs}, or change the "
                "batch size or the accumulation steps of the trainer"
            )
