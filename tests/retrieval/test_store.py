"""A store gives back what was written, row by row, and refuses what it cannot vouch for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from contaccum.errors import DataError, UserError
from contaccum.retrieval.store import EmbeddingStore, StoreWriter

IDENTITY = {"kind": "document", "model": "a" * 64, "similarity": "cos", "dtype": "float32", "shard_size": 10}
ROWS = 25


def embeddings(rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, 4)).astype(np.float32)


PASSAGES = [(f"id-{row}", "", "x" * row) for row in range(ROWS)]


def start(folder: Path, overwrite: bool = False, **changed: Any) -> StoreWriter:
    return StoreWriter(folder, {**IDENTITY, **changed}, overwrite=overwrite)


def encode(texts: list[str]) -> np.ndarray:
    """Row n of `embeddings()` for "x" n times."""
    return embeddings()[[len(text) for text in texts]]


def write(folder: Path, **changed: Any) -> Path:
    """A store of 25 rows in shards of 10, called "id-0" and on."""
    assert start(folder, **changed).fill(PASSAGES, encode)
    return folder


def test_rows_and_ids_come_back_as_they_were_written(tmp_path: Path) -> None:
    store = EmbeddingStore.open(write(tmp_path / "s"))
    assert (len(store), store.dim, store.dtype, store.similarity) == (ROWS, 4, np.float32, "cos")
    for first, stop in [(0, 25), (3, 21), (10, 10), (9, 11), (24, 25)]:
        np.testing.assert_array_equal(store.slice(first, stop), embeddings()[first:stop])
    assert store.ids([24, 0, 10, 9, 0]) == ["id-24", "id-0", "id-10", "id-9", "id-0"]
    assert store.ids([]) == []
    shards = list(store.shards())
    assert [first for first, _, _ in shards] == [0, 10, 20]
    assert [name for _, ids, _ in shards for name in ids.to_pylist()] == [f"id-{row}" for row in range(ROWS)]
    assert all(isinstance(rows, np.memmap) for _, _, rows in shards)
    np.testing.assert_array_equal(np.concatenate([rows for _, _, rows in shards]), embeddings())
    rows = [24, 0, 9, 10, 10]
    np.testing.assert_array_equal(store.take(rows), embeddings()[rows])
    assert store.take([]).shape == (0, 4)
    for rows in ([-1], [25], [0, 99]):
        with pytest.raises(IndexError, match="0 to 24"):
            store.ids(rows)
        with pytest.raises(IndexError):
            store.slice(min(rows), max(rows) + 1)


def test_float16_halves_the_disk_and_slices_are_float32(tmp_path: Path) -> None:
    store = EmbeddingStore.open(write(tmp_path / "s", dtype="float16"))
    assert store.slice(0, 25).dtype == np.float32
    np.testing.assert_allclose(store.slice(0, 25), embeddings(), rtol=2**-11)
    assert next(store.shards())[2].dtype == np.float16


def test_a_number_beyond_float16_is_refused(tmp_path: Path) -> None:
    writer = start(tmp_path / "s", dtype="float16")
    with pytest.raises(UserError, match="--dtype float32"):
        writer.write_shard(0, ["a"], np.full((1, 4), 7e4, dtype=np.float32), "f")
    assert writer.read_shard(0) is None


def spoil(folder: Path, what: str) -> None:
    about, shard = json.loads((folder / "store.json").read_text()), folder / "shard-00001"
    if what == "pickled":
        np.save(shard / "embeddings.npy", np.array([[{}] * 4] * 10, dtype=object), allow_pickle=True)
    elif what == "other shape":
        np.save(shard / "embeddings.npy", embeddings(10).reshape(5, 8))
    elif what == "other dtype":
        np.save(shard / "embeddings.npy", embeddings(10).view(np.int32))
    elif what == "no npy":
        (shard / "embeddings.npy").write_bytes(b"x" * 288)
    elif what == "no ids":
        (shard / "ids.arrow").write_bytes(b"x" * 600)
    elif what == "other ids":
        table = pa.table({"name": ["a"] * 10})
        with pa.OSFile(str(shard / "ids.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    elif what == "too few ids":
        (shard / "ids.arrow").write_bytes((folder / "shard-00002" / "ids.arrow").read_bytes())
    about |= {"later version": {"version": 2}, "other json": {"format": "a"}, "unfinished": {"finished": False}}.get(
        what, {}
    )
    if what == "no shards":
        del about["shards"]
    (folder / "store.json").write_text("{" if what == "no json" else json.dumps(about))
    if what == "gone":
        (shard / "embeddings.npy").unlink()
    elif what == "cut off":
        os.truncate(shard / "embeddings.npy", 150)


FILES = ["gone", "cut off", "pickled", "other shape", "other dtype", "no npy", "no ids", "other ids", "too few ids"]
JSON = ["no json", "other json", "later version", "no shards", "unfinished"]


@pytest.mark.parametrize("what", [*FILES, *JSON])
def test_what_is_broken_or_foreign_is_refused_in_one_line(tmp_path: Path, what: str) -> None:
    folder = write(tmp_path / "s")
    spoil(folder, what)
    with pytest.raises(DataError) as refused:
        store = EmbeddingStore.open(folder)
        store.slice(0, 25)
    assert str(folder) in str(refused.value) and "\n" not in str(refused.value)


def test_what_is_there_is_gone_on_with_if_it_is_the_same_and_left_alone_otherwise(tmp_path: Path) -> None:
    folder = write(tmp_path / "s")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert start(folder).fill(PASSAGES, encode)
    for changed, told in [
        ({"model": "b" * 64}, "model aaaaaaaaaaaa, here bbbbbbbbbbbb"),
        ({"dtype": "float16"}, "dtype float32, here float16"),
        ({"kind": "query", "shard_size": 5}, "kind document, here query ("),
    ]:
        with pytest.raises(UserError, match="--overwrite") as refused:
            start(folder, **changed)
        assert told in str(refused.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    start(folder, overwrite=True, dtype="float16")
    assert [path.name for path in folder.iterdir()] == ["store.json"]


def test_a_folder_of_other_things_is_never_written_to_or_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"thesis\.txt"):
            start(tmp_path, overwrite)
    with pytest.raises(UserError, match="is a file"):
        start(tmp_path / "thesis.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_shard_is_encoded_by_one_rank_and_the_last_one_finishes_the_store(tmp_path: Path, ranks: int) -> None:
    start(tmp_path / "s")
    encoded: list[int] = []
    done = []
    for rank in range(ranks):
        writer = StoreWriter(tmp_path / "s", IDENTITY, first=False)
        done.append(writer.fill(PASSAGES, lambda t: encoded.append(len(t)) or encode(t), rank, ranks))
        if not done[-1]:
            with pytest.raises(DataError, match="not finished"):
                EmbeddingStore.open(tmp_path / "s")
    assert sum(encoded) == ROWS and done[-1] and sum(done) == max(1, ranks - 2)
    np.testing.assert_array_equal(EmbeddingStore.open(tmp_path / "s").slice(0, ROWS), embeddings())
    with pytest.raises(UserError, match="made otherwise"):
        StoreWriter(tmp_path / "s", {**IDENTITY, "shard_size": 3}, first=False)
    with pytest.raises(UserError, match="all ranks see"):
        StoreWriter(tmp_path / "elsewhere", IDENTITY, first=False)


@pytest.mark.parametrize("change", ["a text", "an id", "a title", "fewer", "more"])
def test_a_store_of_another_corpus_is_refused_and_left_alone(tmp_path: Path, change: str) -> None:
    folder = write(tmp_path / "s")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    changed = {"a text": ("id-3", "", "xx"), "an id": ("other", "", "xxx"), "a title": ("id-3", "x", "xxx")}
    passages = [*PASSAGES[:3], changed.get(change, PASSAGES[3]), *PASSAGES[4:]]
    passages = {"fewer": passages[:-1], "more": [*passages, *(("new", "", "x"),) * 6]}.get(change, passages)
    with pytest.raises(DataError, match="another corpus"):
        start(folder).fill(passages, lambda texts: pytest.fail("encoded"))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_shard_that_is_gone_is_encoded_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "s")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    shutil.rmtree(folder / "shard-00001")
    found: list[int] = []
    assert start(folder).fill(PASSAGES, encode, on_found=found.append)
    assert found == [10, 5] and {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_store_of_an_earlier_version_is_read_and_gone_on_with(tmp_path: Path) -> None:
    folder = write(tmp_path / "s")
    about = json.loads((folder / "store.json").read_text())
    about["software"].append({"versions": {"contaccum": "0.1"}, "git_commit": None})
    for number, shard in enumerate(about["shards"]):
        shard["bytes"] = {"embeddings.npy": 288, "ids.arrow": 600}
        path = folder / f"shard-0000{number}" / "shard.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "bytes": shard["bytes"]}))
    (folder / "store.json").write_text(json.dumps(about))
    np.testing.assert_array_equal(EmbeddingStore.open(folder).slice(0, ROWS), embeddings())
    assert start(folder).fill(PASSAGES, lambda texts: pytest.fail("encoded"))


KILLED = '''
import os, signal, sys
from pathlib import Path
import numpy as np
import pyarrow
from contaccum import files
from contaccum.retrieval import store
from contaccum.retrieval.store import StoreWriter

def fill(folder, kill_at):
    """Every call that changes the disk counts; before number `kill_at` the process is killed."""
    calls = 0
    def counted(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call
    files._flush = lambda path: None  # what is in the page cache outlives a process
    store.git_commit = lambda: None
    for module, name in [(os, "replace"), (os, "rename"), (os, "mkdir"), (os, "unlink"), (np, "save")]:
        setattr(module, name, counted(getattr(module, name)))
    writer = StoreWriter(folder, {"dtype": "float32", "shard_size": 3})
    texts = []
    def stub(part):
        texts.extend(part)
        return np.array([[len(text), 1.0] for text in part], dtype=np.float32)
    assert writer.fill([(f"id-{n}", "", "x" * n) for n in range(8)], stub)
    return len(texts), calls

def in_child(*args):
    pid = os.fork()
    if not pid:
        texts, calls = fill(*args)
        Path(sys.argv[1], "said").write_text(f"{texts} {calls}")
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

def visible(found):
    return {name: data for name, data in found.items() if not name.split("/")[0].startswith(".")}

pyarrow.array(["a"])  # what this imports need not be imported by every child
whole = Path(sys.argv[1], "whole")
assert in_child(whole, 0) == 0
texts, calls = map(int, Path(sys.argv[1], "said").read_text().split())
assert texts == 8 and calls > 20
again = []
for kill_at in range(1, calls + 1):
    folder = Path(sys.argv[1], str(kill_at))
    assert in_child(folder, kill_at) == -signal.SIGKILL
    assert in_child(folder, 0) == 0
    assert visible(content(folder)) == content(whole), kill_at
    again.append(int(Path(sys.argv[1], "said").read_text().split()[0]))
print(*again)
'''


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_process_killed_at_any_instant_loses_the_shard_in_work_alone(tmp_path: Path) -> None:
    # A process of its own: it forks, and has no threads of torch.
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    again = [int(word) for word in done.stdout.split()]
    # texts that were encoded again: all 8, then those after the first shard, ... and none once all were written
    assert again == sorted(again, reverse=True) and set(again) == {8, 5, 2, 0}
