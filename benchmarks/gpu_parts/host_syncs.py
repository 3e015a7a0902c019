"""Check that a micro-step of `BankedInfoNCE` does not make the host wait for the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from contaccum import BankedInfoNCE
from gpu_parts.settings import TEMPERATURE, NotMeasured, Run, Sizes

REPOSITORY = Path(__file__).resolve().parents[2]
INSTALLED_PACKAGES = Path(torch.__file__).resolve().parents[1]


def measure(run: Run) -> dict[str, Any]:
    """Run micro-steps while CUDA reports each place where the host waits for the device."""
    if run.device.type != "cuda":
        raise NotMeasured(f"torch reports host syncs for CUDA only; the device is {run.device}")
    value = torch.ones(1, device=run.device)
    if not find_waits(lambda: value.item()):
        raise RuntimeError("CUDA does not report that item() waits, so nothing can be checked")
    results = {}
    for drift_compensation in ("none", "auto"):
        results[drift_compensation] = check_micro_steps(run, drift_compensation)
    passed = all(result["passed"] for result in results.values())
    return {"passed": passed, "cases": results}


def check_micro_steps(run: Run, drift_compensation: str) -> dict[str, Any]:
    """Run micro-steps with a full bank, and list the places where the host waits."""
    sizes = run.sizes
    loss_fn = BankedInfoNCE(
        bank_size=sizes.bank_size,
        temperature=TEMPERATURE,
        similarity="cos",
        drift_compensation=drift_compensation,
    )
    num_fill_steps = -(-sizes.bank_size // sizes.local)  # rounded up
    for inputs in make_micro_batches(sizes, run.device, num_fill_steps):
        loss_fn(*inputs).backward()
    loss_fn.end_update()
    micro_batches = make_micro_batches(sizes, run.device, sizes.pairs // sizes.local)
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
            places.add(f"{shorten_path(warning.filename)}:{warning.lineno}")
    return sorted(places)


def shorten_path(file: str) -> str:
    """Return the path of a file relative to the installed packages or to the repository."""
    path = Path(file).resolve()
    # The installed packages are first, because they may be in a folder of the repository.
    for folder in (INSTALLED_PACKAGES, REPOSITORY):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return file


def make_micro_batches(
    sizes: Sizes, device: torch.device, num_batches: int
) -> list[list[torch.Tensor | None]]:
    """Return arguments of `BankedInfoNCE`: random embeddings without hard negatives, and ids."""
    micro_batches = []
    for _ in range(num_batches):
        shape = (sizes.local, sizes.dimension)
        queries = torch.randn(shape, device=device, requires_grad=True)
        passages = torch.randn(shape, device=device, requires_grad=True)
        query_ids = torch.randint(10**9, (sizes.local,), device=device)
        passage_ids = torch.randint(10**9, (sizes.local,), device=device)
        micro_batches.append([queries, passages, None, query_ids, passage_ids])
    return micro_batches
