"""The micro-batch of all ranks, for a loss that every rank computes alike. It knows neither loss nor bank.

The order is that of one process: the pairs of rank 0 as they lie, then those of rank 1, and so on. No parameters and no
gradients of parameters travel here. Every call is a collective: all ranks of the default process group make it, in the
same order. Without a process group each of them is the identity.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate import PartialState
from safetensors.torch import load, save
from torch import Tensor

LAYOUT_LENGTH = 16
"""Numbers that describe the rows of a rank: how many, and the shape and item size of each tensor."""


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


def gather_rows(tensors: list[Tensor]) -> tuple[list[Tensor], slice]:
    """Concatenate the rows of every rank's tensors in rank order; ranks may have different numbers of rows, even none.

    A collective says what will come, and on an accelerator the host waits for it; then one collective follows for each
    tensor.

    Args:
        tensors: (n, ...) each, with this rank's n; detached.

    Returns:
        The tensors (N, ...), with N the sum of all n, and the slice of this rank's rows.

    Raises:
        ValueError: on every rank, when shapes or dtypes differ between ranks, or all ranks have no rows.
    """
    n = len(tensors[0])
    layout = [n]
    for tensor in tensors:
        layout += [tensor.element_size(), tensor.ndim, *tensor.shape[1:]]
    layout += [0] * (LAYOUT_LENGTH - len(layout))  # ranks may bring different numbers of tensors
    layouts = _all_gather(
        torch.tensor([layout], device=tensors[0].device), world_size() * [1]
    ).tolist()
    lengths = [row[0] for row in layouts]
    shapes = {tuple(row[1:]) for row in layouts}
    if len(shapes) > 1:
        described = "; ".join(_describe_layout(row) for row in layouts)
        raise ValueError(
            f"the micro-batches of ranks 0, 1, ... differ in shapes or bytes per number: {described}"
        )
    if sum(lengths) == 0:
        raise ValueError("the micro-batch is empty on every rank")
    first = sum(lengths[: rank()])
    gathered = [_all_gather(tensor, lengths) for tensor in tensors]
    return gathered, slice(first, first + n)


def _describe_layout(layout: list[int]) -> str:
    """Describe a rank's tensors, with n for its number of rows: ``(n, 6) of 8 bytes``."""
    described = []
    position = 1
    while position < len(layout) and layout[position]:
        item_size = layout[position]
        ndim = layout[position + 1]
        dims = layout[position + 2 : position + 1 + ndim]
        described.append(f"({', '.join(['n', *map(str, dims)])}) of {item_size} bytes")
        position += 1 + ndim
    return ", ".join(described)


def gather_states(state: dict[str, Tensor], device: torch.device) -> list[dict[str, Tensor]]:
    """Every rank's named tensors, in rank order, on the CPU; names, shapes and dtypes may differ.

    They travel as safetensors: nothing that arrives is executed.
    """
    data = save({name: value.cpu().contiguous() for name, value in state.items()})
    content = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    lengths = _all_gather(torch.tensor([[len(data)]], device=device), world_size() * [1])[
        :, 0
    ].tolist()
    return [
        load(part.cpu().numpy().tobytes()) for part in _all_gather(content, lengths).split(lengths)
    ]


def share(content: Any) -> Any:
    """Return on every rank what rank 0 gives; it travels as JSON, so that nothing of it is executed."""
    if world_size() == 1:
        return content
    text = json.dumps(content).encode() if rank() == 0 else b""
    sent = torch.tensor(list(text), dtype=torch.uint8)
    received = gather_states({"json": sent}, PartialState().device)[0]
    return json.loads(received["json"].numpy().tobytes())


def _all_gather(rows: Tensor, lengths: list[int]) -> Tensor:
    # all_gather wants one shape everywhere, so that short parts travel padded.
    padded = rows
    if len(rows) < max(lengths):
        padded = rows.new_zeros(max(lengths), *rows.shape[1:])
        padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded.contiguous())
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
