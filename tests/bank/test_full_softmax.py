"""The loss over all documents equals a dense softmax, whatever the blocks.

Products with float16 embeddings are as exact as in float32, without a float32 copy of them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from contaccum.bank import full_softmax
from contaccum.bank.full_softmax import (
    NO_ROW,
    DocumentBlock,
    compute_full_softmax_loss,
    multiply_in_halves,
    without_tf32,
)


def compute_dense_loss(
    queries: Tensor, documents: Tensor, positive_rows: Tensor, excluded: list[list[int]], tau: float
) -> Tensor:
    """Compute the loss from one matrix of all logits by the cross-entropy of torch."""
    logits = queries @ documents.T / tau
    for row, columns in enumerate(excluded):
        for column in columns:
            logits[row, column] = -torch.inf
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
    for row in range(num_queries):
        candidates = torch.randperm(num_documents, generator=generator)[: row % 4].tolist()
        excluded.append([column for column in candidates if column != positive_rows[row]])
    width = 1 + max(map(len, excluded))
    padded = torch.full((num_queries, width), NO_ROW)
    padded[:, 0] = positive_rows
    for row, columns in enumerate(excluded):
        padded[row, 1 : 1 + len(columns)] = torch.tensor(columns, dtype=torch.int64)
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
    losses = []
    gradients = []
    for blocks in (
        make_blocks(scaled, 9),
        [
            DocumentBlock(x.first, x.documents, scales[x.first :][:9])
            for x in make_blocks(documents, 9)
        ],
    ):
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
    loss = compute_full_softmax_loss(leaves, documents[:8], positive_rows[:, None], blocks, 0.04)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    error = (leaves.grad.double() - queries.grad).norm() / queries.grad.norm()
    assert error < {torch.float32: 1e-5, torch.bfloat16: 4e-3}[dtype]


def multiply_like_a_gpu(left: Tensor, right: Tensor) -> Tensor:
    """Multiply as a GPU multiplies float16: products and sums are in float32."""
    return multiply_in_halves(left, right, lambda a, b: a.float() @ b.float())


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_products_in_halves_are_as_exact_as_in_float32(size):
    generator = torch.Generator().manual_seed(0)
    left = size * torch.randn(6, 300, generator=generator)
    left[3] = 0
    right = torch.randn(300, 40, generator=generator).half()
    expected = left.double() @ right.double()
    error = (multiply_like_a_gpu(left, right) - expected).norm() / expected.norm()
    assert error < 5e-7


def test_products_of_integers_are_exact_so_that_equal_scores_stay_equal():
    generator = torch.Generator().manual_seed(0)
    left = torch.randint(-9, 10, (50, 384), generator=generator).float()
    right = torch.randint(-9, 10, (384, 200), generator=generator).half()
    assert torch.equal(multiply_like_a_gpu(left, right), left @ right.float())


@pytest.mark.parametrize("confidence", [0.0, 0.5])
def test_gradient_of_the_full_softmax_is_as_exact_with_products_in_halves(monkeypatch, confidence):
    """The weights of a softmax over many documents have a wide range, and lengths differ."""
    generator = torch.Generator().manual_seed(0)
    documents = torch.randn(20_000, 48, generator=generator)
    documents *= torch.logspace(-2, 2, 20_000)[:, None]
    documents = documents.half()
    documents[5] = 0
    scales = documents.float().norm(dim=1).reciprocal().nan_to_num(posinf=0.0)
    unit_documents = torch.nn.functional.normalize(documents.double(), dim=1)
    rows = torch.tensor([7, 5000, 19_999])
    queries = torch.randn(3, 48, generator=generator).double()
    queries = (1 - confidence) * queries / 48**0.5 + confidence * unit_documents[rows]
    queries = torch.nn.functional.normalize(queries, dim=1).requires_grad_()
    logits = queries @ unit_documents.T / 0.05
    torch.nn.functional.cross_entropy(logits, rows).backward()

    errors = []
    for multiply in (full_softmax.multiply, multiply_like_a_gpu):
        monkeypatch.setattr(full_softmax, "multiply", multiply)
        leaf = queries.detach().float().requires_grad_()
        excluded = rows[:, None]
        blocks = [DocumentBlock(0, documents, scales)]
        positives = unit_documents[rows].float()
        compute_full_softmax_loss(leaf, positives, excluded, blocks, 0.05).backward()
        errors.append((leaf.grad.double() - queries.grad).norm() / queries.grad.norm())
    # The gradient of a confident query is a small difference, which float32 rounds as well.
    assert errors[1] < max(2 * errors[0], 1e-6)
    assert errors[0] < 1e-3


def test_tf32_is_off_only_within_the_block():
    matmul = torch.backends.cuda.matmul
    setting = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        with without_tf32():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = setting
