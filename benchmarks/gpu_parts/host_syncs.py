"""Check that a micro-step of `BankedInfoNCE` does not make the host wait for the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring.run import Cases, NotMeasured, Run

from contaccum import BankedInfoNCE


@dataclass(frozen=True)
class Sizes:
    """Sizes of this part."""

    micro_steps: int = 64
    local: int = 8  # pairs per micro-batch
    dimension: int = 768
    bank_size: int = 2048


SIZES = Sizes()
TINY = Sizes(4, 4, 16, 32)


def list_cases(sizes: Sizes, run: Run) -> Cases:
    """Yield micro-steps without and with compensation of drift.

    CUDA reports each place where the host waits for the device.
    """
    if not run.is_cuda:
        raise NotMeasured(f"torch reports host syncs for CUDA only; the device is {run.device}")
    value = torch.ones(1, device=run.device)
    if not find_waits(lambda: value.item()):
        raise RuntimeError("CUDA does not report that item() waits, so nothing can be checked")
    for drift_compensation in ("none", "auto"):
        yield drift_compensation, partial(check_micro_steps, sizes, run, drift_compensation)


def check_micro_steps(sizes: Sizes, run: Run, drift_compensation: str) -> dict[str, Any]:
    """Run micro-steps with a full bank, and list the places where the host waits."""
    loss_fn = BankedInfoNCE(
        bank_size=sizes.bank_size,
        temperature=0.05,
        similarity="cos",
        drift_compensation=drift_compensation,
    )
    num_fill_steps = -(-sizes.bank_size // sizes.local)  # rounded up
    for inputs in make_micro_batches(sizes, run, num_fill_steps):
        loss_fn(*inputs).backward()
    loss_fn.end_update()
    micro_batches = make_micro_batches(sizes, run, sizes.micro_steps)
    run.synchronize()

    def run_micro_steps() -> None:
        for inputs in micro_batches:
            loss_fn(*inputs).backward()

    waits = find_waits(run_micro_steps)
    return {"micro_steps": len(micro_batches), "waits": waits, "passed": not waits}


def find_waits(function: Callable[[], Any]) -> list[str]:
    """Call a function; return each "file:line" where the host waited for the device, sorted.

    A wait in a backward pass is reported for the line of torch that starts the pass.
    """
    places = set()
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in recorded:
        message = str(warning.message)
        # torch also warns that this mode is a prototype, which does not detect all waits.
        if "synchroniz" in message and "prototype" not in message:
            file = "/".join(Path(warning.filename).parts[-3:])
            places.add(f"{file}:{warning.lineno}")
    return sorted(places)


def make_micro_batches(sizes: Sizes, run: Run, num_batches: int) -> list[list[torch.Tensor | None]]:
    """Return arguments of `BankedInfoNCE`: random embeddings without hard negatives, and ids."""
    micro_batches = []
    for _ in range(num_batches):
        shape = (2, sizes.local, sizes.dimension)
        queries, passages = torch.randn(shape, device=run.device)
        ids = torch.randint(10**9, (2, sizes.local), device=run.device)
        leaves = [queries.requires_grad_(), passages.requires_grad_()]
        micro_batches.append([*leaves, None, *ids])
    return micro_batches
