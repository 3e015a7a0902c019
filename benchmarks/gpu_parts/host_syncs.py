"""Check that a micro-step of `BankedInfoNCE` does not make the host wait for the device."""

from __future__ import annotations

from typing import Any

import torch

from contaccum import BankedInfoNCE
from gpu_parts.settings import TEMPERATURE, NotMeasured, Run, Sizes


def measure(run: Run) -> dict[str, Any]:
    """Run micro-steps while CUDA raises an error if the host waits for the device."""
    if run.device.type != "cuda":
        raise NotMeasured(f"torch reports host syncs for CUDA only; the device is {run.device}")
    sizes = run.sizes
    results = {}
    for drift_compensation in ("none", "auto"):
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
        torch.cuda.synchronize(run.device)
        message = None
        torch.cuda.set_sync_debug_mode("error")
        try:
            for inputs in micro_batches:
                loss_fn(*inputs).backward()
        except RuntimeError as error:
            message = str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results[drift_compensation] = {
            "micro_steps": len(micro_batches),
            "error": message,
            "passed": message is None,
        }
    passed = all(result["passed"] for result in results.values())
    return {"passed": passed, "cases": results}


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
