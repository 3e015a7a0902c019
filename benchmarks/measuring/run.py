"""The device that is measured, its clock and memory, and the time that is left."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

Cases = Iterator[tuple[str, Callable[[], dict[str, Any]]]]
"""The cases of a part: the name of each, and the function that measures it."""


class NotMeasured(Exception):
    """A case cannot be measured on this machine or in this time; the message gives the reason."""


@dataclass(frozen=True)
class Run:
    """Settings of a call of the program.

    Attributes:
        device: the device that is measured.
        deadline: time.monotonic() after which no new case and no new turn starts.
        is_tiny: tiny sizes, for a dry run.
        model: folder of a SentenceTransformer for the part `fit`; None for the default.
    """

    device: torch.device
    deadline: float
    is_tiny: bool = False
    model: Path | None = None

    @property
    def is_cuda(self) -> bool:
        """True if the device is a GPU of CUDA."""
        return self.device.type == "cuda"

    def has_time(self) -> bool:
        """Return True until the deadline."""
        return time.monotonic() <= self.deadline

    def synchronize(self) -> None:
        """Wait until the device has finished its work; a clock must not be read before."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def free_memory(self) -> None:
        """Free the GPU memory of objects that are no longer used, so that the next case has it."""
        if self.is_cuda:
            gc.collect()
            torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Start a new measurement of the peak memory of a GPU."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def read_peak_mb(self) -> float | None:
        """Return the peak of the allocated memory of a GPU in MB (2^20 bytes); None on a CPU.

        The resident memory of the process is no substitute, because it includes all earlier cases.
        """
        if not self.is_cuda:
            return None
        return torch.cuda.max_memory_allocated(self.device) / 2**20


def quartiles(values: np.ndarray | Sequence[float]) -> dict[str, float]:
    """Return the lower quartile, the median and the upper quartile."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return {"low": low, "median": median, "high": high}
