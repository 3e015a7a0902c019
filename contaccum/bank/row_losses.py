"""Row losses: the logsumexp of a row over its columns, less the logit of its own positive.

Local rows may have more directions and hardness weights; see `directions`. Banked rows have
neither.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from contaccum.bank.directions import add_hardness, direction_logits
from contaccum.bank.false_negatives import PositivesTable, make_rules
from contaccum.bank.logits import Pairs
from contaccum.bank.memory_bank import LogitBlocks, MemoryBank
from contaccum.bank.settings import LossSettings


def banked_row_losses(bank: MemoryBank, blocks: LogitBlocks, bank_weight: float) -> Tensor:
    """Compute the losses (m,) of banked queries; those of rows that are not in use mean nothing.

    A banked negative counts ``bank_weight`` times, a local document and the row's own positive
    once.
    """
    positive_logits = bank.positive_logits[: bank.num_used_slots]
    terms = [
        positive_logits,
        bank.log_sums + math.log(bank_weight),
        blocks.from_bank.flatten(1).logsumexp(1),
    ]
    return torch.stack(terms).logsumexp(0) - positive_logits


def local_row_losses(
    local: Pairs,
    blocks: LogitBlocks,
    bank_weight: float,
    passage_mean: Tensor | None,
    settings: LossSettings,
    positives: PositivesTable | None,
) -> Tensor:
    """Compute the losses (n,) of local queries, over all directions.

    Args:
        local: the micro-batch, with documents relative to ``passage_mean`` (d,).
        positives: known positives of the data set.
    """
    in_batch = blocks.in_batch
    if settings.hardness_mode is not None:
        score_offset = _score_offset(local, passage_mean, settings.temperature)
        similarities = (in_batch + score_offset[:, None, None]) * settings.temperature
        strength = settings.hardness_strength
        in_batch = add_hardness(in_batch, similarities, settings.hardness_mode, strength)
    against_bank_sums = blocks.against_bank_sums + math.log(bank_weight)
    log_sums = torch.cat([in_batch.flatten(1), against_bank_sums], dim=1).logsumexp(1)
    if len(settings.directions) == 1:
        return log_sums - local.positive_logits

    score_offset = _score_offset(local, passage_mean, settings.temperature)
    documents = local.documents
    if passage_mean is not None:
        documents = documents + passage_mean
    positive_logits = local.positive_logits + score_offset
    uncentred = local._replace(documents=documents, positive_logits=positive_logits)
    sums_by_direction = [log_sums + score_offset]
    for direction in settings.directions[1:]:
        sums_by_direction.append(_direction_log_sums(direction, uncentred, settings, positives))
    stacked = torch.stack(sums_by_direction)
    if settings.partition_mode == "joint":
        return stacked.logsumexp(0) - positive_logits
    return stacked.mean(0) - positive_logits


def _score_offset(local: Pairs, passage_mean: Tensor | None, temperature: float) -> Tensor:
    """Return what subtracting the mean from all documents took from the logits of each row, (n,).

    No softmax over one direction depends on it; hardness weights and several directions do.
    """
    if passage_mean is None:
        return torch.zeros_like(local.positive_logits)
    return local.queries @ passage_mean / temperature


def _direction_log_sums(
    direction: str, local: Pairs, settings: LossSettings, positives: PositivesTable | None
) -> Tensor:
    """Compute the log-sums (n,) of a direction over the micro-batch."""
    if positives is not None and direction == "doc_to_query":
        positives = positives.swapped()
    rules = make_rules(settings, positives)
    logits = direction_logits(direction, local, settings.temperature, rules)
    return logits.flatten(1).logsumexp(1)
