"""Parquet files of a finished store, for `datasets`, DuckDB, LanceDB and other programs.

    shard-00000.parquet    the rows of the store's first shard, in the order of the store
        id                 string
        title, text        strings; only if the passages of the corpus are passed
        embedding          fixed_size_list<float32 or float16, d>: the values of the store

The schema metadata of every file holds the texts of `describe_store`. Files are written one by one,
each completely or not at all, and files that exist are not written again. Nothing is encoded here,
and contaccum itself reads stores, not these files.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from contaccum import files
from contaccum.data.records import passage_text
from contaccum.data.sampling import text_ids
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.retrieval.store import EmbeddingStore

if TYPE_CHECKING:
    import pyarrow as pa

# Readers load one row group at a time. With 768 dimensions in float32, a group has 25 MB.
ROWS_PER_GROUP = 8192
_PARQUET_DTYPES = ("float32", "float16")


def check_parquet_dtype(dtype: str) -> None:
    """Raise `ConfigError` for a type of embeddings that a parquet file cannot hold."""
    if dtype not in _PARQUET_DTYPES:
        raise ConfigError(
            f"{dtype} embeddings cannot be written as parquet, because other programs cannot "
            "decode them (use --dtype float32 or float16; a vector database quantizes them itself)"
        )


def describe_store(store: EmbeddingStore) -> dict[str, str]:
    """Return the schema metadata of a store's parquet files.

    Returns:
        "contaccum.model_name"; "contaccum.model", the fingerprint of the weights;
        "contaccum.similarity", "cos" or "dot"; "contaccum.fingerprint", the fingerprint of the
        store.
    """
    return {
        "contaccum.model_name": str(store.metadata.get("model_name")),
        "contaccum.model": str(store.metadata["model"]),
        "contaccum.similarity": store.similarity,
        "contaccum.fingerprint": store.fingerprint,
    }


def write_parquet(
    store: EmbeddingStore,
    folder: files.AnyPath,
    passages: Iterable[tuple[str, str, str]] | None = None,
    show_progress: bool = False,
) -> list[Path]:
    """Write a parquet file for each shard of a store; skip the files that exist.

    Memory holds one row group, and with ``passages`` also 8 bytes per row of the store.

    Args:
        store: a finished store of type float32 or float16.
        folder: folder of the files.
        passages: (id, title, text) of each passage, in the order of the store; None to write
            neither titles nor texts.
        show_progress: show a progress bar over the files.

    Returns:
        The paths of all files, in the order of the store.

    Raises:
        ConfigError: the store is of type int8 or binary.
        DataError: the passages are not those of the store.
        UserError: the folder holds other parquet files, or the disk is full.
    """
    from tqdm.auto import tqdm

    check_parquet_dtype(store.dtype)
    rows_by_path = _plan_files(store, Path(folder))
    schema = _make_schema(store, has_texts=passages is not None)
    finished_paths = _find_finished_files(Path(folder), rows_by_path, schema)
    paths = list(rows_by_path)
    if len(finished_paths) == len(paths):
        return paths
    reader = None
    if passages is not None:
        reader = _PassageReader(store, passages)
    for path in tqdm(paths, "Parquet files", disable=not show_progress):
        if path not in finished_paths:
            _write_file(path, store, rows_by_path[path], schema, reader)
        elif reader is not None:
            reader.skip(len(rows_by_path[path]))
    return paths


class _PassageReader:
    """Reader of the titles and texts of a store's rows, once, in the order of the store."""

    def __init__(self, store: EmbeddingStore, passages: Iterable[tuple[str, str, str]]) -> None:
        self._folder = store.folder
        self._text_ids = store.text_ids()
        self._passages = iter(passages)

    def skip(self, num_rows: int) -> None:
        """Read the passages of the next rows without returning them."""
        for _ in islice(self._passages, num_rows):
            pass

    def read(self, rows: range, ids: list[str]) -> tuple[list[str], list[str]]:
        """Return the titles and the texts of the next rows.

        Args:
            rows: numbers of these rows.
            ids: their ids in the store.

        Raises:
            DataError: a passage has another id or another text than its row.
        """
        passages = list(islice(self._passages, len(rows)))
        titles = [title for _, title, _ in passages]
        texts = [text for _, _, text in passages]
        passage_ids = [passage_id for passage_id, _, _ in passages]
        hashes = text_ids(passage_text(title, text) for _, title, text in passages)
        stored_hashes = self._text_ids[rows.start : rows.stop]
        if passage_ids != ids or not np.array_equal(hashes, stored_hashes):
            raise DataError(
                f"{self._folder}: holds embeddings of another corpus: the passages from row "
                f"{rows.start:,} on differ (name the corpus that was encoded)"
            )
        return titles, texts


def _plan_files(store: EmbeddingStore, folder: Path) -> dict[Path, range]:
    """Return the path of each file and the rows that it holds, in the order of the store."""
    shard_size = store.metadata["shard_size"]
    rows_by_path = {}
    for shard_number, first_row in enumerate(range(0, len(store), shard_size)):
        end_row = min(first_row + shard_size, len(store))
        rows_by_path[folder / f"shard-{shard_number:05d}.parquet"] = range(first_row, end_row)
    return rows_by_path


def _make_schema(store: EmbeddingStore, has_texts: bool) -> pa.Schema:
    """Return the columns of the files and their metadata."""
    import pyarrow as pa

    fields = [pa.field("id", pa.string())]
    if has_texts:
        fields.append(pa.field("title", pa.string()))
        fields.append(pa.field("text", pa.string()))
    # Parquet calls the values of a list "element". With another name, the schema of a file that is
    # read would differ from this one.
    value_field = pa.field("element", pa.from_numpy_dtype(store.dtype))
    fields.append(pa.field("embedding", pa.list_(value_field, store.shape[1])))
    return pa.schema(fields, metadata=describe_store(store))


def _find_finished_files(
    folder: Path, rows_by_path: dict[Path, range], schema: pa.Schema
) -> set[Path]:
    """Return the paths of the files that are complete already.

    Raises:
        UserError: the folder holds a parquet file of another store, or one with other columns.
    """
    finished_paths = set()
    for path in sorted(folder.glob("*.parquet")):
        stored_schema, num_rows = _read_schema(path)
        if path not in rows_by_path:
            raise _other_file_error(path)
        if stored_schema is None:
            continue
        has_rows = num_rows == len(rows_by_path[path])
        if not has_rows or not stored_schema.equals(schema, check_metadata=True):
            raise _other_file_error(path)
        finished_paths.add(path)
    return finished_paths


def _read_schema(path: Path) -> tuple[pa.Schema | None, int]:
    """Return the schema and the number of rows of a file; None and 0 if it is cut off."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            return file.schema_arrow, file.metadata.num_rows
    except pa.ArrowInvalid:
        # The schema is at the end of a file.
        return None, 0


def _other_file_error(path: Path) -> UserError:
    return UserError(
        f"{path}: holds another store or other columns (remove this folder, or name a new one)"
    )


def _write_file(
    path: Path,
    store: EmbeddingStore,
    rows: range,
    schema: pa.Schema,
    reader: _PassageReader | None,
) -> None:
    """Write the file of some rows, group by group."""
    import pyarrow.parquet as pq

    with (
        files.atomic_file(path) as temporary_path,
        # Numbers of embeddings hardly repeat, so a dictionary of them would only cost time.
        pq.ParquetWriter(temporary_path, schema, use_dictionary=False) as writer,
    ):
        for start in range(rows.start, rows.stop, ROWS_PER_GROUP):
            group_rows = range(start, min(start + ROWS_PER_GROUP, rows.stop))
            writer.write_table(_make_table(store, group_rows, schema, reader))


def _make_table(
    store: EmbeddingStore, rows: range, schema: pa.Schema, reader: _PassageReader | None
) -> pa.Table:
    """Return the columns of some rows as an Arrow table."""
    import pyarrow as pa

    ids = store.ids(rows)
    columns = [pa.array(ids, pa.string())]
    if reader is not None:
        titles, texts = reader.read(rows, ids)
        columns.append(pa.array(titles, pa.string()))
        columns.append(pa.array(texts, pa.string()))
    # A store returns float32. Converting float16 values to float32 and back changes no bit.
    embeddings = store[rows.start : rows.stop].astype(store.dtype, copy=False)
    values = pa.array(embeddings.reshape(-1))
    embedding_type = schema.field("embedding").type
    columns.append(pa.FixedSizeListArray.from_arrays(values, type=embedding_type))
    return pa.Table.from_arrays(columns, schema=schema)
