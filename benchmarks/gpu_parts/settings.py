"""Settings of all parts of benchmarks/gpu.py: sizes, device and deadline."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TEMPERATURE = 0.05


@dataclass(frozen=True)
class Sizes:
    """Sizes of all parts."""

    pairs: int = 512  # pairs per update
    local: int = 8  # pairs per micro-batch
    hard_negatives: int = 1  # hard negatives per query, in loss_exact
    dimension: int = 768
    bank_size: int = 2048
    num_layers: int = 12
    num_heads: int = 12
    query_length: int = 32
    passage_length: int = 128
    turns: int = 7  # timed updates of each method
    precision: str = "bfloat16"  # precision of the encoder in update_time


TINY = Sizes(
    pairs=16,
    local=4,
    dimension=16,
    bank_size=32,
    num_layers=1,
    num_heads=2,
    query_length=4,
    passage_length=8,
    turns=2,
)


@dataclass(frozen=True)
class Run:
    """Settings for the run of a part."""

    sizes: Sizes
    device: torch.device
    deadline: float  # time.monotonic() after which no new turn starts


class NotMeasured(Exception):
    """A part cannot be measured on this machine; the message gives the reason."""
