"""The micro-batch of all ranks, for a loss that every rank computes alike. It knows neither loss nor bank.

The order is that of one process: the pairs of rank 0 as they lie, then those of rank 1, and so on. No parameters and no
gradients of parameters travel here. Every call is a collective: all ranks of the default process group make it, in the
same order. Without a process group each of them is the identity.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor


def world_size() -> int:
    """Ranks of the default process group, 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process among them, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum of every rank's ``value``; the value itself without a process group."""
    if world_size() > 1:
        value = value.clone()
        dist.all_reduce(value)
    return value


def from_first_rank(value: Tensor) -> Tensor:
    """Rank 0's ``value`` on every rank, on the CPU; it has the same shape and dtype everywhere."""
    if world_size() > 1:
        on_gpu = dist.get_backend() == "nccl"
        value = value.to(torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu")
        dist.broadcast(value, 0)
    return value.cpu()


def agree(value: int, device: torch.device) -> int:
    """The least of every rank's ``value``, for what must never differ: a rank that goes another way stops all."""
    if world_size() > 1:
        shared = torch.tensor(value, device=device)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN)
        value = int(shared)
    return value


def gather_batch(
    embeddings: list[Tensor], ids: tuple[Tensor | None, ...], no_id: int
) -> tuple[list[Tensor], tuple[Tensor | None, ...], slice]:
    """Concatenate every rank's micro-batch in rank order; micro-batches may differ in length, and be empty.

    Two collectives carry the micro-batch, one for embeddings and one for ids, after one that says what will come: on an
    accelerator the host waits for that.

    Args:
        embeddings: queries (n, d), passages (n, d) and, if any, negatives (n, h, d), with this rank's n; detached.
        ids: int64 (n,), (n,) and (n, h), or None.
        no_id: stands for the ids of a rank that has none while others do.

    Returns:
        The embeddings (N, ...), the ids (N, ...) and the slice of this rank's rows, N being the sum of all n.

    Raises:
        ValueError: on every rank, when d, h or the dtype differ between ranks, or all micro-batches are empty.
    """
    n, d = embeddings[0].shape
    h = embeddings[2].shape[1] if len(embeddings) > 2 else 0
    known = sum((x is not None) << position for position, x in enumerate(ids))
    facts = torch.tensor([[n, d, h, embeddings[0].element_size(), known]], device=embeddings[0].device)
    lengths, *shapes, known_by_rank = zip(*_all_gather(facts, world_size() * [1]).tolist(), strict=True)
    for name, values in zip(("embedding size", "hard negatives per query", "bytes per number"), shapes, strict=True):
        if len(set(values)) > 1:
            raise ValueError(f"the micro-batches of ranks 0, 1, ... differ in {name}: {', '.join(map(str, values))}")
    if sum(lengths) == 0:
        raise ValueError("the micro-batch is empty on every rank")
    start = sum(lengths[: rank()])
    own = slice(start, start + n)
    joined = _all_gather(torch.cat([x.flatten(1) for x in embeddings], dim=1), lengths)
    parts = joined.split([x.shape[1:].numel() for x in embeddings], dim=1)
    everyone = [part.reshape(-1, *x.shape[1:]).contiguous() for part, x in zip(parts, embeddings, strict=True)]
    if not any(known_by_rank):
        return everyone, (None,) * len(ids), own
    columns = [
        facts.new_full((n, width), no_id) if x is None else x.to(facts).reshape(n, width)
        for x, width in zip(ids, (1, 1, h), strict=True)
    ]
    query_ids, passage_ids, negative_ids = _all_gather(torch.cat(columns, dim=1), lengths).split([1, 1, h], dim=1)
    missing = [not any(value >> position & 1 for value in known_by_rank) for position in range(len(ids))]
    found = (query_ids[:, 0].contiguous(), passage_ids[:, 0].contiguous(), negative_ids.contiguous())
    return everyone, tuple(None if gone else x for gone, x in zip(missing, found, strict=True)), own


def gather_states(state: dict[str, Tensor], device: torch.device) -> list[dict[str, Tensor]]:
    """Every rank's named tensors, in rank order, on the CPU; names, shapes and dtypes may differ.

    They travel as safetensors: nothing that arrives is executed.
    """
    if world_size() == 1:
        return [{name: value.cpu() for name, value in state.items()}]
    data = save({name: value.cpu().contiguous() for name, value in state.items()})
    content = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    lengths = _all_gather(torch.tensor([[len(data)]], device=device), world_size() * [1])[:, 0].tolist()
    joined = _all_gather(content, lengths)
    return [load(part.cpu().numpy().tobytes()) for part in joined.split(lengths)]


def _all_gather(rows: Tensor, lengths: list[int] | tuple[int, ...]) -> Tensor:
    # all_gather wants one shape everywhere, so that short parts travel padded.
    padded = rows
    if len(rows) < max(lengths):
        padded = rows.new_zeros(max(lengths), *rows.shape[1:])
        padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded.contiguous())
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
