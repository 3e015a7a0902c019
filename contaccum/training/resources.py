"""Peak memory, of a GPU or of this process, and disks that are full."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch

from contaccum.errors import UserError

_BYTES_PER_MB = 2**20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def peak_memory_mb(device: torch.device | str | None = None) -> float:
    """Return the peak memory since `reset_peak_memory` in MB of 2^20 bytes.

    It is the memory allocated on a GPU, or else the resident memory of this process. Systems
    without /proc report no peak; the present memory is returned there.
    """
    if device is not None and torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _BYTES_PER_MB
    with suppress(OSError):
        # Not by getrusage: a child process takes over the peak of its parent there.
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 2**10
    return psutil.Process().memory_info().rss / _BYTES_PER_MB


def reset_peak_memory(device: torch.device | str) -> None:
    """Begin measuring the peak again, where the system can."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


@contextmanager
def report_full_disk(folder: str) -> Iterator[None]:
    """Turn a full disk into a `UserError` that names the folder of the run."""
    try:
        yield
    except Exception as error:
        if is_no_room(error):
            raise UserError(
                f"{folder}: no room on the disk: make some, and resume from `last`"
            ) from error
        raise


def is_no_room(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, is a full disk or quota.

    torch and safetensors raise errors of their own for it.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return True
        text = str(error)
        if "PytorchStreamWriter" in text:
            return True
        if any(f"os error {number}" in text for number in _NO_ROOM):
            return True
        error = error.__cause__ or error.__context__
    return False
