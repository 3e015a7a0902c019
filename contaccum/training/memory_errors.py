"""Running out of memory: telling it from other errors, cutting a batch smaller, and what else there is to turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor

if TYPE_CHECKING:
    from contaccum.training.arguments import ContAccumTrainingArguments


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, an accelerator's or the host's (PyTorch's allocator, or Python's)."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, Exception) and should_reduce_batch_size(error)


def free_memory() -> None:
    """Let go of what only cycles and caches hold. Call it outside of the handler that caught the error."""
    clear_device_cache(garbage_collection=True)


def split_rows(inputs: dict[str, Any], rows: int) -> list[tuple[dict[str, Any], float]] | None:
    """A collated batch in parts of at most ``rows`` rows, each with its share of them; None: it cannot be split.

    Args:
        inputs: tensors (n, ...) with one n, and values that belong to all rows.
    """
    tensors = {key: value for key, value in inputs.items() if isinstance(value, Tensor) and value.ndim}
    lengths = {len(value) for value in tensors.values()}
    n = max(lengths, default=0)
    if n <= rows:
        return [(inputs, 1.0)]
    if len(lengths) != 1:
        return None
    count = -(-n // rows)
    parts = zip(*(value.tensor_split(count) for value in tensors.values()), strict=True)
    return [({**inputs, **dict(zip(tensors, part, strict=True))}, len(part[0]) / n) for part in parts]


def what_else_to_turn(args: ContAccumTrainingArguments, stepping: bool = False) -> str:
    """Settings that save memory and are not yet set, in the order of what they cost."""
    if stepping:
        # Weights may be half-way to their next value, so that the step cannot be done over.
        turns = ["set freeze_word_embeddings=true, or an optim with smaller states (adafactor, adamw_8bit)"]
        turns += ["keep the bank on the host with bank_device=cpu"] if args.bank_size and not args.bank_device else []
        return f"{'; '.join(turns)}; and resume from `last`"
    turns = []
    if not (args.bf16 or args.fp16):
        turns.append("train in half precision with bf16=true")
    if not args.gradient_checkpointing:
        turns.append("set gradient_checkpointing=true")
    turns.append("lower passage_max_length")
    if args.bank_size and not args.bank_device:
        turns.append("keep the bank on the host with bank_device=cpu, or lower bank_size")
    return "; ".join([*turns, "or take a smaller model"])
