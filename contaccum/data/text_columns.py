"""Hashes, lengths and labels of a data set's columns, read from its Arrow buffers without a Python object per text.

What plans of batches need to know about rows. It tokenizes nothing and keeps nothing of the texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from contaccum.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

NO_TEXT = np.iinfo(np.int64).min
"""In place of the hash of a null: equal to nothing."""

_ROWS_READ = 50_000
_BYTES_HASHED = 1 << 19  # temporaries are some ten times as much, and should stay in a processor's cache
_WORD, _PLACE = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xC4CEB9FE1A85EC53), np.uint64(0x94D049BB133111EB))


def column_hashes(dataset: Dataset, names: Sequence[str]) -> np.ndarray:
    """A 64-bit content hash of every value, int64 (N, c) for N rows and c columns; ``NO_TEXT`` where there is none.

    Equal values have equal hashes in all columns; of ten million different texts two share one with a probability of
    3e-6. Values that are not text are hashed as their text (lists and structs in Python, slowly).
    """
    hashes = np.empty((len(dataset), len(names)), dtype=np.int64)
    for start, table in _tables(dataset, names):
        for place, name in enumerate(names):
            hashes[start : start + len(table), place] = hash_texts(table.column(name))
    return hashes


def column_lengths(dataset: Dataset, names: Sequence[str]) -> np.ndarray:
    """Characters of every value (bytes, where it is no text), int64 (N, c); 0 for a null."""
    lengths = np.empty((len(dataset), len(names)), dtype=np.int64)
    for start, table in _tables(dataset, names):
        for place, name in enumerate(names):
            parts = [_lengths(_as_text(chunk)) for chunk in table.column(name).chunks]
            lengths[start : start + len(table), place] = np.concatenate(parts) if parts else 0
    return lengths


def _lengths(texts: pa.Array) -> np.ndarray:
    measure = pc.utf8_length if pa.types.is_large_string(texts.type) else pc.binary_length
    return pc.fill_null(measure(texts), 0).to_numpy(zero_copy_only=False)


def column_codes(dataset: Dataset, name: str) -> np.ndarray:
    """The values of a column, numbered by first occurrence: int64 (N,); null counts as a value."""
    chunks = [chunk for _, table in _tables(dataset, [name]) for chunk in table.column(name).chunks]
    if not chunks:
        return np.empty(0, dtype=np.int64)
    encoded = pc.dictionary_encode(pa.chunked_array(chunks), null_encoding="encode").combine_chunks()
    return encoded.indices.to_numpy().astype(np.int64)


def column_numbers(dataset: Dataset, name: str) -> np.ndarray:
    """The values of a column of numbers, (N,).

    Raises:
        ConfigError: when they are not numbers, or some are missing.
    """
    chunks = [chunk for _, table in _tables(dataset, [name]) for chunk in table.column(name).chunks]
    if any(chunk.null_count or not pa.types.is_primitive(chunk.type) for chunk in chunks):
        raise ConfigError(f"column {name}: not a number in every row; mend it, or remove the column")
    return np.concatenate([chunk.to_numpy(zero_copy_only=False) for chunk in chunks] or [np.empty(0, dtype=np.int64)])


def hash_texts(texts: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """The content hash of each value, int64 (n,).

    A text's bytes, in words of eight, are mixed with the place of the word, added up, and mixed with the length.
    """
    chunks = texts.chunks if isinstance(texts, pa.ChunkedArray) else [texts]
    parts = [_hash_chunk(_as_text(chunk)) for chunk in chunks]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _tables(dataset: Dataset, names: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
    """Rows as the data set orders them (it may be a selection), a few at a time, with the number of the first."""
    start = 0
    for table in dataset.select_columns(list(names)).with_format("arrow").iter(batch_size=_ROWS_READ):
        yield start, table
        start += len(table)


def _as_text(values: pa.Array) -> pa.Array:
    """As large_string, whose offsets have 64 bits."""
    if pa.types.is_nested(values.type):
        return pa.array([None if value is None else str(value) for value in values.to_pylist()], pa.large_string())
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_binary(values.type) or pa.types.is_fixed_size_binary(values.type):
        # Bytes need not be UTF-8; they are hashed all the same.
        return values.cast(pa.large_binary())
    return values if pa.types.is_large_string(values.type) else values.cast(pa.large_string())


def _hash_chunk(texts: pa.Array) -> np.ndarray:
    n = len(texts)
    if n == 0:
        return np.empty(0, dtype=np.int64)
    _, offset_buffer, data_buffer = texts.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int64)[texts.offset : texts.offset + n + 1]
    data = np.frombuffer(data_buffer, dtype=np.uint8) if data_buffer is not None else np.empty(0, dtype=np.uint8)
    bounds = np.searchsorted(offsets[:-1], np.arange(offsets[0], offsets[-1] + 1, _BYTES_HASHED))
    bounds = np.unique(np.concatenate([[0], bounds, [n]]))
    hashes = np.empty(n, dtype=np.int64)
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        hashes[first:last] = _hash_block(data, offsets[first : last + 1]).view(np.int64)
    if texts.null_count:
        hashes[texts.is_null().to_numpy(zero_copy_only=False)] = NO_TEXT
    return hashes


def _hash_block(data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """uint64 (n,) of the texts ``data[offsets[i] : offsets[i + 1]]``."""
    low, high = int(offsets[0]), int(offsets[-1])
    padded = np.zeros(high - low + 8, dtype=np.uint8)  # so that a word may be read at every byte
    padded[: high - low] = data[low:high]
    lengths = np.diff(offsets)
    words = (lengths >> 3) + 1  # the last holds the 0 to 7 bytes left
    ends = np.cumsum(words)
    firsts = ends - words
    number = np.arange(int(ends[-1]))
    number -= np.repeat(firsts, words)
    place = np.repeat(offsets[:-1] - low, words)
    place += number << 3
    word = np.lib.stride_tricks.as_strided(padded[:8].view(np.uint64), (high - low + 1,), (1,))[place]
    word[ends - 1] &= (np.uint64(1) << (lengths.astype(np.uint64) % np.uint64(8) * np.uint64(8))) - np.uint64(1)
    mixed = number.view(np.uint64)
    mixed += np.uint64(1)
    mixed *= _PLACE
    word ^= mixed
    word *= _WORD
    np.right_shift(word, np.uint64(32), out=mixed)
    word ^= mixed
    word *= _MIX[0]
    np.right_shift(word, np.uint64(29), out=mixed)
    word ^= mixed
    total = np.add.reduceat(word, firsts)
    total += lengths.astype(np.uint64) * _PLACE
    for shift, factor in zip((30, 27), _MIX, strict=True):
        total ^= total >> np.uint64(shift)
        total *= factor
    return total ^ (total >> np.uint64(31))
