"""A store gives back what was written, row by row, and refuses what it cannot vouch for."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_data import contents

from contaccum.errors import DataError, UserError
from contaccum.retrieval.store import EmbeddingStore, StoreWriter

IDENTITY = {
    "kind": "document",
    "model": "a" * 64,
    "similarity": "cos",
    "dtype": "float32",
    "shard_size": 10,
}
ROWS = 25
EMBEDDINGS = np.random.default_rng(0).standard_normal((ROWS, 4)).astype(np.float32)
PASSAGES = [(f"id-{row}", "", "x" * row) for row in range(ROWS)]


def start(folder: Path, overwrite: bool = False, **changed: Any) -> StoreWriter:
    return StoreWriter(folder, {**IDENTITY, **changed}, overwrite=overwrite)


def encode(texts: list[str]) -> np.ndarray:
    """Row n of `EMBEDDINGS` for "x" n times."""
    return EMBEDDINGS[[len(text) for text in texts]]


def nothing(texts: list[str]) -> np.ndarray:
    raise AssertionError("encoded")


def write(folder: Path, **changed: Any) -> Path:
    """A store of 25 rows in shards of 10, called "id-0" and on."""
    assert start(folder, **changed).fill(PASSAGES, encode)
    return folder


def test_rows_and_ids_come_back_as_they_were_written(tmp_path):
    store = EmbeddingStore.open(write(tmp_path / "s"))
    assert (len(store), store.shape, store.dtype, store.similarity) == (
        ROWS,
        (ROWS, 4),
        "float32",
        "cos",
    )
    for part in (
        slice(None),
        slice(3, 21),
        slice(10, 10),
        slice(9, 11),
        slice(24, 99),
        [24, 0, 9, 10, 10],
        [],
    ):
        np.testing.assert_array_equal(store[part], EMBEDDINGS[part])
    assert store.ids([24, 0, 10, 9, 0]) == ["id-24", "id-0", "id-10", "id-9", "id-0"]
    for rows in ([-1], [25], [0, 99]):
        for read in (store.ids, store.__getitem__):
            with pytest.raises(IndexError, match="0 to 24"):
                read(rows)


def spoil(folder: Path, what: str) -> None:
    about, shard = folder / "store.json", folder / "shard-00001"
    if what == "gone":
        shutil.rmtree(shard)
    elif what == "cut off":
        os.truncate(shard / "embeddings.npy", 150)
    elif what == "pickled":
        np.save(
            shard / "embeddings.npy", np.array([[{}] * 4] * 10, dtype=object), allow_pickle=True
        )
    elif what == "no ids":
        (shard / "ids.arrow").write_bytes(b"x" * (shard / "ids.arrow").stat().st_size)
    elif what == "ids of another":
        shutil.copy(folder / "shard-00002" / "ids.arrow", shard)
    else:
        changed = {"the version before": {"version": 1}, "unfinished": {"finished": False}}
        about.write_text(json.dumps({**json.loads(about.read_text()), **changed[what]}))


@pytest.mark.parametrize(
    "what", ["pickled", "no ids", "ids of another", "the version before", "unfinished"]
)
def test_what_is_broken_or_foreign_is_refused_in_one_line(tmp_path, what):
    folder = write(tmp_path / "s")
    spoil(folder, what)
    with pytest.raises(DataError) as refused:
        EmbeddingStore.open(folder)[:]
        EmbeddingStore.open(folder).ids(range(ROWS))
    assert str(folder) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("what", ["gone", "cut off"])
def test_a_shard_that_is_gone_or_cut_off_is_found_at_open_and_encoded_again(tmp_path, what):
    folder = write(tmp_path / "s")
    before = contents(folder)
    spoil(folder, what)
    with pytest.raises(DataError, match="from row 10 on is missing or cut off"):
        EmbeddingStore.open(folder)
    encoded: list[int] = []
    assert start(folder).fill(PASSAGES, lambda texts: encoded.append(len(texts)) or encode(texts))
    assert encoded == [10] and contents(folder) == before


def test_what_is_there_is_gone_on_with_if_it_is_the_same_and_left_alone_otherwise(tmp_path):
    folder = write(tmp_path / "s")
    before = contents(folder)
    assert start(folder).fill(PASSAGES, nothing)
    for changed, told in [
        ({"model": "b" * 64}, "another model"),
        ({"kind": "query", "shard_size": 5}, "another kind and shard_size"),
    ]:
        with pytest.raises(UserError, match=rf"{told} \(.*--overwrite"):
            start(folder, **changed)
    assert contents(folder) == before
    start(folder, overwrite=True, dtype="float16")
    assert [path.name for path in folder.iterdir()] == ["store.json"]


def test_a_folder_of_other_things_is_never_written_to_or_emptied(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    for folder in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(UserError, match="exists and is not a store"):
            start(folder, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_shard_is_encoded_by_one_rank_and_the_last_one_finishes_the_store(tmp_path, ranks):
    encoded: list[int] = []
    done = []
    for rank in range(ranks):
        writer = start(tmp_path / "s")
        done.append(
            writer.fill(PASSAGES, lambda t: encoded.append(len(t)) or encode(t), rank, ranks)
        )
        if not done[-1]:
            with pytest.raises(DataError, match="not finished"):
                EmbeddingStore.open(tmp_path / "s")
    assert sum(encoded) == ROWS and done[-1] and sum(done) == max(1, ranks - 2)
    np.testing.assert_array_equal(EmbeddingStore.open(tmp_path / "s")[:], EMBEDDINGS)


def test_two_processes_that_encode_the_same_corpus_share_the_shards(tmp_path, monkeypatch):
    whole = contents(write(tmp_path / "whole"))
    folder, save = tmp_path / "s", np.save
    first, second = start(folder), start(folder)
    encoded: list[int] = []

    def interleaved(*args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(np, "save", save)
        assert second.fill(PASSAGES, encode)  # while the first one writes its first shard
        save(*args, **kwargs)

    monkeypatch.setattr(np, "save", interleaved)
    assert first.fill(PASSAGES, lambda texts: encoded.append(len(texts)) or encode(texts))
    assert encoded == [10] and contents(folder) == whole
    monkeypatch.setattr(np, "save", interleaved)
    second = start(folder, overwrite=True)
    with pytest.raises(DataError, match="another corpus"):
        start(folder).fill([("other", "", "x"), *PASSAGES[1:]], encode)


def test_two_processes_may_overwrite_the_same_store_at_once(tmp_path, monkeypatch):
    folder = write(tmp_path / "s")
    remove = shutil.rmtree

    def interleaved(path: Path, **kwargs: Any) -> None:
        monkeypatch.setattr("contaccum.retrieval.store.shutil.rmtree", remove)
        start(folder, overwrite=True)
        remove(path, **kwargs)

    monkeypatch.setattr("contaccum.retrieval.store.shutil.rmtree", interleaved)
    writer = start(folder, overwrite=True)
    assert writer.fill(PASSAGES, encode)
    np.testing.assert_array_equal(EmbeddingStore.open(folder)[:], EMBEDDINGS)


@pytest.mark.parametrize("change", ["a text", "an id", "a title", "fewer", "more"])
def test_a_store_of_another_corpus_is_refused_and_left_alone(tmp_path, change):
    folder = write(tmp_path / "s", shard_size=5)  # which has no row too few for a shard
    before = contents(folder)
    changed = {
        "a text": ("id-3", "", "xx"),
        "an id": ("other", "", "xxx"),
        "a title": ("id-3", "x", "xxx"),
    }
    passages = [*PASSAGES[:3], changed.get(change, PASSAGES[3]), *PASSAGES[4:]]
    passages = {"fewer": passages[:-5], "more": [*passages, *(("new", "", "x"),) * 6]}.get(
        change, passages
    )
    with pytest.raises(DataError, match="another corpus"):
        start(folder, shard_size=5).fill(passages, nothing)
    assert contents(folder) == before


KILLED = '''
import os, signal, sys
from pathlib import Path
import numpy as np
import pyarrow
from contaccum import files
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
    files.git_commit = lambda: None
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
def test_a_process_killed_at_any_instant_loses_the_shard_in_work_alone(tmp_path):
    # A process of its own: it forks, and has no threads of torch.
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    again = [int(word) for word in done.stdout.split()]
    # texts that were encoded again: all 8, then those after the first shard, ... and none once all were written
    assert again == sorted(again, reverse=True) and set(again) == {8, 5, 2, 0}
