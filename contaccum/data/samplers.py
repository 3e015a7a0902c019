"""Which rows share a micro-batch, and which set is next: functions of seed and epoch alone, so that runs resume.

sentence-transformers' default order comes from one generator that runs on: a run resumed in its second epoch would see
the first epoch's order again. Its samplers without duplicates, proportional and round robin are used as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from sentence_transformers.base.sampler import (
    DefaultBatchSampler,
    MultiDatasetDefaultBatchSampler,
    NoDuplicatesBatchSampler,
    ProportionalBatchSampler,
    RoundRobinBatchSampler,
)
from torch.utils.data import BatchSampler, ConcatDataset

from contaccum.data.sampling import first_texts, text_ids
from contaccum.errors import ConfigError, check_choice

SET_SAMPLERS = ("proportional", "round_robin", "temperature", "weights")


class EpochBatchSampler(DefaultBatchSampler):
    """Batches in an order that ``seed`` and ``set_epoch`` determine; every row is in one, the last may be shorter."""

    def __iter__(self) -> Iterator[list[int]]:
        rows = len(self.sampler)  # type: ignore[arg-type]  # torch's random one
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch))
        for batch in order.split(self.batch_size):  # a list of all rows would take five times the memory
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch.tolist()


class _HashedRows:
    """Rows as `NoDuplicatesBatchSampler` reads them, a number in place of each text: int64 (N, c)."""

    column_names = ()

    def __init__(self, dataset: Any) -> None:
        hashed = [np.column_stack([text_ids(texts) for texts in batch.values()]) for batch in first_texts(dataset)]
        self._hashes = np.concatenate(hashed)

    def __len__(self) -> int:
        return len(self._hashes)

    def __getitem__(self, row: int) -> dict[int, int]:
        return dict(enumerate(self._hashes[row].tolist()))


def make_batch_sampler(args: Any, dataset: Any, *, seed: int = 0, **given: Any) -> BatchSampler | None:
    """The sampler that the arguments ask for; None where it is sentence-transformers' own or the user's."""
    if args.own_batch_sampler or not hasattr(dataset, "__len__"):
        return None
    if args.avoids_duplicates:
        given |= {"generator": torch.Generator()}  # seeded by seed and epoch when an epoch begins
        return NoDuplicatesBatchSampler(_HashedRows(dataset), seed=seed, **given)
    return EpochBatchSampler(dataset, seed=seed, **given)


class WeightedBatchSampler(ProportionalBatchSampler):
    """Batches of several sets, each of a set that is drawn in proportion to ``weights``, one for each set.

    An epoch has as many batches as all sets together. It begins each set anew, and again when it is used up.
    """

    def __init__(self, rows: ConcatDataset, samplers: list[BatchSampler], weights: Sequence[float], seed: int) -> None:
        super().__init__(rows, samplers, None, seed)
        self.weights = np.asarray(weights) / np.sum(weights)

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng([self.seed & (2**64 - 1), self.epoch])
        passes = [self._passes(number) for number in range(len(self.weights))]
        for number in rng.choice(len(self.weights), size=len(self), p=self.weights).tolist():
            yield next(passes[number])

    def _passes(self, number: int) -> Iterator[list[int]]:
        sampler: Any = self.batch_samplers[number]
        offset = self.dataset.cumulative_sizes[number - 1] if number else 0
        for turn in count():
            sampler.set_epoch(self.epoch + turn * 2**20)  # an order of its own for each pass
            for batch in sampler:
                yield [offset + row for row in batch]


def make_set_sampler(
    args: Any, datasets: Mapping[str, Any], batch_samplers: list[BatchSampler], seed: int = 0
) -> MultiDatasetDefaultBatchSampler | None:
    """The sampler over sets that the arguments ask for; None where it is the user's own.

    Raises:
        ConfigError: a set without a batch, or weights for sets that are not there.
    """
    for name, batches in zip(datasets, batch_samplers, strict=True):
        if not len(batches):
            raise ConfigError(f"training set {name!r} has no whole batch: leave it out, or drop dataloader_drop_last")
    rows: Any = ConcatDataset(list(datasets.values()))
    kinds = {"proportional": ProportionalBatchSampler, "round_robin": RoundRobinBatchSampler}
    if args.set_sampler in kinds:
        return kinds[args.set_sampler](rows, batch_samplers, torch.Generator(), seed)
    if args.set_sampler is None:
        return None
    weights = {name: len(part) ** (1.0 / args.sampling_temperature) for name, part in datasets.items()}
    if args.set_sampler == "weights":
        for name in args.sampling_weights or ():
            check_choice("sampling_weights: a training set", name, datasets)
        weights = dict.fromkeys(datasets, 1.0) | dict(args.sampling_weights or {})
    return WeightedBatchSampler(rows, batch_samplers, list(weights.values()), seed)


def set_shares(
    args: Any, datasets: Mapping[str, Any], batch_samplers: Sequence[BatchSampler], sampler: Any
) -> dict[str, dict[str, Any]]:
    """Of each set by name its rows, and its expected share of the batches of ``sampler``, where that is known."""
    lengths = np.array([len(batches) for batches in batch_samplers])
    known = {"proportional": lengths, "round_robin": np.ones_like(lengths)}
    shares: Any = getattr(sampler, "weights", known.get(args.set_sampler))
    found: dict[str, dict[str, Any]] = {name: {"rows": len(part)} for name, part in datasets.items()}
    for about, share in zip(found.values(), shares if shares is not None else (), strict=False):
        about["share"] = float(share / sum(shares))
    return found
