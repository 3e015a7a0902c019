"""The cache: each record is stored once and completely, is never stale, and takes little memory."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from data_files import put_lines

from contaccum.data import load_training_data
from contaccum.data.readers import Source
from contaccum.errors import ConfigError, DataError


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "datasets"


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """The queries of all records that are read from sources, in order."""
    queries: list[str] = []
    read = Source.records

    def counted(*args: Any, **kwargs: Any) -> Any:
        for record in read(*args, **kwargs):
            queries.append(record.query)
            yield record

    monkeypatch.setattr(Source, "records", counted)
    return queries


ROWS = [
    {"query": f"q{i}", "positives": [f"p{i}", "p"], "negatives": list("abcd")[: i % 4]}
    for i in range(9)
]


def test_a_second_run_opens_what_the_first_one_stored(tmp_path, folder, reads):
    path = put_lines(tmp_path / "a.jsonl", *ROWS, end="broken\n")
    first, second = (
        load_training_data(path, num_hard_negatives=2, on_bad_record="skip") for _ in range(2)
    )
    assert len(reads) == 9
    assert first.fingerprint == second.fingerprint and first.report == second.report
    assert "1 broken JSON" in second.report.summary() and list(first.dataset) == list(
        second.dataset
    )


def test_texts_are_stored_once_for_all_sampling_settings(tmp_path, folder, reads):
    path = put_lines(tmp_path / "a.jsonl", *ROWS)
    taken: list[dict[str, Any]] = [
        {},
        {"positives": "all"},
        {"positives": "first"},
        {"num_hard_negatives": 2},
        {"num_hard_negatives": 2, "missing_negatives": "drop"},
        {"num_hard_negatives": 2, "negatives_from": 2},
    ]
    for options in taken:
        load_training_data(path, **options)
    assert len(list(folder.iterdir())) == 1 and len(reads) == 9
    assert sum(file.read_bytes().count(b"q7") for file in folder.rglob("*.arrow")) == 1
    for options in ({"columns": {"query": "query"}}, {"on_bad_record": "skip"}):
        load_training_data(path, **options)  # these settings change the records
    assert len(list(folder.iterdir())) == 3


def test_a_source_that_changed_is_read_again(tmp_path, folder):
    path = tmp_path / "a.jsonl"
    for number in range(3):  # of the same size
        put_lines(path, {"query": str(number), "positive": "p"})
        os.utime(path, (number, number))
        assert load_training_data(path).dataset[0]["query"] == str(number)


def test_entries_unused_for_thirty_days_are_removed(tmp_path, folder, monkeypatch):
    """An entry that was not opened for 30 days is removed when another one is stored."""
    paths = [put_lines(tmp_path / f"{i}.jsonl", *ROWS[i:]) for i in range(4)]

    def age(entry: Path, days: float) -> None:
        then = time.time() - days * 86_400
        for file in (entry, entry / "about.json"):
            os.utime(file, (then, then))

    load_training_data(paths[0])
    (old,) = folder.iterdir()
    load_training_data(paths[1])
    (opened,) = set(folder.iterdir()) - {old}
    age(old, 31)
    age(opened, 29)
    load_training_data(paths[2])
    assert not old.exists() and opened.exists()
    age(opened, 31)
    load_training_data(paths[1])  # opening an entry marks it as used
    load_training_data(paths[3])
    assert opened.exists()
    monkeypatch.setenv("CONTACCUM_CACHE_DAYS", "0.5")
    age(opened, 1)
    load_training_data(paths[0])
    assert not opened.exists()
    monkeypatch.setenv("CONTACCUM_CACHE_DAYS", "0")
    assert len(load_training_data(paths[1]).dataset) == 8
    assert len(list(folder.iterdir())) == 1


def test_cache_days_that_are_no_number_are_refused_before_reading(
    tmp_path, folder, monkeypatch, reads
):
    monkeypatch.setenv("CONTACCUM_CACHE_DAYS", "30d")
    with pytest.raises(ConfigError, match="CONTACCUM_CACHE_DAYS is '30d': set it to a number"):
        load_training_data(put_lines(tmp_path / "a.jsonl", *ROWS))
    assert reads == []


TWO = """
import sys, time
from pathlib import Path
from contaccum.data import load_training_data, readers
read = readers.Source.records
def slow(*args, **kwargs):
    for number, record in enumerate(read(*args, **kwargs)):
        if number == 0:
            (Path(sys.argv[2]) / f"writes-{sys.argv[3]}").touch()
        if number < 20:
            time.sleep(0.05)
        yield record
readers.Source.records = slow
(Path(sys.argv[2]) / f"ready-{sys.argv[3]}").touch()
while not (Path(sys.argv[2]) / "go").exists():
    time.sleep(0.01)
print(load_training_data(sys.argv[1]).fingerprint)
"""


@pytest.mark.long
def test_two_processes_that_start_at_once_share_one_entry(tmp_path, folder):
    path = put_lines(
        tmp_path / "a.jsonl", *[{"query": f"q{i}", "positive": f"p{i}"} for i in range(50)]
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", TWO, path, tmp_path, str(number)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    while len(list(tmp_path.glob("ready-*"))) < 2:
        assert all(process.poll() is None for process in started)
        time.sleep(0.01)
    (tmp_path / "go").touch()
    printed = {process.communicate()[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0]
    assert printed == {load_training_data(path).fingerprint}
    assert len(list(tmp_path.glob("writes-*"))) == 1 and len(list(folder.iterdir())) == 1


def test_an_unfinished_entry_is_not_used(tmp_path, folder):
    path = put_lines(tmp_path / "a.jsonl", *ROWS, end="{\n")
    for _ in range(2):
        with pytest.raises(DataError, match=r"a\.jsonl:10: broken JSON"):
            load_training_data(path)
    assert not list(folder.rglob("*.arrow")) and not list(folder.rglob("about.json"))


def test_a_cache_that_cannot_be_written_is_one_clear_line(tmp_path, monkeypatch):
    put_lines(tmp_path / "file")
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"cannot be stored: .*Not a directory.*CONTACCUM_CACHE"):
        load_training_data(put_lines(tmp_path / "a.jsonl", *ROWS))


MEMORY = """
import resource, sys
from contaccum.data import load_training_data
load_training_data(sys.argv[1]).dataset[0]  # imports are not counted
def anonymous():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["RssAnon"].split()[0]) * 1024
before = anonymous()
data = load_training_data(sys.argv[2])
data.dataset[0]
print(len(data.dataset), anonymous() - before)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
def test_memory_grows_by_few_bytes_for_each_pair(tmp_path, folder):
    records = [{"query": f"question {i}", "positive": f"passage {i} " * 30} for i in range(60_000)]
    small = put_lines(tmp_path / "small.jsonl", *records[:2_000])
    large = put_lines(tmp_path / "large.jsonl", *records)
    command = [sys.executable, "-c", MEMORY, str(small), str(large)]
    rows, grown = map(
        int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    )
    # The texts alone take 400 bytes for each.
    assert rows == 60_000 and grown / rows < 150, f"{grown / rows:.0f} bytes for each pair"
