"""Batch samplers: seed and epoch determine the order, and every row is in one batch."""

from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from contaccum.data.samplers import RESUMABLE_SAMPLERS


def make_rows(n: int, pool_size: int) -> Dataset:
    """Return n rows of random texts from one pool, and a label column.

    A text may occur in several rows, and twice in a row.
    """
    rng = np.random.default_rng(0)
    pool = np.array([f"text {i}" for i in range(pool_size)], dtype=object)
    columns = {}
    for name in ("query", "positive", "negative"):
        columns[name] = pool[rng.integers(0, pool_size, n)].tolist()
    return Dataset.from_dict({**columns, "label": [1] * n})


def make_sampler(name: str, dataset: Any, drop_last: bool = False, seed: int = 3) -> Any:
    """Return a sampler of batches of 8 rows."""
    return RESUMABLE_SAMPLERS[name](dataset, 8, drop_last, valid_label_columns=["label"], seed=seed)


@pytest.mark.parametrize("name", RESUMABLE_SAMPLERS)
def test_the_order_depends_on_seed_and_epoch_alone(name):
    """Every row is in one batch of the epoch."""
    dataset = make_rows(203, pool_size=2000)
    sampler = make_sampler(name, dataset)
    same_sampler = make_sampler(name, dataset)
    batches_by_epoch = {}
    # The order of the epochs must not matter.
    for epoch in (2, 0, 1):
        sampler.set_epoch(epoch)
        same_sampler.set_epoch(epoch)
        batches = list(sampler)
        assert batches == list(same_sampler)
        # 203 rows are 25 batches of 8 and one of 3.
        assert len(batches) == len(sampler) == 26
        assert sorted(chain(*batches)) == list(range(203))
        batches_by_epoch[epoch] = batches
    for batches, other_batches in combinations(batches_by_epoch.values(), 2):
        assert batches != other_batches
    sampler_with_other_seed = make_sampler(name, dataset, seed=4)
    assert list(sampler_with_other_seed) != batches_by_epoch[0]


@pytest.mark.parametrize("name", RESUMABLE_SAMPLERS)
def test_drop_last_leaves_out_the_smaller_batch(name):
    sampler = make_sampler(name, make_rows(203, pool_size=2000), drop_last=True)
    assert {len(batch) for batch in sampler} == {8}
    assert len(list(sampler)) == len(sampler) == 25


@pytest.mark.parametrize("name", ["no_duplicates", "no_duplicates_hashed"])
def test_missing_negatives_are_no_duplicates(name):
    """Negatives that are mined or filled in later are None. All rows fit into full batches."""
    dataset = make_rows(80, pool_size=10_000).remove_columns("negative")
    dataset = dataset.add_column("negative", [None] * 80)
    assert [len(batch) for batch in make_sampler(name, dataset)] == [8] * 10


def test_no_text_is_twice_in_a_batch():
    """A row that would repeat a text is moved to a later batch, not dropped."""
    dataset = make_rows(400, pool_size=300)
    texts_by_row = [{row["query"], row["positive"], row["negative"]} for row in dataset]
    batches = list(make_sampler("no_duplicates", dataset))
    for batch in batches:
        texts_of_batch: set[str] = set()
        for row in batch:
            # Only other rows count: a row may hold the same text in two columns.
            assert texts_of_batch.isdisjoint(texts_by_row[row])
            texts_of_batch |= texts_by_row[row]
    assert sorted(chain(*batches)) == list(range(400))
