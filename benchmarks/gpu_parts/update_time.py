"""Pairs per second and peak memory of an update, by encoder, micro-batch and method.

The methods are MultipleNegativesRankingLoss of sentence-transformers with accumulation, its cached
loss, GradCache without a bank, and accumulation with a bank.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from measuring.encoders import BACKBONES, make_encoder, use_autocast

from gpu_parts.settings import NotMeasured, Run, add_failures, collect_error
from gpu_parts.turns import UpdateSizes, measure_methods

METHODS = ("mnrl", "mnrl_cached", "grad_cache", "contaccum")
PROFILED_METHODS = ("mnrl", "contaccum")
DROPOUT = 0.1  # as in BERT


@dataclass(frozen=True)
class UpdateTimeSizes:
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


TINY = UpdateTimeSizes(("tiny",), (4, 1), 8, 4, 32, 4, 8, 2)


def measure(run: Run) -> dict[str, Any]:
    """Time updates of all methods in turns, for each encoder and micro-batch."""
    sizes = TINY if run.is_tiny else UpdateTimeSizes()
    cases: list[dict[str, Any]] = []
    failures: list[str] = []
    missing: list[str] = []
    result: dict[str, Any] = {"sizes": asdict(sizes), "cases": cases}
    for backbone in sizes.backbones:
        torch.manual_seed(0)
        model = make_encoder(BACKBONES[backbone], run.device, dropout=DROPOUT)
        use_autocast(model, sizes.precision)
        model.train()
        for local in sizes.micro_batches:
            name = f"{backbone}, n={local}"
            with collect_error(failures, name):
                try:
                    figures = measure_case(model, backbone, local, sizes, run)
                except NotMeasured as error:
                    missing.append(f"{name}: {error}")
                    continue
                cases.append(figures)
                if "not_run" in figures:
                    missing.append(f"{name}: {figures['not_run']}")
                add_failures(result, failures)
                run.save_partial(result)
            run.free_memory()
        del model
    if not cases and not failures:
        raise NotMeasured("the time was over before the first turn; increase --minutes")
    if missing:
        result["not_run"] = "; ".join(missing)
    add_failures(result, failures)
    return result


def measure_case(
    model: Any, backbone: str, local: int, sizes: UpdateTimeSizes, run: Run
) -> dict[str, Any]:
    """Return the figures of all methods for one encoder and micro-batch."""
    pairs = min(sizes.pairs, local * sizes.max_micro_steps)
    update_sizes = UpdateSizes(
        pairs,
        local,
        sizes.bank_size,
        sizes.query_length,
        sizes.passage_length,
        sizes.turns,
    )
    started = time.monotonic()
    vocabulary = BACKBONES[backbone].vocabulary
    figures = measure_methods(model, vocabulary, METHODS, update_sizes, run, PROFILED_METHODS)
    for method in figures["methods"].values():
        method["pairs_per_second"] = pairs / method["seconds"]["median"]
    return {
        "backbone": backbone,
        "local": local,
        "pairs": pairs,
        **figures,
        "case_seconds": time.monotonic() - started,
    }
