"""Products of float32 queries and the documents of an index, which may be float16.

On a GPU, float16 documents are not converted: a float32 matrix is split into two in float16, whose
products are as exact together as one in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# The second of the two matrices is scaled by this factor. It holds what float16, with 11 bits, has
# rounded away from the first.
_RESIDUAL_SCALE = 2.0**11
# The largest number of each row is between half of this and this after scaling. It is the largest
# power of 2 in float16, so that numbers 2^-38 times as large are not rounded to 0.
_LARGEST = 2.0**15
# Rows of the right matrix that are multiplied as one matrix of a batch. A GPU computes the few rows
# of the result with few of its processors, unless the long sum is divided.
_ROWS_PER_SUM = 8192


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return the product (n, m) of ``left`` (n, k), at least float32, and ``right`` (k, m)."""
    can_multiply_half = (
        right.dtype == torch.float16
        and left.dtype == torch.float32
        and right.is_cuda
        and torch.version.cuda is not None
        and hasattr(torch.ops.aten.mm, "dtype")  # from torch 2.8 on
    )
    if can_multiply_half:
        return multiply_in_halves(left, right, _multiply_half)
    return left @ right.to(left.dtype)


def multiply_in_halves(
    left: Tensor, right: Tensor, multiply_half: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return the product of ``left``, float32 (n, k), and ``right``, float16 (k, m), as float32.

    ``multiply_half`` returns the float32 product of two float16 matrices.
    """
    largest = torch.linalg.vector_norm(left, math.inf, dim=1, keepdim=True)
    # A row of zeros stays zero.
    largest = largest.clamp_min(torch.finfo(torch.float32).tiny * _LARGEST)
    # A power of 2, so that scaling rounds nothing: equal scores stay equal.
    scale = _LARGEST * torch.frexp(largest).mantissa / largest
    scaled = left * scale
    high = scaled.half()
    low = scaled.sub_(high).mul_(_RESIDUAL_SCALE).half()
    products = multiply_half(torch.cat([high, low]), right)
    high_product, low_product = products.chunk(2)
    return high_product.add_(low_product, alpha=1 / _RESIDUAL_SCALE).div_(scale)


def _multiply_half(left: Tensor, right: Tensor) -> Tensor:
    """Return the float32 product of two float16 matrices, (n, k) and (k, m)."""
    num_sums = left.shape[1] // _ROWS_PER_SUM
    if num_sums < 2:
        return torch.mm(left, right, out_dtype=torch.float32)
    end = num_sums * _ROWS_PER_SUM
    left_parts = left[:, :end].unflatten(1, (num_sums, _ROWS_PER_SUM)).transpose(0, 1)
    right_parts = right[:end].unflatten(0, (num_sums, _ROWS_PER_SUM))
    product = torch.bmm(left_parts, right_parts, out_dtype=torch.float32).sum(0)
    if end < left.shape[1]:
        product += torch.mm(left[:, end:], right[end:], out_dtype=torch.float32)
    return product


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute products of float32 matrices on a GPU in full float32 within a ``with`` block."""
    matmul = torch.backends.cuda.matmul
    # Since torch 2.9, reading the older name can be an error.
    name = "fp32_precision" if hasattr(matmul, "fp32_precision") else "allow_tf32"
    setting = getattr(matmul, name)
    setattr(matmul, name, "ieee" if name == "fp32_precision" else False)
    try:
        yield
    finally:
        setattr(matmul, name, setting)
