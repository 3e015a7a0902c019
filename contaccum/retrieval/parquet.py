"""Export of a store to parquet files, for `datasets`, DuckDB, LanceDB and other programs.

A store holds the embeddings of a corpus, one row per passage, and is divided into shards. Each
shard becomes one file:

    shard-00000.parquet    the rows of the store's first shard, in the order of the store
        id                 string
        title, text        strings; only if the passages of the corpus are passed
        embedding          fixed_size_list<float32 or float16, d>: the values of the store

The schema metadata of every file describes the store; see `describe_store`. Files are written one
by one, each completely or not at all, so an interrupted export can continue: files that exist are
not written again. Passages are not encoded again. contaccum itself reads stores, not these files.
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

# A parquet file consists of row groups. Programs read one group at a time. With 768 dimensions in
# float32, a group has 25 MB.
ROWS_PER_GROUP = 8192
_PARQUET_DTYPES = ("float32", "float16")


def check_parquet_dtype(dtype: str) -> None:
    """Raise `ConfigError` for a dtype of embeddings that other programs could not read."""
    if dtype not in _PARQUET_DTYPES:
        raise ConfigError(
            f"{dtype} embeddings cannot be written as parquet, because other programs cannot "
            "decode them (use --dtype float32 or float16; a vector database quantizes them itself)"
        )


def describe_store(store: EmbeddingStore) -> dict[str, str]:
    """Return the schema metadata of a store's parquet files.

    Returns:
        A dict with the keys "contaccum.model_name"; "contaccum.model", the fingerprint of the
        document tower's weights; "contaccum.similarity", which is "cos" or "dot"; and
        "contaccum.fingerprint", the fingerprint of the store.
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
    """Write a parquet file for each shard of a store, except files that exist already.

    One row group is in memory at a time. With ``passages``, the hashes of all texts are in memory
    too, which have 8 bytes per row of the store.

    Args:
        store: a finished store of dtype float32 or float16.
        folder: folder of the files.
        passages: (id, title, text) of each passage, in the order of the store; None to write
            neither titles nor texts.
        show_progress: show a progress bar over the files.

    Returns:
        The paths of all files, in the order of the store.

    Raises:
        ConfigError: the store has the dtype int8 or binary.
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
    """Reader of the titles and texts of a store's rows, in the order of the store.

    The passages may come from an iterator that cannot go back, so each row is read or skipped once.
    """

    def __init__(self, store: EmbeddingStore, passages: Iterable[tuple[str, str, str]]) -> None:
        self._folder = store.folder
        self._text_ids = store.text_ids()
        self._passages = iter(passages)

    def skip(self, num_rows: int) -> None:
        """Skip the passages of the next rows, whose file exists already."""
        for _ in islice(self._passages, num_rows):
            pass

    def read(self, rows: range, ids: list[str]) -> tuple[list[str], list[str]]:
        """Return the titles and the texts of the next rows.

        Args:
            rows: row numbers in the store.
            ids: the ids of these rows in the store.

        Raises:
            DataError: a passage has another id than its row, or a text whose hash differs from the
                hash that the store has of the encoded text.
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
    # A parquet file names the values of a list "element". With another name here, this schema would
    # differ from that of a written file, and `_find_finished_files` would refuse the file.
    value_field = pa.field("element", pa.from_numpy_dtype(store.dtype))
    fields.append(pa.field("embedding", pa.list_(value_field, store.shape[1])))
    return pa.schema(fields, metadata=describe_store(store))


def _find_finished_files(
    folder: Path, rows_by_path: dict[Path, range], schema: pa.Schema
) -> set[Path]:
    """Return the paths of the files that exist already and are complete.

    Args:
        folder: the folder of the files.
        rows_by_path: the path of each planned file and the rows that it holds.
        schema: the schema of the planned files.

    Raises:
        UserError: the folder holds a parquet file of another store, or one with other columns.
    """
    finished_paths = set()
    for path in sorted(folder.glob("*.parquet")):
        stored_schema, num_rows = _read_schema(path)
        if path not in rows_by_path:
            raise _other_file_error(path)
        if stored_schema is None:
            # The file is incomplete and is written again.
            continue
        has_rows = num_rows == len(rows_by_path[path])
        if not has_rows or not stored_schema.equals(schema, check_metadata=True):
            raise _other_file_error(path)
        finished_paths.add(path)
    return finished_paths


def _read_schema(path: Path) -> tuple[pa.Schema | None, int]:
    """Return the schema and the number of rows of a file; (None, 0) if the file is incomplete."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            return file.schema_arrow, file.metadata.num_rows
    except pa.ArrowInvalid:
        # The schema is at the end of a file, so an incomplete file has none.
        return None, 0


def _other_file_error(path: Path) -> UserError:
    """Return the error for a file that does not belong to this store and these columns."""
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
    """Write a file with some rows of a store, one row group at a time."""
    import pyarrow.parquet as pq

    with (
        files.atomic_file(path) as temporary_path,
        # Parquet can store repeated values once, in a dictionary. The values of embeddings hardly
        # repeat, so a dictionary would only cost time.
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
    # A store always returns float32. Values that were float16 are converted back without a loss.
    embeddings = store[rows.start : rows.stop].astype(store.dtype, copy=False)
    values = pa.array(embeddings.reshape(-1))
    embedding_type = schema.field("embedding").type
    columns.append(pa.FixedSizeListArray.from_arrays(values, type=embedding_type))
    return pa.Table.from_arrays(columns, schema=schema)
