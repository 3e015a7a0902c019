"""Which rows share a micro-batch: a function of seed and epoch alone, so that runs resume.

sentence-transformers' default order comes from one generator that runs on: a run resumed in its second epoch would see
the first epoch's order again. Its samplers without duplicates, proportional and round robin are used as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from sentence_transformers.base.sampler import DefaultBatchSampler, NoDuplicatesBatchSampler

from contaccum.data.sampling import first_texts, text_ids


class EpochBatchSampler(DefaultBatchSampler):
    """Batches in an order that ``seed`` and ``set_epoch`` determine; every row is in one, the last may be shorter."""

    def __iter__(self) -> Iterator[list[int]]:
        rows = len(self.sampler)  # type: ignore[arg-type]  # torch's random one
        order = torch.randperm(
            rows, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        )
        for batch in order.split(
            self.batch_size
        ):  # a list of all rows would take five times the memory
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch.tolist()


class _HashedRows:
    """Rows as `NoDuplicatesBatchSampler` reads them, a number in place of each text: int64 (N, c)."""

    column_names = ()

    def __init__(self, dataset: Any) -> None:
        hashed = [
            np.column_stack([text_ids(texts) for texts in batch.values()])
            for batch in first_texts(dataset)
        ]
        self._hashes = np.concatenate(hashed)

    def __len__(self) -> int:
        return len(self._hashes)

    def __getitem__(self, row: int) -> dict[int, int]:
        return dict(enumerate(self._hashes[row].tolist()))


class DistinctBatchSampler(NoDuplicatesBatchSampler):
    """No text twice in a batch, by texts that stay whatever an epoch samples."""

    def __init__(self, dataset: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(_HashedRows(dataset), *args, **kwargs | {"generator": torch.Generator()})


RESUMING: dict[str, type[DefaultBatchSampler]] = {
    "batch_sampler": EpochBatchSampler,
    "no_duplicates": DistinctBatchSampler,
    "no_duplicates_hashed": DistinctBatchSampler,
}
"""What takes the place of a `BatchSamplers` of sentence-transformers, by name."""
