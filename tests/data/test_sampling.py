"""Sampling: uniform, a function of seed, epoch and row, and never a known positive as negative."""

import copy
import pickle
from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from data_files import ids, put_lines
from datasets import Dataset, DatasetDict
from torch.utils.data import DataLoader

from contaccum.data.dataset import TrainingData, load_training_data
from contaccum.data.sampling import add_row_numbers, first_texts, get_samplings
from contaccum.data.selection import Selection
from contaccum.errors import ConfigError, DataError

H = 2


def records(n: int = 30) -> list[dict[str, Any]]:
    """Return records, every third with three positives, with 0 to 5 negatives."""
    return [
        {
            "query": f"q{i}",
            "positives": [f"p{i}_{k}" for k in range(3 if i % 3 == 0 else 1)],
            "negatives": [f"n{i}_{k}" for k in range(i % 6)],
        }
        for i in range(n)
    ]


def rows(data: TrainingData, epoch: int = 0, seed: int = 0) -> list[dict[str, Any]]:
    data.transform.set_epoch(epoch, seed)
    return list(data.dataset)


@pytest.fixture
def data(tmp_path) -> TrainingData:
    return load_training_data(put_lines(tmp_path / "a.jsonl", *records()), num_hard_negatives=H)


def test_a_row_has_a_positive_and_distinct_negatives_of_its_record(data):
    assert data.dataset.column_names == ["query", "positive", "negative_1", "negative_2"]
    for epoch in range(5):
        for row, record in zip(rows(data, epoch), records(), strict=True):
            assert row["query"] == record["query"] and row["positive"] in record["positives"]
            negatives = [row["negative_1"], row["negative_2"]]
            assert len({*negatives}) == H
            assert len({*negatives} & {*record["negatives"]}) == min(H, len(record["negatives"]))
            assert row["label"] == ids(row["query"], row["positive"], *negatives)


def test_samples_are_uniform_and_without_replacement():
    selection = Selection(H, "draw")
    positives = Counter[str]()
    negatives = Counter[tuple[str, ...]]()
    epochs = 6000
    for epoch in range(epochs):
        positive, texts = selection.sample(
            np.random.default_rng([0, epoch, 0]), list("abcd"), list("uvwxyz")
        )
        positives[positive] += 1
        negatives[tuple(sorted(texts))] += 1
    assert set(positives) == set("abcd") and set(negatives) == set(combinations("uvwxyz", H))
    for counts in (positives, negatives):
        expected = epochs / len(counts)
        # The 99.9 % quantile of chi-squared with 14 degrees of freedom.
        assert sum((count - expected) ** 2 / expected for count in counts.values()) < 36.1


def test_a_sample_depends_on_seed_epoch_and_row_alone(data, tmp_path):
    first = rows(data, 1, 7)
    assert rows(data, 2, 7) != first != rows(data, 1, 8)
    assert (
        rows(load_training_data(tmp_path / "a.jsonl", num_hard_negatives=H), 1, 7)
        == first
        == rows(data, 1, 7)
    )
    order = np.random.default_rng(0).permutation(len(first)).tolist()
    assert list(data.dataset.select(order)) == [first[i] for i in order]
    assert data.dataset[[5, 3]]["negative_1"] == [first[i]["negative_1"] for i in (5, 3)]
    assert list(data.dataset.train_test_split(5, shuffle=False)["test"]) == first[-5:]


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_see_the_epoch_while_they_live(data, start):
    workers = {"num_workers": 2, "multiprocessing_context": start, "persistent_workers": True}
    loader = DataLoader(data.dataset, batch_size=4, collate_fn=list, **workers)
    rows_by_epoch = []
    for epoch in range(2):
        rows_by_epoch.append(rows(data, epoch, 3))
        assert [row for batch in loader for row in batch] == rows_by_epoch[-1]
    assert rows_by_epoch[0] != rows_by_epoch[1]


def test_copies_of_a_data_set_share_its_epoch(data):
    """Columns may be added and removed."""
    longer = data.dataset.add_column("score", list(range(30)))
    assert longer[4]["score"] == 4 and longer[4]["query"] == "q4"
    assert (
        get_samplings(longer.remove_columns("score"))
        == get_samplings(copy.deepcopy(longer))
        == [data.transform]
    )
    parts = DatasetDict({"a": data.dataset, "b": data.dataset.with_format(None)})
    assert (
        get_samplings(parts) == [data.transform] and get_samplings(None) == get_samplings([1]) == []
    )
    data.transform.set_epoch(4, 2)
    assert pickle.loads(pickle.dumps(data.transform)).epoch == 4
    assert data.dataset.select_columns(["positive"])[1] == {"positive": "p1_0"}
    assert data.dataset.remove_columns("negative_2")[0].keys() == {
        "query",
        "positive",
        "negative_1",
        "label",
    }
    with pytest.raises(ConfigError, match="keep the names query and positive"):
        data.dataset.rename_column("query", "anchor")[0]


def test_missing_negatives_are_filled_without_known_positives(tmp_path):
    # q0's positives are in three records; unmasked sampling would often hit one of them.
    listed = [{"query": f"q{max(0, i - 2)}", "positive": f"p{i}"} for i in range(12)]
    listed[11]["negatives"] = ["n", "p4"]
    data = load_training_data(put_lines(tmp_path / "a.jsonl", *listed), num_hard_negatives=3)
    passages = {row["positive"] for row in listed}
    all_negatives: set[str] = set()
    for epoch in range(60):
        for number, row in enumerate(rows(data, epoch)):
            positives = {record["positive"] for record in listed if record["query"] == row["query"]}
            negatives = [row[f"negative_{i}"] for i in (1, 2, 3)]
            assert len({*negatives}) == 3 and not positives & {*negatives}
            assert number != 11 or negatives[:2] == ["n", "p4"]
            all_negatives.update(negatives)
    assert all_negatives == passages | {"n"}


def test_records_with_too_few_negatives_are_dropped_and_counted(tmp_path):
    path = put_lines(tmp_path / "a.jsonl", *records())
    data = load_training_data(path, num_hard_negatives=H, missing_negatives="drop")
    expected = [record["query"] for record in records() if len(record["negatives"]) >= H]
    assert [row["query"] for row in data.dataset] == expected
    assert (
        "30 records: 20 used, 10 left out (10 too few hard negatives; first: "
        in data.report.summary()
    )
    bare = put_lines(tmp_path / "b.jsonl", {"query": "q", "positive": "p"})
    with pytest.raises(
        DataError, match=r"b\.jsonl: num_hard_negatives=1, but no record has a negative \(mine"
    ):
        load_training_data(bare, num_hard_negatives=1)
    assert len(load_training_data(bare, num_hard_negatives=1, negatives_to_come=True).dataset) == 1


def test_positives_are_drawn_or_first_or_all(tmp_path):
    path = put_lines(tmp_path / "a.jsonl", *records())
    drawn, first, every = (
        load_training_data(path, positives=choice) for choice in ("draw", "first", "all")
    )
    assert load_training_data(path).fingerprint == drawn.fingerprint
    assert [row["positive"] for row in rows(first)] == [
        record["positives"][0] for record in records()
    ]
    expected = [
        (record["query"], positive) for record in records() for positive in record["positives"]
    ]
    assert [(row["query"], row["positive"]) for row in rows(every, 3)] == expected
    assert len({data.fingerprint for data in (drawn, first, every)}) == 3
    assert len(every.dataset) == 50 and every.report.used == 30
    several = sorted(tuple(ids(q, p)) for q, p in expected if int(q[1:]) % 3 == 0)
    for data in (drawn, first, every):
        assert [tuple(pair) for pair in data.known_positives.tolist()] == several


def test_negatives_come_from_the_first_negatives_from(tmp_path):
    record = {"query": "q", "positive": "p", "negatives": ["a", "a", *"bcdef"]}
    path = put_lines(tmp_path / "a.jsonl", record, {**record, "query": "r"})

    def collect_negatives(**settings: Any) -> set[str]:
        data = load_training_data(path, num_hard_negatives=H, **settings)
        negatives = [
            (row["negative_1"], row["negative_2"])
            for epoch in range(60)
            for row in rows(data, epoch)
        ]
        assert all(a != b for a, b in negatives)
        return {text for pair in negatives for text in pair}

    assert collect_negatives() == set("abcdef")
    # The list begins with "a" twice, which counts once.
    assert collect_negatives(negatives_from=4) == set("abcd")
    assert collect_negatives(negatives_from=3) == set("abc")


def test_the_fingerprint_covers_exactly_the_sampled_texts(tmp_path):
    base = {"query": "q", "positives": ["a", "b"], "negatives": ["x", "y"]}
    changed = [
        {**base, "positives": ["a", "c"]},
        {**base, "negatives": ["x", "z"]},
        {**base, "positives": ["b", "a"]},
    ]
    paths = [
        put_lines(tmp_path / f"{i}.jsonl", record) for i, record in enumerate([base, *changed])
    ]
    assert len({load_training_data(path, num_hard_negatives=1).fingerprint for path in paths}) == 4
    assert (
        load_training_data(paths[0]).fingerprint == load_training_data(paths[2]).fingerprint
    )  # no negative is used
    settings = [{}, {"negatives_from": 1}, {"missing_negatives": "drop"}]
    fingerprints = [
        load_training_data(paths[0], num_hard_negatives=1, **options).fingerprint
        for options in settings
    ]
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]


def test_plain_data_get_row_numbers_and_text_ids():
    listed = [
        {"query": f"q{i % 2}", "positive": f"p{i}", "negative_1": None if i else "n"}
        for i in range(4)
    ]
    plain = Dataset.from_list(listed)
    dataset = add_row_numbers(plain)
    (sampling,) = get_samplings(dataset)
    sampling.has_row_numbers = True
    assert dataset[0]["label"] == [0, *ids("q0", "p0", "n")] and dataset[0]["negative_1"] == "n"
    assert dataset[1]["label"][0] == 1 and dataset[1]["negative_1"] in {"p0", "p2"}
    assert sampling.known_positives is not None and len(sampling.known_positives) == 4
    texts = {name: [row[name] for row in listed] for name in listed[0]}
    assert list(first_texts(plain)) == list(first_texts(dataset)) == [texts]


CANNOT_WORK = [{"positives": "some"}, {"missing_negatives": "skip"}, {"num_hard_negatives": -1}]
CANNOT_WORK += [{"negatives_from": 5}, {"num_hard_negatives": 3, "negatives_from": 2}]


@pytest.mark.parametrize("settings", CANNOT_WORK)
def test_settings_that_cannot_work_together_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Selection(**settings)
