"""Hard negatives mined anew while training: what is mined, which texts reach a batch, resuming, and what is refused."""

import copy
from functools import partial
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, Features, Value
from sample_texts import sentences
from tiny_runs import (
    SAVE_EVERY_UPDATE,
    assert_resumes,
    make_pairs,
    make_trainer,
    read_log,
    record_texts,
)

from contaccum.errors import ConfigError, UserError
from contaccum.mining import load_mining_data, mine_hard_negatives

N = 36
REFRESH = {
    "refresh_negatives_every": 2,
    "refresh_pool": 4,
    "refresh_relative_margin": 0.0,
    "num_train_epochs": 2,
}


def without_negatives() -> Dataset:
    columns: dict[str, Any] = {"query": sentences(N, 1), "positive": sentences(N, 2, 9)}
    columns |= {"negative_1": [None] * N, "negative_2": [None] * N}
    return Dataset.from_dict(columns, features=Features(dict.fromkeys(columns, Value("string"))))


@pytest.mark.parametrize("workers", [0, 1])
def test_every_update_trains_on_what_the_last_refresh_mined(tmp_path, workers):
    trainer = make_trainer(tmp_path, without_negatives(), dataloader_num_workers=workers, **REFRESH)
    models: dict[int, Any] = {}  # that each update begins with

    def keep(inputs: Any) -> None:
        if trainer.state.global_step not in models:
            models[trainer.state.global_step] = copy.deepcopy(trainer.model)

    seen = record_texts(trainer, keep)
    trainer.train()
    assert len(seen) == 6 * 3
    rows = zip(sentences(N, 1), sentences(N, 2, 9), strict=True)
    data = load_mining_data({"query": query, "positive": positive} for query, positive in rows)
    found = {}
    for update in (0, 2, 4):
        rules = {"num_negatives": 4, "range_max": None, "relative_margin": 0.0}
        mined = mine_hard_negatives(
            data, models[update], batch_size=4, show_progress=False, **rules
        )
        found[update] = {
            query: {data.documents[row].passage for row in picks if row >= 0}
            for query, picks in zip(data.queries, mined.rows.tolist(), strict=True)
        }
    assert found[0] != found[2] != found[4]
    for step, rows in enumerate(seen):
        for query, positive, *negatives in rows:
            pool = found[step // 6 * 2][query]
            assert positive not in negatives and len(set(negatives)) == 2
            assert len(pool) < 2 or set(negatives) <= pool
    log = read_log(tmp_path)
    assert [line.get("mined_at") for line in log] == [0, None, 2, None, 4, None]
    assert log[0]["mining_seconds"] > 0


def test_a_run_resumes_bit_for_bit_between_two_refreshes(tmp_path):
    make = partial(make_trainer, data=without_negatives(), dropout=0.1, **REFRESH)
    assert_resumes(make, tmp_path, 2, 3)  # right before a refresh, and between two
    plain = make_trainer(
        tmp_path / "plain", make_pairs(N, 2), num_train_epochs=2, **SAVE_EVERY_UPDATE
    )
    plain.train()
    with pytest.raises(UserError, match="refresh_negatives_every: None -> 2"):
        other = make_trainer(tmp_path / "c", make_pairs(N, 2), **REFRESH)
        other.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))


def test_negatives_of_the_data_are_used_until_the_first_refresh(tmp_path):
    trainer = make_trainer(tmp_path, make_pairs(N, 2), **REFRESH)
    seen = record_texts(trainer)
    trainer.train()
    given = {row["query"]: {row["negative_1"], row["negative_2"]} for row in make_pairs(N, 2)}
    assert all(set(negatives) == given[query] for rows in seen[:6] for query, _, *negatives in rows)
    assert any(
        set(negatives) != given[query] for rows in seen[6:9] for query, _, *negatives in rows
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (make_pairs(9), "with the columns query, positive, negative_1 and on"),
        (DatasetDict({"a": make_pairs(9, 1)}), "needs one data set, neither a stream nor several"),
        (
            make_pairs(9, 1).rename_column("query", "anchor"),
            "with the columns query, positive, negative_1 and on",
        ),
    ],
    ids=["no negatives", "several sets", "other names"],
)
def test_data_that_nothing_can_be_put_into_is_refused(tmp_path, data, message):
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, data, **REFRESH)


def test_data_to_mine_in_without_the_queries_is_refused(tmp_path):
    other = load_mining_data([{"query": "a query", "positive": "a passage"}])
    with pytest.raises(
        ConfigError, match=r"row 0 of the training data, and 8 other rows, have a query"
    ):
        make_trainer(tmp_path, make_pairs(9, 1), mining_data=other, **REFRESH)
