"""A store returns what was written, row by row, and refuses broken or foreign files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from small_data import contents

from contaccum import work
from contaccum.errors import DataError, UserError
from contaccum.retrieval.store import TOKENISATION, EmbeddingStore, StoreWriter

IDENTITY = {
    "kind": "document",
    "model": "a" * 64,
    "similarity": "cos",
    "dtype": "float32",
    "shard_size": 10,
}
NUM_ROWS = 25
EMBEDDINGS = np.random.default_rng(0).standard_normal((NUM_ROWS, 4)).astype(np.float32)
PASSAGES = [(f"id-{row}", "", "x" * row) for row in range(NUM_ROWS)]


def open_writer(folder: Path, overwrite: bool = False, **changes: Any) -> StoreWriter:
    return StoreWriter(folder, {**IDENTITY, **changes}, overwrite=overwrite)


class StubEncoder:
    """Encoder of "x" times n as row n of `EMBEDDINGS`; it counts the texts of each call."""

    def __init__(self) -> None:
        self.num_texts: list[int] = []

    def __call__(self, texts: list[str]) -> np.ndarray:
        self.num_texts.append(len(texts))
        return EMBEDDINGS[[len(text) for text in texts]]


def write_store(folder: Path, **changes: Any) -> Path:
    """Write a store of 25 rows in shards of 10, with the ids "id-0" to "id-24"."""
    assert open_writer(folder, **changes).fill(PASSAGES, StubEncoder())
    return folder


def test_rows_and_ids_come_back_in_the_requested_order(tmp_path):
    store = EmbeddingStore.open(write_store(tmp_path / "s"))
    assert (store.shape, store.dtype, store.similarity) == ((NUM_ROWS, 4), "float32", "cos")
    slices = [slice(None), slice(3, 21), slice(10, 10), slice(9, 11), slice(24, 99)]
    for rows in (*slices, [24, 0, 9, 10, 10], []):
        np.testing.assert_array_equal(store[rows], EMBEDDINGS[rows])
    assert store.ids([24, 0, 10, 9, 0]) == ["id-24", "id-0", "id-10", "id-9", "id-0"]


@pytest.mark.parametrize("rows", [[-1], [0, 25], [[1, 2]], [True, False], [0.0, 1.0]])
def test_rows_that_are_not_a_list_of_rows_of_the_store_are_refused(tmp_path, rows):
    """numpy would take a mask of booleans as the rows 0 and 1."""
    store = EmbeddingStore.open(write_store(tmp_path / "s"))
    for read in (store.ids, store.__getitem__):
        with pytest.raises(IndexError, match="a list of integers from 0 to 24"):
            read(rows)


def damage_store(folder: Path, damage: str) -> None:
    shard = folder / "shard-00001"
    if damage == "gone":
        shutil.rmtree(shard)
    elif damage == "cut off":
        os.truncate(shard / "embeddings.npy", 150)
    elif damage == "transposed":
        np.save(shard / "embeddings.npy", EMBEDDINGS[10:20].T)
    elif damage == "another version":
        work.write_identity(folder, {**work.read_identity(folder), "work": "an older store"})
    elif damage == "unfinished":
        (folder / work.RESULT_FILE).unlink()
    elif damage == "of another store":
        work.finish(shard, {"rows": 9, "dimension": 4})


@pytest.mark.parametrize(
    "damage", ["transposed", "another version", "unfinished", "of another store"]
)
def test_a_broken_or_foreign_store_is_refused_in_one_line(tmp_path, damage):
    folder = write_store(tmp_path / "s")
    damage_store(folder, damage)
    with pytest.raises(DataError) as caught:
        EmbeddingStore.open(folder)[:]
        EmbeddingStore.open(folder).ids(range(NUM_ROWS))
        EmbeddingStore.open(folder).text_ids()
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mapped_shards_copy_nothing_and_keep_no_file_open(tmp_path):
    folder = write_store(tmp_path / "s")
    store = EmbeddingStore.open(folder)
    blocks = [block for _, block in store.blocks(10, range(NUM_ROWS))]
    assert store.ids(range(NUM_ROWS)) == [passage_id for passage_id, _, _ in PASSAGES]
    assert not [file for file in psutil.Process().open_files() if str(folder) in file.path]
    # A change of the file is seen in the mapping, but not the other way round.
    file = folder / "shard-00000" / "embeddings.npy"
    changed = np.load(file, mmap_mode="r+")
    changed[0] = 7
    changed.flush()
    assert (blocks[0][0] == 7).all()
    blocks[0][0] = 8
    assert (np.load(file)[0] == 7).all()


@pytest.mark.parametrize("key", ["kind", "model", "similarity", TOKENISATION, "precision", "dtype"])
def test_fingerprint_depends_on_each_setting_that_decides_the_embeddings(tmp_path, key):
    fingerprint = EmbeddingStore.open(write_store(tmp_path / "s")).fingerprint
    other = write_store(tmp_path / "other", **{key: "float16"})
    assert EmbeddingStore.open(other).fingerprint != fingerprint


@pytest.mark.parametrize("damage", ["gone", "cut off"])
def test_a_damaged_shard_is_refused_at_open_and_encoded_again(tmp_path, damage):
    folder = write_store(tmp_path / "s")
    contents_before = contents(folder)
    damage_store(folder, damage)
    with pytest.raises(DataError, match="from row 10 on is missing, cut off"):
        EmbeddingStore.open(folder)
    encoder = StubEncoder()
    assert open_writer(folder).fill(PASSAGES, encoder)
    assert encoder.num_texts == [10]
    assert contents(folder) == contents_before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "b" * 64}, "another model "),
        ({"kind": "query", "shard_size": 5}, "another kind .*, shard_size "),
    ],
)
def test_a_store_of_another_identity_is_refused_and_left_alone(tmp_path, changes, message):
    folder = write_store(tmp_path / "s")
    contents_before = contents(folder)
    with pytest.raises(UserError, match=rf"{message}.*--overwrite"):
        open_writer(folder, **changes)
    assert contents(folder) == contents_before


def test_overwrite_removes_the_old_store(tmp_path):
    folder = write_store(tmp_path / "s")
    open_writer(folder, overwrite=True, dtype="float16")
    assert [path.name for path in folder.iterdir()] == ["identity.json"]


def test_a_folder_of_other_files_is_never_written_to_or_emptied(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    for folder in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(UserError, match="holds other files"):
            open_writer(folder, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_encode_each_shard_once_and_the_last_finishes_the_store(tmp_path, world_size):
    encoder = StubEncoder()
    is_finished = []
    for rank in range(world_size):
        writer = open_writer(tmp_path / "s")
        is_finished.append(writer.fill(PASSAGES, encoder, rank, world_size))
        if not is_finished[-1]:
            # With --overwrite, a restart would remove the shards that are written already.
            with pytest.raises(DataError, match=r"not finished.*again, without --overwrite"):
                EmbeddingStore.open(tmp_path / "s")
    assert sum(encoder.num_texts) == NUM_ROWS
    assert is_finished[-1]
    # There are three shards, so all ranks from the third one on see a finished store.
    assert sum(is_finished) == max(1, world_size - 2)
    np.testing.assert_array_equal(EmbeddingStore.open(tmp_path / "s")[:], EMBEDDINGS)


def test_two_processes_that_encode_the_same_corpus_share_the_shards(tmp_path):
    """The second process writes all shards while the first one encodes its first shard."""
    expected = contents(write_store(tmp_path / "expected"))
    folder = tmp_path / "s"
    first, second = open_writer(folder), open_writer(folder)
    num_texts = []

    def encode_after_second(texts: list[str]) -> np.ndarray:
        assert second.fill(PASSAGES, StubEncoder())
        num_texts.append(len(texts))
        return StubEncoder()(texts)

    assert first.fill(PASSAGES, encode_after_second)
    assert num_texts == [10]
    assert contents(folder) == expected


def test_shards_of_two_corpora_do_not_become_a_store(tmp_path):
    """Two ranks read different corpora, and the first rank passes a shard before it is there."""
    folder = tmp_path / "s"
    other_passages = [*PASSAGES[:12], ("other", "", "x" * 12), *PASSAGES[13:]]
    first, second = open_writer(folder, shard_size=10), open_writer(folder, shard_size=10)

    def encode_after_second_rank(texts: list[str]) -> np.ndarray:
        """Write the shard 1 of the other corpus while the first rank encodes its last shard."""
        if len(texts) < 10:
            assert not second.fill(other_passages, StubEncoder(), rank=1, world_size=2)
        return StubEncoder()(texts)

    with pytest.raises(DataError, match="another corpus"):
        first.fill(PASSAGES, encode_after_second_rank, rank=0, world_size=2)
    with pytest.raises(DataError, match="not finished"):
        EmbeddingStore.open(folder)


@pytest.mark.parametrize(
    "passages",
    [
        pytest.param([*PASSAGES[:3], ("id-3", "", "xx"), *PASSAGES[4:]], id="other text"),
        pytest.param([*PASSAGES[:3], ("other", "", "xxx"), *PASSAGES[4:]], id="other id"),
        pytest.param([*PASSAGES[:3], ("id-3", "x", "xxx"), *PASSAGES[4:]], id="other title"),
        pytest.param(PASSAGES[:-5], id="fewer passages"),
        pytest.param([*PASSAGES, *[("new", "", "x")] * 6], id="more passages"),
    ],
)
def test_a_store_of_another_corpus_is_refused_and_left_alone(tmp_path, passages):
    folder = write_store(tmp_path / "s", shard_size=5)  # 25 rows fill five shards exactly
    contents_before = contents(folder)
    with pytest.raises(DataError, match="another corpus"):
        open_writer(folder, shard_size=5).fill(passages, encode=pytest.fail)
    assert contents(folder) == contents_before


def test_a_disk_that_becomes_full_is_reported_in_one_line(tmp_path, limit_file_size):
    """numpy gives no error number."""
    writer = open_writer(tmp_path / "s")
    message = r"s/shard-00000: cannot be written \(.*free space"
    with limit_file_size(4096), pytest.raises(UserError, match=message):
        writer.fill(PASSAGES[:10], lambda texts: np.zeros((10, 4096), dtype=np.float32))
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["identity.json"]


KILL_AT_EVERY_CALL = '''
import os, shutil, signal, sys
from pathlib import Path
import numpy as np
import pyarrow
from small_data import contents
from contaccum import files, work
from contaccum.retrieval.store import StoreWriter

def fill(folder, kill_at):
    """Fill a store, and kill the process before its call number `kill_at` that changes the disk."""
    num_calls = 0
    def counted(function):
        def call(*args, **kwargs):
            nonlocal num_calls
            num_calls += 1
            if num_calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call
    files.flush = work.flush = lambda path: None  # the page cache outlives a killed process
    calls = [(os, "replace"), (os, "rename"), (os, "mkdir"), (os, "unlink"), (np, "save")]
    for module, name in calls:
        setattr(module, name, counted(getattr(module, name)))
    writer = StoreWriter(folder, {"dtype": "float32", "shard_size": 3})
    num_texts = 0
    def encode(texts):
        nonlocal num_texts
        num_texts += len(texts)
        return np.array([[len(text), 1.0] for text in texts], dtype=np.float32)
    assert writer.fill([(f"id-{n}", "", "x" * n) for n in range(5)], encode)
    return num_texts, num_calls

def fill_in_child(folder, kill_at):
    """Fill a store in a child process, which writes its counts; return its exit code."""
    pid = os.fork()
    if pid == 0:
        num_texts, num_calls = fill(folder, kill_at)
        counts_file.write_text(f"{num_texts} {num_calls}")
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)

def read_counts():
    num_texts, num_calls = counts_file.read_text().split()
    return int(num_texts), int(num_calls)

root = Path(sys.argv[1])
counts_file = root / "counts"
pyarrow.array(["a"])  # imports what every child would have to import otherwise
expected = root / "expected"
assert fill_in_child(expected, 0) == 0
num_texts, num_calls = read_counts()
assert num_texts == 5 and num_calls > 15
encoded_again = []
for kill_at in range(1, num_calls + 1):
    folder = root / str(kill_at)
    assert fill_in_child(folder, kill_at) == -signal.SIGKILL
    assert fill_in_child(folder, 0) == 0
    for leftover in folder.glob(".*"):  # the temporary files of the killed process
        shutil.rmtree(leftover)
    assert contents(folder) == contents(expected), kill_at
    num_texts, _ = read_counts()
    encoded_again.append(num_texts)
print(*encoded_again)
'''


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_killed_process_loses_only_the_shard_that_it_was_writing(tmp_path):
    # Run in a process of its own, because it forks and must not have torch's threads.
    command = [sys.executable, "-c", KILL_AT_EVERY_CALL, str(tmp_path)]
    tests = Path(__file__).parents[1]  # where small_data is
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tests)
    assert process.returncode == 0, process.stderr[-2000:]
    # Number of texts that were encoded again after each kill: all 5 at first, then those after the
    # first shard, and none after both shards were written.
    encoded_again = [int(word) for word in process.stdout.split()]
    assert encoded_again == sorted(encoded_again, reverse=True)
    assert set(encoded_again) == {5, 2, 0}
