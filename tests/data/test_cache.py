"""Invariants of the cache: read once, whole or not there, never older than its source, little memory."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contaccum.data import cache, load_training_data, pairs
from contaccum.errors import DataError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rows"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each record that is read from a source."""
    seen: list[str] = []
    read = pairs.read_records

    def counted(*args: Any, **kwargs: Any) -> Any:
        for record in read(*args, **kwargs):
            seen.append(record.query)
            yield record

    monkeypatch.setattr(pairs, "read_records", counted)
    return seen


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


ROWS = [{"query": f"q{i}", "positives": [f"p{i}", "p"], "negatives": list("abcd")[: i % 4]} for i in range(9)]


def test_a_second_run_opens_what_the_first_one_stored(tmp_path: Path, folder: Path, reads: list[str]) -> None:
    path = write(tmp_path / "a.jsonl", *ROWS, "broken")
    settings: dict[str, Any] = {"num_hard_negatives": 2, "on_bad_record": "skip"}
    first = load_training_data(path, **settings)
    assert len(reads) == 9
    second = load_training_data(path, **settings)
    assert len(reads) == 9
    assert first.fingerprint == second.fingerprint and first.report.to_dict() == second.report.to_dict()
    assert first.report.summary() == second.report.summary() and "1 broken JSON" in second.report.summary()
    assert list(first.dataset) == list(second.dataset)
    assert np.array_equal(first.known_positives, second.known_positives)
    assert all(Path(file["filename"]).is_relative_to(folder) for file in second.dataset.cache_files)
    assert [name.suffix for name in folder.iterdir()] == [""]


def test_every_setting_has_its_own_rows(tmp_path: Path, folder: Path) -> None:
    path = write(tmp_path / "a.jsonl", *ROWS)
    settings: list[dict[str, Any]] = [
        {},
        {"positives": "all"},
        {"num_hard_negatives": 2},
        {"num_hard_negatives": 2, "missing_negatives": "drop"},
        {"num_hard_negatives": 2, "negatives_from": 2},
        {"num_hard_negatives": 2, "draw_negatives": False},
        {"title_separator": "|"},
        {"columns": {"query": "query"}},
        {"on_bad_record": "skip"},
    ]
    for options in settings:
        load_training_data(path, **options)
    assert len(list(folder.iterdir())) == len(settings)


def test_a_source_that_changed_is_read_again(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "a.jsonl"
    for name in "abcdefgh":  # at once, and of the same size
        assert load_training_data(write(path, {"query": name, "positive": "p"})).dataset["query"][:] == [name]
    os.utime(path, (1, 1))
    assert load_training_data(path).dataset["query"][:] == ["h"]
    (tmp_path / "beir" / "qrels").mkdir(parents=True)
    write(tmp_path / "beir" / "corpus.jsonl", {"_id": "d", "text": "t"})
    write(tmp_path / "beir" / "queries.jsonl", {"_id": "q", "text": "q"}, {"_id": "r", "text": "r"})
    for query in "qr":
        (tmp_path / "beir" / "qrels" / "train.tsv").write_text(f"{query}\td\t1\n")
        assert load_training_data(tmp_path / "beir").dataset["query"][:] == [query]


def test_rows_that_were_damaged_or_cleared_are_made_again(tmp_path: Path, folder: Path, reads: list[str]) -> None:
    path = write(tmp_path / "a.jsonl", *ROWS)
    expected = load_training_data(path).dataset.to_list()
    (stored,) = folder.iterdir()
    for damage in (
        lambda: (stored / "rows.arrow").write_bytes(b"ARROW"),
        lambda: (stored / "about.json").write_text("{"),
        lambda: (stored / "lists.arrow").unlink(),
        lambda: shutil.rmtree(tmp_path / "cache"),
    ):
        damage()
        reads.clear()
        assert load_training_data(path).dataset.to_list() == expected and len(reads) == 9
        assert [name.name for name in folder.iterdir()] == [stored.name]


def test_two_processes_that_store_the_same_keep_one(tmp_path: Path, folder: Path) -> None:
    def write_meanwhile(partial: Path) -> dict[str, int]:
        cache.stored("key", lambda other: {"who": 2})
        return {"who": 1}

    assert cache.stored("key", write_meanwhile) == (folder / "key", {"who": 2})
    assert [name.name for name in folder.iterdir()] == ["key"]


def test_nothing_stays_of_rows_that_were_not_finished(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:10: broken JSON"):
        load_training_data(write(tmp_path / "a.jsonl", *ROWS, "{"))
    assert list(folder.iterdir()) == []
    killed, at_work = folder / "k.1.partial", folder / "k.2.partial"
    for partial in (killed, at_work):
        partial.mkdir()
    os.utime(killed, (1, 1))
    load_training_data(write(tmp_path / "b.jsonl", *ROWS))
    assert not killed.exists() and at_work.exists()


def test_a_cache_that_cannot_be_written_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "file")
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"cannot be stored: Not a directory .*CONTACCUM_CACHE") as caught:
        load_training_data(write(tmp_path / "a.jsonl", *ROWS))
    assert "\n" not in str(caught.value)


FULL_DISK = """
import resource, sys
from contaccum.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))  # a file that grows no further, as on a full disk
sys.exit(main(["train", "--model=none", "--train_data", sys.argv[1], "--output_dir", sys.argv[2]]))
"""


@pytest.mark.parametrize("what", ["rows", "lists", "known"])
def test_a_full_disk_ends_a_run_with_one_line_and_leaves_nothing(tmp_path: Path, folder: Path, what: str) -> None:
    path = tmp_path / "a.jsonl"
    # What grows: texts; what is drawn from, short beside them; pairs of 16 bytes with a text of one character.
    long = {"rows": "x" * 100, "lists": "", "known": ""}[what]
    rows: Any = [{"query": f"{i}{long}", "positives": f"p{i}"} for i in range(3000)]
    if what == "lists":
        rows = [{"query": f"{i}", "positives": ["p", "y" * 300]} for i in range(3000)]
    if what == "known":
        rows = [{"query": "q", "positives": [f"{i}" for i in range(15_000)]}]
    write(path, *rows)
    command = [sys.executable, "-c", FULL_DISK, str(path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not (tmp_path / "out").exists(), done.stderr
    assert done.stderr.strip().startswith(f"contaccum: error: {folder.parent}: the data cannot be stored: File too")
    assert len(done.stderr.strip().splitlines()) == 1 and list(folder.iterdir()) == []


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("CONTACCUM_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.cache_folder() == Path("/home/somebody/.cache/contaccum")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache.cache_folder() == Path("/caches/contaccum")
    monkeypatch.setenv("CONTACCUM_CACHE", "/named")
    assert cache.cache_folder() == Path("/named")


MEMORY = """
import sys, pyarrow, datasets
from contaccum.data import load_training_data
load_training_data(sys.argv[1])  # what is loaded once, whatever the size of the data
def peak():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["VmHWM"].split()[0]) * 1024
before = peak()
data = load_training_data(sys.argv[2])
print(len(data.dataset), peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from /proc")
def test_memory_grows_by_less_than_eighty_bytes_for_each_pair(tmp_path: Path, folder: Path) -> None:
    def generate(name: str, n: int) -> Path:
        with gzip.open(tmp_path / name, "wt", compresslevel=1) as file:
            for i in range(n):
                text = json.dumps({"query": f"question {i} about something", "positive": f"passage {i} says " * 8})
                file.write(text + "\n")
        return tmp_path / name

    small, large = generate("small.jsonl.gz", 25_000), generate("large.jsonl.gz", 300_000)
    command = [sys.executable, "-c", MEMORY, str(small), str(large)]
    rows, grown = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert rows == 300_000
    # At this rate ten million pairs take less than 0.8 GB; their texts alone are 2 GB. It is less than half as much.
    assert grown / (rows - 25_000) < 80, f"{grown / rows:.0f} bytes for each pair"
