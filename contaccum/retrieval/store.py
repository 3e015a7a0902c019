"""Stores: folders of corpus embeddings, written in shards and memory-mapped when they are read.

    identity.json         model and settings that decide the embeddings
    result.json           number of rows, corpus, and how it was made, once all shards are written
    shard-00000/          the first rows of the corpus, in its order; shard-00001 has the next rows
        embeddings.npy    (n, d) in float32 or float16
        ids.arrow         ids of the rows: Arrow IPC, one column ``id`` of strings
        passages.arrow    columns ``title`` and ``text`` of strings, unless they are left out
        texts.npy         hashes of the texts, int64 (n,); training looks up positives by them
        result.json       rows, dimension, file sizes, fingerprint of the corpus up to this shard
    parquet/              a file for each shard; see `write_parquet`
    bm25/                 see `contaccum.retrieval.bm25.write_index`

A shard appears as a whole or not at all. So a killed process loses only the shard that it was
writing, and several processes may write to the same folder. No file holds a pickle.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from contaccum import files, work
from contaccum.data.rows import passage_text
from contaccum.data.sampling import text_ids
from contaccum.errors import DataError

Similarity = Literal["cos", "dot"]

STORE = "a store of embeddings, format 4"
"""The kind of work; see `contaccum.work`."""
TOKENISATION = "tokenizer, prompt, maximum length, pooling or dimension"
"""A name in the identity, which messages show."""
STORED = ("float32", "float16")
"""Types of stored embeddings."""
EMBEDDINGS_FILE = "embeddings.npy"
IDS_FILE = "ids.arrow"
PASSAGES_FILE = "passages.arrow"
TEXTS_FILE = "texts.npy"
PARQUET_FOLDER = "parquet"
BM25_FOLDER = "bm25"

_ROWS_PER_GROUP = 8192  # of parquet, which programs read at a time: 25 MB with 768 dimensions
_REPLACE_REMEDY = (
    "name another folder, or remove this store; contaccum encode does so with --overwrite"
)
_CONTINUE_REMEDY = "run the same contaccum encode again, without --overwrite, to continue"


class EmbeddingStore:
    """A finished store of embeddings (N, d). Rows are numbered through all shards.

    ``store[10:20]`` and ``store[[7, 3]]`` are float32 copies; memory holds these rows alone.

    Attributes:
        metadata: its identity and its result.
        shape: (N, d).
        dtype: type of the embeddings on disk, one of `STORED`.
        similarity: "cos" or "dot", that of the model.
        shard_size: number of rows in a shard; the last one may have fewer.
        get_embeddings: function that maps the embeddings (n, d) of the shard of a number.
    """

    def __init__(self, folder: Path, metadata: dict[str, Any]) -> None:
        self.folder = folder
        self.metadata = metadata
        self.similarity: Similarity = metadata.get("similarity", "cos")
        self.shape: tuple[int, int] = (metadata["rows"], metadata["dimension"])
        self.dtype: str = metadata["dtype"]
        self.shard_size: int = metadata["shard_size"]
        self.num_shards = -(-len(self) // self.shard_size)  # rounded up
        self.has_passages = bool(metadata.get("passages"))  # titles and texts
        self.get_embeddings = cache(self._map_embeddings)
        self._get_table = cache(self._map_table)

    @classmethod
    def open(cls, folder: files.AnyPath) -> EmbeddingStore:
        """Open the store in a folder.

        Raises `DataError` for none, for one that is not finished, and for a damaged one.
        """
        folder = Path(folder).expanduser()
        identity = work.read_identity(folder)
        if identity.get("work") != STORE:
            raise DataError(f"{folder}: not {STORE} (write one with contaccum encode)")
        result = work.read_result(folder)
        if result is None:
            raise DataError(f"{folder}: the store is not finished ({_CONTINUE_REMEDY})")
        store = cls(folder, {**identity, **result})
        for number in range(store.num_shards):
            shard = work.read_result(folder / get_shard_name(number)) or {}
            shape = (shard.get("rows"), shard.get("dimension"))
            if shape != (store._count_rows(number), store.shape[1]):
                raise DataError(
                    f"{folder}: the shard from row {number * store.shard_size:,} on is missing, "
                    f"cut off or of another store ({_CONTINUE_REMEDY})"
                )
        return store

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def fingerprint(self) -> str:
        """sha256 in hex of what decides the rows: texts, model, tokenisation, types and number."""
        keys = ["kind", "model", "similarity", TOKENISATION, "precision", "dtype", "dimension"]
        values = [self.metadata.get(key) for key in [*keys, "rows"]]
        return files.fingerprint(self.metadata["corpus"]["fingerprint"], values)

    def __getitem__(self, rows: slice | Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the embeddings of n rows, in the order of the request, as float32 (n, d).

        Rows are a slice, or a list or array of integers from 0; ascending ones are read fastest.
        """
        if isinstance(rows, slice):
            rows = range(len(self))[rows]
        embeddings = np.empty((len(rows), self.shape[1]), dtype=np.float32)
        for shard_number, positions, rows_in_shard in self._group_by_shard(rows):
            embeddings[positions] = self.get_embeddings(shard_number)[rows_in_shard]
        return embeddings

    def ids(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        """Return the ids of a list or array of rows, in their order."""
        ids = np.empty(len(rows), dtype=object)
        for shard_number, positions, rows_in_shard in self._group_by_shard(rows):
            shard_ids = self._get_table(shard_number, IDS_FILE)["id"]
            ids[positions] = shard_ids.take(rows_in_shard).to_pylist()
        return ids.tolist()

    def get_passages(self, shard_number: int) -> pa.Table:
        """Return the columns id, title and text of a shard, mapped; `DataError` without texts."""
        if not self.has_passages:
            raise DataError(
                f"{self.folder}: has no texts (encode with --overwrite and without --no_texts)"
            )
        ids = self._get_table(shard_number, IDS_FILE)
        return self._get_table(shard_number, PASSAGES_FILE).add_column(0, "id", ids["id"])

    def read_passages(self, ids: Iterable[str]) -> dict[str, tuple[str, str]]:
        """Return {id: (title, text)} of some passages; the store must hold them."""
        import pyarrow.compute as pc

        is_wanted = pc.is_in(pc.field("id"), pa.array(list(ids), pa.string()))
        found = {}
        for passages in map(self.get_passages, range(self.num_shards)):
            for passage in passages.filter(is_wanted).to_pylist():
                found[passage["id"]] = (passage["title"], passage["text"])
        return found

    def text_ids(self) -> np.ndarray:
        """Return the hashes of all texts, int64 (N,); see `contaccum.data.sampling.text_ids`."""
        shards = range(self.num_shards)
        return np.concatenate([self._map_array(shard, TEXTS_FILE, (), "int64") for shard in shards])

    def blocks(self, size: int, rows: range) -> Iterator[tuple[int, np.ndarray]]:
        """Yield first row and embeddings (n, d) of blocks of ``size`` rows: views of the files."""
        for start in range(0, rows.stop, self.shard_size):
            end = min(start + self.shard_size, rows.stop)
            for first in range(max(start, rows.start), end, size):
                embeddings = self.get_embeddings(start // self.shard_size)
                yield first, embeddings[first - start : min(first + size, end) - start]

    def _group_by_shard(
        self, rows: Sequence[int] | np.ndarray
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield number, positions in the request, and rows from its start on, of each shard."""
        row_numbers = np.asarray(rows)
        if len(row_numbers) == 0:
            return
        # numpy would take a mask of booleans as the rows 0 and 1.
        is_list = row_numbers.ndim == 1 and row_numbers.dtype.kind in "iu"
        if not is_list or row_numbers.min() < 0 or row_numbers.max() >= len(self):
            raise IndexError(
                f"{self.folder}: rows must be a list of integers from 0 to {len(self) - 1}"
            )
        # As int64, because the shard size exceeds the smaller types.
        shard_numbers, rows_in_shards = np.divmod(row_numbers.astype(np.int64), self.shard_size)
        for shard_number in np.unique(shard_numbers).tolist():
            positions = np.flatnonzero(shard_numbers == shard_number)
            yield shard_number, positions, rows_in_shards[positions]

    def _map_embeddings(self, shard_number: int) -> np.ndarray:
        import torch

        # The map lives as long as the store, because mapping takes a fifth of a pass over it. Of
        # 1,024 open files that a process may have, numpy keeps one for each map, torch does not.
        array = self._map_array(shard_number, EMBEDDINGS_FILE, self.shape[1:], self.dtype)
        start = array.offset // array.itemsize  # after the header of the file
        dtype = getattr(torch, self.dtype)
        numbers = torch.from_file(
            str(array.filename), shared=False, size=start + array.size, dtype=dtype
        )
        return numbers[start:].view(array.shape).numpy()

    def _map_array(
        self, shard_number: int, name: str, shape_of_row: tuple[int, ...], dtype: str
    ) -> np.memmap:
        path = self.folder / get_shard_name(shard_number) / name
        array: np.memmap = np.load(path, mmap_mode="r", allow_pickle=False)
        shape = (self._count_rows(shard_number), *shape_of_row)
        if array.shape != shape or array.dtype != dtype:
            raise DataError(
                f"{path}: is {array.dtype} {array.shape}, and not {dtype} {shape}, as the store "
                f"says (remove the shard's folder, and {_CONTINUE_REMEDY})"
            )
        return array

    def _map_table(self, shard_number: int, name: str) -> pa.Table:
        path = self.folder / get_shard_name(shard_number) / name
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            table = reader.read_all()  # it stays mapped, and the file is closed
        table.validate(full=True)  # offsets in a broken file may point outside the mapped memory
        return table

    def _count_rows(self, shard_number: int) -> int:
        return min(self.shard_size, len(self) - shard_number * self.shard_size)


class StoreWriter:
    """Writer of a store, shard by shard. Several processes may write shards of the same folder.

    Args:
        folder: a new folder, or that of a store of the same identity, which is continued; other
            work or files there raise `UserError`.
        identity: see `contaccum.retrieval.encode.encoding_identity`.
        notes: further entries for the result; the attribute may be changed until the end.
        overwrite: remove a store that is in the folder.
        has_passages: True: the store holds titles and texts.
    """

    def __init__(
        self,
        folder: files.AnyPath,
        identity: Mapping[str, Any],
        notes: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        has_passages: bool = False,
    ) -> None:
        self.folder = Path(folder).expanduser()
        work.require_own_folder(self.folder, STORE)
        identity = {"work": STORE, **identity}
        if overwrite and work.read_identity(self.folder):
            (self.folder / work.RESULT_FILE).unlink(missing_ok=True)
            for path in [*self.folder.glob("*/")]:
                if path.name in (PARQUET_FOLDER, BM25_FOLDER) or path.match("shard-*"):
                    shutil.rmtree(path)
            work.write_identity(self.folder, identity)
        work.require_same_work(self.folder, identity, _REPLACE_REMEDY)
        self.identity = identity
        self.notes = dict(notes or {})
        self.has_passages = has_passages

    def fill(
        self,
        passages: Iterable[tuple[str, str, str]],
        encode: Callable[[list[str]], np.ndarray],
        rank: int = 0,
        world_size: int = 1,
    ) -> bool:
        """Encode and write the shards that are missing; return True if the store is finished.

        Memory holds the texts and embeddings of one shard.

        Args:
            passages: (id, title, text) of each passage, at least one; ids are distinct.
            encode: function that returns the embeddings of n texts, float32 (n, d).
            rank, world_size: this process encodes every ``world_size``-th shard, from ``rank`` on.

        Raises:
            DataError: the store has shards of another corpus.
            UserError: the disk is full or cannot be written to.
        """
        remaining = iter(passages)
        corpus = files.Fingerprint()
        fingerprints: list[str] = []  # of the corpus up to the end of each shard
        num_rows = 0
        finished = work.read_result(self.folder)
        while shard_passages := list(islice(remaining, self.identity["shard_size"])):
            for passage in shard_passages:
                corpus.add(*passage)
            number = len(fingerprints)
            fingerprints.append(corpus.hex())
            if finished is not None and num_rows >= finished["rows"]:
                raise self._other_corpus_error()  # a finished store gets no further shard
            is_missing = self._read_shard(number, corpus.hex()) is None
            if is_missing and number % world_size == rank:
                self._write_shard(number, shard_passages, encode, corpus.hex())
            num_rows += len(shard_passages)
        shards = []
        for number, fingerprint in enumerate(fingerprints):
            shard = self._read_shard(number, fingerprint)
            if shard is None:
                return False  # other processes still write; the last of them finishes the store
            shards.append(shard)
        if (self.folder / get_shard_name(len(fingerprints))).exists():
            raise self._other_corpus_error()
        if finished is None:
            counts = {"rows": num_rows, "dimension": shards[0]["dimension"]}
            counts["corpus"] = {**self.notes.get("corpus", {}), "fingerprint": fingerprints[-1]}
            # An earlier start may have written some shards without them.
            counts["passages"] = all(PASSAGES_FILE in shard["files"] for shard in shards)
            work.finish(self.folder, {**self.notes, **counts, **files.provenance()})
        return True

    def _read_shard(self, shard_number: int, fingerprint: str) -> dict[str, Any] | None:
        """Return a shard's result, None for a missing shard; refuse one of another corpus."""
        shard = work.read_result(self.folder / get_shard_name(shard_number))
        if shard is not None and shard["fingerprint"] != fingerprint:
            raise self._other_corpus_error()
        return shard

    def _write_shard(
        self,
        shard_number: int,
        passages: Sequence[tuple[str, str, str]],
        encode: Callable[[list[str]], np.ndarray],
        fingerprint: str,
    ) -> None:
        texts = [passage_text(title, text) for _, title, text in passages]
        values = np.ascontiguousarray(encode(texts), dtype=self.identity["dtype"])
        ids, titles, bodies = zip(*passages, strict=True)
        tables = {IDS_FILE: pa.table([pa.array(ids, pa.string())], ["id"])}
        if self.has_passages:
            columns = [pa.array(titles, pa.string()), pa.array(bodies, pa.large_string())]
            tables[PASSAGES_FILE] = pa.table(columns, ["title", "text"])
        with files.atomic_folder(self.folder / get_shard_name(shard_number)) as folder:
            np.save(folder / EMBEDDINGS_FILE, values, allow_pickle=False)
            np.save(folder / TEXTS_FILE, text_ids(texts), allow_pickle=False)
            for file, table in tables.items():
                with pa.ipc.new_file(str(folder / file), table.schema) as writer:
                    writer.write_table(table)
            rows, dimension = values.shape
            shard = {"rows": rows, "dimension": dimension, "fingerprint": fingerprint}
            work.finish(folder, shard, has_sizes=True)

    def _other_corpus_error(self) -> DataError:
        return DataError(f"{self.folder}: holds embeddings of another corpus ({_REPLACE_REMEDY})")


def get_shard_name(shard_number: int) -> str:
    """Return the name of a shard's folder in the folder of its store."""
    return f"shard-{shard_number:05d}"


def write_parquet(store: EmbeddingStore, show_progress: bool = False) -> Path:
    """Write ids, titles, texts and embeddings of a store to its folder ``parquet``; return that.

    Each shard becomes a file, with the columns ``id``, ``title`` and ``text`` (strings) and
    ``embedding`` (fixed_size_list<float32 or float16, d>, the values of the store). Memory holds
    one shard. Nothing is done if the folder exists: it appears when all files are complete.
    `UserError`: the store holds no texts, or the disk is full or cannot be written to.
    """
    import pyarrow.parquet as pq
    from tqdm.auto import tqdm

    folder = store.folder / PARQUET_FOLDER
    if folder.exists():
        return folder
    embedding_type = pa.list_(pa.from_numpy_dtype(store.dtype), store.shape[1])
    with files.atomic_folder(folder) as new_folder:
        for shard_number in tqdm(range(store.num_shards), "Parquet", disable=not show_progress):
            embeddings = pa.array(store.get_embeddings(shard_number).reshape(-1))
            column = pa.FixedSizeListArray.from_arrays(embeddings, type=embedding_type)
            pq.write_table(
                store.get_passages(shard_number).append_column("embedding", column),
                new_folder / f"{get_shard_name(shard_number)}.parquet",
                row_group_size=_ROWS_PER_GROUP,
                use_dictionary=False,  # embeddings hardly repeat
            )
    return folder
