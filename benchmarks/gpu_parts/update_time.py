"""Seconds and peak memory of an update with the sizes of BERT-base, by method.

The methods are gradient accumulation and GradCache without a bank, and accumulation with a bank.
"""

from __future__ import annotations

from typing import Any

import torch
from measuring.encoders import Shape, make_encoder, use_autocast

from gpu_parts.settings import Run
from gpu_parts.turns import UpdateSizes, measure_methods

METHODS = ("grad_accum", "grad_cache", "contaccum")
DROPOUT = 0.1  # as in BERT


def measure(run: Run) -> dict[str, Any]:
    """Time updates of all methods in turns."""
    sizes = run.sizes
    shape = Shape(sizes.num_layers, sizes.dimension, sizes.num_heads, 4 * sizes.dimension)
    torch.manual_seed(0)
    model = make_encoder(shape, run.device, dropout=DROPOUT)
    use_autocast(model, sizes.precision)
    update_sizes = UpdateSizes(
        sizes.pairs,
        sizes.local,
        sizes.bank_size,
        sizes.query_length,
        sizes.passage_length,
        sizes.turns,
    )
    return measure_methods(model.train(), shape.vocabulary, METHODS, update_sizes, run)
