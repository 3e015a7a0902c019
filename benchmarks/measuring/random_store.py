"""Stores of random embeddings, written in seconds for millions of rows.

`StoreWriter` hashes every text in Python, which takes minutes for ten million of them. Here the
files of a shard are written from arrays. `contaccum.retrieval.store` describes the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from contaccum.files import write_json
from contaccum.retrieval.store import (
    EMBEDDINGS_FILE,
    FORMAT,
    IDS_FILE,
    SHARD_FILE,
    STORE_FILE,
    TEXTS_FILE,
    EmbeddingStore,
    get_shard_name,
)


def write_random_store(
    folder: Path, identity: Mapping[str, Any], num_rows: int, dimension: int, device: torch.device
) -> EmbeddingStore:
    """Write a finished store of normally distributed embeddings, and open it.

    The id of a row is its number, and so is the hash of its text.

    Args:
        folder: a new folder.
        identity: the result of `encoding_identity`; it decides the type and the rows of a shard.
        num_rows: number of rows, N.
        dimension: dimension of the embeddings, d.
        device: device that generates the random numbers.
    """
    shard_size = identity["shard_size"]
    for shard_number, first_row in enumerate(range(0, num_rows, shard_size)):
        end_row = min(first_row + shard_size, num_rows)
        rows = np.arange(first_row, end_row)
        shard_folder = folder / get_shard_name(shard_number)
        shard_folder.mkdir(parents=True)
        _write_shard(shard_folder, rows, identity["dtype"], dimension, device)
    metadata = {
        **FORMAT,
        **identity,
        "finished": True,
        "rows": num_rows,
        "dimension": dimension,
        "corpus": {"fingerprint": "random"},
    }
    write_json(folder / STORE_FILE, metadata)
    return EmbeddingStore.open(folder)


def _write_shard(
    folder: Path, rows: np.ndarray, dtype: str, dimension: int, device: torch.device
) -> None:
    """Write the files of a shard; ``rows`` are its row numbers, int64 (n,)."""
    embeddings = torch.randn(len(rows), dimension, device=device)
    embeddings = embeddings.to(getattr(torch, dtype))
    np.save(folder / EMBEDDINGS_FILE, embeddings.cpu().numpy(), allow_pickle=False)
    np.save(folder / TEXTS_FILE, rows, allow_pickle=False)
    ids = pa.record_batch([pa.array(rows).cast(pa.string())], names=["id"])
    with pa.ipc.new_file(str(folder / IDS_FILE), ids.schema) as writer:
        writer.write_batch(ids)
    description = {
        "rows": len(rows),
        "dimension": dimension,
        "fingerprint": "random",
        "bytes": {path.name: path.stat().st_size for path in folder.iterdir()},
    }
    write_json(folder / SHARD_FILE, description)
