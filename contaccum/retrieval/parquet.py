"""Export of a store to parquet files, which vector databases and other programs read.

Each shard becomes a file in the folder ``parquet`` of the store:

    shard-00000.parquet    the rows of the store's first shard, in the order of the store
        id, title, text    strings
        embedding          fixed_size_list<float32 or float16, d>: the values of the store

The folder appears as a whole or not at all. contaccum itself reads stores, not these files.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np

from contaccum import files
from contaccum.data.records import passage_text
from contaccum.data.sampling import text_ids
from contaccum.errors import DataError
from contaccum.retrieval.store import PARQUET_FOLDER, EmbeddingStore, get_shard_name

# Programs read one row group of a parquet file at a time. With 768 dimensions in float32, a group
# has 25 MB.
ROWS_PER_GROUP = 8192


def write_parquet(
    store: EmbeddingStore, passages: Iterable[tuple[str, str, str]], show_progress: bool = False
) -> Path:
    """Write ids, titles, texts and embeddings of a store to its folder ``parquet``.

    One shard and a hash of 8 bytes for each text are in memory. Nothing is done if the folder
    exists: it is complete.

    Args:
        store: a finished store.
        passages: (id, title, text) of each passage, in the order of the store.
        show_progress: show a progress bar over the shards.

    Returns:
        The folder.

    Raises:
        DataError: the passages are not those of the store.
        UserError: the disk is full or cannot be written to.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from tqdm.auto import tqdm

    folder = store.folder / PARQUET_FOLDER
    if folder.exists():
        return folder
    embedding_type = pa.list_(pa.from_numpy_dtype(store.dtype), store.shape[1])
    stored_hashes = store.text_ids()
    remaining = iter(passages)
    with files.atomic_folder(folder) as new_folder:
        for shard_number in tqdm(range(store.num_shards), "Parquet", disable=not show_progress):
            first_row = shard_number * store.shard_size
            rows = range(first_row, min(first_row + store.shard_size, len(store)))
            shard_passages = list(islice(remaining, len(rows)))
            ids = [passage_id for passage_id, _, _ in shard_passages]
            hashes = text_ids(passage_text(title, text) for _, title, text in shard_passages)
            is_same_text = np.array_equal(hashes, stored_hashes[rows.start : rows.stop])
            if ids != store.ids(rows) or not is_same_text:
                raise DataError(
                    f"{store.folder}: holds embeddings of another corpus: the passages from row "
                    f"{rows.start:,} on differ (name the corpus that was encoded)"
                )
            # A store returns float32. Values that were float16 are converted back without a loss.
            embeddings = store[rows.start : rows.stop].astype(store.dtype, copy=False)
            columns = {
                "id": pa.array(ids, pa.string()),
                "title": pa.array([title for _, title, _ in shard_passages], pa.string()),
                "text": pa.array([text for _, _, text in shard_passages], pa.string()),
                "embedding": pa.FixedSizeListArray.from_arrays(
                    pa.array(embeddings.reshape(-1)), type=embedding_type
                ),
            }
            pq.write_table(
                pa.table(columns),
                new_folder / f"{get_shard_name(shard_number)}.parquet",
                row_group_size=ROWS_PER_GROUP,
                # A dictionary of repeated values would only cost time: embeddings hardly repeat.
                use_dictionary=False,
            )
    return folder
