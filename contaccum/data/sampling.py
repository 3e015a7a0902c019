"""What an epoch takes of each record: one of its positives, h of its negatives, passages in place of missing ones.

A transform for a `datasets.Dataset`, at work when rows are read. What is sampled is a function of (seed, epoch, row)
alone: the same after a resume, in any worker, on any number of ranks. Known positives go by 64-bit hashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from contaccum.data.labels import encode
from contaccum.errors import ConfigError, DataError, check_choice

if TYPE_CHECKING:
    from datasets import Dataset

PositivesUsed = Literal["draw", "first", "all"]
MissingNegatives = Literal["fill", "drop"]
POSITIVES_USED: tuple[PositivesUsed, ...] = get_args(PositivesUsed)
MISSING_NEGATIVES: tuple[MissingNegatives, ...] = get_args(MissingNegatives)

LABELS = (
    "label",
    "labels",
    "score",
    "scores",
    "dataset_name",
)  # columns that sentence-transformers takes for no text
TOO_FEW = "too few hard negatives"
_TRIES = 256  # that other passages are sampled in place of missing negatives before a row is said to have none


@dataclass(frozen=True)
class Selection:
    """How rows are made of records; raises `ConfigError` for values that cannot work, or not together."""

    num_hard_negatives: int = 0  # h, of each row
    # "draw": a row for each record, with one of its positives, drawn anew in each epoch. "first": always the first.
    # "all": a row for each positive. None: "all" for judgements (BEIR, MS MARCO), each of which is a pair, else "draw".
    positives: PositivesUsed | None = None
    # Sample from the first so many that are listed; None: from all (of an MS MARCO folder, 30). Of h, always the first.
    negatives_from: int | None = None
    # A record of fewer than h: "fill" up with passages of other records, or "drop" it.
    missing_negatives: MissingNegatives = "fill"

    def __post_init__(self) -> None:
        h, most = self.num_hard_negatives, self.negatives_from
        check_choice("positives", self.positives, (None, *POSITIVES_USED))
        check_choice("missing_negatives", self.missing_negatives, MISSING_NEGATIVES)
        if h < 0 or (most is not None and not 0 < h <= most):
            raise ConfigError(
                f"num_hard_negatives={h} with negatives_from={most}: 0 or more, and no more"
            )

    def sample(
        self,
        rng: np.random.Generator,
        positives: Sequence[str],
        negatives: Sequence[str],
        which: int = 0,
    ) -> tuple[str, list[str]]:
        """A row's positive, and its negatives, h unless there are fewer; `which` positive it is under "all"."""
        positive = positives[which]
        distinct = list(dict.fromkeys(positives))
        if self.positives == "draw" and len(distinct) > 1:
            positive = distinct[int(rng.integers(len(distinct)))]
        pool = list(dict.fromkeys(negatives[: self.negatives_from]))
        if len(pool) > self.num_hard_negatives:
            pool = [pool[place] for place in rng.permutation(len(pool))[: self.num_hard_negatives]]
        return positive, pool


class EpochSampling:
    """Makes a row of its number: the epoch's texts, and ids for the loss.

    Args:
        records: of the cache, the fields of a `Record`; or a plain data set, with `columns`.
        columns: the text columns of a row, in order.
        rows: int64 (N, 2), for each row the record and which of its positives; None: row i is record i.
        known_positives: int64 (r, 2) of `several_positives`.
    """

    def __init__(
        self,
        records: Dataset,
        columns: Sequence[str],
        selection: Selection,
        rows: np.ndarray | None = None,
        known_positives: np.ndarray | None = None,
    ) -> None:
        import torch

        self._records, self._selection, self._rows = records, selection, rows
        self.columns, self.known_positives = tuple(columns), known_positives
        # What the "label" of a row holds; see contaccum.data.labels.
        self.gives_ids = known_positives is not None
        self.gives_numbers = False
        self.gives_scores = False
        # Seed and epoch, in shared memory for a loader's workers, which are copies of this process, or began anew.
        self._clock = torch.zeros(2, dtype=torch.int64).share_memory_()

    def __deepcopy__(self, memo: dict[int, Any]) -> EpochSampling:
        # datasets copies a data set, format and all, to remove a column; the copy must see the same epoch.
        return self

    def __len__(self) -> int:
        return len(self._records if self._rows is None else self._rows)

    @property
    def epoch(self) -> int:
        """Whose texts are read now."""
        return int(self._clock[1])

    def set_epoch(self, epoch: int, seed: int | None = None) -> None:
        """Rows read from now on, here and in a loader's workers, are those of this epoch, counted from 0."""
        self._clock[1] = epoch
        if seed is not None:
            self._clock[0] = seed

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Rows as lists by column, of batches of row numbers. Other columns stay."""
        names = [name for name in batch if name in self.columns]
        others = {name: values for name, values in batch.items() if name not in names}
        whole = {"query", "positive"} <= {*names}
        if others and not whole:
            raise ConfigError(
                f"training data with the columns {', '.join(batch)}: keep the names query and positive"
            )
        numbers = [int(number) for number in batch[names[0]]] if names else []
        rows, labels = [], []
        for number, (query, positives, negatives, scores, which) in zip(
            numbers, self._read(numbers), strict=True
        ):
            rng = np.random.default_rng([int(self._clock[0]) & (2**64 - 1), self.epoch, number])
            positive, texts = self._selection.sample(rng, positives, negatives, which)
            if len(texts) < len(self.columns) - 2:
                texts = self._filled(rng, query, positive, texts)
            row = dict(zip(self.columns, (query, positive, *texts), strict=True))
            rows.append(row)
            row_scores: dict[str, float] = {}
            if self.gives_scores:
                row_scores = _scores_of_row(row, positives, negatives, scores)
            labels.append(self._label(number, {name: row[name] for name in names}, row_scores))
        sampled: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in names}
        if whole and (self.gives_ids or self.gives_numbers or self.gives_scores):
            sampled["label"] = labels
        return sampled | others

    def _label(self, number: int, texts: Mapping[str, str], row_scores: Mapping[str, float]) -> Any:
        """Return the label of a row with the parts that are switched on; texts and scores go by column."""
        ids = text_ids(texts.values()).tolist() if self.gives_ids else []
        scores = [row_scores[name] for name in texts if name in row_scores]
        if scores:
            return encode(text_ids=ids, teacher_scores=scores)
        return encode(number if self.gives_numbers else None, ids)

    def first_texts(self, numbers: list[int]) -> dict[str, list[str | None]]:
        """By column, of each row its query, its first positive and its first h negatives, None where one is missing."""
        h = len(self.columns) - 2
        rows = [
            [query, found[which], *[*rest, *[None] * h][:h]]
            for query, found, rest, _, which in self._read(numbers)
        ]
        return {name: [row[place] for row in rows] for place, name in enumerate(self.columns)}

    def pairs(self, numbers: Sequence[int] | None = None) -> Iterator[dict[str, Any]]:
        """Yield each row's query, and its positive before those that it may take instead.

        Args:
            numbers: of the rows; None: all.
        """
        if numbers is None:
            numbers = range(len(self))
        for start in range(0, len(numbers), 1000):
            for query, positives, _, _, which in self._read([*numbers[start : start + 1000]]):
                others = positives if self._selection.positives == "draw" else []
                yield {"query": query, "positive": [positives[which], *others]}

    def _read(self, numbers: list[int]) -> list[tuple[str, list[str], list[str], Any, int]]:
        """Query, positives, negatives and scores of each row's record, and which positive is the row's."""
        places, which = np.array(numbers, dtype=np.int64), [0] * len(numbers)
        if self._rows is not None:
            places, which = self._rows[numbers, 0], self._rows[numbers, 1].tolist()
        found = self._records[places.tolist()]
        if "positives" not in found:
            listed = zip(*(found[name] for name in self.columns), strict=True)
            rows = [
                (query, [positive], [*filter(None, texts)], None)
                for query, positive, *texts in listed
            ]
        else:
            rows = list(
                zip(
                    *(found[name] for name in ("query", "positives", "negatives", "scores")),
                    strict=True,
                )
            )
        return [(*row, number) for row, number in zip(rows, which, strict=True)]

    def _filled(
        self, rng: np.random.Generator, query: str, positive: str, found: list[str]
    ) -> list[str]:
        """`found` and other rows' positives: random negatives, but no known positives of the query."""
        wanted = len(self.columns) - 2
        query_id, *used = text_ids([query, positive, *found]).tolist()
        forbidden = {*used}
        if (known := self.known_positives) is not None:  # which are sorted
            low, high = (known[:, 0].searchsorted(query_id, side) for side in ("left", "right"))
            forbidden |= {*known[low:high, 1].tolist()}
        for _ in range(0 if self.gives_scores else _TRIES):  # what others have has no score
            if len(found) == wanted:
                return found
            [(_, positives, _, _, which)] = self._read([int(rng.integers(len(self)))])
            [passage_id] = text_ids([positives[which]]).tolist()
            if passage_id not in forbidden:
                forbidden.add(passage_id)
                found = [*found, positives[which]]
        if not found:
            raise DataError(
                "a query without negatives, and no passage that could be one (set num_hard_negatives to 0)"
            )
        # A record may list one twice, and a tiny set have too few other passages: then one is there twice.
        return [found[place % len(found)] for place in range(wanted)]


def _scores_of_row(
    row: Mapping[str, str], positives: list[str], negatives: list[str], scores: list[float]
) -> dict[str, float]:
    """Return a teacher's score of each passage of a row, by column.

    A record may list one text both as positive and as negative: each column takes the score that
    was given for its role. Where a role lists a text twice, the first score counts.

    Args:
        row: the texts of the row by column.
        positives, negatives: all of the record.
        scores: of the positives and then the negatives.
    """
    score_of_positive: dict[str, float] = {}
    score_of_negative: dict[str, float] = {}
    for text, score in zip(positives, scores[: len(positives)], strict=True):
        score_of_positive.setdefault(text, score)
    for text, score in zip(negatives, scores[len(positives) :], strict=True):
        score_of_negative.setdefault(text, score)
    row_scores = {}
    for name, text in row.items():
        if name == "positive":
            row_scores[name] = score_of_positive[text]
        elif name != "query":
            row_scores[name] = score_of_negative[text]
    return row_scores


def as_rows(sampling: EpochSampling) -> Dataset:
    """A data set of N rows whose text columns hold row numbers, turned into texts when rows are read."""
    import pyarrow as pa
    from datasets import Dataset

    columns = dict.fromkeys(
        sampling.columns, pa.array(np.arange(len(sampling)))
    )  # one and the same buffer
    # Named, or datasets would copy and hash the table; nothing in memory is ever cached by its name.
    return Dataset(pa.table(columns), fingerprint=f"{len(sampling)} rows").with_transform(sampling)


def with_row_numbers(dataset: Any) -> Any:
    """A plain data set with columns "query", "positive" and perhaps negatives as one whose rows know their number."""
    columns = [
        name
        for name in dataset.column_names
        if re.fullmatch("query|positive|negative_[0-9]+", name)
    ]
    pairs = [
        text_ids(texts[name]) for texts in first_texts(dataset) for name in ("query", "positive")
    ]
    known = several_positives(
        np.column_stack([np.concatenate(pairs[0::2]), np.concatenate(pairs[1::2])])
    )
    sampling = EpochSampling(dataset, columns, Selection(len(columns) - 2), known_positives=known)
    return as_rows(sampling)


def samplings_of(dataset: Any) -> list[EpochSampling]:
    """The sampling of a data set, or of each of several by name; none for one that is what it is."""
    if isinstance(dataset, dict):
        return [sampling for part in dataset.values() for sampling in samplings_of(part)]
    transform = (getattr(dataset, "format", None) or {}).get("format_kwargs", {}).get("transform")
    while isinstance(transform, partial):  # sentence-transformers wraps it to name the data set
        transform = transform.keywords.get("transform")
    return [transform] if isinstance(transform, EpochSampling) else []


def first_texts(dataset: Any) -> Iterator[dict[str, list[str | None]]]:
    """Texts by column of all rows in their order, a batch at a time, as they are before anything is sampled."""
    samplings = samplings_of(dataset)
    for batch in dataset.with_format(None).iter(1000):
        texts = samplings[0].first_texts(batch["query"]) if samplings else batch
        yield {name: values for name, values in texts.items() if name not in LABELS}


def text_ids(texts: Iterable[Any]) -> np.ndarray:
    """Eight bytes of each text, as int64 (k,): of ten million, two share theirs with a probability of 3e-6."""
    hashes = [blake2b(str(text).encode("utf-8"), digest_size=8).digest() for text in texts]
    return np.frombuffer(b"".join(hashes), dtype="<i8").astype(np.int64)


def several_positives(pairs: np.ndarray) -> np.ndarray | None:
    """Of pairs, int64 (n, 2), hashes of a query's and a positive's text, those of all queries that have more than one
    positive, each pair once: int64 (r, 2), sorted; None: no pair."""
    ordered = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    distinct = ordered[np.append(True, (ordered[1:] != ordered[:-1]).any(axis=1))]
    again = np.flatnonzero(distinct[1:, 0] == distinct[:-1, 0])
    found = distinct[np.union1d(again, again + 1)]
    return found if len(found) else None
