"""Collectives over the ranks of a distributed run: rows, named tensors and values.

All ranks of the default process group must call them in the same order. Without a group,
`over_ranks` and `broadcast` return the value of the single process; the others need one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

_LAYOUT_LENGTH = 16  # numbers that describe the tensors of a rank
RANK_TIMEOUT = timedelta(days=1)
"""Time after which a rank gives up waiting: one may encode a corpus alone, for hours.

If a rank fails, torchrun stops the others at once. `contaccum train` has ``ddp_timeout`` instead.
"""


def world_size() -> int:
    """Return the number of ranks of the default process group, or 1 if there is none."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def rank() -> int:
    """Return the rank of this process, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def over_ranks(op: Literal["SUM", "MIN", "MAX"], value: Tensor) -> Tensor:
    """Return the elementwise sum, minimum or maximum of ``value`` over all ranks."""
    if world_size() == 1:
        return value
    result = value.clone()
    dist.all_reduce(result, getattr(dist.ReduceOp, op))
    return result


def gather_rows(tensors: list[Tensor]) -> tuple[list[Tensor], slice]:
    """Concatenate the rows of every rank's detached tensors, (n, ...) with one n, in rank order.

    Every rank then computes the same loss, as one process with the whole batch does. n may differ
    between ranks, and may be 0. The host waits for the shapes on an accelerator.

    Returns:
        The tensors (N, ...), where N is the sum of n over all ranks, and the slice of this rank's
        rows.

    Raises:
        ValueError: on every rank, if shapes or bytes per number differ between ranks, or no rank
            has rows.
    """
    num_rows = len(tensors[0])
    # The layout of a (3, 6) and a (3,) of 8 bytes per number is [3, 8, 2, 6, 8, 1, 0, ...].
    layout = [num_rows]
    for tensor in tensors:
        layout += [tensor.element_size(), tensor.ndim, *tensor.shape[1:]]
    # Ranks may wrongly pass different numbers of tensors. Padded layouts can be gathered anyway.
    layout += [0] * (_LAYOUT_LENGTH - len(layout))
    layout_row = torch.tensor([layout], device=tensors[0].device)
    layouts = _all_gather(layout_row, [1] * world_size()).tolist()
    lengths = [row[0] for row in layouts]
    shapes = {tuple(row[1:]) for row in layouts}  # the layouts without the number of rows
    if len(shapes) > 1:
        raise ValueError(
            "the micro-batches of the ranks differ in shape or dtype: give every rank the same "
            "columns and number of hard negatives"
        )
    if sum(lengths) == 0:
        raise ValueError("the micro-batch is empty on every rank")
    start = sum(lengths[: rank()])
    gathered = [_all_gather(tensor, lengths) for tensor in tensors]
    return gathered, slice(start, start + num_rows)


def gather_states(state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return every rank's named tensors in rank order, on the CPU.

    Names, shapes and dtypes may differ between ranks.
    """
    states: list[dict[str, Tensor]] = [{} for _ in range(world_size())]
    # A clone, because a pickle of a slice holds all of the tensor that it is a slice of.
    on_cpu = {name: value.cpu().clone() for name, value in state.items()}
    dist.all_gather_object(states, on_cpu)
    return states


def broadcast(content: Any) -> Any:
    """Return rank 0's ``content`` on every rank; the values of other ranks are ignored."""
    contents = [content]
    if world_size() > 1:
        dist.broadcast_object_list(contents)
    return contents[0]


def _all_gather(rows: Tensor, lengths: list[int]) -> Tensor:
    """Return the rows of all ranks, concatenated in rank order; ``lengths`` has their numbers."""
    # all_gather needs the same shape on every rank, so shorter tensors are padded.
    max_length = max(lengths)
    padded = rows
    if len(rows) < max_length:
        padded = rows.new_zeros(max_length, *rows.shape[1:])
        padded[: len(rows)] = rows
    padded_parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(padded_parts, padded.contiguous())
    parts = [part[:length] for part, length in zip(padded_parts, lengths, strict=True)]
    return torch.cat(parts)
