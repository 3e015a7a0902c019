"""Batch samplers: seed and epoch determine the order, and every row is in one batch."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from contaccum.data.samplers import RESUMABLE_SAMPLERS


def rows(n: int, seed: int = 0, pool_size: int | None = None) -> Dataset:
    """Return queries, positives and negatives from one pool of texts, and a label column."""
    rng = np.random.default_rng(seed)
    pool = np.array([f"text {i}" for i in range(pool_size or 4 * n)], dtype=object)
    columns = {
        name: pool[rng.integers(0, len(pool), n)].tolist()
        for name in ("query", "positive", "negative")
    }
    return Dataset.from_dict({**columns, "label": [1] * n})


def make_sampler(
    name: str, dataset: Any, batch_size: int = 8, drop_last: bool = False, seed: int = 3
) -> Any:
    return RESUMABLE_SAMPLERS[name](
        dataset, batch_size, drop_last, valid_label_columns=["label"], seed=seed
    )


@pytest.mark.parametrize("name", RESUMABLE_SAMPLERS)
def test_the_order_depends_on_seed_and_epoch_alone(name):
    """Every row is in one batch of the epoch."""
    dataset = rows(203, pool_size=2000)
    sampler = make_sampler(name, dataset)
    same_sampler = make_sampler(name, dataset)
    orders = []
    for epoch in (2, 0, 1):  # not one after the other
        sampler.set_epoch(epoch)
        same_sampler.set_epoch(epoch)
        orders.append(list(sampler))
        assert orders[-1] == list(same_sampler) and len(orders[-1]) == len(sampler) == 26
        assert sorted(chain(*orders[-1])) == list(range(203))
    assert (
        len({str(order) for order in orders}) == 3
        and list(make_sampler(name, dataset, seed=4)) != orders[1]
    )
    dropping = make_sampler(name, dataset, drop_last=True)
    assert {len(batch) for batch in dropping} == {8} and len(list(dropping)) == len(dropping) == 25


@pytest.mark.parametrize("name", ["no_duplicates", "no_duplicates_hashed"])
def test_missing_negatives_are_no_duplicates(name):
    """Negatives that are mined or filled in later are None. All rows fit into full batches."""
    dataset = rows(80, pool_size=10_000).remove_columns("negative")
    dataset = dataset.add_column("negative", [None] * 80)
    assert [len(batch) for batch in make_sampler(name, dataset)] == [8] * 10


def test_no_text_is_twice_in_a_batch():
    """A row that would repeat a text is moved to a later batch, not dropped."""
    dataset = rows(400, pool_size=300)
    texts = list(zip(*(dataset[name] for name in ("query", "positive", "negative")), strict=True))
    batches = list(make_sampler("no_duplicates", dataset))
    for batch in batches:
        held = [text for row in batch for text in {*texts[row]}]
        assert len(held) == len({*held})
    assert sorted(chain(*batches)) == list(range(400))
