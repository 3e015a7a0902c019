"""Peak memory of a GPU or of this process, and errors of a full disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch

from contaccum.errors import UserError
from contaccum.files import describe_failed_write

_BYTES_PER_MB = 2**20


def peak_memory_mb(device: torch.device | str | None = None) -> float:
    """Return the peak memory since `reset_peak_memory` in MB (2^20 bytes).

    For a CUDA device, it is the memory that torch has allocated there, otherwise the resident
    memory of this process. On systems without /proc, no peak is available, and the current memory
    is returned.
    """
    if device is not None and torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _BYTES_PER_MB
    with suppress(OSError):
        # resource.getrusage is not used, because there a child process starts with the peak of its
        # parent. VmHWM is the peak of the resident memory, in kB.
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 2**10
    return psutil.Process().memory_info().rss / _BYTES_PER_MB


def reset_peak_memory(device: torch.device | str) -> None:
    """Reset the peak to the current memory; without /proc, the peak stays as it is."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        # 5 is Linux's code for setting VmHWM to the current resident memory.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


@contextmanager
def report_full_disk(folder: str) -> Iterator[None]:
    """Raise a `UserError` that names the file or the run's folder, if a block cannot write."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = describe_failed_write(error)
        if reason is None:
            raise
        # A callback may use files elsewhere.
        file = getattr(error, "filename", None) or folder
        raise UserError(
            f"{file}: cannot be read or written ({reason}). Free some space, then start the "
            "command again; contaccum train goes on with resume_from_checkpoint=last"
        ) from error
