"""Training rows as a stream: the files of a set are read anew in each pass, and nothing is stored or held but a buffer.

For data that is too large for the cache on disk. What a row draws is what `draws` would draw for it; its order is that
of a shuffle buffer. How micro-batches are made of rows is in `stream_batches`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import astuple
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from contaccum.data.cache import files_of
from contaccum.data.draws import draw_texts, row_generator
from contaccum.data.fields import parse_columns
from contaccum.data.formats import JUDGED, DataFormat, sniff_format
from contaccum.data.reading import read_records
from contaccum.data.records import OnBadRecord, RecordReport, one_line
from contaccum.data.selection import DROPPED
from contaccum.data.training_sets import TrainingSet
from contaccum.errors import ConfigError, DataError

SHUFFLE_BUFFER = 10_000

_PASSAGES_KEPT, _TRIES = 1000, 256
_SHUFFLE, _FILL = 1, 2  # so that what is drawn for different ends differs


class StreamedRow(NamedTuple):
    """A row as it is drawn in a pass; of its negatives those are None that are missing.

    Attributes:
        own: Python's hashes of all positives of its record, since the texts would be held as long as the row.
        number: its place in the file, among rows.
    """

    query: str
    positive: str
    negatives: list[Any]
    own: frozenset[int]
    number: int


class RowStream:
    """The rows of one set, pass after pass, without end.

    A pass reads the files from their beginning. ``buffer_size`` rows are held: each that is read takes the place of a
    random one of them, which goes out. (seed, pass) determine the order, and (seed, pass, row) what a row draws: the
    same as `load_training_data` draws in that epoch. A negative that is missing is filled with a positive of another
    row read shortly before; it is none of the record's own.

    Args:
        one: what is said of the set.
        on_bad_record: "stop" or "skip".
        buffer_size: rows in the shuffle buffer; 1: in the order of the file.

    Attributes:
        report: what became of the records of the pass that is being read.
        turn: that pass, counted from 0.
        rows_per_pass: known once a pass has ended.

    Raises:
        ConfigError: a format that cannot be streamed, or settings that cannot be used.
        DataError: nothing is there, or in no known format.
    """

    def __init__(
        self, one: TrainingSet, on_bad_record: OnBadRecord = "stop", buffer_size: int = SHUFFLE_BUFFER
    ) -> None:
        if buffer_size < 1:
            raise ConfigError(f"shuffle_buffer_size must be at least 1 row, got {buffer_size}")
        self.one, self.buffer_size, self._on_bad_record = one, buffer_size, on_bad_record
        self.columns = parse_columns(one.reading.get("columns"))
        self.split = str(one.reading.get("split", "train"))
        self.data_format: DataFormat = one.reading.get("data_format") or sniff_format(one.path, self.columns)
        self.selection = one.selection.resolved(self.data_format, os.path.isdir(one.path))
        if self.data_format == "beir":
            raise ConfigError(
                one_line(
                    f"streaming=true with data_format=beir: {one.path}: its corpus would have to be held in memory. "
                    "Drop streaming, or write its pairs as jsonl"
                )
            )
        self.report = RecordReport(on_bad_record)
        self.turn = 0
        self.rows_per_pass: int | None = None

    @property
    def text_columns(self) -> list[str]:
        """The names of a row's texts."""
        h = self.selection.num_hard_negatives
        return ["query", "positive", *(f"negative_{i + 1}" for i in range(h))]

    def fingerprint(self) -> str:
        """sha256, in hex, of the files' names, sizes and times and the settings: reading all to hash it takes too long.
        Of a dataset of the hub, its name and split stand for its files."""
        source = Path(self.one.path)
        facts: list[Any] = [self.one.path, self.split]
        if source.exists():
            stats = [(path, path.stat()) for path in files_of(source)]
            facts = [(os.path.relpath(path, source.parent), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
        settings = [self.data_format, self.split, self.columns, self._on_bad_record, *astuple(self.selection)]
        return hashlib.sha256(json.dumps(["stream", facts, settings]).encode()).hexdigest()

    def rows(self, seed: int, start: int = 0) -> Iterator[StreamedRow]:
        """The rows from that numbered ``start`` on, counted over all passes; its pass is read from the beginning.

        Raises:
            DataError: while it is read: the source or, under "stop", a record cannot be used; a pass without any row.
        """
        turn, before = divmod(start, self.rows_per_pass) if self.rows_per_pass else (0, start)
        while True:
            self.turn = turn
            yield from islice(self._shuffled(seed, turn, before), before, None)
            self.rows_per_pass = self._rows_read
            further, before = divmod(max(0, before - self.rows_per_pass), self.rows_per_pass)
            turn += 1 + further

    def _shuffled(self, seed: int, turn: int, unused: int) -> Iterator[StreamedRow]:
        """The rows of a pass in its order; the first ``unused`` are not filled up."""
        rng = np.random.default_rng([seed & (2**64 - 1), turn, _SHUFFLE])
        buffer: list[StreamedRow] = []
        recent = _RecentPassages(max(self.buffer_size, _PASSAGES_KEPT))
        gone = 0
        for row in self._drawn(seed, turn):
            recent.add(row.positive)
            if len(buffer) < self.buffer_size:
                buffer.append(row)
                continue
            place = int(rng.integers(self.buffer_size))
            leaving, buffer[place] = buffer[place], row
            gone += 1
            yield leaving if gone <= unused else self._filled(leaving, recent, seed, turn)
        for place in rng.permutation(len(buffer)).tolist():
            gone += 1
            yield buffer[place] if gone <= unused else self._filled(buffer[place], recent, seed, turn)

    def _drawn(self, seed: int, turn: int) -> Iterator[StreamedRow]:
        """The rows of a pass in the order of the files."""
        self.report, self._rows_read = RecordReport(self._on_bad_record), 0
        h, any_negative = self.selection.num_hard_negatives, False
        for record in self._records(self.report):
            any_negative = any_negative or bool(record.negatives)
            before, own = self._rows_read, frozenset(map(hash, record.positives))
            for row in self.selection.rows(record):
                positive, negatives = row.positive, row.negatives
                if row.positives is not None or row.pool is not None:
                    rng = row_generator(seed, turn, self._rows_read)
                    positive, negatives = draw_texts(rng, positive, negatives, row.positives, row.pool)
                yield StreamedRow(row.query, positive, negatives, own, self._rows_read)
                self._rows_read += 1
            if self._rows_read == before:
                dropped = len(record.positives) if self.data_format in JUDGED else 1
                self.report.leave_out(self.one.path, DROPPED, dropped)
            if h and not any_negative and self.report.used + self.report.reported >= self.buffer_size:
                self._refuse_without_negatives()
        if h and not any_negative and self.report.seen:
            self._refuse_without_negatives()
        self.report.refuse_if_nothing_left(self.one.path, self._rows_read, "training pairs")

    def _records(self, report: RecordReport) -> Iterator[Any]:
        return read_records(
            self.one.path,
            self.data_format,
            self.split,
            self.columns,
            report,
            num_negatives=self.selection.negatives_read,
            least_negatives=self.selection.negatives_required,
            streaming=True,
        )

    def _refuse_without_negatives(self) -> None:
        h = self.selection.num_hard_negatives
        read = self.report.used + self.report.reported
        mend = "mine some with `contaccum mine`, or set num_hard_negatives to 0"
        raise DataError(
            one_line(f"{self.one.path}: num_hard_negatives={h}, but none of {read:,} records has a negative ({mend})")
        )

    def _filled(self, row: StreamedRow, recent: _RecentPassages, seed: int, turn: int) -> StreamedRow:
        """The row with other rows' positives in the place of each negative that is missing."""
        if None not in row.negatives:
            return row
        texts = [text for text in row.negatives if text is not None]
        rng = np.random.default_rng([seed & (2**64 - 1), turn, row.number, _FILL])
        for _ in range(_TRIES):
            if len(texts) == len(row.negatives):
                break
            text = recent.draw(rng)
            if hash(text) not in row.own and text not in texts:
                texts.append(text)
        if not texts:
            raise DataError(
                "num_hard_negatives: a query without negatives, and no passage near it in the stream that is not a "
                "positive of it (set missing_negatives to drop, or num_hard_negatives to 0)"
            )
        # In a tiny set there may be too few other passages: then one is there twice.
        return row._replace(negatives=[texts[i % len(texts)] for i in range(len(row.negatives))])


class _RecentPassages:
    """The last so many passages, to draw from."""

    def __init__(self, most: int) -> None:
        self._texts: list[str] = []
        self._most, self._next = most, 0

    def add(self, text: str) -> None:
        if len(self._texts) < self._most:
            self._texts.append(text)
        else:
            self._texts[self._next] = text
            self._next = (self._next + 1) % self._most

    def draw(self, rng: np.random.Generator) -> str:
        return self._texts[int(rng.integers(len(self._texts)))]
