"""Functions on training sets: number of rows, fingerprint, order, and the rows of a batch.

A training set is a `datasets.Dataset`, a stream (an IterableDataset, without a length), or a
dictionary of data sets by name, which are its parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any

from contaccum.data.samplers import RESUMABLE_SAMPLERS
from contaccum.data.sampling import first_texts
from contaccum.errors import ConfigError
from contaccum.files import Fingerprint
from contaccum.training.arguments import ContAccumTrainingArguments, get_name

Row = dict[str, Any]
"""A row of a training set: texts by column, and a label if the set has labels."""
Batch = dict[str, Any]
"""A collated batch: the features of all columns by name, and the labels."""
Collate = Callable[[list[Row]], Batch]
"""A data collator."""


def list_parts(value: Any) -> list[Any]:
    """Return the values of a dictionary by data set, or a single value as a list."""
    if isinstance(value, dict):
        return list(value.values())
    return [value]


def refuse_empty(dataset: Any) -> None:
    """Raise `ConfigError` if a training set, or a part of it, has no rows; None is no training set.

    The first row of a stream is read.
    """
    if dataset is None:
        return
    parts = dataset if isinstance(dataset, dict) else {None: dataset}
    for name, part in parts.items() or [(None, ())]:
        if not any(True for _ in islice(part, 1)):
            place = "train_dataset" if name is None else f"train_dataset: the part {name!r}"
            raise ConfigError(f"{place} has no rows (check how it is loaded and filtered)")


def collate_first_rows(
    dataset: Any, collate: Collate, collect_features: Callable[[Batch], tuple[list[Batch], Any]]
) -> list[Batch]:
    """Return the features of each column in the first row of each part of a training set.

    Args:
        dataset: the training set, or a dictionary of training sets; None has no rows.
        collate: the trainer's data collator.
        collect_features: the trainer's function that splits a batch into columns and labels.
    """
    features: list[Batch] = []
    for part in list_parts(dataset):
        if part is None:
            continue
        for row in islice(part, 1):
            columns, _ = collect_features(collate([row]))
            features += columns
    return features


def count_rows(dataset: Any) -> int | None:
    """Return the number of rows in all parts of a training set; None for a stream."""
    total = 0
    for part in list_parts(dataset):
        if not hasattr(part, "__len__"):
            return None
        total += len(part)
    return total


def compute_fingerprint(dataset: Any) -> str | None:
    """Return a hash of all texts of a training set; None for a stream."""
    if count_rows(dataset) is None:
        return None
    fingerprint = Fingerprint()
    for part in list_parts(dataset):
        for batch in first_texts(part):
            for row in zip(*batch.values(), strict=True):
                fingerprint.add(*row)
    return fingerprint.hex()


@contextmanager
def use_resumable_order(args: ContAccumTrainingArguments) -> Iterator[None]:
    """Use, within a ``with`` block, a batch sampler whose order depends only on seed and epoch.

    The trainer reads ``args.batch_sampler`` and ``args.seed`` when it makes the data loader, so
    both are replaced for that time. A sampler without a resumable version stays.
    """
    batch_sampler = args.batch_sampler
    seed = args.seed
    args.batch_sampler = RESUMABLE_SAMPLERS.get(get_name(batch_sampler), batch_sampler)
    args.seed = args.order_seed  # data_seed, if it is set
    try:
        yield
    finally:
        args.batch_sampler = batch_sampler
        args.seed = seed


def find_rows_of_micro_batches(
    args: ContAccumTrainingArguments,
    batch_sampler: Iterable[list[int]] | None,
    loader: Sized,
    updates_before: int,
    micro_batches: Iterable[int],
) -> list[int] | None:
    """Return the rows of the training data in some micro-batches of an update on this rank.

    The sampler computes the batches of the current epoch again. This is possible only if they
    depend on nothing but seed and epoch; otherwise the result is None. The ranks take the batches
    of the sampler in turn: with 2 ranks, batch 0 is the first of rank 0, and batch 1 of rank 1.

    Args:
        args: the arguments of the run.
        batch_sampler: iterable over the rows of each batch of all ranks; None for a stream.
        loader: the data loader; its length is the number of micro-batches of an epoch on this rank.
        updates_before: number of updates of the run before this one.
        micro_batches: indices of the micro-batches in the update, from 0.
    """
    has_resumable_sampler = get_name(args.batch_sampler) in RESUMABLE_SAMPLERS
    has_custom_order = callable(args.multi_dataset_batch_sampler)
    if batch_sampler is None or not has_resumable_sampler or has_custom_order:
        return None
    num_steps = args.gradient_accumulation_steps
    updates_per_epoch = max(math.ceil(len(loader) / num_steps), 1)
    first_of_update = updates_before % updates_per_epoch * num_steps
    positions = set()  # of the micro-batches, among the batches of the sampler
    for index in micro_batches:
        positions.add((first_of_update + index) * args.world_size + args.process_index)
    rows: list[int] = []
    # islice stops the sampler after the last batch that is needed.
    for position, batch in enumerate(islice(batch_sampler, max(positions) + 1)):
        if position in positions:
            rows += batch
    return rows
