"""Properties of a training set: its rows, its fingerprint, and the rows that a batch holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

from contaccum.data.samplers import RESUMABLE_SAMPLERS
from contaccum.data.sampling import first_texts
from contaccum.files import Fingerprint
from contaccum.training.arguments import ContAccumTrainingArguments, name_of

Row = dict[str, Any]
"""A row of a training set: texts by column, and perhaps a label."""
Batch = dict[str, Any]
"""A collated batch: features of all columns by name, and labels."""


def parts_of(dataset: Any) -> list[Any]:
    """Return the data sets in a training set: the values of a dictionary, or the set itself."""
    if isinstance(dataset, dict):
        return list(dataset.values())
    return [dataset]


def first_rows(dataset: Any) -> list[Row]:
    """Return the first row of each part of a training set; None has no rows."""
    rows = []
    for part in parts_of(dataset):
        row = next(iter(part), None) if part is not None else None
        if row is not None:
            rows.append(row)
    return rows


def num_rows(dataset: Any) -> int | None:
    """Return the number of rows in all parts of a training set; None for a stream."""
    total = 0
    for part in parts_of(dataset):
        if not hasattr(part, "__len__"):
            return None
        total += len(part)
    return total


def fingerprint_of(dataset: Any) -> str | None:
    """Return a hash of all texts of a training set; None for a stream."""
    if num_rows(dataset) is None:
        return None
    fingerprint = Fingerprint()
    for part in parts_of(dataset):
        for batch in first_texts(part):
            for row in zip(*batch.values(), strict=True):
                fingerprint.add(*row)
    return fingerprint.hex()


@contextmanager
def resumable_order(args: ContAccumTrainingArguments) -> Iterator[None]:
    """Set a batch sampler and a seed whose order depends on seed and epoch alone in a block."""
    batch_sampler = args.batch_sampler
    seed = args.seed
    args.batch_sampler = RESUMABLE_SAMPLERS.get(name_of(batch_sampler), batch_sampler)
    args.seed = args.order_seed
    try:
        yield
    finally:
        args.batch_sampler = batch_sampler
        args.seed = seed


def innermost_batch_sampler(loader: DataLoader) -> Any:
    """Return the batch sampler of a data loader without accelerate's wrappers."""
    sampler: object = loader
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return sampler


def rows_of_micro_batches(
    args: ContAccumTrainingArguments,
    batch_sampler: Iterable[list[int]] | None,
    batches_per_epoch: int,
    updates_before: int,
    micro_batches: Iterable[int],
) -> list[int] | None:
    """Return the rows of the training data in some micro-batches of an update, on this rank.

    The batches of the present epoch are made again for it. That is possible where they depend on
    the seed and the epoch alone; otherwise the result is None.

    Args:
        args: the arguments of the run.
        batch_sampler: yields the rows of each batch, of all ranks in turn; None for a stream.
        batches_per_epoch: micro-batches of this rank.
        updates_before: the number of updates before this one.
        micro_batches: their places in the update, from 0.
    """
    is_ours = name_of(args.batch_sampler) in RESUMABLE_SAMPLERS
    if batch_sampler is None or not is_ours or callable(args.multi_dataset_batch_sampler):
        return None
    steps = args.gradient_accumulation_steps
    updates_per_epoch = max(math.ceil(batches_per_epoch / steps), 1)
    first = updates_before % updates_per_epoch * steps
    numbers = {(first + index) * args.world_size + args.process_index for index in micro_batches}
    rows: list[int] = []
    # The range comes first, so that no batch beyond the last one is made.
    for number, batch in zip(range(max(numbers) + 1), batch_sampler, strict=False):
        if number in numbers:
            rows += batch
    return rows
