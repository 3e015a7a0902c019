"""Batch samplers whose order is a function of seed and epoch alone, so that a run can resume.

The default sampler of sentence-transformers draws all epochs from one generator: a run that
resumes in its second epoch would repeat the order of the first.

The generator's seed is seed * factor + epoch: it differs for any two pairs of seed and epoch with
fewer epochs than the factor, a prime.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import torch
from sentence_transformers.base.sampler import DefaultBatchSampler, NoDuplicatesBatchSampler

from contaccum.data.sampling import first_texts, text_ids

_SEED_FACTOR = 1_000_003


class EpochBatchSampler(DefaultBatchSampler):
    """Batches of rows in an order that depends on ``seed`` and ``set_epoch`` alone.

    Every row is in one batch; the last batch may be smaller.
    """

    def __iter__(self) -> Iterator[list[int]]:
        num_rows = len(self.sampler)  # type: ignore[arg-type]  # a torch RandomSampler has a length
        generator = torch.Generator().manual_seed(self.seed * _SEED_FACTOR + self.epoch)
        order = torch.randperm(num_rows, generator=generator)
        # A list of all row numbers would take five times the memory of the tensor.
        for batch in order.split(self.batch_size):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch.tolist()


class _HashedRows:
    """Data set for `NoDuplicatesBatchSampler` with a hash in place of each text, to save memory.

    A missing text (None) equals no other one.
    """

    column_names = ()

    def __init__(self, dataset: Any) -> None:
        hashes_by_batch = []
        missing_numbers = count()
        for texts_by_column in first_texts(dataset):
            hashes = []
            for texts in texts_by_column.values():
                distinct = [
                    f"missing text {next(missing_numbers)}" if text is None else text
                    for text in texts
                ]
                hashes.append(text_ids(distinct))
            hashes_by_batch.append(np.column_stack(hashes))
        self._hashes = np.concatenate(hashes_by_batch)

    def __len__(self) -> int:
        return len(self._hashes)

    def __getitem__(self, row: int) -> dict[int, int]:
        return dict(enumerate(self._hashes[row].tolist()))


class DistinctBatchSampler(NoDuplicatesBatchSampler):
    """Batches in which no text of `contaccum.data.sampling.first_texts` occurs twice.

    Texts that are sampled in each epoch (other positives or negatives) may occur twice in a batch.
    """

    def __init__(self, dataset: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["generator"] = torch.Generator()
        super().__init__(_HashedRows(dataset), *args, **kwargs)


RESUMABLE_SAMPLERS: dict[str, type[DefaultBatchSampler]] = {
    "batch_sampler": EpochBatchSampler,
    "no_duplicates": DistinctBatchSampler,
    "no_duplicates_hashed": DistinctBatchSampler,
}
"""Samplers that replace those of sentence-transformers, by the names in `BatchSamplers`."""


def get_batch_sampler(loader: Any) -> Any:
    """Return the batch sampler of a data loader, without accelerate's wrappers."""
    while hasattr(loader, "batch_sampler"):
        loader = loader.batch_sampler
    return loader
