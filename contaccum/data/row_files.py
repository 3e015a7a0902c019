"""Rows of training data as Arrow files, written as they come and mapped into memory: any number of rows in little.

`rows.arrow` holds a column for each text. Where something is drawn, `lists.arrow` holds what from; where queries have
several positives, `known.int64` holds these. It neither reads sources nor draws.
"""

from __future__ import annotations

import hashlib
from array import array
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from contaccum.data.cache import storing
from contaccum.data.known_positives import count_distinct, several_positives
from contaccum.data.records import add_to_fingerprint
from contaccum.data.selection import Row, Selection
from contaccum.data.text_columns import hash_texts

if TYPE_CHECKING:
    from datasets import Dataset

ROWS, LISTS, KNOWN = "rows.arrow", "lists.arrow", "known.int64"

FORMAT = 1
"""To be raised between releases when the readers or these files change, so that older files are not taken for new."""

_ROWS_AT_ONCE, _CHARACTERS_AT_ONCE = 10_000, 8_000_000
_LIST_SCHEMA = pa.schema([("positives", pa.list_(pa.string())), ("pool", pa.list_(pa.string()))])


def row_number_column(topic_column: str | None) -> str:
    """The column with each row's number: under this name sentence-transformers takes it for no text, and hands on to
    the loss what the draws put in its place."""
    return "labels" if topic_column == "label" else "label"


class RowWriter:
    """Writes rows into a folder; held are those of a batch, and 16 bytes for each pair.

    Raises:
        DataError: the disk is full, or the folder cannot be written.
    """

    def __init__(self, folder: Path, selection: Selection, topic_column: str | None) -> None:
        self._folder, self._selection = folder, selection
        h = selection.num_hard_negatives
        self._topic_column = topic_column
        names = [*("query", "positive"), *(f"negative_{i + 1}" for i in range(h))]
        names += [topic_column] if topic_column is not None else []
        self._schema = pa.schema(
            [*((name, pa.string()) for name in names), (row_number_column(topic_column), pa.int64())]
        )
        self._digest = hashlib.sha256()
        # Hashes in arrays: a Python set of as many pairs takes ten times the memory.
        self._queries, self._positives = array("q"), array("q")
        self._batch: list[Row] = []
        self._characters = 0
        self.count = self.several = self.drawn = self.short = 0
        self._lists: Any = None
        self._open_files: list[Any] = []
        self._rows = self._open(ROWS, self._schema)

    def add(self, row: Row) -> None:
        """Write a row, now or later."""
        self.several += len(row.known) > 1
        self.drawn += row.pool is not None
        self.short += None in row.negatives
        self._add_to_fingerprint(row)
        self._batch.append(row)
        self._characters += (
            len(row.query) + sum(map(len, row.known)) + sum(len(x or "") for x in row.pool or row.negatives)
        )
        if len(self._batch) == _ROWS_AT_ONCE or self._characters > _CHARACTERS_AT_ONCE:
            self._flush()

    def finish(self) -> dict[str, Any]:
        """Write what is left, close the files, and tell what they hold."""
        if self._batch:
            self._flush()
        with storing():
            self._close()
        queries, positives = (np.frombuffer(x, dtype=np.int64) for x in (self._queries, self._positives))
        repeated = len(queries) - count_distinct(queries, positives)
        known = several_positives(queries, positives)
        if len(known):
            with storing(), open(self._folder / KNOWN, "wb") as file:
                file.write(known.data)
        return {
            "fingerprint": self._digest.hexdigest(),
            "rows": self.count,
            "repeated": repeated,
            "several": self.several,
            "drawn": self.drawn,
            "short": self.short,
        }

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open_files:
            with suppress(OSError):  # on a full disk closing fails as well, and must not hide why
                self._close()

    def _close(self) -> None:
        while self._open_files:
            self._open_files.pop().close()

    def _open(self, name: str, schema: pa.Schema) -> Any:
        with storing():
            sink = pa.OSFile(str(self._folder / name), "wb")
            self._open_files.append(sink)
            writer = pa.ipc.new_stream(sink, schema)
            self._open_files.append(writer)
        return writer

    def _add_to_fingerprint(self, row: Row) -> None:
        # No text is empty, so an empty one can stand for what is missing, and begin what comes after a row's own texts.
        texts = [row.query, row.positive]
        if row.negatives:
            texts += ["" if text is None else text for text in row.negatives]
        if row.topic is not None:
            texts.append(row.topic)
        if len(row.known) > 1:
            texts += ["", "drawn" if row.positives else "known", *row.known]
        if row.pool is not None:
            texts += ["", "pool", *row.pool]
        add_to_fingerprint(self._digest, *texts)

    def _flush(self) -> None:
        batch, self._batch, self._characters = self._batch, [], 0
        start, self.count = self.count, self.count + len(batch)
        columns: list[Any] = [[row.query for row in batch], [row.positive for row in batch]]
        columns += [[row.negatives[i] for row in batch] for i in range(self._selection.num_hard_negatives)]
        if self._topic_column is not None:
            columns.append([row.topic for row in batch])
        columns.append(range(start, self.count))
        fields = zip(columns, self._schema, strict=True)
        arrays = [pa.array(column, type=field.type) for column, field in fields]
        self._collect_known(batch, arrays[0], arrays[1])
        with storing():
            self._rows.write_batch(pa.record_batch(arrays, schema=self._schema))
        if any(row.positives is not None or row.pool is not None for row in batch):
            self._fill_lists(start)
            self._write_lists([row.positives for row in batch], [row.pool for row in batch])
        elif self._lists is not None:
            self._fill_lists(self.count)

    def _collect_known(self, batch: list[Row], queries: pa.Array, positives: pa.Array) -> None:
        query_hashes = hash_texts(queries)
        counts = [len(row.known) for row in batch]
        if max(counts) == 1:
            hashes = hash_texts(positives)
        else:
            hashes = hash_texts(pa.array([text for row in batch for text in row.known], pa.string()))
            query_hashes = np.repeat(query_hashes, counts)
        self._queries.frombytes(query_hashes.tobytes())
        self._positives.frombytes(hashes.tobytes())

    def _fill_lists(self, end: int) -> None:
        """Nothing to draw from, for the rows before ``end`` that have no lists yet: row i of both files is one row."""
        if self._lists is None:
            self._lists, self._listed = self._open(LISTS, _LIST_SCHEMA), 0
        while self._listed < end:
            nothing = [None] * min(_ROWS_AT_ONCE, end - self._listed)
            self._write_lists(nothing, nothing)

    def _write_lists(self, positives: list[Any], pools: list[Any]) -> None:
        arrays = [pa.array(column, pa.list_(pa.string())) for column in (positives, pools)]
        with storing():
            self._lists.write_batch(pa.record_batch(arrays, schema=_LIST_SCHEMA))
        self._listed += len(positives)


def open_rows(folder: Path) -> tuple[Dataset, Dataset | None, np.ndarray | None]:
    """The rows, what to draw from, and known positives int64 (r, 2), as `several_positives` gives them; all mapped."""
    from datasets import Dataset

    rows = Dataset.from_file(str(folder / ROWS))
    lists = Dataset.from_file(str(folder / LISTS)) if (folder / LISTS).is_file() else None
    if not (folder / KNOWN).is_file():
        return rows, lists, None
    return rows, lists, np.memmap(folder / KNOWN, dtype=np.int64, mode="r").reshape(-1, 2)
