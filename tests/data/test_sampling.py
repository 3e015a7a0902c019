"""Sampling: uniform, a function of seed, epoch and row, and never a known positive as negative."""

import copy
import pickle
from collections import Counter, defaultdict
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import ids, put_lines
from datasets import Dataset, DatasetDict
from torch.utils.data import DataLoader

from contaccum.data.dataset import TrainingData, load_training_data
from contaccum.data.sampling import first_texts, get_samplings
from contaccum.errors import ConfigError, DataError

NUM_RECORDS = 30
NUM_NEGATIVES = 2


def make_records() -> list[dict[str, Any]]:
    """Return records with 0 to 5 negatives; every third has three positives, the others one."""
    records = []
    for i in range(NUM_RECORDS):
        positives = [f"p{i}_{k}" for k in range(3 if i % 3 == 0 else 1)]
        negatives = [f"n{i}_{k}" for k in range(i % 6)]
        records.append({"query": f"q{i}", "positives": positives, "negatives": negatives})
    return records


def sample_rows(data: TrainingData, epoch: int = 0, seed: int = 0) -> list[dict[str, Any]]:
    """Return all rows of an epoch, read at once."""
    data.transform.set_epoch(epoch, seed)
    columns = data.dataset[:]
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def load_fingerprint(path: Path, **settings: Any) -> str:
    return load_training_data(path, **settings).fingerprint


@pytest.fixture
def data(tmp_path) -> TrainingData:
    path = put_lines(tmp_path / "a.jsonl", *make_records())
    return load_training_data(path, num_hard_negatives=NUM_NEGATIVES)


def test_a_row_has_a_positive_and_distinct_negatives_of_its_record(data):
    assert data.dataset.column_names == ["query", "positive", "negative_1", "negative_2"]
    for epoch in range(5):
        for row, record in zip(sample_rows(data, epoch), make_records(), strict=True):
            assert row["query"] == record["query"]
            assert row["positive"] in record["positives"]
            negatives = [row["negative_1"], row["negative_2"]]
            assert len(set(negatives)) == NUM_NEGATIVES
            # Only a record with too few negatives gets passages of other records.
            negatives_of_record = set(negatives) & set(record["negatives"])
            assert len(negatives_of_record) == min(NUM_NEGATIVES, len(record["negatives"]))
            assert row["label"] == ids(row["query"], row["positive"], *negatives)


def test_samples_are_uniform_and_without_replacement(tmp_path):
    record = {"query": "q", "positives": list("abcd"), "negatives": list("uuvwxyz")}
    path = put_lines(tmp_path / "a.jsonl", *[record] * 600)
    data = load_training_data(path, num_hard_negatives=NUM_NEGATIVES)
    positive_counts = Counter[str]()
    negatives_counts = Counter[tuple[str, ...]]()
    for epoch in range(10):
        for row in sample_rows(data, epoch):
            positive_counts[row["positive"]] += 1
            negatives_counts[tuple(sorted([row["negative_1"], row["negative_2"]]))] += 1
    assert set(positive_counts) == set("abcd")
    assert set(negatives_counts) == set(combinations("uvwxyz", NUM_NEGATIVES))
    # The 99.9 % quantiles of chi-squared with 3 and 14 degrees of freedom: 4 positives, and 15
    # pairs of negatives.
    for counts, quantile in ((positive_counts, 16.2), (negatives_counts, 36.1)):
        expected = counts.total() / len(counts)
        assert sum((count - expected) ** 2 / expected for count in counts.values()) < quantile


def test_a_sample_depends_on_seed_epoch_and_row_alone(data, tmp_path):
    rows = sample_rows(data, epoch=1, seed=7)
    assert sample_rows(data, epoch=2, seed=7) != rows
    assert sample_rows(data, epoch=1, seed=8) != rows
    loaded_again = load_training_data(tmp_path / "a.jsonl", num_hard_negatives=NUM_NEGATIVES)
    assert sample_rows(loaded_again, epoch=1, seed=7) == rows
    assert sample_rows(data, epoch=1, seed=7) == rows
    # The rows do not depend on the order and the selection in which they are read.
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    assert list(data.dataset.select(order)) == [rows[i] for i in order]
    assert data.dataset[[5, 3]]["negative_1"] == [rows[5]["negative_1"], rows[3]["negative_1"]]
    assert list(data.dataset.train_test_split(5, shuffle=False)["test"]) == rows[-5:]


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_see_the_epoch_while_they_live(data, start):
    loader = DataLoader(
        data.dataset,
        batch_size=4,
        collate_fn=list,
        num_workers=2,
        multiprocessing_context=start,
        persistent_workers=True,
    )
    rows_of_epochs = [sample_rows(data, epoch, seed=3) for epoch in (0, 1)]
    assert rows_of_epochs[0] != rows_of_epochs[1]
    for epoch, rows in enumerate(rows_of_epochs):
        data.transform.set_epoch(epoch, 3)
        assert list(chain.from_iterable(loader)) == rows


def test_copies_of_a_sampled_data_set_share_its_epoch_and_other_sets_have_none(data):
    longer = data.dataset.add_column("score", list(range(NUM_RECORDS)))
    assert get_samplings(longer.remove_columns("score")) == [data.transform]
    assert get_samplings(copy.deepcopy(longer)) == [data.transform]
    data.transform.set_epoch(4, 2)
    assert pickle.loads(pickle.dumps(data.transform)).epoch == 4
    # Other data sets have none.
    parts = DatasetDict({"sampled": data.dataset, "plain": data.dataset.with_format(None)})
    assert get_samplings(parts) == [data.transform]
    assert get_samplings(None) == []
    assert get_samplings([1]) == []


def test_columns_may_be_added_and_removed_but_not_renamed(data):
    longer = data.dataset.add_column("score", list(range(NUM_RECORDS)))
    assert longer[4]["score"] == 4
    assert longer[4]["query"] == "q4"
    # An epoch in which samples differ from those of the first
    data.transform.set_epoch(4, 2)
    assert data.dataset.select_columns(["positive"])[1] == {"positive": "p1_0"}
    shorter = data.dataset.remove_columns("negative_2")
    assert shorter[0].keys() == {"query", "positive", "negative_1", "label"}
    renamed = data.dataset.rename_column("query", "anchor")
    with pytest.raises(ConfigError, match="keep query and positive"):
        renamed[0]


def test_missing_negatives_are_filled_without_known_positives(tmp_path):
    # The first three records have the query q0. Without the known positives, the negatives of one
    # would often be a positive of another.
    records = [{"query": f"q{max(0, i - 2)}", "positive": f"p{i}"} for i in range(12)]
    records[11]["negatives"] = ["n", "p4"]
    path = put_lines(tmp_path / "a.jsonl", *records)
    data = load_training_data(path, num_hard_negatives=3)
    positives_of_query = defaultdict(set)
    for record in records:
        positives_of_query[record["query"]].add(record["positive"])
    sampled: set[str] = set()
    for epoch in range(60):
        for number, row in enumerate(sample_rows(data, epoch)):
            negatives = [row["negative_1"], row["negative_2"], row["negative_3"]]
            assert len(set(negatives)) == 3
            assert positives_of_query[row["query"]].isdisjoint(negatives)
            if number == 11:
                # The record's own negatives come first.
                assert negatives[:2] == ["n", "p4"]
            sampled.update(negatives)
    assert sampled == {record["positive"] for record in records} | {"n"}


def test_records_with_too_few_negatives_are_dropped_and_counted(tmp_path):
    path = put_lines(tmp_path / "a.jsonl", *make_records())
    data = load_training_data(path, num_hard_negatives=NUM_NEGATIVES, missing_negatives="drop")
    expected = [each["query"] for each in make_records() if len(each["negatives"]) >= NUM_NEGATIVES]
    assert [row["query"] for row in data.dataset] == expected
    summary = "a.jsonl: 20 used, 10 left out (10 too few hard negatives; first: "
    assert summary in data.report.summary()


def test_data_without_any_negative_are_refused(tmp_path):
    path = put_lines(tmp_path / "b.jsonl", {"query": "q", "positive": "p"})
    with pytest.raises(DataError, match=r"b\.jsonl: no record has a negative .*\(mine"):
        load_training_data(path, num_hard_negatives=1)


def test_positives_are_drawn_or_first_or_all(tmp_path):
    records = make_records()
    path = put_lines(tmp_path / "a.jsonl", *records)
    drawn = load_training_data(path, positives="draw")
    first = load_training_data(path, positives="first")
    every = load_training_data(path, positives="all")
    assert load_fingerprint(path) == drawn.fingerprint
    assert len({drawn.fingerprint, first.fingerprint, every.fingerprint}) == 3
    first_positives = [record["positives"][0] for record in records]
    assert [row["positive"] for row in sample_rows(first)] == first_positives
    all_pairs = [(record["query"], text) for record in records for text in record["positives"]]
    several = {record["query"] for record in records if len(record["positives"]) > 1}
    known_positives = [ids(*pair) for pair in all_pairs if pair[0] in several]
    rows_of_every = sample_rows(every, epoch=3)
    assert [(row["query"], row["positive"]) for row in rows_of_every] == all_pairs
    # 10 records with three positives and 20 with one
    assert len(every.dataset) == 50
    assert every.report.used == 30
    for data in (drawn, first, every):
        assert data.known_positives.tolist() == sorted(known_positives)


def test_the_fingerprint_covers_exactly_the_sampled_texts(tmp_path):
    record = {"query": "q", "positives": ["a", "b"], "negatives": ["x", "y"]}
    path = put_lines(tmp_path / "0.jsonl", record)
    other_positive = put_lines(tmp_path / "1.jsonl", {**record, "positives": ["a", "c"]})
    other_negative = put_lines(tmp_path / "2.jsonl", {**record, "negatives": ["x", "z"]})
    other_order = put_lines(tmp_path / "3.jsonl", {**record, "positives": ["b", "a"]})
    paths = [path, other_positive, other_negative, other_order]
    fingerprints = {load_fingerprint(path, num_hard_negatives=1) for path in paths}
    assert len(fingerprints) == 4
    # No negative is used, so another negative does not count.
    assert load_fingerprint(path) == load_fingerprint(other_negative)
    # No record has too few negatives, so nothing is dropped.
    dropping = load_fingerprint(path, num_hard_negatives=1, missing_negatives="drop")
    assert dropping == load_fingerprint(path, num_hard_negatives=1)


def test_the_first_texts_of_plain_data_are_their_texts():
    columns = {"query": ["q0", "q1"], "positive": ["p0", "p1"], "negative_1": ["n", None]}
    assert list(first_texts(Dataset.from_dict(columns))) == [columns]


@pytest.mark.parametrize("settings", [{"positives": "some"}, {"missing_negatives": "skip"}])
def test_unknown_ways_to_sample_are_refused(tmp_path, settings):
    path = put_lines(tmp_path / "a.jsonl", {"query": "q", "positive": "p"})
    with pytest.raises(ConfigError, match=next(iter(settings))):
        load_training_data(path, **settings)
