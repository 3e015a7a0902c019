"""Layout of a store's folder: names of its files, and reading of its JSON files.

    store.json            model, type and number of the embeddings; "finished" once all are written
    shard-00000/          the first rows of the corpus, in its order; shard-00001 has the next rows
        embeddings.npy    (n, d) in float32, float16 or int8; (n, d / 8) of packed bits for binary
        ranges.npy        only for int8: minimum and maximum of each dimension in the shard, (2, d)
        ids.arrow         ids of the rows: Arrow IPC, one column ``id`` of strings
        texts.npy         hashes of the texts, int64 (n,); training looks up positives by them
        shard.json        rows, dimension, bytes of each file, fingerprint of the corpus up to the
                          last row of this shard
    parquet/              only after `contaccum encode --format parquet`; see `parquet`

A shard appears as a whole or not at all. So a killed process loses only the shard that it was
writing, and several processes may write to the same folder. No file holds a pickle.

Embeddings are read and written in `store`.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from contaccum import files
from contaccum.errors import DataError

STORE_FILE = "store.json"
SHARD_FILE = "shard.json"
EMBEDDINGS_FILE = "embeddings.npy"
RANGES_FILE = "ranges.npy"
IDS_FILE = "ids.arrow"
TEXTS_FILE = "texts.npy"
PARQUET_FOLDER = "parquet"
FORMAT = {"format": "contaccum embedding store", "version": 3}


def remove_store(folder: Path) -> None:
    """Remove the shards, their parquet files and store.json from a folder."""
    shutil.rmtree(folder / PARQUET_FOLDER, ignore_errors=True)
    for path in folder.glob("shard-*"):
        # Another process that overwrites the same store may remove some files first.
        with suppress(FileNotFoundError):
            shutil.rmtree(path)
    # Removed last: without it, a partly removed folder would not be recognised as a store.
    (folder / STORE_FILE).unlink(missing_ok=True)


def read_metadata(folder: Path) -> dict[str, Any]:
    """Return the content of store.json.

    Raises:
        DataError: the file is broken, is not of a store, or is of another version of the format.
    """
    path = folder / STORE_FILE
    metadata = files.read_json(path)
    stored_format = {key: metadata.get(key) for key in FORMAT}
    if stored_format != FORMAT:
        raise DataError(
            f"{path}: has {stored_format}, expected {FORMAT} (encode the corpus again with this "
            "version of contaccum)"
        )
    return metadata


def read_shard_file(folder: Path, shard_number: int) -> dict[str, Any] | None:
    """Return the content of shard.json; None if the shard is missing or a file is cut off."""
    shard_folder = get_shard_folder(folder, shard_number)
    path = shard_folder / SHARD_FILE
    if not path.exists():
        return None
    shard = files.read_json(path)
    sizes = get_file_sizes(shard_folder)
    del sizes[SHARD_FILE]
    if sizes != shard["bytes"]:
        return None
    return shard


def get_file_sizes(folder: Path) -> dict[str, int]:
    """Return {file name: bytes} of all files in a folder."""
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def get_shard_folder(folder: Path, shard_number: int) -> Path:
    """Return the folder of a shard in the folder of its store."""
    return folder / f"shard-{shard_number:05d}"
