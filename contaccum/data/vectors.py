"""Vectors that the user brings: embeddings of queries and documents, with their ids or texts.

A folder has the files of two sides, "queries" and "documents", each in one of these forms:

    SIDE.parquet      columns ``id`` or ``text`` or both, and ``embedding``, a list of numbers
    SIDE/*.parquet    several such files, as `contaccum encode --format parquet` writes them
    SIDE.npy          (n, d), and SIDE.jsonl with the ``id`` or the ``text`` of each row
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from contaccum.data.records import Passage
from contaccum.data.rows import (
    Fault,
    RecordReport,
    Rows,
    get_first_value,
    parse_id,
    parse_rows,
    parse_text,
    read_json_lines,
)
from contaccum.errors import DataError, quoted

SIDES = ("queries", "documents")
_NAMES = ("id", "_id", "title", "text")
_VECTOR_NAMES = ("embedding", "vector", "values")  # in contaccum and in databases
_ROWS_PER_BATCH = 4096


def find_vectors(folder: Path, side: str) -> list[Path]:
    """Return the files of a side of a folder; raises `DataError` if there are none."""
    for pattern in (f"{side}.parquet", f"{side}/*.parquet", f"{side}.npy"):
        files = sorted(folder.glob(pattern))
        if files:
            return files
    raise DataError(
        f"{folder}: has no {side}.parquet, {side}/*.parquet or {side}.npy (see docs/vectors.md)"
    )


def read_vectors(
    folder: Path, side: str, report: RecordReport, vectors: list[np.ndarray]
) -> Iterator[Passage]:
    """Yield the id, title and text of each row of a side; title and text may be blank.

    A row without an id has its number as the id. Memory holds one batch of rows. The vector of each
    row, float32 (d,), is appended to ``vectors``.

    A bad row has no name, the id of another row, or a vector that cannot be compared with the
    others. It is counted, or raises `DataError` under "stop", as does a file that cannot be read.
    """
    ids: set[str] = set()
    dimension = 0

    def parse(row: Mapping[str, Any]) -> Passage:
        nonlocal dimension
        title, text = (parse_text(row.get(key), key, True) for key in ("title", "text"))
        name = get_first_value(row, ("id", "_id"))
        if name is None:
            if not text.strip():
                raise Fault("neither an id nor a text")
            name = f"row-{len(ids) + 1}"
        name = parse_id(name, "id").strip()
        if name in ids:
            raise Fault("an id that occurs twice", quoted(name))
        vector = np.asarray(row["embedding"])
        if vector.ndim != 1 or vector.dtype.kind not in "fiu":
            raise Fault("no list of numbers", quoted(name))
        dimension = dimension or len(vector)
        if len(vector) != dimension:
            detail = f"{quoted(name)} has {len(vector)}, those before it {dimension}"
            raise Fault("a vector of another number of dimensions", detail)
        vector = vector.astype(np.float32)
        length = float(np.linalg.norm(vector))
        if not 0.0 < length < np.inf:
            kind = "zeros" if length == 0.0 else "NaN, infinity or numbers too large for float32"
            raise Fault(f"a vector of {kind}", quoted(name))
        ids.add(name)
        vectors.append(vector)
        return Passage(name, title, text)

    for file in find_vectors(folder, side):
        rows = _read_array(file) if file.suffix == ".npy" else _read_parquet(file)
        yield from parse_rows(file, rows, parse, report)


def _read_array(file: Path) -> Rows:
    try:
        vectors = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: not an array of numbers ({error})") from error
    num_rows = 0
    for line, row in read_json_lines(file.with_suffix(".jsonl")):
        if not isinstance(row, Fault):
            row["embedding"] = vectors[num_rows] if num_rows < len(vectors) else None
        num_rows += 1
        yield line, row
    if num_rows != len(vectors):
        raise DataError(
            f"{file}: has {len(vectors):,} vectors, and {file.stem}.jsonl {num_rows:,} rows (write "
            "one for each vector, in their order)"
        )


def _read_parquet(file: Path) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file, memory_map=True) as table:  # else it is read at once
            columns = table.schema_arrow.names
            names = [name for name in _NAMES if name in columns]
            vector_names = [name for name in _VECTOR_NAMES if name in columns]
            if not names or not vector_names:
                raise DataError(
                    f"{file}: needs a column id or text, and embedding, vector or values; it has "
                    f"{quoted(', '.join(columns), 200)} (rename its columns)"
                )
            number = 0
            for batch in table.iter_batches(_ROWS_PER_BATCH, columns=[*names, vector_names[0]]):
                vectors = batch[vector_names[0]].to_numpy(zero_copy_only=False)
                for row, vector in zip(batch.select(names).to_pylist(), vectors, strict=True):
                    number += 1
                    yield number, {**row, "embedding": vector}
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file}: not a parquet file ({error})") from error
