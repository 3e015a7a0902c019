"""Pairs per second and peak memory of an update, by encoder, micro-batch and method.

The methods are MultipleNegativesRankingLoss of sentence-transformers with accumulation, its cached
loss, GradCache without a bank, and accumulation with a bank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from measuring.encoders import BACKBONES, make_encoder, use_autocast
from measuring.run import Cases, Run
from measuring.updates import Update, measure_turns

METHODS = ("mnrl", "mnrl_cached", "grad_cache", "contaccum")
PROFILED_METHODS = ("mnrl", "contaccum")
DROPOUT = 0.1  # as in BERT


@dataclass(frozen=True)
class Sizes:
    """Sizes of this part."""

    backbones: tuple[str, ...] = ("minilm", "bert-base")
    micro_batches: tuple[int, ...] = (8, 128, 32, 1)  # the most asked for come first
    pairs: int = 128  # pairs per update, at most
    max_micro_steps: int = 16  # of an update
    bank_size: int = 2048
    query_length: int = 32
    passage_length: int = 128
    turns: int = 3  # timed updates of each method
    precision: str = "bfloat16"  # precision of the encoder


SIZES = Sizes()
TINY = Sizes(("tiny",), (4, 1), 8, 4, 32, 4, 8, 2)


def list_cases(sizes: Sizes, run: Run) -> Cases:
    """Yield a case for each encoder and micro-batch, whose methods take turns."""
    for backbone in sizes.backbones:
        torch.manual_seed(0)
        model = make_encoder(backbone, run.device, dropout=DROPOUT)
        use_autocast(model, sizes.precision)
        model.train()
        for local in sizes.micro_batches:
            measure = partial(measure_case, model, backbone, local, sizes, run)
            yield f"{backbone}, n={local}", measure


def measure_case(model: Any, backbone: str, local: int, sizes: Sizes, run: Run) -> dict[str, Any]:
    """Return the figures of all methods for one encoder and micro-batch."""
    pairs = min(sizes.pairs, local * sizes.max_micro_steps)
    lengths = (sizes.query_length, sizes.passage_length)
    rest = (pairs, local, sizes.bank_size, *lengths, BACKBONES[backbone].vocabulary)
    updates = {method: Update(method, *rest) for method in METHODS}
    methods = measure_turns(model, updates, sizes.turns, run, PROFILED_METHODS)
    return {"backbone": backbone, "local": local, "pairs": pairs, "methods": methods}
