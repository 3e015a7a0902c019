"""Embeddings of a corpus on disk, mapped into memory instead of read. `store_writer` writes what this reads.

A store is a folder:

    store.json            what the embeddings are of (`StoreWriter.start`), and whether they are all there
    shard-00000/          the first rows of the corpus, in its order; shard-00001 those that follow
        embeddings.npy    (n, d), float16 or float32
        ids.arrow         their ids: Arrow IPC, one column `id` of strings
        shard.json        rows, bytes of the files, and the fingerprint of the corpus up to the shard's last row

A shard is there whole or not at all. Nothing holds a pickle. What encodes, and what searches, is elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from contaccum.data.records import one_line
from contaccum.errors import ConfigError, DataError

ABOUT, SHARD = "store.json", "shard.json"
EMBEDDINGS, IDS = "embeddings.npy", "ids.arrow"
FORMAT, VERSION = "contaccum embedding store", 1
DTYPES = ("float16", "float32")

# Each map keeps a file open, and a process may open 1,024: a store of many shards maps those used last.
_MAPPED_SHARDS = 64


class Shard(NamedTuple):
    """Rows `first_row`, `first_row + 1`, ... of a store: ids, an Arrow array (n,), and embeddings (n, d), mapped."""

    first_row: int
    ids: Any
    embeddings: np.ndarray


class EmbeddingStore:
    """A finished store; rows are numbered through all shards, in the order of the corpus.

    Memory holds what is used: embeddings and ids are mapped. Make one with `EmbeddingStore.open(folder)`.

    Attributes:
        folder: where it lies.
        about: the content of store.json.
        dim, dtype: of the embeddings as they lie on disk.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self.about = folder, about
        self.dim = int(about["dimension"])
        self.dtype = np.dtype(about["dtype"])
        self._sizes = [int(shard["rows"]) for shard in about["shards"]]
        # first_row of each shard, and the number of rows at the end
        self._starts = np.concatenate([[0], np.cumsum(self._sizes, dtype=np.int64)])
        self._maps: dict[int, tuple[Any, np.ndarray]] = {}

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> EmbeddingStore:
        """The store in a folder.

        Raises:
            DataError: no store, one that is not finished, or files that are missing, cut off or of another kind.
        """
        folder = Path(folder)
        about = read_about(folder)
        if about is None:
            raise DataError(one_line(f"{folder}: not a store of embeddings (write one with contaccum encode)"))
        if about.get("finished") is not True:
            raise DataError(
                one_line(f"{folder}: the store is not finished (run the same contaccum encode again: it goes on)")
            )
        with _refusing_broken(folder):
            store = cls(folder, about)
            if about["dtype"] not in DTYPES or store.dim < 1 or min(store._sizes, default=0) < 1:
                raise ValueError(f"dimension {about['dimension']}, {about['dtype']}, shards of {store._sizes[:3]} rows")
            if len(store) != about["rows"]:
                raise ValueError(f"its shards have {len(store)} rows, not {about['rows']}")
            for number, shard in enumerate(about["shards"]):
                for name in (EMBEDDINGS, IDS):
                    size = (shard_folder(folder, number) / name).stat().st_size
                    if size != shard["bytes"][name]:
                        wanted = shard["bytes"][name]
                        raise ValueError(f"{shard_folder(folder, number) / name} has {size} bytes, not {wanted}")
        return store

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def similarity(self) -> str:
        """ "cos" or "dot": what the model's embeddings are compared by."""
        return self.about["similarity"]

    def shards(self) -> Iterator[Shard]:
        """Every shard, in order of its rows."""
        for number, first in enumerate(self._starts[:-1].tolist()):
            ids, embeddings = self._mapped(number)
            yield Shard(first, ids, embeddings)

    def ids(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        """Ids of some rows, in the order asked for; raises `IndexError` for a row that is not there."""
        wanted = self._checked(rows)
        found: list[str] = [""] * len(wanted)
        numbers = np.searchsorted(self._starts, wanted, side="right") - 1
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            ids = self._mapped(number)[0].take(wanted[places] - self._starts[number]).to_pylist()
            for place, name in zip(places.tolist(), ids, strict=True):
                found[place] = name
        return found

    def take(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Embeddings of some rows, in the order asked for, as float32 (len(rows), d); quickest where they ascend.

        Raises `IndexError` for a row that is not there.
        """
        wanted = self._checked(rows)
        found = np.empty((len(wanted), self.dim), dtype=np.float32)
        numbers = np.searchsorted(self._starts, wanted, side="right") - 1
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            found[places] = self._mapped(number)[1][wanted[places] - self._starts[number]]
        return found

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop - 1 as a float32 copy (stop - start, d); raises `IndexError` beyond the store's rows."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows {start} to {stop} of {len(self)}")
        rows = np.empty((stop - start, self.dim), dtype=np.float32)
        done = start
        while done < stop:
            number = int(np.searchsorted(self._starts, done, side="right")) - 1
            first, end = int(self._starts[number]), min(stop, int(self._starts[number + 1]))
            rows[done - start : end - start] = self._mapped(number)[1][done - first : end - first]
            done = end
        return rows

    def _checked(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        wanted = np.asarray(rows, dtype=np.int64).reshape(-1)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(f"rows are 0 to {len(self) - 1}, not {wanted.min()} to {wanted.max()}")
        return wanted

    def _mapped(self, number: int) -> tuple[Any, np.ndarray]:
        """Ids and embeddings of a shard; maps used longest ago are let go of, and close once nobody holds them."""
        mapped = self._maps.pop(number, None) or self._map(number)
        self._maps[number] = mapped
        if len(self._maps) > _MAPPED_SHARDS:
            del self._maps[next(iter(self._maps))]
        return mapped

    def _map(self, number: int) -> tuple[Any, np.ndarray]:
        folder = shard_folder(self.folder, number)
        with _refusing_broken(self.folder):
            embeddings = np.load(folder / EMBEDDINGS, mmap_mode="r", allow_pickle=False)
            shape = (self._sizes[number], self.dim)
            if embeddings.shape != shape or embeddings.dtype != self.dtype:
                raise ValueError(
                    f"{folder / EMBEDDINGS} is {embeddings.dtype} {embeddings.shape}, not {self.dtype} {shape}"
                )
            ids = _map_ids(folder / IDS)
            if len(ids) != len(embeddings):
                raise ValueError(f"{folder / IDS} has {len(ids)} ids for {len(embeddings)} rows")
        return ids, embeddings


def read_about(folder: Path) -> dict[str, Any] | None:
    """The content of store.json, of a finished store or not; None where there is none.

    Raises:
        DataError: it is broken, of something else, or of a later version.
    """
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            one_line(f"{folder / ABOUT}: cannot be read: {error} (remove the folder and encode again)")
        ) from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise DataError(
            one_line(f"{folder / ABOUT}: is not of a store of embeddings (write one with contaccum encode)")
        )
    if about.get("version") != VERSION:
        raise DataError(
            one_line(f"{folder}: a store of version {about.get('version')}, this reads {VERSION} (encode it again)")
        )
    return about


def shard_folder(folder: Path, number: int) -> Path:
    """Where shard `number` of a store lies."""
    return folder / f"shard-{number:05d}"


def check_dtype(name: str) -> None:
    """Raise `ConfigError` for a dtype that a store does not have."""
    if name not in DTYPES:
        raise ConfigError(f"dtype must be {' or '.join(DTYPES)}, not {name!r}")


def _map_ids(path: Path) -> Any:
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            table = reader.read_all()
            if table.schema != pa.schema([("id", pa.string())]):
                raise ValueError(f"{path} has the columns {', '.join(table.schema.names)}, not id")
            column = table.column("id").combine_chunks()
        column.validate(full=True)  # offsets of a broken file would be followed anywhere
    except pa.ArrowException as error:
        raise ValueError(f"{path}: {error}") from error
    return column


@contextmanager
def _refusing_broken(folder: Path) -> Iterator[None]:
    """What is wrong with the files of a store, in one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        what = f"{type(error).__name__} {error}" if isinstance(error, (KeyError, TypeError)) else str(error)
        raise DataError(one_line(f"{folder}: the store is broken: {what} (encode the corpus again)")) from error
