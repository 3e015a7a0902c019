"""Peak memory of this process, in MB of 2^20 bytes: the accelerator's where there is one, else resident memory."""

from __future__ import annotations

import sys

import torch


def peak_memory_mb(device: torch.device | str | None = None) -> float:
    """Peak since the process started (or since CUDA's peak statistics were reset)."""
    if device is not None and torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        # Not getrusage, whose peak a child process takes over from its parent.
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 2**10
    except (OSError, StopIteration):
        pass
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # bytes there, KiB elsewhere
