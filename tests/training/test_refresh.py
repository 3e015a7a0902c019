"""Refresh of hard negatives during training: mining, the texts in batches, resuming."""

import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, Features, Value
from sample_texts import sentences
from small_data import write_lines
from tiny_runs import (
    SAVE_EVERY_UPDATE,
    assert_resumes,
    make_pairs,
    make_trainer,
    read_log,
    record_texts,
)

from contaccum.data import load_training_data
from contaccum.errors import ConfigError, UserError
from contaccum.mining import load_mining_data, mine_hard_negatives

NUM_PAIRS = 36
UPDATES_PER_REFRESH = 2
MICRO_BATCHES_PER_REFRESH = 6
REFRESH = {
    "refresh_negatives_every": UPDATES_PER_REFRESH,
    "refresh_pool": 4,
    "refresh_relative_margin": 0.0,
    "num_train_epochs": 2,
}


def make_pairs_without_negatives() -> Dataset:
    """Return pairs whose two columns of negatives are empty."""
    columns: dict[str, Any] = {
        "query": sentences(NUM_PAIRS, 1),
        "positive": sentences(NUM_PAIRS, 2, 9),
        "negative_1": [None] * NUM_PAIRS,
        "negative_2": [None] * NUM_PAIRS,
    }
    return Dataset.from_dict(columns, features=Features(dict.fromkeys(columns, Value("string"))))


def mine_pools(model: Any) -> dict[str, set[str]]:
    """Mine with a model; return the mined negatives of each query."""
    rows = zip(sentences(NUM_PAIRS, 1), sentences(NUM_PAIRS, 2, 9), strict=True)
    data = load_mining_data({"query": query, "positive": positive} for query, positive in rows)
    mined = mine_hard_negatives(
        data,
        model,
        batch_size=4,
        show_progress=False,
        num_negatives=4,
        range_max=None,
        relative_margin=0.0,
    )
    pools = {}
    for query, mined_rows in zip(data.queries, mined.rows.tolist(), strict=True):
        pools[query] = {data.documents[row].passage for row in mined_rows if row >= 0}
    return pools


@pytest.mark.parametrize("workers", [0, 1])
def test_every_update_trains_on_the_negatives_of_the_last_refresh(tmp_path, workers):
    trainer = make_trainer(
        tmp_path, make_pairs_without_negatives(), dataloader_num_workers=workers, **REFRESH
    )
    models: dict[int, Any] = {}  # the model after each number of updates

    def copy_model(inputs: Any) -> None:
        update = trainer.state.global_step
        if update not in models:
            models[update] = copy.deepcopy(trainer.model)

    texts = record_texts(trainer, copy_model)
    trainer.train()
    assert len(texts) == 6 * 3
    pools = {update: mine_pools(models[update]) for update in (0, 2, 4)}
    assert pools[0] != pools[2] != pools[4]
    for step, rows in enumerate(texts):
        mined_at = step // MICRO_BATCHES_PER_REFRESH * UPDATES_PER_REFRESH
        for query, positive, *negatives in rows:
            pool = pools[mined_at][query]
            assert positive not in negatives
            assert len(set(negatives)) == 2
            assert len(pool) < 2 or set(negatives) <= pool
    log = read_log(tmp_path)
    assert [line.get("mined_at") for line in log] == [0, None, 2, None, 4, None]
    assert log[0]["mining_seconds"] > 0


def test_the_only_passage_that_is_no_positive_is_found_in_a_large_pool(tmp_path):
    """Random draws would miss it: all other passages are positives of the query."""
    trainer = make_trainer(tmp_path, make_pairs_without_negatives(), **REFRESH)
    refresh = trainer.refresh
    num_passages = 50_000
    documents = []
    for number in range(num_passages):
        documents.append(SimpleNamespace(passage=f"passage {number}"))
    refresh.data = replace(
        refresh.data,
        documents=documents,
        pool_size=num_passages,
        excluded=[range(num_passages - 1)] * NUM_PAIRS,
    )
    assert refresh._sample_negatives(0) == [f"passage {num_passages - 1}"] * 2


def test_a_run_resumes_bit_for_bit_right_before_a_refresh_and_between_two(tmp_path):
    data = make_pairs_without_negatives()
    make = partial(make_trainer, data=data, dropout=0.1, **REFRESH)
    assert_resumes(make, tmp_path, 2, 3)


def test_a_run_without_refresh_is_not_resumed_with_it(tmp_path):
    data = make_pairs(NUM_PAIRS, 2)
    make_trainer(tmp_path / "plain", data, num_train_epochs=2, **SAVE_EVERY_UPDATE).train()
    other = make_trainer(tmp_path / "refresh", data, **REFRESH)
    with pytest.raises(UserError, match="refresh_negatives_every: None -> 2"):
        other.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))


def test_negatives_of_the_data_are_used_until_the_first_refresh(tmp_path):
    data = make_pairs(NUM_PAIRS, 2)
    trainer = make_trainer(tmp_path, data, **REFRESH)
    texts = record_texts(trainer)
    trainer.train()
    negatives_of_data = {row["query"]: {row["negative_1"], row["negative_2"]} for row in data}
    for rows in texts[:6]:
        for query, _, *negatives in rows:
            assert set(negatives) == negatives_of_data[query]
    is_mined = []
    for rows in texts[6:9]:
        for query, _, *negatives in rows:
            is_mined.append(set(negatives) != negatives_of_data[query])
    assert any(is_mined)


def test_a_refresh_does_not_change_the_labels_of_the_callers_data(tmp_path):
    """The caller may train on the same data without refresh."""
    records = []
    for row in make_pairs(NUM_PAIRS, 1):
        records.append({"query": row["query"], "pos": row["positive"], "neg": row["negative_1"]})
    path = write_lines(tmp_path / "data.jsonl", records)
    data = load_training_data(str(path), num_hard_negatives=1).dataset
    rows_before = data[:2]
    trainer = make_trainer(tmp_path / "run", data, max_steps=3, **REFRESH)
    assert data[:2] == rows_before
    trainer.train()
    assert [line.get("mined_at") for line in read_log(tmp_path / "run")] == [None, None, 2]


WRONG_COLUMNS = "with the columns query, positive, negative_1 and on"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (make_pairs(9), WRONG_COLUMNS),
        (DatasetDict({"a": make_pairs(9, 1)}), "needs one data set, neither a stream nor several"),
        (make_pairs(9, 1).rename_column("query", "anchor"), WRONG_COLUMNS),
    ],
    ids=["no negatives", "several sets", "other names"],
)
def test_data_without_columns_for_negatives_are_refused(tmp_path, data, message):
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, data, **REFRESH)


def test_data_for_mining_that_lack_queries_are_refused(tmp_path):
    other = load_mining_data([{"query": "a query", "positive": "a passage"}])
    message = r"row 0 of the training data, and 8 other rows, have a query"
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, make_pairs(9, 1), mining_data=other, **REFRESH)
