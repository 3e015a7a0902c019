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
from contaccum.errors import ConfigError, closest

SET_SAMPLERS = ("proportional", "round_robin", "temperature", "weights")


class EpochBatchSampler(DefaultBatchSampler):
    """Batches in an order that ``seed`` and ``set_epoch`` determine; every row is in one, the last may be shorter.

    Arguments are sentence-transformers'; the generator is not used.
    """

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


def make_batch_sampler(
    args: Any,
    dataset: Any,
    batch_size: int,
    drop_last: bool,
    valid_label_columns: list[str] | None = None,
    generator: torch.Generator | None = None,
    seed: int = 0,
) -> BatchSampler | None:
    """The sampler that the arguments ask for; None where it is sentence-transformers' own or the user's."""
    if args.own_batch_sampler or not hasattr(dataset, "__len__"):
        return None
    if args.avoids_duplicates:
        # A generator of its own, as sets take turns: it is seeded by seed and epoch when an epoch begins.
        own = torch.Generator()
        return NoDuplicatesBatchSampler(_HashedRows(dataset), batch_size, drop_last, None, own, seed)
    return EpochBatchSampler(dataset, batch_size, drop_last, valid_label_columns, generator, seed)


# Several sets --------------------------------------------------------------------------------------------------------


class WeightedBatchSampler(MultiDatasetDefaultBatchSampler):
    """Batches of several sets, each of a set that is drawn in proportion to ``weights``.

    An epoch has as many batches as all sets together. It begins each set anew, and again when it is used up.

    Args:
        dataset, batch_samplers, seed: as sentence-transformers gives them.
        weights: one for each set, above 0.
    """

    def __init__(
        self, dataset: ConcatDataset, batch_samplers: list[BatchSampler], weights: Sequence[float], seed: int = 0
    ) -> None:
        super().__init__(dataset, batch_samplers, None, seed)
        self.weights = np.asarray(weights) / np.sum(weights)

    def __len__(self) -> int:
        return sum(map(len, self.batch_samplers))

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


def set_weights(args: Any, sizes: Mapping[str, int]) -> list[float]:
    """The weight of each set by (name, number of rows), under "temperature" or "weights"; 1 for those not named.

    Raises:
        ConfigError: weights for sets that are not there.
    """
    if args.set_sampler == "temperature":
        return [float(size) ** (1.0 / args.sampling_temperature) for size in sizes.values()]
    weights: dict[str, float] = args.sampling_weights or {}
    unknown = next((name for name in weights if name not in sizes), None)
    if unknown is not None:
        hint = closest(unknown, sizes)
        raise ConfigError(f"sampling_weights: there is no training set {unknown!r}, only {', '.join(sizes)}{hint}")
    return [weights.get(name, 1.0) for name in sizes]


def make_set_sampler(
    args: Any, datasets: Mapping[str, Any], batch_samplers: list[BatchSampler], seed: int = 0
) -> MultiDatasetDefaultBatchSampler | None:
    """The sampler over sets that the arguments ask for; None where it is the user's own.

    Raises:
        ConfigError: a set without a batch, or weights for sets that are not there.
    """
    empty = next((name for name, batches in zip(datasets, batch_samplers, strict=True) if not len(batches)), None)
    if empty is not None:
        raise ConfigError(
            f"training set {empty!r} has no whole batch of {batch_samplers[0].batch_size} rows: leave it out, lower "
            "per_device_train_batch_size, or drop dataloader_drop_last"
        )
    rows: Any = ConcatDataset(list(datasets.values()))
    if args.set_sampler in ("temperature", "weights"):
        weights = set_weights(args, {name: len(part) for name, part in datasets.items()})
        return WeightedBatchSampler(rows, batch_samplers, weights, seed)
    kinds = {"proportional": ProportionalBatchSampler, "round_robin": RoundRobinBatchSampler}
    kind = kinds.get(args.set_sampler)
    return None if kind is None else kind(rows, batch_samplers, torch.Generator(), seed)


def set_shares(
    args: Any, datasets: Mapping[str, Any], batch_samplers: Sequence[BatchSampler], sampler: Any
) -> dict[str, dict[str, Any]]:
    """Of each set by name its rows, and its expected share of the batches of ``sampler``, where that is known."""
    lengths = [len(batches) for batches in batch_samplers]
    shares: Any = {"proportional": lengths, "round_robin": [1] * len(lengths)}.get(args.set_sampler)
    shares = getattr(sampler, "weights", shares)
    found: dict[str, dict[str, Any]] = {name: {"rows": len(part)} for name, part in datasets.items()}
    for about, share in zip(found.values(), shares if shares is not None else (), strict=False):
        about["share"] = float(share / sum(shares))
    return found
