"""Invariants of draws: uniform, without replacement, a function of seed, epoch and row, and never a positive."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import DatasetDict
from torch.utils.data import DataLoader

from contaccum.data import load_training_data
from contaccum.data.draws import draws_of
from contaccum.data.selection import Selection
from contaccum.data.text_columns import hash_texts
from contaccum.errors import ConfigError, DataError

H = 2


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def records(n: int = 30) -> list[dict[str, Any]]:
    """Every third with several positives; 0 to 5 negatives."""
    return [
        {
            "query": f"q{i}",
            "positives": [f"p{i}_{k}" for k in range(3 if i % 3 == 0 else 1)],
            "negatives": [f"n{i}_{k}" for k in range(i % 6)],
        }
        for i in range(n)
    ]


def all_rows(data: Any) -> list[dict[str, Any]]:
    return list(data.dataset)


def ids(*texts: str) -> list[int]:
    return hash_texts(pa.array(texts)).tolist()


@pytest.fixture
def data(tmp_path: Path) -> Any:
    return load_training_data(write(tmp_path / "a.jsonl", records()), num_hard_negatives=H)


def test_a_row_gets_one_of_its_positives_and_different_negatives_of_its_own(data: Any) -> None:
    for epoch in range(5):
        data.transform.set_epoch(epoch)
        for row, record in zip(all_rows(data), records(), strict=True):
            assert row["query"] == record["query"] and row["positive"] in record["positives"]
            negatives = [row["negative_1"], row["negative_2"]]
            assert len(set(negatives)) == H
            assert len(set(negatives) & set(record["negatives"])) == min(H, len(record["negatives"]))
            assert row["label"] == ids(row["query"], row["positive"], *negatives)


def test_draws_are_uniform_and_without_replacement(tmp_path: Path) -> None:
    record = {"query": "q", "positives": list("abcd"), "negatives": list("uvwxyz")}
    dataset = load_training_data(write(tmp_path / "a.jsonl", [record]), num_hard_negatives=H)
    positives: Counter[str] = Counter()
    negatives: Counter[tuple[str, ...]] = Counter()
    epochs = 6000
    for epoch in range(epochs):
        dataset.transform.set_epoch(epoch)
        row = dataset.dataset[0]
        positives[row["positive"]] += 1
        negatives[tuple(sorted((row["negative_1"], row["negative_2"])))] += 1
    assert set(positives) == set("abcd") and set(negatives) == set(combinations("uvwxyz", H))
    for counts in (positives, negatives):
        expected = epochs / len(counts)
        chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
        assert chi_squared < 36.1  # 14 degrees of freedom: once in a thousand times


def test_a_draw_depends_on_seed_epoch_and_row_alone(data: Any, tmp_path: Path) -> None:
    def drawn(epoch: int, seed: int, dataset: Any = data.dataset) -> list[dict[str, Any]]:
        data.transform.set_epoch(epoch, seed)
        return list(dataset)

    first = drawn(1, 7)
    assert drawn(2, 7) != first != drawn(1, 8)
    data.transform.set_epoch(1, 7)
    again = load_training_data(tmp_path / "a.jsonl", num_hard_negatives=H)
    again.transform.set_epoch(1, 7)
    assert all_rows(again) == first
    order = np.random.default_rng(0).permutation(len(first)).tolist()
    moved = drawn(1, 7, data.dataset.select(order))
    assert moved == [first[i] for i in order]
    assert data.dataset[[5, 3]]["negative_1"] == [first[i]["negative_1"] for i in (5, 3)]
    assert drawn(1, 7, data.dataset.train_test_split(5, shuffle=False)["test"]) == first[-5:]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_are_told_the_epoch_while_they_live(data: Any, start: str) -> None:
    loader: Any = DataLoader(
        data.dataset,
        batch_size=4,
        collate_fn=list,
        num_workers=2,
        multiprocessing_context=start,
        persistent_workers=True,
    )
    seen = []
    for epoch in range(2):
        data.transform.set_epoch(epoch, 3)
        seen.append(all_rows(data))
        assert [row for batch in loader for row in batch] == seen[-1]
    assert seen[0] != seen[1]


def test_copies_of_the_data_set_share_its_epoch(data: Any) -> None:
    shorter = data.dataset.add_column("topic", list(range(30))).remove_columns("topic")
    assert draws_of(shorter) == draws_of(copy.deepcopy(data.dataset)) == [data.transform]
    parts = DatasetDict({"a": data.dataset, "b": data.dataset.with_format(None)})
    assert draws_of(parts) == [data.transform] and draws_of(None) == draws_of([1]) == []
    data.transform.set_epoch(4, 2)
    there = pickle.loads(pickle.dumps(data.transform))
    assert (there.epoch, there.seed) == (4, 2)


def test_missing_negatives_are_passages_of_others_and_never_a_known_positive(tmp_path: Path) -> None:
    # q0's positives are in three records; with a hundred passages, chance would draw one of them often.
    rows = [{"query": f"q{max(0, i - 2)}", "positive": f"p{i}"} for i in range(12)]
    rows[11]["negatives"] = ["n", "p4"]
    data = load_training_data(write(tmp_path / "a.jsonl", rows), num_hard_negatives=3)
    passages = {row["positive"] for row in rows}
    own = {query: {row["positive"] for row in rows if row["query"] == query} for query in (r["query"] for r in rows)}
    seen = set()
    for epoch in range(60):
        data.transform.set_epoch(epoch)
        for number, row in enumerate(all_rows(data)):
            negatives = [row[f"negative_{i}"] for i in (1, 2, 3)]
            assert len(set(negatives)) == 3 and not own[row["query"]] & set(negatives)
            filled = negatives[2:] if number == 11 else negatives
            assert set(filled) <= passages and (number != 11 or negatives[:2] == ["n", "p4"])
            seen.update(filled)
    assert seen == passages
    notes = {"rows with too few hard negatives, filled up with other passages": 12}
    assert data.report.notes == notes and data.report.used == 12


def test_where_there_is_no_other_passage_one_comes_twice_or_the_row_is_refused(tmp_path: Path) -> None:
    two = [{"query": "a", "positive": "p", "negative": "n"}, {"query": "b", "positive": "r"}]
    data = load_training_data(write(tmp_path / "a.jsonl", two), num_hard_negatives=3)
    assert list(data.dataset[0].values()) == ["a", "p", "n", "r", "n"]
    assert list(data.dataset[1].values()) == ["b", "r", "p", "p", "p"]
    one = [{"query": "a", "positive": "p", "negative": "n"}, {"query": "b", "positive": "p"}]
    data = load_training_data(write(tmp_path / "b.jsonl", one), num_hard_negatives=1)
    with pytest.raises(DataError, match="no passage of the training data that is not a positive of it"):
        data.dataset[1]


def test_dropped_records_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", records())
    data = load_training_data(path, num_hard_negatives=H, missing_negatives="drop")
    assert [row["query"] for row in all_rows(data)] == [r["query"] for r in records() if len(r["negatives"]) >= H]
    report = data.report
    assert (report.seen, report.used, report.reported) == (30, 20, 10)
    assert report.by_reason == {"too few hard negatives, dropped": 10}
    assert report.by_file == {str(path): 10}
    assert "30 records: 20 used, 10 left out (10 too few hard negatives, dropped)" in report.summary()
    with pytest.raises(DataError, match=r"a\.jsonl:1: too few hard negatives: 0 where"):
        load_training_data(path, num_hard_negatives=H, missing_negatives="stop")
    stopped = load_training_data(path, num_hard_negatives=H, missing_negatives="stop", on_bad_record="skip")
    assert [row["query"] for row in all_rows(stopped)] == [row["query"] for row in all_rows(data)]


@pytest.mark.parametrize("missing", ["fill", "drop"])
def test_a_source_without_any_negative_is_refused_when_some_are_asked_for(tmp_path: Path, missing: Any) -> None:
    path = write(tmp_path / "a.jsonl", [{"query": "q", "positive": "p"}, {"query": "r", "positive": "s"}])
    with pytest.raises(DataError, match=r"a\.jsonl: num_hard_negatives=1, but no record has a negative \(mine"):
        load_training_data(path, num_hard_negatives=1, missing_negatives=missing)


def test_positives_are_drawn_or_the_first_or_all(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", records())
    drawn, first, every = (load_training_data(path, positives=kind) for kind in ("draw", "first", "all"))
    assert load_training_data(path).fingerprint == drawn.fingerprint
    assert [row["positive"] for row in all_rows(first)] == [record["positives"][0] for record in records()]
    expected = [(record["query"], positive) for record in records() for positive in record["positives"]]
    assert [(row["query"], row["positive"]) for row in all_rows(every)] == expected
    assert len({data.fingerprint for data in (drawn, first, every)}) == 3
    assert drawn.report.notes["rows with several positives, one drawn in each epoch"] == 10
    assert len(every.dataset) == 50 and every.report.used == 30
    # Whatever is trained on, all of them are known.
    several = sorted(tuple(ids(q, p)) for q, p in expected if int(q[1:]) % 3 == 0)
    for data in (drawn, first, every):
        assert [tuple(pair) for pair in data.known_positives.tolist()] == several


def test_negatives_are_drawn_from_as_many_as_asked_or_are_the_first(tmp_path: Path) -> None:
    record = {"query": "q", "positive": "p", "negatives": ["a", "a", *"bcdef"]}
    path = write(tmp_path / "a.jsonl", [record, {**record, "query": "r"}])

    def seen(**settings: Any) -> set[str]:
        data = load_training_data(path, num_hard_negatives=H, **settings)
        found = set()
        for epoch in range(60):
            if data.transform is not None:
                data.transform.set_epoch(epoch)
            for row in all_rows(data):
                found |= {row["negative_1"], row["negative_2"]}
                assert row["negative_1"] != row["negative_2"] or settings == {"draw_negatives": False}
        return found

    assert seen() == set("abcdef")
    assert seen(negatives_from=4) == set("abc")  # the first four of the list, in which "a" is twice
    assert seen(draw_negatives=False) == {"a"}


def test_nothing_changes_where_there_is_nothing_to_draw(tmp_path: Path) -> None:
    rows = [{"query": f"q{i}", "positive": f"p{i}", "negative_1": f"n{i}"} for i in range(5)]
    data = load_training_data(write(tmp_path / "a.jsonl", rows), num_hard_negatives=1)
    assert data.transform is None and data.known_positives is None
    assert data.dataset.column_names == ["query", "positive", "negative_1"] and data.dataset.to_list() == rows
    assert data.dataset.format["type"] is None


def test_judgements_are_pairs_and_several_of_a_query_are_known(tmp_path: Path) -> None:
    (tmp_path / "qrels").mkdir()
    write(tmp_path / "corpus.jsonl", [{"_id": f"d{i}", "text": f"text {i}"} for i in range(4)])
    write(tmp_path / "queries.jsonl", [{"_id": f"q{i}", "text": f"query {i}"} for i in range(2)])
    (tmp_path / "qrels" / "train.tsv").write_text("q0\td0\t1\nq0\td1\t1\nq1\td2\t1\n")
    data = load_training_data(tmp_path)
    assert [row["positive"] for row in all_rows(data)] == ["text 0", "text 1", "text 2"]
    assert data.known_positives.tolist() == sorted(ids("query 0", f"text {i}") for i in (0, 1))
    drawn = load_training_data(tmp_path, positives="draw")
    assert len(drawn.dataset) == 2 and drawn.report.used == data.report.used


def test_the_fingerprint_is_of_all_that_is_drawn_from(tmp_path: Path) -> None:
    base = {"query": "q", "positives": ["a", "b"], "negatives": ["x", "y"]}
    others = [{**base, "positives": ["a", "c"]}, {**base, "negatives": ["x", "z"]}, {**base, "positives": ["b", "a"]}]
    found = [
        load_training_data(write(tmp_path / f"{i}.jsonl", [record]), num_hard_negatives=1).fingerprint
        for i, record in enumerate([base, *others])
    ]
    assert len(set(found)) == 4


def test_a_topic_called_label_and_row_numbers_do_not_meet(tmp_path: Path) -> None:
    rows = [{**record, "label": f"topic {i % 2}"} for i, record in enumerate(records(6))]
    data = load_training_data(write(tmp_path / "a.jsonl", rows), topic_column="label")
    assert data.dataset.column_names == ["query", "positive", "label", "labels"]
    row = data.dataset[3]
    assert row["label"] == "topic 1" and row["labels"] == ids(row["query"], row["positive"])


def test_columns_that_draws_need_are_asked_for(data: Any) -> None:
    with pytest.raises(ConfigError, match="training data without its column 'query'"):
        data.dataset.rename_column("query", "anchor")[0]
    assert data.dataset.select_columns(["positive"])[0] == {"positive": "p0_0"}
    assert data.dataset.remove_columns("negative_2")[0].keys() == {"query", "positive", "negative_1", "label"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"positives": "some"}, r"positives='some' is unknown \(use one of draw, first, all\)"),
        ({"missing_negatives": "skip"}, r"missing_negatives='skip' is unknown \(use one of fill, drop, stop\)"),
        ({"negatives_from": 5}, "negatives_from=5 with num_hard_negatives=0"),
        ({"num_hard_negatives": 3, "negatives_from": 2}, "negatives_from=2 with num_hard_negatives=3"),
        ({"num_hard_negatives": 1, "negatives_from": 2, "draw_negatives": False}, "with draw_negatives=false"),
    ],
)
def test_settings_that_cannot_work_together_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Selection(**settings)
