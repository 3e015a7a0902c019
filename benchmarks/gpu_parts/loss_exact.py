"""Comparison of `BankedInfoNCE`'s gradients with a dense float64 loss of the whole batch.

The bank contains exactly the rest of the batch and the embeddings do not change. In this case the
accumulated gradient must equal the gradient of the whole batch, for queries, passages and hard
negatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from contaccum import BankedInfoNCE
from gpu_parts.settings import TEMPERATURE, Run, Sizes


@dataclass(frozen=True)
class Precision:
    """Precision of the embeddings, and the error that rounding may cause."""

    dtype: torch.dtype
    limit: float  # largest relative error of a gradient
    scaler: bool = False  # use a gradient scaler


DRIFT_COMPENSATIONS = ("none", "auto")

PRECISIONS = {
    "float64": Precision(torch.float64, 1e-12),
    "float32": Precision(torch.float32, 1e-5),
    "bfloat16 autocast": Precision(torch.bfloat16, 1e-2),
    # Without a scaler, gradients close to float16's smallest numbers are rounded more coarsely.
    "float16 autocast": Precision(torch.float16, 1e-2),
    "float16 autocast, scaler": Precision(torch.float16, 2e-3, scaler=True),
}


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
    is_duplicate = ids[:, None] == ids[None, :]
    is_duplicate.fill_diagonal_(False)
    is_masked = torch.zeros_like(logits, dtype=torch.bool)
    is_masked[:, : len(ids)] = is_duplicate
    logits = logits.masked_fill(is_masked, float("-inf"))
    cross_entropy(logits, torch.arange(len(ids))).backward()
    return [x.grad for x in leaves]


def accumulated_gradients(
    embeddings: Sequence[Tensor],
    ids: Sequence[Tensor],
    local: int,
    precision: Precision,
    drift_compensation: str,
) -> list[Tensor]:
    """Accumulate the gradients of all micro-batches while the bank contains the rest of the batch.

    The loop over the batch runs twice: the first pass fills the bank, the second one is measured.
    """
    device = embeddings[0].device
    num_pairs = len(embeddings[0])
    is_half = precision.dtype in (torch.bfloat16, torch.float16)
    master_dtype = torch.float32 if is_half else precision.dtype
    leaves = [x.to(master_dtype, copy=True).requires_grad_() for x in embeddings]
    scaler = torch.amp.GradScaler(device.type, enabled=precision.scaler)
    loss_fn = BankedInfoNCE(
        bank_size=num_pairs - local,
        temperature=TEMPERATURE,
        similarity="cos",
        drift_compensation=drift_compensation,
    )
    # Without a probe, "auto" would estimate the drift from the differences between micro-batches.
    probe = [x[:8].to(precision.dtype) for x in embeddings[:2]]
    loss_fn.observe_probe(*probe)
    for is_measured in (False, True):
        for start in range(0, num_pairs, local):
            rows = slice(start, start + local)
            autocast = nullcontext()
            if is_half:
                autocast = torch.autocast(device.type, dtype=precision.dtype)
            with autocast:
                # An encoder under autocast returns embeddings of the lower precision.
                batch = [x[rows].to(precision.dtype) for x in leaves]
                loss = loss_fn(*batch, *(x[rows] for x in ids))
            if is_measured:
                scaler.scale(loss * local / num_pairs).backward()
    return [x.grad.double().cpu() / scaler.get_scale() for x in leaves]


def measure(run: Run) -> dict[str, Any]:
    """Compare accumulated gradients with the whole batch's gradients, in every precision."""
    names = ("queries", "passages", "negatives")
    embeddings, ids = make_batch(run.sizes, run.device)
    results = {}
    for name, precision in PRECISIONS.items():
        # The reference uses the rounded embeddings, so that only the error of the loss is measured.
        rounded = [x.to(precision.dtype) for x in embeddings]
        expected = dense_gradients(rounded, ids[1])
        for drift_compensation in DRIFT_COMPENSATIONS:
            gradients = accumulated_gradients(
                embeddings,
                ids,
                run.sizes.local,
                precision,
                drift_compensation,
            )
            errors = {}
            for key, gradient, reference in zip(names, gradients, expected, strict=True):
                errors[key] = float((gradient - reference).norm() / reference.norm())
            results[f"{name}, {drift_compensation}"] = {
                "relative_errors": errors,
                "limit": precision.limit,
                # Not max(), which may ignore NaN.
                "passed": all(error <= precision.limit for error in errors.values()),
            }
    passed = all(result["passed"] for result in results.values())
    return {"passed": passed, "cases": results}
