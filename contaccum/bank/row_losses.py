"""Losses of the rows of the score matrix.

A row is a query, of the micro-batch (local) or of the memory bank (banked); a column is a document.
A row's loss is the logsumexp of its logits, minus the logit of its own positive. Local rows may
have several similarity directions and hardness weights (`contaccum.bank.directions`); banked rows
have neither. The blocks of the score matrix are explained in `contaccum.bank.info_nce`.

Letters in shapes: n pairs in the micro-batch, h hard negatives per query, m bank rows, d the
embedding size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from contaccum.bank.directions import add_hardness, score_direction
from contaccum.bank.false_negatives import PositivesTable, make_rules
from contaccum.bank.logits import LogitBlocks, Pairs
from contaccum.bank.memory_bank import MemoryBank
from contaccum.bank.settings import LossSettings


def compute_banked_row_losses(bank: MemoryBank, blocks: LogitBlocks, bank_weight: float) -> Tensor:
    """Compute the losses (m,) of banked queries.

    With s(i, j) the logits, p(i) the row's own positive and w the weight of a banked pair,

        l_i = log( exp s(i, p(i)) + w sum_{j banked} exp s(i, j) + sum_{j local} exp s(i, j) )
              - s(i, p(i)),

    where j runs over the negatives of row i. `MemoryBank.positive_logits` holds s(i, p(i)), and
    `MemoryBank.log_sums` the logarithm of the sum over banked j, without w. The values for rows
    that are not in use are arbitrary.
    """
    positive_logits = bank.positive_logits[: bank.num_filled_slots]
    terms = [
        positive_logits,
        bank.log_sums + math.log(bank_weight),
        blocks.from_bank.flatten(1).logsumexp(1),
    ]
    return torch.stack(terms).logsumexp(0) - positive_logits


def compute_local_row_losses(
    local: Pairs,
    blocks: LogitBlocks,
    bank_weight: float,
    passage_mean: Tensor | None,
    settings: LossSettings,
    positives: PositivesTable | None,
) -> Tensor:
    """Compute the losses (n,) of local queries.

    The loss is S - s(i, p(i)). With one direction, S is the logsumexp of the row's logits, where a
    banked column counts ``bank_weight`` times. With several directions, each has such a logsumexp,
    and S is the logsumexp of all of them (``partition_mode="joint"``) or their mean
    (``"per_direction"``).

    Args:
        local: the micro-batch, with documents from which ``passage_mean`` was subtracted.
        blocks: its logits.
        bank_weight: weight of a banked column.
        passage_mean: (d,), or None if nothing was subtracted.
        settings: the settings of the loss.
        positives: table of the data set's positives, or None.
    """
    score_offset = _compute_score_offset(local, passage_mean, settings.temperature)
    in_batch = weight_local_logits(local, blocks, passage_mean, settings)
    against_bank_sums = blocks.against_bank_sums + math.log(bank_weight)
    log_sums = torch.cat([in_batch.flatten(1), against_bank_sums], dim=1).logsumexp(1)
    if len(settings.directions) == 1:
        return log_sums - local.positive_logits

    # Subtracting the mean from all columns changes no loss, but in the other directions documents
    # are rows as well. So the mean is added again.
    documents = local.documents
    if passage_mean is not None:
        documents = documents + passage_mean
    positive_logits = local.positive_logits + score_offset
    original = local._replace(documents=documents, positive_logits=positive_logits)
    log_sums_by_direction = [log_sums + score_offset]
    for direction in settings.directions[1:]:  # the first is always query_to_doc
        direction_log_sums = _compute_direction_log_sums(direction, original, settings, positives)
        log_sums_by_direction.append(direction_log_sums)
    stacked = torch.stack(log_sums_by_direction)
    if settings.partition_mode == "joint":
        return stacked.logsumexp(0) - positive_logits
    return stacked.mean(0) - positive_logits


def weight_local_logits(
    local: Pairs, blocks: LogitBlocks, passage_mean: Tensor | None, settings: LossSettings
) -> Tensor:
    """Return the logits (n, n, 1 + h) within the micro-batch, with hardness weights if set."""
    if settings.hardness_mode is None:
        return blocks.in_batch
    score_offset = _compute_score_offset(local, passage_mean, settings.temperature)
    similarities = (blocks.in_batch + score_offset[:, None, None]) * settings.temperature
    return add_hardness(
        blocks.in_batch, similarities, settings.hardness_mode, settings.hardness_strength
    )


def _compute_score_offset(local: Pairs, passage_mean: Tensor | None, temperature: float) -> Tensor:
    """Compute what must be added to each row's logits (n,) because the mean was subtracted.

    Subtracting the mean from all documents lowers every logit of row i by q_i · mean / temperature.
    A softmax over one direction does not depend on this constant. Hardness weights and a softmax
    over several directions do.
    """
    if passage_mean is None:
        return torch.zeros_like(local.positive_logits)
    return local.queries @ passage_mean / temperature


def _compute_direction_log_sums(
    direction: str, local: Pairs, settings: LossSettings, positives: PositivesTable | None
) -> Tensor:
    """Compute the logsumexp (n,) of each row's logits in a direction other than query_to_doc.

    Args:
        local: the micro-batch, with documents from which no mean was subtracted.
    """
    if positives is not None and direction == "doc_to_query":
        positives = positives.swap()  # rows are passages, columns are queries
    rules = make_rules(settings, positives)
    logits = score_direction(direction, local, settings.temperature, rules)
    return logits.flatten(1).logsumexp(1)
