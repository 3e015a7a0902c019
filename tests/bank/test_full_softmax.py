"""The loss over all documents equals a dense softmax, whatever the blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence

from contaccum.bank.full_softmax import NO_ROW, DocumentBlock, compute_full_softmax_loss
from contaccum.retrieval.products import multiply


def compute_dense_loss(
    queries: Tensor, documents: Tensor, positive_rows: Tensor, excluded: list[list[int]], tau: float
) -> Tensor:
    """Compute the loss from one matrix of all logits by the cross-entropy of torch."""
    logits = queries @ documents.T / tau
    for row, columns in enumerate(excluded):
        logits[row, columns] = -torch.inf
    return torch.nn.functional.cross_entropy(logits, positive_rows)


def make_blocks(documents: Tensor, size: int) -> list[DocumentBlock]:
    return [
        DocumentBlock(first, documents[first : first + size])
        for first in range(0, len(documents), size)
    ]


def make_case(num_documents: int, dim: int, num_queries: int) -> tuple:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(num_queries, dim, generator=generator, dtype=torch.float64)
    documents = torch.randn(num_documents, dim, generator=generator, dtype=torch.float64)
    positive_rows = torch.randint(num_documents, (num_queries,), generator=generator)
    excluded = []
    labels = []
    for row, positive in enumerate(positive_rows.tolist()):
        candidates = torch.randperm(num_documents, generator=generator)[: row % 4].tolist()
        excluded.append([column for column in candidates if column != positive])
        labels.append(torch.tensor([positive, *excluded[-1]]))
    padded = pad_sequence(labels, batch_first=True, padding_value=NO_ROW)
    return queries, documents, positive_rows, excluded, padded


@pytest.mark.parametrize("block_size", [1, 7, 1000, 5000])
def test_loss_and_gradient_equal_the_dense_softmax_to_1e_12(block_size):
    queries, documents, positive_rows, excluded, padded = make_case(2003, 24, 16)
    dense_queries = queries.clone().requires_grad_()
    expected = compute_dense_loss(dense_queries, documents, positive_rows, excluded, 0.05)
    expected.backward()

    queries.requires_grad_()
    blocks = make_blocks(documents, block_size)
    loss = compute_full_softmax_loss(queries, documents[positive_rows], padded, blocks, 0.05)
    (3 * loss).backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12, rel=1e-12)
    assert torch.allclose(queries.grad, 3 * dense_queries.grad, atol=1e-12, rtol=1e-12)
    assert dense_queries.grad.abs().max() > 0.1


def test_scales_multiply_the_documents():
    queries, documents, positive_rows, _, padded = make_case(50, 8, 4)
    scales = torch.rand(50, dtype=torch.float64) + 0.5
    scaled = documents * scales[:, None]
    blocks_with_scales = [
        block._replace(scales=scales[block.first :][:9]) for block in make_blocks(documents, 9)
    ]
    losses = []
    gradients = []
    for blocks in (make_blocks(scaled, 9), blocks_with_scales):
        rows = queries.clone().requires_grad_()
        loss = compute_full_softmax_loss(rows, scaled[positive_rows], padded, blocks, 0.5)
        loss.backward()
        losses.append(loss.item())
        gradients.append(rows.grad)
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    assert torch.allclose(*gradients, atol=1e-12)


def test_a_block_with_all_documents_excluded_changes_nothing():
    documents = torch.eye(3, dtype=torch.float64)
    queries = torch.ones(1, 3, dtype=torch.float64)
    excluded = torch.tensor([[2, 0, 1]])
    loss = compute_full_softmax_loss(
        queries, documents[2:], excluded, make_blocks(documents, 1), 1.0
    )
    assert loss.item() == pytest.approx(0.0, abs=1e-12)  # its positive is its only document


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_solved_queries_are_exact(dtype):
    documents = torch.randn(40, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    documents = normalize(documents, dim=1).to(dtype)
    positive_rows = torch.arange(8)
    queries = documents[:8].double().requires_grad_()
    logits = queries @ documents.double().T / 0.04
    expected = torch.nn.functional.cross_entropy(logits, positive_rows)
    expected.backward()
    assert 1e-9 < expected < 1e-6

    leaves = documents[:8].clone().requires_grad_()
    blocks = make_blocks(documents, 7)
    loss = compute_full_softmax_loss(
        leaves, documents[:8], positive_rows[:, None], blocks, 0.04, multiply=multiply
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    error = (leaves.grad.double() - queries.grad).norm() / queries.grad.norm()
    assert error < {torch.float32: 1e-5, torch.bfloat16: 4e-3}[dtype]
