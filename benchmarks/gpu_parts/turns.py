"""Timed updates of several methods in turns, with seconds, ratios and peak memory by method.

The methods share the model and the optimizer and take turns, so that other load on the machine
affects all of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from measuring.encoders import make_features
from measuring.updates import CACHED_METHODS, fill_bank, make_loss, make_optimizer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from contaccum import DualEncoder
from gpu_parts.settings import NotMeasured, Run

NUM_WARM_UP_TURNS = 1
# Of the profiled update, at most: reading the events of a long update takes longer than running it.
MAX_PROFILED_MICRO_STEPS = 4


@dataclass(frozen=True)
class UpdateSizes:
    """Sizes of an update."""

    pairs: int  # pairs per update
    local: int  # pairs per micro-batch
    bank_size: int
    query_length: int
    passage_length: int
    turns: int  # timed updates of each method


def measure_methods(
    model: DualEncoder,
    vocabulary: int,
    methods: Sequence[str],
    sizes: UpdateSizes,
    run: Run,
    profiled_methods: Sequence[str] = (),
) -> dict[str, Any]:
    """Time updates of all methods, in a new shuffled order in every turn.

    Args:
        model: the encoder, in train mode.
        vocabulary: number of token ids of the encoder.
        methods: names of the methods, "contaccum" among them. Times are compared with the first.
        sizes: sizes of an update.
        run: device and deadline.
        profiled_methods: methods of which an update is also profiled, on a GPU.

    Raises:
        NotMeasured: the time was over before the first turn.
    """
    losses = {}
    for method in methods:
        loss_fn = make_loss(method, model, sizes.local, sizes.bank_size).train()
        features = make_batch(vocabulary, sizes.local, sizes, run)
        fill_bank(loss_fn, features, model.get_embedding_dimension())
        losses[method] = loss_fn
    optimizer = make_optimizer(model)
    order = random.Random(0)
    turns: list[dict[str, dict[str, float | None]]] = []
    for turn in range(NUM_WARM_UP_TURNS + sizes.turns):
        if not run.has_time():
            break
        figures = {}
        for method in order.sample(list(methods), len(methods)):
            figures[method] = run_update(method, losses[method], optimizer, vocabulary, sizes, run)
        if turn >= NUM_WARM_UP_TURNS:
            turns.append(figures)
    if not turns:
        raise NotMeasured("the time was over before the first turn; increase --minutes")
    result: dict[str, Any] = {
        "methods": {method: summarise(method, methods[0], turns) for method in methods},
        "turns": len(turns),
        "warm_up_turns": NUM_WARM_UP_TURNS,
        "bank_rows_in_use": losses["contaccum"].info_nce.bank.in_use,
    }
    if len(turns) < sizes.turns:
        num_missing = sizes.turns - len(turns)
        result["not_run"] = f"{num_missing} of {sizes.turns} turns: the time was over"
    elif run.is_cuda:
        for method in profiled_methods:
            figures = result["methods"][method]
            num_pairs = min(sizes.pairs, MAX_PROFILED_MICRO_STEPS * sizes.local)
            profiled_sizes = replace(sizes, pairs=num_pairs)
            num_launches, busy_seconds = profile_update(
                method, losses[method], optimizer, vocabulary, profiled_sizes, run
            )
            figures["launches_per_micro_step"] = num_launches * sizes.local / num_pairs
            seconds = figures["seconds"]["median"] * num_pairs / sizes.pairs
            figures["busy_share"] = busy_seconds / seconds
    return result


def profile_update(*args: Any) -> tuple[int, float]:
    """Run one update; return how often the GPU was started, and its seconds of work.

    The arguments are those of `run_update`.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run_update(*args)
    num_launches = 0
    microseconds = 0.0
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA:
            num_launches += 1
            microseconds += event.self_device_time_total
    return num_launches, microseconds / 1e6


def make_batch(
    vocabulary: int, num_pairs: int, sizes: UpdateSizes, run: Run
) -> list[dict[str, Any]]:
    """Return random token ids of some pairs on the device."""
    return make_features(
        vocabulary, num_pairs, sizes.query_length, sizes.passage_length, run.device
    )


def run_update(
    method: str,
    loss_fn: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    vocabulary: int,
    sizes: UpdateSizes,
    run: Run,
) -> dict[str, float | None]:
    """Run one update; return its seconds and, on a GPU, its peak memory in MB."""
    batch_size = sizes.pairs if method in CACHED_METHODS else sizes.local
    num_batches = sizes.pairs // batch_size
    batches = [make_batch(vocabulary, batch_size, sizes, run) for _ in range(num_batches)]
    run.synchronize()
    run.reset_peak()
    started = time.perf_counter()
    for features in batches:
        # Copies, because the encoder adds its outputs, whose memory is to be freed at once.
        features = [dict(column) for column in features]
        (loss_fn(features, None) / num_batches).backward()
    optimizer.step()
    optimizer.zero_grad()
    run.synchronize()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "peak_mb": run.read_peak_mb()}


def summarise(method: str, baseline: str, turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return quartiles of a method's seconds and of its ratios to a baseline in the same turn."""
    seconds = np.array([turn[method]["seconds"] for turn in turns])
    baseline_seconds = np.array([turn[baseline]["seconds"] for turn in turns])
    peaks = [turn[method]["peak_mb"] for turn in turns]
    return {
        "seconds": quartiles(seconds),
        "ratio": quartiles(seconds / baseline_seconds),
        "all_seconds": seconds.tolist(),
        # The resident memory of the process cannot be assigned to one of the methods.
        "peak_mb": "not measured on a CPU" if peaks[0] is None else max(peaks),
    }


def quartiles(values: np.ndarray | Sequence[float]) -> dict[str, float]:
    """Return the lower quartile, the median and the upper quartile."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return {"low": low, "median": median, "high": high}
