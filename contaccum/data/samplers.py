"""The order of training data: batches that depend on the seed and the epoch alone.

sentence-transformers' default sampler draws each epoch's order from one generator that runs on, so a run resumed in
its second epoch would see the first epoch's order again. Here the order is a function of (seed, epoch).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sentence_transformers.base.sampler import DefaultBatchSampler


class EpochBatchSampler(DefaultBatchSampler):
    """Shuffled batches whose order is determined by ``seed`` and ``set_epoch``; the last may be shorter."""

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.sampler), generator=generator).tolist()  # type: ignore[arg-type]  # a Dataset
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch
