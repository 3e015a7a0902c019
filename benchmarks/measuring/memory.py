"""The peak memory of a device or of this process, since the last reset."""

from __future__ import annotations

from pathlib import Path

import torch


def peak_memory_mb(device: torch.device | str = "cpu") -> float:
    """Return the peak in MB of 2^20 bytes: of a GPU, or the process's resident memory (Linux)."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # Not getrusage: its peak is the parent's where that was higher.
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 2**10
    raise OSError("/proc/self/status has no VmHWM: the peak is measured on Linux alone")


def reset_peak_memory(device: torch.device | str = "cpu") -> None:
    """Start the peak anew from what is in use now."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
