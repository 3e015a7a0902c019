"""Invariants of streams: rows and draws of data that is stored, one order, any place to go on from, little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pytest

from contaccum.data import arrow_tables, load_training_data
from contaccum.data.draws import text_ids
from contaccum.data.stream_batches import STREAM_FILE, StreamedSets
from contaccum.data.streams import RowStream, StreamedRow
from contaccum.data.training_sets import parse_training_sets
from contaccum.errors import ConfigError, DataError

N = 57


def records(n: int = N) -> list[dict[str, Any]]:
    """1 to 3 positives each, 2 to 5 negatives, of which the first may be a positive of the query's own."""
    return [
        {
            "query": f"q{i}",
            "positives": [f"p{i}-{k}" for k in range(1 + i % 3)],
            "negatives": [f"p{i}-1", *(f"n{i}-{k}" for k in range(1 + i % 4))],
        }
        for i in range(n)
    ]


def put(path: Path, rows: list[dict[str, Any]], *more: str) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "".join(f"{line}\n" for line in more))
    return str(path)


def stream(path: str, buffer_size: int = 8, on_bad_record: Any = "stop", **settings: Any) -> RowStream:
    (one,) = parse_training_sets([{"path": path, **settings}], {})
    return RowStream(one, on_bad_record, buffer_size)


def texts(row: StreamedRow | dict[str, Any]) -> tuple[str, ...]:
    if isinstance(row, StreamedRow):
        return (row.query, row.positive, *row.negatives)
    return tuple(value for name, value in row.items() if name != "label")


@pytest.mark.parametrize("settings", [{"positives": "all"}, {"num_hard_negatives": 2}, {"draw_negatives": False}])
def test_a_pass_holds_the_rows_that_an_epoch_of_stored_data_draws(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = put(tmp_path / "a.jsonl", records())
    settings = {"num_hard_negatives": 1, **settings}
    stored = load_training_data(path, **settings)
    rows = stream(path, **settings).rows(seed=5)
    assert stored.transform is not None
    seen = []
    for epoch in range(3):
        stored.transform.set_epoch(epoch, seed=5)
        found = [texts(row) for row in islice(rows, len(stored.dataset))]
        assert sorted(found) == sorted(texts(row) for row in stored.dataset)
        seen.append([row[0] for row in found])
    assert len({tuple(order) for order in seen}) == 3


def test_a_row_leaves_its_place_by_the_buffer_and_the_seed_says_where(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", records())

    def order(buffer_size: int, seed: int = 1) -> list[int]:
        return [row.number for row in islice(stream(path, buffer_size).rows(seed), N)]

    assert order(1) == list(range(N))
    assert order(8) == order(8) != order(8, seed=2)
    assert all(place >= number - 8 for place, number in enumerate(order(8)))  # nothing comes before it is read
    assert sorted(order(1000)) == list(range(N)) != order(1000)


@pytest.mark.parametrize("known", [True, False])
def test_a_stream_goes_on_from_any_row(tmp_path: Path, known: bool) -> None:
    path = put(
        tmp_path / "a.jsonl", [{**row, "negatives": row["negatives"][: i % 3]} for i, row in enumerate(records())]
    )
    settings = {"num_hard_negatives": 2}
    straight = list(islice(stream(path, **settings).rows(seed=5), 4 * N))
    for start in (0, 1, 30, N - 1, N, 2 * N + 13, 3 * N):
        resumed = stream(path, **settings)
        resumed.rows_per_pass = N if known else None
        assert list(islice(resumed.rows(5, start), 4 * N - start)) == straight[start:]


def test_passes_that_are_over_are_not_read_again_where_their_length_is_known(tmp_path: Path) -> None:
    resumed = stream(put(tmp_path / "a.jsonl", records()))
    resumed.rows_per_pass = N
    next(resumed.rows(5, 1000 * N + 3))
    assert resumed.turn == 1000 and resumed.report.seen == 3 + 8 + 1


def test_missing_negatives_are_filled_from_nearby_and_never_with_an_own_positive(tmp_path: Path) -> None:
    rows = [{"query": f"q{i}", "positives": [f"p{i}", "shared"], "negatives": ["n"] * (i == 0)} for i in range(30)]
    found = list(islice(stream(put(tmp_path / "a.jsonl", rows), 30, num_hard_negatives=3).rows(0), 90))
    for row in found:
        assert len({*row.negatives}) == 3 and not {f"p{row.query[1:]}", "shared"} & {*row.negatives}
    # In a set of two rows there is one other passage, which then is there three times.
    two = [{"query": f"q{i}", "positive": f"p{i}", "negatives": []} for i in range(2)]
    two[0]["negatives"] = ["n", "n", "n"]
    row = next(r for r in stream(put(tmp_path / "b.jsonl", two), num_hard_negatives=3).rows(0) if r.number == 1)
    assert row.negatives == ["p0", "p0", "p0"]
    alone = [{"query": "q", "positives": ["p"], "negatives": ["n"]}, {"query": "r", "positives": ["r", "p"]}]
    with pytest.raises(DataError, match="no passage near it in the stream that is not a positive"):
        list(islice(stream(put(tmp_path / "c.jsonl", alone), num_hard_negatives=1, positives="first").rows(0), 2))


def test_bad_records_stop_a_stream_or_are_counted_in_each_pass(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", records(20), "broken", '{"query": "no positive"}')
    with pytest.raises(DataError, match=r"a\.jsonl:21: broken JSON"):
        list(islice(stream(path).rows(0), 20))
    skipping = stream(path, on_bad_record="skip")
    for turn in range(2):
        found = list(islice(skipping.rows(0, 20 * turn), 20))
        assert len({row.number for row in found}) == 20
        assert (skipping.report.seen, skipping.report.used, skipping.report.reported) == (22, 20, 2)
    dropping = stream(path, on_bad_record="skip", num_hard_negatives=4, missing_negatives="drop")
    rows = list(islice(dropping.rows(0), 10))
    assert (
        len(rows) == 10 == dropping.report.used and dropping.report.by_reason["too few hard negatives, dropped"] == 10
    )
    assert dropping.report.seen == dropping.report.used + dropping.report.reported


@pytest.mark.parametrize("n", [3, 50])
def test_a_stream_without_any_negative_or_row_is_refused(tmp_path: Path, n: int) -> None:
    bare = [{"query": f"q{i}", "positive": "p"} for i in range(n)]
    read = min(n, 8)  # the buffer: it is not read to its end
    with pytest.raises(DataError, match=rf"num_hard_negatives=1, but none of {read} records has a negative \(mine"):
        next(stream(put(tmp_path / "a.jsonl", bare), num_hard_negatives=1).rows(0))
    with pytest.raises(DataError, match=r"b\.jsonl: no training pairs left to use"):
        next(stream(put(tmp_path / "b.jsonl", [], "broken"), on_bad_record="skip").rows(0))


def test_what_cannot_be_streamed_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        stream(str(tmp_path / "none.jsonl"))
    (tmp_path / "corpus.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=r"streaming=true with data_format=beir: .*held in memory"):
        stream(str(tmp_path))
    with pytest.raises(ConfigError, match="shuffle_buffer_size must be at least 1"):
        stream(put(tmp_path / "a.jsonl", records()), buffer_size=0)


def test_the_fingerprint_of_a_stream_changes_with_any_of_its_files(tmp_path: Path) -> None:
    a, b = (put(tmp_path / f"{name}.jsonl", records()) for name in "ab")

    def fingerprint(*given: Any) -> str:
        return StreamedSets(parse_training_sets(given, {})).fingerprint

    base = fingerprint(a, b)
    assert base == fingerprint(a, b) == fingerprint({"path": a, "weight": 2}, {"path": b, "query_prompt": "q"})
    assert len({base, fingerprint(b, a), fingerprint(a), fingerprint({"path": a, "num_hard_negatives": 1}, b)}) == 4
    os.utime(b, (1, 1))
    touched = fingerprint(a, b)
    put(Path(a), records(N - 1))
    assert len({base, touched, fingerprint(a, b)}) == 3


def sets(tmp_path: Path, *names: str, **settings: Any) -> StreamedSets:
    rows = records()
    paths = [
        put(tmp_path / f"{name}.jsonl", [{**row, "query": f"{name} {row['query']}"} for row in rows]) for name in names
    ]
    return StreamedSets(parse_training_sets([{"path": path, **settings} for path in paths], {}), buffer_size=8)


def test_micro_batches_are_full_of_one_set_and_in_exact_shares(tmp_path: Path) -> None:
    data = sets(tmp_path, "a", "b", num_hard_negatives=1)
    data.begin(batch_size=5, counts=[3, 1], block=16, seed=2)
    batches = list(islice(data, 160))
    for start in range(0, 160, 16):
        had = Counter(batch[0]["dataset_name"] for batch in batches[start : start + 16])
        assert had == {"a": 12, "b": 4}
    for batch in batches:
        assert len(batch) == 5 and {row["query"][0] for row in batch} == {batch[0]["dataset_name"]}
        assert [*batch[0]] == ["query", "positive", "negative_1", "label", "dataset_name"]
    rows = Counter(row["query"] for batch in batches for row in batch if row["dataset_name"] == "a")
    assert {*rows.values()} == {600 // N, 600 // N + 1}  # every row in each pass


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_take_turns_with_the_micro_batches_of_one_order(tmp_path: Path, ranks: int) -> None:
    data = sets(tmp_path, "a", "b")
    data.begin(batch_size=5, counts=[3, 1], seed=2)
    order = list(islice(data, 60))
    for rank in range(ranks):
        data.begin(batch_size=5, counts=[3, 1], seed=2, rank=rank, ranks=ranks)
        assert list(islice(data, 60 // ranks)) == order[rank::ranks]
        data.skip(12)
        skipped = list(islice(data, 60 // ranks))
        assert skipped == [None] * 12 + order[rank::ranks][12:]


def test_ids_are_of_texts_and_an_own_positive_among_the_negatives_is_no_other_passage(tmp_path: Path) -> None:
    data = sets(tmp_path, "a", num_hard_negatives=2, draw_negatives=False)
    data.begin(batch_size=N, counts=[1], seed=2)
    twins = 0
    for row in next(iter(data)):
        positive, other = text_ids([row["positive"], row["negative_2"]])
        own = int(row["query"][3:]) % 3 > 0  # "p{i}-1" is a positive of the record, drawn or not
        twins += own
        assert row["label"][1:] == [positive, positive if own else text_ids([row["negative_1"]])[0], other]
    assert twins == 2 * N // 3


def test_what_a_checkpoint_holds_of_a_stream(tmp_path: Path) -> None:
    data = sets(tmp_path, "a", "b")
    data.begin(batch_size=19, counts=[1, 1], seed=2)
    list(islice(data, 16))
    data.save(tmp_path)
    again = sets(tmp_path, "a", "b")  # written anew: other times, another fingerprint
    os.utime(tmp_path / "a.jsonl", (1, 1))
    again = StreamedSets(again.sets)
    assert not again.load(tmp_path) and again.streams[0].rows_per_pass is None
    content = json.loads((tmp_path / STREAM_FILE).read_text())
    assert content["rows_per_pass"] == {"a": N, "b": N}
    (tmp_path / STREAM_FILE).write_text(json.dumps({**content, "fingerprint": again.fingerprint}))
    assert again.load(tmp_path) and again.streams[1].rows_per_pass == N
    (tmp_path / STREAM_FILE).write_text("{")
    with pytest.raises(DataError, match="damaged"):
        again.load(tmp_path)
    assert again.load(tmp_path / "elsewhere")


def test_a_dataset_of_the_hub_is_fetched_as_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def load_dataset(name: str, config: Any, **options: Any) -> Any:
        asked.append(options)
        return datasets.IterableDataset.from_generator(lambda: iter(records()))

    monkeypatch.setattr(arrow_tables, "_require_hub", lambda source, name: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = list(islice(stream("org/name", num_hard_negatives=1).rows(5), N))
    assert asked[0]["split"] == "train" and asked[0]["streaming"] is True
    stored = load_training_data(put(tmp_path / "a.jsonl", records()), num_hard_negatives=1)
    assert stored.transform is not None
    stored.transform.set_epoch(0, seed=5)
    assert sorted(map(texts, rows)) == sorted(map(texts, stored.dataset))


MEMORY = """
import sys
from itertools import islice
from contaccum.data.stream_batches import StreamedSets
from contaccum.data.training_sets import parse_training_sets
def peak():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["VmHWM"].split()[0]) * 1024
grown = []
for path, rows in ((sys.argv[1], 10_000), (sys.argv[2], 100_000)):
    data = StreamedSets(parse_training_sets([path], {"num_hard_negatives": 1}), buffer_size=2_000)
    data.begin(batch_size=8, counts=[1])
    before = peak()
    for batch in islice(data, rows // 8):
        pass
    grown.append(peak() - before)
print(*grown)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from /proc")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    def generate(name: str, n: int) -> str:
        with open(tmp_path / name, "w") as file:
            for i in range(n):
                record = {"query": f"question {i}", "positive": f"passage {i} says " * 8, "negatives": ["a", f"b{i}"]}
                file.write(json.dumps(record) + "\n")
        return str(tmp_path / name)

    command = [sys.executable, "-c", MEMORY, generate("small.jsonl", 10_000), generate("large.jsonl", 100_000)]
    _, grown = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    # Ten times the rows of the file before, whose texts alone are 16 MB.
    assert grown < 4 << 20, f"{grown:,} bytes"
    cache = Path(os.environ["CONTACCUM_CACHE"]) / "rows"
    assert not cache.exists() or not any("large" in str(path) for path in cache.iterdir())
