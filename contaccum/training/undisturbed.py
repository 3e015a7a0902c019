"""What happens beside training and must leave no trace in it: random numbers, and the peak of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from contaccum.training.safe_state import random_states, set_random_states


@contextmanager
def unchanged_random_states() -> Iterator[None]:
    """Whatever is drawn inside, from Python's, numpy's or torch's generators, is not missing afterwards."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


def forget_peak_memory(device: torch.device) -> None:
    """Start measuring the peak anew, so that an evaluation's is not taken for the training's; where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return
