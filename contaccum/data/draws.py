"""What an epoch takes of each row: one of its positives, h of its negatives, passages in place of missing ones.

A transform for a `datasets.Dataset`, at work when rows are read. A draw is a function of (seed, epoch, row) alone, so
that it is the same after a resume, in any worker and on any number of ranks, in whatever batch.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from contaccum.data.known_positives import positives_of
from contaccum.data.text_columns import hash_texts
from contaccum.errors import ConfigError, DataError

if TYPE_CHECKING:
    from datasets import Dataset

_SPARE = 2
"""Passages drawn beyond those that are missing, for the case that some may not be used."""

_TRIES = 256
"""Times that more are drawn before a row is said to have no other."""


class Draws:
    """Puts the epoch's texts in the place of a row's first ones, and its ids in the place of its number.

    Columns keep their names and order. Where queries have several positives, or ids are asked for, the 64-bit hashes of
    the row's query, positive and negatives take the number's place, for the loss; elsewhere it is left out.

    Args:
        rows: of `row_files`, (N,): passages for rows with too few negatives are other rows' positives.
        lists: what to draw from; None: nothing is drawn.
        known: int64 (r, 2), the known positives of queries with several; None: there are none.
        number: the column with a row's number.
        ids: give them in any case: the rows of several sets meet, and equal texts must be known for that.

    Attributes:
        known: as given.
        gives_numbers: keep a row's number, before its ids where there are any.
    """

    gives_numbers = False

    def __init__(
        self,
        rows: Dataset,
        lists: Dataset | None,
        known: np.ndarray | None,
        number: str = "label",
        ids: bool = False,
    ) -> None:
        import torch

        self.known = known
        self._gives_ids = ids or known is not None
        self._as_of: int | None = None
        self._number = number
        self._negatives = [name for name in rows.column_names if re.fullmatch("negative_[0-9]+", name)]
        self._passages = _Passages(rows)
        self._lists = None if lists is None else lists.with_format("arrow")
        # In shared memory, where the workers of a loader read it: they are copies of this process, or began anew.
        self._clock = torch.zeros(2, dtype=torch.int64).share_memory_()

    def __deepcopy__(self, memo: dict[int, Any]) -> Draws:
        # datasets copies a data set, format and all, to remove a column; the copy must be told the same epoch.
        return self

    @property
    def seed(self) -> int:
        """Of all draws."""
        return int(self._clock[0])

    @property
    def epoch(self) -> int:
        """Whose draws are read now."""
        return int(self._clock[1]) if self._as_of is None else self._as_of

    def read_as_of(self, epoch: int | None) -> None:
        """In this process, read the draws of another epoch than the one that was told; None: of that one again."""
        self._as_of = epoch

    def set_epoch(self, epoch: int, seed: int | None = None) -> None:
        """Rows read from now on, here and in a loader's workers, are those of this epoch, counted from 0."""
        if seed is not None:
            self._clock[0] = seed
        self._clock[1] = epoch

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Rows as lists by column. Without the column of row numbers they stay as they are."""
        if self._number not in batch:
            return batch
        missing = [name for name in ("query", "positive") if name not in batch]
        if missing:
            raise ConfigError(
                f"training data without its column {missing[0]!r}: what is drawn for a row belongs there. Keep the "
                "names, or take the stored texts with dataset.with_format(None)"
            )
        batch = dict(batch)
        numbers = batch.pop(self._number)
        names = [name for name in self._negatives if name in batch]
        rng = [row_generator(self.seed, self.epoch, number) for number in numbers]
        positives = list(batch["positive"])
        negatives = [list(row) for row in zip(*(batch[name] for name in names), strict=True)] or [[] for _ in numbers]
        if self._lists is not None:
            self._draw(numbers, rng, positives, negatives)
        short = [row for row, texts in enumerate(negatives) if None in texts]
        if short:
            self._fill(short, rng, batch["query"], positives, negatives)
        batch["positive"] = positives
        batch |= {name: [row[place] for row in negatives] for place, name in enumerate(names)}
        if self._gives_ids:
            texts = zip(batch["query"], positives, negatives, strict=True)
            flat = [text for query, positive, others in texts for text in (query, positive, *others)]
            ids = np.array(text_ids(flat)).reshape(len(numbers), 2 + len(names))
            batch[self._number] = (np.column_stack([numbers, ids]) if self.gives_numbers else ids).tolist()
        elif self.gives_numbers:
            batch[self._number] = numbers
        return batch

    def further_positives(self, number: int) -> list[str]:
        """What else a row may draw as its positive."""
        if self._lists is None:
            return []
        several = self._lists[number : number + 1].column("positives")[0].as_py()
        return several[1:] if several else []

    def _draw(self, numbers: list[int], rng: list[Any], positives: list[str], negatives: list[list[Any]]) -> None:
        assert self._lists is not None
        lists = self._lists[numbers]
        pairs = zip(lists.column("positives").to_pylist(), lists.column("pool").to_pylist(), strict=True)
        for row, (several, pool) in enumerate(pairs):
            positives[row], negatives[row] = draw_texts(rng[row], positives[row], negatives[row], several, pool)

    def _fill(
        self, short: list[int], rng: list[Any], queries: list[str], positives: list[str], negatives: list[list[Any]]
    ) -> None:
        """Put other rows' positives in the place of each None: random negatives, but not wrong ones."""
        given = {row: [text for text in negatives[row] if text is not None] for row in short}
        wanted = {row: len(negatives[row]) - len(given[row]) for row in short}
        found: dict[int, list[str]] = {row: [] for row in short}
        forbidden = {}
        keys = iter(text_ids([text for row in short for text in (queries[row], positives[row], *given[row])]))
        for row in short:
            known = positives_of(next(keys), self.known)
            forbidden[row] = {*known, *(next(keys) for _ in range(1 + len(given[row])))}
        tries, pending = 0, short
        while pending and tries < _TRIES:
            tries += 1
            # Each row draws for itself, however many share the batch; all are looked up at once.
            sizes = [wanted[row] - len(found[row]) + _SPARE for row in pending]
            draws = zip(pending, sizes, strict=True)
            places = np.concatenate([rng[row].integers(len(self._passages), size=size) for row, size in draws])
            texts = self._passages.texts(places)
            drawn = zip(texts, text_ids(texts), strict=True)
            for row, size in zip(pending, sizes, strict=True):
                for text, key in islice(drawn, size):
                    if key not in forbidden[row] and len(found[row]) < wanted[row]:
                        forbidden[row].add(key)
                        found[row].append(text)
            pending = [row for row in pending if len(found[row]) < wanted[row]]
        for row in short:
            others = given[row] + found[row]
            if not others:
                raise DataError(
                    "num_hard_negatives: a query without negatives, and no passage of the training data that is not "
                    "a positive of it (set missing_negatives to drop, or num_hard_negatives to 0)"
                )
            # In a tiny set there may be too few other passages: then one is there twice.
            negatives[row] = [others[i % len(others)] for i in range(len(negatives[row]))]


def row_generator(seed: int, epoch: int, number: int) -> np.random.Generator:
    """The random numbers of a row in an epoch."""
    return np.random.default_rng([seed & (2**64 - 1), epoch, number])


def draw_texts(
    rng: np.random.Generator, positive: str, negatives: list[Any], several: list[str] | None, pool: list[str] | None
) -> tuple[str, list[Any]]:
    """A row's positive and negatives in an epoch; what there is nothing to draw for stays as it is."""
    if several is not None:
        positive = several[int(rng.integers(len(several)))]
    if pool is not None:
        negatives = [pool[place] for place in rng.permutation(len(pool))[: len(negatives)]]
    return positive, negatives


class _Passages:
    """The positives of rows, at any places: without the copies that a `Dataset` makes of each."""

    def __init__(self, rows: Dataset) -> None:
        self._rows = rows
        self._chunks = rows.data.column("positive").chunks
        self._starts = np.cumsum([0, *map(len, self._chunks)])

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapped table is handed to another process by its file's name; pieces of it would be copied.
        return _Passages, (self._rows,)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def texts(self, places: np.ndarray) -> list[str]:
        chunks = np.searchsorted(self._starts, places, side="right") - 1
        pairs = zip(chunks.tolist(), (places - self._starts[chunks]).tolist(), strict=True)
        return [self._chunks[chunk][place].as_py() for chunk, place in pairs]


def text_ids(texts: list[str]) -> list[int]:
    """The 64-bit hash of each text."""
    return hash_texts(pa.array(texts, pa.large_string())).tolist()


def draws_of(dataset: Any) -> list[Draws]:
    """The draws of a data set, or of each of several by name; none for one that is what it is."""
    if isinstance(dataset, dict):
        return [draws for part in dataset.values() for draws in draws_of(part)]
    transform = (getattr(dataset, "format", None) or {}).get("format_kwargs", {}).get("transform")
    while isinstance(transform, partial):  # sentence-transformers wraps it to name the data set
        transform = transform.keywords.get("transform")
    return [transform] if isinstance(transform, Draws) else []
