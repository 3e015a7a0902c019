"""How fast this machine multiplies: what a plan's hours are guessed from."""

from __future__ import annotations

import time

# Of the speed of bare matrix products: what training and encoding with BERT-base come to, roughly.
UTILISATION = 0.4
_SECONDS = 0.3


def matmul_speed(device: str | None, dtype: str) -> float:
    """Floating-point operations a second of square matrix products on a device, best of several."""
    import torch

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    size = 1024 if where.type == "cpu" else 8192
    left = torch.randn(size, size, device=where, dtype=getattr(torch, dtype))
    best, began = 0.0, time.perf_counter()
    while not best or time.perf_counter() - began < _SECONDS:
        started = time.perf_counter()
        left @ left
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best
