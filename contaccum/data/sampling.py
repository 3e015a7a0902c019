"""What an epoch takes of each record: one of its positives, h of its negatives, passages in place of missing ones.

A transform for a `datasets.Dataset`, at work when rows are read; records lie in the cache once, whatever is taken of
them. What is sampled is a function of (seed, epoch, row) alone: the same after a resume, in any worker, on any number
of ranks, in whatever batch. The positives that a query has beside the sampled one are known by 64-bit hashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from contaccum.data.readers import JUDGED, DataFormat, Source
from contaccum.data.records import Fault, RecordReport
from contaccum.errors import ConfigError, DataError, check_choice
from contaccum.files import AnyPath

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

PositivesUsed = Literal["draw", "first", "all"]
MissingNegatives = Literal["fill", "drop", "stop"]
POSITIVES_USED: tuple[PositivesUsed, ...] = ("draw", "first", "all")
MISSING_NEGATIVES: tuple[MissingNegatives, ...] = ("fill", "drop", "stop")

TRIPLES = 30
"""Negatives of an MS MARCO query to sample from, unless said otherwise: its triples list hundreds."""

LABELS = ("label", "labels", "score", "scores", "dataset_name")
"""Columns that sentence-transformers takes for no text."""

TOO_FEW = "too few hard negatives"
NONE_LISTED = "but no record has a negative (mine some with `contaccum mine`, or set num_hard_negatives to 0)"

_TRIES = 256  # that other passages are sampled in place of missing negatives before a row is said to have none


@dataclass(frozen=True)
class Selection:
    """How rows are made of records.

    Attributes:
        num_hard_negatives: h, of each row.
        positives: "draw": a row for each record, with one of its positives, drawn anew in each epoch. "first": always
            the first. "all": a row for each positive. None: "all" for judgements (BEIR, MS MARCO), each of which is a
            pair, and "draw" for others.
        negatives_from: sample from the first so many that are listed; None: from all (of an MS MARCO folder, 30).
        draw_negatives: False: always the first h.
        missing_negatives: what to do with a record of fewer than h. "fill": passages of other records take their place.
            "drop": leave it out. "stop": it is a bad record.

    Raises:
        ConfigError: for values that cannot work, or not together.
    """

    num_hard_negatives: int = 0
    positives: PositivesUsed | None = None
    negatives_from: int | None = None
    draw_negatives: bool = True
    missing_negatives: MissingNegatives = "fill"

    def __post_init__(self) -> None:
        h, most = self.num_hard_negatives, self.negatives_from
        if isinstance(h, bool) or not isinstance(h, int) or h < 0:
            raise ConfigError(f"num_hard_negatives={h!r} is not a number of texts (use 0 or more)")
        check_choice("positives", self.positives, (None, *POSITIVES_USED))
        check_choice("missing_negatives", self.missing_negatives, MISSING_NEGATIVES)
        if most is not None and not self.draw_negatives:
            raise ConfigError(f"negatives_from={most} with draw_negatives=false: nothing is drawn. Drop one of them")
        if most is not None and (h == 0 or most < h):
            raise ConfigError(
                f"negatives_from={most} with num_hard_negatives={h}: it says how many to draw them from. Raise "
                f"{'negatives_from' if h else 'num_hard_negatives'}, or drop negatives_from"
            )

    def resolved(self, data_format: DataFormat) -> Selection:
        """The same, with the defaults of a format in place of None."""
        h = self.num_hard_negatives
        most = max(TRIPLES, h) if data_format == "msmarco" and h and self.draw_negatives else None
        positives = self.positives or ("all" if data_format in JUDGED else "draw")
        return replace(self, positives=positives, negatives_from=self.negatives_from or most)

    def refuse(self, path: AnyPath, line: int, listed: int, report: RecordReport) -> None:
        """Count a record that was used as left out, for it lists too few negatives; a bad one under "stop"."""
        report.used -= 1
        if self.missing_negatives == "drop":
            report.leave_out(f"{path}:{line}", TOO_FEW)
            return
        mend = "lower num_hard_negatives, or set missing_negatives to fill"
        found = f"{listed} where num_hard_negatives is {self.num_hard_negatives}"
        report.reject(path, line, Fault(TOO_FEW, found, mend))

    def sample(
        self, rng: np.random.Generator, positives: Sequence[str], negatives: Sequence[str], which: int = 0
    ) -> tuple[str, list[str]]:
        """A row's positive, and its negatives, h unless there are fewer; `which` positive it is under "all"."""
        positive = positives[which]
        distinct = list(dict.fromkeys(positives))
        if self.positives == "draw" and len(distinct) > 1:
            positive = distinct[int(rng.integers(len(distinct)))]
        h, listed = self.num_hard_negatives, negatives[: self.negatives_from]
        if not self.draw_negatives or len(listed) <= h:
            return positive, list(listed[:h])
        # So that no text is sampled twice; unless then there were too few of them.
        pool = list(dict.fromkeys(listed))
        pool = pool if len(pool) >= h else list(listed)
        if len(pool) == h:
            return positive, pool
        return positive, [pool[place] for place in rng.permutation(len(pool))[:h]]


def row_generator(seed: int, epoch: int, number: int) -> np.random.Generator:
    """The random numbers of a row in an epoch."""
    return np.random.default_rng([seed & (2**64 - 1), epoch, number])


class EpochSampling:
    """Makes a row of its number: the epoch's texts, and ids for the loss.

    Args:
        records: of the cache, with columns "query", "positives", "negatives"; or a plain data set, with "query",
            "positive", "negative_1" and so on.
        columns: the text columns of a row, in order.
        selection: what a row takes of a record.
        rows: int64 (N, 2), for each row the record and which of its positives; None: row i is record i.
        known_positives: int64 (r, 2), sorted hashes of query and positive, for every pair of the queries that have
            several; None: there are none.

    Attributes:
        known_positives: as given.
        gives_ids: rows hold "label", the `text_ids` of their query, positive and negatives: where some are known, or
            where the rows of several sets meet.
        gives_numbers: it begins with the row's number, or is that alone.
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
        self.gives_ids, self.gives_numbers = known_positives is not None, False
        # In shared memory, where the workers of a loader read it: they are copies of this process, or began anew.
        self._clock = torch.zeros(2, dtype=torch.int64).share_memory_()

    def __deepcopy__(self, memo: dict[int, Any]) -> EpochSampling:
        # datasets copies a data set, format and all, to remove a column; the copy must see the same epoch.
        return self

    def __len__(self) -> int:
        return len(self._records if self._rows is None else self._rows)

    @property
    def seed(self) -> int:
        """Of all that is sampled."""
        return int(self._clock[0])

    @property
    def epoch(self) -> int:
        """Whose texts are read now."""
        return int(self._clock[1])

    def set_epoch(self, epoch: int, seed: int | None = None) -> None:
        """Rows read from now on, here and in a loader's workers, are those of this epoch, counted from 0."""
        if seed is not None:
            self._clock[0] = seed
        self._clock[1] = epoch

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Rows as lists by column, of batches of row numbers. Other columns stay."""
        names = [name for name in batch if name in self.columns]
        others = {name: values for name, values in batch.items() if name not in names}
        if others and not {"query", "positive"} <= {*names}:
            raise ConfigError(
                f"training data with the columns {', '.join(batch)}: what is sampled for a row belongs into query and "
                "positive. Keep their names"
            )
        if not names:
            return batch
        numbers = [int(number) for number in batch[names[0]]]
        rows = []
        for number, (query, positives, negatives, which) in zip(numbers, self._read(numbers), strict=True):
            rng = row_generator(self.seed, self.epoch, number)
            positive, texts = self._selection.sample(rng, positives, negatives, which)
            if len(texts) < len(self.columns) - 2:
                texts = self._filled(rng, query, positive, texts)
            rows.append((query, positive, *texts))
        sampled: dict[str, list[Any]] = {name: [row[self.columns.index(name)] for row in rows] for name in names}
        if {"query", "positive"} <= {*names} and (self.gives_ids or self.gives_numbers):
            ids = text_ids(text for row in zip(*sampled.values(), strict=True) for text in row)
            labels = ids.reshape(len(numbers), -1) if self.gives_ids else np.empty((len(numbers), 0), dtype=np.int64)
            if self.gives_numbers:
                labels = np.column_stack([np.array(numbers, dtype=np.int64), labels])
            sampled["label"] = labels.tolist() if self.gives_ids else labels[:, 0].tolist()
        return sampled | others

    def first_texts(self, numbers: Sequence[int]) -> list[list[str | None]]:
        """For each row its query, its first positive and its first h negatives, None where one is missing."""
        h = len(self.columns) - 2
        read = self._read(list(numbers))
        return [
            [query, positives[which], *[*negatives, *[None] * h][:h]] for query, positives, negatives, which in read
        ]

    def further_positives(self, number: int) -> list[str]:
        """What else a row may take as its positive."""
        _, positives, _, _ = self._read([number])[0]
        return list(dict.fromkeys(positives))[1:] if self._selection.positives == "draw" else []

    def _read(self, numbers: list[int]) -> list[tuple[str, list[str], list[str], int]]:
        """Query, positives and negatives of each row's record, and which positive is the row's."""
        places = np.array(numbers) if self._rows is None else self._rows[numbers, 0]
        which = [0] * len(numbers) if self._rows is None else self._rows[numbers, 1].tolist()
        found = self._records[places.tolist()]
        if "positives" in found:
            return list(zip(found["query"], found["positives"], found["negatives"], which, strict=True))
        negatives = zip(*(found[name] for name in self.columns[2:]), strict=True)
        listed = [[text for text in row if text is not None] for row in negatives] or [[] for _ in numbers]
        return list(zip(found["query"], [[text] for text in found["positive"]], listed, which, strict=True))

    def _filled(self, rng: np.random.Generator, query: str, positive: str, given: list[str]) -> list[str]:
        """`given` and other rows' positives: random negatives, but no known positives of the query."""
        wanted = len(self.columns) - 2
        query_id, *used = text_ids([query, positive, *given]).tolist()
        forbidden, found = {*used, *positives_of(query_id, self.known_positives)}, list(given)
        for _ in range(_TRIES):
            _, positives, _, which = self._read([int(rng.integers(len(self)))])[0]
            key = int(text_ids([positives[which]])[0])
            if key not in forbidden:
                forbidden.add(key)
                found.append(positives[which])
            if len(found) == wanted:
                return found
        if not found:
            raise DataError(
                "num_hard_negatives: a query without negatives, and no passage of the training data that is not a "
                "positive of it (set missing_negatives to drop, or num_hard_negatives to 0)"
            )
        # In a tiny set there may be too few other passages: then one is there twice.
        return [found[place % len(found)] for place in range(wanted)]


def as_rows(sampling: EpochSampling) -> Dataset:
    """A data set of N rows whose text columns hold row numbers, turned into texts when rows are read."""
    import pyarrow as pa
    from datasets import Dataset

    columns = dict.fromkeys(sampling.columns, pa.array(np.arange(len(sampling))))  # one and the same buffer
    # Named, or datasets would copy and hash the table; nothing in memory is ever cached by its name.
    return Dataset(pa.table(columns), fingerprint=f"{len(sampling)} rows").with_transform(sampling)


def with_row_numbers(dataset: Any) -> Any:
    """A plain data set with columns "query", "positive" and perhaps negatives as one whose rows know their number."""
    columns = [name for name in dataset.column_names if re.fullmatch("query|positive|negative_[0-9]+", name)]
    pairs = [text_ids(texts[name]) for texts in first_texts(dataset) for name in ("query", "positive")]
    known = several_positives(np.column_stack([np.concatenate(pairs[0::2]), np.concatenate(pairs[1::2])]))
    selection = Selection(len(columns) - 2, positives="first", draw_negatives=False)
    return as_rows(EpochSampling(dataset, columns, selection, known_positives=known if len(known) else None))


def samplings_of(dataset: Any) -> list[EpochSampling]:
    """The sampling of a data set, or of each of several by name; none for one that is what it is."""
    if isinstance(dataset, dict):
        return [sampling for part in dataset.values() for sampling in samplings_of(part)]
    transform = (getattr(dataset, "format", None) or {}).get("format_kwargs", {}).get("transform")
    while isinstance(transform, partial):  # sentence-transformers wraps it to name the data set
        transform = transform.keywords.get("transform")
    return [transform] if isinstance(transform, EpochSampling) else []


def first_texts(dataset: Any, batch_size: int = 1000) -> Iterator[dict[str, list[str | None]]]:
    """Texts by column of all rows in their order, a batch at a time, as they are before anything is sampled."""
    samplings = samplings_of(dataset)
    for batch in dataset.with_format(None).iter(batch_size):
        if samplings:
            rows = samplings[0].first_texts(batch["query"])
            yield dict(zip(samplings[0].columns, map(list, zip(*rows, strict=True)), strict=True))
        else:
            yield {name: texts for name, texts in batch.items() if name not in LABELS}


# Streams --------------------------------------------------------------------------------------------------------------


def stream_rows(
    source: Source, selection: Selection, report: RecordReport, buffer_size: int, seed: int
) -> IterableDataset:
    """Rows {"query", "positive", "negative_1", ..., "label"} of a source, pass after pass without end.

    They are in an order that (seed, buffer_size) determine; `.skip(n)` goes on after the first n, which are then read
    but not given. Rows to fill missing negatives from are not known.

    Args:
        report: of the pass that is being read.

    Raises:
        ConfigError: a format that cannot be streamed, or settings that cannot be used.
    """
    from datasets import Features, IterableDataset, List, Value

    if buffer_size < 1:
        raise ConfigError(f"shuffle_buffer_size must be at least 1 row, got {buffer_size}")
    if source.data_format == "beir":
        raise ConfigError(
            f"streaming=true with data_format=beir: {source.path}: its corpus would have to be held in memory. Drop "
            "streaming, or write its pairs as jsonl"
        )
    if selection.num_hard_negatives and selection.missing_negatives == "fill":
        raise ConfigError("streaming=true cannot fill in missing negatives: set missing_negatives to drop or stop")
    names = ["query", "positive", *(f"negative_{i + 1}" for i in range(selection.num_hard_negatives))]
    features = Features({**dict.fromkeys(names, Value("string")), "label": List(Value("int64"))})

    def generate() -> Iterator[dict[str, Any]]:
        for turn in count():
            report.restore(RecordReport().to_dict())
            for row, ids in _one_pass(source, selection, report, seed, turn):
                yield {**dict(zip(names, row, strict=True)), "label": ids}

    # Its own fingerprint: datasets would hash all that the generator can reach.
    rows = IterableDataset.from_generator(generate, features)
    return rows.shuffle(seed & (2**63 - 1), buffer_size=buffer_size)


def _one_pass(
    source: Source, selection: Selection, report: RecordReport, seed: int, turn: int
) -> Iterator[tuple[list[str], list[int]]]:
    """Texts of each row, and their ids."""
    h, number = selection.num_hard_negatives, 0
    for line, record in source.records(report, streaming=True):
        if len(record.negatives) < h:
            selection.refuse(source.path, line, len(record.negatives), report)
            continue
        for which in range(len(record.positives) if selection.positives == "all" else 1):
            rng = row_generator(seed, turn, number)
            positive, texts = selection.sample(rng, record.positives, record.negatives, which)
            # To the loss, a listed negative that is another positive of its record is the one that was taken.
            same = [positive if text in record.positives else text for text in texts]
            yield [record.query, positive, *texts], text_ids([record.query, positive, *same]).tolist()
            number += 1
    report.refuse_if_nothing_left(source.path, number, "training pairs")


# Ids and known positives ---------------------------------------------------------------------------------------------


def text_hash(text: str) -> bytes:
    """Eight bytes of a text: of ten million, two share theirs with a probability of 3e-6."""
    return blake2b(text.encode("utf-8"), digest_size=8).digest()


def text_ids(texts: Iterable[Any]) -> np.ndarray:
    """The `text_hash` of each text (or of what it is as a text), as int64 (k,)."""
    return np.frombuffer(b"".join(text_hash(str(text)) for text in texts), dtype="<i8").astype(np.int64)


def several_positives(pairs: np.ndarray) -> np.ndarray:
    """The pairs of all queries that have more than one positive, each pair once: int64 (r, 2), sorted.

    Args:
        pairs: int64 (n, 2), hashes of a query's and a positive's text for every pair of the data.
    """
    # Mostly few queries come twice: of all rows no more is held than this column, sorted in place.
    ordered = np.array(pairs[:, 0])
    ordered.sort()
    again = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    if not len(again):
        return np.empty((0, 2), dtype=np.int64)
    pieces = [pairs[start : start + 2**20] for start in range(0, len(pairs), 2**20)]
    found = np.unique(np.concatenate([piece[np.isin(piece[:, 0], again)] for piece in pieces]), axis=0)
    same = found[1:, 0] == found[:-1, 0]
    return found[np.append(same, False) | np.insert(same, 0, False)]


def positives_of(query: int, known: np.ndarray | None) -> list[int]:
    """The known positives of a query, by hash; none where it has one alone, which then is not in ``known``."""
    if known is None:
        return []
    low, high = (int(np.searchsorted(known[:, 0], query, side)) for side in ("left", "right"))
    return known[low:high, 1].tolist()
