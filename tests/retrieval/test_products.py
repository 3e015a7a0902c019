"""Products with float16 documents are as exact as in float32, without a float32 copy of them."""

import pytest
import torch
from torch import Tensor

from contaccum.retrieval.products import multiply_in_halves, without_tf32


def multiply_like_a_gpu(left: Tensor, right: Tensor) -> Tensor:
    """Multiply as a GPU multiplies float16: products and sums are in float32."""
    return multiply_in_halves(left, right, lambda a, b: a.float() @ b.float())


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_products_in_halves_are_as_exact_as_in_float32(size):
    generator = torch.Generator().manual_seed(0)
    left = size * torch.randn(6, 300, generator=generator)
    left[:2] = size * torch.softmax(10 * left[:2] / size, dim=1)  # weights of a wide range
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
