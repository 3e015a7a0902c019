"""Timed updates of several methods in turns: seconds, ratios and peak memory.

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
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from contaccum import CachedContAccumLoss, ContAccumLoss, DualEncoder
from measuring.encoders import make_features
from measuring.run import NotMeasured, Run, quartiles

BANK_METHODS = ("contaccum", "contaccum_cached")
METHODS = ("in_batch", "grad_accum", "grad_cache", *BANK_METHODS)
CACHED_METHODS = ("grad_cache", "contaccum_cached", "mnrl_cached")
_PAIRS_PER_FILL_STEP = 1024  # pairs that are enqueued at once to fill a bank
# Of the profiled update, at most: reading the events of a long update takes longer than running it.
_MAX_PROFILED_MICRO_STEPS = 4


@dataclass(frozen=True)
class Update:
    """An update (optimizer step) of random token ids.

    Attributes:
        method: one of `METHODS`, or "mnrl" and "mnrl_cached" for the losses of
            sentence-transformers.
        pairs, local: pairs per update and per micro-batch.
        bank_size: rows of the bank, for a method that has one.
        query_length, passage_length: numbers of tokens.
        vocabulary: number of token ids of the encoder.
    """

    method: str
    pairs: int
    local: int
    bank_size: int
    query_length: int
    passage_length: int
    vocabulary: int

    def make_batch(self, num_pairs: int, run: Run) -> list[dict[str, Any]]:
        """Return random token ids of some pairs on the device."""
        lengths = (self.query_length, self.passage_length)
        return make_features(self.vocabulary, num_pairs, *lengths, run.device)


def measure_turns(
    model: DualEncoder,
    updates: Mapping[str, Update],
    num_turns: int,
    run: Run,
    profiled: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """Time updates in turns, each turn in a new shuffled order.

    Args:
        model: the encoder, in train mode.
        updates: {name: update}.
        num_turns: number of turns after one for the warm-up.
        run: device and deadline.
        profiled: names of updates that are also profiled, on a GPU.

    Returns:
        {name: its figures}. The ratio is that to the first update in the same turn.

    Raises:
        NotMeasured: the time was over before the first turn.
    """
    losses = {name: make_filled_loss(update, model, run) for name, update in updates.items()}
    optimizer = make_optimizer(model)
    order = random.Random(0)
    turns: list[dict[str, dict[str, Any]]] = []
    while len(turns) < 1 + num_turns and run.has_time():
        figures = {}
        for name in order.sample(list(updates), len(updates)):
            figures[name] = run_update(updates[name], losses[name], optimizer, run)
        turns.append(figures)
    turns = turns[1:]
    if not turns:
        raise NotMeasured("the time was over before the first turn; increase --minutes")
    first_seconds = np.array([turn[next(iter(updates))]["seconds"] for turn in turns])
    results = {}
    for name, update in updates.items():
        seconds = np.array([turn[name]["seconds"] for turn in turns])
        results[name] = result = {
            "seconds": quartiles(seconds),
            "ratio": quartiles(seconds / first_seconds),
            "pairs_per_second": update.pairs / float(np.median(seconds)),
            "all_seconds": seconds.tolist(),
            # On a CPU, the memory of the process cannot be assigned to one of the methods.
            "peak_mb": max(turn[name]["peak_mb"] for turn in turns) if run.is_cuda else None,
        }
        if run.is_cuda and name in profiled and len(turns) == num_turns:
            num_pairs = min(update.pairs, _MAX_PROFILED_MICRO_STEPS * update.local)
            short = replace(update, pairs=num_pairs)
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                run_update(short, losses[name], optimizer, run)
            events = [e for e in profiler.events() or () if e.device_type == DeviceType.CUDA]
            busy_seconds = sum(event.self_device_time_total for event in events) / 1e6
            seconds_of_short = result["seconds"]["median"] * num_pairs / update.pairs
            result["launches_per_micro_step"] = len(events) * update.local / num_pairs
            result["busy_share"] = busy_seconds / seconds_of_short
    return results


def make_filled_loss(update: Update, model: DualEncoder, run: Run) -> torch.nn.Module:
    """Return the loss of a method in train mode, with a full bank, as in most updates.

    The bank is filled with random embeddings. Methods without a bank have a bank of size 0.
    """
    method = update.method
    if method == "mnrl":
        return MultipleNegativesRankingLoss(model).train()
    if method == "mnrl_cached":
        return CachedMultipleNegativesRankingLoss(model, mini_batch_size=update.local).train()
    bank_size = update.bank_size if method in BANK_METHODS else 0
    options: dict[str, Any] = {"bank_size": bank_size}
    loss_class = ContAccumLoss
    if method in CACHED_METHODS:
        loss_class = CachedContAccumLoss
        options["mini_batch_size"] = update.local
    loss_fn = loss_class(model, **options).train()
    if bank_size > 0:
        loss_fn(update.make_batch(update.local, run), None)  # creates the bank and the probe
        shape = (2, _PAIRS_PER_FILL_STEP, model.get_embedding_dimension())
        for _ in range(-(-bank_size // _PAIRS_PER_FILL_STEP)):  # rounded up
            loss_fn.info_nce(*torch.randn(shape, device=run.device))
    return loss_fn


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Create AdamW with a learning rate of 0: the usual cost, but weights do not change."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0)


def run_update(
    update: Update, loss_fn: torch.nn.Module, optimizer: torch.optim.Optimizer, run: Run
) -> dict[str, Any]:
    """Run one update; return its seconds and, on a GPU, its peak memory in MB."""
    has_whole_batch = update.method in (*CACHED_METHODS, "in_batch")
    batch_size = update.pairs if has_whole_batch else update.local
    num_batches = update.pairs // batch_size
    batches = [update.make_batch(batch_size, run) for _ in range(num_batches)]
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
