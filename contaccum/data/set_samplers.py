"""Batches of several training sets, in shares that are asked for: what sentence-transformers' own samplers lack.

Each micro-batch is of one set. In which order sets take turns is in ``set_schedule``; how rows of a set are put
together is the affair of the set's own sampler.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from sentence_transformers.base.sampler import MultiDatasetDefaultBatchSampler
from torch.utils.data import BatchSampler, ConcatDataset

from contaccum.data.draws import draws_of
from contaccum.data.set_schedule import apportion, shuffled_turns
from contaccum.errors import ConfigError


class WeightedBatchSampler(MultiDatasetDefaultBatchSampler):
    """Batches of several sets in the ratio of ``weights``, whatever their sizes.

    An epoch is as many batches as all sets have together, divided by largest remainders. A set's batches are a stream
    of passes over it, and each epoch takes up where the last one ended: no row comes again before every other row of
    its set has come, whether an epoch holds many passes or a part of one. (seed, epoch) determine the order.

    Rows are numbered as `RowsOfSets` says, by the pass that they are read in.

    Args:
        dataset, batch_samplers, generator, seed: as sentence-transformers gives them; the generator is not used.
        weights: one for each set, above 0.
        block: batches whose order is random, see `shuffled_turns`; in each block the shares are exact, to one batch.

    Raises:
        ConfigError: a set without a batch, or fewer batches than sets.
    """

    def __init__(
        self,
        dataset: ConcatDataset,
        batch_samplers: list[BatchSampler],
        generator: torch.Generator | None = None,
        seed: int = 0,
        *,
        weights: Sequence[float],
        block: int,
    ) -> None:
        super().__init__(dataset, batch_samplers, generator, seed)
        self._lengths = [len(sampler) for sampler in batch_samplers]
        if not all(self._lengths):
            raise ConfigError(
                f"training set {self._lengths.index(0) + 1} of {len(self._lengths)} has no whole batch of "
                f"{self.batch_size} rows: leave it out, lower per_device_train_batch_size, or drop dataloader_drop_last"
            )
        self.counts = apportion(weights, sum(self._lengths))
        self.block = block

    def set_epoch(self, epoch: int) -> None:
        # The sets' own samplers follow passes, not epochs.
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(self.counts)

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng([self.seed & (2**64 - 1), self.epoch])
        streams = [self._stream(number) for number in range(len(self.counts))]
        for number in shuffled_turns(self.counts, self.block, rng):
            yield next(streams[number])

    def _stream(self, number: int) -> Iterator[list[int]]:
        """The batches of a set from this epoch on, pass after pass."""
        sampler: Any = self.batch_samplers[number]
        ends = self.dataset.cumulative_sizes
        offset = ends[number - 1] if number else 0
        turn, done = divmod(self.epoch * self.counts[number], self._lengths[number])
        while True:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(turn)
            first = (turn + 1) * ends[-1] + offset
            for batch in islice(iter(sampler), done, None):
                yield [first + row for row in batch]
            turn, done = turn + 1, 0


class RowsOfSets(ConcatDataset):
    """The rows of several data sets, N together, numbered through.

    Row i is number i, with the texts that are drawn in the epoch; as pass p over its set draws them, it is number
    (p + 1) N + i. So a row that comes several times in an epoch brings other negatives each time.
    """

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        """The rows of a batch, read at once where they are of one set and one pass."""
        places = [self._place(number) for number in numbers]
        (part, turn), others = places[0][:2], {place[:2] for place in places}
        if len(others) > 1:
            return [self[number] for number in numbers]
        dataset: Any = self.datasets[part]
        rows = [row for _, _, row in places]
        if turn == 0:
            return dataset.__getitems__(rows)
        drawn = draws_of(dataset)
        for draws in drawn:
            draws.read_as_of(turn - 1)
        try:
            return dataset.__getitems__(rows)
        finally:
            for draws in drawn:
                draws.read_as_of(None)

    def _place(self, number: int) -> tuple[int, int, int]:
        """Which set, which pass (0: that of the epoch, p + 1: pass p), which row of the set."""
        turn, row = divmod(number, self.cumulative_sizes[-1])
        part = bisect.bisect_right(self.cumulative_sizes, row)
        return part, turn, row - (self.cumulative_sizes[part - 1] if part else 0)
