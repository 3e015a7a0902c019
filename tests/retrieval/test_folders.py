"""A store at a URL is the store of a local folder, and is downloaded shard by shard.

``memory://`` is fsspec's file system in the memory of this process. Like an object store, it has
whole objects only.
"""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from small_data import contents

from contaccum.data.sampling import text_ids
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.folders import LocalFolder, open_folder
from contaccum.retrieval.store import EmbeddingStore, StoreWriter, check_folder

NUM_ROWS = 25
NUM_SHARDS = 3
EMBEDDINGS = np.random.default_rng(0).standard_normal((NUM_ROWS, 8)).astype(np.float32)
PASSAGES = [(f"id-{row}", "", str(row)) for row in range(NUM_ROWS)]
URL = "memory://bucket/stores/store"
FILES = ("embeddings.npy", "ids.arrow", "shard.json", "texts.npy")


@pytest.fixture(autouse=True)
def memory() -> Iterator[MemoryFileSystem]:
    """Return the file system of memory://, which is empty before each test."""
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """Return the folder of downloaded files, which is empty before each test."""
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "stores"


@pytest.fixture
def downloads(monkeypatch) -> list[str]:
    """Return a list of the files that are downloaded from memory://, in order."""
    return record_calls(monkeypatch, "get_file")


def record_calls(monkeypatch: pytest.MonkeyPatch, method: str) -> list[str]:
    """Return a list of the paths that a method of memory:// is called with, relative to `URL`."""
    original = getattr(MemoryFileSystem, method)
    paths = []

    def record(self: MemoryFileSystem, *args: Any, **kwargs: Any) -> Any:
        remote = [path for path in args if str(path).startswith("/bucket/")]
        paths.append(remote[0].removeprefix("/bucket/stores/store/"))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, method, record)
    return paths


def open_writer(location: Any, overwrite: bool = False, **changes: Any) -> StoreWriter:
    identity = {"kind": "document", "model": "a" * 64, "similarity": "dot"}
    identity.update({"dtype": "float32", "shard_size": 10, **changes})
    return StoreWriter(location, identity, overwrite=overwrite)


def encode(texts: list[str]) -> np.ndarray:
    return EMBEDDINGS[[int(text) for text in texts]]


def make_counting_encoder() -> tuple[Callable[[list[str]], np.ndarray], list[int]]:
    """Return an encoder and the list of the first row of each shard that it encodes."""
    first_rows: list[int] = []

    def count_and_encode(texts: list[str]) -> np.ndarray:
        first_rows.append(int(texts[0]))
        return encode(texts)

    return count_and_encode, first_rows


def write_store(location: Any, **changes: Any) -> EmbeddingStore:
    assert open_writer(location, **changes).fill(PASSAGES, encode)
    return EmbeddingStore.open(location)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "binary"])
def test_a_remote_store_equals_a_local_store(tmp_path, memory, dtype):
    local = write_store(tmp_path / "store", dtype=dtype)
    remote = write_store(URL, dtype=dtype)
    np.testing.assert_array_equal(remote[:], local[:])
    np.testing.assert_array_equal(remote[[24, 0, 10]], local[[24, 0, 10]])
    np.testing.assert_array_equal(remote.text_ids(), local.text_ids())
    assert remote.ids(range(NUM_ROWS)) == local.ids(range(NUM_ROWS))
    assert remote.fingerprint == local.fingerprint
    assert remote.folder == URL
    memory.get("/bucket/stores/store", str(tmp_path / "copy"), recursive=True)
    assert contents(tmp_path / "copy") == contents(tmp_path / "store")


def test_a_file_url_is_a_local_folder(tmp_path, cache):
    store = write_store(f"file://{tmp_path}/store")
    assert isinstance(open_folder(f"file://{tmp_path}/store"), LocalFolder)
    assert store.folder == tmp_path / "store"
    np.testing.assert_array_equal(EmbeddingStore.open(tmp_path / "store")[:], EMBEDDINGS)
    assert not cache.exists()


def test_files_are_downloaded_when_they_are_needed_and_only_once(downloads):
    store = write_store(URL)
    assert downloads == []
    for _ in range(2):
        np.testing.assert_array_equal(store[[3, 21]], EMBEDDINGS[[3, 21]])
        EmbeddingStore.open(URL)[[3]]
    assert downloads == ["shard-00000/embeddings.npy", "shard-00002/embeddings.npy"]
    assert store.ids([12]) == ["id-12"]
    assert downloads[2:] == ["shard-00001/ids.arrow"]


def test_a_replaced_store_is_downloaded_again():
    np.testing.assert_array_equal(write_store(URL)[:], EMBEDDINGS)
    writer = open_writer(URL, overwrite=True)
    assert writer.fill(PASSAGES, lambda texts: -encode(texts))
    np.testing.assert_array_equal(EmbeddingStore.open(URL)[:], -EMBEDDINGS)


def test_a_download_that_fails_leaves_no_file(cache, monkeypatch):
    store = write_store(URL)

    def write_half(self: MemoryFileSystem, path: str, local_path: str) -> None:
        Path(local_path).write_bytes(b"half")
        raise ConnectionResetError("connection reset")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", write_half)
        with pytest.raises(UserError, match=r"embeddings.npy: cannot be read .*connection reset"):
            store[[0]]
    assert [path for path in cache.rglob("*") if path.is_file()] == []
    np.testing.assert_array_equal(store[:], EMBEDDINGS)


@pytest.mark.parametrize("num_uploads", range(NUM_SHARDS * len(FILES)))
def test_an_interrupted_upload_leaves_whole_shards_and_is_continued(
    memory, monkeypatch, num_uploads
):
    uploads = []
    put_file = MemoryFileSystem.put_file

    def put_some(self: MemoryFileSystem, local_path: str, path: str) -> None:
        if len(uploads) == num_uploads:
            raise KeyboardInterrupt
        uploads.append(path)
        put_file(self, local_path, path)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", put_some)
        with pytest.raises(KeyboardInterrupt):
            write_store(URL)
    num_whole = num_uploads // len(FILES)
    whole_shards = [path for path in memory.store if path.endswith("/shard.json")]
    assert len(whole_shards) == num_whole
    with pytest.raises(DataError, match="not finished"):
        EmbeddingStore.open(URL)
    count_and_encode, first_rows = make_counting_encoder()
    assert open_writer(URL).fill(PASSAGES, count_and_encode)
    assert first_rows == [0, 10, 20][num_whole:]
    np.testing.assert_array_equal(EmbeddingStore.open(URL)[:], EMBEDDINGS)


def test_a_damaged_shard_is_refused_and_written_again(memory):
    write_store(URL)
    for damage in ("file missing", "file cut off"):
        path = "/bucket/stores/store/shard-00001/ids.arrow"
        memory.rm(path)
        if damage == "file cut off":
            memory.pipe_file(path, b"cut off")
        with pytest.raises(DataError, match="row 10 on is missing or cut off"):
            EmbeddingStore.open(URL)
        count_and_encode, first_rows = make_counting_encoder()
        assert open_writer(URL).fill(PASSAGES, count_and_encode)
        assert first_rows == [10]
        np.testing.assert_array_equal(EmbeddingStore.open(URL)[:], EMBEDDINGS)


def test_documents_for_training_are_read_from_a_remote_store():
    write_store(URL)
    documents = StoreDocuments(EmbeddingStore.open(URL))
    blocks = []
    for part in range(2):
        blocks += documents.blocks(torch.device("cpu"), part, 2)
    blocks.sort(key=lambda block: block.first)
    assert torch.equal(torch.cat([block.documents for block in blocks]), torch.tensor(EMBEDDINGS))
    assert documents.find_rows(int(text_ids(["17"])[0])) == [17]
    assert documents.describe()["store"] == URL


def test_two_ranks_fill_a_remote_store():
    assert not open_writer(URL).fill(PASSAGES, encode, rank=1, world_size=2)
    assert open_writer(URL).fill(PASSAGES, encode, rank=0, world_size=2)
    np.testing.assert_array_equal(EmbeddingStore.open(URL)[:], EMBEDDINGS)


def test_a_remote_folder_with_other_files_is_left_alone(memory):
    memory.pipe_file("/bucket/stores/store/notes.txt", b"mine")
    for path in (URL, f"{URL}/notes.txt"):
        with pytest.raises(UserError, match="is not a store"):
            check_folder(path)
    with pytest.raises(UserError, match="is not a store"):
        open_writer(URL, overwrite=True)
    assert memory.cat_file("/bucket/stores/store/notes.txt") == b"mine"
    with pytest.raises(DataError, match="not a store of embeddings"):
        EmbeddingStore.open(URL)


def test_the_empty_object_of_a_folder_is_no_file_in_it(monkeypatch):
    marker = {"name": "/bucket/stores/store/", "size": 0, "type": "file"}
    monkeypatch.setattr(MemoryFileSystem, "ls", lambda self, path, detail: [marker])
    assert check_folder(URL) is None
    assert open_folder(URL).get_file_sizes("") == {}


def test_a_full_temporary_disk_is_reported_in_one_line(monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", refuse)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\)"):
        write_store(URL)


def test_a_remote_store_of_another_model_is_refused(memory):
    write_store(URL)
    content_before = {path: file.getvalue() for path, file in memory.store.items()}
    with pytest.raises(UserError, match="another model"):
        open_writer(URL, model="b" * 64)
    assert {path: file.getvalue() for path, file in memory.store.items()} == content_before


def test_a_missing_package_is_named_in_one_line():
    fsspec.register_implementation(
        "cloud", "no_such_package.CloudFileSystem", errtxt="Install no_such_package for cloud://"
    )
    for function in (EmbeddingStore.open, check_folder):
        with pytest.raises(ConfigError) as caught:
            function("cloud://user:password@bucket/store")
        assert "a package is missing: Install no_such_package" in str(caught.value)
        assert "password" not in str(caught.value)
        with pytest.raises(ConfigError, match="Protocol not known: nowhere"):
            function("nowhere://bucket/store")


def test_a_url_that_pathlib_has_shortened_is_refused():
    for function in (EmbeddingStore.open, check_folder):
        with pytest.raises(ConfigError, match=r"s3:/bucket/store: .* pass the URL as a str"):
            function(Path("s3://bucket/store"))


def test_credentials_in_a_url_are_not_shown(monkeypatch):
    url = "memory://user:password@bucket/store"
    store = write_store(url)
    assert store.folder == "memory://***@bucket/store"

    def refuse(self: MemoryFileSystem, path: str, local_path: str) -> None:
        raise PermissionError(f"not allowed: {url}")

    monkeypatch.setattr(MemoryFileSystem, "get_file", refuse)
    with pytest.raises(UserError, match=r"memory://\*\*\*@bucket/store/shard-00000") as caught:
        store[[0]]
    assert "password" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_folder("~/stores/wiki").location == tmp_path / "stores" / "wiki"


def test_a_file_system_that_fails_to_connect_is_one_line(monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("unknown\nhost")

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(UserError, match=r"cannot be opened \(RuntimeError: unknown host\); check"):
        open_folder("ftp://nohost/x")


def test_other_files_in_the_folder_of_a_shard_do_no_harm(tmp_path):
    write_store(tmp_path / "store")
    (tmp_path / "store" / "shard-00000" / ".DS_Store").write_text("x")
    assert len(EmbeddingStore.open(tmp_path / "store")) == NUM_ROWS
