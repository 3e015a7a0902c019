"""Embeddings of a corpus on disk, written shard by shard and mapped into memory instead of read.

    store.json            what the embeddings are of, and whether they are all there ("finished")
    shard-00000/          the first rows of the corpus, in its order; shard-00001 those that follow
        embeddings.npy    (n, d), float16 or float32
        ids.arrow         their ids: Arrow IPC, one column `id` of strings
        shard.json        rows, dimension, fingerprint of the corpus up to the shard's last row

A shard is there whole or not at all, so that a process killed at any instant loses the shard in work alone, and several
may share a folder. Nothing holds a pickle. Nothing is encoded or searched here.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from contaccum.errors import DataError, UserError
from contaccum.files import AnyPath, Fingerprint, atomic_folder, git_commit, package_versions, read_json, write_json

ABOUT = "store.json"

_SHARD, _EMBEDDINGS, _IDS = "shard.json", "embeddings.npy", "ids.arrow"
_FORMAT, _VERSION = "contaccum embedding store", 1
# Maps stay open, and a process may open 1,024 files: those used last are.
_MAPPED_SHARDS = 64


class EmbeddingStore:
    """A finished store of N rows, numbered through all shards; memory holds what is used. Make one with `open`.

    Attributes:
        folder: where it lies.
        about: the content of store.json.
        dim, dtype: of the embeddings as they lie on disk.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self.about = folder, about
        self.dim, self.dtype = int(about["dimension"]), np.dtype(about["dtype"])
        self._starts = np.cumsum([0, *(shard["rows"] for shard in about["shards"])], dtype=np.int64)
        self._mapped = lru_cache(_MAPPED_SHARDS)(self._map)

    @classmethod
    def open(cls, folder: AnyPath) -> EmbeddingStore:
        """The store in a folder.

        Raises:
            DataError: no store, or one that is not finished. What is wrong with a shard is said where it is used.
        """
        folder = Path(folder)
        about = read_about(folder)
        if about is None:
            raise DataError(f"{folder}: not a store of embeddings (write one with contaccum encode)")
        if about.get("finished") is not True:
            raise DataError(f"{folder}: the store is not finished (run the same contaccum encode again: it goes on)")
        try:
            return cls(folder, about)
        except (ValueError, KeyError, TypeError) as error:
            raise _broken(folder, f"{type(error).__name__} {error}") from error

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def similarity(self) -> Any:
        """ "cos" or "dot": what the model's embeddings are compared by."""
        return self.about["similarity"]

    @property
    def fingerprint(self) -> str:
        """sha256, in hex, of what decides the rows: texts, model, tokenisation, types, number."""
        names = ("kind", "model", "similarity", "tokenisation", "precision", "dtype", "dimension", "rows")
        about = {name: self.about.get(name) for name in names}
        about["corpus"] = (self.about.get("corpus") or {}).get("fingerprint")
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def shards(self) -> Iterator[tuple[int, Any, np.ndarray]]:
        """Of every shard, in order: its first row, ids, an Arrow array (n,), and embeddings (n, d), mapped."""
        for number, first in enumerate(self._starts[:-1].tolist()):
            yield first, *self._mapped(number)

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop - 1 as a float32 copy (stop - start, d); raises `IndexError` beyond the store's rows."""
        return self.take(np.arange(start, stop))

    def take(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Embeddings of some rows, in the order asked for, as float32 (len(rows), d); quickest where they ascend."""
        found = np.empty((len(rows), self.dim), dtype=np.float32)
        for places, number, inside in self._located(rows):
            found[places] = self._mapped(number)[1][inside]
        return found

    def ids(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        """Ids of some rows, in the order asked for; raises `IndexError` for a row that is not there."""
        found = np.empty(len(rows), dtype=object)
        for places, number, inside in self._located(rows):
            found[places] = self._mapped(number)[0].take(inside).to_pylist()
        return found.tolist()

    def _located(self, rows: Sequence[int] | np.ndarray) -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
        """For each shard that has some of the rows: places among them, its number, and the rows inside it."""
        wanted = np.asarray(rows, dtype=np.int64)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(f"rows are 0 to {len(self) - 1}, not {wanted.min()} to {wanted.max()}")
        numbers = np.searchsorted(self._starts, wanted, side="right") - 1
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            yield places, number, wanted[places] - self._starts[number]

    def _map(self, number: int) -> tuple[Any, np.ndarray]:
        """Ids and embeddings of a shard."""
        import pyarrow as pa

        folder, count = _shard_folder(self.folder, number), int(self._starts[number + 1] - self._starts[number])
        try:
            embeddings = np.load(folder / _EMBEDDINGS, mmap_mode="r", allow_pickle=False)
            with pa.memory_map(str(folder / _IDS)) as source, pa.ipc.open_file(source) as reader:
                ids = reader.read_all()["id"].combine_chunks()
            ids.validate(full=True)  # offsets of a broken file would be followed anywhere
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise _broken(self.folder, error) from error
        found, wanted = (embeddings.shape, embeddings.dtype, len(ids)), ((count, self.dim), self.dtype, count)
        if found != wanted:
            raise _broken(self.folder, f"{folder} is {found}, not {wanted}")
        return ids, embeddings


class StoreWriter:
    """Writes a store shard by shard; processes may share a folder, each with shards of its own.

    Args:
        identity: what decides the embeddings: kind, model, similarity, tokenisation, precision, dtype, shard_size. JSON
            values. A store with another one is not gone on with.
        notes: what else store.json says of a new store.
        first: begin the store, as one process does before the others; False: join one that was begun.
        overwrite: remove the store that lies there.

    Raises:
        UserError: the folder holds another store, or something else; or it cannot be written.
    """

    def __init__(
        self,
        folder: AnyPath,
        identity: Mapping[str, Any],
        notes: Mapping[str, Any] | None = None,
        first: bool = True,
        overwrite: bool = False,
    ) -> None:
        self.folder = Path(folder)
        about = check_folder(self.folder)
        if about is not None and overwrite and first:
            for path in self.folder.glob("shard-*"):
                shutil.rmtree(path)
            (self.folder / ABOUT).unlink()  # last, for the folder is known by it
            about = None
        if about is None:
            if not first:
                raise UserError(f"{folder}: no store that rank 0 has begun (name a folder that all ranks see)")
            head = {"format": _FORMAT, "version": _VERSION, "finished": False}
            software = [{"versions": package_versions(), "git_commit": git_commit()}]
            about = {**head, **identity, **(notes or {}), "software": software}
            write_json(self.folder / ABOUT, about)
        there = {name: about.get(name) for name in identity}
        if other := _difference(there, json.loads(json.dumps(identity))):
            raise UserError(f"{folder}: holds embeddings made otherwise: {other} ({_MEND})")
        self.about = about

    def fill(
        self,
        passages: Iterable[tuple[str, str, str]],
        encode: Callable[[list[str]], np.ndarray],
        rank: int = 0,
        ranks: int = 1,
        on_found: Callable[[int], object] = lambda rows: None,
    ) -> bool:
        """Encode the shards that are missing, every `ranks`-th of them; whether the store is finished then.

        Every shard that is there must be of this very corpus, and is compared with it before a later one is encoded.
        Memory holds a shard's texts and embeddings.

        Args:
            passages: (id, title, text), with distinct ids.
            encode: texts to float32 (n, d).
            on_found: called with the rows of each of this process's shards that was there already.

        Raises:
            DataError: the store has shards of another corpus, or there is no passage.
            UserError: no room, or a number that float16 cannot hold.
        """
        passages, corpus, number = iter(passages), Fingerprint(), 0
        while block := list(islice(passages, self.about["shard_size"])):
            for passage in block:
                corpus.add(*passage)
            about = self.read_shard(number)
            beyond = self.about["finished"] and number >= len(self.about["shards"])
            if beyond or (about is not None and about["fingerprint"] != corpus.hex()):
                what = f"it differs from passage {number * self.about['shard_size']:,} on, or before"
                raise DataError(f"{self.folder}: holds embeddings of another corpus: {what} ({_MEND})")
            if number % ranks == rank:
                if about is not None:
                    on_found(len(block))
                else:
                    texts = [f"{title} {text}".strip() for _, title, text in block]
                    self.write_shard(number, [passage[0] for passage in block], encode(texts), corpus.hex())
            number += 1
        if not number:
            raise DataError(f"{self.folder}: nothing to encode: the source has no passage left (correct the data)")
        return self._finish(number, corpus.hex())

    def read_shard(self, number: int) -> dict[str, Any] | None:
        """What shard.json of a shard says; None where the shard is missing."""
        path = _shard_folder(self.folder, number) / _SHARD
        return read_json(path) if path.exists() else None

    def write_shard(self, number: int, ids: Sequence[str], embeddings: np.ndarray, fingerprint: str) -> None:
        """Write n ids and embeddings (n, d), in the dtype of the store; `fingerprint` is of the corpus up to them."""
        import pyarrow as pa

        with np.errstate(over="ignore"):
            stored = np.ascontiguousarray(embeddings, dtype=self.about["dtype"])
        if not np.isfinite(stored).all():
            raise UserError(f"{self.folder}: an embedding is too large for {self.about['dtype']} (use --dtype float32)")
        with atomic_folder(_shard_folder(self.folder, number)) as part:
            np.save(part / _EMBEDDINGS, stored, allow_pickle=False)
            batch = pa.record_batch([pa.array(ids, pa.string())], names=["id"])
            with pa.ipc.new_file(str(part / _IDS), batch.schema) as writer:
                writer.write_batch(batch)
            about = {"rows": len(ids), "dimension": stored.shape[1], "fingerprint": fingerprint}
            write_json(part / _SHARD, about)

    def _finish(self, count: int, fingerprint: str) -> bool:
        """Say in store.json that the store is finished, if all `count` shards are there.

        Of several processes, those that find shards of others missing leave this to whoever writes the last one.
        """
        found = [shard for shard in map(self.read_shard, range(count)) if shard is not None]
        if len(found) < count:
            return False
        if _shard_folder(self.folder, count).exists():
            raise DataError(f"{self.folder}: holds embeddings of another corpus: it has fewer passages ({_MEND})")
        about = {**self.about, "finished": True, "rows": sum(shard["rows"] for shard in found)}
        about |= {"dimension": found[0]["dimension"], "corpus": about.get("corpus", {}) | {"fingerprint": fingerprint}}
        about["shards"] = [{"rows": shard["rows"]} for shard in found]
        write_json(self.folder / ABOUT, about)
        return True


_MEND = "name another --output, or start anew with --overwrite"


def read_about(folder: Path) -> dict[str, Any] | None:
    """The content of store.json, of a finished store or not; None where there is none.

    Raises:
        DataError: it is broken, of something else, or of another version.
    """
    if not (folder / ABOUT).exists():
        return None
    about = read_json(folder / ABOUT)
    if (about.get("format"), about.get("version")) != (_FORMAT, _VERSION):
        what = f"is {about.get('format')!r}, version {about.get('version')}, not {_FORMAT!r}, version {_VERSION}"
        raise DataError(f"{folder / ABOUT}: {what} (encode the corpus with this version of contaccum)")
    return about


def check_folder(folder: Path) -> dict[str, Any] | None:
    """The content of store.json of the store that lies there, None where nothing does; nothing is written.

    Raises:
        UserError: something else lies there.
    """
    about = read_about(folder)
    if about is None and folder.exists():
        if not folder.is_dir():
            raise UserError(f"{folder}: is a file (name a folder)")
        # Hidden files are what a process left that was killed before there was a store.json.
        if strange := sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")):
            raise UserError(f"{folder}: holds no store, but {strange[0]!r} (name an empty folder)")
    return about


def _difference(there: Any, here: Any, name: str = "") -> str:
    """The first thing that differs between two structures of JSON: "tokenisation document_max_length 64, here 128"."""
    if isinstance(there, dict) and isinstance(here, dict):
        found = (_difference(there.get(key), here.get(key), f"{name} {key}".strip()) for key in {**there, **here})
        return next(filter(None, found), "")
    shown = [value[:12] if isinstance(value, str) else json.dumps(value) for value in (there, here)]
    return "" if there == here else f"{name} {shown[0]}, here {shown[1]}"


def _shard_folder(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}"


def _broken(folder: Path, what: object) -> DataError:
    return DataError(f"{folder}: the store is broken: {' '.join(str(what).split())} (encode the corpus again)")
