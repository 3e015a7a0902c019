"""Comparison of `BankedInfoNCE`'s gradients with a dense float64 loss of the whole batch.

The bank contains exactly the rest of the batch and the embeddings do not change. In this case the
accumulated gradient must equal the gradient of the whole batch, for queries, passages and hard
negatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from measuring.run import Cases, Run
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from contaccum import BankedInfoNCE

TEMPERATURE = 0.05


@dataclass(frozen=True)
class Sizes:
    """Sizes of this part."""

    pairs: int = 512  # pairs per update
    local: int = 8  # pairs per micro-batch
    hard_negatives: int = 1  # hard negatives per query
    dimension: int = 768


SIZES = Sizes()
TINY = Sizes(16, 4, 1, 16)


PRECISIONS = {
    "float64": (torch.float64, 1e-12),
    "float32": (torch.float32, 1e-5),
    "bfloat16 autocast": (torch.bfloat16, 1e-2),
    # Without a scaler, gradients close to float16's smallest numbers are rounded more coarsely.
    "float16 autocast": (torch.float16, 1e-2),
    "float16 autocast, scaler": (torch.float16, 2e-3),
}
"""{precision: (type of the embeddings, largest relative error that rounding may cause)}"""


def list_cases(sizes: Sizes, run: Run) -> Cases:
    """Yield a case for each precision, without and with compensation of drift."""
    batch = make_batch(sizes, run.device)
    for precision in PRECISIONS:
        for drift_compensation in ("none", "auto"):
            measure = partial(measure_errors, *batch, sizes.local, precision, drift_compensation)
            yield f"{precision}, {drift_compensation}", measure


def measure_errors(
    embeddings: Sequence[Tensor],
    ids: Sequence[Tensor],
    local: int,
    precision: str,
    drift_compensation: str,
) -> dict[str, Any]:
    """Compare accumulated gradients with the whole batch's gradients, in a precision."""
    dtype, limit = PRECISIONS[precision]
    # The reference uses the rounded embeddings, so that only the error of the loss is measured.
    expected = dense_gradients([x.to(dtype) for x in embeddings], ids[1])
    gradients = accumulated_gradients(embeddings, ids, local, precision, drift_compensation)
    errors = {}
    names = ("queries", "passages", "negatives")
    for name, gradient, reference in zip(names, gradients, expected, strict=True):
        errors[name] = float((gradient - reference).norm() / reference.norm())
    # Not max(), which may ignore NaN.
    passed = all(error <= limit for error in errors.values())
    return {"relative_errors": errors, "limit": limit, "passed": passed}


def make_batch(sizes: Sizes, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Return random float64 embeddings of queries, passages and hard negatives, and their ids.

    The last eighth of the passages repeats the first eighth, to test the masking of duplicates.

    Returns:
        [queries (N, d), passages (N, d), negatives (N, h, d)] and their ids (N,), (N,) and (N, h).
    """
    generator = torch.Generator().manual_seed(0)
    n, h, d = sizes.pairs, sizes.hard_negatives, sizes.dimension
    queries = torch.randn(n, d, generator=generator).double()
    passages = queries + torch.randn(n, d, generator=generator)
    negatives = queries[:, None] + 2 * torch.randn(n, h, d, generator=generator)
    query_ids = torch.arange(n)
    passage_ids = torch.arange(n) % (n - n // 8)
    negative_ids = n + torch.arange(n * h).view(n, h)
    embeddings = [queries, passages[passage_ids], negatives]
    ids = [query_ids, passage_ids, negative_ids]
    return [x.to(device) for x in embeddings], [x.to(device) for x in ids]


def dense_gradients(embeddings: Sequence[Tensor], passage_ids: Tensor) -> list[Tensor]:
    """Compute the gradients of the InfoNCE loss of the whole batch, in float64 on the CPU.

    Args:
        embeddings: queries (N, d), passages (N, d) and hard negatives (N, h, d).
        passage_ids: (N,), equal ids are duplicates. A duplicate of a row's positive is masked.
    """
    leaves = [x.detach().cpu().double().requires_grad_() for x in embeddings]
    ids = passage_ids.cpu()
    queries, passages, negatives = (normalize(x, dim=-1) for x in leaves)
    columns = torch.cat([passages, negatives.flatten(0, 1)])
    logits = queries @ columns.T / TEMPERATURE
    is_masked = torch.zeros_like(logits, dtype=torch.bool)
    is_masked[:, : len(ids)] = ids[:, None] == ids[None, :]
    is_masked.fill_diagonal_(False)
    logits = logits.masked_fill(is_masked, float("-inf"))
    cross_entropy(logits, torch.arange(len(ids))).backward()
    return [x.grad for x in leaves]


def accumulated_gradients(
    embeddings: Sequence[Tensor],
    ids: Sequence[Tensor],
    local: int,
    precision: str,
    drift_compensation: str,
) -> list[Tensor]:
    """Accumulate the gradients of all micro-batches while the bank contains the rest of the batch.

    The loop over the batch runs twice: the first pass fills the bank, the second one is measured.
    """
    device = embeddings[0].device
    num_pairs = len(embeddings[0])
    dtype, _ = PRECISIONS[precision]
    is_half = "autocast" in precision
    leaves = [x.to(torch.float32 if is_half else dtype, copy=True) for x in embeddings]
    leaves = [x.requires_grad_() for x in leaves]
    scaler = torch.amp.GradScaler(device.type, enabled="scaler" in precision)
    loss_fn = BankedInfoNCE(
        bank_size=num_pairs - local,
        temperature=TEMPERATURE,
        similarity="cos",
        drift_compensation=drift_compensation,
    )
    # Without a probe, "auto" would estimate the drift from the differences between micro-batches.
    loss_fn.observe_probe(*(x[:8].to(dtype) for x in embeddings[:2]))
    for is_measured in (False, True):
        for start in range(0, num_pairs, local):
            rows = slice(start, start + local)
            with torch.autocast(device.type, dtype) if is_half else nullcontext():
                # An encoder under autocast returns embeddings of the lower precision.
                batch = [x[rows].to(dtype) for x in leaves]
                loss = loss_fn(*batch, *(x[rows] for x in ids))
            if is_measured:
                scaler.scale(loss * local / num_pairs).backward()
    return [x.grad.double().cpu() / scaler.get_scale() for x in leaves]
