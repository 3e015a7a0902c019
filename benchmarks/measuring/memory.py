"""Peak memory of a device or of this process, since the last reset."""

from __future__ import annotations

from pathlib import Path

import torch


def peak_memory_mb(device: torch.device | str = "cpu") -> float:
    """Return the peak memory in MB (2^20 bytes).

    For a GPU this is the peak of the allocated memory, for a CPU the peak of the process's resident
    memory (Linux only).

    Raises:
        OSError: the system does not report the peak.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # getrusage cannot be used: its peak includes the peak of the parent process.
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 2**10
    raise OSError("/proc/self/status has no VmHWM: peak memory can be measured on Linux only")


def reset_peak_memory(device: torch.device | str = "cpu") -> None:
    """Reset the peak to the memory that is in use now."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
