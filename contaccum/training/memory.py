"""Memory: how much is used, running out of it, and the largest micro-batch that there is room for.

Also what happens beside training and must leave no trace in it: random numbers and the peak that is measured.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils.memory import find_executable_batch_size, should_reduce_batch_size
from torch import Tensor

from contaccum.data.sampling import first_texts
from contaccum.errors import UserError

if TYPE_CHECKING:
    from contaccum.training.arguments import ContAccumTrainingArguments

WHAT_ELSE = (
    "train in half precision with bf16=true, set gradient_checkpointing=true, lower passage_max_length or bank_size, "
    "set freeze_word_embeddings=true or an optim with smaller states, or take a smaller model"
)
"""What else there is to turn, in the order of what it costs."""

_SHARE = 0.8  # of the host's memory that a micro-batch may take


def random_states() -> tuple[Any, ...]:
    """The states of every random number generator that training draws from: Python's, numpy's, torch's."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_random_states(states: tuple[Any, ...]) -> None:
    """Go on from :func:`random_states`."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    torch.cuda.set_rng_state_all(states[3])


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Whatever is drawn inside is not missing afterwards."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


def peak_memory_mb(device: torch.device | str | None = None) -> float:
    """Peak memory in MB of 2^20 bytes: the GPU's, else the process's resident memory, since `forget_peak_memory`."""
    if device is not None and torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    with suppress(OSError):
        # Not getrusage, whose peak a child process takes over from its parent.
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # bytes there, KiB elsewhere


def forget_peak_memory(device: torch.device | str) -> None:
    """Start measuring the peak anew, where the system can."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, an accelerator's or the host's (PyTorch's allocator, or Python's)."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, Exception) and should_reduce_batch_size(error)


def split_rows(inputs: dict[str, Any], rows: int) -> list[tuple[dict[str, Any], float]]:
    """A collated batch in parts of at most ``rows`` rows, each with its share of them.

    Args:
        inputs: tensors (n, ...) with one n, and values that belong to all rows.

    Raises:
        UserError: for a batch that has more than one n, and cannot be split.
    """
    tensors = {key: value for key, value in inputs.items() if isinstance(value, Tensor) and value.ndim}
    lengths = {len(value) for value in tensors.values()}
    n = max(lengths, default=0)
    if n <= rows:
        return [(inputs, 1.0)]
    if len(lengths) != 1:
        raise UserError("out of memory, and this batch cannot be split by rows: lower per_device_train_batch_size")
    parts = zip(*(value.tensor_split(-(-n // rows)) for value in tensors.values()), strict=True)
    return [({**inputs, **dict(zip(tensors, part, strict=True))}, len(part[0]) / n) for part in parts]


# What fits -----------------------------------------------------------------------------------------------------------


def longest_rows(dataset: Any, n: int) -> list[dict[str, Any]]:
    """Rows made of each column's longest texts: no batch of the data is longer in any."""
    parts = dict(dataset) if isinstance(dataset, dict) else {None: dataset}
    name, part = max(parts.items(), key=lambda item: len(item[1].column_names))
    longest: dict[str, list[str]] = {}
    for batch in first_texts(part):
        for column, texts in batch.items():
            found = [*longest.get(column, []), *(text or "" for text in texts)]
            longest[column] = heapq.nlargest(n, found, key=len)
    of_set = {} if name is None else {"dataset_name": name}
    return [{column: texts[i % len(texts)] for column, texts in longest.items()} | of_set for i in range(n)]


def largest_that_fits(args: ContAccumTrainingArguments, least: int, attempt: Callable[[int], None]) -> int:
    """Pairs per micro-batch: the largest divisor of an update's pairs on this device for which ``attempt`` goes well.

    On a CPU, whose system ends processes rather than refuse memory, sizes are tried from the smallest on.

    Raises:
        UserError: when even ``least`` pairs are too much.
    """
    local = args.per_device_train_batch_size * args.gradient_accumulation_steps
    sizes = [n for n in range(local, least - 1, -1) if local % n == 0]

    def fits(n: int) -> int:
        try:
            attempt(n)
        except (torch.OutOfMemoryError, MemoryError):
            raise torch.OutOfMemoryError("CUDA out of memory.") from None  # as accelerate knows it
        return n

    start = _start_on_host(sizes, fits) if args.device.type == "cpu" else 0
    rest = iter([*sizes[start + 1 :], 0])
    try:
        return find_executable_batch_size(fits, sizes[start], lambda: next(rest))()
    except RuntimeError as error:
        if "reached zero" not in str(error):
            raise
        raise UserError(f"out of memory at a micro-batch of {sizes[-1]}: {WHAT_ELSE}") from None


def _start_on_host(sizes: list[int], attempt: Callable[[int], Any]) -> int:
    """The place of the largest size that would leave the host a part of its memory, by the growth of smaller ones."""
    room, place = _room_on_host(), len(sizes) - 1
    try:
        while place > 0 and _growth(attempt, sizes[place]) * sizes[place - 1] / sizes[place] <= room:
            place -= 1
    except torch.OutOfMemoryError:  # which will be met again
        pass
    return place


def _growth(work: Callable[[int], Any], n: int) -> float:
    """MB by which this process was larger at its peak in ``work(n)`` than before it."""
    forget_peak_memory("cpu")
    before = peak_memory_mb()
    work(n)
    return max(peak_memory_mb() - before, 0.0)


def _room_on_host() -> float:
    """MB that this process may still take, of the host or of its control group; no limit where nobody can tell."""
    room = float("inf")
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        room = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**10
    with suppress(OSError, ValueError):
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        room = min(room, (float(limit) - float(used)) / 2**20)
    return room * _SHARE
