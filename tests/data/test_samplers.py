"""Batch samplers: orders that seed and epoch determine, every row once, and what a batch is asked to be."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from contaccum.data.samplers import RESUMABLE_SAMPLERS


def rows(n: int, seed: int = 0, different: int | None = None) -> Dataset:
    """Queries, positives and negatives drawn from one pool of texts, and a label that is no text."""
    rng = np.random.default_rng(seed)
    pool = np.array([f"text {i}" for i in range(different or 4 * n)], dtype=object)
    columns = {
        name: pool[rng.integers(0, len(pool), n)].tolist()
        for name in ("query", "positive", "negative")
    }
    return Dataset.from_dict({**columns, "label": [1] * n})


def made(
    name: str, dataset: Any, batch_size: int = 8, drop_last: bool = False, seed: int = 3
) -> Any:
    return RESUMABLE_SAMPLERS[name](
        dataset, batch_size, drop_last, valid_label_columns=["label"], seed=seed
    )


@pytest.mark.parametrize("name", RESUMABLE_SAMPLERS)
def test_an_order_is_a_function_of_seed_and_epoch_and_holds_every_row_once(name):
    dataset = rows(203, different=2000)
    one, other = made(name, dataset), made(name, dataset)
    orders = []
    for epoch in (2, 0, 1):  # not one after the other
        one.set_epoch(epoch)
        other.set_epoch(epoch)
        orders.append(list(one))
        assert orders[-1] == list(other) and len(orders[-1]) == len(one) == 26
        assert sorted(chain(*orders[-1])) == list(range(203))
    assert (
        len({str(order) for order in orders}) == 3
        and list(made(name, dataset, seed=4)) != orders[1]
    )
    dropping = made(name, dataset, drop_last=True)
    assert {len(batch) for batch in dropping} == {8} and len(list(dropping)) == len(dropping) == 25


def test_no_text_is_twice_in_a_batch_and_a_row_is_deferred_not_lost():
    dataset = rows(400, different=300)
    texts = list(zip(*(dataset[name] for name in ("query", "positive", "negative")), strict=True))
    batches = list(made("no_duplicates", dataset))
    for batch in batches:
        held = [text for row in batch for text in {*texts[row]}]
        assert len(held) == len({*held})
    assert sorted(chain(*batches)) == list(range(400))
