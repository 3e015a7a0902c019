"""Seconds and peak memory of an update with the sizes of BERT-base, by method.

The methods are gradient accumulation and GradCache without a bank, and accumulation with a bank.
They share the model and the optimizer and take turns, so that other load on the machine affects all
of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertTokenizer

from contaccum import CachedContAccumLoss, ContAccumLoss, DualEncoder
from gpu_parts.settings import NotMeasured, Run, Sizes

METHODS = ("grad_accum", "grad_cache", "contaccum")
VOCABULARY = 30522


def make_encoder(sizes: Sizes, device: torch.device) -> DualEncoder:
    """Create a tied BERT with random weights in train mode, under autocast if needed."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=sizes.num_layers,
        hidden_size=sizes.dimension,
        num_attention_heads=sizes.num_heads,
        intermediate_size=4 * sizes.dimension,
    )
    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(words)})
    model = DualEncoder.from_backbone(config, tokenizer=tokenizer, device=str(device))
    dtype = getattr(torch, sizes.precision)
    if dtype != torch.float32:
        # Wrap the forward method, as accelerate does. GradCache's second forward pass runs inside
        # backward, where an autocast context of the training loop is not active.
        model.forward = torch.autocast(device.type, dtype=dtype)(model.forward)
    return model.train()


def make_loss(method: str, model: DualEncoder, sizes: Sizes) -> ContAccumLoss:
    """Create the loss of a method. The baselines use the same loss without a bank."""
    if method == "contaccum":
        return ContAccumLoss(model, bank_size=sizes.bank_size)
    if method == "grad_cache":
        return CachedContAccumLoss(model, bank_size=0, mini_batch_size=sizes.local)
    return ContAccumLoss(model, bank_size=0)


def make_features(sizes: Sizes, num_pairs: int, device: torch.device) -> list[dict[str, Any]]:
    """Return random token ids of queries and passages, as sentence-transformers passes them."""
    features = []
    for task, length in (("query", sizes.query_length), ("document", sizes.passage_length)):
        token_ids = torch.randint(5, VOCABULARY, (num_pairs, length), device=device)
        mask = torch.ones_like(token_ids)
        features.append({"input_ids": token_ids, "attention_mask": mask, "task": task})
    return features


def run_update(
    method: str,
    loss_fn: ContAccumLoss,
    optimizer: torch.optim.Optimizer,
    run: Run,
) -> dict[str, float | None]:
    """Run one update; return its seconds and, on a GPU, its peak memory in MB."""
    sizes = run.sizes
    batch_size = sizes.pairs if method == "grad_cache" else sizes.local
    num_batches = sizes.pairs // batch_size
    batches = [make_features(sizes, batch_size, run.device) for _ in range(num_batches)]
    is_cuda = run.device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(run.device)
        torch.cuda.reset_peak_memory_stats(run.device)
    started = time.perf_counter()
    for features in batches:
        (loss_fn(features, None) / num_batches).backward()
    optimizer.step()
    optimizer.zero_grad()
    if is_cuda:
        torch.cuda.synchronize(run.device)
    seconds = time.perf_counter() - started
    peak_mb = torch.cuda.max_memory_allocated(run.device) / 2**20 if is_cuda else None
    return {"seconds": seconds, "peak_mb": peak_mb}


def measure(run: Run) -> dict[str, Any]:
    """Time updates of all methods, in a new shuffled order in every turn."""
    sizes = run.sizes
    torch.manual_seed(0)
    model = make_encoder(sizes, run.device)
    losses = {method: make_loss(method, model, sizes).train() for method in METHODS}
    # With a learning rate of 0, AdamW has its usual cost, but the weights stay the same.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    # The bank must be full when the measurement starts, as it is in most updates of a training.
    num_updates_to_fill = -(-sizes.bank_size // sizes.pairs)  # rounded up
    num_warm_up = 1 + num_updates_to_fill
    order = random.Random(0)
    turns: list[dict[str, dict[str, float | None]]] = []
    for turn in range(num_warm_up + sizes.turns):
        if time.monotonic() > run.deadline:
            break
        figures = {}
        for method in order.sample(METHODS, len(METHODS)):
            figures[method] = run_update(method, losses[method], optimizer, run)
        if turn >= num_warm_up:
            turns.append(figures)
    if not turns:
        raise NotMeasured("the time was over before the first turn; increase --minutes")
    bank = losses["contaccum"].info_nce.bank
    result = {
        "methods": {method: summarise(method, turns) for method in METHODS},
        "turns": len(turns),
        "warm_up_turns": num_warm_up,
        "bank_rows_in_use": bank.in_use,
    }
    if len(turns) < sizes.turns:
        num_missing = sizes.turns - len(turns)
        result["not_run"] = f"{num_missing} of {sizes.turns} turns: the time was over"
    return result


def summarise(method: str, turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return quartiles of a method's seconds and of its ratios to grad_accum in the same turn."""
    seconds = np.array([turn[method]["seconds"] for turn in turns])
    ratios = seconds / np.array([turn["grad_accum"]["seconds"] for turn in turns])
    peaks = [turn[method]["peak_mb"] for turn in turns]
    return {
        "seconds": quartiles(seconds),
        "ratio_to_grad_accum": quartiles(ratios),
        "all_seconds": seconds.tolist(),
        # The resident memory of the process cannot be assigned to one of the methods.
        "peak_mb": "not measured on a CPU" if peaks[0] is None else max(peaks),
    }


def quartiles(values: np.ndarray) -> dict[str, float]:
    """Return the lower quartile, the median and the upper quartile."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return {"low": low, "median": median, "high": high}
