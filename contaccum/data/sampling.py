"""Sampling of an epoch's texts: for each row one positive and h negatives of its record.

The text columns of a data set hold only the row number, and a transform of `datasets`,
`EpochSampling`, replaces the number by texts when the row is read:

    stored   {"query": 7, "positive": 7, "negative_1": 7}
    read     {"query": "a question", "positive": "its answer", "negative_1": "another passage"}

The sampled texts are a function of (seed, epoch, row) alone. A known positive, a passage that any
record lists as a positive of a query, is never a negative of this query.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from contaccum.data.records import Record
from contaccum.errors import ConfigError, DataError

if TYPE_CHECKING:
    from datasets import Dataset

LABELS = ("label", "labels", "score", "scores", "dataset_name")
"""Columns that sentence-transformers does not treat as texts."""

_MAX_FILL_TRIES = 256
"""Number of passages that are sampled to fill a row's missing negatives before the search stops."""
_BATCH_SIZE = 1000
_UINT64_MASK = 2**64 - 1
_LEAST_HASH = 1 << 48


class EpochSampling:
    """A transform that replaces row numbers by the epoch's texts, and adds labels for the loss.

    Args:
        records: the records of the cache, with the fields of a `Record`.
        num_hard_negatives: h, the number of negatives of each row.
        draws_positive: True to sample the positive of a row in each epoch from those of its record.
        rows: number of the record and index of the positive for each of the N rows, int64 (N, 2);
            None: row i has the first positive of record i.
        known_positives: see `collect_known_positives`.

    Attributes:
        columns: the text columns of a row: "query", "positive", "negative_1" .. "negative_h".
        has_text_ids: True to give rows a label with the ids of their texts, int64; it is True at
            first if there are known positives, which the loss finds by id.
    """

    def __init__(
        self,
        records: Dataset,
        num_hard_negatives: int,
        draws_positive: bool,
        rows: np.ndarray | None = None,
        known_positives: np.ndarray | None = None,
    ) -> None:
        self._records = records
        self._num_negatives = num_hard_negatives
        self._draws_positive = draws_positive
        self._rows = rows
        negative_columns = [f"negative_{number}" for number in range(1, num_hard_negatives + 1)]
        self.columns = ("query", "positive", *negative_columns)
        self.known_positives = known_positives
        self.has_text_ids = known_positives is not None
        # Seed and epoch are in shared memory, so that the workers of a data loader see a new epoch.
        import torch

        self._seed_and_epoch = torch.zeros(2, dtype=torch.int64).share_memory_()

    def __deepcopy__(self, memo: dict[int, Any]) -> EpochSampling:
        # datasets copies a data set with its transform to remove a column. The copy must see the
        # same epoch.
        return self

    def __len__(self) -> int:
        return len(self._records if self._rows is None else self._rows)

    @property
    def epoch(self) -> int:
        """Epoch whose texts are read now."""
        return int(self._seed_and_epoch[1])

    def set_epoch(self, epoch: int, seed: int | None = None) -> None:
        """Set the epoch, from 0, and the seed, at first 0, also in a loader's workers."""
        self._seed_and_epoch[1] = epoch
        if seed is not None:
            self._seed_and_epoch[0] = seed

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Replace the row numbers in the text columns of a batch, {column: values}, by texts.

        A column "label" is added if the batch has query and positive, and `has_text_ids` is True.
        Raises `ConfigError` for other columns without query or positive.
        """
        text_columns = [name for name in batch if name in self.columns]
        other_columns = {name: batch[name] for name in batch if name not in self.columns}
        has_pair = "query" in text_columns and "positive" in text_columns
        if other_columns and not has_pair:
            names = ", ".join(batch)
            raise ConfigError(f"training data with the columns {names}: keep query and positive")
        numbers = [int(number) for number in batch[text_columns[0]]] if text_columns else []
        sampled: dict[str, list[Any]] = {name: [] for name in text_columns}
        seed = int(self._seed_and_epoch[0]) & _UINT64_MASK
        for number, source in zip(numbers, self._read_sources(numbers), strict=True):
            record, positive_index = source
            rng = np.random.default_rng([seed, self.epoch, number])
            num_positives = len(record.positives)
            if self._draws_positive and num_positives > 1:
                positive_index = int(rng.integers(num_positives))
            positive = record.positives[positive_index]
            negatives = record.negatives
            if len(negatives) > self._num_negatives:
                order = rng.permutation(len(negatives))[: self._num_negatives]
                negatives = [negatives[index] for index in order]
            if len(negatives) < self._num_negatives:
                negatives = self._fill_negatives(rng, record.query, positive, negatives)
            row = dict(zip(self.columns, (record.query, positive, *negatives), strict=True))
            for name in text_columns:
                sampled[name].append(row[name])
        if has_pair and self.has_text_ids:
            rows = zip(*sampled.values(), strict=True)
            sampled["label"] = [text_ids(texts).tolist() for texts in rows]
        return {**sampled, **other_columns}

    def first_texts(self, numbers: list[int]) -> dict[str, list[str | None]]:
        """Return {column: texts} of rows, the same in every epoch: the first ones of their records.

        A missing negative is None.
        """
        texts: dict[str, list[str | None]] = {name: [] for name in self.columns}
        for record, positive_index in self._read_sources(numbers):
            negatives: list[str | None] = [*record.negatives[: self._num_negatives]]
            negatives += [None] * (self._num_negatives - len(negatives))
            row = (record.query, record.positives[positive_index], *negatives)
            for name, text in zip(self.columns, row, strict=True):
                texts[name].append(text)
        return texts

    def pairs(self, numbers: list[int]) -> Iterator[tuple[str, list[str]]]:
        """Yield the query and the positives of rows, by number.

        The first positive is the row's own. If positives are sampled, all of the record follow.
        """
        for record, positive_index in self._read_sources(numbers):
            positives = [record.positives[positive_index]]
            if self._draws_positive:
                positives += record.positives
            yield record.query, positives

    def _read_sources(self, numbers: list[int]) -> list[tuple[Record, int]]:
        """Return the record of each row, and the index of the row's positive in it."""
        record_numbers = np.array(numbers, dtype=np.int64)
        positive_indices = [0] * len(numbers)
        if self._rows is not None:
            record_numbers = self._rows[numbers, 0]
            positive_indices = self._rows[numbers, 1].tolist()
        columns = self._records[record_numbers.tolist()]
        values = zip(*(columns[name] for name in Record._fields), strict=True)
        records = [Record(*value) for value in values]
        return list(zip(records, positive_indices, strict=True))

    def _fill_negatives(
        self, rng: np.random.Generator, query: str, positive: str, negatives: list[str]
    ) -> list[str]:
        """Return a row's negatives, filled up to h with positives of other rows.

        If too few are found, the negatives are repeated; `DataError` if there is none at all.
        """
        query_id, *used_ids = text_ids([query, positive, *negatives]).tolist()
        forbidden_ids = set(used_ids)
        if self.known_positives is not None:
            sorted_query_ids = self.known_positives[:, 0]
            start = sorted_query_ids.searchsorted(query_id, "left")
            end = sorted_query_ids.searchsorted(query_id, "right")
            forbidden_ids.update(self.known_positives[start:end, 1].tolist())
        filled = list(negatives)
        for _ in range(_MAX_FILL_TRIES):
            if len(filled) == self._num_negatives:
                return filled
            [(record, positive_index)] = self._read_sources([int(rng.integers(len(self)))])
            passage = record.positives[positive_index]
            passage_id = int(text_ids([passage])[0])
            if passage_id not in forbidden_ids:
                forbidden_ids.add(passage_id)
                filled.append(passage)
        if not filled:
            raise DataError(
                "a query has no negatives, and no other passage can be its negative "
                "(set num_hard_negatives to 0)"
            )
        return [filled[index % len(filled)] for index in range(self._num_negatives)]


def get_samplings(dataset: Any) -> list[EpochSampling]:
    """Return the `EpochSampling` transforms of a data set, or of all data sets of a dict."""
    if isinstance(dataset, dict):
        return [sampling for part in dataset.values() for sampling in get_samplings(part)]
    data_format = getattr(dataset, "format", None) or {}
    transform = data_format.get("format_kwargs", {}).get("transform")
    # sentence-transformers wraps the transform of a data set of a dict, to add the set's name.
    while isinstance(transform, partial):
        transform = transform.keywords.get("transform")
    return [transform] if isinstance(transform, EpochSampling) else []


def first_texts(dataset: Any) -> Iterator[dict[str, list[str | None]]]:
    """Yield `EpochSampling.first_texts` of all rows, in batches, without the columns `LABELS`."""
    samplings = get_samplings(dataset)
    for batch in dataset.with_format(None).iter(_BATCH_SIZE):
        texts = samplings[0].first_texts(batch["query"]) if samplings else batch
        yield {name: values for name, values in texts.items() if name not in LABELS}


def text_ids(texts: Iterable[Any]) -> np.ndarray:
    """Return the ids of k texts, int64 (k,), which are 64-bit hashes.

    Among ten million texts, two have the same id with a probability of 3e-6.
    """
    hashes = [blake2b(str(text).encode("utf-8"), digest_size=8).digest() for text in texts]
    return np.frombuffer(b"".join(hashes), dtype="<i8").astype(np.int64)


def collect_known_positives(pairs: np.ndarray) -> np.ndarray | None:
    """Return the distinct pairs of all queries with several positives, int64 (r, 2), sorted.

    ``pairs`` has the text ids of queries and positives, int64 (n, 2): (1, 5), (2, 6), (2, 7),
    (2, 6) give [[2, 6], [2, 7]]. None if r would be 0.
    """
    sorted_pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    differs_from_previous = (sorted_pairs[1:] != sorted_pairs[:-1]).any(axis=1)
    distinct_pairs = sorted_pairs[np.append(True, differs_from_previous)]
    # The pairs of a query are adjacent: a query has several where the next pair has the same query.
    same_query_as_next = np.flatnonzero(distinct_pairs[1:, 0] == distinct_pairs[:-1, 0])
    rows = np.union1d(same_query_as_next, same_query_as_next + 1)
    return distinct_pairs[rows] if len(rows) else None


def are_text_ids(ids: Any) -> bool:
    """Return False if all ids are small integers, such as classes or row numbers.

    Text ids are 64-bit hashes. Those of a single pair are all below 2^48 with a probability of
    1e-9.
    """
    return bool((ids.abs() >= _LEAST_HASH).any())
