"""Which rows share a micro-batch, and which set is next: functions of seed and epoch alone, so that runs resume.

sentence-transformers' default order comes from one generator that runs on: a run resumed in its second epoch would see
the first epoch's order again. Its samplers without duplicates, proportional and round robin are used as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
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

LENGTH_WINDOW = 16
"""Batches sorted by length together, unless said otherwise. With more, little more padding is saved."""

SET_SAMPLERS = ("proportional", "round_robin", "temperature", "weights")


@dataclass(frozen=True)
class RowFacts:
    """What is known about the N rows of a data set beside their texts: (N,) each, or None."""

    topics: np.ndarray | None = None
    lengths: np.ndarray | None = None


class EpochBatchSampler(DefaultBatchSampler):
    """Batches in an order that ``seed`` and ``set_epoch`` determine; every row is in one, the last may be shorter.

    With ``lengths``, batches are drawn at random, then the rows of ``length_window`` batches in a row are sorted by
    length and cut again. A window is a random sample of rows, so that an update of whole windows sees what it would see
    at random. With ``topics``, batches are of one label; what is left over of each goes into mixed batches. With both,
    or either, one batch in 64, eight at most, is random and comes first: the probe for drift is made of the first one.

    Args:
        dataset, batch_size, drop_last, valid_label_columns, generator, seed: as sentence-transformers gives them; the
            generator is not used.
        lengths: (N,) numbers.
        topics: (N,) labels.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        drop_last: bool,
        valid_label_columns: list[str] | None = None,
        generator: torch.Generator | None = None,
        seed: int = 0,
        *,
        lengths: np.ndarray | None = None,
        topics: np.ndarray | None = None,
        length_window: int = LENGTH_WINDOW,
    ) -> None:
        super().__init__(dataset, batch_size, drop_last, valid_label_columns, generator, seed)
        self._rows, self._lengths, self._window = len(dataset), lengths, length_window
        self._topics = None if topics is None else np.unique(topics, return_inverse=True)[1]

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self._rows, generator=_generator(self.seed, self.epoch)).numpy()
        if self._lengths is not None or self._topics is not None:
            order = self._grouped(order)
        for start in range(0, len(order), self.batch_size):
            # A list of them all would take five times the memory.
            batch = order[start : start + self.batch_size].tolist()
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch

    def _grouped(self, order: np.ndarray) -> np.ndarray:
        """The rows of random batches first, then of those of one topic or length, then what fills no batch."""
        rng, n = np.random.default_rng([self.seed & (2**64 - 1), self.epoch]), self.batch_size
        full = len(order) // n
        first = min(-(-full // 64), 8) * n
        body, left = order[first:], []
        groups = [body] if self._topics is None else _by_label(body, self._topics[body])
        windows = []
        for group in groups:
            whole = len(group) // n * n
            left.append(group[whole:])
            size = self._window * n if self._lengths is not None else max(whole, 1)
            windows += [group[start : min(start + size, whole)] for start in range(0, whole, size)]
        if self._lengths is not None:
            windows = [window[np.argsort(self._lengths[window], kind="stable")] for window in windows]
        batches = [_shuffled(window.reshape(-1, n), rng) for window in windows]
        batched = np.concatenate(batches) if batches else np.empty((0, n), dtype=order.dtype)
        mixed = np.concatenate(left)
        whole = len(mixed) // n * n
        batched = np.concatenate([batched, mixed[:whole].reshape(-1, n)])
        if self._topics is not None:  # without topics windows stay in step with updates
            batched = _shuffled(batched, rng)
        return np.concatenate([order[:first], batched.reshape(-1), mixed[whole:]])


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + epoch)


def _shuffled(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rows[rng.permutation(len(rows))]


def _by_label(rows: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
    order = np.argsort(labels, kind="stable")
    return np.split(rows[order], np.flatnonzero(np.diff(labels[order])) + 1)


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


def take_row_facts(args: Any, dataset: Any) -> tuple[Any, dict[str | None, RowFacts]]:
    """The data without its column of topics, which are no texts to encode; and topics and lengths, where asked for.

    A length is the characters of all of a row's texts together.

    Returns:
        the data set (or data sets by name), and the facts by its name (None for a single one).

    Raises:
        ConfigError: when the data is a stream, whose rows cannot be put together.
    """
    if dataset is None or not (args.topic_column or args.groups_by_length):
        return dataset, {}
    left, facts = {}, {}
    for name, part in dataset.items() if isinstance(dataset, dict) else ((None, dataset),):
        if not hasattr(part, "__len__"):
            asked = f"topic_column={args.topic_column}" if args.topic_column else "group_by_length"
            raise ConfigError(f"{asked} with streamed training data: its rows cannot be grouped. Drop it")
        topics = lengths = None
        if args.topic_column in part.column_names:
            topics = np.asarray(part.with_format(None)[args.topic_column][:])
            part = part.remove_columns(args.topic_column)
        if args.groups_by_length:
            rows = (row for batch in first_texts(part) for row in zip(*batch.values(), strict=True))
            lengths = np.array([sum(len(str(text or "")) for text in row) for row in rows])
        left[name], facts[name] = part, RowFacts(topics, lengths)
    return (type(dataset)(left) if isinstance(dataset, dict) else left[None]), facts


def make_batch_sampler(
    args: Any,
    dataset: Any,
    facts: RowFacts | None,
    batch_size: int,
    drop_last: bool,
    valid_label_columns: list[str] | None = None,
    generator: torch.Generator | None = None,
    seed: int = 0,
) -> BatchSampler | None:
    """The sampler that the arguments ask for; None where it is sentence-transformers' own or the user's.

    Args:
        facts: of the rows of ``dataset``; None for one that is not trained on, whose rows are not grouped.

    Raises:
        ConfigError: there is no such column of topics.
    """
    if args.own_batch_sampler or not hasattr(dataset, "__len__"):
        return None
    if args.avoids_duplicates:
        # A generator of its own, as sets take turns: it is seeded by seed and epoch when an epoch begins.
        own = torch.Generator()
        return NoDuplicatesBatchSampler(_HashedRows(dataset), batch_size, drop_last, None, own, seed)
    if args.topic_column and facts is not None and facts.topics is None:
        columns = ", ".join(dataset.column_names)
        raise ConfigError(f"topic_column={args.topic_column}: the training data has only the columns {columns}")
    facts = facts or RowFacts()
    return EpochBatchSampler(
        *(dataset, batch_size, drop_last, valid_label_columns, generator, seed),
        lengths=facts.lengths,
        topics=facts.topics,
        length_window=args.lengths_sorted,
    )


# Several sets --------------------------------------------------------------------------------------------------------


class WeightedBatchSampler(MultiDatasetDefaultBatchSampler):
    """Batches of several sets in the ratio of ``weights``, whatever their sizes, in random order.

    An epoch has as many batches as all sets together. Passes over a set go on over the ends of epochs: no row comes
    again before every other row of its set has come.

    Args:
        dataset, batch_samplers, seed: as sentence-transformers gives them.
        weights: one for each set, above 0.
    """

    def __init__(
        self, dataset: ConcatDataset, batch_samplers: list[BatchSampler], weights: Sequence[float], seed: int = 0
    ) -> None:
        super().__init__(dataset, batch_samplers, None, seed)
        self._lengths = [len(sampler) for sampler in batch_samplers]
        ends = np.rint(np.cumsum(weights) / np.sum(weights) * sum(self._lengths)).astype(int)
        self.counts = np.maximum(np.diff(ends, prepend=0), 1).tolist()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch  # the sets' own samplers follow passes, not epochs

    def __len__(self) -> int:
        return sum(self.counts)

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng([self.seed & (2**64 - 1), self.epoch])
        streams = [self._stream(number) for number in range(len(self.counts))]
        for number in rng.permutation(np.repeat(np.arange(len(self.counts)), self.counts)).tolist():
            yield next(streams[number])

    def _stream(self, number: int) -> Iterator[list[int]]:
        """The batches of a set from this epoch on, pass after pass."""
        sampler: Any = self.batch_samplers[number]
        offset = self.dataset.cumulative_sizes[number - 1] if number else 0
        turn, done = divmod(self.epoch * self.counts[number], self._lengths[number])
        while True:
            sampler.set_epoch(turn)
            for batch in islice(iter(sampler), done, None):
                yield [offset + row for row in batch]
            turn, done = turn + 1, 0


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
    lengths = dict(zip(datasets, map(len, batch_samplers), strict=True))
    empty = next((name for name, length in lengths.items() if not length), None)
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
    """What an epoch takes of each set, by name: rows there are, weight, batches, their share, passes over the set."""
    lengths = [len(batches) for batches in batch_samplers]
    known = {"proportional": lengths, "round_robin": [min(lengths)] * len(lengths)}
    counts = getattr(sampler, "counts", known.get(args.set_sampler))
    sizes = {name: len(part) for name, part in datasets.items()}
    if counts is None:  # a sampler of the user's
        return {name: {"rows": size} for name, size in sizes.items()}
    weights = set_weights(args, sizes) if isinstance(sampler, WeightedBatchSampler) else counts
    return {
        name: {
            "rows": sizes[name],
            "weight": weight / sum(weights),
            "batches_per_epoch": count,
            "share": count / sum(counts),
            "passes_per_epoch": count / length,
        }
        for name, weight, count, length in zip(sizes, weights, counts, lengths, strict=True)
    }
