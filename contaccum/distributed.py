"""The batch of all ranks, for a loss that every rank computes alike. No gradients travel here, and no parameters."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Ranks of the default process group, 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum of every rank's ``value``; the value itself without a process group."""
    if world_size() > 1:
        value = value.clone()
        dist.all_reduce(value)
    return value


def gather_batch(
    embeddings: list[Tensor], ids: tuple[Tensor | None, ...]
) -> tuple[list[Tensor], tuple[Tensor | None, ...], slice]:
    """Concatenate every rank's micro-batch in rank order; micro-batches may differ in length.

    Args:
        embeddings: tensors (n, ...) with this rank's n, detached.
        ids: tensors (n, ...) or None; whether one is None must be the same on all ranks.

    Returns:
        The embeddings (N, ...), the ids (N, ...) and the slice of this rank's rows, N being the sum of all n.
    """
    n = torch.tensor([embeddings[0].shape[0]], device=embeddings[0].device)
    counts = [torch.zeros_like(n) for _ in range(world_size())]
    dist.all_gather(counts, n)
    lengths = [int(count) for count in counts]
    start = sum(lengths[: dist.get_rank()])

    def gather(x: Tensor) -> Tensor:
        # all_gather wants one shape everywhere, so short micro-batches travel padded.
        padded = x.new_zeros(max(lengths), *x.shape[1:])
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    own = slice(start, start + lengths[dist.get_rank()])
    return [gather(x) for x in embeddings], tuple(None if x is None else gather(x) for x in ids), own
