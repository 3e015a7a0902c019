"""Seconds of an update with a compiled encoder, time to compile it, and the number of its graphs.

The encoder is compiled twice: as it is by default, and with CUDA graphs (`torch_compile_mode:
reduce-overhead`), which launch all kernels of a pass at once.

The option ``torch_compile`` of `contaccum train` compiles the encoder in the same way: accelerate
calls `torch.compile` with the arguments that are used here. A compiled graph is valid for certain
inputs, for example for one sequence length or for all of them; for other inputs the encoder is
compiled again. Real batches differ in their length, so this part goes through several lengths.
torch keeps compiled code on the disk, so the part begins with empty folders for it.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils import TorchDynamoPlugin
from measuring.encoders import BACKBONES, make_encoder, use_autocast
from measuring.run import Cases, Run, quartiles
from measuring.updates import Update, make_filled_loss, make_optimizer, run_update
from torch._dynamo.utils import counters

from contaccum import DualEncoder

MODES = {"compiled": "default", "compiled, CUDA graphs": "reduce-overhead"}
"""{encoder: mode of `torch.compile`}."""
ENCODERS = ("eager", *MODES)


@dataclass(frozen=True)
class Sizes:
    """Sizes of this part."""

    backbone: str = "minilm"
    backend: str = "inductor"
    pairs: int = 128  # pairs per update
    local: int = 8  # pairs per micro-batch
    bank_size: int = 1024
    # Tokens of queries and passages, in the order in which they come.
    lengths: tuple[tuple[int, int], ...] = ((32, 128), (24, 96), (28, 200))
    turns: int = 3  # timed updates for each length


SIZES = Sizes()
TINY = Sizes("tiny", "eager", 8, 4, 16, ((4, 8), (5, 9)), 2)


def list_cases(sizes: Sizes, run: Run) -> Cases:
    """Yield the lengths, one after the other, for encoders with and without compiling."""
    first = (sizes.pairs, sizes.local, sizes.bank_size)
    vocabulary = BACKBONES[sizes.backbone].vocabulary
    updates = [Update("contaccum", *first, *pair, vocabulary) for pair in sizes.lengths]
    with use_empty_caches():
        torch.manual_seed(0)
        model = make_encoder(sizes.backbone, run.device)
        use_autocast(model, "bfloat16")
        model.train()
        torch._dynamo.reset()
        counters.clear()
        losses = {name: make_filled_loss(updates[0], model, run) for name in ENCODERS}
        # As in accelerate's `Accelerator.prepare_model`. sentence-transformers' trainer then
        # replaces the model of a loss that exists already.
        for name, mode in MODES.items():
            plugin = TorchDynamoPlugin(backend=sizes.backend, mode=mode)
            losses[name].model = torch.compile(model, **plugin.to_kwargs())
        optimizer = make_optimizer(model)
        for update in updates:
            measure = partial(measure_length, model, update, sizes.turns, losses, optimizer, run)
            yield f"{update.query_length}, {update.passage_length}", measure


@contextmanager
def use_empty_caches() -> Iterator[None]:
    """Use new folders for compiled code, so that each run of the part has to compile."""
    # The compiler's worker processes may still write when the folder is removed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # Triton has a cache besides that of inductor, and a variable of its own for it.
        folders = {
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "TRITON_CACHE_DIR": os.path.join(folder, "triton"),
        }
        with patch.dict(os.environ, folders):
            try:
                yield
            finally:
                torch._dynamo.reset()  # the compiled graphs hold memory


def measure_length(
    model: DualEncoder,
    update: Update,
    num_turns: int,
    losses: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    run: Run,
) -> dict[str, Any]:
    """Time the first update with new lengths, and then updates in turns."""
    num_breaks = sum(counters["graph_break"].values())
    first_seconds = {}
    new_graphs = {}
    for name in ENCODERS:
        num_graphs = counters["stats"]["unique_graphs"]
        first_seconds[name] = run_update(update, losses[name], optimizer, run)["seconds"]
        new_graphs[name] = counters["stats"]["unique_graphs"] - num_graphs
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in ENCODERS}
    peaks_mb: dict[str, float | None] = {}
    for _ in range(num_turns):
        for name in order.sample(ENCODERS, len(ENCODERS)):
            figures = run_update(update, losses[name], optimizer, run)
            seconds[name].append(figures["seconds"])
            peaks_mb[name] = figures["peak_mb"]
    ratios = {}
    differences = {}
    _, passages = update.make_batch(update.local, run)
    # A copy for each call, because a model adds its outputs to the features.
    expected = model(dict(passages))["sentence_embedding"].detach().float()
    for name in MODES:
        pairs_of_seconds = zip(seconds[name], seconds["eager"], strict=True)
        ratios[name] = quartiles([compiled / eager for compiled, eager in pairs_of_seconds])
        embeddings = losses[name].model(dict(passages))["sentence_embedding"].detach().float()
        differences[name] = float((embeddings - expected).norm() / expected.norm())
    return {
        "first_seconds": first_seconds,
        "seconds": {name: quartiles(values) for name, values in seconds.items()},
        "ratio": ratios,
        "peak_mb": peaks_mb,
        "new_graphs": new_graphs,
        "graph_breaks": sum(counters["graph_break"].values()) - num_breaks,
        "embedding_difference": differences,
    }
