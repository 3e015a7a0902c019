"""How fast batches are put together, against sentence-transformers' samplers on the same rows, and what grouping saves.

Texts are made up, with lengths as skewed as those of real passages. Samplers take turns within one run, so that other
work on the machine falls on all of them. Nothing is encoded.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from contaccum.errors import ConfigError

SAMPLERS = ("planned", "no_duplicates", "no_duplicates_hashed", "shuffled", "default")
"""Ours and sentence-transformers' two without duplicates; ours and sentence-transformers' plain ones."""


@dataclass
class SamplerSettings:
    """One benchmark: everything that decides what is measured."""

    rows: int = 200_000
    batch_size: int = 8
    duplicates: float = 0.1
    samplers: list[str] = field(default_factory=lambda: list(SAMPLERS))
    windows: list[int] = field(default_factory=lambda: [2, 4, 8, 16, 32, 64])
    update: int = 16
    repeats: int = 3

    def check(self) -> None:
        """Raise ConfigError for what cannot be measured."""
        for name in self.samplers:
            if name not in SAMPLERS:
                raise ConfigError(f"samplers: {name!r} is not one of {', '.join(SAMPLERS)}")
        if min(self.rows - 2, self.batch_size - 2, self.repeats - 1, self.update - 1, *self.windows) < 0:
            raise ConfigError("rows and batch_size must be at least 2, repeats, update and windows at least 1")
        if not 0 <= self.duplicates <= 1:
            raise ConfigError(f"duplicates must be between 0 and 1, got {self.duplicates}")


def make_rows(settings: SamplerSettings) -> Any:
    """A data set of queries and positives, of which a share (in each column) is that of another row."""
    from datasets import Dataset

    rng = np.random.default_rng(0)
    letters = rng.integers(ord("a"), ord("z") + 1, 1 << 20, dtype=np.uint8)
    letters[rng.random(len(letters)) < 0.18] = ord(" ")
    page = letters.tobytes().decode()
    columns = {}
    for name, typical, sigma, longest in (("query", 50, 0.4, 160), ("positive", 350, 0.7, 1280)):
        lengths = np.clip(rng.lognormal(np.log(typical), sigma, settings.rows), 8, longest).astype(int)
        starts = rng.integers(0, len(page) - longest, settings.rows)
        texts = [
            f"{row} {page[start : start + length]}"
            for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True))
        ]
        again = np.flatnonzero(rng.random(settings.rows) < settings.duplicates)
        for row, other in zip(again.tolist(), rng.integers(0, settings.rows, len(again)).tolist(), strict=True):
            texts[row] = texts[other]
        columns[name] = texts
    return Dataset.from_dict(columns)


def measure_samplers(settings: SamplerSettings, progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """One record per sampler, then one per way of grouping by length.

    Of a sampler: ``pairs_per_second`` (median over epochs, the first apart), ``first_epoch_seconds`` (with what is done
    once: hashing), ``ratio`` (median over turns of its speed over that of ``no_duplicates``), ``batches``, ``rows``
    that they hold and ``repeats`` (rows that share a text with an earlier row of their batch).

    Of a way of grouping: ``window``, ``pairs_per_second``, ``padding`` (padded over real characters), ``saved`` (of
    random batches' padded characters), ``batch_spread`` and ``update_spread`` as in
    :class:`~contaccum.data.padding.Padding`. Window 0 is transformers' ``LengthGroupedSampler``.
    """
    settings.check()
    dataset = make_rows(settings)
    progress(f"{settings.rows:,} rows")
    return _samplers(settings, dataset, progress) + _groupings(settings, dataset, progress)


def _build(name: str, dataset: Any, batch_size: int) -> Any:
    from sentence_transformers.base.sampler import DefaultBatchSampler, NoDuplicatesBatchSampler
    from torch.utils.data import RandomSampler

    from contaccum.data.samplers import EpochBatchSampler, PlannedBatchSampler

    if name == "planned":
        return PlannedBatchSampler(dataset, batch_size, False)
    if name == "shuffled":
        return EpochBatchSampler(dataset, batch_size, False)
    generator = torch.Generator()
    if name == "default":
        return DefaultBatchSampler(RandomSampler(dataset, generator=generator), batch_size, False, generator=generator)
    hashed = name == "no_duplicates_hashed"
    return NoDuplicatesBatchSampler(dataset, batch_size, False, generator=generator, precompute_hashes=hashed)


def _samplers(settings: SamplerSettings, dataset: Any, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    names = settings.samplers
    samplers = {name: _build(name, dataset, settings.batch_size) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    last: dict[str, list[list[int]]] = {}
    order = random.Random(0)
    for turn in range(settings.repeats + 1):
        for name in order.sample(names, len(names)):
            samplers[name].set_epoch(turn)
            started = time.perf_counter()
            last[name] = list(samplers[name])
            seconds[name].append(time.perf_counter() - started)
        progress(f"turn {turn} of {settings.repeats}")
    base = seconds.get("no_duplicates")
    pairs = list(zip(dataset["query"], dataset["positive"], strict=True))
    records = []
    for name in names:
        later = seconds[name][1:]
        records.append(
            {
                "sampler": name,
                "pairs_per_second": settings.rows / statistics.median(later),
                "first_epoch_seconds": seconds[name][0],
                "ratio": statistics.median(b / s for b, s in zip(base[1:], later, strict=True)) if base else None,
                "batches": len(last[name]),
                "rows": sum(len(batch) for batch in last[name]),
                "repeats": _repeats(last[name], pairs),
            }
        )
    return records


def _repeats(batches: list[list[int]], pairs: list[tuple[str, str]]) -> int:
    count = 0
    for batch in batches:
        seen: set[str] = set()
        for row in batch:
            count += not seen.isdisjoint(pairs[row])
            seen.update(pairs[row])
    return count


def _groupings(settings: SamplerSettings, dataset: Any, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    from transformers.trainer_pt_utils import get_length_grouped_indices

    from contaccum.data.batch_plan import BatchPlan, plan_batches
    from contaccum.data.padding import padding_of
    from contaccum.data.text_columns import column_lengths

    n = settings.batch_size
    lengths = column_lengths(dataset, ["query", "positive"])
    whole = lengths.sum(axis=1)
    at_random = padding_of(plan_batches(settings.rows, n, 0, 0), lengths, settings.update)
    records = []
    for window in [0, *settings.windows]:
        started = time.perf_counter()
        if window:
            plan = plan_batches(settings.rows, n, 0, 0, lengths=whole, length_window=window)
        else:
            indices = get_length_grouped_indices(whole.tolist(), n, generator=torch.Generator().manual_seed(0))
            full = len(indices) // n
            plan = BatchPlan(np.array(indices[: full * n]).reshape(full, n), np.full(full, n))
        taken = time.perf_counter() - started
        padding = padding_of(plan, lengths, settings.update)
        records.append(
            {
                "window": window,
                "pairs_per_second": settings.rows / taken,
                "padding": padding.padded / padding.real,
                "saved": padding.saved_against(at_random),
                "batch_spread": padding.batch_spread,
                "update_spread": padding.update_spread,
            }
        )
    progress(f"padding of random batches: {at_random.padded / at_random.real:.3f}")
    return records
