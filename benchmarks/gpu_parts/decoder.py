"""Seconds and peak memory of an update of a 0.6B decoder with adapters, by method.

The decoder has the sizes of Qwen3-Embedding-0.6B. Its weights are frozen, in bfloat16 (LoRA) or in
4 bits (QLoRA), and adapters of rank 16 are trained, with gradient checkpointing and under autocast
to bfloat16. Micro-batches have one pair or two, as on a small GPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from measuring.encoders import BACKBONES, make_encoder, use_autocast
from measuring.run import Cases, NotMeasured, Run
from measuring.updates import Update, measure_turns

from contaccum import DualEncoder
from contaccum.errors import ConfigError
from contaccum.settings import Settings
from contaccum.training.setup import load_model

METHODS = ("grad_accum", "grad_cache", "contaccum", "contaccum_cached")


@dataclass(frozen=True)
class Sizes:
    """Sizes of this part."""

    backbone: str = "decoder-0.6b"
    rank: int = 16  # of the adapters
    pairs: int = 8  # pairs per update
    micro_batches: tuple[int, ...] = (1, 2)  # pairs per micro-batch
    bank_size: int = 1024
    query_length: int = 32
    passage_length: int = 128
    turns: int = 2


SIZES = Sizes()
TINY = Sizes("decoder-tiny", 2, 4, (1, 2), 16, 4, 6, 1)


def list_cases(sizes: Sizes, run: Run) -> Cases:
    """Yield a case for each adapter and size of a micro-batch."""
    with tempfile.TemporaryDirectory() as folder:
        # With random weights in bfloat16, as Qwen3-Embedding-0.6B is published.
        torch.manual_seed(0)
        model = make_encoder(sizes.backbone, "cpu", dtype="bfloat16")
        model.save_pretrained(folder, create_model_card=False)
        del model
        for adapter in ("lora", "qlora"):
            load = cache(partial(load_decoder, adapter, folder, sizes, run))
            for local in sizes.micro_batches:
                yield (
                    f"{adapter}, n={local}",
                    partial(measure_case, load, adapter, local, sizes, run),
                )


def load_decoder(adapter: str, folder: str, sizes: Sizes, run: Run) -> tuple[DualEncoder, Any]:
    """Load the decoder as `contaccum train` does; return it and its figures.

    Raises:
        NotMeasured: 4 bits are not possible on this machine.
    """
    run.reset_peak()
    settings = Settings(model=folder, lora_r=sizes.rank, load_in_4bit=adapter == "qlora")
    try:
        model = load_model(settings, str(run.device))
    except ConfigError as error:  # bitsandbytes is not installed, or there is no GPU
        raise NotMeasured(str(error)) from error
    model.gradient_checkpointing_enable()
    use_autocast(model, "bfloat16")
    weights = list(model.parameters())
    figures = {
        # Weights in 4 bits are stored as two in a byte.
        "weights_mb": sum(weight.numel() * weight.element_size() for weight in weights) / 2**20,
        "trained_weights": sum(weight.numel() for weight in weights if weight.requires_grad),
        "load_peak_mb": run.read_peak_mb(),
    }
    return model.train(), figures


def measure_case(
    load: Callable[[], tuple[DualEncoder, Any]], adapter: str, local: int, sizes: Sizes, run: Run
) -> dict[str, Any]:
    """Time updates of all methods with an adapter and a size of a micro-batch."""
    model, figures = load()
    lengths = (sizes.query_length, sizes.passage_length)
    rest = (sizes.pairs, local, sizes.bank_size, *lengths, BACKBONES[sizes.backbone].vocabulary)
    updates = {method: Update(method, *rest) for method in METHODS}
    methods = measure_turns(model, updates, sizes.turns, run)
    return {"backbone": adapter, "local": local, **figures, "methods": methods}
