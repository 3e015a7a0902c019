"""Diagnostics, which change no training: the numbers of `BankedInfoNCE.last`, and the drift.

Letters in shapes: n pairs in the micro-batch, h hard negatives per query, m filled slots of the
bank, S pairs of texts in the drift probe, d the embedding size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from contaccum.bank.drift import DriftProbe, compute_variance
from contaccum.bank.logits import MASKED
from contaccum.bank.row_losses import RowLosses

MASKED_THRESHOLD = MASKED / 2
"""Logits up to this value are masked: no score of two texts is as low."""


@dataclass(frozen=True, eq=False)
class Diagnostics:
    """Diagnostics of a micro-step, with the bank as it was before the micro-batch was enqueued.

    A fresh passage is one of the micro-batch or of the current update; the others are aged.
    """

    passages: Tensor  # (n, d)
    in_batch: Tensor  # logits (n, n, 1 + h), own positives masked
    against_bank: Tensor  # logits (n, m, 1 + h)
    invalid: Tensor | None  # bool (m, 1 + h), see `Pairs`; None without a bank
    pairs_in_use: range  # numbers of the banked pairs, see `MemoryBank`
    num_aged: int  # aged pairs in use, the oldest ones
    local_rows: RowLosses
    not_finite: Tensor  # bool scalar, True for a micro-batch that is not finite
    afterwards: dict[str, int]  # bank_fill and bank_age once it was enqueued; empty if it was not

    @property
    def local_loss(self) -> Tensor:
        """The entry ``local_loss`` of `numbers`, which costs less than all of them."""
        return self.local_rows.losses.mean()

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """The numbers by name, computed when they are first read.

        They stay tensors on the device, so a reader waits for the device only if it needs them. The
        softmax mass of a passage is its softmax probability, summed over the local rows of which it
        is a negative; hard negatives are not counted.

        - ``local_loss``: mean loss of the local rows,
        - ``columns``: number of columns per local row, before masks,
        - ``masked``: fraction of these columns, without the row's positive, that are masked,
        - ``embedding_spread``: mean squared distance of the local passages from their mean, divided
          by their mean squared length; near 0, the embeddings have collapsed to a point,

        with a bank

        - ``in_batch_mass``: mass of all passages of the micro-batch for the rows of other pairs,
          divided by n,
        - ``bank_mass``: mass of all banked passages, divided by n,
        - ``bank_mass_aged``: mean mass of an aged passage, divided by that of a fresh passage.
          1: age makes no difference. Near 0: the encoder has moved away from the bank,

        and with a bank in training

        - ``enqueued``: number of pairs that were stored in the bank as valid,
        - ``bank_fill``: number of pairs in use afterwards,
        - ``bank_age``: number of updates that have ended since the oldest of them was encoded.
        """
        n, _, num_documents = self.in_batch.shape
        columns = n * num_documents
        num_masked = (self.in_batch <= MASKED_THRESHOLD).sum() - n  # without the n own positives
        num_negatives = torch.full_like(num_masked, columns - 1)
        masses: dict[str, Tensor] = {}
        if self.invalid is not None:
            is_valid = ~self.invalid  # (m, 1 + h)
            columns += len(self.pairs_in_use) * is_valid.shape[1]
            is_masked = (self.against_bank <= MASKED_THRESHOLD) & is_valid
            num_masked = num_masked + is_masked.sum()
            num_negatives = num_negatives + is_valid.sum()

            normalizers = self.local_rows.log_normalizers[:, None]  # (n, 1)
            in_batch_mass = (self.in_batch[:, :, 0] - normalizers).exp().sum()
            mass_by_slot = (self.against_bank[:, :, 0] - normalizers).exp().sum(0)
            first, end = self.pairs_in_use.start, self.pairs_in_use.stop
            pairs = torch.arange(first, end, device=normalizers.device)
            # While the bank is filled, pairs have numbers below the number of slots.
            mass_by_pair = mass_by_slot[pairs % len(mass_by_slot)]  # oldest first
            aged_mass = mass_by_pair[: self.num_aged].sum()
            fresh_bank_mass = mass_by_pair[self.num_aged :].sum()
            num_fresh = n - 1 + len(self.pairs_in_use) - self.num_aged
            mean_fresh_mass = (in_batch_mass + fresh_bank_mass) / num_fresh
            masses = {
                "in_batch_mass": in_batch_mass / n,
                "bank_mass": (aged_mass + fresh_bank_mass) / n,
                "bank_mass_aged": aged_mass / self.num_aged / mean_fresh_mass,
            }
        variance = self.passages.var(0, correction=0).sum()
        spread = variance / self.passages.square().sum() * n
        if n == 1:  # one passage has no spread
            spread = spread * math.nan
        numbers: dict[str, Any] = {
            "local_loss": self.local_loss,
            "columns": columns,
            "masked": num_masked / (n * num_negatives).clamp_min(1),
            "embedding_spread": spread,
            **masses,
        }
        if self.afterwards:
            numbers["enqueued"] = n * ~self.not_finite
        return numbers | self.afterwards


def measure_drift(probe: DriftProbe, bank_age: int) -> dict[str, float]:
    """Measure the drift over ``bank_age`` updates, the age of the oldest entry in use.

    Returns:
        ``drift_age``, the updates between the two measurements that are compared, and for each
        tower ``drift_cosine_...`` (mean cosine of a text's old and new embedding),
        ``drift_shift_...`` (length of the mean shift, in units of the spread; see `RESIDUAL_BOUND`)
        and ``drift_residual_...`` (see `DriftProbe.compute_residuals`). The record is empty before
        the second measurement.
    """
    ages = [probe.updates[-1] - update for update in probe.updates[:-1]]
    if not ages:
        return {}
    # The oldest measurement within the age of the bank, or else the last but one.
    within_bank = [index for index, age in enumerate(ages) if age <= max(bank_age, 1)]
    old_index = within_bank[0] if within_bank else len(ages) - 1
    old = probe.embeddings[old_index]  # (2, S, d)
    new = probe.embeddings[len(ages)]
    values_by_name = {  # (2,) each
        "cosine": cosine_similarity(new, old, dim=-1).mean(-1),
        "shift": (new - old).mean(1).norm(dim=-1) / compute_variance(new).sqrt(),
        "residual": probe.compute_residuals()[old_index],
    }
    record: dict[str, float] = {"drift_age": ages[old_index]}
    for name, (query_value, passage_value) in values_by_name.items():
        record[f"drift_{name}_query"] = float(query_value)
        record[f"drift_{name}_passage"] = float(passage_value)
    return record
