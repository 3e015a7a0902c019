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
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils import TorchDynamoPlugin
from measuring.encoders import BACKBONES, make_encoder, make_features, use_autocast
from measuring.updates import fill_bank, make_loss, make_optimizer
from torch._dynamo.utils import counters

from contaccum import ContAccumLoss, DualEncoder
from gpu_parts.settings import NotMeasured, Run
from gpu_parts.turns import UpdateSizes, quartiles, run_update

MODES = {"compiled": "default", "compiled, CUDA graphs": "reduce-overhead"}
"""{encoder: mode of `torch.compile`}."""
ENCODERS = ("eager", *MODES)


@dataclass(frozen=True)
class CompileSizes:
    """Sizes of this part."""

    backbone: str = "minilm"
    backend: str = "inductor"
    pairs: int = 128  # pairs per update
    local: int = 8  # pairs per micro-batch
    bank_size: int = 1024
    # Tokens of queries and passages, in the order in which they come.
    lengths: tuple[tuple[int, int], ...] = ((32, 128), (24, 96), (28, 200))
    turns: int = 3  # timed updates for each length


TINY = CompileSizes("tiny", "eager", 8, 4, 16, ((4, 8), (5, 9)), 2)


def measure(run: Run) -> dict[str, Any]:
    """Time updates with and without compiling in turns, for several lengths."""
    sizes = TINY if run.is_tiny else CompileSizes()
    with use_empty_caches():
        return measure_lengths(sizes, run)


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
            yield


def measure_lengths(sizes: CompileSizes, run: Run) -> dict[str, Any]:
    """Time updates with and without compiling, one length after the other."""
    torch.manual_seed(0)
    model = make_encoder(BACKBONES[sizes.backbone], run.device)
    use_autocast(model, "bfloat16")
    model.train()
    torch._dynamo.reset()
    counters.clear()
    losses = {name: make_filled_loss(model, sizes, run) for name in ENCODERS}
    # As in accelerate's `Accelerator.prepare_model`. sentence-transformers' trainer then replaces
    # the model of a loss that exists already.
    for name, mode in MODES.items():
        plugin = TorchDynamoPlugin(backend=sizes.backend, mode=mode)
        losses[name].model = torch.compile(model, **plugin.to_kwargs())
    optimizer = make_optimizer(model)
    results: list[dict[str, Any]] = []
    result: dict[str, Any] = {"sizes": asdict(sizes), "lengths": results}
    for query_length, passage_length in sizes.lengths:
        if not run.has_time():
            break
        update_sizes = UpdateSizes(
            sizes.pairs, sizes.local, sizes.bank_size, query_length, passage_length, sizes.turns
        )
        results.append(measure_length(model, losses, optimizer, update_sizes, run))
        run.save_partial(result)
    if not results:
        raise NotMeasured("the time was over before the first length; increase --minutes")
    result["graph_breaks"] = sum(counters["graph_break"].values())
    result["embedding_difference"] = {
        name: compare_embeddings(model, losses[name].model, sizes, run) for name in MODES
    }
    torch._dynamo.reset()  # the compiled graphs hold memory
    num_missing = len(sizes.lengths) - len(results)
    if num_missing > 0:
        result["not_run"] = f"{num_missing} of {len(sizes.lengths)} lengths: the time was over"
    return result


def make_filled_loss(model: DualEncoder, sizes: CompileSizes, run: Run) -> ContAccumLoss:
    """Create the loss of contaccum with a filled bank."""
    loss_fn = make_loss("contaccum", model, sizes.local, sizes.bank_size).train()
    vocabulary = BACKBONES[sizes.backbone].vocabulary
    query_length, passage_length = sizes.lengths[0]
    features = make_features(vocabulary, sizes.local, query_length, passage_length, run.device)
    fill_bank(loss_fn, features, model.get_embedding_dimension())
    return loss_fn


def compare_embeddings(
    model: DualEncoder, compiled_model: Any, sizes: CompileSizes, run: Run
) -> float:
    """Return the relative difference between embeddings of the compiled and the eager encoder."""
    vocabulary = BACKBONES[sizes.backbone].vocabulary
    query_length, passage_length = sizes.lengths[0]
    batch = make_features(vocabulary, sizes.local, query_length, passage_length, run.device)
    # A copy for each call, because a model adds its outputs to the features.
    expected = model(dict(batch[1]))["sentence_embedding"].detach().float()
    embeddings = compiled_model(dict(batch[1]))["sentence_embedding"].detach().float()
    return float((embeddings - expected).norm() / expected.norm())


def measure_length(
    model: DualEncoder,
    losses: dict[str, ContAccumLoss],
    optimizer: torch.optim.Optimizer,
    sizes: UpdateSizes,
    run: Run,
) -> dict[str, Any]:
    """Time the first update with new lengths, and then updates in turns."""
    vocabulary = model[0].model.config.vocab_size
    num_graphs = [counters["stats"]["unique_graphs"]]
    first_seconds = {}
    for name in ENCODERS:
        figures = run_update("contaccum", losses[name], optimizer, vocabulary, sizes, run)
        first_seconds[name] = figures["seconds"]
        num_graphs.append(counters["stats"]["unique_graphs"])
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in ENCODERS}
    peaks_mb: dict[str, float | None] = {}
    for _ in range(sizes.turns):
        for name in order.sample(ENCODERS, len(ENCODERS)):
            figures = run_update("contaccum", losses[name], optimizer, vocabulary, sizes, run)
            seconds[name].append(figures["seconds"] or 0.0)
            peaks_mb[name] = figures["peak_mb"]
    ratios = {}
    for name in MODES:
        pairs_of_seconds = zip(seconds[name], seconds["eager"], strict=True)
        ratios[name] = quartiles([compiled / eager for compiled, eager in pairs_of_seconds])
    new_graphs = [after - before for before, after in pairwise(num_graphs)]
    return {
        "query_length": sizes.query_length,
        "passage_length": sizes.passage_length,
        "first_seconds": first_seconds,
        "seconds": {name: quartiles(values) for name, values in seconds.items()},
        "ratio": ratios,
        "peak_mb": peaks_mb,
        "new_graphs": dict(zip(ENCODERS, new_graphs, strict=True)),
    }
