"""The loss alone: forward, backward and enqueue of one micro-step against the dense (n + m) x (n + m) loss."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from contaccum.benchmarks.update import UpdateSettings
from contaccum.info_nce import BankedInfoNCE
from contaccum.training.memory import peak_memory_mb

DIMENSION = 768
_DENSE_LIMIT = 8192  # beyond, the dense loss takes gigabytes and minutes


def measure_loss(settings: UpdateSettings, progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """One record per bank size, n = ``local``, d = 768: ``milliseconds`` (median), ``dense_milliseconds`` up to
    m = 8,192, ``speedup``, ``gradient_error`` (against the dense loss, relative), ``memory_mb`` (peak growth while the
    bank is made, filled and used, in a process of its own) and ``stored_mb`` (2 m d bytes).
    """
    settings.check()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    records = []
    for m in settings.bank:
        torch.manual_seed(0)
        loss_fn = filled(settings, m)
        batches = [_batch(settings) for _ in range(settings.repeats + 1)]
        ours, dense, errors = [], [], []
        for turn, batch in enumerate(batches):
            with_dense = 0 < m <= _DENSE_LIMIT and turn <= 3
            if with_dense and loss_fn.bank is not None:
                entries = loss_fn.bank.entries()
                dense_loss = partial(_dense, entries.queries, entries.passages)
                seconds, expected = _timed(dense_loss, batch, settings)
                dense.append(seconds)
            seconds, gradients = _timed(loss_fn, batch, settings)
            if turn:  # the first warms up
                ours.append(seconds)
            if with_dense:
                errors += [((g - e).norm() / e.norm()).item() for g, e in zip(gradients, expected, strict=True)]
        milliseconds = 1e3 * statistics.median(ours)
        dense_milliseconds = 1e3 * statistics.median(dense[1:]) if dense[1:] else None
        record = {
            "bank": m,
            "milliseconds": milliseconds,
            "dense_milliseconds": dense_milliseconds,
            "speedup": dense_milliseconds / milliseconds if dense_milliseconds else None,
            "gradient_error": max(errors) if errors else None,
            "stored_mb": 2 * m * DIMENSION * 4 / 2**20,
            "memory_mb": _memory(settings, m) if settings.memory and settings.device == "cpu" else None,
        }
        records.append(record)
        progress(f"bank {m}: {milliseconds:.2f} ms")
    return records


def filled(settings: UpdateSettings, m: int) -> BankedInfoNCE:
    """A loss whose bank is full."""
    loss_fn = BankedInfoNCE(bank_size=m, temperature=20.0, drift_compensation="none")
    while loss_fn.bank_size and (loss_fn.bank is None or loss_fn.bank.fill < m):
        loss_fn(*(torch.randn(min(m, 512), DIMENSION, device=settings.device) for _ in range(2)))
    return loss_fn


def _batch(settings: UpdateSettings) -> list[Tensor]:
    return [torch.randn(settings.local, DIMENSION, device=settings.device) for _ in range(2)]


def _timed(
    loss_fn: Callable[[Tensor, Tensor], Tensor], batch: list[Tensor], settings: UpdateSettings
) -> tuple[float, list[Tensor]]:
    inputs = [x.clone().requires_grad_() for x in batch]
    cuda = torch.device(settings.device).type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    loss_fn(*inputs).backward()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started, [x.grad for x in inputs if x.grad is not None]


def _dense(bank_queries: Tensor, bank_passages: Tensor, queries: Tensor, passages: Tensor) -> Tensor:
    rows, columns = torch.cat([queries, bank_queries]), torch.cat([passages, bank_passages])
    labels = torch.arange(len(rows), device=rows.device)
    return torch.nn.functional.cross_entropy(rows @ columns.T / 20.0, labels, reduction="sum") / len(queries)


def _memory(settings: UpdateSettings, m: int) -> float:
    code = "import sys; from contaccum.benchmarks.loss import _memory_job; _memory_job(sys.argv[1])"
    job = json.dumps({"local": settings.local, "bank": m, "threads": settings.threads})
    answer = subprocess.run([sys.executable, "-c", code, job], capture_output=True, text=True, check=True)
    return float(answer.stdout.strip().splitlines()[-1])


def _memory_job(job: str) -> None:
    content = json.loads(job)
    if content["threads"]:
        torch.set_num_threads(content["threads"])
    settings = UpdateSettings(local=content["local"])
    _timed(filled(settings, 64), _batch(settings), settings)  # what the first call loads is not the bank's
    before = peak_memory_mb()
    m = content["bank"]
    loss_fn = BankedInfoNCE(bank_size=m, temperature=20.0, drift_compensation="none")
    _timed(loss_fn, _batch(settings), settings)
    if loss_fn.bank is not None:
        # Rows straight into the bank: the next micro-step sums them all afresh, in blocks, which takes no more memory.
        for _ in range(0, m, 256):
            loss_fn.bank.enqueue(torch.randn(min(m, 256), DIMENSION), torch.randn(min(m, 256), DIMENSION))
    for _ in range(10):
        _timed(loss_fn, _batch(settings), settings)
    print(peak_memory_mb() - before)
