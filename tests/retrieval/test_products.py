"""Products with float16 documents are as exact as in float32, without a float32 copy of them."""

import pytest
import torch
from torch import Tensor

from contaccum.bank.full_softmax import DocumentBlock, compute_full_softmax_loss
from contaccum.retrieval.products import multiply, multiply_in_halves, without_tf32


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
def test_gradient_of_the_full_softmax_is_as_exact_with_products_in_halves(confidence):
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
    for product in (multiply, multiply_like_a_gpu):
        leaf = queries.detach().float().requires_grad_()
        excluded = rows[:, None]
        blocks = [DocumentBlock(0, documents, scales)]
        positives = unit_documents[rows].float()
        loss = compute_full_softmax_loss(leaf, positives, excluded, blocks, 0.05, multiply=product)
        loss.backward()
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
