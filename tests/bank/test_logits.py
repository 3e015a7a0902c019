"""masked_logits: one function that scores every block of the matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from contaccum.bank.logits import MASKED, NO_ID, Pairs, masked_logits

N, WIDTH, D = 4, 3, 5


def make_pairs(seed: int, n: int = N) -> Pairs:
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(n, D, generator=generator, dtype=torch.float64)
    documents = torch.randn(n, WIDTH, D, generator=generator, dtype=torch.float64)
    return Pairs(
        queries=queries,
        documents=documents,
        query_ids=torch.full((2, n), NO_ID),
        document_ids=torch.full((2, n, WIDTH), NO_ID),
        positive_logits=(queries * documents[:, 0]).sum(1),
        invalid=torch.zeros(n, WIDTH, dtype=torch.bool),
    )


def exclude_negative(rows: Pairs, columns: Pairs, logits: Tensor) -> Tensor:
    return logits < 0


def exclude_hard_negatives(rows: Pairs, columns: Pairs, logits: Tensor) -> Tensor:
    excluded = torch.zeros_like(logits, dtype=torch.bool)
    excluded[:, :, 1:] = True
    return excluded


def test_a_document_is_masked_if_it_is_not_valid_or_if_any_rule_excludes_it():
    rows = make_pairs(0)
    columns = make_pairs(1, n=6)
    columns.invalid[2] = True
    rules = [exclude_negative, exclude_hard_negatives]
    logits = masked_logits(rows, columns, 0.5, rules)
    for row in range(N):
        for column in range(6):
            for k in range(WIDTH):
                score = rows.queries[row] @ columns.documents[column, k] / 0.5
                if column == 2 or score < 0 or k > 0:
                    assert logits[row, column, k] == MASKED
                else:
                    assert logits[row, column, k].item() == pytest.approx(score.item())
    assert (logits == MASKED).float().mean() < 0.95


def test_a_row_s_own_positive_is_masked_in_its_own_block_alone():
    pairs = make_pairs(0)
    is_own_positive = torch.zeros(N, N, WIDTH, dtype=torch.bool)
    is_own_positive[:, :, 0] = torch.eye(N, dtype=torch.bool)
    assert torch.equal(masked_logits(pairs, pairs, 1.0, []) == MASKED, is_own_positive)
    other_pairs = pairs._replace(queries=pairs.queries.clone())
    assert (masked_logits(other_pairs, pairs, 1.0, []) != MASKED).all()
