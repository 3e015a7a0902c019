"""Embeddings of a corpus on disk, written shard by shard and mapped into memory instead of read.

    store.json            what the embeddings are of, and whether they are all there ("finished")
    shard-00000/          the first rows of the corpus, in its order; shard-00001 those that follow
        embeddings.npy    (n, d), float32, float16 or int8; (n, d / 8) of bits
        ranges.npy        of int8: the least and greatest of each dimension in this shard, (2, d)
        ids.arrow         their ids: Arrow IPC, one column `id` of strings
        texts.npy         hashes of their texts, by which training finds positives: int64 (n,)
        shard.json        rows, dimension, bytes of the files, fingerprint of the corpus up to the last row

A shard is there whole or not at all, so that a process killed at any instant loses the shard in work alone, and several
may share a folder. Nothing holds a pickle. Nothing is encoded or searched here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from contaccum import files
from contaccum.data.records import passage_text
from contaccum.data.sampling import text_ids
from contaccum.errors import ConfigError, DataError, UserError

ABOUT = "store.json"

STORED = ("float32", "float16", "int8", "binary")
"""Types that embeddings are stored in: 4, 2 and 1 bytes a dimension, and a bit."""

_SHARD, _EMBEDDINGS, _RANGES, _IDS = "shard.json", "embeddings.npy", "ranges.npy", "ids.arrow"
_TEXTS = "texts.npy"
_HEAD = {"format": "contaccum embedding store", "version": 3}
_MAPPED_SHARDS = 64  # at most, those used last: maps stay open, and a process may open 1,024 files
_MEND = "name another --output, or start anew with --overwrite"


@dataclass
class Codes:
    """n embeddings of d dimensions in a type of `STORED`; rows that are asked for come as float32 (n, d).

    int8 counts 256 steps from the least to the greatest of each dimension, `ranges` (2, d), and stands for the middle
    of a step; a bit stands for its sign.
    """

    values: np.ndarray
    dtype: str
    shape: tuple[int, int]
    ranges: np.ndarray | None = None

    @classmethod
    def of(cls, embeddings: np.ndarray, dtype: str) -> Codes:
        """Embeddings (n, d) in that type, quantized by sentence-transformers; `ConfigError`: see `check_bits`."""
        if dtype in ("float32", "float16"):
            return cls(np.ascontiguousarray(embeddings, dtype=dtype), dtype, embeddings.shape)
        from sentence_transformers.util import quantize_embeddings

        check_bits(dtype, embeddings.shape[1])
        ranges = (
            np.stack([embeddings.min(axis=0), embeddings.max(axis=0)]) if dtype == "int8" else None
        )
        values: Any = quantize_embeddings(
            embeddings, "int8" if dtype == "int8" else "ubinary", ranges
        )
        return cls(values, dtype, embeddings.shape, ranges)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        values = self.values[rows]
        if self.dtype == "binary":
            return 2 * np.unpackbits(values, axis=-1).astype(np.float32) - 1
        if self.ranges is None:
            return values.astype(np.float32, copy=False)
        low, high = self.ranges
        return low + (values.astype(np.float32) + 128.5) * ((high - low) / 255)


def check_bits(dtype: str, dimension: int) -> None:
    """Raise `ConfigError` for binary embeddings of dimensions that fill no whole bytes."""
    if dtype == "binary" and dimension % 8:
        raise ConfigError(
            f"binary embeddings of {dimension} dimensions: eight fill a byte, so take a multiple of 8"
        )


class EmbeddingStore:
    """A finished store, to be read like an array (N, d), rows numbered through all shards. Make one with `open`.

    `store[10:20]` and `store[[7, 3]]` are float32 copies, and memory holds no more than these.

    Attributes:
        about: the content of store.json.
        shape, dtype: (N, d), and the type of the embeddings as they lie on disk, of `STORED`.
        similarity: "cos" or "dot", what the model's embeddings are compared by.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self.about = folder, about
        self.similarity: Any = about.get("similarity")
        self.shape, self.dtype = (about["rows"], about["dimension"]), about["dtype"]
        self._shard_size: int = about["shard_size"]
        self._mapped = lru_cache(_MAPPED_SHARDS)(self._map)

    @classmethod
    def open(cls, folder: files.AnyPath) -> EmbeddingStore:
        """The store in a folder.

        Raises:
            DataError: no store, one that is not finished, or one that has lost a shard or a part of it.
        """
        folder = Path(folder)
        if not (folder / ABOUT).exists():
            raise DataError(
                f"{folder}: not a store of embeddings (write one with contaccum encode)"
            )
        about = _read_about(folder)
        mend = "run the same contaccum encode again: it goes on"
        if not about["finished"]:
            raise DataError(f"{folder}: the store is not finished ({mend})")
        for first in range(0, about["rows"], about["shard_size"]):
            if _read_shard(folder, first // about["shard_size"]) is None:
                raise DataError(
                    f"{folder}: the shard from row {first:,} on is missing or cut off ({mend})"
                )
        return cls(folder, about)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def fingerprint(self) -> str:
        """sha256, in hex, of what decides the rows: texts, model, tokenisation, types, number."""
        names = (
            "kind",
            "model",
            "similarity",
            "tokenisation",
            "precision",
            "dtype",
            "dimension",
            "rows",
        )
        return files.fingerprint(
            self.about["corpus"]["fingerprint"], [self.about.get(name) for name in names]
        )

    def __getitem__(self, rows: slice | Sequence[int] | np.ndarray) -> np.ndarray:
        """Embeddings of a slice, or of some rows in the order asked for (fastest where they ascend): float32 (n, d)."""
        rows = np.arange(*rows.indices(len(self))) if isinstance(rows, slice) else rows
        found = np.empty((len(rows), self.shape[1]), dtype=np.float32)
        for places, number, inside in self._located(rows):
            found[places] = self._mapped(number)[1][inside]
        return found

    def ids(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        """Ids of some rows, in the order asked for; raises `IndexError` for a row that is not there."""
        found = np.empty(len(rows), dtype=object)
        for places, number, inside in self._located(rows):
            found[places] = self._mapped(number)[0].take(inside).to_pylist()
        return found.tolist()

    def text_ids(self) -> np.ndarray:
        """Return the hashes of the encoded texts, int64 (N,); see `contaccum.data.sampling.text_ids`."""
        parts = []
        for number in range(self._num_shards):
            file = _shard_folder(self.folder, number) / _TEXTS
            parts.append(np.load(file, allow_pickle=False))
        return np.concatenate(parts)

    def blocks(self, size: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the first row and the embeddings, float32 (n, d), of consecutive blocks of at most ``size`` rows.

        A block lies in one shard. Those of a float32 store are views of the mapped file.
        """
        for number in range(self._num_shards):
            codes = self._mapped(number)[1]
            for first in range(0, len(codes), size):
                yield number * self._shard_size + first, codes[first : first + size]

    @property
    def _num_shards(self) -> int:
        return -(-len(self) // self._shard_size)

    def _located(
        self, rows: Sequence[int] | np.ndarray
    ) -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
        """For each shard that has some of the rows: places among them, its number, and the rows inside it."""
        wanted = np.asarray(rows, dtype=np.int64)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(f"rows are 0 to {len(self) - 1}, not {wanted.min()} to {wanted.max()}")
        numbers = wanted // self._shard_size
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            yield places, number, wanted[places] - number * self._shard_size

    def _map(self, number: int) -> tuple[Any, Codes]:
        """Ids and embeddings of a shard."""
        import pyarrow as pa

        folder = _shard_folder(self.folder, number)
        try:
            # Copy-on-write: torch warns of arrays that are read-only, and nothing here writes to them.
            embeddings = np.load(folder / _EMBEDDINGS, mmap_mode="c", allow_pickle=False)
            ranges = np.load(folder / _RANGES, allow_pickle=False) if self.dtype == "int8" else None
            with pa.memory_map(str(folder / _IDS)) as source, pa.ipc.open_file(source) as reader:
                ids = reader.read_all()["id"].combine_chunks()
            ids.validate(full=True)  # offsets of a broken file would be followed anywhere
        except (OSError, ValueError, KeyError) as error:
            what = " ".join(str(error).split())
            raise DataError(
                f"{folder}: the shard is broken: {what} (remove it, and encode again)"
            ) from error
        return ids, Codes(embeddings, self.dtype, (len(embeddings), self.shape[1]), ranges)


class StoreWriter:
    """Writes a store shard by shard; processes may share a folder, each with shards of its own.

    Args:
        identity: what decides the embeddings: kind, model, similarity, tokenisation, precision, dtype, shard_size. JSON
            values. A store with another one is not gone on with.
        notes: what else store.json says of a new store.
        overwrite: remove the store that lies there.

    Raises:
        UserError: the folder holds another store, or something else; or it cannot be written.
    """

    def __init__(
        self,
        folder: files.AnyPath,
        identity: Mapping[str, Any],
        notes: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> None:
        self.folder = Path(folder)
        about = check_folder(self.folder)
        if about is not None and overwrite:
            # Another process that overwrites the same store may remove a part of it first.
            for path in self.folder.glob("shard-*"):
                with suppress(FileNotFoundError):
                    shutil.rmtree(path)
            (self.folder / ABOUT).unlink(missing_ok=True)  # last, for the folder is known by it
            about = None
        if about is None:
            about = {**_HEAD, "finished": False, **identity, **(notes or {}), **files.provenance()}
            files.write_json(self.folder / ABOUT, about)
        if other := [
            name
            for name, value in json.loads(json.dumps(identity)).items()
            if about.get(name) != value
        ]:
            raise UserError(
                f"{folder}: holds embeddings of another {' and '.join(other)} ({_MEND})"
            )
        self.about = about

    def fill(
        self,
        passages: Iterable[tuple[str, str, str]],
        encode: Callable[[list[str]], np.ndarray],
        rank: int = 0,
        ranks: int = 1,
    ) -> bool:
        """Encode the shards that are missing, every `ranks`-th of them.

        Every shard that is there must be of this very corpus. It is compared with the corpus before
        a later shard is encoded. Memory holds the texts and embeddings of one shard.

        Args:
            passages: (id, title, text), with distinct ids.
            encode: texts to float32 (n, d).

        Returns:
            Whether the store is finished.

        Raises:
            DataError: the store has shards of another corpus, or there is no passage.
            UserError: no room.
        """
        remaining = iter(passages)
        corpus = files.Fingerprint()
        rows = 0
        shard_size = self.about["shard_size"]
        while block := list(islice(remaining, shard_size)):
            for passage in block:
                corpus.add(*passage)
            fingerprint = corpus.hex()
            if self.about["finished"] and rows >= self.about["rows"]:
                raise self._another_corpus()
            number = rows // shard_size
            is_missing = not self._has_shard(number, fingerprint)
            if is_missing and number % ranks == rank:
                texts = [passage_text(title, text) for _, title, text in block]
                ids = [passage[0] for passage in block]
                self._write_shard(number, ids, texts, encode(texts), fingerprint)
            rows += len(block)
        if not rows:
            raise DataError(
                f"{self.folder}: nothing to encode: the source has no passage left (correct the data)"
            )
        return self._finish(rows, corpus.hex())

    def _has_shard(self, number: int, fingerprint: str) -> bool:
        """Return whether a shard is there; raise `DataError` if it is of another corpus."""
        shard = _read_shard(self.folder, number)
        if shard is None:
            return False
        if shard["fingerprint"] != fingerprint:
            raise self._another_corpus()
        return True

    def _write_shard(
        self,
        number: int,
        ids: list[str],
        texts: list[str],
        embeddings: np.ndarray,
        fingerprint: str,
    ) -> None:
        """Write a shard, unless another process has written it meanwhile.

        Args:
            embeddings: float32 (n, d).
            fingerprint: of the corpus up to the shard's last row.
        """
        import pyarrow as pa

        codes = Codes.of(embeddings, self.about["dtype"])
        table = pa.record_batch([pa.array(ids, pa.string())], names=["id"])
        with files.atomic_folder(_shard_folder(self.folder, number)) as part:
            np.save(part / _EMBEDDINGS, codes.values, allow_pickle=False)
            np.save(part / _TEXTS, text_ids(texts), allow_pickle=False)
            if codes.ranges is not None:
                np.save(part / _RANGES, codes.ranges, allow_pickle=False)
            with pa.ipc.new_file(str(part / _IDS), table.schema) as writer:
                writer.write_batch(table)
            description = {
                "rows": len(ids),
                "dimension": codes.shape[1],
                "fingerprint": fingerprint,
                "bytes": {path.name: path.stat().st_size for path in part.iterdir()},
            }
            files.write_json(part / _SHARD, description)
        self._has_shard(number, fingerprint)  # the other process's must be of this corpus, too

    def _finish(self, rows: int, fingerprint: str) -> bool:
        """Finish the store if all shards of a corpus are there, and return whether they are."""
        shard_size = self.about["shard_size"]
        shards = []
        for first in range(0, rows, shard_size):
            shard = _read_shard(self.folder, first // shard_size)
            if shard is not None:
                shards.append(shard)
        if len(shards) * shard_size < rows:
            # The others are of other processes. The last one to write a shard finishes the store.
            return False
        if _shard_folder(self.folder, len(shards)).exists():
            raise self._another_corpus()
        corpus = {**self.about.get("corpus", {}), "fingerprint": fingerprint}
        finished = {"finished": True, "rows": rows, "dimension": shards[0]["dimension"]}
        files.write_json(self.folder / ABOUT, {**self.about, **finished, "corpus": corpus})
        return True

    def _another_corpus(self) -> DataError:
        return DataError(f"{self.folder}: holds embeddings of another corpus ({_MEND})")


def check_folder(folder: Path) -> dict[str, Any] | None:
    """The content of store.json of the store that lies there, None where nothing does; nothing is written.

    Raises:
        UserError: something else lies there.
    """
    if (folder / ABOUT).exists():
        return _read_about(folder)
    # Hidden files are what a process left that was killed before there was a store.json.
    if folder.is_file() or any(folder.glob("[!.]*")):
        raise UserError(f"{folder}: is there, and no store of embeddings (name a new folder)")
    return None


def _read_about(folder: Path) -> dict[str, Any]:
    """The content of store.json; raises `DataError` where it is broken, of something else, or of another version."""
    about = files.read_json(folder / ABOUT)
    if (there := {name: about.get(name) for name in _HEAD}) != _HEAD:
        raise DataError(
            f"{folder / ABOUT}: is {there}, not {_HEAD} (encode the corpus with this version of contaccum)"
        )
    return about


def _read_shard(folder: Path, number: int) -> dict[str, Any] | None:
    """What shard.json of a shard says; None where it is missing, or a file has not the length that it says."""
    shard = _shard_folder(folder, number)
    if not (shard / _SHARD).exists():
        return None
    about = files.read_json(shard / _SHARD)
    there = {path.name: path.stat().st_size for path in shard.iterdir() if path.name != _SHARD}
    return about if there == about["bytes"] else None


def _shard_folder(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}"
