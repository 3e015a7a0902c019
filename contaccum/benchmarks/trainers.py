"""Our trainer against sentence-transformers' own: pairs per second at the same settings, from text to update.

Both train the same encoder with the same sentence-transformers loss on the same texts, in turns. What differs is what
ContAccumTrainer adds (gradient norms per tower, a log line per update) and the order of the data.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from contaccum.benchmarks.update import UpdateSettings, make_encoder


class _Clock(TrainerCallback):
    """Seconds between the ends of updates; the first update, which warms up, is left out."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last: float | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now


def measure_trainers(settings: UpdateSettings, progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """One record per method of grad_accum and grad_cache: ``total``, ``method``, ``bank`` (0), ``pairs_per_second`` of
    ours and ``pairs_per_second_sentence_transformers``, and ``speedup``, the first over the second (median over turns).
    """
    settings.check()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    records = []
    for total in settings.total:
        for method in [m for m in settings.methods if m in ("grad_accum", "grad_cache")]:
            seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
            for turn in range(settings.repeats):
                # Who goes first changes, so that neither always has the warmer machine.
                for who in ("ours", "theirs") if turn % 2 == 0 else ("theirs", "ours"):
                    seconds[who].append(statistics.median(_train(settings, who, method, total)))
                progress(f"trainers, {method}, total {total}: turn {turn + 1} of {settings.repeats}")
            pairs = {who: total / statistics.median(times) for who, times in seconds.items()}
            speedups = [theirs / ours for ours, theirs in zip(seconds["ours"], seconds["theirs"], strict=True)]
            records.append(
                {
                    "total": total,
                    "method": method,
                    "bank": 0,
                    "pairs_per_second": pairs["ours"],
                    "pairs_per_second_sentence_transformers": pairs["theirs"],
                    "speedup": statistics.median(speedups),
                    "speedup_low": min(speedups),
                    "speedup_high": max(speedups),
                }
            )
    return records


def _train(settings: UpdateSettings, who: str, method: str, total: int, updates: int = 4) -> list[float]:
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss, MultipleNegativesRankingLoss

    from contaccum import ContAccumTrainer, ContAccumTrainingArguments

    torch.manual_seed(0)
    model, clock = make_encoder(settings), _Clock()
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "output_dir": folder,
            "max_steps": updates,
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
            "learning_rate": 0.0,
            "use_cpu": torch.device(settings.device).type == "cpu",
            "bf16": settings.precision == "bfloat16",
        }
        trainer: Any
        dataset = _texts(settings, updates * total)
        if who == "ours":
            args = ContAccumTrainingArguments(
                method=method,
                per_device_train_batch_size=settings.local,
                gradient_accumulation_steps=total // settings.local,
                **common,
            )
            trainer = ContAccumTrainer(model=model, args=args, train_dataset=dataset, callbacks=[clock], quiet=True)
        else:
            whole = method == "grad_cache"
            theirs = SentenceTransformerTrainingArguments(
                per_device_train_batch_size=total if whole else settings.local,
                gradient_accumulation_steps=1 if whole else total // settings.local,
                router_mapping={"query": "query", "positive": "document"},
                **common,
            )
            loss = (
                CachedMultipleNegativesRankingLoss(model, mini_batch_size=settings.local)
                if whole
                else MultipleNegativesRankingLoss(model)
            )
            trainer = SentenceTransformerTrainer(
                model=model, args=theirs, train_dataset=dataset, loss=loss, callbacks=[clock]
            )
        trainer.train()
    return clock.seconds


def _texts(settings: UpdateSettings, rows: int) -> Any:
    """Texts of made-up words, between half and all of the lengths asked for."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(0)

    def column(length: int) -> list[str]:
        lengths = torch.randint(max(1, length // 2), length + 1, (rows,), generator=generator).tolist()
        return [" ".join(f"w{(row + 7 * i) % 997}" for i in range(n)) for row, n in enumerate(lengths)]

    return Dataset.from_dict({"query": column(settings.query_length), "positive": column(settings.passage_length)})
