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

The folder is a `StoreFolder`, on this machine or at a URL. Embeddings are read and written in
`store`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from contaccum.errors import DataError, UserError
from contaccum.retrieval.folders import StoreFolder

STORE_FILE = "store.json"
SHARD_FILE = "shard.json"
EMBEDDINGS_FILE = "embeddings.npy"
RANGES_FILE = "ranges.npy"
IDS_FILE = "ids.arrow"
TEXTS_FILE = "texts.npy"
PARQUET_FOLDER = "parquet"
FORMAT = {"format": "contaccum embedding store", "version": 3}
# Remedy in error messages about a folder that holds another store.
REPLACE_REMEDY = (
    "name another folder, or remove this store; contaccum encode does so with --overwrite"
)

# Keys of store.json whose names do not say what differs.
_DESCRIPTIONS = {
    "tokenisation": "tokenisation (tokenizer, prompt, maximum length, pooling or dimension)",
}
_NUM_REQUESTS = 16  # files of a remote folder that are read at the same time


def remove_store(folder: StoreFolder) -> None:
    """Remove the shards, their parquet files and store.json from a folder."""
    folder.remove(PARQUET_FOLDER)
    for name in folder.list_names():
        if name.startswith("shard-"):
            folder.remove(name)
    # Removed last: without it, a partly removed folder would not be recognised as a store.
    folder.remove(STORE_FILE)


def read_metadata(folder: StoreFolder, any_version: bool = False) -> dict[str, Any]:
    """Return the content of store.json; with ``any_version``, also of another version.

    Raises:
        DataError: the file is broken, is not of a store, or is of another version of the format.
    """
    metadata = folder.read_json(STORE_FILE)
    stored_format = {key: metadata.get(key) for key in FORMAT}
    is_store = stored_format["format"] == FORMAT["format"]
    if stored_format != FORMAT and not (any_version and is_store):
        raise DataError(
            f"{folder}/{STORE_FILE}: has {stored_format}, expected {FORMAT} (encode the corpus "
            "again with this version of contaccum and --overwrite)"
        )
    return metadata


def check_identity(
    folder: StoreFolder, metadata: Mapping[str, Any], identity: Mapping[str, Any]
) -> None:
    """Raise `UserError` if store.json differs from the identity of the embeddings to write."""
    differences = []
    # Through JSON, because store.json holds lists where the identity may hold tuples.
    for name, value in json.loads(json.dumps(identity)).items():
        if metadata.get(name) != value:
            differences.append(name)
    if differences:
        names = " and ".join(_DESCRIPTIONS.get(name, name) for name in differences)
        raise UserError(f"{folder}: holds embeddings of another {names} ({REPLACE_REMEDY})")


def read_shard_file(folder: StoreFolder, shard_number: int) -> dict[str, Any] | None:
    """Return the content of shard.json; None if the shard is missing or a file is cut off."""
    shard_name = get_shard_name(shard_number)
    sizes = folder.get_file_sizes(shard_name)
    if SHARD_FILE not in sizes:
        return None
    shard = folder.read_json(f"{shard_name}/{SHARD_FILE}")
    for name, size in shard["bytes"].items():
        if sizes.get(name) != size:
            return None
    return shard


def read_shard_files(folder: StoreFolder, num_shards: int) -> list[dict[str, Any] | None]:
    """Return the results of `read_shard_file` for the shards 0 to ``num_shards`` - 1."""
    # A large store has thousands of shards, and each request to a remote folder takes a while.
    with ThreadPoolExecutor(_NUM_REQUESTS) as executor:
        return list(executor.map(partial(read_shard_file, folder), range(num_shards)))


def get_shard_name(shard_number: int) -> str:
    """Return the name of a shard's folder in the folder of its store."""
    return f"shard-{shard_number:05d}"
