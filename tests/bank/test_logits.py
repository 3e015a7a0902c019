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
        valid=torch.ones(n, WIDTH, dtype=torch.bool),
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
    columns.valid[2] = False
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


def test_query_drift_changes_the_gradient_of_documents_and_no_logit():
    """Two runs of two rows each: their documents' gradient is that of queries that have moved."""
    rows = make_pairs(0)
    drift = torch.randn(2, D, dtype=torch.float64)
    columns = make_pairs(1)
    columns.documents.requires_grad_()
    logits = masked_logits(rows, columns, 0.5, [], drift)
    assert torch.equal(logits, masked_logits(rows, columns, 0.5, []))
    weights = torch.randn(logits.shape, dtype=torch.float64)
    (logits * weights).sum().backward()
    moved_queries = rows.queries + drift.repeat_interleave(2, dim=0)
    expected = torch.einsum("rck,rd->ckd", weights, moved_queries) / 0.5
    assert torch.allclose(columns.documents.grad, expected, rtol=1e-13)
