"""The cache: each record is stored once and completely, is never stale, and takes little memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from data_files import put_lines

from contaccum.data import load_training_data
from contaccum.errors import DataError


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Set an empty cache, and return its folder of data sets."""
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "datasets"


# Nine records with two positives and up to three negatives
ROWS = [
    {"query": f"q{i}", "positives": [f"p{i}", "p"], "negatives": ["a", "b", "c"][: i % 4]}
    for i in range(9)
]


def count_entries(folder: Path) -> int:
    return len(list(folder.rglob("*.arrow")))


def test_a_second_run_opens_what_the_first_one_stored(tmp_path, folder):
    """It does not see other records of the same size and time in the file."""
    path = put_lines(tmp_path / "a.jsonl", *ROWS, end="broken\n")
    state = path.stat()
    settings = {"num_hard_negatives": 2, "on_bad_record": "skip"}
    first = load_training_data(path, **settings)
    put_lines(path, *ROWS[::-1], end="broken\n")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    second = load_training_data(path, **settings)
    assert second.fingerprint == first.fingerprint
    assert second.report == first.report
    assert "1 broken JSON" in second.report.summary()
    assert list(second.dataset) == list(first.dataset)


def test_texts_are_stored_once_for_all_sampling_settings(tmp_path, folder):
    path = put_lines(tmp_path / "a.jsonl", *ROWS)
    for positives in ("draw", "first", "all"):
        load_training_data(path, positives=positives)
    for missing_negatives in ("fill", "drop"):
        load_training_data(path, num_hard_negatives=2, missing_negatives=missing_negatives)
    assert count_entries(folder) == 1
    stored = b"".join(file.read_bytes() for file in folder.rglob("*.arrow"))
    assert stored.count(b"q7") == 1


def test_settings_that_change_the_records_have_their_own_entries(tmp_path, folder):
    path = put_lines(tmp_path / "a.jsonl", *ROWS)
    load_training_data(path)
    load_training_data(path, columns={"query": "query"})
    load_training_data(path, on_bad_record="skip")
    assert count_entries(folder) == 3


def test_a_source_that_changed_is_read_again(tmp_path, folder):
    path = tmp_path / "a.jsonl"
    for number in range(3):  # the files have the same size
        put_lines(path, {"query": str(number), "positive": "p"})
        os.utime(path, (number, number))
        assert load_training_data(path).dataset[0]["query"] == str(number)


def test_an_unfinished_entry_is_not_used(tmp_path, folder):
    path = put_lines(tmp_path / "a.jsonl", *ROWS, end="{\n")
    for _ in range(2):
        with pytest.raises(DataError, match=r"a\.jsonl:10: broken JSON"):
            load_training_data(path)
    assert list(folder.rglob("*.arrow")) == []


def test_a_cache_that_cannot_be_written_is_one_clear_line(tmp_path, monkeypatch):
    put_lines(tmp_path / "file")  # where a folder is needed
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"cannot be stored: .*Not a directory.*CONTACCUM_CACHE"):
        load_training_data(put_lines(tmp_path / "a.jsonl", *ROWS))


# argv: a small data set and a large one. The program prints the number of pairs of the large one,
# and the number of bytes of memory that it took. Mapped files are not in RssAnon.
MEMORY_METER = """
import sys
from contaccum.data import load_training_data
load_training_data(sys.argv[1]).dataset[0]  # imports are not counted
def measure_memory():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon:"):
            kibibytes = int(line.split()[1])
            return kibibytes * 1024
before = measure_memory()
data = load_training_data(sys.argv[2])
data.dataset[0]
print(len(data.dataset), measure_memory() - before)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
def test_memory_grows_by_few_bytes_for_each_pair(tmp_path, folder):
    records = [{"query": f"question {i}", "positive": f"passage {i} " * 30} for i in range(60_000)]
    # The small set is loaded first, so that the imports are not measured.
    small = put_lines(tmp_path / "small.jsonl", *records[:2_000])
    large = put_lines(tmp_path / "large.jsonl", *records)
    command = [sys.executable, "-c", MEMORY_METER, str(small), str(large)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    num_pairs, num_bytes = map(int, output.split())
    bytes_per_pair = num_bytes / num_pairs
    assert num_pairs == 60_000
    # The texts of a pair alone have about 400 bytes.
    assert bytes_per_pair < 150, f"{bytes_per_pair:.0f} bytes for each pair"
