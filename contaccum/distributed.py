"""The micro-batch of all ranks, for a loss that every rank computes alike. It knows neither loss nor bank.

The order is that of one process: the pairs of rank 0 as they lie, then those of rank 1, and so on. No parameters and no
gradients of parameters travel here. Every call is a collective: all ranks of the default process group make it, in the
same order. Without a process group each of them is the identity.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from contaccum.bank.logits import Ids


def world_size() -> int:
    """Ranks of the default process group, 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process among them, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def over_ranks(op: Literal["SUM", "MIN", "MAX"], value: Tensor) -> Tensor:
    """The sum, the least or the greatest of every rank's ``value``."""
    if world_size() > 1:
        value = value.clone()
        dist.all_reduce(value, getattr(dist.ReduceOp, op))
    return value


def gather_batch(embeddings: list[Tensor], ids: Ids) -> tuple[list[Tensor], Ids, slice]:
    """Concatenate every rank's micro-batch in rank order; micro-batches may differ in length, and be empty.

    Two collectives carry it, one for embeddings and one for ids, after one that says what will come: on an accelerator
    the host waits for that.

    Args:
        embeddings: queries (n, d), passages (n, d) and, if any, negatives (n, h, d), with this rank's n; detached.

    Returns:
        The embeddings (N, ...), the ids (N, ...), NO_ID where a rank brings none, and the slice of this rank's rows; N
        is the sum of all n.

    Raises:
        ValueError: on every rank, when d, h or the dtype differ between ranks, or all micro-batches are empty.
    """
    n, d = embeddings[0].shape
    h = embeddings[2].shape[1] if len(embeddings) > 2 else 0
    facts = torch.tensor([[n, d, h, embeddings[0].element_size()]], device=embeddings[0].device)
    lengths, *shapes = _all_gather(facts, world_size() * [1]).T.tolist()
    for name, values in zip(("embedding size", "hard negatives per query", "bytes per number"), shapes, strict=True):
        if len(set(values)) > 1:
            raise ValueError(f"the micro-batches of ranks 0, 1, ... differ in {name}: {', '.join(map(str, values))}")
    if sum(lengths) == 0:
        raise ValueError("the micro-batch is empty on every rank")
    own = slice(sum(lengths[: rank()]), sum(lengths[: rank() + 1]))
    joined = _all_gather(torch.cat([x.flatten(1) for x in embeddings], dim=1), lengths)
    parts = joined.split([x.shape[1:].numel() for x in embeddings], dim=1)
    everyone = [part.reshape(-1, *x.shape[1:]).contiguous() for part, x in zip(parts, embeddings, strict=True)]
    stacked = _all_gather(ids.stack(n, h, facts.device), lengths)
    return everyone, Ids(stacked[:, 0], stacked[:, 1], stacked[:, 2:]), own


def gather_states(state: dict[str, Tensor], device: torch.device) -> list[dict[str, Tensor]]:
    """Every rank's named tensors, in rank order, on the CPU; names, shapes and dtypes may differ.

    They travel as safetensors: nothing that arrives is executed.
    """
    data = save({name: value.cpu().contiguous() for name, value in state.items()})
    content = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    lengths = _all_gather(torch.tensor([[len(data)]], device=device), world_size() * [1])[:, 0].tolist()
    return [load(part.cpu().numpy().tobytes()) for part in _all_gather(content, lengths).split(lengths)]


def _all_gather(rows: Tensor, lengths: list[int]) -> Tensor:
    # all_gather wants one shape everywhere, so that short parts travel padded.
    padded = rows
    if len(rows) < max(lengths):
        padded = rows.new_zeros(max(lengths), *rows.shape[1:])
        padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded.contiguous())
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
