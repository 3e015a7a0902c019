"""Several sets and streams: what is said of each, what they know of each other, rows that come anew in each pass."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from data_files import put_lines
from datasets import IterableDataset

from contaccum.data import TrainingSets, load_training_data, load_training_sets, parse_training_sets
from contaccum.data.sampling import text_ids
from contaccum.errors import ConfigError, DataError


def load(*given: Any, **common: Any) -> TrainingSets:
    return load_training_sets(parse_training_sets([x if isinstance(x, dict) else str(x) for x in given], common))


def ids(*texts: str) -> list[int]:
    return text_ids(texts).tolist()


# Sets


def test_a_set_is_said_in_paths_mappings_and_json_and_overrides_what_is_common() -> None:
    common = {"num_hard_negatives": 1, "split": "dev"}
    own = {"path": "a.tsv", "name": "n", "format": "csv", "split": "test"}
    given = ["x/pairs.jsonl", '{"path": "b.csv", "columns": {"query": "q"}}', own]
    assert parse_training_sets(given, common) == {
        "pairs": {**common, "path": "x/pairs.jsonl", "columns": {}},
        "b": {**common, "path": "b.csv", "columns": {"query": "q"}},
        "n": {**common, "path": "a.tsv", "columns": {}, "split": "test", "data_format": "csv"},
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"path": "a", "colums": {}}], "a key of a set must be one of .*, got 'colums'; did you mean 'columns'"),
        ([{"name": "a"}], "a set has a path"),
        (["{broken"], "train_data: '{broken': "),
        ([{"path": "a", "format": "xlsx"}], "train_data: .*: format must be one of"),
        (["x/a.jsonl", "y/a.csv"], "two sets are called 'a'"),
    ],
)
def test_what_cannot_be_said_of_a_set_is_refused(given: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_training_sets(given)


def test_sets_know_each_others_positives_and_bring_ids(tmp_path: Path) -> None:
    one = put_lines(tmp_path / "a.jsonl", {"query": "q", "positive": "p"}, {"query": "r", "positive": "s"})
    other = put_lines(tmp_path / "b.jsonl", {"query": "q", "positive": "t"}, {"query": "u", "positive": "p"})
    sets = load(one, other)
    assert list(sets.dataset) == ["a", "b"]
    for part in sets.parts.values():
        assert part.known_positives is not None
        assert part.known_positives.tolist() == sorted([ids("q", "p"), ids("q", "t")])
    assert sets.dataset["b"][1] == {"query": "u", "positive": "p", "label": ids("u", "p")}
    assert sets.fingerprint not in {part.fingerprint for part in sets.parts.values()}
    assert load(other, one).fingerprint != sets.fingerprint == load(one, other).fingerprint
    assert load(one).fingerprint == load_training_data(one).fingerprint
    assert sets.summary() == "a: 2 records: 2 used, 0 left out\nb: 2 records: 2 used, 0 left out"
    content = load_training_data(one).fingerprint
    assert sets.records()["a"] == {"path": str(one), "format": "pairs", "fingerprint": content}


# Streams

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


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("contaccum.data.sampling.SHUFFLE_BUFFER", 8)


def stream(path: Path, seed: int = 5, **settings: Any) -> Any:
    return load_training_data(path, streaming=True, seed=seed, **{"missing_negatives": "drop", **settings})


def texts(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(value for name, value in row.items() if name != "label")


@pytest.mark.parametrize("settings", [{"positives": "all"}, {"num_hard_negatives": 2}, {"negatives_from": 1}])
def test_a_pass_holds_the_rows_that_an_epoch_of_stored_data_holds(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("contaccum.data.sampling.SHUFFLE_BUFFER", 1)
    path = put_lines(tmp_path / "a.jsonl", *records())
    settings = {"num_hard_negatives": 1, "missing_negatives": "drop", **settings}
    stored = load_training_data(path, **settings)
    rows = stream(path, **settings).dataset
    assert rows.column_names == [*stored.dataset.column_names, "label"] and stored.transform is not None
    found = list(islice(rows, 3 * len(stored.dataset)))  # in the order of the file, pass after pass
    for epoch in range(3):
        stored.transform.set_epoch(epoch, seed=5)
        expected = [texts(row) for row in stored.dataset]
        assert [texts(row) for row in found[epoch * len(expected) :][: len(expected)]] == expected


def test_rows_are_shuffled_by_seed_and_a_stream_goes_on_from_any_row(tmp_path: Path) -> None:
    path = put_lines(tmp_path / "a.jsonl", *records())
    straight = list(islice(stream(path, num_hard_negatives=2).dataset, 4 * N))
    assert straight[:N] != list(islice(stream(path, num_hard_negatives=2, seed=6).dataset, N))
    assert [row["query"] for row in straight[:N]] != [f"q{i}" for i in range(N)]
    places = [int(row["query"][1:]) for row in straight[: N - 8]]
    assert all(number < place + 16 for place, number in enumerate(places))  # nothing comes before it is read
    for start in (0, 1, 30, N, 2 * N + 13):
        resumed = stream(path, num_hard_negatives=2).dataset.skip(start)
        assert list(islice(resumed, N)) == straight[start : start + N]


def test_ids_are_of_texts_and_an_own_positive_among_the_negatives_is_no_other_passage(tmp_path: Path) -> None:
    path = put_lines(tmp_path / "a.jsonl", *records())
    twins = 0
    for row in islice(stream(path, num_hard_negatives=2, negatives_from=2).dataset, N):
        query, positive, first, second = ids(*texts(row))
        own = int(row["query"][1:]) % 3 > 0  # "p{i}-1" is a positive of the record, taken or not
        twins += own
        assert row["label"] == [query, positive, positive if own else first, second]
    assert twins > N // 2


def test_bad_records_stop_a_stream_or_are_counted_in_each_pass(tmp_path: Path) -> None:
    path = put_lines(tmp_path / "a.jsonl", *records(20), end='broken\n{"query": "no positive"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:21: broken JSON"):
        list(islice(stream(path).dataset, 21))
    data = stream(path, on_bad_record="skip", num_hard_negatives=4, missing_negatives="drop")
    assert len(list(islice(data.dataset, 26))) == 26  # ten have four negatives
    report = data.report
    assert report.seen == report.used + report.reported and report.by_reason["too few hard negatives"] > 0


def test_one_set_is_streamed_and_what_cannot_be_is_refused(tmp_path: Path) -> None:
    path = put_lines(tmp_path / "a.jsonl", *records())
    sets = load_training_sets(parse_training_sets([str(path)]), streaming=True)
    assert isinstance(sets.dataset, IterableDataset) and sets.parts["a"].known_positives is None
    with pytest.raises(ConfigError, match="streaming=true with 2 sets in train_data: one set is streamed"):
        load_training_sets(parse_training_sets([str(path), "b.jsonl"]), streaming=True)
    with pytest.raises(ConfigError, match="streaming=true cannot fill in missing negatives: set"):
        stream(path, num_hard_negatives=1, missing_negatives="fill")
