"""Vectors that the user brings: embeddings of queries and documents, with ids or texts.

A folder has the files of two sides, "queries" and "documents", each in one of these forms:

    SIDE.parquet      columns ``id`` or ``text`` or both, and ``embedding``, a list of numbers
    SIDE/*.parquet    several such files, as `contaccum encode --format parquet` writes them
    SIDE.npy          (n, d), and SIDE.jsonl with the ``id`` or the ``text`` of each row

Files are read in blocks, so memory does not grow with their size. Rows without an id or with the id
of another row are refused, and so are vectors that cannot be compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from contaccum.data.rows import Fault, get_first_value, parse_id, parse_text, read_json_lines
from contaccum.errors import DataError, one_line, quoted
from contaccum.files import AnyPath

if TYPE_CHECKING:
    import pyarrow as pa

SIDES = ("queries", "documents")
_NAMES = {
    "id": ("id", "_id"),
    "title": ("title",),
    "text": ("text", "query"),
    "embedding": ("embedding", "vector", "values"),
}
"""{role: names of the column}, in databases and in BEIR."""
_ROWS_PER_BLOCK = 4096


class VectorBlock(NamedTuple):
    """Consecutive rows of a side.

    Attributes:
        names: (id, title, text) of each row; the last two may be empty. Without an id in the file,
            it is the number of the row.
        embeddings: float32 (n, d), finite and not zero.
    """

    names: list[tuple[str, str, str]]
    embeddings: np.ndarray


def find_vectors(folder: Path, side: str) -> list[Path]:
    """Return the files of a side of a folder.

    Raises:
        DataError: if there are none.
    """
    array = folder / f"{side}.npy"
    files = [folder / f"{side}.parquet"] if (folder / f"{side}.parquet").is_file() else []
    files = files or sorted((folder / side).glob("*.parquet"))
    if not files and array.is_file():
        names = array.with_suffix(".jsonl")
        if not names.is_file():
            raise DataError(f"{array}: {names.name}, with the id of each row, is not beside it")
        files = [array]
    if not files:
        raise DataError(
            f"{folder}: has no {side}.parquet, no {side}/*.parquet and no {side}.npy (see "
            "docs/vectors.md)"
        )
    return files


def read_vectors(folder: Path, side: str) -> Iterator[VectorBlock]:
    """Yield the rows of a side in blocks.

    Raises:
        DataError: for a file that cannot be read, an id that occurs twice, and vectors of several
            dimensions, with NaN or infinity, or of length zero.
    """
    ids: set[str] = set()
    dimension = None
    for file in find_vectors(folder, side):
        for rows, vectors in _read_array(file) if file.suffix == ".npy" else _read_parquet(file):
            names = []
            for number, row in rows:
                try:
                    names.append(_parse_names(row, len(ids) + 1))
                except Fault as fault:
                    raise DataError(one_line(f"{file}: row {number}: {fault}")) from None
                if names[-1][0] in ids:
                    raise DataError(
                        f"{file}: has the id {quoted(names[-1][0])} twice (keep one of the rows)"
                    )
                ids.add(names[-1][0])
            dimension = dimension or vectors.shape[1]
            if vectors.shape[1] != dimension:
                raise DataError(
                    f"{file}: {quoted(names[0][0])} has {vectors.shape[1]} dimensions, and the "
                    f"vectors before it have {dimension} (give vectors of one model)"
                )
            embeddings = np.ascontiguousarray(vectors, dtype=np.float32)
            lengths = np.sqrt(np.einsum("nd,nd->n", embeddings, embeddings))
            for is_bad, fault_name in (
                (~np.isfinite(lengths), "holds NaN, infinity or too large numbers"),
                (lengths == 0.0, "is zero"),
            ):
                if is_bad.any():
                    name = quoted(names[int(is_bad.argmax())][0])
                    raise DataError(
                        f"{file}: the vector of {name} {fault_name} (make it again, or leave out "
                        "its row and its pairs)"
                    )
            yield VectorBlock(names, embeddings)
    if dimension is None:
        raise DataError(f"{folder}: the {side} have no rows (see docs/vectors.md)")


Rows = Sequence[tuple[int, Any]]
"""Rows with their numbers from 1; a row is a mapping, or the `Fault` that prevents reading it."""


def _parse_names(row: Mapping[str, Any] | Fault, number: int) -> tuple[str, str, str]:
    if isinstance(row, Fault):
        raise row
    value = get_first_value(row, _NAMES["id"])
    title = parse_text(get_first_value(row, _NAMES["title"]), "title", may_be_blank=True)
    text = parse_text(get_first_value(row, _NAMES["text"]), "text", may_be_blank=True)
    if value is None and not text.strip():
        raise Fault("has neither an id nor a text")
    return parse_id(f"row-{number}" if value is None else value, "id").strip(), title, text


def _read_array(file: Path) -> Iterator[tuple[Rows, np.ndarray]]:
    """Yield the rows of SIDE.jsonl and the vectors, (n, d), of SIDE.npy in blocks."""
    try:
        vectors = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(one_line(f"{file}: cannot be read as a npy file ({error})")) from error
    if vectors.ndim != 2 or vectors.dtype.kind != "f":
        raise DataError(
            f"{file}: is {vectors.dtype} {vectors.shape}, and not an array (n, d) of floats"
        )
    numbered = enumerate((row for _, row in read_json_lines(file.with_suffix(".jsonl"))), start=1)
    first = 0
    while rows := list(itertools.islice(numbered, _ROWS_PER_BLOCK)):
        if first + len(rows) > len(vectors):
            break
        yield rows, vectors[first : first + len(rows)]
        first += len(rows)
    if rows or first < len(vectors):
        raise DataError(
            f"{file}: has {len(vectors):,} vectors, and {file.stem}.jsonl has not as many rows "
            "(write one line for each vector, in their order)"
        )


def _read_parquet(file: Path) -> Iterator[tuple[Rows, np.ndarray]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file, memory_map=True) as table:
            columns = set(table.schema_arrow.names)
            found = [name for name in _NAMES["embedding"] if name in columns]
            if not found:
                raise DataError(
                    f"{file}: has no column {', '.join(_NAMES['embedding'])}, only "
                    f"{quoted(', '.join(table.schema_arrow.names), 200)} (rename the column)"
                )
            names = [name for role in ("id", "title", "text") for name in _NAMES[role]]
            names = [name for name in names if name in columns]
            first = 1
            for batch in table.iter_batches(_ROWS_PER_BLOCK, columns=[*names, found[0]]):
                rows = batch.select(names).to_pylist() or [{}] * len(batch)
                numbered = list(enumerate(rows, start=first))
                yield numbered, _to_array(file, batch[found[0]], first)
                first += len(batch)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(one_line(f"{file}: cannot be read as a parquet file ({error})")) from error


def _to_array(file: AnyPath, column: pa.Array, first: int) -> np.ndarray:
    """Return a column of lists of numbers as an array (n, d)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column_type = column.type
    is_list = hasattr(column_type, "value_type")
    if not is_list or not (
        pa.types.is_floating(column_type.value_type) or pa.types.is_integer(column_type.value_type)
    ):
        raise DataError(
            f"{file}: the vectors have the type {column_type}, and not a list of numbers (write "
            "lists of float32)"
        )
    lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    differs = lengths != lengths[0]
    if lengths[0] == 0 or differs.any():
        row = int(differs.argmax())
        raise DataError(
            f"{file}: row {first + row:,} has a vector of {lengths[row]} dimensions, and row "
            f"{first:,} of {lengths[0]} (give vectors of one model)"
        )
    values = column.flatten().to_numpy(zero_copy_only=False)  # null becomes NaN
    return values.reshape(len(column), -1)
