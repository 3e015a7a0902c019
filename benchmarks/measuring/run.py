"""Settings of all parts of benchmarks/gpu.py, and what they share to report errors."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TEMPERATURE = 0.05
# Each part is the module of this name in gpu_parts. It is imported when it runs, because some parts
# need packages that others do not need.
PARTS = (
    "update_time",
    "query_side",
    "search",
    "fit",
    "encoding",
    "decoder",
    "loss_exact",
    "host_syncs",
    "out_of_memory",
    "compile",
    "study_cell",
)
PARTS_WITH_SIZES = ("loss_exact", "host_syncs")
METHOD_SECONDS = 15.0  # of training, for each method of study_cell
_MAX_REASON_LENGTH = 200  # characters of an error that a record and a page show


@dataclass(frozen=True)
class Sizes:
    """Sizes of the parts in `PARTS_WITH_SIZES`.

    The other parts have sizes of their own, which are in their results.
    """

    pairs: int = 512  # pairs per update
    local: int = 8  # pairs per micro-batch
    hard_negatives: int = 1  # hard negatives per query, in loss_exact
    dimension: int = 768
    bank_size: int = 2048


TINY = Sizes(pairs=16, local=4, dimension=16, bank_size=32)


def discard(result: dict[str, Any]) -> None:
    """Do nothing with a result."""


@dataclass(frozen=True)
class Run:
    """Settings for the run of a part.

    Attributes:
        sizes: sizes of the parts in `PARTS_WITH_SIZES`.
        device: the device that is measured.
        deadline: time.monotonic() after which no new turn starts.
        is_tiny: use tiny sizes in the other parts, too, for a dry run.
        model: folder of a SentenceTransformer for fit and study_cell; None for the default.
        method_seconds: seconds of training of each method in study_cell; None for the default.
        save_partial: function that writes the result of the cases that a part has finished, so that
            they are kept if the program is killed.
    """

    sizes: Sizes
    device: torch.device
    deadline: float
    is_tiny: bool = False
    model: Path | None = None
    method_seconds: float | None = None
    save_partial: Callable[[dict[str, Any]], None] = discard

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


class NotMeasured(Exception):
    """A part cannot be measured on this machine; the message gives the reason."""


def format_reason(reason: object) -> str:
    """Return a reason as one line, shortened if it is long, because tables and lists show it."""
    line = " ".join(str(reason).split())
    if len(line) > _MAX_REASON_LENGTH:
        line = line[: _MAX_REASON_LENGTH - 3] + "..."
    return line


def format_error(error: Exception) -> str:
    """Return type and message of an error as one line; see `format_reason`."""
    return format_reason(f"{type(error).__name__}: {error}")


@contextmanager
def collect_error(failures: list[str], case: str) -> Iterator[None]:
    """Record an error in a ``with`` block, so that the other cases of a part are still measured.

    Args:
        failures: list to which the error is added.
        case: name of the case that is measured in the block.
    """
    try:
        yield
    except NotMeasured:
        raise
    except Exception as error:
        traceback.print_exc()
        failures.append(f"{case}: {format_error(error)}")


def add_failures(result: dict[str, Any], failures: list[str]) -> None:
    """Add the errors of cases to the result of a part, which then counts as failed."""
    if failures:
        result["passed"] = False
        result["failures"] = failures
